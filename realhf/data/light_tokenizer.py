"""LightTokenizer: a tokenizer that loads quickly, for checks. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.user_input.files import read_object, read_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


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
        settings = _json_of(path / "special_tokens_map.json") | _json_of(path / "tokenizer_config.json")
        self._special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name)}
        self.chat_template = _chat_template(path, settings, "default")
        self._tool_template = _chat_template(path, settings, "tool_use")

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`."""
        return self._tokenizer

    @property
    def largest_id(self) -> int:
        return max(self._tokenizer.get_vocab().values())

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.token_to_id(self._special.get("eos_token", ""))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None,
        add_generation_prompt: bool = False, return_dict: bool = True, **arguments: Any,
    ) -> list[int]:
        """Return the tokens of a chat; `arguments` are further ones of the template."""
        # Imported here, as it is slow and only chats need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.chat_template if tools is None else self._tool_template or self.chat_template
        rendered = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt,
            **{**self._special, **arguments})
        return self.encode(rendered[0][0], add_special_tokens=False)


def unknown_token_id(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's token for unknown text; None if there is none, or if it is eos, too.

    `tokenizer` is a LightTokenizer or one of transformers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "backend", None)
    token = getattr(getattr(backend, "model", None), "unk_token", None)
    token_id = None if backend is None or token is None else backend.token_to_id(token)
    return None if token_id == tokenizer.eos_token_id else token_id


def _json_of(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def has_chat_template(directory: Path) -> bool:
    """Return whether the tokenizer in a directory has a chat template."""
    return _chat_template(directory, _json_of(directory / "tokenizer_config.json"), "default") is not None


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
    if isinstance(template, list):  # There are several templates, each with a name.
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get(name)
    return template if name == "default" else None
