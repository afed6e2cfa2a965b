"""Compares the vocabularies of two tokenizers. Imports no torch."""

import filecmp
from functools import lru_cache
from pathlib import Path

from realhf.user_input.files import MAX_TABLE_BYTES, read_object


def first_difference(ours: Path, theirs: Path) -> tuple[int, str, str] | None:
    """Return the first id that two tokenizer.json files assign to different tokens, and both tokens.

    Added tokens, such as the padding token, and the sizes of the vocabularies may differ.
    """
    if ours.samefile(theirs) or filecmp.cmp(ours, theirs, shallow=False):
        return None
    here, there = _vocabulary(ours), _vocabulary(theirs)
    for number in sorted(here.keys() & there.keys()):
        if here[number] != there[number]:
            return number, here[number], there[number]
    return None


@lru_cache(maxsize=8)
def _vocabulary(path: Path) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by id, without added tokens.

    Raises ValueError, which names the file, if it is malformed.
    """
    content = read_object(path, most=MAX_TABLE_BYTES)
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # It has pairs of a token and its score.
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["id"] for token in content.get("added_tokens") or ()}
        return {number: token for token, number in vocabulary.items() if number not in added}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no tokenizer.json: {type(error).__name__}: {error}") from error
