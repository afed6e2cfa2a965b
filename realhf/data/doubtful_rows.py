"""Finds rows that are legal but seldom meant, such as damaged texts. Imports no torch.

RULES is a table: what is doubtful, how a row tells, and from which share of the rows on it is told.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from realhf.data.conversations import IS_WHOLE, OTHER_PROMPT, texts_of
from realhf.data.dataset import DatasetConfig
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
)))
"""Marks with which the chat templates of well-known models begin and end turns and texts, by model."""
_ENDS_OF_TEXTS = {"<s>", "</s>", "<bos>", "<eos>"}
"""Marks that texts about HTML or about language models have together."""
_STRUCK = re.compile(r"<s>.*?</s>", re.DOTALL)
"""Text that HTML strikes through, with the same tags that are marks of Llama."""
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
_WRITTEN = re.compile(
    r"(?<=[^\W\d_])\\u00[a-f\d]{2}|(?<=[^\W\d_])\\u20[12][a-f\d]|\\u00[a-f\d]{2}(?=[^\W\d_])"
    r"|(?<=[^\W\d_])\\'(?=(?:s|t|re|ve|ll|d|m)\b)", re.IGNORECASE)
"""An accented letter or a typographic quote within a word, or an apostrophe, as in a string of JSON."""
_PERCENT = re.compile(r"(?!\S*://)[^\s/]*(?:%[0-9A-Fa-f]{2}[^\s%]*){2,}")
"""A text with spaces as %20, as URLs have it."""
_ENTITY = re.compile(
    r"&(?:amp;)?(?:amp|lt|gt|quot|apos|nbsp|#0?3[489]|#6[02]|#x2[267]|#x3[ce]);", re.IGNORECASE)
"""What HTML writes for & < > and quotation marks, once or twice escaped."""
_AMPERSAND = re.compile(r"&(?!#?\w{2,8};)")
_UNSEEN = "\u00ad\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
"""Characters that no font shows. Those that join letters, and tags of flags, are not meant."""
_UNSEEN_ENDS = re.compile(rf"\A\s*([{_UNSEEN}])|([{_UNSEEN}])\s*\Z")
_UNSEEN_IN_ANSWER = re.compile(rf"[{_UNSEEN}]|\A[\u00a0\u2007\u202f]|[\u00a0\u2007\u202f]\Z")
_DIRECTIONS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_MISSING = ("nan", "NaN", "<NA>", "NaT", "#N/A", "undefined")
"""Texts that programs write for a value that is missing."""
_PERHAPS_MISSING = ("None", "null", "NULL", "N/A", "n/a")
"""The same, which may well be an answer."""
_SENTENCE = 40
"""Completions of fewer characters are labels or values, one of which may be None."""
_SHORTEST_CUT = 60
_OPEN_END = re.compile(r"[^\W\d_]\s*\Z|[,\-]\s*\Z|(?:\.\.\.|\u2026)\Z")
"""The end of a text within a sentence."""
_SPEAKS_FOR_USER = re.compile(r"\A\s*(?:User|Human)\s*:\s")
_SPEAKS_FOR_ASSISTANT = re.compile(r"\A\s*(?:Assistant|AI|Bot|Chatbot)\s*:\s")
_ASKS_ASSISTANT = re.compile(r"\n\s*(?:Assistant|AI|Bot|Chatbot)\s*:\s*\Z")
_OTHER_TURN = re.compile(r"\n\s*[A-Z]\w{1,15}\s*:\s*\S")
_NEXT_TURN = re.compile(r"\n\s*(?:User|Human)\s*:\s")
_TOOLS = ("tools", "functions")
_SYSTEMS = ("system", "system_prompt", "system_message")
_BESIDE = {
    "instruction": ("input", "history"), "question": ("context", "passage", "document"),
    "query": ("context", "passage", "document")}
"""Column of prompts -> columns that belong to them in well-known data sets."""
_SHORT_ANSWER = 300
_MOST_PROMPTS = 200
_SCORE = re.compile("score|rating|reward")


@dataclass(frozen=True)
class SeenRow:
    """A row as rules see it."""

    values: Mapping[str, Any]
    prompt: Any
    """Text or messages; None if the row has no prompt."""
    completions: Mapping[str, Any]
    """Column -> the text or messages that are learned."""
    config: DatasetConfig
    read: Collection[str]
    """Columns that calls of the graph read, such as answers to which rewards compare completions."""
    is_chat: bool
    known: Collection[str]
    """Special tokens of the tokenizer."""
    template: str
    first: Mapping[str, Any] | None = None
    """The first row with the same prompt and another completion."""

    @cached_property
    def sides(self) -> list[Any]:
        return [self.prompt, *self.completions.values()]

    @cached_property
    def texts(self) -> list[str]:
        """All texts of the prompt and the completions."""
        return [text for side in self.sides for text in texts_of(side)]

    @cached_property
    def last(self) -> str:
        """The text of the prompt, or of its last message."""
        return _last_text(self.prompt)

    @cached_property
    def answers(self) -> dict[str, str]:
        """Column -> short text that a call reads."""
        columns = {column: self.values.get(column) for column in self.read if column not in self.completions}
        return {
            column: value for column, value in columns.items()
            if isinstance(value, str) and len(value) <= _SHORT_ANSWER}

    @cached_property
    def all_texts(self) -> list[str]:
        return [*self.texts, *self.answers.values()]

    @cached_property
    def columns(self) -> dict[str, str]:
        """Column -> text of the completions (of their last messages) and of the answers."""
        return {column: _last_text(side) for column, side in self.completions.items()} | self.answers


class Rule(NamedTuple):
    """Something doubtful, in words in which {} is what `find` returns, if that is a text or several texts."""

    doubt: str
    find: Callable[[SeenRow], Any]
    """Returns something true if a row is doubtful."""
    share: float = 0.0
    """From which share of the rows on it is told, and from how many rows on."""
    least: int = 1
    holds: Callable[[ColumnFacts, str], bool] = lambda facts, found: True
    """Whether it is told, given the facts of all rows and what was found."""


@dataclass
class ColumnFacts:
    """Facts of the texts that are learned or compared, over all rows."""

    lengths: Counter[int] = field(default_factory=Counter)
    """How many texts have so many characters."""
    ends: dict[int, set[str]] = field(default_factory=dict)
    """Length -> the last characters of such texts, of which texts in a fixed form have few."""

    def add(self, text: str) -> None:
        self.lengths[len(text)] += 1
        self.ends.setdefault(len(text), set()).add(text[-3:])

    def are_cut(self, found: str) -> bool:
        """Return whether texts of this length seem cut: none is longer, and few are a bit shorter."""
        length = int(found)
        near = max(self.lengths[length - shorter] for shorter in range(1, 6))
        is_longest = length == max(self.lengths) and self.lengths[length] > 5 * near
        return is_longest and (len(self.ends[length]) > 2 or self.ends[length] == {"..."})

    def are_sentences(self, _: str) -> bool:
        return sum(n for length, n in self.lengths.items() if length >= _SENTENCE) > self.lengths.total() / 2


class DoubtfulRows:
    """Collects the rows of a data set that are seldom meant."""

    def __init__(self, tokenizer: Any, config: DatasetConfig, *, read: Collection[str] = ()) -> None:
        """`read` are the columns that calls of the graph read."""
        self._config = config
        self._read = read
        self._found: dict[tuple[Rule, str], list[int]] = {}
        self._num_rows = 0
        self._facts = ColumnFacts()
        self._first: dict[int, tuple[int, Mapping[str, Any]]] = {}
        """Hash of a prompt -> that of its first completions, and the first row."""
        self._template = str(tokenizer.chat_template or "")
        self._known = frozenset(special_texts(tokenizer))

    @property
    def rows(self) -> dict[str, list[int]]:
        """The numbers of doubtful rows, by what is doubtful about them."""
        return {
            rule.doubt.format(found): numbers for (rule, found), numbers in self._found.items()
            if len(numbers) >= max(rule.least, rule.share * self._num_rows)
            and rule.holds(self._facts, found)}

    def look_at(
        self, number: int, values: Mapping[str, Any], *, prompt: Any, completions: Mapping[str, Any],
        is_chat: bool,
    ) -> None:
        """Look at the prompt of a row and its completions by column, which are text or chat messages.

        The prompt is None if the row has none.
        """
        self._num_rows += 1
        row = SeenRow(
            values, prompt, completions, self._config, self._read, is_chat, self._known, self._template,
            self._first_with(values, prompt, completions))
        for text in row.columns.values():
            self._facts.add(text)
        for rule in RULES:
            found = rule.find(row)
            if not found:
                continue
            words = found if isinstance(found, list) else [found if isinstance(found, str) else ""]
            for word in dict.fromkeys(words):
                self._found.setdefault((rule, word), []).append(number)

    def _first_with(
        self, values: Mapping[str, Any], prompt: Any, completions: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Return the first row with the same prompt, if its completions are others.

        Only the first prompts are kept: rules ask for data sets that have few.
        """
        learned = hash(tuple(map(compared_text, completions.values())))
        asked = hash(compared_text(prompt))
        if asked not in self._first and len(self._first) < _MOST_PROMPTS:
            self._first[asked] = learned, values
        first_learned, first = self._first.get(asked, (learned, None))
        return first if first_learned != learned else None


def compared_text(side: Any) -> str:
    """Return by what a text, or a chat, is compared with others: what it says, white space aside."""
    if not isinstance(side, list):
        return " ".join(str(side).split())
    said = ({key: value for key, value in message.items() if key != "role"} for message in side)
    texts = [values["content"] if values.keys() == {"content"} else values for values in said]
    shown = [text if isinstance(text, str) else json.dumps(text, default=str) for text in texts]
    return " ".join(" ".join(shown).split())


def _in_texts(holds: Callable[[str], Any], *, in_ascii: bool = True) -> Callable[[SeenRow], bool]:
    """Return a finder of texts; without `in_ascii` those of ASCII alone cannot be what is sought."""
    return lambda row: any(holds(text) for text in row.all_texts if in_ascii or not text.isascii())


def _roles(row: SeenRow) -> list[str]:
    roles = {message["role"]: None for side in row.sides if isinstance(side, list) for message in side}
    return [
        repr(role) for role in roles
        if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", row.template)]


def _marks(row: SeenRow) -> list[str]:
    marks = dict.fromkeys(mark for text in row.texts for mark in _foreign_marks(text))
    return [mark for mark in marks if mark not in row.known and mark not in row.template]


def _repeats(row: SeenRow) -> bool:
    prompt = row.prompt.strip() if isinstance(row.prompt, str) else ""
    return len(prompt) >= _LONG_PROMPT and any(
        isinstance(side, str) and side.lstrip().startswith(prompt) for side in row.completions.values())


def _has_system_only(row: SeenRow) -> bool:
    prompt = row.prompt
    return isinstance(prompt, list) and bool(prompt) and (
        {message["role"] for message in prompt} <= {"system", "developer"})


def _foreign_marks(text: str) -> list[str]:
    """Return the marks of templates in a text: one that begins or ends it, or several of one model.

    Other texts merely speak of them.
    """
    if "<" not in text and "[" not in text:
        return []
    stripped = _STRUCK.sub("", text).strip() if "[INST]" not in text else text.strip()
    found: dict[str, None] = {}
    for marks in _MARKS:
        kinds = dict.fromkeys(marks.findall(stripped))
        begins = any(stripped.startswith(mark) for mark in kinds if mark != "</s>")
        ends = any(stripped.endswith(mark) for mark in kinds if mark != "<s>")
        if begins or ends or len(kinds.keys() - _ENDS_OF_TEXTS) > 1:
            found |= kinds
    return list(found)


def _is_empty(side: Any) -> bool:
    """Return whether a text, or the last message of a chat, has nothing in it."""
    if not isinstance(side, list):
        return not side.strip()
    last = side[-1] if side else {}
    content = last.get("content")
    has_pictures = isinstance(content, list) and any("text" not in part for part in content)
    has_others = any(last[key] for key in last.keys() - {"role", "name", "content"})  # Such as tool_calls.
    return not (has_pictures or has_others or any(text.strip() for text in texts_of([last])))


def _is_escaped(text: str) -> bool:
    return "\\n" in text and "\n" not in text and bool(_ESCAPED.search(_QUOTED.sub(" ", text)))


def _has_written_characters(text: str) -> bool:
    """Return whether a text has escapes within words, outside quotes and code, and no such characters."""
    return "\\" in text and text.isascii() and bool(_WRITTEN.search(_QUOTED.sub(" ", text)))


def _is_html(row: SeenRow) -> bool:
    """Return whether a row has HTML's entities and nothing that HTML would have escaped, as its tags."""
    texts = row.all_texts
    if not any("&" in text for text in texts):
        return False
    entities = {entity for text in texts for entity in _ENTITY.findall(text)}
    raw = {"<", ">"} | {html.unescape(html.unescape(entity)) for entity in entities} - {"&", "\u00a0"}
    return bool(entities) and not any(
        character in text for character in raw for text in texts) and not any(map(_AMPERSAND.search, texts))


def _unseen(match: re.Match[str], text: str) -> str | None:
    """Return an unseen character in words; None if it directs a text that is written from right to left."""
    character = match[0].strip() or match[0]
    if character in _DIRECTIONS and any(unicodedata.bidirectional(c) in ("R", "AL") for c in text):
        return None
    return f"U+{ord(character):04X} ({unicodedata.name(character, 'unnamed').lower()})"


def _unseen_at_ends(row: SeenRow) -> list[str]:
    texts = [text for text in row.texts if not text.isascii() and not text.startswith("\ufeff")]
    found = ((_UNSEEN_ENDS.search(text), text) for text in texts)
    named = (_unseen(match, text) for match, text in found if match is not None)
    return [name for name in named if name is not None]


def _unseen_in_answers(row: SeenRow) -> list[str]:
    """Find unseen characters at the ends of answers, or anywhere in those of ASCII."""
    found = []
    for column, text in row.answers.items():
        if text.isascii() or (match := _UNSEEN_IN_ANSWER.search(text)) is None:
            continue
        is_at_end = match.start() == 0 or match.end() == len(text)
        name = _unseen(match, text)
        if name is not None and (is_at_end or text.replace(match[0], "").isascii()):
            found.append(f"{name} in {column!r}")
    return found


def _missing(row: SeenRow, words: Sequence[str]) -> list[str]:
    """Find columns that are one of these words and nothing else, of which the prompt does not speak."""
    found = {column: text.strip() for column, text in row.columns.items()}
    said = " ".join(texts_of(row.prompt)).lower()
    return [f"{column} {text!r}" for column, text in found.items()
            if text in words and text.lower() not in said]


def _missing_texts(row: SeenRow) -> list[str]:
    is_missing = row.last.strip() in (*_MISSING, *_PERHAPS_MISSING)
    asked = [f"{row.config.prompt_key} {row.last.strip()!r}"] if is_missing else []
    return [*asked, *_missing(row, _MISSING)]


def _perhaps_missing_texts(row: SeenRow) -> list[str]:
    return _missing(row, _PERHAPS_MISSING)


def _are_headers(row: SeenRow) -> bool:
    texts = {row.config.prompt_key: row.last, **row.columns}
    return sum(text.strip().lower() == column.lower() for column, text in texts.items()) > 1


def _cut_lengths(row: SeenRow) -> list[str]:
    """Return the lengths of completions that end within a sentence, if they are round numbers."""
    return [
        str(len(text)) for text in map(_last_text, row.completions.values())
        if len(text) >= _SHORTEST_CUT and _is_round(len(text))
        and _OPEN_END.search(text) and sum(c.isalpha() or c == " " for c in text) > 0.8 * len(text)
        and text.count(" ") * 15 > len(text)]


def _is_round(length: int) -> bool:
    """Return whether a length is one that people or tables choose: a multiple of ten, 255, 256 and so on."""
    return length % 10 == 0 or length & (length - 1) == 0 or length & (length + 1) == 0


def _labels(row: SeenRow) -> bool:
    """Return whether messages begin with the name of the one who speaks, or end with that of the next."""
    if not row.is_chat:
        return False
    answers = [text for side in row.completions.values() for text in _answers_in(side)]
    if any(map(_SPEAKS_FOR_ASSISTANT.match, answers)):
        return True
    asks = _ASKS_ASSISTANT.search(row.last)
    question = row.last[: asks.start()] if asks else row.last
    is_single = not _OTHER_TURN.search(question)
    return is_single and bool(asks or _SPEAKS_FOR_USER.match(question))


def _speaks_for_both(row: SeenRow) -> bool:
    return row.is_chat and any(
        _NEXT_TURN.search(text) for side in row.completions.values() for text in _answers_in(side))


def _ends_with_answer(row: SeenRow) -> list[str]:
    """Return the columns whose text the prompt ends with, behind a word such as `Answer:`."""
    asked = row.last.rstrip()
    found = []
    for column, text in row.columns.items():
        answer = text.strip()
        if not answer or not asked.rstrip(".!").endswith(answer.rstrip(".!")):
            continue
        before = asked.rstrip(".!")[: -len(answer.rstrip(".!")) or None]
        if re.search(r"(?:\b(?:answer|solution|result)\b\W{0,6}(?:is\W{1,3})?|####\s*|=\s*|\\boxed\{)\Z",
                     before, re.IGNORECASE):
            found.append(column)
    return found


def _has_answered(row: SeenRow) -> bool:
    """Return whether the prompt ends with a message of the assistant that is the completion itself."""
    if not isinstance(row.prompt, list) or not row.prompt or row.prompt[-1]["role"] != "assistant":
        return False
    said = " ".join(row.last.split())
    return bool(said) and any(" ".join(text.split()) == said for text in row.columns.values())


def _asks_again(row: SeenRow) -> bool:
    prompt = row.prompt
    return isinstance(prompt, list) and bool(prompt) and prompt[-1]["role"] == "user" and any(
        isinstance(side, list) and side[0]["role"] == "user" for side in row.completions.values())


def _differ_in_space(row: SeenRow) -> bool:
    sides = [*row.completions.values()]
    if len(sides) < 2 or sides[0] == sides[1]:
        return False
    lines = [[line.rstrip() for line in _last_text(side).strip().splitlines()] for side in sides]
    is_same = lines[0] == lines[1] or len(lines[0]) == len(lines[1]) == 1  # It may be that of code.
    return is_same and compared_text(sides[0]) == compared_text(sides[1])


def _other_wholes(row: SeenRow) -> list[str]:
    """Return columns of conversations that lack what the columns have that are read instead."""
    if row.values.get(IS_WHOLE) or len(row.completions) > 1 or not row.completions:
        return []
    side = next(iter(row.completions.values()))
    learned = " ".join(_last_text(side).split())
    found = []
    for column in dict.fromkeys((row.config.messages_key, "conversations")):
        messages = row.values.get(column)
        if not isinstance(messages, list) or column in row.completions or column == row.config.prompt_key:
            continue
        said = [m.get("content", m.get("value")) for m in messages if isinstance(m, dict)]
        if said and learned not in " ".join(" ".join(map(str, said)).split()):
            found.append(f"column {column!r} has other answers than {next(iter(row.completions))!r}")
    return found


def _unread(row: SeenRow) -> list[str]:
    """Return columns that belong to the prompt by their names, and that nothing reads."""
    names = list(_BESIDE.get(row.config.prompt_key, ()))
    has_system = isinstance(row.prompt, list) and row.prompt[:1] and row.prompt[0]["role"] == "system"
    if row.is_chat and not has_system and row.config.system_prompt is None:
        names += _SYSTEMS
    said = compared_text(row.prompt)
    found = []
    for column in names:
        value = row.values.get(column)
        if value and isinstance(value, str | list) and column not in row.read and (
            compared_text(value if isinstance(value, str) else json.dumps(value)) not in said
        ):
            found.append(repr(column))
    return found


def _unread_tools(row: SeenRow) -> list[str]:
    if row.config.tools or row.config.tools_key is not None or not row.is_chat:
        return []
    if not re.search(r"\btools\b", row.template):
        return []
    values = {column: row.values.get(column) for column in _TOOLS if column not in row.read}
    return [
        repr(column) for column, value in values.items()
        if (isinstance(value, list) and value and all(isinstance(tool, dict) for tool in value))
        or (isinstance(value, str) and value.lstrip().startswith("[{"))]


def _parting(row: SeenRow) -> list[str]:
    """Return columns that nothing reads, and in which the row differs from the first one with its prompt."""
    if row.first is None or row.values.get(IS_WHOLE):
        return []
    used = {row.config.prompt_key, row.config.tools_key, *row.completions, *row.read}
    others = {
        column: value for column, value in row.values.items()
        if column not in used and isinstance(value, str) and value.count(" ") > 2}
    parting = [repr(column) for column, value in others.items() if value != row.first.get(column)]
    return [column for column in parting if column not in _unread(row)]


def _exchanged(row: SeenRow) -> list[str]:
    """Return in words that the chosen completion of a row has a lower score than the rejected one."""
    found = []
    for column, value in row.values.items() if len(row.completions) > 1 else ():
        other = column.replace("chosen", "rejected")
        values = (value, row.values.get(other))
        if other == column or not _SCORE.search(column):
            continue
        if all(isinstance(score, int | float) for score in values) and values[0] < values[1]:
            found.append(f"{column} is below {other}")
    return found


def _last_text(side: Any) -> str:
    """Return a text, or what the last message of a chat says."""
    return " ".join(texts_of(side[-1:] if isinstance(side, list) else side))


def _answers_in(side: Any) -> Iterator[str]:
    """Yield a text, or what the assistant says in messages."""
    said = [m for m in side if m["role"] == "assistant"] if isinstance(side, list) else side
    return texts_of(said)


RULES = (
    Rule("texts have U+FFFD, which stands for bytes that were not UTF-8 when the file was made",
         _in_texts(re.compile("\N{REPLACEMENT CHARACTER}").search, in_ascii=False)),
    Rule("texts seem to be UTF-8 that was read in another encoding, such as Ã© for é",
         _in_texts(_MISREAD.search, in_ascii=False)),
    Rule("texts begin with a byte order mark (U+FEFF), which the model reads",
         _in_texts(lambda text: text.startswith("\ufeff"), in_ascii=False)),
    Rule("texts have a backslash and an n instead of line breaks, as if they were escaped twice",
         _in_texts(_is_escaped)),
    Rule("texts have escapes such as \\u00e9 or \\' within words instead of the characters, as if they were "
         "escaped twice", _in_texts(_has_written_characters), share=0.02, least=2),
    Rule("texts have HTML's &quot;, &amp;, &lt; or &#39; and none of these characters themselves, as if an "
         "export had escaped them: html.unescape in a map function undoes it",
         _is_html, share=0.02, least=2),
    Rule("texts have %20 instead of spaces, as URLs have: urllib.parse.unquote in a map function undoes it",
         _in_texts(lambda text: "%20" in text and _PERCENT.fullmatch(text.strip())), share=0.02, least=2),
    Rule("texts begin or end with {}, which nobody sees and the model reads: a map function can remove it",
         _unseen_at_ends, share=0.05),
    Rule("there is {}, which nobody sees, and which completions lack that are compared with it: a map "
         "function can remove it", _unseen_in_answers),
    Rule("{} seems to stand for a value that is missing: leave such rows out", _missing_texts, least=2),
    Rule("{} seems to stand for a value that is missing: leave such rows out", _perhaps_missing_texts,
         share=0.05, least=2, holds=ColumnFacts.are_sentences),
    Rule("columns have their own names as values, as if the header of a table had become a row: remove it",
         _are_headers),
    Rule("completions have exactly {} characters, end within a sentence, and none is longer: they seem to be "
         "cut, so that the model learns to break off", _cut_lengths, share=0.05, least=5,
         holds=ColumnFacts.are_cut),
    Rule("messages have the role {}, which the chat template does not name (it is usually system, user, "
         "assistant or tool)", _roles),
    Rule("texts have {}, which is no token of this tokenizer but of other models' chats", _marks),
    # A single answer may well repeat its prompt, as in completed code, but not most of them.
    Rule("completions begin with the whole prompt, which the model reads twice", _repeats, share=0.5),
    Rule("completions are empty, of which a model learns to end at once",
         lambda row: any(map(_is_empty, row.completions.values()))),
    Rule("prompts are empty", lambda row: row.prompt is not None and _is_empty(row.prompt)),
    Rule("chats have no message but the system's", _has_system_only),
    Rule("messages begin with a speaker's name, such as `User:` or `Assistant:`, and the chat template "
         "writes roles, too: remove the names", _labels, share=0.5, least=2),
    Rule("completions go on with a turn of the user (`User:` or `Human:`), which the model learns to write",
         _speaks_for_both, share=0.05, least=2),
    Rule("prompts end with the {}, so that the model reads the answer that it is to give", _ends_with_answer,
         share=0.5, least=4),
    Rule("prompts end with a message of the assistant that is the whole answer already: leave it out there",
         _has_answered),
    Rule("prompts end with a message of the user, and completions begin with another one", _asks_again),
    Rule("completions differ in white space only, and that is all that the model learns from them",
         _differ_in_space),
    Rule("prompts are others than those with which chosen and rejected begin, and are not read: leave the "
         "column out if it is wrong", lambda row: row.values.get(OTHER_PROMPT)),
    Rule("{}, and is not read: leave out the column that is not meant", _other_wholes, share=0.1, least=2),
    Rule("the column {} belongs to prompts by its name, and nothing reads it: a map function can put it into "
         "the prompt, or make it None", _unread, share=0.05),
    Rule("the column {} has tools, and nothing reads it: tools_key names it (or leave it out)",
         _unread_tools),
    Rule("the prompt is one of few, the completions differ, and so does the column {}, which nothing reads: "
         "it seems to belong to the prompt, into which a map function can put it", _parting,
         share=0.9, least=8),
    Rule("{}: chosen and rejected may be exchanged", _exchanged),
)
"""The rules, in the order in which they are told."""
