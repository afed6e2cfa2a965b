"""Finds what is wrong with a prompt, a completion or a list of tools, in words. Imports no torch."""

import json
from typing import Any

_CHAT = "a list of chat messages such as [{\"role\": \"user\", \"content\": \"...\"}]"


def fault_of(column: str, value: Any, *, prompt: Any = None) -> str | None:
    """Return a sentence if a prompt, or a completion of `prompt`, cannot be used, else None."""
    if isinstance(value, str):
        return _text_fault(column, value)
    if not isinstance(value, list):
        return f"{column} is {_shown(value)}: it must be text, or {_CHAT}"
    if isinstance(prompt, str):
        return f"{column} is a list of chat messages, but the prompt is text: both must be messages"
    return _chat_fault(column, value)


def tools_fault(column: str, value: Any) -> str | None:
    """Return a sentence if a row's tools are no JSON schemas, else None."""
    if value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return None
    return f"{column} is {_shown(value)}: it must be null, or a list of JSON schemas"


def _text_fault(column: str, text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{column} has half of a character at position {error.start}: no text has a lone surrogate"
    return None


def _chat_fault(column: str, messages: list[Any]) -> str | None:
    if not messages:
        return f"{column} is an empty list: it must be text, or {_CHAT}"
    for message in messages:
        if not isinstance(message, dict):
            return f"{column} has the message {_shown(message)}: it must be {_CHAT}"
        if not isinstance(message.get("role"), str):
            hint = " (rename `from` to role and `value` to content)" if "from" in message else ""
            fields = ", ".join(message) or "nothing"
            return f"{column} has a message with {fields}: it must have role and content{hint}"
        content = message.get("content")
        if isinstance(content, str) and (fault := _text_fault(column, content)):
            return fault
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"{column} has a message whose content is {_shown(content)}: it must be text"
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
