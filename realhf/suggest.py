"""Finds the name that a user probably meant."""

import difflib
from collections.abc import Sequence


def did_you_mean(name: str, legal: Sequence[str]) -> str:
    """Return " (did you mean X?)" with the nearest of the legal names; an empty string if none is near."""
    near = nearest(name, legal)
    return f" (did you mean {near}?)" if near is not None else ""


def nearest(name: str, legal: Sequence[str]) -> str | None:
    """Return the nearest of the legal names; None if none is near."""
    by_form = {word.replace("_", "-"): word for word in legal}
    near = difflib.get_close_matches(name.replace("_", "-"), list(by_form), n=1)
    return by_form[near[0]] if near else None
