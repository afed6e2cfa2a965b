"""Shows logged answers: as a table, in full, or those to one prompt over the steps. Free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from realhf.cli.rollout_rows import Row, last_message, number_of, reward_names

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 10
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_SPARE = 12
"""Least width of a column of texts, in cells."""
_TEXTS = 60
"""Least width of prompt and completion together in a table of answers, unless they are shorter."""
_WIDEST = 10_000
_NARROW = 72
"""Width below which the table of a story has fewer columns."""
_TREND = 60
"""Most steps in the line of a trend."""


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text whose control characters are escaped, as they must not reach a terminal.

    Line breaks and tabs stay, or with `one_line` become a mark and a space.
    """
    if one_line:
        text = text.replace("\n", "⏎").replace("\t", " ")
    return "".join(
        c if c.isprintable() or c == "\n" else "    " if c == "\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def excerpt(text: str, width: int) -> str:
    """Return the beginning and the end of a text on one line that is at most `width` cells wide."""
    line = printable(text.strip(), one_line=True)
    if cell_len(line) <= width:
        return line
    tail = (width - 1) * 2 // 5
    end = _beginning(line[::-1], tail)[::-1]
    return f"{_beginning(line, width - 1 - tail)}…{end}"


def _beginning(line: str, width: int) -> str:
    """Return as many characters as fit into a number of cells."""
    for i, total in enumerate(accumulate(map(cell_len, line))):
        if total > width:
            return line[:i]
    return line


@dataclass(frozen=True)
class _Excerpt:
    """A text that a cell of a table shortens to one line."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(excerpt(self.text, options.max_width), style=self.style, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_SPARE, max(_SPARE, cell_len(self.text)))


def show_rows(console: Console, rows: Sequence[Row], *, note: str) -> None:
    """Print the answers, and a last line that says how many there are.

    They are a table with a line for each, or where that would leave too little room for the texts, the
    prompts with the answers below them.
    """
    table = _table(rows)
    longest = [max((cell_len(excerpt(text, _TEXTS)) for text in texts), default=0) for texts in (
        map(last_message, rows), (str(row.get("completion", "")) for row in rows))]
    needed = min(_TEXTS, sum(longest))
    unlimited = console.options.update(max_width=_WIDEST)
    if Measurement.get(console, unlimited, table).minimum - 2 * _SPARE + needed <= console.width:
        console.print(table)
    else:
        _print_below_prompts(console, rows)
    console.print(Text(note, style="dim"), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    """Return a table with one line per answer."""
    rewards = reward_names(rows)
    low, high = _score_range(rows)
    numbers = [*(["set"] if any(row.get("set") for row in rows) else []), "step", "row"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), expand=True)
    for name in numbers:
        table.add_column(name, justify="left" if name == "set" else "right", no_wrap=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    table.add_column("score", justify="right", no_wrap=True)
    for name in rewards:
        table.add_column(Text(printable(name, one_line=True)), justify="right", no_wrap=True)
    table.add_column("length", justify="right", no_wrap=True)
    previous: Any = None
    for row in rows:
        place = _prompt_of(row)
        repeated = "dim" if place == previous else ""
        previous = place
        cells: list[RenderableType] = [
            *([Text(printable(str(row.get("set", "")), one_line=True))] if "set" in numbers else []),
            _shown(row.get("step"), repeated), _shown(row.get("dataset_row"), repeated),
            _Excerpt(last_message(row), repeated or "cyan"), _Excerpt(str(row.get("completion", ""))),
            _score(row, low, high), *(_shown(number_of(row, f"rewards.{name}")) for name in rewards),
            _length(row)]
        table.add_row(*cells)
    return table


def _print_below_prompts(console: Console, rows: Sequence[Row]) -> None:
    """Print each prompt once, and below it the answers and the facts about them."""
    low, high = _score_range(rows)
    previous: Any = None
    for row in rows:
        if (place := _prompt_of(row)) != previous:
            previous = place
            console.print(Text(f"{_place(row, with_sample=False)}", style="bold"))
            console.print(_indented(_Excerpt(last_message(row), "cyan"), 2))
        console.print(_indented(_Excerpt(str(row.get("completion", ""))), 4))
        console.print(_indented(Text(" · ", style="dim").join(_facts(row, low, high)), 6))


def _indented(text: RenderableType, width: int) -> Padding:
    return Padding(text, (0, 0, 0, width))


def _prompt_of(row: Row) -> list[Any]:
    """Return what the answers to one prompt in one step have in common."""
    return [row.get(name) for name in ("set", "step", "dataset_row", "prompt")]


def show_in_full(console: Console, rows: Sequence[Row], *, note: str, tokens: bool = False) -> None:
    """Print each answer in a panel: prompt, completion, what the reward has read, and perhaps `tokens`."""
    low, high = _score_range(rows)
    for row in rows:
        body = Group(Text(" · ", style="dim").join(_facts(row, low, high)), Rule(style="dim"), _body(row),
                     *(_tokens(row) if tokens else []))
        title = Text(_place(row), style="not dim")
        console.print(Panel(body, title=title, title_align="left", border_style="dim", padding=(0, 1)))
    console.print(Text(note, style="dim"), soft_wrap=True)


def show_story(console: Console, story: Sequence[tuple[Any, Sequence[Row]]]) -> None:
    """Print the answers to one prompt over the steps: `story` has each step with its answers."""
    rows = [row for _, answers in story for row in answers]
    low, high = _score_range(rows)
    first = rows[0]
    place = f"row {first['dataset_row']}" if first.get("dataset_row") is not None else "prompt"
    body = Group(*_prompt(first), *_columns(first))
    title = Text(place, style="not dim")
    console.print(Panel(body, title=title, title_align="left", border_style="dim", padding=(0, 1)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), expand=True)
    is_narrow = console.width < _NARROW
    names = ["step", "answers", "mean score", "", "worst", "best", "length", "cut"]
    for name in ["step", "mean score"] if is_narrow else names:
        justify: Any = "right" if name else "left"
        table.add_column(name, justify=justify, no_wrap=True, width=None if name else _BAR_WIDTH)
    table.add_column("best answer", ratio=1)
    means: list[float] = []
    for step, answers in story:
        scores = [score for row in answers if (score := number_of(row, "score")) is not None]
        lengths = [length for row in answers if (length := number_of(row, "length")) is not None]
        best = max(answers, key=lambda row: _score_or(row, float("-inf")))
        mean = sum(scores) / len(scores) if scores else None
        means += [] if mean is None else [mean]
        num_cut = sum(row.get("finished") is False for row in answers)
        cells: list[RenderableType] = [
            _shown(step), str(len(answers)), _shown(mean), _bar(mean, low, high),
            _shown(min(scores, default=None)), _shown(max(scores, default=None)),
            _shown(sum(lengths) / len(lengths) if lengths else None), str(num_cut) if num_cut else ""]
        cells = [cells[0], cells[2]] if is_narrow else cells
        table.add_row(*cells, _Excerpt(str(best.get("completion", ""))))
    console.print(table)
    if means:
        shown = means[:: -(-len(means) // _TREND)]
        trend = "".join(_BARS[round(_share(mean, min(means), max(means)) * 7)] for mean in shown)
        ends = f"mean score {means[0]:z.4g} at first, {means[-1]:z.4g} at last"
        console.print(Text.assemble((trend, "green"), "  ", (ends, "bold")))


def show_stories(console: Console, stories: Sequence[Row], *, note: str) -> None:
    """Print a line for each prompt: its row, in how many steps it came up, and its first and last score."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), expand=True)
    names = ["set"] if any(story["set"] for story in stories) else []
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("row", "steps", "first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", ratio=1)
    for story in stories:
        cells = [_shown(story["set"])] if names else []
        shown = (story[key] for key in ("dataset_row", "num_steps", "first_score", "last_score"))
        table.add_row(*cells, *map(_shown, shown), _Excerpt(last_message(story), "cyan"))
    console.print(table)
    console.print(Text(note, style="dim"), soft_wrap=True)


def _place(row: Row, *, with_sample: bool = True) -> str:
    """Return where an answer comes from, or with others of its prompt without its sample."""
    names = [("set", "set"), ("step", "step"), ("row", "dataset_row")]
    names += [("sample", "sample")] if with_sample else []
    fields = [(name, row[key]) for name, key in names if row.get(key) not in (None, "")]
    return " · ".join(f"{name} {printable(str(value), one_line=True)}" for name, value in fields)


def _facts(row: Row, low: float, high: float) -> list[Text]:
    """Return the facts about an answer that are shown beside its texts, such as its score."""
    facts = [Text("score ").append_text(_score(row, low, high))]
    for name in row.get("rewards") or {}:
        facts.append(Text(f"{printable(name, one_line=True)} ").append_text(
            _shown(number_of(row, f"rewards.{name}"))))
    if number_of(row, "advantage") is not None:
        facts.append(Text("advantage ").append_text(_shown(number_of(row, "advantage"))))
    if row.get("length") is not None:
        facts.append(_shown(row["length"]).append(" tokens"))
    if row.get("finished") is False:
        facts.append(Text("cut", style="yellow"))
    if versions := row.get("versions"):
        facts.append(Text(f"weights {versions[0]} to {versions[-1]}"))
    return facts


def _body(row: Row) -> Group:
    completion = Text(printable(str(row.get("completion", ""))), style="green")
    return Group(*_prompt(row), Rule(style="dim"), completion, *_columns(row))


def _tokens(row: Row) -> list[RenderableType]:
    """Return the token ids of an answer; those that were sampled have their log-probs behind them."""
    ids = row.get("token_ids") or []
    mask = row.get("response_mask") or [0] * len(ids)
    logprobs = row.get("logprobs") or [None] * len(ids)
    if not ids:
        return []
    words = [
        f"{token}:{logprob:z.4g}" if is_sampled and logprob is not None else str(token)
        for token, is_sampled, logprob in zip(ids, mask, logprobs, strict=False)]
    return [Rule(style="dim"), Text(f"token ids: {' '.join(words)}", style="blue")]


def _prompt(row: Row) -> list[Text]:
    """Return the prompt, or the messages of a chat, in colours."""
    prompt = row.get("prompt", "")
    if not isinstance(prompt, list):
        return [Text(printable(str(prompt)), style="cyan")]
    texts = []
    for message in prompt:
        role = str(message.get("role", "")) if isinstance(message, dict) else ""
        style = _ROLE_STYLES.get(role, "cyan")
        text = last_message({"prompt": [message]})
        name = f"{printable(role, one_line=True)}: "
        texts.append(Text.assemble((name, f"bold {style}"), (printable(text), style)))
    return texts


def _columns(row: Row) -> list[RenderableType]:
    """Return the columns of the dataset that the reward has read, and what it has logged."""
    shown = [
        Text(f"{printable(str(name), one_line=True)}: {excerpt(_plain(value), 400)}", style=style)
        for group, style in (("columns", "magenta"), ("extra", "yellow"))
        for name, value in (row.get(group) or {}).items()]
    return [Rule(style="dim"), *shown] if shown else []


def _plain(value: Any) -> str:
    return f"{value:z.6g}" if isinstance(value, float) else str(value)


def _score_range(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the lowest and the highest score."""
    scores = [score for row in rows if (score := number_of(row, "score")) is not None]
    return min(scores, default=0.0), max(scores, default=0.0)


def _share(value: float, low: float, high: float) -> float:
    """Return how far a value lies between two others, from 0 to 1; 1 if these are equal."""
    return (value - low) / (high - low) if high > low else 1.0


def _score_or(row: Row, default: float) -> float:
    score = number_of(row, "score")
    return default if score is None else score


def _score(row: Row, low: float, high: float) -> Text:
    """Return the score, red in the lowest third of those that are shown and green in the highest."""
    score = number_of(row, "score")
    if score is None or low == high:
        return _shown(score)
    share = _share(score, low, high)
    style = "red" if share < 1 / 3 else "green" if share > 2 / 3 else "yellow"
    return Text(f"{score:z.4g}", style=style)


def _bar(value: float | None, low: float, high: float) -> Text:
    """Return a bar as long as the value is high between the lowest and the highest score."""
    if value is None:
        return Text("")
    return Text("█" * round(_share(value, low, high) * _BAR_WIDTH), style="green")


def _length(row: Row) -> Text:
    """Return the length, marked if the answer was cut off."""
    text = _shown(row.get("length"))
    return text.append(" cut", style="yellow") if row.get("finished") is False else text


def _shown(value: Any, style: str = "") -> Text:
    """Return a value in few characters; a dash if it is not known."""
    if value is None:
        return Text("-", style="dim")
    text = f"{value:z.4g}" if isinstance(value, float) else printable(str(value), one_line=True)
    return Text(text, style=style)
