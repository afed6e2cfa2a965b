"""LightTokenizer: a tokenizer that loads quickly, for checks. Imports no torch.

Also tells what every token adds to a text, and whether two tokenizers have the same vocabulary.
"""

import filecmp
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from realhf.data.tokenizer_process import read_tokenizer
from realhf.errors import UserError
from realhf.user_input.files import MAX_TABLE_BYTES, read_object, read_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_OF_ADDED_TOKENS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_BEGINNINGS = ("\n", "a", "=")
"""Texts before one that goes on from another; it must not share a token with at least one of them."""
_BEFORE_TOKEN = "abcdef"
"""A text that stands before each token to decode, because the first token of a text may lose its space."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class LightTokenizer:
    """A tokenizer.json with its chat template.

    It tokenises like transformers, which runs use, except that it may add or omit special tokens.
    """

    def __init__(self, directory: str) -> None:
        path = Path(directory)
        self._tokenizer = read_tokenizer(path / "tokenizer.json")
        settings = _settings(path)
        where = str(path / "tokenizer_config.json")
        self._tokenizer.add_tokens(_added_tokens(settings, self._tokenizer, where))
        self.special_tokens_map = {
            name: _content(settings[name], f"{where}: {name}") for name in _SPECIAL if settings.get(name)}
        self.chat_template = _chat_template(path, settings, "default")
        self._tool_template = _chat_template(path, settings, "tool_use")
        self.response_template = settings.get("response_template")
        """How transformers parses what the model says, as JSON; None: the tokenizer does not say so."""

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`."""
        return self._tokenizer

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Token id -> AddedToken of the library, for the tokens that are found before a text is split."""
        return self._tokenizer.get_added_tokens_decoder()

    @property
    def largest_id(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1)

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.token_to_id(self.special_tokens_map.get("eos_token", ""))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        """Return the tokens of a text, and for each of them the range of its characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def get_chat_template(self, *, tools: Sequence[Any] | None = None) -> str | None:
        return self.chat_template if tools is None else self._tool_template or self.chat_template


class TokenizerPanicError(UserError):
    """The library `tokenizers` has failed in a way that it does not expect."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of Rust in the `with` block, which is no Exception, into a TokenizerPanicError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerPanicError(f"the library tokenizers has failed: {error}") from error


def continuation(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that goes on from another.

    Some tokenizers, such as Llama 2's, put a space before a text that they get alone. `tokenizer` is a
    LightTokenizer or one of transformers.
    """
    for anchor in _BEGINNINGS:
        before = tokenizer.encode(anchor, add_special_tokens=False)
        ids = tokenizer.encode(anchor + text, add_special_tokens=False)
        if ids[: len(before)] == before:
            return list(ids[len(before) :])
    return list(tokenizer.encode(text, add_special_tokens=False))


def unknown_token_id(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's token for unknown text; None if there is none, or if it is eos, too.

    `tokenizer` is a LightTokenizer or one of transformers.
    """
    backend = _backend(tokenizer)
    token = getattr(getattr(backend, "model", None), "unk_token", None)
    token_id = None if backend is None or token is None else backend.token_to_id(token)
    return None if token_id == tokenizer.eos_token_id else token_id


def normalized(tokenizer: Any, text: str) -> str:
    """Return what a tokenizer makes of a text before it splits it, such as small letters.

    `tokenizer` is a LightTokenizer or one of transformers.
    """
    normalizer = getattr(_backend(tokenizer), "normalizer", None)
    return text if normalizer is None else normalizer.normalize_str(text)


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of special tokens, which a decoded text without special tokens lacks.

    `tokenizer` is a LightTokenizer or one of transformers.
    """
    backend = _backend(tokenizer)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    return [token.content for _, token in sorted(added.items()) if token.special]


def _backend(tokenizer: Any) -> Any:
    """Return the tokenizer of the library `tokenizers`; None if it has none."""
    return getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "backend", None)


def _json_of(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _added_tokens(settings: dict[str, Any], tokenizer: Any, where: str) -> list[Any]:
    """Return the tokens that transformers adds: those of the settings that tokenizer.json does not have.

    Raises UserError, which begins with `where`, if the settings name something else than tokens.
    """
    from tokenizers import AddedToken

    try:
        by_id = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0]))
    except (AttributeError, ValueError) as error:
        raise UserError(f"{where}: added_tokens_decoder must map ids to tokens") from error
    tokens = [token for _, token in by_id]
    tokens += [settings[name] for name in _SPECIAL if settings.get(name)]
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    added = []
    for token in tokens:
        content = _content(token, f"{where}: {str(token)[:80]!r}")
        if content not in known:
            fields = token if isinstance(token, dict) else {"special": True}
            shape = {name: bool(fields[name]) for name in _OF_ADDED_TOKENS if name in fields}
            added.append(AddedToken(content, **shape))
            known.add(content)
    return added


def _content(token: Any, where: str) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise UserError(f"{where} is no token: it must be text, or an object with its content")
    return content


def has_chat_template(directory: Path) -> bool:
    return _chat_template(directory, _settings(directory), "default") is not None


def chat_template_of(directory: str) -> str | None:
    return _chat_template(Path(directory), _settings(Path(directory)), "default")


def files_of_templates(directory: str) -> dict[str, str]:
    """Return the chat template of each file of a directory that has one, the file that is read first."""
    path = Path(directory)
    found: dict[str, str] = {}
    if (path / "chat_template.jinja").exists():
        found["chat_template.jinja"] = read_text(path / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _json_of(path / name).get("chat_template")
        for entry in template if isinstance(template, list) else [{"name": "default", "template": template}]:
            if isinstance(entry, dict) and entry.get("name") == "default" and entry.get("template"):
                found[name] = str(entry["template"])
    return found


def named_token(directory: Path, name: str) -> str | None:
    """Return the text of a special token that a tokenizer's settings name, such as `pad_token`."""
    token = _settings(directory).get(name)
    return _content(token, f"{directory}: {name}") if token else None


def is_written(token: str, directory: Path) -> bool:
    """Return whether a tokenizer writes a special token itself: bos, eos, or one of its chat template."""
    templates = [_chat_template(directory, _settings(directory), name) for name in ("default", "tool_use")]
    named = [named_token(directory, name) for name in ("bos_token", "eos_token")]
    return token in named or any(token in template for template in templates if template)


def _settings(directory: Path) -> dict[str, Any]:
    return _json_of(directory / "special_tokens_map.json") | _json_of(directory / "tokenizer_config.json")


def _chat_template(directory: Path, settings: dict[str, Any], name: str) -> str | None:
    """Return the chat template of a name, from its own file if there is one, else from tokenizer_config.json.

    A template without a name is the default one.
    """
    file = directory / "chat_template.jinja"
    if name != "default":
        file = directory / "additional_chat_templates" / f"{name}.jinja"
    if file.exists():
        return read_text(file)
    template = _json_of(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    for entry in named:  # There may be several templates, each with a name.
        if isinstance(entry, dict) and entry.get("name") == name:
            if not isinstance(entry.get("template"), str | None):
                raise UserError(f"{directory}: the chat template {name!r} must be text")
            return entry.get("template")
    return None


def first_differing_token(ours: Path, theirs: Path) -> tuple[int, str, str | None] | None:
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
    before = backend.encode(_BEFORE_TOKEN, add_special_tokens=False).ids
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
