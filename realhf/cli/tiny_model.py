"""Makes the files of a tiny model for given rows: a config, and a tokenizer of single characters."""

import json
from collections.abc import Mapping, Sequence
from string import ascii_letters, digits
from typing import Any, NamedTuple

from realhf.data.conversations import find_conversation
from realhf.data.dataset import DatasetConfig, read_rows
from realhf.errors import UserError

_COLUMNS = {"grpo": (), "sft": ("completion",), "dpo": ("chosen", "rejected")}
"""Template -> the columns of completions that its experiment reads."""
_MOST_ROWS = 100_000
"""Rows whose characters are counted."""
_LONGEST_ANSWER = 256
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
_OF_TEMPLATE = ascii_letters + ": \n"
"""Characters that the chat template writes, whatever the roles are."""


class TinyModel(NamedTuple):
    """The files of a model by name, and how many tokens the longest answer of the rows has."""

    files: dict[str, str]
    longest_answer: int


def tiny_model(
    data: str, *, template: str, prompt_key: str, answer_key: str, files: Mapping[str, str]
) -> TinyModel:
    """Return a model like that of `files`, whose tokenizer knows the characters of these rows.

    Rows of the template `grpo` must have a column `answer_key`.

    Raises UserError if there are no such rows, or if they lack a column that the template reads.
    """
    config = DatasetConfig(data, max_rows=_MOST_ROWS, prompt_key=prompt_key)
    completions = _COLUMNS.get(template, ())
    try:
        rows = read_rows(config)
    except ValueError as error:
        raise UserError(f"--data{str(error).removeprefix('dataset').removeprefix('.path')}") from error
    for row in rows:
        find_conversation(row, config, completions=completions, fills_nulls=data.endswith(".parquet"))
    options = {prompt_key: "prompts with --prompt-key"}
    if template == "grpo":
        options[answer_key] = "answers with --answer-key"
    for column in (*options, *completions):
        if lacking := [number for number, row in enumerate(rows, start=1) if column not in row]:
            way_on = f": name the column of the {options[column]}" if column in options else ""
            raise UserError(
                f"--data {data}: --template {template} reads a column {column!r}, "
                f"and row {lacking[0]} has {', '.join(rows[lacking[0] - 1])}{way_on}")
    answered = (answer_key, *(column for columns in _COLUMNS.values() for column in columns))
    texts = [[_text(row[column]) for column in (prompt_key, *answered) if column in row] for row in rows]
    longest = max(sum(map(len, row)) for row in texts)
    answers = [len(_text(row[column])) for row in rows for column in answered if column in row]
    is_chat = any(not isinstance(row[prompt_key], str) for row in rows)
    new_tokens = min(max(answers, default=0) + 1, _LONGEST_ANSWER)
    characters = {c for row in texts for text in row for c in text} | set(digits)
    vocabulary = (*_SPECIAL, *sorted(characters | set(_OF_TEMPLATE if is_chat else "")))
    fields = json.loads(files["model/config.json"]) | {
        "vocab_size": len(vocabulary), "max_position_embeddings": max(64, longest + new_tokens + 64)}
    settings = json.loads(files["model/tokenizer_config.json"]) | {"unk_token": "<unk>"}
    if is_chat:
        settings["chat_template"] = _CHAT_TEMPLATE
    tokenizer = _tokenizer(json.loads(files["model/tokenizer.json"]), vocabulary)
    contents = {"config": fields, "tokenizer_config": settings, "tokenizer": tokenizer}
    return TinyModel({f"model/{name}.json": _json(content) for name, content in contents.items()}, new_tokens)


def _tokenizer(content: dict[str, Any], vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return a tokenizer.json with another vocabulary of characters."""
    added = content["added_tokens"][0]
    content["added_tokens"] = [added | {"id": i, "content": name} for i, name in enumerate(_SPECIAL)]
    content["pre_tokenizer"]["pattern"] = {"Regex": r"[\s\S]"}  # Line ends are characters, too.
    content["model"] |= {"vocab": {name: i for i, name in enumerate(vocabulary)}, "unk_token": "<unk>"}
    return content


def _text(value: Any) -> str:
    """Return a text, the messages of a chat as the chat template writes them, or another value as text."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "".join(f"{message.get('role')}: {message.get('content')}\n" for message in value)
    return str(value)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
