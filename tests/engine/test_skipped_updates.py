"""Updates whose gradients are not finite: skipped, counted, and too many in a row end the run."""

import math
from dataclasses import replace

import pytest
import torch

from realhf.data.batch import Batch
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.tiny import make_experiment, role, write_task


class SpoiltLoss:
    """A loss whose calls with these numbers are NaN."""

    def __init__(self, loss, spoilt):
        self._loss = loss
        self._spoilt = spoilt
        self._count = 0

    def __getattr__(self, name):
        return getattr(self._loss, name)

    def __call__(self, outputs, batch, totals):
        loss, metrics = self._loss(outputs, batch, totals)
        self._count += 1
        return (loss * math.nan if self._count in self._spoilt else loss), metrics


def _run(tmp_path, spoilt, *, max_skipped=3, steps=4):
    """Train with a loss that is NaN in some of its calls (two per step); return metrics and directory."""
    directory = write_task(tmp_path)
    actor = role(directory)
    actor = replace(actor, optimizer=replace(actor.optimizer, max_skipped=max_skipped))
    experiment = make_experiment("grpo", directory, actor=actor, steps=steps, eval_dataset=None)
    graph = experiment.graph()
    train = graph["actor_train"]
    spoilt_work = replace(train.work, loss=SpoiltLoss(train.work.loss, spoilt))
    experiment.graph = lambda: graph.replace(replace(train, work=spoilt_work))
    out = tmp_path / "run"
    Trainer(compile_program(experiment, None, world_size=1), World(), out=out, quiet=True).run()
    return read_jsonl(out / "metrics.jsonl"), out


def test_a_skipped_update_is_counted_and_its_samples_are_kept(tmp_path, capsys):
    metrics, out = _run(tmp_path, {4})  # The second mini-batch of step 2.
    assert [step["actor/skipped_updates"] for step in metrics] == [0, 1, 0, 0]
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    (saved,) = (out / "failures").iterdir()
    assert saved.name == "step_2_actor_train_rank_0.safetensors"
    batch = Batch.unpack(torch.frombuffer(bytearray(saved.read_bytes()), dtype=torch.uint8))
    assert len(batch) == 24 and {"sequence_ids", "advantages", "gen_logprobs"} <= batch.fields.keys()
    said = capsys.readouterr().err
    what = "actor_train skipped an update in step 2, as its gradient is not finite"
    assert f"realhf: warning: {what}; its samples: {saved}\n" in said


def test_a_skipped_update_leaves_the_optimizer_as_it_was(tmp_path):
    """The other mini-batch of the step is trained on, and the learning rate's warm-up does not advance."""
    whole, _ = _run(tmp_path / "whole", set())
    skipped, _ = _run(tmp_path / "skipped", {3})
    assert whole[0]["actor/loss"] == skipped[0]["actor/loss"]
    assert skipped[1]["actor/skipped_updates"] == 1
    assert skipped[1]["actor/lr"] == pytest.approx(3e-3)


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run(tmp_path):
    with pytest.raises(UserError, match="norm is nan at optimizer step 2, and 2 updates before were"):
        _run(tmp_path, {3, 4, 5}, max_skipped=2)
    with pytest.raises(UserError, match="gradient norm is nan at optimizer step 2: lower"):
        _run(tmp_path / "none", {3}, max_skipped=0)
    metrics, _ = _run(tmp_path / "apart", {3, 5}, max_skipped=1)
    assert [step["actor/skipped_updates"] for step in metrics] == [0, 1, 1, 0]
