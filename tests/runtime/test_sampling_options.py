"""Experiments with stops, penalties and limits of single prompts: a plan changes nothing; what is refused."""

import json
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from realhf import DatasetConfig, FunctionCall, HostFunction, SamplingConfig
from realhf.calls import TokenLimits
from realhf.cli.overrides import override
from realhf.data.loader import load_tokenizer
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.trainer import Trainer
from tests.runtime.test_lag import assert_close
from tests.runtime.tiny import CHARACTERS, make_experiment, write_task
from tests.samples import marked

MOST = 9
STOPS = ("0a", "==", "b4", "+c", "7 ")
SAMPLING = SamplingConfig(
    max_new_tokens=MOST, stop=STOPS, bad_words=("a1",), min_p=0.01, presence_penalty=0.5, min_new_tokens=2)


@dataclass
class Kept:
    """A host function that keeps prompts' limits and answers of every batch that is trained."""

    batches: list = field(default_factory=list)

    def __call__(self, batch: Any, context: Any) -> dict:
        parts = zip(*(batch[key].split() for key in ("sequence_ids", "response_mask")), strict=True)
        answers = [tokens[mask.bool()].tolist() for tokens, mask in parts]
        self.batches.append([batch.ids, batch["most_new"], answers, batch["finished"].tolist()])
        return {}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Write a task whose rows have limits from 1 to 12."""
    directory = write_task(tmp_path_factory.mktemp("task"))
    for name in ("data.jsonl", "held_out.jsonl"):
        rows = [json.loads(line) for line in (directory / name).read_text().splitlines()]
        rows = [row | {"most_new": 1 + 5 * i % 12} for i, row in enumerate(rows)]
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _experiment(task, **changes):
    settings = {"sampling": SAMPLING, "max_new_tokens_key": "most_new", "work_stealing": False}
    return make_experiment("grpo", task, **({"batch_size": 4} | settings | changes))


def _run(world, layout, task, max_lag, out=None, start=None):
    """Return on rank 0 what was trained on, the metrics, and the score of the last evaluation."""
    kept = Kept()
    experiment = _experiment(task, max_lag=max_lag, eval_every=2, checkpoint_every=1, keep_checkpoints=9)
    inputs = ("sequence_ids", "response_mask", "finished", "most_new")
    graph = experiment.graph().add(FunctionCall("record", "host", inputs, work=HostFunction(kept)))
    experiment.graph = lambda: graph
    calls = {name: {"layout": layout} for name in ("actor_generate", "ref_forward", "actor_train")}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    result = Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()
    return (kept.batches, result.metrics, result.summary["eval_last"]) if world.rank == 0 else None


@pytest.fixture(scope="module")
def expected(pool, task):
    return {lag: pool.run(_run, "d1@0", task, lag)[0] for lag in (0, 3)}


@pytest.mark.parametrize("lag", [0, 3])
def test_answers_end_at_stops_and_limits(task, expected, lag):
    """With a lag, answers are generated in several rounds. (A token is one character, an eos or padding.)"""
    tokenizer = load_tokenizer(str(task))

    def ends(answer):
        return answer[-1] == 1 or any(tokenizer.decode(answer).endswith(stop) for stop in STOPS)

    kinds = set()
    for _, limits, answers, finished in expected[lag][0]:
        for limit, answer, end in zip(limits, answers, finished, strict=True):
            counts = [n for n in range(3, len(answer) + 1) if ends(answer[:n])]
            assert counts == ([len(answer)] if end else [])
            assert "a1" not in tokenizer.decode(answer)
            assert len(answer) <= min(limit, MOST) and (end or len(answer) == min(limit, MOST))
            kind = "eos" if answer[-1] == 1 else "stop" if end else "own" if limit < MOST else "limit"
            kinds.add(kind)
    assert kinds == {"stop", "eos", "own", "limit"}


@pytest.mark.parametrize(
    ("layout", "lag"), marked(product(["d2@0-1", "t2@0-1", "p2@0-1"], [0, 3]), quick=[1]))
@pytest.mark.slow
def test_a_plan_changes_nothing(pool, task, expected, layout, lag):
    batches, metrics, score = pool.run(_run, layout, task, lag)[0]
    assert batches == expected[lag][0]
    assert score == pytest.approx(expected[lag][2], rel=1e-9)
    assert_close(metrics, expected[lag][1])


@pytest.mark.slow
def test_a_resumed_run_knows_the_limits_of_unfinished_answers(pool, task, expected, tmp_path):
    pool.run(_run, "d1@0", task, 3, tmp_path)
    start = tmp_path / "checkpoints/step_1"
    batches, *_ = pool.run(_run, "d2@0-1", task, 3, None, start)[0]
    assert 0 < len(batches) < len(expected[3][0])
    assert batches == expected[3][0][-len(batches) :]


def test_an_evaluation_reads_limits_if_its_rows_have_them(task, tmp_path):
    experiment = _experiment(task)
    assert experiment.eval_graph()["actor_generate"].inputs == ("prompt_ids", "most_new")
    path = tmp_path / "eval.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n')
    experiment = replace(experiment, eval_dataset=DatasetConfig(str(path)))
    generate = experiment.eval_graph()["actor_generate"]
    assert generate.inputs == ("prompt_ids",) and generate.work.sampling == SAMPLING.greedy()
    assert experiment.graph()["actor_generate"].inputs == ("prompt_ids", "most_new")


def test_supervised_training_answers_with_the_options(task):
    experiment = make_experiment("sft", task, sampling=SAMPLING)
    work = experiment.eval_graph()["actor_generate"].work
    assert work.sampling == SAMPLING.greedy() and work.tokenizer == str(task)
    program = compile_program(replace(experiment, steps=1), None, world_size=1)
    result = Trainer(program, World(), quiet=True).run()
    assert result.summary["eval_last"] is not None


@pytest.mark.parametrize(("sampling", "fault"), [
    ({"stop_token_ids": (18,)}, "sampling.stop_token_ids has the token 18: it must be below 18, as the voc"),
    ({"logit_bias": {99: 1.0}}, "sampling.logit_bias has the token 99: it must be below 18"),
    ({"bad_word_ids": ((3, 40),)}, "sampling.bad_word_ids has the token 40: it must be below 18"),
])
def test_tokens_that_the_model_does_not_have(task, sampling, fault):
    experiment = _experiment(task, sampling=SamplingConfig(max_new_tokens=7, **sampling))
    with pytest.raises(ValueError, match=fault):
        compile_program(experiment, None, world_size=1)


def test_texts_without_a_tokenizer_file(task, tmp_path):
    (tmp_path / "config.json").write_text((task / "config.json").read_text())
    for sampling in ({"stop": "a"}, {"bad_words": "a"}):
        experiment = _experiment(
            task, tokenizer=str(tmp_path), sampling=SamplingConfig(max_new_tokens=7, **sampling))
        fault = f"sampling.{next(iter(sampling))} needs the tokenizer: .*tokenizer.json"
        with pytest.raises(ValueError, match=fault):
            compile_program(experiment, None, world_size=1)


@pytest.mark.parametrize("value", [0, "7", None, 2.5, True])
def test_limits_that_are_no_numbers_of_tokens(task, tmp_path, value):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1", "answer": "1", "most_new": limit} for limit in (3, value)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = _experiment(task, dataset=DatasetConfig(str(path)))
    with pytest.raises(ValueError, match=f"rows.jsonl line 2: most_new is {value!r}: it must be a whole"):
        compile_program(experiment, None, world_size=1)
    assert TokenLimits("most_new").row_fault(rows[0]) is None


def test_a_column_of_limits_that_is_missing(task):
    with pytest.raises(ValueError, match="line 1: there is no column 'most'"):
        compile_program(_experiment(task, max_new_tokens_key="most"), None, world_size=1)


def test_samples_of_another_distribution_are_warned_of(task):
    def found(**settings):
        sampling = SamplingConfig(max_new_tokens=7, **settings)
        program = compile_program(_experiment(task, sampling=sampling), None, world_size=1)
        return warnings_of(program, None, {})

    what = "actor trains on samples of another distribution than its log-probs tell"
    assert found(min_p=0.1, top_k=3, stop="a", stop_token_ids=(3,), ignore_eos=True) == []
    assert found(repetition_penalty=1.1, bad_words="a") == [
        f"sampling.repetition_penalty and sampling.bad_words: {what}"]
    assert not [line for line in found(temperature=0.0, presence_penalty=0.5) if what in line]


def test_words_are_tokens_of_the_experiments_tokenizer(task):
    """(Its token 2 + i is character i.)"""
    work = _experiment(task).graph()["actor_generate"].work
    assert work.tokenizer == str(task)
    assert load_tokenizer(str(task)).encode("a1") == [2 + CHARACTERS.index("a"), 2 + CHARACTERS.index("1")]


def test_options_can_be_given_on_the_command_line(task):
    words = (
        "--sampling.stop </answer> Question: --sampling.stop-token-ids 3 4 --sampling.min-p 0.1 "
        "--sampling.logit-bias 5 1.5 7 -2 --sampling.bad-words ab c --sampling.bad-word-ids 3 5 "
        "--sampling.repetition-penalty 1.1 --sampling.presence-penalty 0.2 --sampling.frequency-penalty -0.3 "
        "--sampling.min-new-tokens 2 --sampling.ignore-eos --max-new-tokens-key most"
    )
    changed = override(make_experiment("grpo", task), words.split())
    assert changed.max_new_tokens_key == "most"
    assert changed.sampling == SamplingConfig(
        max_new_tokens=7, stop=("</answer>", "Question:"), stop_token_ids=(3, 4), min_p=0.1,
        logit_bias=((5, 1.5), (7, -2.0)), bad_words=("ab", "c"), bad_word_ids=((3, 5),),
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.3, min_new_tokens=2,
        ignore_eos=True)
