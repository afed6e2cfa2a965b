"""Shows a run on standard error: as a live table on a terminal, otherwise as plain lines."""

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from realhf.dist.activity import Activity
from realhf.runtime.compile.program import Program
from realhf.user_input.units import format_bytes

_COLUMNS = {
    "reward/mean": "reward",
    "response_length/mean": "length",
    "actor/loss": "loss",
    "actor/entropy": "entropy",
    "actor/ref_kl": "KL to ref",
    "actor/reverse_kl": "KL to teacher",
    "reward/kl": "KL to ref",
    "critic/vf_loss": "value loss",
    "reward/loss": "loss",
    "reward/accuracy": "accuracy",
    "actor/grad_norm": "grad norm",
    "actor/empty_updates": "empty updates",
    "timing_s/step": "seconds",
    "perf/tokens_per_s": "tokens/s",
}
_REWARD = re.compile("reward/(.+)/mean")
"""Name of the metric of one of several rewards; its title is the reward's name."""
_NOISE = 1e-6
_ROWS = 12
_EVAL = "eval/"
_SHORT = {"response_length/mean": "length", "response_length/clip_ratio": "cut off"}
"""Short names of metrics of evaluations."""
_STEPS_WITHOUT_SIGNAL = 3
"""Number of first steps without any difference between rewards after which the user is warned."""
_PATIENCE_SECONDS = 30.0
"""Seconds without output after which a plain line shows the current activity."""


class Progress:
    """Shows one row per step, and during long steps the current activity of rank 0."""

    def __init__(
        self, program: Program, activity: Activity, *, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._program = program
        self._activity = activity
        self._patience_seconds = patience_seconds
        self._last_line = time.monotonic()
        self._is_over = Event()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._rows: deque[tuple[str, Mapping[str, float]]] = deque(maxlen=_ROWS)
        self._score = ""

    def start(self, dataset: Sized | None, *, held_out: Mapping[str, int]) -> None:
        e = self._program.experiment
        self._console.print(
            f"{e.steps} steps of {e.batch_size} prompts x {e.group_size} = {e.batch_size * e.group_size} "
            f"samples; {len(dataset or ())} training prompts, {_counts(held_out)}"
        )
        for call in self._program.graph.order:
            self._console.print(f"  {call.name:<18} {call.kind:<10} {self._program.plan[call.name].layout}")
        for name, (trained, total) in self._program.adapter_sizes.items():
            share = f"{trained / total:.2%} of its {total:,}"
            self._console.print(f"  {name} has adapters of {trained:,} parameters, {share}")
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._shown)
            self._live.start()
        else:
            self._last_line = time.monotonic()
            Thread(target=self._watch, name="progress", daemon=True).start()

    def _watch(self) -> None:
        """Print the current activity whenever nothing has been printed for a while."""
        while not self._is_over.wait(max(0.0, self._last_line + self._patience_seconds - time.monotonic())):
            if time.monotonic() < self._last_line + self._patience_seconds:
                continue
            if activity := str(self._activity):
                self._print(activity)
            else:
                self._last_line = time.monotonic()

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        label = f"{step}/{self._program.experiment.steps}"
        self._rows.append((label, metrics))
        if self._live is not None:
            self._live.refresh()
        elif step % self._program.experiment.log_every == 0:
            shown = [f"{title} {_number(metrics[name])}" for name, title in _titles(metrics).items()]
            self._print(f"step {label}: {', '.join(shown)}")
        if len(self._rows) == _STEPS_WITHOUT_SIGNAL and (reason := without_signal(self._rows)) is not None:
            self._console.print(f"realhf: warning: {reason}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        lines = evaluation_lines(metrics, [eval_set.prefix for eval_set in self._program.evaluations])
        self._score = "\n".join([f"held out, after step {step}: {lines[0]}".rstrip(), *lines[1:]])
        if self._live is not None:
            self._live.refresh()
        else:
            self._print(self._score)

    def finish(self, summary: Mapping[str, Any], out: Path | None) -> None:
        self.stop()
        lines = []
        if (first := summary["eval_first"]) is not None:
            name = summary["eval_metric"].removeprefix("eval/")
            lines.append(f"held-out {name}: {first:.3f} before, {summary['eval_last']:.3f} after")
            lines += self._other_sets(summary)
        for role, realloc in summary["realloc"].items():
            moved = f"{realloc['bytes_per_step'] / 1e6:.2f} MB per step"
            rate = realloc["gbytes_per_s"]
            measured = "" if rate is None else f", measured {rate:.3g} GB/s into the busiest rank"
            lines.append(f"reallocated {role}: {moved}{measured}")
            computed = f"schedule computed at {realloc['over_bound']:.2f} x its lower bound"
            lines.append(f"  {computed} ({realloc['links']})")
        for call, memory in summary["memory"].items():
            shown = [f"{format_bytes(size)} {how}" for how, size in memory.items()]
            lines.append(f"memory of a rank in {call}: {', '.join(shown)}")
        if out is not None:
            lines.append(f"metrics, pictures and TensorBoard files: {out}")
            lines.append(f"Hugging Face model: {summary['hf_dir']}")
        self._console.print("\n".join(lines))

    def _other_sets(self, summary: Mapping[str, Any]) -> list[str]:
        """Return a line about the score, or else the loss, of each set but the first."""
        lines = []
        for eval_set in self._program.evaluations[1:]:
            main = (f"{eval_set.prefix}score", f"{eval_set.prefix}loss")
            names = [name for name in main if name in summary["evals"]]
            for name in names[:1]:
                ends = summary["evals"][name]
                shown = name.removeprefix("eval/")
                lines.append(f"held-out {shown}: {ends['first']:.3f} before, {ends['last']:.3f} after")
        return lines

    def stop(self) -> None:
        """Release the terminal; a second call does nothing."""
        self._is_over.set()
        if self._live is not None:
            self._live.stop()

    def _shown(self) -> Group:
        titles = _titles(self._rows[-1][1]) if self._rows else {}
        table = Table("step", *titles.values())
        for label, metrics in self._rows:
            table.add_row(label, *(_number(metrics[name]) if name in metrics else "" for name in titles))
        return Group(table, *filter(None, [self._score, str(self._activity)]))


def without_signal(steps: Sequence[tuple[str, Mapping[str, float]]]) -> str | None:
    """Return a warning if no group of answers had different rewards in any of these steps, else None."""
    if any(metrics.get("reward/zero_std_groups", 0.0) < 1.0 for _, metrics in steps):
        return None
    cut_off = sum(metrics["response_length/clip_ratio"] for _, metrics in steps) / len(steps)
    reward = steps[-1][1]["reward/mean"]
    return (
        f"in {len(steps)} steps the answers to each prompt all had the same reward (mean {_number(reward)}): "
        f"nothing is learned from them; {cut_off:.0%} of the answers were cut off at "
        "sampling.max_new_tokens; `realhf rollouts` shows them")


def _titles(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return titles of the metrics that are shown for a step, with each reward if there are several."""
    rewards = {name: match[1] for name in metrics if (match := _REWARD.fullmatch(name)) is not None}
    titles: dict[str, str] = {}
    for name, title in _COLUMNS.items():
        if name in metrics:
            titles[name] = title
        if name == "reward/mean" and len(rewards) > 1:
            titles |= rewards
    return titles


def _number(value: float) -> str:
    """Return a metric as text; 0 if the value is no more than rounding noise."""
    return "0" if abs(value) < _NOISE else f"{value:.4g}"


def evaluation_lines(metrics: Mapping[str, float], prefixes: Sequence[str]) -> list[str]:
    """Return the metrics of an evaluation as text: one line, or a line with the name of each set."""
    lines = []
    for prefix in prefixes if len(prefixes) > 1 else [_EVAL]:
        of_set = {name.removeprefix(prefix): x for name, x in metrics.items() if name.startswith(prefix)}
        shown = {name: x for name, x in of_set.items() if not name.startswith("mean@")}  # It is the score.
        text = ", ".join(f"{_SHORT.get(name, name)} {value:.3f}" for name, value in shown.items())
        lines.append(text if prefix == _EVAL else f"  {prefix.removeprefix(_EVAL).rstrip('/')}: {text}")
    return lines if len(lines) == 1 else ["", *lines]


def _counts(held_out: Mapping[str, int]) -> str:
    """Return how many prompts are held out, by set if there are several."""
    total = f"{sum(held_out.values())} held out"
    if len(held_out) < 2:
        return total
    return f"{total} ({', '.join(f'{name} {count}' for name, count in held_out.items())})"
