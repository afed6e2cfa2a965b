"""Finds prompts and completions in the forms that rows of conversations have. Imports no torch."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from realhf.data.dataset import DatasetConfig
from realhf.errors import UserError
from realhf.user_input.files import RepeatedKeyError, unique_keys

IS_WHOLE = "row/is_whole"
"""Column of rows that were one conversation or text, or two whole texts: what comes before the completion is
no prompt that somebody has written down. Its value is the name of the column that the row was."""
OTHER_PROMPT = "row/other_prompt"
"""Column of rows whose prompt is another than that with which both of its completions begin."""
IS_QUESTION = "row/is_question"
"""Column of rows whose prompt is what a conversation has up to the user's last message."""
_CONVERSATIONS = "conversations"
"""The usual column of conversations whose messages have `from` and `value`; TRL reads it as `messages`."""
_ANSWERS = re.compile(r"^\s*(?:Assistant|AI|Bot|Chatbot)\s*:", re.MULTILINE)
"""The beginning of an answer in a conversation that is one text."""
_ASKING = ("system", "developer", "user")
"""Roles whose messages belong to a prompt."""
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Who speaks in a message with `from` -> the role that chat templates know."""


def find_conversation(
    row: dict[str, Any], config: DatasetConfig, *, completions: Sequence[str], fills_nulls: bool
) -> None:
    """Give a row the columns of the prompt and of its completions, as far as they follow from others.

    `completions` are the columns that the graph reads: none, one, or the chosen and the rejected of a pair.
    Columns of JSON text are parsed. A file of Arrow `fills_nulls`: it gives each message and each schema the
    keys of all others, with null for those that they do not have. These keys are removed. Messages with
    `from` and `value` get role and content.
    """
    if config.messages_key not in row and isinstance(row.get(_CONVERSATIONS), list | str):
        row[config.messages_key] = row[_CONVERSATIONS]
    for column in (config.prompt_key, config.messages_key, *completions):
        if column in row:
            row[column] = _messages(row[column], fills_nulls=fills_nulls)
    if config.tools_key is not None and config.tools_key in row:
        row[config.tools_key] = _tools(row[config.tools_key], fills_nulls=fills_nulls)
    if len(completions) > 1:
        _find_pair(row, config.prompt_key, *completions)
    elif completions:
        _find_completion(row, config.prompt_key, completions[0], config.messages_key)
        _find_text(row, config.prompt_key, completions[0], config.text_key)
    elif config.prompt_key not in row:
        _find_question(row, config.prompt_key, config.messages_key)


def conversation_fault(
    row: dict[str, Any], config: DatasetConfig, *, completions: Sequence[str]
) -> str | None:
    """Return a sentence if messages leave nothing to learn, or cannot be continued, else None."""
    for column in completions:
        if fault := _weight_fault(row, column, config):
            return fault
    for column in completions if config.assistant_only else ():
        messages = row[column]
        if isinstance(messages, list) and all(message["role"] != "assistant" for message in messages):
            shown = row.get(IS_WHOLE, column)
            return f"{shown} has no message with the role assistant, so that nothing of it would be learned"
    prompt = row[config.prompt_key]
    if not prompt and row.get(IS_WHOLE) and isinstance(prompt, list):
        return f"{config.messages_key} has nothing before its only answer, so that there is no prompt"
    answers = [row[column] for column in completions] or [None]
    if isinstance(prompt, str) or row.get(IS_WHOLE) or prompt[-1].get("content") is not None:
        return None
    if not any(is_continued(prompt, answer) for answer in answers):
        return None
    return (
        f"{config.prompt_key} ends with an assistant's message that calls tools: "
        "it must end with what they return, or with a text that is continued")


def weight_of(message: dict[str, Any]) -> float:
    """Return how much the tokens of a message count in a loss: `weight`, or 0 if `train` is false."""
    if message.get("train") is False:
        return 0
    weight = message.get("weight")
    return 1 if weight is None else weight


def _weight_fault(row: dict[str, Any], column: str, config: DatasetConfig) -> str | None:
    """Return a sentence if a message has an illegal weight, or if all answers have the weight 0."""
    prompt = row[config.prompt_key]
    earlier = prompt if row.get(IS_WHOLE) and isinstance(prompt, list) else []
    if not isinstance(row[column], list):
        return None
    messages = [*earlier, *row[column]]
    for message in messages:
        for key, legal in (("weight", "a number from 0 on"), ("train", "true or false")):
            value = message.get(key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
            if value is not None and not (is_number if key == "weight" else isinstance(value, bool)):
                return f"{column} has a message whose {key} is {value!r}: it must be {legal}"
    answers = [weight_of(message) for message in messages if message["role"] == "assistant"]
    if config.assistant_only and answers and not any(answers):
        where = row.get(IS_WHOLE, column)
        return f"all answers in {where} have the weight 0, so that nothing would be learned"
    return None


def pair_fault(row: dict[str, Any], prompt_key: str, chosen_key: str, rejected_key: str) -> str | None:
    """Return a sentence if the completions of a pair answer different prompts, else None."""
    sides: tuple[Any, Any] = (row.get(chosen_key), row.get(rejected_key))
    names = f"{chosen_key} and {rejected_key}"
    if all(map(_are_messages, sides)):
        chosen, rejected = sides[0][0], sides[1][0]
        if chosen != rejected and (chosen["role"] in _ASKING or rejected["role"] in _ASKING):
            begin = "go on" if isinstance(row.get(prompt_key), list) and row[prompt_key] else "begin"
            return (
                f"{names} are conversations that {begin} with different messages of {chosen['role']} and "
                f"{rejected['role']}: both must have the same prompt")
    elif prompt_key not in row and all(isinstance(side, str) for side in sides):
        return (
            f"{names} are texts with different beginnings, so that they have no prompt in common: give it in "
            f"a column {prompt_key!r}")
    elif row.get(IS_WHOLE) and not _ANSWERS.search(row[prompt_key]) and all(map(_ANSWERS.search, sides)):
        return (
            f"{names} are texts that ask different questions before their first answer: both must have the "
            "same prompt")
    return None


def is_continued(prompt: list[dict[str, Any]], completion: Any) -> bool:
    """Return whether an answer goes on with the last message of the prompt instead of a message of its own.

    `completion` is the answer, or None if it is not known.
    """
    is_open = bool(prompt) and prompt[-1]["role"] == "assistant"
    return is_open and (not isinstance(completion, list) or completion[0]["role"] == "assistant")


def as_messages(completion: Any) -> Any:
    """Return a completion of a chat as messages; one that is text is what the assistant says."""
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def texts_of(side: Any) -> Iterator[str]:
    """Yield a text, or what the messages of a chat say."""
    if isinstance(side, str):
        yield side
        return
    for message in side if isinstance(side, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]


def joined(prompt: list[dict[str, Any]], completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation of a prompt and a completion, which may continue the prompt's last message."""
    if not is_continued(prompt, completion):
        return [*prompt, *completion]
    *before, opened = prompt
    first, *rest = completion
    contents: list[Any] = [opened.get("content"), first.get("content")]
    if all(isinstance(content, str) for content in contents):
        content: Any = "".join(contents)
    else:
        parts = [[{"type": "text", "text": c}] if isinstance(c, str) else c or [] for c in contents]
        content = [part for parts_of_one in parts for part in parts_of_one]
    return [*before, {**opened, **first, "content": content}, *rest]


def _messages(value: Any, *, fills_nulls: bool) -> Any:
    """Return messages without keys that are null, parsed if they are JSON text; other values as they are."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = _parsed(value)
        if isinstance(parsed, dict) and {"role", "content"} <= parsed.keys():
            parsed = [parsed]
        value = _unique(value, parsed) if _are_messages(parsed) else value
    if not isinstance(value, list):
        return value
    value = [_with_role(message) for message in value]
    if fills_nulls:
        return _without_nulls(value)
    return [
        {key: entry for key, entry in message.items() if entry is not None}
        if isinstance(message, dict) else message for message in value]


def _with_role(message: Any) -> Any:
    """Return a message with role and content instead of `from` and `value`, as TRL's maybe_convert_to_chatml;
    the names of speakers that no chat template knows become roles."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    known = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    others = {key: entry for key, entry in message.items() if key not in ("from", "value")}
    return {**others, "role": known, "content": message["value"]}


def _tools(value: Any, *, fills_nulls: bool) -> Any:
    if isinstance(value, str):
        value = _unique(value, _parsed(value))
    return _without_nulls(value) if fills_nulls else value


def _parsed(text: str) -> Any:
    """Return the value of a text in JSON or as Python shows it, as columns of CSV have it; else the text."""
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return parse(text)
    return text


def _unique(text: str, parsed: Any) -> Any:
    """Return the value of a text in JSON. Raises UserError if an object in it has a key twice."""
    try:
        with suppress(ValueError, RecursionError):
            json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise UserError(f"a column of JSON text has an object that has {error}") from error
    return parsed


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(message, dict) and ("role" in message or {"from", "value"} <= message.keys())
        for message in value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _find_completion(row: dict[str, Any], prompt_key: str, completion_key: str, messages_key: str) -> None:
    """Take prompt and completion from a whole conversation: the last answer begins the completion."""
    messages = row.get(messages_key)
    if completion_key not in row and isinstance(messages, list) and messages:
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        last = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else len(roles) - 1
        row[prompt_key] = messages[:last]
        row[completion_key] = messages[last:]
        row[IS_WHOLE] = messages_key
    elif (prompt := row.get(prompt_key)) and _begins_with(row.get(completion_key), prompt):
        row[completion_key] = row[completion_key][len(prompt) :]


def _find_text(row: dict[str, Any], prompt_key: str, completion_key: str, text_key: str) -> None:
    """Let a row that is one text be a completion without a prompt, so that the whole text is learned."""
    if completion_key not in row and prompt_key not in row and isinstance(row.get(text_key), str):
        row[prompt_key] = ""
        row[completion_key] = row[text_key]
        row[IS_WHOLE] = text_key


def _find_question(row: dict[str, Any], prompt_key: str, messages_key: str) -> None:
    """Take the prompt from a conversation: the messages up to the user's last one."""
    messages = row.get(messages_key)
    if isinstance(messages, list) and _are_messages(messages):
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if last >= 0:
            row[prompt_key] = messages[: last + 1]
            row[IS_QUESTION] = True


def _find_pair(row: dict[str, Any], prompt_key: str, chosen_key: str, rejected_key: str) -> None:
    """Take the prompt from what chosen and rejected have in common, if they are whole conversations.

    Two texts without a prompt share their first characters, as in TRL.
    """
    pair: tuple[Any, Any] = (row.get(chosen_key), row.get(rejected_key))
    prompt = row.get(prompt_key)
    if all(map(_are_messages, pair)):
        if isinstance(prompt, list):
            shared = len(prompt) if all(_begins_with(side, prompt) for side in pair) else 0
        else:
            shared = _num_shared(*pair)
    elif all(isinstance(side, str) for side in pair) and prompt is None:
        shared = _num_shared(*pair)
        if shared and pair[0][shared - 1] == " ":  # The space belongs to the word that follows.
            shared -= 1
        row[IS_WHOLE] = chosen_key
    else:
        return
    if shared:
        common = pair[0][:shared]
        if prompt is not None and not _is_said(prompt, common):
            row[OTHER_PROMPT] = True
        row[prompt_key] = common
        row[chosen_key] = pair[0][shared:]
        row[rejected_key] = pair[1][shared:]


def _begins_with(messages: Any, prompt: Any) -> bool:
    """Return whether a completion of messages repeats the whole prompt."""
    both = isinstance(messages, list) and isinstance(prompt, list)
    return both and len(messages) > len(prompt) > 0 and messages[: len(prompt)] == prompt


def _is_said(prompt: Any, messages: Any) -> bool:
    """Return whether messages say what a prompt says that is text, white space aside."""
    said = " ".join(" ".join(texts_of(messages)).split())
    return not isinstance(prompt, str) or " ".join(prompt.split()) in said


def _num_shared(chosen: Any, rejected: Any) -> int:
    """Return how many entries two sequences begin with in common, leaving at least one of each."""
    limit = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(limit) if chosen[i] != rejected[i]), max(0, limit))
