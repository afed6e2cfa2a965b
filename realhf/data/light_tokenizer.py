"""LightTokenizer: a tokenizer that loads quickly, for checks. Imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realhf.data.tokenizer_process import read_tokenizer
from realhf.errors import UserError
from realhf.user_input.files import read_object, read_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


_OF_ADDED_TOKENS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ANCHORS = ("\n", "a", "=")
"""Texts before one that goes on from another; it must not share a token with at least one of them."""


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
        """Return the template of chats without or with tools."""
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
    for anchor in _ANCHORS:
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
    """Return whether the tokenizer in a directory has a chat template."""
    return _chat_template(directory, _settings(directory), "default") is not None


def chat_template_of(directory: str) -> str | None:
    """Return the chat template of the tokenizer in a directory, or None."""
    return _chat_template(Path(directory), _settings(Path(directory)), "default")


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
