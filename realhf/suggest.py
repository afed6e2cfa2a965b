"""Finds the name that a user probably meant."""

import difflib
from collections.abc import Sequence


def did_you_mean(name: str, legal: Sequence[str]) -> str:
    """Return " (did you mean X?)" with the nearest of the legal names; an empty string if none is near."""
    near = difflib.get_close_matches(name.replace("_", "-"), [word.replace("_", "-") for word in legal], n=1)
    by_form = {word.replace("_", "-"): word for word in legal}
    return f" (did you mean {by_form[near[0]]}?)" if near else ""
