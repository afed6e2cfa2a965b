"""Runs on preference pairs and evaluations without generation, under every layout and beside transformers."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf import (
    DPO,
    KTO,
    ORPO,
    BradleyTerry,
    DatasetConfig,
    DPOLoss,
    KTOLoss,
    LoraConfig,
    PairwiseRewardModel,
    RewardModel,
    SamplingConfig,
    SimPO,
)
from realhf.devices import chunk_sizes
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.graph import DataflowGraph
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.training import unusual_training
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED, read_jsonl
from tests.runtime.tiny import make_experiment, role, some_reward, write_task
from tests.samples import marked

VOCABULARY = 18
"""Tokens of the tiny model."""
WHOLE = 10**6
CALLS = {
    "dpo": ("ref_forward", "actor_train"), "lora": ("ref_forward", "actor_train"),
    "pairwise": ("reward_train",), "outcome": ("reward_train",), "sft": ("actor_train",),
    "simpo": ("actor_train",), "orpo": ("actor_train",),
    "kto": ("ref_forward", "actor_train", "actor_kl_forward", "ref_kl_forward", "mismatched",
            "reference_point"),
    "own": ("ref_forward", "actor_train"),
}
ANSWERED = {"score", "response_length/mean", "response_length/clip_ratio"}
EVALUATED = {
    "dpo": {"loss", *ANSWERED, "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"},
    "lora": {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"},
    "pairwise": {"loss", "accuracy", "margin", "mean_reward"},
    "outcome": {"loss", "accuracy"},
    "sft": {"loss", "perplexity", *ANSWERED},
    "simpo": {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"},
    "orpo": {"loss", "nll_loss", "rewards/chosen", "rewards/rejected", "rewards/margins",
             "rewards/accuracies"},
    "kto": {"loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins"},
    "own": {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"},
}
CASES = [
    ("dpo", ("d4@0-3", "p2@0-1")), ("lora", ("t2@2-3", "d2@0-1")), ("sft", ("d2t2@0-3",)),
    ("simpo", ("d2t2@0-3",)), ("simpo", ("p2@1-2",)), ("orpo", ("d2t2@0-3",)), ("orpo", ("p2@0-1",)),
    ("kto", ("p2@0-1", "d2t2@0-3", "d2@1-2", "t2@2-3", "d1@3", "d1@1")),
    ("kto", ("d2t2@0-3", "p2@0-1", "d1@2", "p2@2-3", "d1@3", "d1@1")),
    ("own", ("p2@2-3", "d2t2@0-3")), ("own", ("d2t2@0-3", "p2@0-1")),
]
SLOW = [
    ("dpo", ("d2@0-1", "d2@0-1")), ("dpo", ("t2@0-1", "t2@0-1")), ("pairwise", ("d2p2@0-3",)),
    ("dpo", ("d3@0-2", "c2@0-1")), ("dpo", ("p2@2-3", "d2t2@0-3")), ("pairwise", ("d4@0-3",)),
    ("pairwise", ("t2p2@0-3",)), ("pairwise", ("d2c2@0-3",)), ("outcome", ("d3@0-2",)),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    rng = random.Random(1)
    with (directory / "pairs.jsonl").open("w") as file:
        for _ in range(20):
            texts = ["".join(rng.choices("0123456789abc", k=rng.randint(0, 9))) for _ in range(3)]
            row = dict(zip(("prompt", "chosen", "rejected"), ("=" + texts[0], *texts[1:]), strict=True))
            row |= {"completion": texts[1], "label": rng.random(), "gap": rng.random(), "answer": "1"}
            file.write(json.dumps(row) + "\n")
    return directory


def margin_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, gap):
    """Return a loss of pairs that a user might write: that of DPO with the row's margin."""
    margin = chosen_logps - ref_chosen_logps - (rejected_logps - ref_rejected_logps)
    return torch.nn.functional.softplus(gap - 0.5 * margin)


def _labelled(row):
    return {"label": row["label"] > 0.5}


def _experiment(kind, directory, **changes):
    """Return an experiment of two steps on the pairs, with a held-out set of other size."""
    pairs = DatasetConfig(str(directory / "pairs.jsonl"))
    held_out = DatasetConfig(str(directory / "pairs.jsonl"), max_rows=7, shuffle=False)
    settings = {"dataset": pairs, "eval_dataset": held_out, "steps": 2, "batch_size": 5} | changes
    if kind == "sft":
        return make_experiment("sft", directory, **settings)
    if kind == "dpo":
        settings |= {"reward_function": some_reward, "sampling": SamplingConfig(max_new_tokens=4)}
        return DPO(actor=role(directory), loss=DPOLoss(beta=0.5), **settings)
    if kind == "lora":
        actor = replace(role(directory), lora=LoraConfig(rank=2, export_merged=True))
        return DPO(actor=actor, loss=DPOLoss("ipo"), **settings)
    if kind == "pairwise":
        loss = BradleyTerry(margin_key="gap", center_coef=0.1)
        return PairwiseRewardModel(reward=role(directory, head="score"), loss=loss, **settings)
    if kind == "simpo":
        return SimPO(actor=role(directory), **settings)
    if kind == "orpo":
        return ORPO(actor=role(directory), **settings)
    if kind == "own":
        return DPO(actor=role(directory), loss=margin_loss, **settings)
    if kind == "kto":
        settings["dataset"] = DatasetConfig(settings["dataset"].path, map=_labelled)
        settings["eval_dataset"] = replace(settings["eval_dataset"], map=_labelled)
        return KTO(actor=role(directory), loss=KTOLoss(beta=0.5, undesirable_weight=1.3), **settings)
    return RewardModel(reward=role(directory, head="score"), **settings)


def _plan(kind, layouts, micro_batch_tokens):
    calls = {call: {"layout": layout, "micro_batch_tokens": micro_batch_tokens}
             for call, layout in zip(CALLS[kind], layouts, strict=True)}
    return ExecutionPlan.from_dict({"calls": calls})


def _run(world, kind, layouts, directory, *, micro_batch_tokens, chunk_tokens):
    """Return the metrics of all steps on rank 0, with `chunk_tokens` in a chunk of logits."""
    program = compile_program(
        _experiment(kind, directory), _plan(kind, layouts, micro_batch_tokens), world_size=4)
    before = chunk_sizes.CHUNK_NUMEL
    try:
        chunk_sizes.CHUNK_NUMEL = chunk_tokens * VOCABULARY
        return Trainer(program, world, quiet=True).run().metrics
    finally:
        chunk_sizes.CHUNK_NUMEL = before


def _small(world, kind, layouts, directory):
    return _run(world, kind, layouts, directory, micro_batch_tokens=30, chunk_tokens=8)


def _large(world, kind, layouts, directory):
    return _run(world, kind, layouts, directory, micro_batch_tokens=WHOLE, chunk_tokens=WHOLE)


def _numbers(metrics):
    measured = (*TIMED, "realloc")
    return [{name: x for name, x in step.items() if not name.startswith(measured)} for step in metrics]


@pytest.fixture(scope="module")
def reference(pool, task):
    """Return the metrics of one process that computes everything at once, by kind."""
    return {k: _numbers(pool.run(_large, k, ("d1@0",) * len(CALLS[k]), task)[0]) for k in CALLS}


@pytest.mark.parametrize(
    ("kind", "layouts"), marked([*CASES, *SLOW], quick=[0, 3, 7]), ids=str)
def test_a_plan_does_not_change_results(pool, task, reference, kind, layouts):
    """Micro-batches hold about one pair, and a chunk of logits less than a pair."""
    found = _numbers(pool.run(_small, kind, layouts, task)[0])
    for step, (ours, expected) in enumerate(zip(found, reference[kind], strict=True), start=1):
        if step == 1:  # Policy and reference are equal: rounding decides which completion is ahead.
            ours.pop("rewards/accuracies", None)
            expected = {name: x for name, x in expected.items() if name != "rewards/accuracies"}
        assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", EVALUATED)
def test_what_is_logged(reference, kind):
    """It also guards the table above: the runs change the models."""
    *steps, last = reference[kind]
    names = {name.removeprefix("eval/") for name in last if name.startswith("eval/")}
    assert names == EVALUATED[kind] and not any("eval/loss" in step for step in steps)
    prefix = "reward/" if kind in ("pairwise", "outcome") else "actor/"
    trained = EVALUATED[kind] - {*ANSWERED, "perplexity"}
    assert {name if "/" in name else prefix + name for name in trained} <= set(last)
    assert all(step[prefix + "grad_norm"] > 1e-3 for step in reference[kind])


def test_the_policy_begins_at_its_reference(reference):
    first, *_, last = reference["dpo"]
    assert first["actor/loss"] == pytest.approx(math.log(2)) and first["rewards/margins"] == pytest.approx(0)
    assert abs(last["rewards/margins"]) > 1e-3


def test_an_evaluation_of_the_actor_has_transformers_loss(task, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    program = compile_program(_experiment("sft", task, steps=1), None, world_size=1)
    result = Trainer(program, World(), quiet=True, out=tmp_path).run()
    directory = result.summary["hf_dir"]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    losses, counts = [], []
    for row in read_jsonl(task / "pairs.jsonl")[:7]:
        prompt = tokenizer.encode(row["prompt"])
        answer = [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        losses.append(model(torch.tensor([prompt + answer]), labels=labels).loss.item())
        counts.append(len(answer))
    mean = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    last = result.metrics[-1]
    assert last["eval/loss"] == pytest.approx(mean, rel=1e-5)  # transformers has norms in float32.
    assert last["eval/perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert {row["prompt"] for row in read_jsonl(tmp_path / "eval.jsonl")}
    assert (result.summary["eval_metric"], result.summary["eval_last"]) == ("eval/score", last["eval/score"])


def test_each_prompt_of_a_pair_is_answered_in_one_row(task, tmp_path):
    experiment = _experiment("dpo", task, steps=1)
    program = compile_program(experiment, None, world_size=1)
    Trainer(program, World(), quiet=True, out=tmp_path).run()
    rows = read_jsonl(tmp_path / "eval.jsonl")
    held_out = read_jsonl(task / "pairs.jsonl")[: experiment.eval_dataset.max_rows or None]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in held_out]


def test_the_summary_of_a_run_without_scores(task, tmp_path):
    program = compile_program(_experiment("outcome", task), None, world_size=1)
    result = Trainer(program, World(), quiet=True, out=tmp_path).run()
    first, *_, last = read_jsonl(tmp_path / "metrics.jsonl")
    values = (first["eval/loss"], last["eval/loss"])
    assert (result.summary["eval_first"], result.summary["eval_last"]) == values and values[0] != values[1]
    assert result.summary["eval_metric"] == "eval/loss" and not (tmp_path / "eval.jsonl").exists()


@pytest.mark.slow
def test_transformers_own_class_keeps_pairs_together(pool, task):
    found = {
        layout: _numbers(pool.run(_theirs, layout, tokens, task)[0])
        for layout, tokens in {"d1@0": WHOLE, "d2@0-1": 30}.items()
    }
    for ours, expected in zip(found["d2@0-1"], found["d1@0"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)  # They compute angles in float32.


def _theirs(world, layout, micro_batch_tokens, directory):
    experiment = _experiment("dpo", directory, eval_dataset=None)
    experiment.actor = replace(experiment.actor, engine="transformers")
    program = compile_program(experiment, _plan("dpo", (layout, layout), micro_batch_tokens), world_size=4)
    return Trainer(program, world, quiet=True).run().metrics


def test_what_is_refused(task):
    def compiled(kind, **changes):
        return compile_program(_experiment(kind, task, **changes), None, world_size=1)

    with pytest.raises(ValueError, match="group_size is 3: it must be 2, as the graph reads pairs"):
        compiled("dpo", group_size=3)
    experiment = _experiment("sft", task)
    experiment.eval_graph = lambda: DataflowGraph(experiment.graph().calls, experiment.graph().inputs)
    with pytest.raises(ValueError, match="eval_graph.. has nothing to log: a call must write `score`, or a"):
        compile_program(experiment, None, world_size=1)
    bad = task / "bad.jsonl"
    rows = read_jsonl(task / "pairs.jsonl")[:3]
    bad.write_text("".join(json.dumps(row | {"gap": None, "label": 2}) + "\n" for row in rows))
    for kind, fault in (("pairwise", "gap is None"), ("outcome", "label is 2")):
        for name in ("dataset", "eval_dataset"):
            with pytest.raises(ValueError, match=f"^{name} .*bad.jsonl line 1: {fault}: it must be a"):
                compiled(kind, **{name: DatasetConfig(str(bad)), "batch_size": 1})


def test_a_reference_that_no_loss_reads_is_a_warning(task):
    settings = {"dataset": DatasetConfig(str(task / "pairs.jsonl")), "batch_size": 2}
    ref = role(task, trainable=False)
    program = compile_program(SimPO(actor=role(task), ref=ref, **settings), None, world_size=1)
    assert "ref is given, and no call uses it: leave it out" in list(unusual_training(program))
    program = compile_program(DPO(actor=role(task), ref=ref, **settings), None, world_size=1)
    assert not any("ref is given" in warning for warning in unusual_training(program))


def test_equal_completions_are_a_warning(task, tmp_path, capsys):
    rows = [row | {"rejected": row["chosen"]} for row in read_jsonl(task / "pairs.jsonl")[:2]]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(str(tmp_path / "pairs.jsonl"))
    experiment = _experiment("dpo", task, dataset=dataset, batch_size=1)
    Trainer(compile_program(experiment, None, world_size=1), World())
    what = "dataset: rejected is the same as chosen in 2 of 2 rows, first in line 1\n"
    assert what in capsys.readouterr().err
