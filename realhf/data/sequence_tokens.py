"""Tokenises prompts with completions, and finds the tokens that are learned. Imports no torch."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from realhf.data.conversations import is_continued, joined, weight_of
from realhf.data.light_tokenizer import LightTokenizer, continuation, has_chat_template
from realhf.data.tokenizer_process import render_chat
from realhf.errors import UserError

Chat = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
_MARK = "\N{RIGHT TACK}realhf\N{LEFT TACK}"
"""The content of a message by which the place and the end of an assistant's turn are found."""
_UNTOLD = (
    "the chat template writes the assistant's earlier turns in another way when messages follow, so that "
    "their tokens cannot be told: mark them in the template with {% generation %}, or set assistant_only to "
    "False")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages with what is thought before an answer."""
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_WEIGHTS = ("weight", "train")
_MEANT = {"tool_calls", "function_call", *_WEIGHTS}
"""Keys of messages that change what is learned, where they are read."""
_END_MARK = re.compile(r"\s*(<\|[^<>|\s]+\|>|<\uff5c[^<>]+\uff5c>|</s>|<end_of_turn>|<eos>|<eot>)")
"""What looks like a special token that ends a turn."""
_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")


class TokenizedSequence(NamedTuple):
    """The tokens of a prompt with a completion."""

    ids: list[int]
    mask: list[float]
    """The weight of each token in what is learned: 1, that of its message, or 0 if it is not learned."""
    prompt_length: int
    """Number of tokens before those of the completion."""


@dataclass
class Oddities:
    """Counts rows whose tokens are not what one may expect."""

    num_unlike_prompt: int = 0
    """The chat template writes another prompt when a completion follows."""
    num_rewritten: int = 0
    """The chat template writes an assistant's turn in another way when other messages follow."""
    num_torn: int = 0
    """A token would span the end of the prompt and the beginning of the completion."""
    num_continued: int = 0
    """The prompt ends with an assistant's message, and what follows is not known."""
    num_questions: int = 0
    """The prompt is what a whole conversation has up to the user's last message."""
    num_special: int = 0
    """What a message says has a special token, such as one that ends turns."""
    num_left_out: int = 0
    """The chat template does not write what a message says."""
    num_quoted: int = 0
    """The arguments of a tool's call are JSON text, which the template quotes once more."""
    num_thoughtless: int = 0
    """The chat template leaves out the reasoning of an answer that is learned."""
    num_lists: int = 0
    """The chat template writes the list of a message's parts as Python shows it."""
    unread: Counter[str] = field(default_factory=Counter)
    """Key of messages that nothing reads -> number of rows."""


class TurnEnds(NamedTuple):
    """The special tokens with which a chat template ends an assistant's turn, as text; None: it has none."""

    last: str | None
    """At the end of a chat."""
    before_another: str | None
    """Before a user's message."""


def turn_ends(tokenizer: Any, arguments: dict[str, Any]) -> TurnEnds:
    """Return how the tokenizer's chat template ends turns, from two chats that it writes."""
    user = {"role": "user", "content": "1"}
    answer = {"role": "assistant", "content": _MARK}
    specials = special_texts(tokenizer)
    ends = []
    for messages in ([user, answer], [user, answer, user]):
        try:
            text, _ = render_chat(tokenizer, messages, **arguments)
        except Exception:  # A template may raise any exception, and refuse these messages.
            text = ""
        ends.append(first_special(text.partition(_MARK)[2], specials))
    return TurnEnds(*ends)


def spelled_end(tokenizer: Any, arguments: dict[str, Any]) -> str | None:
    """Return the mark with which the template ends turns, if it is no token of the tokenizer.

    Return None if there is none, or if a token ends turns.
    """
    if turn_ends(tokenizer, arguments) != (None, None):
        return None
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _MARK}]
    try:
        text, _ = render_chat(tokenizer, chat, **arguments)
    except Exception:  # A template may raise any exception, and refuse these messages.
        return None
    mark = _END_MARK.match(text.partition(_MARK)[2])
    is_spelled = mark is not None and len(tokenizer.encode(mark[1], add_special_tokens=False)) > 1
    return mark[1] if mark is not None and is_spelled else None


def missing_beginning(tokenizer: Any, arguments: dict[str, Any]) -> str | None:
    """Return what a template writes before an answer and not when it is asked for one (no generation prompt).

    Return None if it writes a generation prompt, or needs none, or refuses the chat that is tried.
    """
    chat = [{"role": "user", "content": "1"}]
    try:
        asked, _ = render_chat(tokenizer, chat, add_generation_prompt=True, **arguments)
        plain, _ = render_chat(tokenizer, chat, add_generation_prompt=False, **arguments)
        whole, _ = render_chat(tokenizer, [*chat, {"role": "assistant", "content": _MARK}], **arguments)
    except Exception:  # A template may raise any exception, and refuse these messages.
        return None
    before, mark, _ = whole.partition(_MARK)
    between = before[common_length(asked, before) :]
    return between if mark and asked == plain and between.strip() else None


def end_of_turn(directory: str) -> tuple[int, str] | None:
    """Return the token with which the chat template of a tokenizer ends the assistant's turns, and its text.

    Return None if there is no tokenizer.json or no template, or if it ends turns with no special token.
    """
    files = [*Path(directory).glob("*token*.json"), *Path(directory).glob("chat_template.*")]
    stamps = sorted((path.name, path.stat().st_mtime_ns) for path in files if path.is_file())
    return _end_of_turn(directory, tuple(stamps))


@lru_cache(maxsize=8)
def _end_of_turn(directory: str, files: tuple[tuple[str, int], ...]) -> tuple[int, str] | None:
    """Return the same for a state of the files, which are given by name and time."""
    if "tokenizer.json" not in dict(files) or not has_chat_template(Path(directory)):
        return None
    tokenizer = LightTokenizer(directory)
    ends = turn_ends(tokenizer, {})
    text = ends.last or ends.before_another
    return None if text is None else (tokenizer.backend.token_to_id(text), text)


def special_texts(tokenizer: Any, *, alone: bool = True) -> list[str]:
    """Return the tokens that the tokenizer finds in a text before it splits the rest, the longest first.

    Without `alone`, leave out those that are text as other tokens are, such as <think>.
    """
    added = tokenizer.added_tokens_decoder.values()
    tokens = [token.content for token in added if alone or token.special]
    return sorted((token for token in tokens if token.strip()), key=len, reverse=True)


def first_special(text: str, specials: Sequence[str]) -> str | None:
    """Return the special token with which a text begins, after white space."""
    return next((token for token in specials if text.lstrip().startswith(token)), None)


class TextTokens:
    """Tokenises prompts and completions that are text."""

    def __init__(self, tokenizer: Any, oddities: Oddities) -> None:
        self._tokenizer = tokenizer
        self._oddities = oddities

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text behind those with which the tokenizer begins every text.

        They are not repeated if the text has them already. A token with which the tokenizer ends texts, as
        some do, is left out, as more is to follow.
        """
        ids = self._encode(text)
        begin = self._beginning
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def sequences(
        self, prompt: str, completions: Sequence[str], *, is_whole: bool
    ) -> list[TokenizedSequence]:
        """Return the prompt's tokens with each completion and its eos token.

        If a token would span the end of the prompt, the completion is tokenised apart, so that what is
        learned follows the tokens that the model reads when it answers. If the texts are whole
        (`is_whole`), the prompt has instead the tokens that all of them have in common.
        """
        ids = self.prompt(prompt)
        together = [self.prompt(prompt + completion) for completion in completions]
        if is_whole:
            length = min(common_length(ids, whole) for whole in together)
            wholes = together
        else:
            length = len(ids)
            is_torn = [whole[:length] != ids for whole in together]
            self._oddities.num_torn += any(is_torn)
            wholes = [
                [*ids, *continuation(self._tokenizer, completion)] if torn else whole
                for completion, whole, torn in zip(completions, together, is_torn, strict=True)]
        return [self._ended(whole, length) for whole in wholes]

    def _ended(self, ids: list[int], prompt_length: int) -> TokenizedSequence:
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise UserError("the tokenizer has no eos token, in which completions end: set its eos_token")
        if len(ids) == prompt_length or ids[-1] != eos:
            ids = [*ids, eos]
        first = max(1, prompt_length)  # Nothing comes before the first token.
        mask: list[float] = [*[0] * first, *[1] * (len(ids) - first)]
        return TokenizedSequence(ids, mask, prompt_length)

    @cached_property
    def _beginning(self) -> list[int]:
        """The special tokens with which the tokenizer begins a text."""
        bare = self._encode("a")
        ids = self._tokenizer.encode("a")
        at = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
        return list(ids[:at])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


@dataclass
class ChatTokens:
    """Tokenises chats with the tokenizer's chat template."""

    tokenizer: Any
    arguments: dict[str, Any]
    """Arguments of the template."""
    assistant_only: bool
    """Whether the assistant's turns alone are learned."""
    oddities: Oddities = field(default_factory=Oddities)

    def prompt(self, messages: Chat, tools: Tools, *, completion: Chat | None = None) -> list[int]:
        """Return the tokens of a prompt up to its completion, which continues a prompt that is no question.

        A completion that is not known is an answer.
        """
        text = self._prompt_text(messages, completion, tools)
        if completion is None:
            self._look_at([(messages, text)])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def sequences(
        self, prompt: Chat, completions: Sequence[Chat], tools: Tools, *, is_whole: bool
    ) -> list[TokenizedSequence]:
        """Return the tokens of a prompt with each completion; the template writes both together.

        If the messages are one whole conversation (`is_whole`), the assistant's earlier turns are learned,
        too.
        """
        chats = [[*prompt, *c] if is_whole else joined(prompt, c) for c in completions]
        texts = [self._text(chat, tools) for chat in chats]
        self._look_at(list(zip(chats, texts, strict=True)))
        prompts = [self._prompt_text(prompt, c, tools, is_whole=is_whole) for c in completions]
        pairs = zip(prompts, texts, strict=True)
        # As in TRL, all completions of a prompt begin at the first character in which one is unlike it.
        start = min(common_length(before, text) for before, text in pairs)
        self.oddities.num_unlike_prompt += any(start < len(before) for before in prompts)
        firsts = [len(chat) - len(c) for chat, c in zip(chats, completions, strict=True)]
        return [
            self._sequence(chat, text, tools, start=start, first=first, is_whole=is_whole)
            for chat, text, first in zip(chats, texts, firsts, strict=True)]

    def _look_at(self, written: Sequence[tuple[Chat, str]]) -> None:
        """Count a row if the model reads its messages otherwise than they are meant.

        `written` has its chats, and what the template writes for them.
        """
        oddities = self.oddities
        pairs = [(message, text) for chat, text in written for message in chat]
        oddities.num_special += any(
            self._special and self._special.search(said) for message, _ in pairs for said in _said(message))
        oddities.num_quoted += any(
            json.dumps(arguments, ensure_ascii=False) in text
            for message, text in pairs for arguments in _texts_of_arguments(message))
        oddities.num_left_out += any(
            said not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text
            for message, text in pairs for said in _said(message))
        oddities.num_lists += any(
            isinstance(content := message.get("content"), list) and str(content) in text
            for message, text in pairs)
        oddities.num_thoughtless += any(
            chat[-1]["role"] == "assistant" and any(thought not in text for thought in _thoughts(chat[-1]))
            for chat, text in written)
        oddities.unread.update({
            key for message, _ in pairs for key in _MEANT & message.keys()
            if message[key] not in (None, [], "") and not re.search(rf"\b{key}\b", self._templates)
            and not (key in _WEIGHTS and self.assistant_only and message["role"] == "assistant")})

    def _sequence(
        self, chat: Chat, text: str, tools: Tools, *, start: int, first: int, is_whole: bool
    ) -> TokenizedSequence:
        """Return the tokens of a chat. Its completion has the messages from `first` on, and begins at the
        character `start`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        starts, ends = ([place[side] for place in encoded["offset_mapping"]] for side in (0, 1))
        prompt_length = bisect_right(ends, start)
        mask: list[float] = [0 if self.assistant_only else 1] * len(ids)
        turns: list[tuple[int, int, float]] = []
        if self.assistant_only and self._has_markers(tools):
            _, places = render_chat(
                self.tokenizer, chat, tools=tools, finds_answers=True, **self.arguments)
            turns = _weighted(places, chat)
        elif self.assistant_only:
            turns = self._turns(chat, text, tools, start=start, first=first, is_whole=is_whole)
        for low, high, weight in turns:
            for i in range(bisect_right(ends, low), bisect_left(starts, high)):
                mask[i] = weight
        learned_from = 1 if is_whole else prompt_length  # Nothing comes before the first token.
        mask[:learned_from] = [0] * len(mask[:learned_from])
        return TokenizedSequence(ids, mask, prompt_length)

    def _has_markers(self, tools: Tools) -> bool:
        return bool(_GENERATION.search(self.tokenizer.get_chat_template(tools=tools) or ""))

    def _turns(
        self, chat: Chat, text: str, tools: Tools, *, start: int, first: int, is_whole: bool
    ) -> list[tuple[int, int, float]]:
        """Return the ranges of characters that the assistant's turns have in a chat's text, with weights.

        A turn goes from the generation prompt to what ends the turn. Each is found by the text of the chat
        up to there, with which the whole text should begin.
        """
        turns = []
        is_rewritten = False
        for i, message in enumerate(chat):
            if message["role"] != "assistant" or (i < first and not is_whole):
                continue
            low = start if i == first else self._beginning(chat[:i], text, tools)
            high = self._end(chat[: i + 1], text, tools) if i + 1 < len(chat) else len(text)
            if low is None or high is None:
                is_rewritten |= i > 0
                changed = self._changed(chat, i, text, tools)
                low = changed[0] if low is None else low
                high = self._end_from(changed[1], text) if high is None else high
            turns.append((low, high, weight_of(message)))
        self.oddities.num_rewritten += is_rewritten
        return turns

    def _beginning(self, before: Chat, text: str, tools: Tools) -> int | None:
        """Return where the turn after `before` begins; None if the text does not begin with `before`."""
        if not before:
            return None
        asked = self._text(before, tools, add_generation_prompt=True)
        common = common_length(asked, text)
        is_same = common == len(asked) or common >= len(self._text(before, tools))
        return common if is_same else None

    def _end(self, chat: Chat, text: str, tools: Tools) -> int | None:
        """Return where the last turn of `chat` ends; None if the text does not begin with this chat.

        Some templates write the token that ends a turn only when a message follows.
        """
        alone = self._text(chat, tools)
        if not text.startswith(alone):
            return None
        token = self._turn_ends.before_another or ""
        is_late = not alone.rstrip().endswith(token) and text.startswith(token, len(alone))
        return len(alone) + len(token) * is_late

    def _changed(self, chat: Chat, number: int, text: str, tools: Tools) -> tuple[int, int]:
        """Return the range of a turn's content: it is where the text changes with the message.

        Raises UserError if other places change, too.
        """
        other = [*chat[:number], {"role": "assistant", "content": _MARK}, *chat[number + 1 :]]
        changed = self._text(other, tools)
        low = common_length(text, changed)
        shared = common_length(text[low:][::-1], changed[low:][::-1])
        if changed[low : len(changed) - shared].strip() != _MARK:
            raise UserError(_UNTOLD)
        return low, len(text) - shared

    def _end_from(self, place: int, text: str) -> int:
        """Return where a turn ends whose content ends at a place: after a special token and line breaks."""
        token = first_special(text[place:], self._special_texts)
        if token is None:
            raise UserError(_UNTOLD)
        end = text.index(token, place) + len(token)
        if self._turn_ends.last is None:  # The token begins the message that follows.
            return end
        return end + len(text[end:]) - len(text[end:].lstrip("\n"))

    @cached_property
    def _templates(self) -> str:
        """The templates of chats without and with tools."""
        return f"{self.tokenizer.chat_template} {self.tokenizer.get_chat_template(tools=[{}])}"

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Matches the special tokens of texts, which are not those that merely have a token of their own."""
        texts = special_texts(self.tokenizer, alone=False)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @cached_property
    def _turn_ends(self) -> TurnEnds:
        return turn_ends(self.tokenizer, self.arguments)

    @cached_property
    def _special_texts(self) -> list[str]:
        return special_texts(self.tokenizer)

    def _prompt_text(
        self, prompt: Chat, completion: Chat | None, tools: Tools, *, is_whole: bool = False
    ) -> str:
        """Return the text of a prompt, up to where the completion begins."""
        if is_continued(prompt, completion) and not is_whole:
            return self._text(prompt, tools, continue_final_message=True)
        asks = completion is None or completion[0]["role"] == "assistant"
        return self._text(prompt, tools, add_generation_prompt=asks)

    def _text(self, messages: Chat, tools: Tools, **how: bool) -> str:
        return render_chat(self.tokenizer, messages, tools=tools, **how, **self.arguments)[0]


def _weighted(places: Sequence[tuple[int, int]], chat: Chat) -> list[tuple[int, int, float]]:
    """Return the ranges that a template marks as the assistant's, with the weights of its messages."""
    weights = [weight_of(message) for message in chat if message["role"] == "assistant"]
    if any(weight != 1 for weight in weights) and len(weights) != len(places):
        raise UserError(
            f"the chat template marks {len(places)} parts as the assistant's, which has {len(weights)} "
            "messages, so that their weights cannot be told")
    weights = weights if len(weights) == len(places) else [1] * len(places)
    return [(low, high, weight) for (low, high), weight in zip(places, weights, strict=True)]


def _texts_of_arguments(message: dict[str, Any]) -> list[str]:
    """Return the arguments of a message's tool calls that are text instead of an object."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    functions = [call.get("function", call) for call in calls]
    return [f["arguments"] for f in functions if isinstance(f, dict) and isinstance(f.get("arguments"), str)]


def _thoughts(message: dict[str, Any]) -> list[str]:
    """Return the reasoning of a message, in keys of its own or between tags in the text."""
    content = message.get("content")
    texts = [message.get(key) for key in _REASONING]
    texts += _THINKING.findall(content) if isinstance(content, str) else []
    return [text.strip() for text in texts if isinstance(text, str)]


def _said(message: dict[str, Any]) -> list[str]:
    """Return what a message says, without white space at the ends: a text, or those of several parts.

    Reasoning is left out, which templates may write in another form.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text.rpartition("</think>")[2].strip() for text in texts if isinstance(text, str)]


def common_length(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Return how many entries two sequences begin with in common."""
    low = 0
    high = min(len(ours), len(theirs))
    while low < high:  # Comparing slices is much faster than comparing entries one by one.
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
