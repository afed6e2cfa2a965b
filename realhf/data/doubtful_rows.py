"""Finds rows that are legal but seldom meant, such as damaged texts. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from realhf.data.sequence_tokens import special_texts

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_MARKS = tuple(map(re.compile, (
    r"<\|im_(?:start|end)\|>",
    r"<\|(?:eot_id|begin_of_text|end_of_text|start_header_id|end_header_id)\|>",
    r"<\|(?:system|user|assistant|end)\|>",
    r"<\|(?:start|message|return)\|>",
    r"<\|endoftext\|>",
    r"</?s>|\[/?INST\]|<</?SYS>>",
    r"<(?:start|end)_of_turn>|<(?:bos|eos)>",
    r"<\uff5c[^<>]{1,40}\uff5c>",
)))  # fmt: skip
"""Marks with which the chat templates of well-known models begin and end turns and texts, by model."""
_ENDS_OF_TEXTS = {"<s>", "</s>", "<bos>", "<eos>"}
"""Marks that texts about HTML or about language models have together."""
_STRUCK = re.compile(r"<s>.*?</s>", re.DOTALL)
"""Text that HTML strikes through, with the same tags that are marks of Llama."""
_DAMAGED = re.compile("\N{REPLACEMENT CHARACTER}")
_MISREAD = re.compile(
    "[\u00c2-\u00f4][\u0080-\u009f]|\u00e2\u20ac[\u2122\u0153\u201c\u201d\u00a6\u02dc\u00a2]"
    "|\u00c3[\u00a1-\u00ba\u00bc-\u00bf]|\u00ef\u00bb\u00bf")
"""UTF-8 whose bytes were read as Latin-1 or Windows-1252: e with an acute accent, or typographic quotes.
Capital letters before a space that does not break or a quotation mark are not meant."""
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|`+[^`]*`+|\$[^$]*\$")
_ESCAPED = re.compile(
    r"(?<=[.:;?!,)\u3002\uff1a\uff1f\uff01\uff0c])(?<!\b[A-Za-z]:)\\n(?![a-z+*?{)\]|]|Left|Right|V[Dd])"
    r"|(?<![\\\s])\\n\\n(?![+*?{)\]|\"'`])")
"""A backslash and an n, outside quotes, that end a sentence or a paragraph: no command of LaTeX, directory of
Windows, string of code or regular expression."""
_LONG_PROMPT = 8
"""A completion may begin with a shorter prompt by chance."""
_REPEATS = "completions begin with the whole prompt, which the model reads twice"
_SCORE = re.compile("score|rating|reward")


class DoubtfulRows:
    """Collects the rows of a data set that are seldom meant."""

    def __init__(self, tokenizer: Any) -> None:
        self._found: dict[str, list[int]] = {}
        self._num_rows = 0
        self._template = str(tokenizer.chat_template or "")
        self._known = set(special_texts(tokenizer))

    @property
    def rows(self) -> dict[str, list[int]]:
        """The numbers of doubtful rows, by what is doubtful about them.

        A single answer may well repeat its prompt, as in completed code, but not most of them.
        """
        return {
            doubt: numbers for doubt, numbers in self._found.items()
            if doubt != _REPEATS or 2 * len(numbers) >= self._num_rows}

    def look_at(
        self, number: int, row: Mapping[str, Any], *, prompt: Any, completions: Mapping[str, Any]
    ) -> None:
        """Look at the prompt of a row and its completions by column, which are text or chat messages.

        The prompt is None if the row has none.
        """
        self._num_rows += 1
        sides = list(completions.values())
        doubts = dict.fromkeys(doubt for side in (prompt, *sides) for doubt in self._of(side))
        if isinstance(prompt, str) and len(prompt.strip()) >= _LONG_PROMPT and any(
            isinstance(side, str) and side.lstrip().startswith(prompt.strip()) for side in sides
        ):
            doubts[_REPEATS] = None
        if any(map(_is_empty, sides)):
            doubts["completions are empty, of which a model learns to end at once"] = None
        if prompt is not None and _is_empty(prompt):
            doubts["prompts are empty"] = None
        elif isinstance(prompt, list) and {message["role"] for message in prompt} <= {"system", "developer"}:
            doubts["chats have no message but the system's"] = None
        if len(completions) > 1:
            doubts |= dict.fromkeys(_exchanged(row))
        for doubt in doubts:
            self._found.setdefault(doubt, []).append(number)

    def _of(self, side: Any) -> Iterator[str]:
        for message in side if isinstance(side, list) else ():
            role = message["role"]
            if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self._template):
                yield (
                    f"messages have the role {role!r}, which the chat template does not name (it is usually "
                    "system, user, assistant or tool)")
        for text in _texts_of(side):
            yield from (doubt for holds, doubt in _DAMAGES if holds(text))
            for mark in _foreign_marks(text):
                if mark not in self._known and mark not in self._template:
                    yield f"texts have {mark}, which is no token of this tokenizer but of other models' chats"


def compared_text(side: Any) -> str:
    """Return by what a text, or a chat, is compared with others: what it says, white space aside."""
    if not isinstance(side, list):
        return " ".join(str(side).split())
    said = ({key: value for key, value in message.items() if key != "role"} for message in side)
    texts = [values["content"] if values.keys() == {"content"} else values for values in said]
    shown = [text if isinstance(text, str) else json.dumps(text, default=str) for text in texts]
    return " ".join(" ".join(shown).split())


def _exchanged(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield in words that the chosen completion of a row has a lower score than the rejected one."""
    for column, value in row.items():
        other = column.replace("chosen", "rejected")
        values = (value, row.get(other))
        if other == column or not _SCORE.search(column):
            continue
        if all(isinstance(score, int | float) for score in values) and values[0] < values[1]:
            yield f"{column} is below {other}: chosen and rejected may be exchanged"


def _foreign_marks(text: str) -> list[str]:
    """Return the marks of templates in a text: one that begins or ends it, or several of one model.

    Other texts merely speak of them.
    """
    if "<" not in text and "[" not in text:
        return []
    stripped = _STRUCK.sub("", text).strip() if "[INST]" not in text else text.strip()
    foreign: dict[str, None] = {}
    for marks in _MARKS:
        kinds = dict.fromkeys(marks.findall(stripped))
        begins = any(stripped.startswith(mark) for mark in kinds if mark != "</s>")
        ends = any(stripped.endswith(mark) for mark in kinds if mark != "<s>")
        if begins or ends or len(kinds.keys() - _ENDS_OF_TEXTS) > 1:
            foreign |= kinds
    return list(foreign)


def _is_empty(side: Any) -> bool:
    """Return whether a text, or the last message of a chat, has nothing in it."""
    if not isinstance(side, list):
        return not side.strip()
    last = side[-1] if side else {}
    content = last.get("content")
    has_pictures = isinstance(content, list) and any("text" not in part for part in content)
    has_others = any(last[key] for key in last.keys() - {"role", "name", "content"})  # Such as tool_calls.
    return not (has_pictures or has_others or any(text.strip() for text in _texts_of([last])))


def _is_escaped(text: str) -> bool:
    return "\\n" in text and "\n" not in text and bool(_ESCAPED.search(_QUOTED.sub(" ", text)))


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
