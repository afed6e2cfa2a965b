"""The bytes that each token adds to a text, and the tokens of words. Imports no torch."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from realhf.data.light_tokenizer import LightTokenizer, continuation

_ANCHOR = "abcdef"
"""A text that stands before each token to decode, because the first token of a text may lose its space."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=4)
def token_bytes(tokenizer: str) -> tuple[bytes, ...]:
    """Return, by token id, the bytes that a token adds to a text in which it is not the first token.

    Special tokens add their own text. Raises ValueError if the tokenizer's files cannot be read.
    """
    backend = LightTokenizer(tokenizer).backend
    vocabulary = backend.get_vocab(with_added_tokens=True)
    bytes_of_id = [b""] * (max(vocabulary.values(), default=-1) + 1)
    kinds = set(_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else set()
    if "ByteLevel" in kinds and "ByteFallback" not in kinds:
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        for token, number in vocabulary.items():
            is_mapped = all(character in byte_of for character in token)
            bytes_of_id[number] = bytes(map(byte_of.__getitem__, token)) if is_mapped else token.encode()
        return tuple(bytes_of_id)
    before = backend.encode(_ANCHOR, add_special_tokens=False).ids
    numbers = list(vocabulary.values())
    texts = backend.decode_batch([[*before, number] for number in numbers], skip_special_tokens=False)
    start = len(backend.decode(before, skip_special_tokens=False))
    for token, number, text in zip(vocabulary, numbers, texts, strict=True):
        match = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
        bytes_of_id[number] = text[start:].encode() if match is None else bytes([int(match[1], 16)])
    return tuple(bytes_of_id)


@lru_cache(maxsize=16)
def word_tokens(tokenizer: str, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, without and with a space before it.

    Raises ValueError if the tokenizer's files cannot be read, or if it makes no tokens of a word.
    """
    if not words:
        return ()
    light = LightTokenizer(tokenizer)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            tokens = tuple(continuation(light, text))
            if not tokens:
                raise ValueError(f"sampling.bad_words has {word!r}, of which the tokenizer makes no tokens")
            sequences[tokens] = None
    return tuple(sequences)


def _kinds(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder and of its parts."""
    if isinstance(decoder, dict):
        if isinstance(decoder.get("type"), str):
            yield decoder["type"]
        for value in decoder.values():
            yield from _kinds(value)
    elif isinstance(decoder, list):
        for value in decoder:
            yield from _kinds(value)


def _byte_characters() -> list[str]:
    """Return the characters that stand for the bytes 0 to 255 in byte-level vocabularies (GPT-2).

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
