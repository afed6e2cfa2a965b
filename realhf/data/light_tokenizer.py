"""LightTokenizer: a tokenizer that loads quickly, for checks. Imports no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


_OF_ADDED_TOKENS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ANCHORS = ("\n", "a", "=")
"""Texts before one that goes on from another; it must not share a token with at least one of them."""


class LightTokenizer:
    """A tokenizer.json with its chat template.

    It tokenises like transformers, which runs use, except that it may add or omit special tokens.
    """

    def __init__(self, directory: str) -> None:
        from tokenizers import Tokenizer  # Imported here, as only checks need it.

        path = Path(directory)
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # The library has no more specific class.
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        # The file may ask for both, but transformers pads and cuts a text only if it is told to.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _settings(path)
        self._tokenizer.add_tokens(_added_tokens(settings, self._tokenizer))
        self._special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name)}
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
        return max(self._tokenizer.get_vocab().values())

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.token_to_id(self._special.get("eos_token", ""))

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

    def get_chat_template(self, *, tools: list[Any] | None = None) -> str | None:
        """Return the chat template, for chats with tools that of its own if there is one."""
        return self.chat_template if tools is None else self._tool_template or self.chat_template

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None,
        add_generation_prompt: bool = False, continue_final_message: bool = False, tokenize: bool = True,
        return_dict: bool = True, return_assistant_tokens_mask: bool = False, **arguments: Any,
    ) -> Any:
        """Return the text of a chat or its tokens; `arguments` are further ones of the template.

        With `return_assistant_tokens_mask` and `return_dict` there is a mask of the tokens that the template
        writes between {% generation %} and {% endgeneration %}, too.
        """
        # Imported here, as it is slow and only chats need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [
            {key: value for key, value in message.items() if value is not None} for message in messages]
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=self.get_chat_template(tools=tools),
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            return_assistant_tokens_mask=return_assistant_tokens_mask, **{**self._special, **arguments})
        (text,), spans = rendered
        if not tokenize:
            return text
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if not return_dict:
            return encoding.ids
        mask = [0] * len(encoding.ids)
        for start, stop in spans[0] if spans else ():
            if (first := encoding.char_to_token(start)) is not None:
                last = encoding.char_to_token(stop - 1) if stop > start else first - 1
                stop_token = len(mask) if last is None else last + 1
                mask[first:stop_token] = [1] * max(0, stop_token - first)
        return {"input_ids": encoding.ids, "assistant_masks": mask}


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
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def _added_tokens(settings: dict[str, Any], tokenizer: Any) -> list[Any]:
    """Return the tokens that transformers adds: those of the settings that tokenizer.json does not have."""
    from tokenizers import AddedToken

    by_id = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0]))
    tokens = [token for _, token in by_id]
    tokens += [settings[name] for name in _SPECIAL if settings.get(name)]
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    added = []
    for token in tokens:
        fields = token if isinstance(token, dict) else {"content": token, "special": True}
        if fields["content"] not in known:
            shape = {name: fields[name] for name in _OF_ADDED_TOKENS if name in fields}
            added.append(AddedToken(fields["content"], **shape))
            known.add(fields["content"])
    return added


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def has_chat_template(directory: Path) -> bool:
    """Return whether the tokenizer in a directory has a chat template."""
    return _chat_template(directory, _json_of(directory / "tokenizer_config.json"), "default") is not None


def named_token(directory: Path, name: str) -> str | None:
    """Return the text of a special token that a tokenizer's settings name, such as `pad_token`."""
    token = _settings(directory).get(name)
    return _content(token) if token else None


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
    if file.is_file():
        return file.read_text()
    template = _json_of(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # There are several templates, each with a name.
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get(name)
    return template if name == "default" else None
