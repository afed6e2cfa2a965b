"""Finds the files that realhf ships (plans, cluster descriptions, model configs) by their short names."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def shipped_dir(kind: str) -> Path:
    """Directory of shipped files of a kind such as `plans` or `models`: in the wheel or the clone."""
    installed = _PACKAGE / "shipped" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def resolve(name: str, *, kind: str, suffix: str) -> Path:
    """Path of the file or directory that `name` means: a path, else the shipped `kind/name.suffix`.

    Raises ValueError that lists the shipped names when there is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    directory = shipped_dir(kind)
    for candidate in (directory / f"{name}{suffix}", directory / name):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(p.name.removesuffix(suffix) for p in directory.glob(f"*{suffix}"))) or "none"
    raise ValueError(f"{name!r} is neither a path nor a shipped name in {kind}; shipped are: {known}")
