"""rollouts.jsonl of real runs: its contents under several plans, with lag, with filters, after a kill."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from realhf import (
    DAPO,
    GRPO,
    DataflowGraph,
    Distillation,
    Evaluation,
    FunctionCall,
    HostFunction,
    PolicyLossConfig,
    RolloutLog,
    SamplingConfig,
)
from realhf.calls import response_keys
from realhf.data.batch import Packed
from realhf.data.order import row_order
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.doubts.training import unclear_rollouts
from realhf.runtime.records.rollout_file import merged
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.test_invariance import ROLE_CALLS
from tests.runtime.tiny import common, make_experiment, role, some_reward, write_task

LOG = RolloutLog(prompts_per_step=2, follow_rows=1)
SPLIT = {"grpo": ("d2@0-1", "t2@2-3", "p2@1-2"), "ppo": ("d2@2-3", "d2@0-1", "t2@0-1", "p2@2-3", "d2@0-1",
                                                         "d2@2-3")}


def build(kind: str, directory: Path, **changes):
    settings = {"rollouts": LOG, "eval_dataset": None, "checkpoint_every": 0} | changes
    if kind == "dapo":
        return DAPO(
            actor=role(directory), reward_function=coarse_reward, max_rounds=3, group_size=2,
            loss=PolicyLossConfig(average="prompt"), **common(directory) | settings)
    return make_experiment(kind, directory, **settings)


def coarse_reward(completions, answer):
    return [float(len(text) > 5 and text[0] in "0123") for text in completions]


def train(world, experiment, out: Path, layouts: tuple[str, ...] | None = None, start: Path | None = None):
    plan = None
    if layouts is not None:
        calls = ROLE_CALLS["ppo" if len(layouts) == 6 else "grpo"]
        chosen = dict(zip(calls, layouts, strict=True))
        if "reward_forward" not in chosen:
            chosen |= {"reward_forward": "d2@2-3", "advantages": "d1@1"}
        plan = ExecutionPlan.from_dict({"calls": {c: {"layout": layout} for c, layout in chosen.items()}})
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    program = compile_program(experiment, plan, world_size=world.size)
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


def train_kind(world, kind: str, directory: Path, out: Path, layouts: tuple[str, ...], changes: dict):
    train(world, build(kind, directory, **changes), out, layouts)


def rollouts(out: Path) -> list[dict]:
    return read_jsonl(out / "rollouts.jsonl")


def test_kept_answers_are_those_of_the_run(tmp_path):
    """Prompts, scores, advantages and the followed row, each found again without the collector."""
    directory = write_task(tmp_path)
    out = tmp_path / "run"
    train(World(), build("grpo", directory, steps=5, batch_size=20), out)
    data = read_jsonl(directory / "data.jsonl")
    found = rollouts(out)
    followed = {line["dataset_row"] for line in found if line["followed"]}
    assert len(followed) == 1
    for step in range(1, 6):
        lines = [line for line in found if line["step"] == step]
        prompts = {line["prompt_number"] for line in lines}
        assert len({line["prompt_number"] for line in lines if not line["followed"]}) in (1, 2)
        assert [line["sample"] for line in lines] == [4 * p + i for p in sorted(prompts) for i in range(4)]
        assert prompts <= set(range(20 * (step - 1), 20 * step))
    for line in found:
        row = data[line["dataset_row"]]
        assert (line["prompt"], line["columns"]) == (row["prompt"], {"answer": row["answer"]})
        (index,) = row_order(40, start=line["prompt_number"], count=1, seed=0, shuffle=True)
        assert index == line["dataset_row"] and 1 <= line["length"] <= 7
    where = row_order(40, start=0, count=100, seed=0, shuffle=True)
    expected = [1 + i // 20 for i, row in enumerate(where) if row in followed]
    assert [line["step"] for line in found if line["followed"]][::4] == expected and len(expected) >= 2
    for i in range(0, len(found), 4):
        scores = [line["score"] for line in found[i : i + 4]]
        mean = sum(scores) / 4
        deviation = (sum((s - mean) ** 2 for s in scores) / 4) ** 0.5
        advantages = [line["advantage"] for line in found[i : i + 4]]
        assert advantages == pytest.approx([(s - mean) / (deviation + 1e-6) for s in scores], abs=1e-4)
    text = sum(0.1 * len(line["completion"]) for line in found)
    assert text <= sum(line["score"] for line in found) <= text + len(found)  # See `some_reward`.
    assert some_reward([""], ["ab"], [[5, 4]], [""]) == [pytest.approx(2 / 7 + 0.2)]


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_plan_keeps_the_same(pool, tmp_path, kind):
    directory = write_task(tmp_path)
    train(World(), build(kind, directory), tmp_path / "one")
    pool.run(train_kind, kind, directory, tmp_path / "split", SPLIT[kind], {})
    found = rollouts(tmp_path / "split")
    assert found == rollouts(tmp_path / "one")
    assert len({line["step"] for line in found}) == 3
    assert all(line["completion"] and line["advantage"] is not None for line in found)


def test_with_a_reward_model_the_answers_are_decoded(tmp_path):
    directory = write_task(tmp_path)
    train(World(), build("ppo", directory, steps=1), tmp_path / "run")
    for line in rollouts(tmp_path / "run"):
        assert set(line["completion"]) <= set("0123456789+= abc") and line["prompt"].endswith("=")
        assert isinstance(line["score"], float) and line["columns"] == {}
        assert line["finished"] or line["length"] == 7


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_with_lag_an_answer_is_kept_in_the_step_that_trains_on_it_also_after_a_resume(tmp_path, rounds):
    directory = write_task(tmp_path)
    lag = {"max_lag": 1, "rounds": rounds, "steps": 4, "checkpoint_every": 1, "keep_checkpoints": 4}
    out = tmp_path / "run"
    train(World(), build("grpo", directory, **lag), out)
    found = rollouts(out)
    assert {line["step"] for line in found} == {1, 2, 3, 4}
    for line in found:
        assert line["prompt_number"] // 6 == line["step"] - 1
        trained = 2 * (line["step"] - 1)  # Two mini-batches are two updates of the weights.
        assert 0 <= line["versions"][0] <= line["versions"][1] <= max(trained, 0)
        assert line["advantage"] is not None
    assert any(line["versions"][1] < line["step"] - 1 for line in found)
    killed = tmp_path / "killed"
    shutil.copytree(out, killed)
    with (killed / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 2, "followed": false, "sam')
    train(World(), build("grpo", directory, **lag), killed, start=killed / "checkpoints/step_2")
    assert rollouts(killed) == found
    branch = tmp_path / "branch"
    train(World(), build("grpo", directory, **lag), branch, start=out / "checkpoints/step_3")
    assert rollouts(branch) == found


def test_groups_that_a_filter_drops_are_kept_without_advantages(tmp_path):
    directory = write_task(tmp_path)
    out = tmp_path / "run"
    train(World(), build("dapo", directory), out)
    groups: dict[tuple, list] = {}
    for line in rollouts(out):
        groups.setdefault((line["step"], line["prompt_number"]), []).append(line)
    assert len(groups) > 3 * 2
    kinds = set()
    for lines in groups.values():
        differ = len({line["score"] for line in lines}) > 1
        assert len(lines) == 2 and all(("advantage" in line) == differ for line in lines)
        kinds.add(differ)
    assert kinds == {True, False}


def test_without_scores_the_answers_that_train_are_kept(tmp_path):
    directory = write_task(tmp_path)
    teachers = (role(directory, trainable=False),)
    settings = common(directory) | {"rollouts": LOG, "eval_dataset": None, "checkpoint_every": 0}
    train(World(), Distillation(actor=role(directory), teachers=teachers, **settings), tmp_path / "run")
    lines = rollouts(tmp_path / "run")
    assert {line["step"] for line in lines} == {1, 2, 3}
    assert not any("score" in line for line in lines)
    assert all(line["completion"] and line["length"] and line["prompt"].endswith("=") for line in lines)


@pytest.mark.slow
def test_every_and_off(tmp_path):
    directory = write_task(tmp_path)
    log = RolloutLog(prompts_per_step=1, follow_rows=0, every=2)
    train(World(), build("grpo", directory, rollouts=log, steps=4), tmp_path / "run")
    assert [line["step"] for line in rollouts(tmp_path / "run")] == [1] * 4 + [2] * 4 + [4] * 4
    off = replace(log, prompts_per_step=0)
    train(World(), build("grpo", directory, rollouts=off, steps=1), tmp_path / "off")
    train(World(), build("sft", directory, steps=1), tmp_path / "sft")
    assert not any((tmp_path / name / "rollouts.jsonl").exists() for name in ("off", "sft"))


def test_ranks_are_joined_by_sample_and_scores_by_name_are_kept():
    fragments = [
        {"sample": 9, "prompt_number": 4, "score": 0.5, "rewards": {"exact": 1.0, "format": None}},
        {"sample": 8, "prompt_number": 4, "length": 3, "finished": True},
        {"prompt_number": 4, "prompt": "1+1=", "dataset_row": 7, "followed": True, "columns": {}},
        {"sample": 9, "prompt_number": 4, "length": 2, "finished": False},
        {"sample": 99, "prompt_number": 49, "advantage": 1.0},
    ]
    lines = merged(fragments)
    assert [line["sample"] for line in lines] == [8, 9]
    assert all(line["prompt"] == "1+1=" and line["followed"] for line in lines)
    assert lines[1]["rewards"] == {"exact": 1.0, "format": None} and "score" not in lines[0]
    assert json.loads(json.dumps(lines)) == lines


def last_three(batch, context):
    """Return a mask in which only the last three tokens of each answer count."""
    masks = []
    for mask in batch["drawn_mask"].split():
        mask = mask.clone()
        mask[:-3] = 0
        masks.append(mask)
    return {"response_mask": Packed.of(masks), "finished": batch["drawn_finished"]}


@dataclass
class Masked(GRPO):
    """GRPO in which a host call says what of a generated answer is trained on."""

    def graph(self) -> DataflowGraph:
        graph = super().graph()
        generate = graph["actor_generate"]
        sequences, _, *rest = generate.outputs
        outputs = (sequences, "drawn_mask", "gen_logprobs", "drawn_finished", *rest[2:])
        host = FunctionCall(
            "mask", "host", ("drawn_mask", "drawn_finished"), ("response_mask", "finished"),
            work=HostFunction(last_three))
        graph = DataflowGraph(
            tuple(replace(c, outputs=outputs) if c.name == generate.name else c for c in graph.calls)
            + (host,), graph.inputs)
        return graph


def masked(directory: Path, **changes):
    settings = common(directory) | {"rollouts": LOG, "eval_dataset": None, "steps": 2} | changes
    return Masked(actor=role(directory), reward_function=some_reward, group_size=4, **settings)


def train_masked(world, directory: Path, out: Path, calls: dict):
    plan = ExecutionPlan.from_dict({"calls": {name: {"layout": layout} for name, layout in calls.items()}})
    program = compile_program(masked(directory), plan, world_size=world.size)
    Trainer(program, world, out=out, quiet=True).run()


def test_a_response_mask_of_a_host_call_keeps_rollouts_on(pool, tmp_path):
    """Its lengths count, on whichever rank it runs."""
    directory = write_task(tmp_path)
    train(World(), masked(directory), tmp_path / "one")
    found = rollouts(tmp_path / "one")
    assert {line["step"] for line in found} == {1, 2}
    assert {line["length"] for line in found} <= {1, 2, 3}
    assert all(line["length"] == 3 for line in found if len(line["completion"]) > 3)
    assert all(isinstance(line["finished"], bool) and line["advantage"] is not None for line in found)
    calls = {"actor_generate": "d2@0-1", "mask": "d1@3", "reward_forward": "d2@2-3", "advantages": "d1@1",
             "actor_train": "d2@0-1"}
    pool.run(train_masked, directory, tmp_path / "split", calls)
    assert rollouts(tmp_path / "split") == found


def test_several_generating_calls_without_a_response_mask_are_a_warning(tmp_path):
    experiment = masked(write_task(tmp_path))
    program = compile_program(experiment, None, world_size=1)
    assert not [text for text in warnings_of(program, None, {}) if "rollouts" in text]
    assert response_keys(program.graph)[:4] == ("sequence_ids", "response_mask", "gen_logprobs", "finished")
    generate = program.graph["actor_generate"]
    calls = [replace(generate, name=f"g{i}", outputs=tuple(f"{key}{i}" for key in "abcd")) for i in (1, 2)]
    assert response_keys(DataflowGraph((calls[0],), generate.inputs))[:4] == ("a1", "b1", "c1", "d1")
    several = DataflowGraph(tuple(calls), generate.inputs)
    assert response_keys(several) is None
    (warning,) = unclear_rollouts(replace(program, graph=several))
    assert warning.startswith("rollouts are not kept: g1 and g2 generate, and no call writes response_mask")


def test_tokens_and_log_probs_are_those_of_the_model(tmp_path):
    """Computed again from the exported model, which with a learning rate of 0 is the one that sampled."""
    import transformers

    directory = write_task(tmp_path)
    log = replace(LOG, tokens=True)
    actor = role(directory)
    actor = replace(actor, optimizer=replace(actor.optimizer, lr=0.0))
    sampling = SamplingConfig(max_new_tokens=7, temperature=0.8)
    experiment = build("grpo", directory, rollouts=log, actor=actor, sampling=sampling, steps=1)
    train(World(), experiment, tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf/step_1", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    found = rollouts(tmp_path / "run")
    assert len(found) >= 8
    for line in found:
        ids = torch.tensor(line["token_ids"])
        mask = torch.tensor(line["response_mask"])
        assert len(ids) == len(mask) == len(line["logprobs"]) and mask.sum() == line["length"]
        assert tokenizer.decode(ids[mask == 1], skip_special_tokens=True) == line["completion"]
        assert tokenizer.decode(ids[mask == 0]) == line["prompt"]
        with torch.no_grad():
            logps = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        expected = logps.gather(1, ids[1:, None])[:, 0] * mask[1:]
        assert line["logprobs"] == pytest.approx([0.0, *expected.tolist()], rel=1e-5, abs=1e-6)
    assert "token_ids" not in merged([{"sample": 1, "prompt_number": 0, "length": 3}])[0]


QUESTION = 15  # The token of "a".


def second_prompt(batch, context):
    """Return the first answer with a question of an environment behind it: the prompt of the second turn."""
    first = batch["first_ids"].split()
    return {"second_prompt": Packed.of([torch.cat([ids, ids.new_tensor([QUESTION])]) for ids in first])}


def both_turns(batch, context):
    """Return the mask of both turns."""
    columns = (batch[key].split() for key in ("first_mask", "second_mask", "first_lp", "second_lp"))
    masks, logprobs = [], []
    for first, second, first_lp, second_lp in zip(*columns, strict=True):
        mask, lp = second.clone(), second_lp.clone()
        mask[: len(first)] += first
        lp[: len(first)] += first_lp
        masks.append(mask)
        logprobs.append(lp)
    return {"response_mask": Packed.of(masks), "gen_logprobs": Packed.of(logprobs)}


@dataclass
class TwoTurns(GRPO):
    """GRPO whose actor answers, is asked again and answers again."""

    def graph(self) -> DataflowGraph:
        graph = super().graph()
        one = graph["actor_generate"]
        first = replace(one, name="first_turn", outputs=("first_ids", "first_mask", "first_lp", "first_end"))
        work = HostFunction(second_prompt)
        ask = FunctionCall("ask", "host", ("first_ids",), ("second_prompt",), work=work)
        second = replace(
            one, inputs=("second_prompt",), outputs=("sequence_ids", "second_mask", "second_lp", "finished"))
        join = FunctionCall(
            "join", "host", ("first_mask", "second_mask", "first_lp", "second_lp"),
            ("response_mask", "gen_logprobs"), work=HostFunction(both_turns))
        others = [call for call in graph.calls if call.name != one.name]
        return DataflowGraph((first, ask, second, join, *others), graph.inputs)


def test_held_out_answers_are_made_by_the_calls_that_train(tmp_path):
    """Answers of two turns have two turns in evaluations; before, a single call answered there."""
    directory = write_task(tmp_path)
    settings = common(directory) | {"rollouts": LOG, "steps": 1, "max_new_tokens_key": None}
    settings |= {"actor": role(directory), "reward_function": some_reward, "group_size": 4}
    held_out = Evaluation(settings["eval_dataset"], samples=2)
    experiment = TwoTurns(**settings | {"eval_dataset": held_out})
    graph = experiment.eval_graph()
    assert [call.name for call in graph.order] == [
        "first_turn", "ask", "actor_generate", "join", "reward_forward"]
    greedy = TwoTurns(**settings).eval_graph()
    assert [call.work.sampling.temperature for call in greedy.of_kind("generate")] == [0, 0]
    out = tmp_path / "run"
    train(World(), experiment, out)
    for line in read_jsonl(out / "eval.jsonl"):
        assert "a" in line["completion"]
    for line in rollouts(out):
        assert "a" in line["completion"] and line["length"] >= 3
