"""The counts of `realhf check`, against the routing of samples and against a run."""

import json
from dataclasses import dataclass, replace
from itertools import product

import pytest

from realhf import ArrayDataset
from realhf.calls import learning_rate
from realhf.cli.check import derived_counts, sentences, uneven_splits
from realhf.cli.main import main
from realhf.distributed.world import World
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.runtime.compile import step_trial
from realhf.runtime.compile.program import compile_program
from realhf.runtime.samples.exchange import Routing, assign
from realhf.runtime.trainer import Trainer
from tests.control.modules import ADAM, Regression, data
from tests.runtime.tiny import make_experiment, role, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def counts_of(experiment, *, dp=1, num_rows=40):
    plan = None
    if dp > 1:
        spread = CallPlan(Layout.parse(f"d{dp}@0-{dp - 1}"), micro_batch_tokens=500)
        calls = {call.name: spread for call in experiment.graph().calls if call.kind != "host"}
        plan = ExecutionPlan(calls | {call.name: CallPlan(Layout.parse("d1@0"))
                                      for call in experiment.graph().of_kind("host")})
    return derived_counts(compile_program(experiment, plan, world_size=dp), num_rows=num_rows)


@pytest.mark.parametrize(
    ("batch_size", "group_size", "minibatches", "dp"), [*product((6, 7), (2, 3), (1, 2, 4), (1, 2, 4))]
)
def test_samples_of_mini_batches_and_ranks_are_those_of_the_routing(
    task, batch_size, group_size, minibatches, dp
):
    experiment = make_experiment("grpo", task, batch_size=batch_size, group_size=group_size)
    experiment.minibatches = minibatches
    found = counts_of(experiment, dp=dp)["calls"]
    equal = dict.fromkeys(range(batch_size * group_size), 1.0)
    for name, keeps_groups in (("actor_generate", True), ("ref_forward", False), ("actor_train", False)):
        count = minibatches if name == "actor_train" else 1
        parts = assign(equal, dp=dp, routing=Routing(group_size, count, keep_groups=keeps_groups))
        totals = [sum(map(len, part)) for part in parts]
        shares = [len(share) for part in parts for share in part]
        assert found[name]["samples"] == sum(totals)
        assert found[name]["minibatches"] == len(parts)
        assert found[name]["samples_per_minibatch"] == [min(totals), max(totals)]
        assert found[name]["samples_per_rank"] == [min(shares), max(shares)]
    warnings = uneven_splits({"prompts_per_step": batch_size, "calls": found})
    is_even = all(low == high for call in found.values() for low, high in
                  (call["samples_per_minibatch"], call["samples_per_rank"]))
    assert bool(warnings) != is_even


def test_counts_are_those_of_a_run(task, tmp_path):
    actor = role(task)
    settings = {"steps": 5, "eval_every": 2, "export_every": 3, "checkpoint_every": 2, "keep_checkpoints": 9}
    experiment = make_experiment("grpo", task, actor=actor, **settings)
    experiment.epochs = 2
    program = compile_program(experiment, None, world_size=1)
    counts = derived_counts(program, num_rows=40)
    result = Trainer(program, World(), out=tmp_path, quiet=True).run()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert counts["evaluations"] == sum("eval/score" in record for record in records) == 4
    assert counts["exports"] == len(list((tmp_path / "hf").iterdir())) == 2
    assert counts["checkpoints"] == len(list((tmp_path / "checkpoints").iterdir())) == 3
    assert counts["epochs"] == pytest.approx(5 * 6 / 40)
    assert counts["samples_per_step"] == 24
    ours = counts["roles"]["actor"]
    assert ours["optimizer_steps"] == 5 * 2 * 2
    optimizer = program.roles["actor"].optimizer
    rates = [learning_rate(optimizer, step) for step in range(20)]
    assert (ours["lr_start"], ours["lr_peak"], ours["lr_end"]) == (rates[0], max(rates), rates[-1])
    assert result.metrics[-1]["actor/lr"] == pytest.approx(ours["lr_end"])


def test_bytes_and_parameters_of_roles(task):
    experiment = make_experiment("ppo", task)
    roles = counts_of(experiment)["roles"]
    assert roles["actor"]["weights_bytes_per_rank"] == 8 * roles["actor"]["parameters"]
    # Gradients and two moments of float64, on one rank.
    assert roles["actor"]["training_bytes_per_rank"] == 3 * 8 * roles["actor"]["parameters"]
    assert roles["ref"]["training_bytes_per_rank"] == 0 and "lr_peak" not in roles["ref"]
    adapters = replace(role(task), lora=LoraConfig(rank=2, export_merged=True))
    with_lora = counts_of(make_experiment("grpo", task, actor=adapters))["roles"]["actor"]
    assert 0 < with_lora["trained_parameters"] < with_lora["parameters"] / 4


def test_check_prints_the_counts_and_writes_them_as_json(task, tmp_path, capsys):
    file = tmp_path / "experiment.py"
    file.write_text(
        "from pathlib import Path\nfrom tests.runtime.tiny import make_experiment\n"
        f"experiment = make_experiment('grpo', Path({str(task)!r}), max_lag=1)\n"
    )
    assert main(["check", str(file), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts["parts"].keys() == {"rollout", "score", "train"} and counts["rows"] == 40
    assert main(["check", str(file)]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in sentences(counts))
    assert "6 prompts x 4 = 24 samples" in out
    assert "parts: rollout (actor_generate); score (" in out
    assert main(["check", str(file), "--batch-size", "5", "--minibatches", "2"]) == 0
    assert "5 prompts do not divide by 2 mini-batches, which have 8 or 12 samples" in capsys.readouterr().err


@dataclass
class Replayed(Regression):
    """Trains on a replay buffer: eight times in each step, after two steps that only fill it."""

    def step(self, run):
        pool = run.pool("replay", keeps=True)
        pool.add(run.prompts(self.batch_size))
        for _ in range(8 if run.number >= 2 else 0):
            run("step", pool.take(5, order="random"))


@pytest.mark.parametrize("most", [20_000, 150])
def test_a_step_program_is_counted_by_trying_it(monkeypatch, most):
    monkeypatch.setattr(step_trial, "_MAX_COUNTED", most)
    optimizer = replace(ADAM, schedule="linear")
    experiment = Replayed(
        settings={"optimizer": optimizer}, dataset=ArrayDataset(data()), batch_size=12, steps=30)
    program = compile_program(experiment, None, world_size=1)
    counts = derived_counts(program, num_rows=60)
    if most == 150:  # Too long to be tried to its end.
        assert "about" in "\n".join(sentences(counts))
        assert 28 * 8 * 4 * 0.9 < counts["roles"]["net"]["optimizer_steps"] <= 30 * 8 * 4
        return
    work = experiment.work
    expected = 28 * 8 * work.minibatches * work.epochs
    assert counts["calls"]["net_train"]["samples"] == 5
    assert counts["roles"]["net"]["optimizer_steps"] == program.roles["net"].optimizer.total_steps == expected
    metrics = Trainer(program, World(), quiet=True).run().metrics
    last = learning_rate(program.roles["net"].optimizer, expected - 1)
    assert counts["roles"]["net"]["lr_end"] == last and 0 < last < 0.01 * ADAM.lr
    assert metrics[-1]["net/lr"] == pytest.approx(
        sum(learning_rate(program.roles["net"].optimizer, expected - 1 - i) for i in range(32)) / 32)


class Untrained(Replayed):
    """Trains only after something that no trial without data shows."""

    def step(self, run):
        run.pool("replay", keeps=True).add(run.prompts(self.batch_size))


def test_a_schedule_whose_length_is_not_known_is_refused():
    settings = {"settings": {"optimizer": replace(ADAM, schedule="linear")}, "dataset": ArrayDataset(data())}
    with pytest.raises(ValueError, match="net.optimizer: .* no call trained this role, .* set total_steps"):
        compile_program(Untrained(**settings, batch_size=12, steps=30), None, world_size=1)
