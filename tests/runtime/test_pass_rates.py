"""Pass rates as an option of any algorithm: which prompts are dropped, and which come first."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf import DAPO, GRPO, PPO, PassRateLimit, RolloutLog
from realhf.algorithms.pass_rates import WantedPrompts
from realhf.data.batch import Batch
from realhf.distributed.world import World
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import common, role, write_task

LIMIT = PassRateLimit(max_pass_rate=0.5, pass_score=0.9)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def known(prompts: list[str], answer: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Prompts with an even answer are always answered well, and others never."""
    pairs = zip(answer, completion_ids, strict=True)
    return [float(int(text) % 2 == 0) + len(ids) / 100 for text, ids in pairs]


def _experiment(kind: Any, task: Path, **changes: Any) -> Any:
    settings = common(task) | {
        "steps": 9, "eval_dataset": None, "group_size": 2, "pass_rate_limit": LIMIT, "reward_function": known,
        "rollouts": RolloutLog(prompts_per_step=99), "batch_size": 5}
    if kind is PPO:
        settings["critic"] = role(task, head="score")
        settings["minibatches"] = 1
    return kind(actor=role(task), **settings | changes)


Seen = list[tuple[int, int, bool]]


def _seen(world: World, kind: Any, task: Path, out: Path, changes: dict[str, Any]) -> Seen:
    """The step, the row and whether it is answered well, of each prompt of a run."""
    program = compile_program(_experiment(kind, task, **changes), None, world_size=world.size)
    Trainer(program, world, out=out, quiet=True).run()
    if world.rank:
        return []
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return sorted({(line["step"], line["dataset_row"], line["score"] >= 0.9) for line in lines})


@pytest.mark.parametrize("kind, changes", [
    (GRPO, {}), (PPO, {}), (DAPO, {"max_rounds": 1}), (GRPO, {"max_lag": 1})])
def test_prompts_that_are_answered_well_do_not_come_again(task, tmp_path, kind, changes):
    """The 40 rows last for 8 steps: in the ninth, only rows come that were not answered well."""
    seen = _seen(World(), kind, task, tmp_path / "run", changes)
    steps: dict[int, list[int]] = {}
    for step, row, _ in seen:
        steps.setdefault(row, []).append(step)
    visits = Counter(row for _, row, _ in seen)
    good = {row for _, row, is_good in seen if is_good}
    assert len(visits) == 40 and 0 < len(good) < 40
    lag = 2 * changes.get("max_lag", 0)  # Until samples are counted, their prompt may come again.
    assert all(steps[row][-1] - steps[row][0] <= lag for row in good)
    assert any(visits[row] == 2 for row in visits.keys() - good)


@pytest.mark.parametrize("kind, changes", [(GRPO, {}), (PPO, {}), (DAPO, {}), (GRPO, {"max_lag": 1})])
def test_a_choice_compiles_for_every_algorithm(task, kind, changes):
    """The trial of the step program lets all prompts pass, more than the step has asked for."""
    limit = dataclasses.replace(LIMIT, choose_from=2)
    assert compile_program(_experiment(kind, task, pass_rate_limit=limit, **changes), None, world_size=1)


def test_a_choice_begins_one_batch_in_each_step(task, tmp_path):
    """Three times five prompts are drawn in each step, and the five best of them begin."""
    limit = dataclasses.replace(LIMIT, choose_from=3)
    changes = {"pass_rate_limit": limit, "steps": 2}
    seen = _seen(World(), GRPO, task, tmp_path / "run", changes)
    assert Counter(step for step, _ in {(step, row) for step, row, _ in seen}) == {1: 5, 2: 5}


@pytest.mark.slow
def test_the_choice_is_the_same_on_all_ranks(task, tmp_path, pool):
    alone = _seen(World(), GRPO, task, tmp_path / "alone", {})
    assert pool.run(_seen, GRPO, task, tmp_path / "together", {})[0] == alone


def test_prompts_that_teach_most_come_first():
    """Rates near 1/2 come first, new prompts as such; half of those that are drawn begin."""
    rates = {"1": [0, 4], "2": [2, 4], "3": [4, 4], "4": [3, 4]}
    limit = dataclasses.replace(LIMIT, max_pass_rate=1.0, choose_from=2)
    batch = Batch(list(range(12)), {"dataset_row": [r for r in (1, 2, 3, 4, 5, 6) for _ in range(2)]})
    kept = WantedPrompts(limit)(batch, SimpleNamespace(run_state={"pass_rates": rates}))["keep"]
    assert {row for row, keep in zip(batch["dataset_row"], kept, strict=True) if keep} == {2, 5, 6}


def test_without_a_limit_nothing_changes(task):
    """The steps are those of the base class, so that the planner knows them."""
    plain = _experiment(GRPO, task, pass_rate_limit=None)
    assert not plain.has_own_program and list(plain.parts(plain.graph())) == ["step"]
    limited = _experiment(GRPO, task)
    assert limited.has_own_program and list(limited.parts(limited.graph())) == ["select", "step"]
    names = [{call.name for call in experiment.graph().calls} for experiment in (plain, limited)]
    assert names[1] - names[0] == {"wanted_prompts", "count_passes"}
