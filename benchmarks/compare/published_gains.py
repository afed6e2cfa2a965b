"""Predicts how much faster ReaL's searched plans are than its heuristic, beside what was published.

    python benchmarks/compare/published_gains.py
    python benchmarks/compare/published_gains.py --json --time-limit 60

Published: the bars of the repository's figure (github.com/openpsi-project/ReaLHF, docs/source/vws.svg: PPO of
LLaMA on H100, 896 generated tokens). Prompt length, batch and mini-batches are not beside the figure; the
defaults here are those of the paper's base setting as far as it states them. So levels say little, and gains
are compared.

Two baselines are priced by our cost model, each with the best options that fit its layouts:
- `symmetric`: tp 8 inside hosts and a pipeline across them, for every call on all devices;
- `repository`: what ReaL's code has as its heuristic (realhf/experiments/common/ppo_exp.py,
  `_heuristic_rpc_allocation`): generation in pipelines without tensor parallelism, actor and critic trained
  beside each other, reward model and critic scoring beside each other. It is a plan with reallocations
  itself.
The exit code is 1 if a goal was missed.
"""

import argparse
import math
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from realhf import PPO, Expected, OptimizerConfig, Role, SamplingConfig
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planner.efficiencies import OUR_CUDA
from realhf.planner.make import make_plan
from realhf.planner.rates import Rates

NEW_TOKENS = 896
PROMPT_TOKENS = 128
MINIBATCHES = 8
REAL = replace(OUR_CUDA, decode_kernels=18, sum_kernels=0)
"""ReaL's engine has no kernels of its own for chains of operations: a block of a decode step has as many as
torch's operations."""
GAINS = (0.75, 1.33)
"""Predicted over published, in at least `ENOUGH` of the rows."""
ENOUGH = 5


class PublishedGain(NamedTuple):
    """PFLOP/s of the heuristic and of the searched plan, read off the bars."""

    actor: str
    critic: str
    devices: int
    heuristic: float
    searched: float

    @property
    def name(self) -> str:
        return f"{self.actor} + {self.critic}, {self.devices}"


ROWS = (
    PublishedGain("llama-7b", "llama-7b", 8, 0.35, 0.59),
    PublishedGain("llama-13b", "llama-7b", 16, 0.47, 0.73),
    PublishedGain("codellama-34b", "llama-7b", 32, 0.88, 0.96),
    PublishedGain("llama-70b", "llama-7b", 64, 1.06, 1.10),
    PublishedGain("llama-13b", "llama-13b", 32, 0.62, 0.98),
    PublishedGain("llama-70b", "llama-70b", 128, 1.74, 2.11),
)
_BILLIONS = {"llama-7b": 7, "llama-13b": 13, "codellama-34b": 34, "llama-70b": 70}


def experiment_of(row: PublishedGain, batch_size: int) -> PPO:
    """Return the step as an experiment; all responses have the full length."""
    actor = Role(row.actor, dtype="bfloat16", optimizer=OptimizerConfig())
    critic = Role(row.critic, head="score", dtype="bfloat16", optimizer=OptimizerConfig())
    return PPO(
        actor=actor, critic=critic, reward=Role(row.critic, head="score", dtype="bfloat16"),
        sampling=SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True),
        expected=Expected(prompt_tokens=PROMPT_TOKENS), batch_size=batch_size, minibatches=MINIBATCHES)


def symmetric(row: PublishedGain) -> dict[str, Layout]:
    hosts = row.devices // 8
    everywhere = _on(range(hosts), tp=8, pp=hosts)
    return dict.fromkeys(
        ("actor_generate", "reward_forward", "ref_forward", "critic_forward", "actor_train", "critic_train"),
        everywhere)


def of_the_repository(row: PublishedGain) -> dict[str, Layout]:
    """Return ReaL's own heuristic: `pp` hosts of dp 2 and tp 4, or on one host halves of it."""
    hosts = row.devices // 8
    stages = max(2, hosts)
    generate = Layout(
        ParallelStrategy(pp=stages, dp=row.devices // stages), DeviceMesh(tuple(range(row.devices))))
    if hosts == 1:
        halves = (DeviceMesh((0, 1, 2, 3)), DeviceMesh((4, 5, 6, 7)))
        first, second = (Layout(ParallelStrategy(dp=2, tp=2), mesh) for mesh in halves)
        scores, values, actor, critic = first, second, first, second
    else:
        share = _BILLIONS[row.actor] / (_BILLIONS[row.actor] + _BILLIONS[row.critic])
        split = min(math.ceil(hosts * share), hosts - 1)
        actor, critic = _beside(split, hosts)
        scores, values = _beside(math.ceil(hosts / 2), hosts)
    return {
        "actor_generate": generate, "ref_forward": _on(range(hosts), dp=2, tp=4, pp=hosts),
        "reward_forward": scores, "critic_forward": values, "actor_train": actor, "critic_train": critic}


def _beside(split: int, hosts: int) -> tuple[Layout, Layout]:
    first, second = range(split), range(split, hosts)
    return _on(first, dp=2, tp=4, pp=len(first)), _on(second, dp=2, tp=4, pp=len(second))


def _on(hosts: range, **degrees: int) -> Layout:
    return Layout(ParallelStrategy(**degrees), DeviceMesh(tuple(range(8 * hosts.start, 8 * hosts.stop))))


def predicted(row: PublishedGain, *, batch_size: int, recorded: bool, time_limit: float) -> dict[str, Any]:
    """Return the seconds of both baselines and of the plan found; None where a baseline fits in no way."""
    cluster = replace(Cluster.load("h100-8x8"), num_hosts=row.devices // 8)
    rates = Rates(cluster, None, replace(REAL, recorded=recorded))
    experiment = experiment_of(row, batch_size)
    seconds: dict[str, float | None] = {}
    for name, pins in (("symmetric", symmetric(row)), ("repository", of_the_repository(row)), ("ours", {})):
        try:
            problem = problem_of(experiment, cluster, pins=pins)
            planned = make_plan(problem, rates, time_limit=time_limit, gap=0.01, explain=False)
            seconds[name] = float(planned.result.step_seconds)
        except ValueError as error:
            progress(f"{row.name}, {name}: {error}")
            seconds[name] = None
    ours = seconds["ours"]
    gains = {f"gain_over_{name}": value and ours and value / ours for name, value in seconds.items()}
    return {"name": row.name, "published": row.searched / row.heuristic, **seconds, **gains}


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    low, high = GAINS
    inside = {
        name: sum(bool(row[name]) and low <= row[name] / row["published"] <= high for row in rows)
        for name in ("gain_over_symmetric", "gain_over_repository")}
    best = max(inside, key=inside.__getitem__)
    what = f"rows of {len(rows)} with {best.replace('_', ' ')} within {low:g} to {high:g} of the published"
    return [Goal(what, float(inside[best]), at_least=ENOUGH)]


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Gain of the searched plan over a heuristic, ReaL's PPO on H100")
    titles = ("actor + critic, devices", "published", "over symmetric", "over the repository's", "ours, s")
    for title in titles:
        shown.add_column(title, justify="left" if title == titles[0] else "right")
    for row in rows:
        cells = [row["published"], row["gain_over_symmetric"], row["gain_over_repository"]]
        seconds = "-" if row["ours"] is None else f"{row['ours']:.1f}"
        shown.add_row(row["name"], *("-" if cell is None else f"{cell:.2f}" for cell in cells), seconds)
    return shown


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--batch-size", type=int, default=512, help="responses of a step (default 512)")
    add("--time-limit", type=float, default=20.0, metavar="S", help="seconds of each search (default 20)")
    add("--eager", action="store_true", help="price decoding steps that are not recorded as CUDA graphs")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    rows = []
    for row in ROWS:
        progress(row.name)
        rows.append(predicted(
            row, batch_size=args.batch_size, recorded=not args.eager, time_limit=args.time_limit))
    document = {"benchmark": "published_gains", "machine": machine(), "settings": vars(args), "rows": rows}
    return report(document, tables=[table(rows)], goals=goals(rows), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
