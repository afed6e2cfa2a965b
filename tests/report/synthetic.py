"""A run directory that no run has written, whose figures are known: rank 3 waits, one reward falls."""

import json
import random
from pathlib import Path
from typing import Any

BEGIN = 1_700_000_000.0
CALLS: tuple[tuple[str, str, list[str], list[str]], ...] = (
    ("actor_generate", "generate", ["prompt_ids"], ["sequence_ids", "response_mask"]),
    ("reward_forward", "host", ["sequence_ids"], ["score"]),
    ("actor_train", "train_step", ["sequence_ids", "score"], []),
)
GENERATE, REWARD, TRAIN = 2.0, 0.25, 1.0
"""Seconds of the calls; a rank waits for the reward, and rank 3 generates nothing and waits longest."""
PREDICTED = {"actor_generate": 1.0, "actor_train": 0.98}
STEP = GENERATE + REWARD + TRAIN + 0.25
"""Seconds of a step: its calls, and a quarter of a second in which weights move."""
STEP_PREDICTED = 2.23
LATE_RANK = 3


def write_lines(path: Path, rows: Any) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def make_run(
    directory: Path, *, steps: int = 12, ranks: int = 4, rollouts_per_step: int = 8, tokens: bool = True,
    text: str = "What is 2+2?", finished: bool = True,
) -> Path:
    """Write the files of a run."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    layout = f"d{ranks}@0-{ranks - 1}"
    write_lines(directory / "metrics.jsonl", (metrics(step, steps, rng) for step in range(1, steps + 1)))
    write_lines(directory / "timeline.jsonl", (
        {"step": step} | event for step in range(1, steps + 1) for event in events(step, ranks, layout)))
    write_lines(directory / "rollouts.jsonl", (
        rollout for step in range(1, steps + 1)
        for rollout in rollouts(step, rollouts_per_step, rng, tokens=tokens, text=text)))
    roles = {"actor": {"dtype": "float32"}}
    rewards = [{"function": "rewards.is_exact", "name": "exact", "weight": 1.0},
               {"function": "rewards.format", "name": None, "weight": 0.25}, "rewards.other"]
    config = {"steps": steps, "batch_size": 8, "seed": 1, "roles": roles, "reward_function": rewards}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "plan.yaml").write_text("calls:\n" + "".join(
        f"  {name}: {{layout: {'d1@1' if kind == 'host' else layout}}}\n" for name, kind, _, _ in CALLS))
    (directory / "about.json").write_text(json.dumps(about(ranks, layout)))
    if finished:
        (directory / "summary.json").write_text(json.dumps({"steps": steps, "seconds": STEP * steps}))
    return directory


def metrics(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    share = (step - 1) / max(1, steps - 1)
    row = {
        "step": step, "reward/mean": 0.2 + 0.6 * share + rng.gauss(0, 0.01), "reward/group_std": 0.2,
        "reward/std": 0.3, "reward/exact/mean": 0.1 + 0.8 * share, "reward/format/mean": 0.9 - 0.6 * share,
        "reward/zero_std_groups": 0.1, "response_length/mean": 100 + 20 * share, "response_length/max": 200.0,
        "response_length/clip_ratio": 0.05, "actor/entropy": 1.0 - 0.5 * share, "actor/loss": 0.0,
        "actor/pg_loss": 0.01, "actor/approx_kl": 0.001, "actor/clip_fraction": 0.02, "actor/grad_norm": 0.5,
        "actor/lr": 1e-5, "staleness/mean": 1.0, "mismatch/kl": 1e-4, "mismatch/max": 0.1,
        "timing_s/actor_generate": GENERATE, "timing_s/reward_forward": REWARD, "timing_s/actor_train": TRAIN,
        "timing_s/step": STEP, "tokens/generated": 800.0, "tokens/trained": 900.0,
        "perf/generated_tokens_per_s": 400.0, "perf/trained_tokens_per_s": 900.0, "perf/tokens_per_s": 257.0,
        "bubble/actor_train": 0.1, "perf/mfu": 0.3, "perf/run_seconds": STEP * step}
    if step % 5 == 0 or step == steps:
        row |= {"eval/score": 0.3 + 0.4 * share, "eval/pass@4": 0.5 + 0.4 * share}
    return row


def events(step: int, ranks: int, layout: str) -> list[dict[str, Any]]:
    """Return the events of a step; every rank waits for the reward, which rank 1 computes."""
    begin = BEGIN + STEP * (step - 1)
    found: list[dict[str, Any]] = []
    for rank in range(ranks):
        is_late = rank == LATE_RANK
        memory = {
            "memory": {"actor weights": 4_000_000_000, "actor optimizer": 8_000_000_000},
            "counted_bytes": 12_000_000_000 + 100_000_000 * rank, "predicted_counted_bytes": 12_000_000_000}
        moved = {"rank": rank, "name": "actor", "kind": "realloc", "start": begin, "end": begin + 0.25,
                 "transfer": f"{layout}->{layout}", "sent_bytes": 1_000_000_000,
                 "senders": [(rank + 1) % ranks],
                 "received_bytes": 1_000_000_000, "over_bound": 1.05, "bound_seconds": 0.2}
        start = begin + 0.25
        found.append(moved)
        if not is_late:
            found.append({
                "rank": rank, "name": "actor_generate", "kind": "generate", "start": start,
                "end": start + GENERATE, "waited": 0.25, "num_tokens": 200, **memory})
        if rank == 1:
            found.append({
                "rank": rank, "name": "reward_forward", "kind": "host", "start": start + GENERATE,
                "end": start + GENERATE + REWARD, "waited": 0.0})
        else:
            waits = begin if is_late else start + GENERATE
            found.append({
                "rank": rank, "name": "actor_train", "kind": "move", "start": waits,
                "end": start + GENERATE + REWARD})
        train = start + GENERATE + REWARD
        waited = train - begin if is_late else 0.0 if rank == 1 else REWARD
        found.append({
            "rank": rank, "name": "actor_train", "kind": "train_step", "start": train, "end": train + TRAIN,
            "waited": waited, "num_tokens": 225, **memory})
    return found


def rollouts(
    step: int, count: int, rng: random.Random, *, tokens: bool, text: str
) -> list[dict[str, Any]]:
    found = []
    for i in range(count):
        sample = step * count + i
        row: dict[str, Any] = {
            "step": step, "followed": False, "sample": sample, "prompt_number": sample // 4, "dataset_row": i,
            "score": float(i % 2), "rewards": {"exact": float(i % 2), "format": 1.0}, "length": 6,
            "finished": i % 3 != 0, "versions": [step - 1, step], "advantage": (-1.0) ** i, "prompt": text,
            "completion": f"It is {rng.randrange(10)}, says sample {sample}.", "columns": {"answer": "4"}}
        if tokens:
            row |= {
                "token_ids": [5, 6, 7, 8, 9, 10, 11, 12], "response_mask": [0, 0, 1, 1, 0, 0, 1, 1],
                "logprobs": [0.0, 0.0, -0.1, -2.5, 0.0, 0.0, -0.7, -0.01],
                "advantages": [0.0, 0.0, 0.5, -0.5, 0.0, 0.0, 1.0, -1.0],
                "token_versions": [0, 0, step - 1, step - 1, 0, 0, step, step]}
        found.append(row)
    return found


def about(ranks: int, layout: str) -> dict[str, Any]:
    calls = [
        {"name": name, "kind": kind, "role": None if kind == "host" else "actor", "inputs": inputs,
         "outputs": outputs, "layout": "d1@1" if kind == "host" else layout}
        for name, kind, inputs, outputs in CALLS]
    activities = [
        {"name": "actor_generate", "kind": "generate", "first_rank": 0, "num_ranks": ranks, "start": 0.0,
         "end": 1.0},
        {"name": "actor_train", "kind": "train_step", "first_rank": 0, "num_ranks": ranks, "start": 1.25,
         "end": 2.23},
        {"name": "actor for actor_generate", "kind": "realloc", "first_rank": 0, "num_ranks": ranks,
         "start": 2.1, "end": 2.33}]
    return {
        "commands": [{
            "command": "realhf run grpo.py --plan plan.yaml", "time": BEGIN, "directory": "/home/x"}],
        "versions": {"python": "3.11", "torch": "2.13.0"}, "device": "CPU", "host": "here", "cores": 4,
        "num_ranks": ranks, "ranks_per_host": max(1, ranks // 2), "links": "assumed links",
        "tokenizer": "/nowhere",
        "calls": calls, "data": {"dataset": [{"file": "data.jsonl", "crc32": 1, "bytes": 10, "rows": 5}]},
        "sources": {"code": {"grpo.py": {"reward": "aa"}}, "models": {}}, "clocks": {},
        "predicted": {
            "step_seconds": STEP_PREDICTED, "origin": "h100-8x8", "is_measured": False,
            "calls": {name: {"seconds": seconds, "limit": "decode"} for name, seconds in PREDICTED.items()},
            "activities": activities, "idle": [0.1] * ranks,
            "memory": {
                call: {str(rank): {"actor weights": 4e9, "actor optimizer": 8e9} for rank in range(ranks)}
                for call in ("actor_generate", "actor_train")}}}
