"""Show the memory of a plan: what the fullest rank of each call needs, by use, and the reserve."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.planner.memory.memory_check import MemoryCheck, Peak
from realhf.user_input.units import format_bytes

_COLUMNS = ("weights", "gradients", "optimizer", "cache", "activations", "reserve")
_ENDINGS = {
    "weights": "weights", "copy": "weights", "merged": "weights", "gradients": "gradients",
    "optimizer": "optimizer", "cache": "cache", "kv_cache": "cache", "communicators": "reserve",
    "context": "reserve", "staging": "reserve"}
"""The last word of a use -> its column; other uses are activations."""
_RESERVED = ("context", "staging")  # What of the reserve is in use.


def document(check: MemoryCheck) -> dict[str, Any]:
    """Return what every rank needs at its peak, and the fullest rank of each call, in bytes."""
    peaks = {
        str(rank): {"bytes": peak.num_bytes, "call": peak.call, "parts": dict(peak.bytes_by_use)}
        for rank, peak in check.peaks.items()}
    calls = {
        name: {"rank": peak.rank, "bytes": peak.num_bytes, "parts": dict(peak.bytes_by_use),
               "device_share": check.share(peak)}
        for name, peak in check.by_call.items()}
    return {
        "available_bytes": check.fullest.available, "device_bytes": check.fullest.device_bytes,
        "on_host": dict(check.on_host), "reserve": dict(check.fullest.reserve), "fits": check.fits,
        "peaks": peaks, "calls": calls}


def columns(check: MemoryCheck, peak: Peak) -> dict[str, float]:
    """Return the bytes of a rank in the columns of the table."""
    by_column = dict.fromkeys(_COLUMNS, 0.0)
    reserved = {name: check.fullest.reserve[name] for name in _RESERVED}
    for use, size in {**peak.bytes_by_use, **reserved}.items():
        column = _ENDINGS.get(use.split()[-1], "activations")
        if use in ("gradients", "optimizer"):  # Those that exist only while the call runs.
            column = "activations"
        by_column[column] += size
    return by_column


def render(check: MemoryCheck) -> Group:
    """Return the table for people, and the sentence about the reserve."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("GB of memory", "rank", *_COLUMNS, "total", "of device"):
        table.add_column(title, justify="left" if title == "GB of memory" else "right")
    for name, peak in check.by_call.items():
        sizes = columns(check, peak)
        shown = [_gigabytes(size) if size else "-" for size in (*sizes.values(), sum(sizes.values()))]
        table.add_row(name, str(peak.rank), *shown, f"{check.share(peak):.0%}")
    return Group(table, *map(Text, [reserve_sentence(check), *host_sentences(check)]))


def reserve_sentence(check: MemoryCheck) -> str:
    """Return what a device holds in reserve, and whether the plan keeps to it."""
    reserve = check.fullest.reserve
    fragmentation = reserve["fragmentation"]
    connected = max(peak.bytes_by_use.get("communicators", 0.0) for peak in check.peaks.values())
    sizes = {name: reserve[name] for name in _RESERVED} | {"communicators (about)": connected}
    parts = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size]
    share = fragmentation / check.fullest.device_bytes
    free = f"{format_bytes(fragmentation)} ({share:.0%}) stay free for fragmentation"
    sentence = f"reserve: {', '.join(parts)}; {free}"
    if check.is_tight:
        sentence += f"; the plan is tight, as rank {check.fullest.rank} uses a part of that"
    return sentence


def host_sentences(check: MemoryCheck) -> list[str]:
    """Return for each role whose optimizer is offloaded what it takes of the host's memory."""
    return [
        f"{role}'s optimizer is in host memory between steps: {format_bytes(size)} for a rank"
        for role, size in check.on_host.items()]


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size >= 1e7 else "<0.01"
