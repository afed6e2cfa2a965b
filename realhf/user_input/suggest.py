"""Finds the name that a user probably meant."""

import difflib
from collections.abc import Sequence
from pathlib import Path


def did_you_mean(name: str, legal: Sequence[str]) -> str:
    """Return " (did you mean X?)" with the nearest of the legal names; an empty string if none is near."""
    near = nearest(name, legal)
    return f" (did you mean {near}?)" if near is not None else ""


def nearest(name: str, legal: Sequence[str]) -> str | None:
    """Return the nearest of the legal names; None if none is near."""
    by_form = {word.replace("_", "-"): word for word in legal}
    near = difflib.get_close_matches(name.replace("_", "-"), list(by_form), n=1)
    return by_form[near[0]] if near else None


def near_path(path: Path, *, suffixes: Sequence[str] = ()) -> Path | None:
    """Return the existing path that one which does not exist probably means; None if none is near.

    A mistake in one part of the path is found, also in that of a directory. With `suffixes` the path must end
    in one of them.
    """
    parts = path.parts
    for i, part in enumerate(parts):
        directory = Path(*parts[:i])
        if (directory / part).exists():
            continue
        try:
            names = [entry.name for entry in sorted(directory.iterdir())]
        except OSError:
            return None
        rest = parts[i + 1 :]
        if not rest and suffixes:
            names = [name for name in names if name.endswith(tuple(suffixes))]
        # Equal endings would make all names alike.
        by_stem = {Path(name).stem.lower(): name for name in reversed(names)}
        near = nearest(Path(part).stem.lower(), list(by_stem))
        likely = None if near is None else directory.joinpath(by_stem[near], *rest)
        return likely if likely is not None and likely.exists() else None
    return None


def near_path_words(path: Path, *, suffixes: Sequence[str] = ()) -> str:
    """Return " (did you mean PATH?)" with the existing path that is near; an empty string if none is."""
    near = near_path(path, suffixes=suffixes)
    return f" (did you mean {near}?)" if near is not None else ""


def near_options(name: str, options: Sequence[str], *, cutoff: float = 0.7) -> list[str]:
    """Return the options that a misspelt one probably is, the best first, at most three.

    Names are compared word by word, from their ends (`optimizer.lr` has the words `optimizer` and `lr`): long
    first words that are equal would hide that the last ones differ. Missing first words count a little.
    """
    if within := [option for option in options if option.startswith(f"{name}.")]:
        return within[:3]
    likeness_of = {option: _likeness(name.split("."), option.split(".")) for option in dict.fromkeys(options)}
    least = max([cutoff, *(likeness - 0.15 for likeness in likeness_of.values())])
    near = [option for option, likeness in likeness_of.items() if likeness >= least]
    return sorted(near, key=lambda option: -likeness_of[option])[:3]


def _likeness(name: Sequence[str], option: Sequence[str]) -> float:
    """Return from 0 to 1 how alike two names are in the word in which they differ most."""
    pairs = zip(reversed(name), reversed(option), strict=False)
    least = min(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
    return least - 0.05 * abs(len(name) - len(option))
