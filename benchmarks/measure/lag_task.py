"""The workload of lag.py and lag_plans.py: GRPO on a random model, and the steady state of a run."""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from transformers import Qwen2Config

from benchmarks.measure.workloads import END, PAD, texts, write_random_model

NUM_RANKS = 2
WARM_UP = 3  # The first steps of each run do not count.
_CALLS = ("actor_generate", "reward_forward", "advantages", "actor_forward", "actor_train")
PLANS = {
    "disjoint": dict.fromkeys(_CALLS, "d1@1") | {"actor_generate": "d1@0"},
    "colocated": dict.fromkeys(_CALLS, "d2@0-1") | {"advantages": "d1@0"},
}
"""Name -> call -> layout: rank 0 generates and rank 1 does the rest; or both do a half of everything, except
that a call which takes no time needs all samples on one rank."""
_FILE = "lag.py"
_TRAINING = "actor_train"
_BESIDE_CALLS = ("move", "realloc", "offload")
"""Kinds of events that are no calls."""


@dataclass(frozen=True)
class Setting:
    """The sizes of a model and of a step. Answers have geometric lengths, cut off at `new_tokens`.

    With the defaults, generation takes about as long as scoring and training: with more prompt tokens,
    training would take longer, and with fewer rows, generation would, as it is less efficient then.
    """

    hidden: int = 128
    layers: int = 4
    prompts: int = 16
    group: int = 4
    prompt_tokens: int = 8
    mean_tokens: int = 32
    new_tokens: int = 96
    epochs: int = 1

    def model_config(self) -> Qwen2Config:
        return Qwen2Config(
            hidden_size=self.hidden, intermediate_size=3 * self.hidden, num_hidden_layers=self.layers,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=256, max_position_embeddings=4096,
            tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=END, bos_token_id=None,
        )


def write_task(directory: Path, setting: Setting) -> Path:
    """Write model, tokenizer, prompts, PLANS and the experiment, and return the experiment's path."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, layouts in PLANS.items():
        calls = {call: {"layout": layout} for call, layout in layouts.items()}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({"calls": calls}))
    write_random_model(directory, setting.model_config(), end_probability=1 / setting.mean_tokens)
    rng = random.Random(0)
    shortest, longest = setting.prompt_tokens * 3 // 4, setting.prompt_tokens * 5 // 4
    lengths = [rng.randint(shortest, longest) for _ in range(setting.prompts * 16)]
    rows = [json.dumps({"prompt": text}) + "\n" for text in texts(lengths)]
    (directory / "prompts.jsonl").write_text("".join(rows))
    path = directory / _FILE
    path.write_text(_EXPERIMENT.format(task=str(directory), setting=setting))
    return path


def realhf(*words: Any) -> None:
    """Run a command of realhf. Its output is shown only if it fails."""
    command = [sys.executable, "-m", "realhf", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


@dataclass(frozen=True)
class SteadyState:
    """The steps of a run between its warm-up and the first step that no longer generates."""

    step_seconds: float
    """The mean over the steps."""
    tokens_per_second: float
    steps: list[float]
    """Seconds from the end of one training to that of the next."""
    response_tokens: float
    idle: dict[int, float]
    """Rank -> share of the time in which it ran no call."""
    calls: dict[str, float]
    """Call -> median seconds of its slowest rank."""
    cpu_seconds: dict[str, float]
    """Call -> lower quartile of its CPU seconds on the slowest rank."""
    bubbles: dict[str, float]
    """Call -> share of the step for which a rank waited before it, as a median."""
    preempted: float
    """Share of the time of generation and forward passes in which other work had the core."""

    @property
    def least_idle(self) -> float:
        """Return the idle share of the busier side."""
        return min(self.idle.values())


def measure(directory: Path, *, plan: str, max_lag: int, repeat: int, steps: int) -> SteadyState:
    """Run the experiment in `directory`, unless this run exists already, and return its steady state."""
    out = directory / f"{plan}-lag-{max_lag}-run-{repeat}"
    if not (out / "summary.json").exists():
        realhf(
            "run", directory / _FILE, "--nproc", NUM_RANKS, "--plan", directory / f"{plan}.yaml",
            "--out", out, "--steps", steps, "--max-lag", max_lag)
    return steady_state(out, steps=steps, max_lag=max_lag)


def steady_state(run: Path, *, steps: int, max_lag: int) -> SteadyState:
    """Read a run's steady state from its directory. The last `max_lag` steps begin no answers."""
    events = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    events = [event for event in events if event["kind"] not in _BESIDE_CALLS]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = steps - max_lag
    training = [event for event in events if event["name"] == _TRAINING]
    ends = [max(e["end"] for e in training if e["step"] == step) for step in range(WARM_UP, last + 1)]
    start, end = ends[0], ends[-1]
    tokens = sum(e.get("num_tokens", 0) for e in training if WARM_UP < e["step"] <= last)
    steady = [m for m in metrics if WARM_UP < m["step"] <= last]
    within = [event for event in events if WARM_UP < event["step"] <= last]
    walls = _slowest(within, lambda event: event["end"] - event["start"])
    return SteadyState(
        step_seconds=(end - start) / (last - WARM_UP), tokens_per_second=tokens / (end - start),
        steps=[after - before for before, after in pairwise(ends)],
        response_tokens=statistics.fmean(m["response_length/mean"] for m in steady),
        idle={
            rank: 1 - _busy_seconds([e for e in events if e["rank"] == rank], start, end) / (end - start)
            for rank in range(NUM_RANKS)},
        calls={name: statistics.median(seconds) for name, seconds in walls.items()},
        cpu_seconds={
            name: statistics.quantiles(seconds, n=4, method="inclusive")[0]
            for name, seconds in _slowest(within, lambda event: event["cpu_seconds"]).items()},
        bubbles={
            name.removeprefix("bubble/"): statistics.median(m.get(name, 0.0) for m in steady)
            for name in steady[-1] if name.startswith("bubble/")},
        preempted=_preempted(within),
    )


def _preempted(events: list[dict[str, Any]]) -> float:
    """Return the share of the time of calls without communication in which the process did not run."""
    local = [event for event in events if event["kind"] in ("generate", "forward")]
    wall = sum(event["end"] - event["start"] for event in local)
    return max(0.0, 1 - sum(event["cpu_seconds"] for event in local) / wall)


def lower_quartile(states: Sequence[SteadyState]) -> float:
    """Return the lower quartile of the seconds of all steps: other work only makes steps longer."""
    steps = [seconds for state in states for seconds in state.steps]
    return statistics.quantiles(steps, n=4, method="inclusive")[0]


def _busy_seconds(events: list[dict[str, Any]], start: float, end: float) -> float:
    """Return the seconds from `start` to `end` in which one of these events takes place."""
    busy, reached = 0.0, start
    for event in sorted(events, key=lambda event: event["start"]):
        until = min(event["end"], end)
        busy += max(0.0, until - max(reached, event["start"]))
        reached = max(reached, until)
    return busy


def _slowest(
    events: list[dict[str, Any]], measure: Callable[[dict[str, Any]], float]
) -> dict[str, list[float]]:
    """Return, by call, the sum of an event's measure on the rank where it is largest, for each step."""
    sums: dict[tuple[str, int, int], float] = {}
    for event in events:
        key = event["name"], event["step"], event["rank"]
        sums[key] = sums.get(key, 0.0) + measure(event)
    slowest: dict[str, dict[int, float]] = {}
    for (name, step, _), seconds in sums.items():
        by_step = slowest.setdefault(name, {})
        by_step[step] = max(by_step.get(step, 0.0), seconds)
    return {name: list(by_step.values()) for name, by_step in slowest.items()}


_EXPERIMENT = """
import realhf

task = {task!r}


def reward(prompts, completions, completion_ids):
    return [float(sum(ids) % 7) for ids in completion_ids]


experiment = realhf.GRPO(
    actor=realhf.Role(model=task, optimizer=realhf.OptimizerConfig(lr=0.0)),
    dataset=realhf.DatasetConfig(task + "/prompts.jsonl"), reward_function=reward,
    sampling=realhf.SamplingConfig(max_new_tokens={setting.new_tokens}),
    loss=realhf.PolicyLossConfig(average="token", proximal="recomputed", importance_cap=2.0),
    batch_size={setting.prompts}, group_size={setting.group}, epochs={setting.epochs}, work_stealing=False,
    checkpoint_every=0,
)
"""
