"""The parts of a page, and its HTML: one file with all scripts, styles and data inside."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from realhf.errors import UserError
from realhf.user_input.files import read_text

_CODE = re.compile("`([^`]+)`")


@dataclass(frozen=True)
class Card:
    """A headline figure: what it is, its value, and a line below it."""

    title: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Sentences:
    """Sentences, the most important first; with `is_ranked` they are numbered."""

    lines: Sequence[str]
    is_ranked: bool = False
    kind: str = field(default="sentences", init=False)


@dataclass(frozen=True)
class TextTable:
    """A table; cells are texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    kind: str = field(default="table", init=False)


@dataclass(frozen=True)
class Plots:
    """Figures in a grid, each with a title and a line below it; with `has_smoothing`, all are smoothed by one
    slider. Those of `steps` are chosen by the step that the page shows."""

    figures: Sequence["Plot"]
    has_smoothing: bool = False
    is_wide: bool = False
    kind: str = field(default="plots", init=False)


@dataclass(frozen=True)
class Plot:
    """A figure, its title, and a line below it."""

    title: str
    figure: go.Figure
    note: str = ""


@dataclass(frozen=True)
class StepPlots:
    """Figures of single steps, of which the page shows one at a time, for the ranks that the reader names."""

    titles: Sequence[str]
    figures: Mapping[str, Sequence[go.Figure]]
    """What a step is called -> its figures, in the order of the titles."""
    first: str
    """The step that is shown first."""
    note: str = ""
    kind: str = field(default="steps", init=False)


@dataclass(frozen=True)
class SampleList:
    """Rollouts that the reader filters, and what was left out of them in words."""

    rollouts: Sequence[Mapping[str, Any]]
    note: str
    kind: str = field(default="samples", init=False)


@dataclass(frozen=True)
class TokenStrips:
    """The same sample in two runs around the first differing token: rows of a label and texts of tokens."""

    rows: Sequence[tuple[str, Sequence[str]]]
    differs_at: int
    note: str
    kind: str = field(default="strips", init=False)


@dataclass(frozen=True)
class FoldedText:
    """A text that is shown as it is, folded under a title."""

    title: str
    text: str
    kind: str = field(default="code", init=False)


PageBlock = Sentences | TextTable | Plots | StepPlots | SampleList | TokenStrips | FoldedText


@dataclass(frozen=True)
class PageSection:
    """A part of a page: its name in links, its title, a line below it, and its blocks."""

    name: str
    title: str
    blocks: Sequence[PageBlock]
    lead: str = ""


@dataclass(frozen=True)
class HtmlPage:
    """A page; with `refresh_seconds`, it loads itself again after so many seconds."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[PageSection]
    refresh_seconds: float | None = None

    def html(self) -> str:
        """Return the file's text."""
        return _template().render(
            page=self, plotly=get_plotlyjs(), style=_file("page.css"), script=_file("page.js"))

    def save(self, path: Path) -> None:
        """Write the file at once, so that no browser sees a part of it. Raises UserError."""
        part = path.with_name(f"{path.name}.part")
        try:
            part.write_text(self.html(), encoding="utf-8", errors="replace")
            part.replace(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error


def _file(name: str) -> str:
    return read_text(Path(__file__).with_name(name))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data"] = _data
    environment.filters["coded"] = _coded
    return environment.from_string(_file("page.html"))


def _data(value: Any) -> Markup:
    """Return a value as JSON that may stand inside a script element."""
    text = value.to_json() if isinstance(value, go.Figure) else json.dumps(value, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def _coded(text: str) -> Markup:
    """Return a sentence whose words in backticks are code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
