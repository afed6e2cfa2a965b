"""Finds texts of rows that are legal but seldom meant, such as damaged ones. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from realhf.data.sequence_tokens import special_texts

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_MARKS = re.compile(
    r"<\|(?:im_start|im_end|endoftext|eot_id|begin_of_text|end_of_text|start_header_id|end_header_id"
    r"|system|user|assistant|end|start|message|return)\|>"
    r"|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<(?:bos|eos)>|<\uff5c[^<>]{1,40}\uff5c>")
"""Marks with which chat templates of well-known models begin and end turns and texts."""
_DAMAGED = re.compile("\N{REPLACEMENT CHARACTER}")
_MISREAD = re.compile("[\u00c2-\u00f4](?:[\u0080-\u009f]|\u20ac[\u2122\u0153\u201c\u201d\u00a6\u02dc\u00a2])"
                      "|\u00c3[\u00a0-\u00bf]|\u00ef\u00bb\u00bf")
"""UTF-8 whose bytes were read as Latin-1 or Windows-1252: e with an acute accent, or typographic quotes."""
_ESCAPED = re.compile(r"(?<!\\)\\n(?![a-z'\"`/\]|)])|(?<!\\)\\n\\n")
"""A backslash and an n that are no command of LaTeX and, as far as one can tell, no string of code."""
_LONG_PROMPT = 8
"""A completion may begin with a shorter prompt by chance."""


class DoubtfulTexts:
    """Collects the rows of a data set whose texts are seldom meant.

    `rows` has the numbers of these rows, by what is doubtful about them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.rows: dict[str, list[int]] = {}
        self._template = str(tokenizer.chat_template or "")
        self._known = set(special_texts(tokenizer))

    def look_at(self, number: int, prompt: Any, completions: Sequence[Any]) -> None:
        """Look at the prompt and the completions of a row, which are text or chat messages."""
        found = dict.fromkeys(doubt for side in (prompt, *completions) for doubt in self._of(side))
        if isinstance(prompt, str) and len(prompt.strip()) >= _LONG_PROMPT and any(
            isinstance(side, str) and side.lstrip().startswith(prompt.strip()) for side in completions
        ):
            found["completions begin with the whole prompt, which the model reads twice"] = None
        if any(_is_empty(side) for side in completions):
            found["completions are empty, of which a model learns to end at once"] = None
        if _is_empty(prompt):
            found["prompts are empty"] = None
        elif isinstance(prompt, list) and {message["role"] for message in prompt} <= {"system", "developer"}:
            found["chats have no message but the system's"] = None
        for doubt in found:
            self.rows.setdefault(doubt, []).append(number)

    def _of(self, side: Any) -> Iterator[str]:
        for message in side if isinstance(side, list) else ():
            role = message["role"]
            if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self._template):
                yield (
                    f"messages have the role {role!r}, which the chat template does not name (it is usually "
                    "system, user, assistant or tool)")
        for text in _texts_of(side):
            yield from (doubt for holds, doubt in _DAMAGES if holds(text))
            for mark in dict.fromkeys(_MARKS.findall(text)):
                if mark not in self._known and mark not in self._template:
                    yield f"texts have {mark}, which is no token of this tokenizer but of other models' chats"


def _is_empty(side: Any) -> bool:
    """Return whether a text, or the last message of a chat, says nothing and calls no tool."""
    last = side[-1:] if isinstance(side, list) else side
    calls = isinstance(last, list) and any(message.get("tool_calls") for message in last)
    return not calls and all(not text.strip() for text in _texts_of(last))


def _is_escaped(text: str) -> bool:
    return "\n" not in text and bool(_ESCAPED.search(text))


_DAMAGES: tuple[tuple[Callable[[str], Any], str], ...] = (
    (_DAMAGED.search, "texts have U+FFFD, which stands for bytes that were not UTF-8 when the file was made"),
    (_MISREAD.search, "texts seem to be UTF-8 that was read in another encoding, such as Ã© for é"),
    (re.compile("^\ufeff").search, "texts begin with a byte order mark (U+FEFF), which the model reads"),
    (_is_escaped, "texts have a backslash and an n instead of line breaks, as if they were escaped twice"),
)


def _texts_of(side: Any) -> Iterator[str]:
    """Yield a text, or what the messages of a chat say."""
    if isinstance(side, str):
        yield side
        return
    for message in side if isinstance(side, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
