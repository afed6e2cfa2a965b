"""Hooks between steps: what they see and change, on one rank and on several, and after a resumption."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from realhf import DatasetConfig, EarlyStopping, ExecutionPlan, OptimizerConfig, StepEvent
from realhf.checkpoint.names import find_checkpoints
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.steps.hooks import best_step
from tests.hub import hub, model_repository
from tests.runtime.tiny import make_experiment, role, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@dataclass
class Halving:
    """Halves the learning rate after every step, takes the KL out after step 2, stops after step `last`."""

    last: int
    seen: list[Any] = field(default_factory=list)

    def __call__(self, event: StepEvent) -> None:
        self.seen.append((event.step, event.metrics["reward/mean"], event.values["actor.lr"]))
        event.set("actor.lr", event.values["actor.lr"] / 2)
        if event.step == 2:
            event.set("actor_train.kl_coef", 0.0)
        if event.step == self.last:
            event.stop("enough")


def _experiment(task: Path, **changes: Any) -> Any:
    actor = dataclasses.replace(role(task), optimizer=OptimizerConfig(lr=4e-3))
    return make_experiment("grpo", task, **{"actor": actor, "steps": 6, "checkpoint_every": 1} | changes)


def _run(world: World, task: Path, out: Path, *, resumes: bool = False, **changes: Any) -> Any:
    experiment = _experiment(task, **changes)
    plan = ExecutionPlan.from_dict({"calls": {
        "actor_generate": {"layout": f"d{world.size}@0-{world.size - 1}"},
        "ref_forward": {"layout": "d1@0"}, "actor_train": {"layout": "d2t2@0-3"}}})
    program = compile_program(experiment, plan if world.size > 1 else None, world_size=world.size)
    found = list(find_checkpoints(out / "checkpoints").values()) if resumes else []
    checkpoint = newest_checkpoint(world, found)
    return Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


def _metrics(out: Path) -> list[dict[str, float]]:
    names = ("step", "reward/mean", "actor/lr", "actor/grad_norm", "actor/kl")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in names if name in line} for line in lines if line["step"]]


def _halving(world: World, task: Path, out: Path) -> list[dict[str, float]]:
    _run(world, task, out, on_step=Halving(last=4))
    return _metrics(out)


def test_what_a_hook_sets_holds_from_the_next_step_on(task, tmp_path):
    """The learning rate is that of the formula; with another coefficient the gradient is another one."""
    hook = Halving(last=4)
    result = _run(World(), task, tmp_path / "run", on_step=hook)
    metrics = _metrics(tmp_path / "run")
    assert [m["actor/lr"] for m in metrics] == pytest.approx([4e-3 / 2**i for i in range(4)])
    assert hook.seen == [(m["step"], m["reward/mean"], m["actor/lr"]) for m in metrics]
    assert result.stopped_after is None and result.summary["steps"] == 4
    assert Path(result.summary["hf_dir"]).name == "step_4" and Path(result.summary["hf_dir"]).is_dir()
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 4
    others = _run(World(), task, tmp_path / "other", on_step=lambda event: (
        event.set("actor.lr", event.values["actor.lr"] / 2), event.step == 4 and event.stop()))
    assert others.metrics[1]["reward/mean"] == result.metrics[1]["reward/mean"]
    assert others.metrics[2]["actor/grad_norm"] != result.metrics[2]["actor/grad_norm"]


def test_a_resumed_run_goes_on_with_what_hooks_have_set(task, tmp_path):
    whole = tmp_path / "whole"
    _run(World(), task, whole, on_step=Halving(last=5))
    half = tmp_path / "half"
    _run(World(), task, half, on_step=Halving(last=3))
    _run(World(), task, half, on_step=Halving(last=5), resumes=True)
    assert _metrics(half) == _metrics(whole)


def test_ranks_agree(task, tmp_path, pool):
    """Four ranks set and stop what one does, after the same steps."""
    alone = _halving(World(), task, tmp_path / "alone")
    together = pool.run(_halving, task, tmp_path / "together")[0]
    assert len(together) == len(alone) == 4
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_evaluations_checkpoints_and_exports(task, tmp_path):
    events: list[Any] = []
    out = tmp_path / "run"
    held_out = DatasetConfig(str(task / "held_out.jsonl"))
    result = _run(
        World(), task, out, eval_dataset=held_out, eval_every=1, best_by="eval/score", keep_exports=1,
        export_every=1, on_evaluation=lambda event: events.append((event.step, event.metrics["eval/score"])),
        on_checkpoint=lambda event: events.append(event.checkpoint.name), keep_checkpoints=9)
    scores = dict(event for event in events if isinstance(event, tuple))
    assert list(scores) == [1, 2, 3, 4, 5, 6]
    assert [event for event in events if isinstance(event, str)] == [f"step_{i}" for i in range(1, 7)]
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["eval/score"]
    scores = {0: first} | scores
    best = max(scores, key=scores.__getitem__)
    assert result.summary["best"] == {"step": best, "metric": "eval/score", "value": scores[best]}
    if best:
        assert (out / "hf/best").resolve() == (out / f"hf/step_{best}").resolve()
    assert {path.name for path in (out / "hf").glob("step_*")} == {f"step_{i}" for i in {best, 6} - {0}}


def test_early_stopping_counts_evaluations():
    def scores(*values):
        return {step: {"eval/score": value, "eval/loss": -value} for step, value in enumerate(values)}

    rule = EarlyStopping(patience=2, min_change=0.1)
    assert rule.reason(scores(0.1, 0.3, 0.35)) is None
    assert rule.reason(scores(0.1, 0.3, 0.35, 0.5, 0.5)) is None
    assert rule.reason(scores(0.1, 0.3, 0.35, 0.2)) == (
        "eval/score has not become better than 0.3, that of step 1")
    lower = EarlyStopping(metric="eval/loss", mode="min", patience=1)
    assert lower.reason(scores(0.1, 0.2)) is None and lower.reason(scores(0.2, 0.1)) is not None
    assert [best_step(scores(0.1, 0.3, 0.2), f"eval/{name}") for name in ("score", "loss")] == [1, 1]
    with pytest.raises(UserError, match=r"early_stopping.metric is 'eval/scor', .* \(did you mean eval/sc"):
        EarlyStopping("eval/scor").reason(scores(1.0))


def _reads(event: StepEvent) -> None:
    assert event.metrics["scor"]


def _raises(event: StepEvent) -> None:
    event.set("actor.lrr", 1.0)


def test_mistakes_in_hooks_are_named(task, tmp_path):
    says = r"on_step after step 1: set\('actor.lrr'\) names no value.*test_hooks.py:\d"
    with pytest.raises(UserError, match=says):
        _run(World(), task, tmp_path / "run", on_step=_raises)
    says = r"raised KeyError: 'scor' .*test_hooks.py:.*metrics has .*reward/mean"
    with pytest.raises(UserError, match=says):
        _run(World(), task, tmp_path / "other", on_step=_reads)
    event = StepEvent(1, 2, {}, {}, None, {"actor.lr": 1.0})
    with pytest.raises(UserError, match="it must be a number from 0 on"):
        event.set("actor.lr", float("nan"))
    for more in ({"early_stopping": EarlyStopping()}, {"best_by": "eval/score"}):
        with pytest.raises(ValueError, match="it needs an eval_dataset, and eval_every above 0"):
            compile_program(_experiment(task, **more), None, world_size=1)


def test_the_best_model_is_uploaded(tmp_path):
    """The library itself uploads to a local server, whose repository then opens in transformers."""
    with hub([]) as server:
        code = (
            "import sys; from pathlib import Path; from realhf.runtime.hooks import push_to_hub; "
            "from types import SimpleNamespace; "
            "push_to_hub(SimpleNamespace(push_to_hub='me/mine'), Path(sys.argv[1]))")
        out = tmp_path / "model"
        out.mkdir()
        for name, content in model_repository().files.items():
            (out / name).write_bytes(content)
        environment = server.environment(home=tmp_path / "home", HF_TOKEN="secret")
        words = [sys.executable, "-c", code, str(out)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
        assert "realhf: the model is on the hub: " in done.stderr, done.stderr
        (repository,) = server.repositories
        assert repository.name == "me/mine"
        assert repository.files["model.safetensors"] == (out / "model.safetensors").read_bytes()
        assert set(model_repository().files) <= set(repository.files)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "warning: push_to_hub me/mine: the model is not uploaded" in done.stderr
