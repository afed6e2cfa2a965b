"""Compares the vocabularies of two tokenizers. Imports no torch."""

import filecmp
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from realhf.data.light_tokenizer import is_written, named_token
from realhf.user_input.files import MAX_TABLE_BYTES, read_object


def first_difference(ours: Path, theirs: Path) -> tuple[int, str, str | None] | None:
    """Return the first id that two tokenizer.json files assign to different tokens, and both tokens.

    The second token is None if the other file does not have this id, but our token at another one. Added
    tokens may differ where no text has them: the padding token, reserved ones, and more or fewer of them. One
    that both files have must have the same id, and where we write one ourselves (to begin and to end texts,
    and in chats) there must be no other.
    """
    if ours.samefile(theirs) or filecmp.cmp(ours, theirs, shallow=False):
        return None
    here, there = _vocabulary(ours), _vocabulary(theirs)
    for number in sorted(here.tokens.keys() & there.tokens.keys()):
        if here.tokens[number] != there.tokens[number]:
            return number, here.tokens[number], there.tokens[number]
    ids_there = {token: number for number, token in there.all.items()}
    padding = named_token(ours.parent, "pad_token")
    for number, token in sorted(here.added.items()):
        wrote = is_written(token, ours.parent)
        is_moved = ids_there.get(token, number) != number and (wrote or token != padding)
        if is_moved or (wrote and there.all.get(number, token) != token):
            return number, token, there.all.get(number)
    return None


class _Vocabulary(NamedTuple):
    tokens: dict[int, str]
    """The tokens by id, without added ones."""
    added: dict[int, str]

    @property
    def all(self) -> dict[int, str]:
        return self.tokens | self.added


@lru_cache(maxsize=8)
def _vocabulary(path: Path) -> _Vocabulary:
    """Return the tokens of a tokenizer.json by id.

    Raises ValueError, which names the file, if it is malformed.
    """
    content = read_object(path, most=MAX_TABLE_BYTES)
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # It has pairs of a token and its score.
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        tokens = {number: token for token, number in vocabulary.items() if number not in added}
        return _Vocabulary(tokens, added)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no tokenizer.json: {type(error).__name__}: {error}") from error
