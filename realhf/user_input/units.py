"""Parses and formats quantities with units: `80 GB`, `400 Gbit/s`, `5 us`, `989 TFLOP/s`."""

import re

from realhf.errors import shown

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
_BYTES |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS = {
    "bytes": _BYTES,
    "bytes_per_second": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "flops": {f"{prefix}FLOP/s": factor for prefix, factor in _PREFIXES.items()},
}


def parse(name: str, value: object, *, of: str) -> float:
    """Return the value of a field as a number: itself, or the number with or without a unit in its text.

    `of` is `bytes`, `bytes_per_second`, `seconds` or `flops`. Raises ValueError about other text.
    """
    if not isinstance(value, str):
        return value  # type: ignore[return-value]  # The caller checks whether it is a number.
    match = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*", value)
    factor = {"": 1.0, **_UNITS[of]}.get(match[2]) if match else None
    if match is None or factor is None:
        legal = ", ".join(_UNITS[of])
        raise ValueError(f"{name} is {shown(value)}: it must be a number, or one with a unit of {legal}")
    return float(match[1]) * factor


def format_bytes(number: float) -> str:
    """Format with three digits: `80 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def format_seconds(number: float) -> str:
    for unit in ("s", "ms"):
        if number >= 1 or not number:
            return f"{number:.3g} {unit}"
        number *= 1000
    return f"{number:.3g} us"
