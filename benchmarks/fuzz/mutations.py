"""Hypothesis strategies that damage valid documents and texts, and that make noise."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

_DEEP: Any = []
for _ in range(60):
    _DEEP = [_DEEP]
NASTY_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1000, 2**31, 2**63, 10**9, 10**18, 10**30, 10**400, -(10**30), 0.5,
    -0.5, 1e308, -1e308, 5e-324, 1e-30, math.nan, math.inf, -math.inf, "", " ", "0", "1", "-1", "1e5", "nan",
    "inf", "1e999", "null", "true", "80 GB", "1e400 GB", "-5 us", ". GB", "d1@0", "d2t2@0-3", "é", "日本語",
    "\u202e", "\u2028", "\x00", "\x1b[31m", "a\nb", "'", '"', "%s", "{}", "../..", "/", "/dev/null", "~",
    "x" * 5000,
    [], {}, [[]], [{}], {"": ""}, {"a": {"b": []}}, [1, 2, 3], [None], ["x"], [0.5], _DEEP,
)
"""Values that readers of files are known to trip over."""
NASTY_NAMES = (
    "", " ", "é", "x" * 300, "a\nb", "\x1b[2J", "__class__", "self", "cls", "()", "0",
    "None", "-",
)
_GROWING = (
    "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "a0: &a0 {x: y}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)),
)
"""YAML of less than a kilobyte whose aliases and merge keys stand for billions of values."""
_SNIPPETS = (
    "\x00", "\ufeff", "\u2028", "\r", "\t", "\n", "\n\n", ":", ": ", "- ", "{", "}", "[", "]", ",", '"', "'",
    "#", "&a ", "*a", "<<: *a", "!!python/object:os.system ls", "!!binary x", "!!timestamp x", "!!int x",
    "!!float x", "!!set {a}", "2026-13-45", "2026-01-01", "1:60", ".nan", ".inf", "NaN", "Infinity",
    "---", "...", "%", "@", "`", "|", ">", "?", "\\", "\\ud800", "\\u0000", "1e999", "9" * 5000, "0x", "0o9",
    *_GROWING, "!!int ''", "!!omap [a: 1]", "0x" + "f" * 5000, "1:" + "59:" * 300 + "1", "- " * 2000,
    "é", "\U0001f600", "[" * 3000, "{" * 3000, '{"a":' * 2000,
)
_RAW = (b"\xff", b"\x80abc", b"\xfe\xff", b"\xef\xbb\xbf", b"\xc3", b"\xed\xa0\x80")

SCALARS = st.one_of(
    st.sampled_from(NASTY_VALUES),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
)
NAMES = st.one_of(st.sampled_from(NASTY_NAMES), st.text(max_size=8))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=6,
)
"""Any document of lists, mappings and scalars."""


def _slots(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a document: a list or mapping in it, and an index or name there."""
    places = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(places):
        yield document, key
        if isinstance(value, dict | list):
            yield from _slots(value)


def _drop(draw: Any, box: Any, key: Any) -> None:
    del box[key]


def _replace(draw: Any, box: Any, key: Any) -> None:
    box[key] = copy.deepcopy(draw(ANYTHING))  # The next change must not reach the strategy's own values.


def _nudge(draw: Any, box: Any, key: Any) -> None:
    """Change a number a little or a lot, and other values to their text."""
    value = box[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        box[key] = draw(st.sampled_from((str(value), [value], {"a": value}, None)))
        return
    most = value * 10**300 if isinstance(value, int) else math.nan
    changes = (
        value + 1, value - 1, -value, value * 1000, value * 10**12, min(value, 1e300) / 3, str(value), 0,
        most,
    )
    box[key] = draw(st.sampled_from(changes))


def _rename(draw: Any, box: Any, key: Any) -> None:
    if isinstance(box, list):
        box[key] = {draw(NAMES): box[key]}
        return
    value = box.pop(key)
    near = (str(key)[:-1], f"{key}_", str(key).upper(), str(key).replace("_", "-"))
    box[draw(st.sampled_from(near) | NAMES)] = value


def _repeat(draw: Any, box: Any, key: Any) -> None:
    if isinstance(box, list):
        box.extend(copy.deepcopy(box[key]) for _ in range(draw(st.sampled_from((1, 2, 100)))))
    else:
        box[draw(NAMES)] = copy.deepcopy(box[key])


def _swap(draw: Any, box: Any, key: Any) -> None:
    """Put here what stands elsewhere in the same list or mapping."""
    keys = list(box) if isinstance(box, dict) else range(len(box))
    box[key] = copy.deepcopy(box[draw(st.sampled_from(keys))])


_CHANGES: tuple[Callable[[Any, Any, Any], None], ...] = (
    _drop, _replace, _replace, _nudge, _nudge, _rename, _repeat, _swap,
)


@st.composite
def damaged(draw: Any, documents: Sequence[Any]) -> Any:
    """Draw a copy of one of the documents with one to three changes anywhere in it."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        if slots := list(_slots(document)):
            box, key = draw(st.sampled_from(slots))
            draw(st.sampled_from(_CHANGES))(draw, box, key)
    return document


@st.composite
def damaged_text(draw: Any, texts: Sequence[str]) -> bytes:
    """Draw the bytes of one of the texts with one to three slices cut, repeated or put in."""
    data = draw(st.sampled_from(texts)).encode()
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.sampled_from((0, 1, 3, 10, 100))))
        inserted = draw(st.one_of(
            st.sampled_from([text.encode() for text in _SNIPPETS]),
            st.sampled_from(_RAW), st.binary(max_size=4), st.just(b""), st.just(data[start:stop] * 2),
        ))
        data = data[:start] + inserted + data[stop:]
    return data


@st.composite
def damaged_bytes(draw: Any, data: bytes) -> bytes:
    """Draw a file of which one to four bytes are others, or whose end is cut off."""
    content = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 5)) == 0 else content)


def as_yaml(document: Any) -> bytes:
    """Return a document as YAML, in which names and values that YAML cannot write are JSON."""
    return yaml.safe_dump(document, sort_keys=False).encode(errors="surrogatepass")


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode(errors="surrogatepass")


def files_like(documents: Sequence[Any], write: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """Draw files: mostly damaged documents, then damaged texts, other documents and noise."""
    texts = [write(document).decode() for document in documents]
    fields, text = damaged(documents).map(write), damaged_text(texts)
    noise = st.one_of(ANYTHING.map(write), st.binary(max_size=40), st.text(max_size=40).map(str.encode))
    return st.integers(0, 9).flatmap(lambda n: fields if n < 7 else text if n < 9 else noise)
