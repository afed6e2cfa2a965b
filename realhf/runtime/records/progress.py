"""Shows a run on standard error: as a live table on a terminal, otherwise as plain lines."""

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

from realhf.calls import Generate
from realhf.distributed.process import WatchedProcess
from realhf.runtime.compile.program import Program
from realhf.user_input.units import format_bytes


@dataclass(frozen=True)
class _Column:
    """A metric of a step that is shown, under its title."""

    metric: str
    title: str
    drop_order: int
    """The order in which columns leave a terminal that is too narrow: those with the largest number first."""
    is_share: bool = False


_COLUMNS = (
    _Column("reward/mean", "reward", 0),
    _Column("reward/group_std", "spread", 1),
    _Column("reward/failed", "failed", 0, is_share=True),
    _Column("actor/loss", "loss", 0),
    _Column("reward/loss", "loss", 0),
    _Column("rewards/accuracies", "accuracy", 0, is_share=True),
    _Column("reward/accuracy", "accuracy", 0, is_share=True),
    _Column("rewards/margins", "margin", 1),
    _Column("reward/margin", "margin", 1),
    _Column("actor/ref_kl", "KL to ref", 1),
    _Column("reward/kl", "KL to ref", 1),
    _Column("actor/reverse_kl", "KL to teacher", 0),
    _Column("critic/vf_loss", "value loss", 2),
    _Column("response_length/mean", "length", 2),
    _Column("response_length/clip_ratio", "cut off", 2, is_share=True),
    _Column("actor/entropy", "entropy", 5),
    _Column("actor/grad_norm", "grad norm", 6),
    _Column("reward/grad_norm", "grad norm", 6),
    _Column("actor/empty_updates", "empty updates", 1),
    _Column("perf/generated_tokens_per_s", "generated tokens/s", 3),
    _Column("perf/trained_tokens_per_s", "trained tokens/s", 4),
    _Column("timing_s/step", "seconds", 1),
)
_OF_REWARDS = 7
"""The place of single rewards in the order in which columns leave a narrow terminal."""
_REWARD = re.compile("reward/(.+)/mean")
"""Name of the metric of one of several rewards; its title is the reward's name."""
_WITHOUT_LOSS = {"actor/loss": ("actor/pg_loss", "actor/reverse_kl")}
"""Losses that tell nothing beside one of these metrics: the value of a policy gradient's loss is 0 by
construction in the first mini-batch, and that of a distillation is the KL."""
_OWN_GOAL = re.compile(r"(?:.*/)?(?:return|returns|success|successes|accuracy)(?:/mean)?")
"""Names of metrics that users log of their own, and of which they want to see how they rise."""
_NOISE = 1e-6
_ROWS = 12
_WIDEST = 10_000
_EVAL = "eval/"
_MAIN = ("score", "loss")
"""The main metric of a held-out set: the first of these that it has."""
_SHORT = {
    "response_length/mean": "length", "response_length/clip_ratio": "cut off",
    "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
"""Short names of metrics of evaluations."""
_UNSHOWN = ("mean@", "rewards/chosen", "rewards/rejected", "mean_reward")
"""Beginnings of metrics of evaluations that tell no more than others: `mean@k` is the score."""
_STEPS_OF_FAULTS = 3
"""Number of successive steps after which the user is warned that nothing is learned."""
_PATIENCE_SECONDS = 30.0
"""Seconds without output after which a plain line shows the current process."""


class Progress:
    """Shows one row per step, and during long steps the present work of rank 0."""

    def __init__(
        self, program: Program, process: WatchedProcess, *, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._program = program
        self._process = process
        self._patience_seconds = patience_seconds
        self._last_line = time.monotonic()
        self._is_over = Event()
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._rows: deque[tuple[str, Mapping[str, float]]] = deque(maxlen=_ROWS)
        self._score = ""
        self._may_end = not any(work.sampling.ignore_eos for work in program.graph.works(Generate))
        self._warned: set[str] = set()
        has_texts = any(role.is_language_model for role in program.roles.values())
        self._rows_are = "prompts" if has_texts else "rows"
        self._tokens_are = "tokens" if has_texts else "rows"

    def start(self, dataset: Sized | None, *, held_out: Mapping[str, int]) -> None:
        e = self._program.experiment
        samples = f"{e.batch_size} {self._rows_are}"
        if self._rows_are == "prompts" or e.group_size > 1:
            samples += f" x {e.group_size} = {e.batch_size * e.group_size} samples"
        training = f"{len(dataset or ())} training {self._rows_are}, {_counts(held_out)}"
        self._say(f"{_steps(e.steps)} of {samples}; {training}")
        for call in self._program.graph.order:
            self._say(f"  {call.name:<18} {call.kind:<10} {self._program.plan[call.name].layout}")
        for name, (trained, total) in self._program.adapter_sizes.items():
            share = f"{trained / total:.2%} of its {total:,}"
            self._say(f"  {name} has adapters of {trained:,} parameters, {share}")
        self.watch()

    def watch(self) -> None:
        """Show from now on what rank 0 is doing."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._shown)
            self._live.start()
            self._console.show_cursor(True)  # A run that is killed cannot show it again.
        else:
            self._last_line = time.monotonic()
            Thread(target=self._watch, name="progress", daemon=True).start()

    def _watch(self) -> None:
        """Print the present work whenever nothing has been printed for a while."""
        while not self._is_over.wait(max(0.0, self._last_line + self._patience_seconds - time.monotonic())):
            if time.monotonic() < self._last_line + self._patience_seconds:
                continue
            if work := str(self._process):
                self._say(work)
            else:
                self._last_line = time.monotonic()

    def _say(self, lines: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(lines, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        label = f"{step}/{self._program.experiment.steps}"
        self._rows.append((label, metrics))
        if self._live is not None:
            self._live.refresh()
        elif step % self._program.experiment.log_every == 0:
            shown = [f"{self._title(c)} {_value(c, metrics[c.metric])}" for c in shown_columns(metrics)]
            self._say(f"step {label}: {', '.join(shown)}")
        self._warn()

    def _title(self, column: _Column) -> str:
        return column.title.replace("tokens", self._tokens_are)

    def _warn(self) -> None:
        """Print a warning if nothing has been learned in the newest steps; each kind of fault once."""
        newest = [metrics for _, metrics in self._rows][-_STEPS_OF_FAULTS:]
        if len(newest) == _STEPS_OF_FAULTS and (fault := fault_of(newest, may_end=self._may_end)) is not None:
            kind, reason = fault
            if kind not in self._warned:
                self._warned.add(kind)
                self._say(f"realhf: warning: {reason}")

    def evaluation(self, step: int, metrics: Mapping[str, float], first: Mapping[str, float]) -> None:
        """Show the evaluation after a step; `first` has the metrics of the run's first evaluation."""
        prefixes = [eval_set.prefix for eval_set in self._program.evaluations]
        lines = evaluation_lines(metrics, prefixes, first=first)
        self._score = "\n".join([f"held out, {when(step)}: {lines[0]}".rstrip(), *lines[1:]])
        if self._live is not None:
            self._live.refresh()
        else:
            self._say(self._score)

    def finish(self, summary: Mapping[str, Any], out: Path | None) -> None:
        self.stop()
        are = self._tokens_are
        tokens = [f"{count:,} {are} {what}" for what, count in summary["tokens"].items() if count]
        counted = "".join(f", {text}" for text in tokens)
        lines = [f"{_steps(summary['steps'])} in {_duration(summary['seconds'])}{counted}"]
        lines += self._held_out(summary)
        if failed := summary["failed"]:
            lines.append(f"rewards or environments of {failed:.1%} of all samples failed")
        for role, realloc in summary["realloc"].items():
            moved = f"{realloc['bytes_per_step'] / 1e6:.2f} MB per step"
            rate = realloc["gbytes_per_s"]
            measured = "" if rate is None else f", measured {rate:.3g} GB/s into the busiest rank"
            lines.append(f"reallocated {role}: {moved}{measured}")
            computed = f"schedule computed at {realloc['over_bound']:.2f} x its lower bound"
            lines.append(f"  {computed} ({realloc['links']})")
        lines += memory_lines(summary["process_memory"], summary["memory"])
        if out is not None:
            lines.append(f"metrics, pictures and TensorBoard files: {out}")
            kind = "Hugging Face model" if self._tokens_are == "tokens" else "module"
            lines.append(f"{kind}: {summary['hf_dir']}")
        self._say("\n".join(lines))

    def _held_out(self, summary: Mapping[str, Any]) -> list[str]:
        """Return a line about the main metric of each set: its first and its last value."""
        main = [summary["eval_metric"]] if summary["eval_metric"] is not None else []
        for eval_set in self._program.evaluations[1:]:
            names = [f"{eval_set.prefix}{name}" for name in _MAIN]
            main += [name for name in names if name in summary["evals"]][:1]
        lines = []
        first, last = summary["eval_steps"] or (0, 0)
        for name in main:
            ends = summary["evals"][name]
            before = "" if first == last else f"{ends['first']:.3f} {when(first)}, "
            lines.append(f"held-out {name.removeprefix(_EVAL)}: {before}{ends['last']:.3f} {when(last)}")
        return lines

    def stop(self) -> None:
        """Release the terminal; a second call does nothing."""
        self._is_over.set()
        if self._live is not None:
            self._live.stop()

    def _shown(self) -> Group:
        below = filter(None, [self._score, self._outlook(), str(self._process)])
        return Group(*([self._table()] if self._rows else []), *below)

    def _outlook(self) -> str:
        """Return how long the steps that are left will take, at the pace of the newest ones."""
        seconds = [metrics["timing_s/step"] for _, metrics in self._rows if "timing_s/step" in metrics]
        left = self._program.experiment.steps - int(self._rows[-1][0].partition("/")[0]) if self._rows else 0
        if not seconds or not left:
            return ""
        return f"{left} steps left, about {_duration(left * median(seconds))}"

    def _table(self) -> Table:
        """Return the table of the newest steps, with as many columns as fit into the terminal."""
        columns = shown_columns(self._rows[-1][1])
        unlimited = self._console.options.update(max_width=_WIDEST)
        while True:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
            table.add_column("step", no_wrap=True)
            for column in columns:  # A long title has two lines.
                title = self._title(column)
                title = title if len(title) < 9 else "\n".join(title.rsplit(" ", 1))
                table.add_column(title, justify="right", no_wrap=True)
            for label, metrics in self._rows:
                values = [(column, metrics.get(column.metric)) for column in columns]
                table.add_row(label, *("" if x is None else _value(column, x) for column, x in values))
            width = Measurement.get(self._console, unlimited, table).maximum
            if width <= self._console.width or len(columns) < 2:
                return table
            columns.remove(max(reversed(columns), key=lambda column: column.drop_order))


def fault_of(steps: Sequence[Mapping[str, float]], *, may_end: bool = True) -> tuple[str, str] | None:
    """Return a reason why nothing is learned in these steps, with its kind, or None.

    `may_end` is whether a response can end by itself, without which it counts as cut off.
    """
    newest = steps[-1]
    ended = f"in {len(steps)} steps"
    hint = "nothing is learned from them"
    if all(step.get("reward/zero_std_groups", 0.0) == 1.0 for step in steps):
        equal = f"the samples of each prompt all had the same reward (mean {_number(newest['reward/mean'])})"
    elif "reward/zero_std_groups" not in newest and all(step.get("reward/std", 1.0) < 1e-9 for step in steps):
        equal = f"all samples had the same reward ({_number(newest['reward/mean'])})"
    else:
        equal = ""
    cut_off = [step.get("response_length/clip_ratio", 0.0) for step in steps]
    if equal:
        share = f"{sum(cut_off) / len(steps):.0%} of the responses were cut off at sampling.max_new_tokens"
        return "equal", f"{ended} {equal}: {hint}; {share}; `realhf rollouts` shows them"
    still = [name.partition("/")[0] for name in newest if name.endswith("/grad_norm")
             and all(step.get(name, 1.0) == 0.0 for step in steps)]
    if still:
        return "still", f"{ended} the gradient of {' and '.join(still)} was 0: nothing is learned"
    rewards = [match[1] for name in newest if (match := _REWARD.fullmatch(name)) is not None]
    for name in rewards if len(rewards) > 1 else ():  # A single reward is the score, of which None is 0.
        if all(step.get(f"reward/{name}/std") == 0.0 for step in steps):
            value = _number(newest[f"reward/{name}/mean"])
            return "constant", f"{ended} reward {name} was {value} for every sample: it teaches nothing"
    if may_end and min(cut_off) == 1.0:
        why = "no response ended by itself: all were cut off at sampling.max_new_tokens"
        return "cut", f"{ended} {why}; raise it, or see with `realhf rollouts` why responses go on"
    return None


def shown_columns(metrics: Mapping[str, float]) -> list[_Column]:
    """Return the metrics that are shown for a step, with each reward if there are several."""
    rewards = {name: match[1] for name in metrics if (match := _REWARD.fullmatch(name)) is not None}
    columns: list[_Column] = []
    for column in _COLUMNS:
        tells = not any(name in metrics for name in _WITHOUT_LOSS.get(column.metric, ()))
        if column.metric in metrics and tells:
            columns.append(column)
        if column.metric == "reward/mean" and len(rewards) > 1:
            columns += [_Column(name, title, _OF_REWARDS) for name, title in rewards.items()]
    listed = {column.metric for column in _COLUMNS}
    others = [name for name in metrics if name.endswith("/loss") and name not in listed]
    roles = [name.removesuffix("/loss") for name in others]  # Of graphs that users write.
    named = [role for role in roles if not {f"{role}/pg_loss", f"{role}/vf_loss"} & metrics.keys()]
    goals = [name for name in metrics if _OWN_GOAL.fullmatch(name) and name not in listed]
    return [
        *(_Column(name, name.removesuffix("/mean"), 0) for name in goals),
        *(_Column(f"{role}/loss", f"{role} loss", 1) for role in named), *columns]


def _value(column: _Column, value: float) -> str:
    if column.is_share:
        return f"{value:.0%}"
    if column.metric.endswith("/loss"):
        return f"{value:.4g}"
    return _number(value)


def _number(value: float) -> str:
    """Return a metric as text; 0 if the value is no more than rounding noise."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if abs(value) < _NOISE else f"{value:.4g}"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _duration(seconds: float) -> str:
    """Return seconds as text, those above a minute with minutes and hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def when(step: int) -> str:
    """Return when an evaluation took place, in words."""
    return f"after step {step}" if step else "before step 1"


def evaluation_lines(
    metrics: Mapping[str, float], prefixes: Sequence[str], *, first: Mapping[str, float] | None = None
) -> list[str]:
    """Return the metrics of an evaluation as text: one line, or a line with the name of each set.

    The score or the loss of a set has that of the run's `first` evaluation behind it, if it is another one.
    """
    earlier = {} if first is None or first == metrics else first
    lines = []
    for prefix in prefixes if len(prefixes) > 1 else [_EVAL]:
        of_set = {name.removeprefix(prefix): x for name, x in metrics.items() if name.startswith(prefix)}
        shown = {name: x for name, x in of_set.items() if not name.startswith(_UNSHOWN)}
        main = next((name for name in _MAIN if name in shown), "")
        texts = []
        for name, value in shown.items():
            before = earlier.get(f"{prefix}{name}") if name == main else None
            texts.append(f"{_SHORT.get(name, name)} {value:.3f}" + (
                "" if before is None else f" ({before:.3f} at first)"))
        text = ", ".join(texts)
        lines.append(text if prefix == _EVAL else f"  {prefix.removeprefix(_EVAL).rstrip('/')}: {text}")
    return lines if len(lines) == 1 else ["", *lines]


def memory_lines(process: Mapping[str, float], calls: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return lines about the memory of a run: that of a process, and that of a rank in each call."""
    lines = []
    if (peak := process.get("measured")) is not None:
        predicted = process.get("predicted")
        beside = "" if predicted is None else f", {format_bytes(predicted)} predicted"
        others = f"{format_bytes(process['beside_models'])} of it beside the models"
        lines.append(f"memory of a process: {format_bytes(peak)} measured at its peak ({others}){beside}")
    counted = {call: sizes["counted"] for call, sizes in calls.items() if "counted" in sizes}
    for call, sizes in calls.items():
        shown = ", ".join(f"{format_bytes(size)} {how}" for how, size in sizes.items())
        if call not in counted:
            lines.append(f"memory of a rank in {call}: {shown}")
        elif call == max(counted, key=counted.__getitem__):
            lines.append(f"  weights, gradients, optimizer and cache in {call}, where they are most: {shown}")
    return lines


def _counts(held_out: Mapping[str, int]) -> str:
    """Return how many prompts are held out, by set if there are several."""
    total = f"{sum(held_out.values())} held out"
    if len(held_out) < 2:
        return total
    return f"{total} ({', '.join(f'{name} {count}' for name, count in held_out.items())})"
