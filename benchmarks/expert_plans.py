"""Prices ten plans as an expert would write them beside the planner's, under one cost model.

    python benchmarks/expert_plans.py
    python benchmarks/expert_plans.py --only 7b --time-limit 20 --json

An expert gives every call a layout from practice: tensor parallelism inside hosts, experts spread over them,
a pipeline across them for large models, and devices of their own for generation if it runs ahead. As engines
admit rows by the memory that is free, the expert's generation has as many rows as fit; micro-batches have
16,384 tokens or, for the largest models, one sequence. Plans of experts that do not fit are priced all the
same, and marked. The exit code is 1 if an expert's plan that fits is more than 1 % faster than the planner's.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from realhf import GRPO, PPO, Expected, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.experiment import Experiment
from realhf.layout import Layout
from realhf.planner.make import Planned, PricedPlan, make_plan, price
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates

_MOST_ROWS = 512
_GAP = 0.01
_SLACK = 0.01


def right(completions: list[str], answer: list[str]) -> list[float]:
    """Stand in for a reward function; it is never called."""
    raise NotImplementedError


def grpo(model: str, **fields: Any) -> GRPO:
    """Return GRPO with a reference model; `limit` and `mean` are those of responses, in tokens."""
    limit = fields.pop("limit", 8192)
    mean = fields.pop("mean", 3000)
    optimizer = OptimizerConfig(offload=fields.pop("offload", False))
    return GRPO(
        actor=Role(model, dtype="bfloat16", optimizer=optimizer), reward_function=right,
        loss=PolicyLossConfig(kl_coef=0.001), sampling=SamplingConfig(max_new_tokens=limit),
        expected=Expected(prompt_tokens=512, response_tokens=mean), batch_size=fields.pop("prompts", 64),
        group_size=16, **fields)


def ppo(actor: str, critic: str, **fields: Any) -> PPO:
    """Return PPO with a reward model of the critic's size."""
    return PPO(
        actor=Role(actor, dtype="bfloat16", optimizer=OptimizerConfig()),
        critic=Role(critic, head="score", dtype="bfloat16", optimizer=OptimizerConfig()),
        reward=Role(critic, head="score", dtype="bfloat16"), sampling=SamplingConfig(max_new_tokens=1024),
        expected=Expected(prompt_tokens=1024), **fields)


@dataclass(frozen=True)
class Case:
    """An experiment, its cluster, and the expert's layouts and options."""

    name: str
    experiment: Callable[[], Experiment]
    cluster: str
    layouts: Mapping[str, str]
    recompute: bool = True
    micro_batch_tokens: int = 16384  # At least a sequence.
    offload: Collection[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    num_hosts: int | None = None

    def problem(self) -> Problem:
        cluster = Cluster.load(self.cluster)
        if self.num_hosts is not None:
            cluster = replace(cluster, num_hosts=self.num_hosts)
        if self.changes:
            document = cluster.to_dict()
            for name, values in self.changes.items():
                document[name] |= values
            cluster = Cluster.from_dict(document)
        return problem_of(self.experiment(), cluster)


def _of_actor(generate: str, train: str, ref: str | None = None) -> dict[str, str]:
    return {"actor_generate": generate, "ref_forward": ref or train, "actor_train": train}


CASES = (
    Case("7B on 8", lambda: grpo("qwen2.5-7b"), "h100-1x8", _of_actor("d8@0-7", "d2t4@0-7")),
    Case("32B long on 64", lambda: grpo("qwen2.5-32b", limit=32768, mean=10000), "h100-8x8",
         _of_actor("d16t4@0-63", "d2t8c4@0-63")),
    Case("235B on 256", lambda: grpo("qwen3-235b-a22b"), "h100-128x8",
         _of_actor("d32t8e32@0-255", "d8t4p8e8@0-255"), num_hosts=32),
    Case("DeepSeek-V3 on 256", lambda: grpo("deepseek-v3", limit=4096, mean=2000, offload=True), "h100-128x8",
         _of_actor("d8t32e8@0-255", "d16p16e16@0-255"), micro_batch_tokens=1, offload=("ref_forward",),
         num_hosts=32),
    Case("DeepSeek-V3 on 1024", lambda: grpo("deepseek-v3", limit=4096, mean=2000, prompts=256), "h100-128x8",
         _of_actor("d32t32e32@0-1023", "d64p16e64@0-1023"), micro_batch_tokens=1, offload=("ref_forward",)),
    Case("70B PPO on 128", lambda: ppo("llama-70b", "llama-7b", batch_size=1024), "h100-16x8", {
        "actor_generate": "d16t8@0-127", "reward_forward": "d128@0-127", "ref_forward": "d16t8@0-127",
        "critic_forward": "d16t8@0-127", "actor_train": "d4t8p4@0-127", "critic_train": "d16t8@0-127"},
        micro_batch_tokens=1, offload=("ref_forward", "reward_forward")),
    Case("7B PPO on H100 and A100", lambda: ppo("llama-7b", "llama-7b", batch_size=512), "h100-a100-4x8", {
        "actor_generate": "d8t2@0-15", "reward_forward": "d8t2@16-31", "ref_forward": "d8t2@16-31",
        "critic_forward": "d4t4@16-31", "actor_train": "d4t4@0-15", "critic_train": "d4t4@16-31"}),
    Case("32B on 64, 25 Gbit/s", lambda: grpo("qwen2.5-32b"), "h100-8x8",
         _of_actor("d8t8@0-63", "t8p8@0-63"),
         changes={"inter_host": {"bandwidth_bytes_per_second": 25e9 / 8}}),
    Case("32B on 64, lag 2", lambda: grpo("qwen2.5-32b", max_lag=2), "h100-8x8",
         _of_actor("d8t4@0-31", "d2t8p2@32-63")),
    Case("8B on 64, lag 8", lambda: grpo("llama-3.1-8b", max_lag=8), "h100-8x8",
         _of_actor("d32@0-31", "d8t4@32-63")),
)


def expert_plan(case: Case, problem: Problem) -> ExecutionPlan:
    """Return the expert's plan with as many rows as fit, or one row if none does."""

    def plan(rows: int) -> ExecutionPlan:
        calls = {}
        for call in problem.model_calls:
            work = problem.workloads[call.name]
            layout = Layout.parse(case.layouts[call.name])
            longest = int(work.longest_prompt + work.max_new_tokens) * work.group_size
            tokens = max(case.micro_batch_tokens, longest)
            calls[call.name] = CallPlan(
                layout, tokens, max_rows=rows if call.kind == "generate" else None,
                recompute=call.kind == "train_step" and case.recompute, offload=call.name in case.offload)
        return ExecutionPlan(calls)

    rows = 1
    further = _MOST_ROWS
    while rows < further:
        middle = (rows + further + 1) // 2
        peak = check_memory(problem, plan(middle)).by_call["actor_generate"]
        rows, further = (middle, further) if peak.excess_bytes <= 0 else (rows, middle - 1)
    return plan(rows)


def compared(case: Case, *, time_limit: float) -> tuple[PricedPlan, Planned]:
    """Return the expert's plan and the planner's."""
    problem = case.problem()
    rates = Rates(problem.cluster)
    expert = price(problem, rates, expert_plan(case, problem))
    ours = make_plan(problem, rates, time_limit=time_limit, gap=_GAP, slack=_SLACK, explain=False)
    return expert, ours


def row(case: Case, expert: PricedPlan, ours: Planned) -> dict[str, Any]:
    """Return the figures of one case."""
    of_plans = [
        {name: str(plan[name].layout) for name in case.layouts} for plan in (expert.plan, ours.plan)]
    return {
        "case": case.name, "expert_seconds": expert.step_seconds, "expert_fits": expert.memory.fits,
        "expert_rows": expert.plan["actor_generate"].max_rows, "our_seconds": ours.step_seconds,
        "our_rows": ours.plan["actor_generate"].max_rows, "gain": expert.step_seconds / ours.step_seconds,
        "lower_bound_seconds": ours.result.lower_bound_seconds, "gap": ours.result.gap,
        "expert_layouts": of_plans[0], "our_layouts": of_plans[1]}


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the table for people and for docs/planner.md."""
    table = Table("case", "expert", "ours", "gain", "gap", "generation, training: expert", "ours")
    for one in rows:
        layouts = [
            ", ".join(one[f"{who}_layouts"][name] for name in ("actor_generate", "actor_train"))
            for who in ("expert", "our")]
        mark = "" if one["expert_fits"] else " (does not fit)"
        table.add_row(
            one["case"], f"{one['expert_seconds']:.3g} s{mark}", f"{one['our_seconds']:.3g} s",
            f"{one['gain']:.2f} x", f"{one['gap']:.1%}", *layouts)
    return table


def main() -> int:
    """Compare the cases, print the table and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of each search")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    about = {"machine": machine(), "time_limit": options.time_limit}
    rows = []
    for case in CASES:
        if options.only is None or options.only.lower() in case.name.lower():
            rows.append(row(case, *compared(case, time_limit=options.time_limit)))
            one = rows[-1]
            progress(f"{case.name}: expert {one['expert_seconds']:.3g} s, ours {one['our_seconds']:.3g} s, "
                     f"gap {one['gap']:.1%}")
    if not rows:
        parser.error(f"no case has {options.only!r} in its name")
    fitting = [one["gain"] for one in rows if one["expert_fits"]]
    least = min(fitting, default=1.0)
    goals = [Goal("least gain over an expert's plan that fits", least, at_least=1 - _SLACK)]
    return report({**about, "rows": rows}, tables=[table_of(rows)], goals=goals, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
