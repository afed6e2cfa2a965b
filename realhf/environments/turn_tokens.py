"""The tokens of conversations in several turns, without encoding again what the model has sampled.

A row of tokens is the start that the chat template writes, then in turns what the model samples and what the
template adds for the environment's messages. `TurnTokens` makes these, and `prove_append_only` shows whether
the row is what the template writes for the whole conversation. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from realhf.data.light_tokenizer import LightTokenizer, continuation
from realhf.data.sequence_tokens import TurnEnds, common_length, special_texts, turn_ends
from realhf.data.tokenizer_process import render_chat
from realhf.environments.protocol import ChatMessage
from realhf.errors import UserError, shown

_MARK = "realhfMARK"
"""Stands for the assistant's turn, to find where it ends."""
_BREAK = "\U000f0003"
"""A character of private use. It breaks special tokens that a message contains, so that they stay text."""
_QUESTION = {"role": "user", "content": "1"}
_MOST_KEPT = 1024
"""Conversations whose texts are kept."""
_MOST_KEPT_CHARACTERS = 1 << 14
"""Longer conversations are not kept."""
_THINKING = re.compile(
    r"<think>.*?(?:</think>\s*|\Z)|<\|channel>thought.*?<channel\|>|"
    r"<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?", re.DOTALL)
_LAST_TAG = re.compile(r"(<[^<>\s]+>)\s*(?:<[^<>]*)?\Z")
"""Matches the last whole tag of a text that may break off within the next one."""
_SWITCHES = {
    "preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False,
    "keep_past_thinking": True}
"""Variables by which templates are told to keep earlier thinking, and the values that do."""


class TurnTokens:
    """Turns messages into tokens, with the tokenizer's chat template. One serves all rollouts of equal tools.

    `tokenizer` is a LightTokenizer or one of transformers, `arguments` are further ones of the template, and
    `tools` are schemas. `eos_token_ids` are those at which generation stops.
    """

    def __init__(
        self, tokenizer: Any, *, arguments: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (), eos_token_ids: Collection[int] = (),
    ) -> None:
        if tokenizer.get_chat_template(tools=list(tools) or None) is None:
            raise UserError(
                "the tokenizer has no chat template, which an environment's messages need: use a model that "
                "has one, or put a chat_template.jinja into the tokenizer's directory")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._tools = list(tools) or None
        self._eos_token_ids = frozenset(eos_token_ids)
        self._rendered: dict[str, str] = {}
        """Conversations as JSON -> what the template writes for them, the one used last at the end."""

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens with which the model ends a turn."""
        ids = [self.encode(text) for text in self._ends]
        return self._eos_token_ids | {i for [i, *more] in ids if not more}

    def start(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens before the first turn of the model."""
        return self.encode(self.render([self._broken(message) for message in messages], asks=True))

    def observation(
        self, messages: Sequence[ChatMessage], *, answer: ChatMessage, last_token: int
    ) -> list[int]:
        """Return the tokens between a turn of the model, which is `answer`, and its next one.

        They are what the template adds for `messages`. If the last token of the turn does not end it, because
        the turn was cut off, they begin with what does.
        """
        end, rest = self.observation_text(messages, answer=answer)
        text = end.lstrip()
        # Another token that ends texts takes the place of the template's, unless that begins the next
        # message.
        is_other = self.turn_ends.last is None and self.text([last_token]) != text
        if last_token not in self.end_token_ids or is_other:
            return self.continued(end + rest)
        whole = self.encode(text + rest)
        before = self.encode(text)
        return whole[len(before) :] if text and whole[: len(before)] == before else self.continued(rest)

    def observation_text(self, messages: Sequence[ChatMessage], *, answer: ChatMessage) -> tuple[str, str]:
        """Return the text that ends a turn of the model, and the text from there to the next turn."""
        calls = answer.get("tool_calls") or []
        chat = [_QUESTION, _marked(calls), *(self._broken(message) for message in messages)]
        try:
            text = self.render(chat, asks=True)
        except ValueError as first:
            if not calls:
                raise _refusal(messages, first) from first
            chat[1] = _marked(calls, as_text=True)  # Some templates want arguments as JSON text.
            try:
                text = self.render(chat, asks=True)
            except ValueError:
                raise _refusal(messages, first) from first
        _, found, after = text.partition(_MARK)
        places = [(at, end) for end in self._ends if (at := after.find(end)) >= 0]
        if not found or (calls and not places):
            what = "tool calls" if calls else "the assistant's messages"
            raise UserError(f"the chat template does not write {what}, so that a turn's end cannot be found")
        if not places or (not calls and after[: min(places)[0]].strip()):
            return "", after  # Text alone separates the turns.
        at, end = min(places)
        if not calls:
            return after[: at + len(end)], after[at + len(end) :]
        alone = self.render(chat[:2], asks=False).partition(_MARK)[2]
        if self.turn_ends.last is not None and end not in alone:
            raise UserError(
                "the chat template ends turns with tool calls by a token that is not known: it must be among "
                "the eos tokens of the model's generation_config.json")
        return end, after[at + len(end) :]

    def call_text(self, call: Mapping[str, Any]) -> str | None:
        """Return what the model says to make a tool call and nothing else, up to the end of its turn.

        None: the template does not show it.
        """
        for as_text in (False, True):  # Some templates want arguments as JSON text.
            function = dict(call["function"])
            if as_text:
                function["arguments"] = json.dumps(function["arguments"])
            says = {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
            try:
                whole = self.render([_QUESTION, says], asks=False)
            except ValueError:
                continue
            said = whole.removeprefix(before := self.render([_QUESTION], asks=True))
            places = [at for end in self._ends if (at := said.find(end)) >= 0]
            return said[: min(places, default=len(said))] if whole.startswith(before) else None
        return None

    def answer_text(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn of the model, with special tokens but for the one that ends it."""
        if tokens and tokens[-1] in self.end_token_ids:
            tokens = tokens[:-1]
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def render(self, messages: Sequence[ChatMessage], *, asks: bool) -> str:
        """Return what the template writes for a whole conversation; `asks` adds a generation prompt.

        Many samples start alike, and many environments say the same again, so short texts are kept: the
        process that renders takes milliseconds, in which nothing decodes.
        """
        key = json.dumps([messages, asks])
        if key in self._rendered:
            self._rendered[key] = self._rendered.pop(key)  # It is now the newest.
            return self._rendered[key]
        how = {"tools": self._tools, "add_generation_prompt": asks, **self._arguments}
        text = render_chat(self._tokenizer, messages, **how)[0]
        if len(key) + len(text) <= _MOST_KEPT_CHARACTERS:
            self._rendered[key] = text
            if len(self._rendered) > _MOST_KEPT:
                del self._rendered[next(iter(self._rendered))]
        return text

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """The special tokens with which the template ends the model's turns."""
        return turn_ends(self._tokenizer, self._arguments)

    @cached_property
    def _ends(self) -> list[str]:
        """The texts of the tokens that end turns."""
        texts: list[str | None] = [*self.turn_ends]
        texts += [self._tokenizer.decode([i], skip_special_tokens=False) for i in sorted(self._eos_token_ids)]
        return list(dict.fromkeys(text for text in texts if text))

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Matches special tokens, and other tokens of their own that the template writes."""
        template = self._tokenizer.get_chat_template(tools=self._tools)
        special = special_texts(self._tokenizer, alone=False)
        written = [text for text in special_texts(self._tokenizer) if len(text) > 2 and text in template]
        texts = sorted({text for text in (*special, *written) if len(text) > 1}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def _broken(self, value: Any) -> Any:
        """Return a message or a part of one with a break within each special token that it contains."""
        if isinstance(value, str):
            return self._control.sub(lambda m: m[0][0] + _BREAK + m[0][1:], value.replace(_BREAK, ""))
        if isinstance(value, Mapping):
            return {key: self._broken(entry) for key, entry in value.items()}
        return [self._broken(entry) for entry in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the template has written."""
        first, *rest = text.split(_BREAK)
        ids = list(self._tokenizer.encode(first, add_special_tokens=False))
        return ids + [i for piece in rest for i in continuation(self._tokenizer, piece)]

    def continued(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on from another."""
        return [i for piece in text.split(_BREAK) for i in continuation(self._tokenizer, piece)]


def _marked(calls: Sequence[dict[str, Any]], *, as_text: bool = False) -> ChatMessage:
    """Return a message of the assistant with these calls, in which the mark stands for what it says last."""
    if not calls:
        return {"role": "assistant", "content": _MARK}
    marked = []
    for i, call in enumerate(calls):
        function = dict(call["function"])
        if i + 1 == len(calls):
            function["arguments"] = {"text": _MARK}
        if as_text:
            function["arguments"] = json.dumps(function["arguments"])
        marked.append({**call, "function": function})
    return {"role": "assistant", "content": "", "tool_calls": marked}


def _refusal(messages: Sequence[ChatMessage], error: ValueError) -> UserError:
    roles = ", ".join(str(message.get("role")) for message in messages)
    return UserError(f"the chat template refuses messages of {roles} after the assistant's: {error}")


@dataclass(frozen=True)
class Difference:
    """A place at which a row of turns is not what the template writes for the whole conversation.

    `thinking`: the template leaves earlier thinking out. `tokens`: the text is the same, but the template's
    text has other tokens, which span the end of a turn. `history`: all else.
    """

    conversation: str  # The conversation that was tried, in words.
    kind: Literal["thinking", "tokens", "history"]
    row: str  # What the row has at this place.
    template: str  # What the template writes there.
    ways_out: str

    @property
    def sentence(self) -> str:
        return (
            f"the chat template is not append-only: in {self.conversation}, the row has {shown(self.row)}, "
            f"and the template writes {shown(self.template)}; {self.ways_out}")


class TemplateProof(NamedTuple):
    """The result of trying a chat template. It is append-only if there is no difference."""

    differences: tuple[Difference, ...]
    refused: tuple[str, ...]
    """The conversations that the template refuses, in words, each with its reason."""
    notes: tuple[str, ...]
    """Sentences about what may surprise."""

    def faults(self, *, keep_thinking: bool) -> list[str]:
        """Return the sentences for which an environment may not run with the template."""
        return [
            difference.sentence for difference in self.differences
            if difference.kind == "history" or (difference.kind == "thinking" and not keep_thinking)]


_THOUGHT = "Two and three."
_TOOL = {"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}}


def _call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"text": f"2+{number}"}}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _result(number: int) -> ChatMessage:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05d}", "content": str(2 + number)}


_ASK = {"role": "user", "content": "What is 2+3?"}
_AGAIN = {"role": "user", "content": "And 2+4?"}
_ANSWER = {"role": "assistant", "content": "It is 5."}
_THINKS = {"role": "assistant", "content": "It is 5.", "reasoning_content": _THOUGHT}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_call(3), _call(4)]}
_RESULTS = [_result(3), _result(4)]
_CONVERSATIONS: dict[str, list[ChatMessage]] = {
    "an answer and a further question": [_ASK, _ANSWER, _AGAIN],
    "two answers": [_ASK, _ANSWER, _AGAIN, _ANSWER, _AGAIN],
    "thinking, an answer and a further question": [_ASK, _THINKS, _AGAIN],
}
_WITH_TOOLS: dict[str, list[ChatMessage]] = {
    "two calls and their results": [_ASK, _CALLS, *_RESULTS],
    "two calls, their results, an answer and a question": [_ASK, _CALLS, *_RESULTS, _ANSWER, _AGAIN],
    "thinking, two calls and their results": [_ASK, _CALLS | {"reasoning_content": _THOUGHT}, *_RESULTS],
    "thinking, two calls, their results and a question": [
        _ASK, _CALLS | {"reasoning_content": _THOUGHT}, *_RESULTS, _ANSWER, _AGAIN],
}


def call_end(tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> str | None:
    """Return the tag that the chat template writes after each tool call, such as </tool_call>.

    None: it writes none, as one whose model says nothing but calls in such a turn.
    """
    turns = TurnTokens(tokenizer, arguments=arguments, tools=(_TOOL,))
    for as_text in (False, True):  # Some templates want arguments as JSON text.
        (first,) = _marked([_call(3)], as_text=as_text)["tool_calls"]
        says: list[ChatMessage] = [
            {"role": "assistant", "content": "", "tool_calls": calls}
            for calls in ([first], [first, _call(4)])]
        try:
            alone, before_another = (
                turns.render([_ASK, message], asks=False).partition(_MARK)[2] for message in says)
        except ValueError:  # It may also refuse several calls.
            continue
        found = _LAST_TAG.search(alone[: common_length(alone, before_another)])
        return None if found is None else found[1]
    return None


@lru_cache(maxsize=16)
def call_end_in(directory: str, arguments: str) -> str | None:
    """Return the same of a tokenizer's directory, given the further arguments of its template as JSON.

    Where it is not known, it is that of most families.
    """
    if not (Path(directory) / "tokenizer.json").exists():
        return "</tool_call>"
    return call_end(LightTokenizer(directory), json.loads(arguments))


def _with_one_call(chat: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation without second calls, which some templates refuse."""
    return [
        {**message, "tool_calls": message["tool_calls"][:1]} if "tool_calls" in message else message
        for message in chat if message.get("tool_call_id") != _RESULTS[1]["tool_call_id"]]


def prove_append_only(
    tokenizer: Any, *, arguments: Mapping[str, Any] | None = None, uses_tools: bool = True,
    eos_token_ids: Collection[int] = (),
) -> TemplateProof:
    """Try a chat template on conversations with thinking, and with tools if the environment `uses_tools`.

    Each is written as a row of turns, and compared with what the template writes for all of it.
    """
    template = tokenizer.get_chat_template(tools=[_TOOL] if uses_tools else None) or ""
    differences: list[Difference] = []
    refused = []
    tried = [(name, chat, ()) for name, chat in _CONVERSATIONS.items()]
    tried += [(name, chat, (_TOOL,)) for name, chat in _WITH_TOOLS.items() if uses_tools]  # type: ignore[misc]
    for name, chat, tools in tried:
        turns = TurnTokens(tokenizer, arguments=arguments, tools=tools, eos_token_ids=eos_token_ids)
        for form in (chat, _with_one_call(chat)) if tools else (chat,):
            try:
                found = _first_difference(turns, name, form, template)
            except ValueError as error:
                refused.append(f"{name if form is chat else f'{name} (one call)'}: {error}")
                continue
            differences += [] if found is None else [found]
            break
    notes = []
    if "strftime_now" in template and not {"date_string", "current_date"} & set(arguments or {}):
        notes.append(
            "the chat template writes today's date into the prompt, so a run that goes on tomorrow has other "
            "prompts: set the date in chat_template_kwargs")
    ends = TurnTokens(tokenizer, arguments=arguments).turn_ends
    if ends.last != ends.before_another and None not in ends:
        notes.append(
            f"the chat template ends the last turn with {ends.last} and earlier ones with "
            f"{ends.before_another}: rows keep the token that the model has sampled")
    return TemplateProof(tuple(differences), tuple(refused), tuple(notes))


def _first_difference(
    turns: TurnTokens, name: str, chat: Sequence[ChatMessage], template: str
) -> Difference | None:
    """Return where the row of a conversation first differs from what the template writes.

    A row goes on from a turn if the template writes the turn and all before it alike, whether or not messages
    follow, and if it then writes what `observation_text` says.
    """
    numbers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    asked = turns.render(chat[: numbers[0]], asks=True)
    ids = turns.start(chat[: numbers[0]])
    for i, following in zip(numbers, [*numbers[1:], len(chat)], strict=True):
        before = chat[:i]
        last, message = _as_last(turns, before, chat[i])
        chat = [*before, message, *chat[i + 1 :]]
        thought = chat[i].get("reasoning_content")
        if thought is not None and thought not in last and "think" in template:
            return _difference(name, f"<think>\n{thought}\n</think>\n\n", last[len(asked) :], template)
        if not last.startswith(asked):
            return _difference(name, asked, last, template)
        observation = chat[i + 1 : following]
        end, rest = turns.observation_text(observation, answer=message)
        whole = turns.render(chat[:following], asks=True)
        turn_end = len(whole) - len(end + rest)
        if not last.startswith(whole[:turn_end]):
            return _difference(name, last, whole[:turn_end], template)
        if not whole.endswith(end + rest):
            return _difference(name, whole[:turn_end] + end + rest, whole, template)
        sampled = turns.continued(whole[len(asked) : turn_end] + end)
        ids += sampled + turns.observation(observation, answer=message, last_token=sampled[-1])
        asked = whole
    expected = turns.encode(asked)
    if ids == expected:
        return None
    start = max(0, common_length(ids, expected) - 1)
    row, written = (turns.text(tokens[start : start + 8]) for tokens in (ids, expected))
    return Difference(name, "tokens", row, written, "rows keep the tokens that the model has sampled")


def _as_last(
    turns: TurnTokens, before: Sequence[ChatMessage], message: ChatMessage
) -> tuple[str, ChatMessage]:
    """Return what the template writes if a conversation ends with this message of the assistant.

    Also return the message in the form that the template understands: with thinking in a field or in the
    content, and with arguments of calls as objects or as JSON text.
    """
    forms = [message]
    if (thought := message.get("reasoning_content")) is not None:
        forms.append(message | {"content": f"<think>\n{thought}\n</think>\n\n{message['content']}"})
    if calls := message.get("tool_calls"):
        as_text = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls]
        forms += [form | {"tool_calls": as_text} for form in forms]
    written: list[tuple[str, ChatMessage]] = []
    error: ValueError | None = None
    for form in forms:
        try:
            written.append((turns.render([*before, form], asks=False), form))
        except ValueError as caught:
            error = error or caught
    if not written:
        assert error is not None
        raise error
    return next((pair for pair in written if thought is None or thought in pair[0]), written[0])


def _difference(name: str, row: str, template_text: str, template: str) -> Difference:
    """Return the difference of two texts, of which the row's is what the model reads."""
    start = common_length(row, template_text)
    low = max(0, start - 16)
    ours, theirs = (_THINKING.sub("", text) for text in (row, template_text))
    if ours.startswith(theirs) or theirs.startswith(ours):
        kind: Literal["thinking", "history"] = "thinking"
        switches = [f'chat_template_kwargs={{"{key}": {value}}}' for key, value in _SWITCHES.items()
                    if key in template]
        ways = " or ".join([*switches, "environment.keep_thinking=True, if that is wanted in use, too"])
        ways_out = f"set {ways}; or give the tokenizer a template that keeps earlier thinking"
    else:
        kind = "history"
        ways_out = (
            "give the tokenizer a template (chat_template.jinja) that writes earlier turns alike, whatever "
            "follows them")
    return Difference(name, kind, row[low : start + 48], template_text[low : start + 48], ways_out)
