"""What a person sees while a run goes on: a live table on a terminal, plain lines otherwise. On standard
error.
"""

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from realhf.runtime.check import Program

_COLUMNS = {
    "reward/mean": "reward",
    "response_length/mean": "length",
    "actor/loss": "loss",
    "actor/entropy": "entropy",
    "actor/ref_kl": "KL to ref",
    "critic/vf_loss": "value loss",
    "reward/loss": "loss",
    "reward/accuracy": "accuracy",
    "actor/grad_norm": "grad norm",
    "timing_s/step": "seconds",
    "perf/tokens_per_s": "tokens/s",
}
_ROWS = 12


class Progress:
    """Shows one row per step. `quiet` shows nothing (all ranks but the first)."""

    def __init__(self, program: Program, *, quiet: bool) -> None:
        self._program = program
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._rows: list[tuple[str, Mapping[str, float]]] = []
        self._score: float | None = None

    def start(self, dataset: Sized | None, eval_batch: Sized | None) -> None:
        if self._quiet:
            return
        experiment, plan = self._program.experiment, self._program.plan
        samples = experiment.batch_size * experiment.group_size
        self._console.print(
            f"{experiment.steps} steps of {experiment.batch_size} prompts x {experiment.group_size} = "
            f"{samples} samples; {len(dataset or ())} training prompts, {len(eval_batch or ())} held out"
        )
        for call in self._program.graph.order:
            self._console.print(f"  {call.name:<18} {call.kind:<10} {plan[call.name].layout}")
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._quiet:
            return
        if self._live is None:
            if step % self._program.experiment.log_every:
                return
            shown = [f"{title} {metrics[name]:.4g}" for name, title in _COLUMNS.items() if name in metrics]
            self._console.print(f"step {step}/{self._program.experiment.steps}: " + ", ".join(shown))
            return
        self._rows.append((f"{step}/{self._program.experiment.steps}", metrics))
        self._live.update(self._table())

    def evaluation(self, step: int, score: float) -> None:
        if self._quiet:
            return
        self._score = score
        if self._live is None:
            self._console.print(f"held-out score after step {step}: {score:.3f}")
        else:
            self._live.update(self._table())

    def finish(self, summary: Mapping[str, Any], out: Path | None) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.stop()
        if summary["eval_first"] is not None:
            self._console.print(
                f"held-out score: {summary['eval_first']:.3f} before, {summary['eval_last']:.3f} after"
            )
        for role, realloc in summary["realloc"].items():
            self._console.print(
                f"reallocated {role}: {realloc['bytes_per_step'] / 1e6:.2f} MB per step, busiest wire at "
                f"{realloc['over_bound']:.2f} x its lower bound"
            )
        if out is not None:
            self._console.print(
                f"metrics, pictures and TensorBoard files: {out}\nHugging Face model: {summary['hf_dir']}"
            )

    def _table(self) -> Table:
        names = [name for name in _COLUMNS if self._rows and name in self._rows[-1][1]]
        caption = None if self._score is None else f"held-out score {self._score:.3f}"
        table = Table("step", *(_COLUMNS[name] for name in names), caption=caption)
        for label, metrics in self._rows[-_ROWS:]:
            table.add_row(label, *(f"{metrics[name]:.4g}" if name in metrics else "" for name in names))
        return table
