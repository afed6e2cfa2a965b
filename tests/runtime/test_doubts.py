"""Warnings in runs of one process; those about adapters of another model are in test_lora.py."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_type_hints

import pytest
from transformers import AutoTokenizer

from realhf import (
    CosineReward,
    DatasetConfig,
    Evaluation,
    ExactMatch,
    FormatReward,
    LoraConfig,
    OptimizerConfig,
    PolicyLossConfig,
    RegexMatch,
    RepetitionPenalty,
    Reward,
    RewardKL,
    RewardModel,
    Role,
    SamplingConfig,
    SoftOverlongPenalty,
)
from realhf.algorithms.policy_loss import PolicyLoss
from realhf.devices import half_precision
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts import chats, data, held_out, models, rewards, rules, sampling, training
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.doubts.training import _unusual_rate
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import HF_CONFIG, make_experiment, role, some_reward, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _warnings(capsys, kind: str, task, **changes) -> list[str]:
    """Return the warnings of a trainer before its first step, without their common beginning."""
    experiment = make_experiment(kind, task, **changes)
    Trainer(compile_program(experiment, None, world_size=1), World())
    start = "realhf: warning: "  # (Other libraries have warnings, too.)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(start)]
    return [line.removeprefix(start) for line in lines]


def _dataset(task, rows) -> DatasetConfig:
    path = task / "other.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(str(path))


def _lengths(task, key: str = "prompt") -> list[int]:
    return [len(json.loads(line)[key]) for line in (task / "data.jsonl").read_text().splitlines()]


def test_every_rule_is_listed_once():
    """The rules are the public generators of sentences, and a function that returns some."""
    subjects = (chats, data, held_out, models, rewards, sampling, training)
    defined = [
        function for module in subjects for name, function in vars(module).items()
        if not name.startswith("_") and getattr(function, "__module__", "") == module.__name__
        and get_type_hints(function).get("return") in (Iterator[str], list[str])]
    listed = [rule for name, table in vars(rules).items() if name.startswith("ABOUT_") for rule in table]
    assert len(listed) == len(set(listed)) > 50
    assert {*listed, chats.plain_texts} == set(defined)


def test_nothing_is_said_of_a_usual_run(task, capsys):
    assert _warnings(capsys, "grpo", task) == []
    assert _warnings(capsys, "sft", task) == []


def test_settings_of_evaluations_without_held_out_rows(task, capsys):
    ends = "and there is no eval_dataset: nothing is evaluated"
    for changes, says in (
        ({"eval_every": 2}, "eval_every is 2"), ({"eval_at_start": False}, "eval_at_start is False"),
        ({"eval_every": 1, "eval_function": some_reward}, "eval_every is 1 and eval_function is given")):
        assert _warnings(capsys, "grpo", task, eval_dataset=None, **changes) == [f"{says}, {ends}"]
    assert _warnings(capsys, "grpo", task, eval_dataset=None) == []


def test_rows_that_are_left_out(task, capsys):
    lengths, limit = _lengths(task), 5
    count = sum(length > limit for length in lengths)
    assert 0 < count < len(lengths)
    dataset = DatasetConfig(str(task / "data.jsonl"), max_prompt_tokens=limit)
    why = f"are left out, as their prompts are longer than max_prompt_tokens {limit}"
    assert _warnings(capsys, "grpo", task, dataset=dataset) == [
        f"dataset: {count} of {len(lengths)} rows {why}"]


LOOK = re.compile("</think>")


def _by_constant(completions, **columns):
    return [float("<think>" in text) for text in completions]


def _by_global(completions, **columns):
    return [float(LOOK.search(text) is not None) for text in completions]


class _ByField:
    def __call__(self, completions, **columns):
        """Look for no <think> in the text."""
        return [float(any(word in text for word in ["a", "<think>"])) for text in completions]


def _unmarked(completions, **columns):
    """Return 0 for what would have been <think>."""
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def thinking_task(tmp_path_factory):
    directory = write_task(tmp_path_factory.mktemp("thinking"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | {"vocab_size": len(tokenizer)}))
    return directory


@pytest.mark.parametrize(("reward", "token"), [
    (FormatReward(), "<think>"), (RegexMatch(r"^<think>.*</think>"), "<think>"), (ExactMatch(), "</think>"),
    (_by_constant, "<think>"), (partial(_by_constant), "<think>"), (_by_global, "</think>"),
    (_ByField(), "<think>"), (RegexMatch("<pad>"), "<pad>"), (_unmarked, None), (some_reward, None),
])
def test_rewards_that_look_for_special_tokens(thinking_task, capsys, reward, token):
    said = _warnings(capsys, "grpo", thinking_task, reward_function=Reward(reward, name="r"))
    sought = "a special token of the tokenizer: completions have no special tokens as text"
    expected = [] if token is None else [
        f"reward r looks for {token!r}, {sought}, only in completion_ids"]
    assert said == expected


def test_a_format_whose_first_tag_the_prompt_has_written(thinking_task, capsys):
    for opened, end in ((False, "<think>"), (True, "=")):
        rows = [{"prompt": f"1+1{end}", "answer": "2"}] * 8
        dataset = _dataset(thinking_task, rows)
        said = []
        for chosen in (opened, not opened):
            reward = FormatReward(opened=chosen)
            said.append(_warnings(capsys, "grpo", thinking_task, dataset=dataset, reward_function=reward))
        ends = "does not end" if opened else "ends"
        first = f"the first prompt {ends} with <think>, and FormatReward.opened is {opened}"
        assert f"dataset: reward format: {first}" in said[0]
        assert not any(line.startswith("dataset: reward format") for line in said[1])


def test_settings_that_the_engine_does_not_have(task, capsys):
    actor = replace(role(task), engine="transformers")
    what = "actor.engine is transformers, which does not have kv_cache_gib and work_stealing"
    assert _warnings(capsys, "grpo", task, actor=actor, kv_cache_gib=1.0, work_stealing=False) == [what]
    assert _warnings(capsys, "grpo", task, actor=actor, max_rows=8) == []


def test_a_dtype_in_which_the_cpu_is_slow(task, capsys, monkeypatch):
    """The native engine computes in float32 there; transformers' classes do not."""
    ours = replace(role(task), dtype="bfloat16")
    theirs = replace(ours, engine="transformers")
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: False)
    (what,) = _warnings(capsys, "sft", task, actor=theirs)
    assert what.startswith("actor.dtype is bfloat16, for which this CPU has no fast units")
    assert _warnings(capsys, "sft", task, actor=ours) == []
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: True)
    assert _warnings(capsys, "sft", task, actor=theirs) == []


def test_greedy_samples_of_one_prompt(task, capsys):
    greedy = SamplingConfig(max_new_tokens=7, temperature=0.0)
    what = "sampling.temperature is 0: the 4 samples of a prompt are all the same"
    assert _warnings(capsys, "grpo", task, sampling=greedy) == [what]
    assert _warnings(capsys, "ppo", task, sampling=greedy, group_size=1) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": SamplingConfig(max_new_tokens=7, min_p=1.0)},
         "sampling.min_p is 1: the 4 samples of a prompt are all the same"),
        ({"sampling": SamplingConfig(max_new_tokens=7, top_p=1e-6)},
         "sampling.top_p is 1e-06: the 4 samples of a prompt are all the same"),
        ({"sampling": SamplingConfig(max_new_tokens=7, stop=("\\n",))}, "a backslash and the letter n"),
        ({"score_shaping": SoftOverlongPenalty(max_length=40, buffer=8)},
         "score_shaping begins after 32 tokens"),
        ({"score_shaping": CosineReward(max_length=40)}, "score_shaping.max_length is 40"),
        ({"token_rewards": (RepetitionPenalty(),)}, "RepetitionPenalty.ngram is 40"),
        ({"loss": PolicyLossConfig(entropy_coef=10.0)}, "loss.entropy_coef is 10: the model learns to be"),
    ],
)
def test_settings_that_are_surely_not_meant(task, changes, says):
    changed = replace(make_experiment("grpo", task), **changes)
    program = compile_program(changed, None, world_size=1)
    assert [warning for warning in warnings_of(program, None, {}) if says in warning]
    plain = compile_program(make_experiment("grpo", task), None, world_size=1)
    assert not [warning for warning in warnings_of(plain, None, {}) if says in warning]


def test_an_evaluation_that_forgets_the_sampling_of_training(task):
    training = SamplingConfig(max_new_tokens=7, stop=("=",))

    def said(sampling: SamplingConfig) -> list[str]:
        held_out = Evaluation(DatasetConfig(str(task / "held_out.jsonl")), samples=2, sampling=sampling)
        experiment = make_experiment("grpo", task, sampling=training, eval_dataset=held_out)
        program = compile_program(experiment, None, world_size=1)
        return [warning for warning in warnings_of(program, None, {}) if "eval_dataset.sampling" in warning]

    (what,) = said(SamplingConfig(temperature=0.6))
    assert what.startswith("eval_dataset.sampling has max_new_tokens 256 and stop () by default")
    assert said(replace(training, temperature=0.6)) == []
    assert said(replace(training, top_k=1))[0].endswith("samples of a held-out prompt are all the same")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": 3.0}, "actor.optimizer.lr is 3 (above 0.03, for any model): a few steps at "),
        ({"lr": 0.0}, "actor.optimizer.lr is 0: the model does not change"),
        ({"lr": 1e-12}, "actor.optimizer.lr is 1e-12 (1e-06 is usual): the model hardly changes"),
        ({"warmup_steps": 7}, "actor.optimizer.warmup_steps is 7, and the run has 6 optimizer steps"),
        ({"schedule": "linear", "total_steps": 4}, "actor.optimizer.total_steps is 4, and the run has 6"),
        ({"betas": (0.999, 0.9)}, "actor.optimizer.betas are (0.999, 0.9): the first is usually the smaller"),
        ({"weight_decay": 10.0}, "actor.optimizer.weight_decay is 10: it shrinks the weights"),
        ({"max_grad_norm": 1e-6}, "actor.optimizer.max_grad_norm is 1e-06: every gradient is cut to"),
    ],
)
def test_unusual_settings_of_training(task, settings, says):
    """The run has three steps of two minibatches."""
    actor = replace(role(task), optimizer=OptimizerConfig(**({"lr": 3e-3} | settings)))
    program = compile_program(make_experiment("grpo", task, actor=actor), None, world_size=1)
    (found,) = warnings_of(program, None, {})
    assert found.startswith(says)


@pytest.mark.parametrize(("lora", "lr"), [(False, 1e-3), (True, 1e-2)])
def test_a_learning_rate_a_thousand_times_too_high_for_a_pretrained_model(lora, lr):
    """GRPO's usual rate is 1e-6, and 1e-5 for adapters; small and untrained models bear more."""

    def warned(role, lr):
        optimizer = OptimizerConfig(lr=lr)
        loss = PolicyLoss(PolicyLossConfig())
        return [*_unusual_rate("actor", replace(role, optimizer=optimizer), optimizer, loss)]

    large = Role("qwen2.5-0.5b", lora=LoraConfig(rank=8) if lora else None)
    (sentence,) = warned(large, lr)
    usual = "1e-05" if lora else "1e-06"
    assert sentence == (f"actor.optimizer.lr is {lr:g} ({usual} is usual for what it learns): "
                        "a few steps at such a rate destroy a model")
    assert warned(large, lr / 100) == [] and warned(replace(large, random_init=True), lr) == []


def test_settings_of_sampling_kl_and_rewards(task):
    def found(**changes):
        experiment = replace(make_experiment("grpo", task), **changes)
        return warnings_of(compile_program(experiment, None, world_size=1), None, {})

    def sampling(**settings):
        return {"sampling": SamplingConfig(max_new_tokens=7, **settings)}

    (hot,) = found(**sampling(temperature=100.0))
    assert hot.startswith("sampling.temperature is 100: answers are nearly random tokens")
    equal = "the 4 samples of a prompt are"
    assert found(**sampling(temperature=0.01)) == [
        f"sampling.temperature is 0.01: {equal} nearly all the same"]
    assert found(**sampling(top_k=1)) == [f"sampling.top_k is 1: {equal} all the same"]
    (kl,) = found(loss=PolicyLossConfig(kl_coef=100.0))
    assert kl == "loss.kl_coef is 100: the reward hardly counts beside it (0 to 0.1 is usual)"
    (unused,) = found(loss=PolicyLossConfig(), ref=role(task, trainable=False))
    assert unused == "ref is given, and no call uses it: set loss.kl_coef above 0, or leave it out"
    (unweighted,) = found(reward_function=Reward(some_reward, weight=0.0))
    assert unweighted.startswith("call reward_forward: every reward has the weight 0")


def test_held_out_rows_that_are_trained_on(task, tmp_path, capsys):
    rows = [json.loads(line) for line in (task / "data.jsonl").read_text().splitlines()]
    own = [json.loads(line) for line in (task / "held_out.jsonl").read_text().splitlines()]

    def warned(held_out, kind="grpo"):
        path = tmp_path / "held_out.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in held_out))
        return _warnings(capsys, kind, task, eval_dataset=DatasetConfig(str(path)))

    where = f"first {tmp_path}/held_out.jsonl"
    learned = "what is learned by heart counts as learned"
    for kind in ("grpo", "sft"):
        (whole,) = warned(rows, kind)
        assert whole == f"eval_dataset: 40 of 40 rows are rows of dataset, too, {where} line 1: {learned}"
        (some,) = warned([*own, *rows[7:9]], kind)
        assert some == f"eval_dataset: 2 of 7 rows are rows of dataset, too, {where} line 6: {learned}"
        assert warned(own, kind) == []


def test_rows_that_are_mostly_the_same_or_lack_answers(task, capsys):
    rows = [{"prompt": str(i % 7), "answer": "" if i == 2 else "1"} for i in range(30)]
    settings = {"dataset": _dataset(task, rows), "eval_dataset": None}
    assert _warnings(capsys, "grpo", task, **settings) == [
        "dataset: 22 of 30 rows are the same as an earlier one",
        "dataset: column 'answer' is empty in 1 of 30 rows, first in line 3"]


def test_columns_that_are_null_in_some_rows(task, capsys):
    rows = [{"prompt": "1", "answer": answer, "note": None} for answer in ("1", None, "2", None, "3", "4")]
    what = "column 'answer' is null in 2 of 6 rows, first in line 2"
    settings = {"dataset": _dataset(task, rows), "eval_dataset": None}
    assert _warnings(capsys, "grpo", task, **settings) == [f"dataset: {what}"]


def test_a_batch_of_more_rows_than_there_are(task, capsys):
    rows = [{"prompt": "1", "answer": "1"}] * 4
    settings = {"dataset": _dataset(task, rows), "eval_dataset": None}
    what = "batch_size is 5, and there are 4 rows in dataset: each step has some rows more than once"
    assert _warnings(capsys, "grpo", task, batch_size=5, **settings) == [what]
    assert _warnings(capsys, "grpo", task, batch_size=4, **settings) == []


def test_ranks_without_a_call(task):
    experiment = make_experiment("grpo", task)
    calls = {call.name: {"layout": "d2@1-2"} for call in experiment.graph().calls if call.role is not None}
    plan = ExecutionPlan.from_dict({"calls": calls})
    found = warnings_of(compile_program(experiment, plan, world_size=3), None, {})
    assert found == []  # Host calls are on rank 0.
    found = warnings_of(compile_program(experiment, plan, world_size=5), None, {})
    assert found == ["2 ranks (3, 4) have no call in the plan and will do nothing, of 5 ranks"]
    found = warnings_of(compile_program(experiment, plan, world_size=4), None, {})
    assert found == ["rank 3 has no call in the plan and will do nothing, of 4 ranks"]


def test_a_model_whose_answers_never_end(tmp_path, capsys):
    task = write_task(tmp_path)
    (task / "config.json").write_text(json.dumps({**HF_CONFIG, "eos_token_id": None}))
    what = "actor.model has no eos_token_id in config.json or generation_config.json"
    assert _warnings(capsys, "grpo", task) == [f"{what}: every answer runs to sampling.max_new_tokens 7"]
    (task / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert _warnings(capsys, "grpo", task) == []


def test_completions_that_end_where_answers_do_not(tmp_path, capsys):
    task = write_task(tmp_path)
    (task / "config.json").write_text(json.dumps({**HF_CONFIG, "eos_token_id": [0, 15]}))
    what = "no completion learns to end in one of the tokens 0, 15, at which actor.model stops (eos_token_id)"
    ordinary = "actor.model stops at 15 (eos_token_id), which is 'a', an ordinary token: "
    first, other, last = _warnings(capsys, "sft", task)
    assert other == f"{ordinary}every answer ends where it says that"
    assert [first, last] == [
        f"{name}: {what}; the tokenizer's eos token is 1" for name in ("dataset", "eval_dataset")]


LEARNED = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 16, "vocab_size": HF_CONFIG["vocab_size"], "eos_token_id": 1,
}


def test_completions_beyond_the_learned_positions(tmp_path, capsys):
    task = write_task(tmp_path)
    (task / "config.json").write_text(json.dumps(LEARNED))
    rows = [{"prompt": "12", "completion": "1" * number} for number in (13, 14)]
    settings = {"dataset": replace(_dataset(task, rows), max_prompt_tokens=8), "eval_dataset": None}
    settings["batch_size"] = 1
    with pytest.raises(UserError, match="line 2: prompt and completion have 17 tokens, and"):
        _warnings(capsys, "sft", task, **settings)
    settings["dataset"] = replace(settings["dataset"], max_rows=1)
    assert _warnings(capsys, "sft", task, **settings) == []


@pytest.mark.parametrize("label", [None, "right", 2, float("nan")])
def test_labels_of_a_reward_model_are_shares(task, label):
    rows = [{"prompt": "1", "completion": "2", "label": given} for given in (1, label)]
    reward = Role(str(task), head="score", optimizer=OptimizerConfig(), random_init=True)
    experiment = RewardModel(reward=reward, dataset=_dataset(task, rows), batch_size=1)
    with pytest.raises(ValueError, match="other.jsonl line 2: label is .*: it must be a number from 0"):
        compile_program(experiment, None, world_size=1)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    "rope, limit",
    [(None, 64), ({"rope_type": "linear", "factor": 2.0}, 128), (YARN, 80), (YARN | {"factor": 1.5}, 64)],
)
@pytest.mark.parametrize("beyond", [0, 1])
def test_sequences_longer_than_the_model_was_made_for(tmp_path, capsys, rope, limit, beyond):
    task = write_task(tmp_path)
    assert HF_CONFIG["max_position_embeddings"] == 64
    fields = {} if rope is None else {"rope_parameters": {"rope_theta": 1e4, **rope}}
    (task / "config.json").write_text(json.dumps(HF_CONFIG | fields))
    longest = max(_lengths(task))
    new, none = limit - longest + beyond, {"eval_dataset": None}
    found = _warnings(capsys, "grpo", task, sampling=SamplingConfig(max_new_tokens=new), **none)
    what = (
        f"model was made for {limit} positions (max_position_embeddings), but a sequence may have "
        f"{longest + new}: {longest} from dataset and sampling.max_new_tokens {new}")
    assert found == [f"{role}.{what}" for role in ("actor", "ref")] * beyond


def test_answers_of_the_evaluation_count(task, capsys):
    found = _warnings(capsys, "sft", task, sampling=SamplingConfig(max_new_tokens=64))
    assert len(found) == 1 and "from eval_dataset and sampling.max_new_tokens 64" in found[0]


def test_whole_sequences_of_a_dataset_count(tmp_path, capsys):
    task = write_task(tmp_path)
    longest = max(a + b + 1 for a, b in zip(_lengths(task), _lengths(task, "completion"), strict=True))
    (task / "config.json").write_text(json.dumps(HF_CONFIG | {"max_position_embeddings": longest - 1}))
    experiment = {"sampling": SamplingConfig(max_new_tokens=1), "eval_dataset": None}
    found = _warnings(capsys, "sft", task, **experiment)
    assert [line.partition(",")[0] for line in found] == [
        f"actor.model was made for {longest - 1} positions (max_position_embeddings)"]


def test_no_prompt_fits_where_responses_fill_all_positions(tmp_path):
    task = write_task(tmp_path)
    (task / "config.json").write_text(json.dumps(LEARNED))
    experiment = make_experiment("grpo", task, sampling=SamplingConfig(max_new_tokens=12))
    with pytest.raises(ValueError, match=r"set dataset.max_prompt_tokens \(4096\) and .* to at most 4$"):
        compile_program(experiment, None, world_size=1)
    experiment.sampling = replace(experiment.sampling, max_new_tokens=16)
    with pytest.raises(ValueError, match="set sampling.max_new_tokens below 16$"):
        compile_program(experiment, None, world_size=1)


def test_right_answers_that_contradict_each_other(task, capsys):
    """Rows of a game may all have the same prompt."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
    says = "dataset: 1 rows have another answer than an earlier row with the same prompt, first in line 7: "
    told = _warnings(capsys, "grpo", task, dataset=_dataset(task, [*rows, {**rows[0], "answer": "3"}]))
    assert len(told) == 1 and told[0].startswith(says) and "right in one and wrong in the other" in told[0]
    for others in ({**rows[0], "answer": " 1 "}, {"prompt": "1+2=", "answer": "4"}):
        assert _warnings(capsys, "grpo", task, dataset=_dataset(task, [*rows, others])) == []
    game = [{"prompt": "1+1=", "answer": str(i)} for i in range(9)]
    assert _warnings(capsys, "grpo", task, dataset=_dataset(task, game)) == []


def test_settings_that_probably_mean_something_else(task, capsys):
    """Each is told in one sentence that begins with its field, and its usual value is not told."""
    usual = {"sampling": SamplingConfig(max_new_tokens=4)}
    for changes, says in (
        ({"loss": PolicyLossConfig(clip_low=0.8, clip_high=1.2)},
         "loss.clip_low is 0.8 and loss.clip_high 1.2, distances from 1: ratios are clipped below 0.2"),
        ({"loss": PolicyLossConfig(clip_high=0.28)}, None),
        ({"loss": PolicyLossConfig(max_age=1), "max_lag": 4},
         "loss.max_age is 1 and max_lag 4: tokens are up to 4 updates old in training, and those"),
        ({"loss": PolicyLossConfig(max_age=4), "max_lag": 4}, None),
        ({"loss": PolicyLossConfig(average="constant", constant_length=4096)},
         "loss.constant_length is 4096 and sampling.max_new_tokens 4: loss and gradient are 0.00098 times"),
        ({"loss": PolicyLossConfig(average="constant", constant_length=8)}, None),
        ({"loss": PolicyLossConfig(kl_coef=0.05), "reward_kl": RewardKL(kl_coef=0.05)},
         "loss.kl_coef is 0.05 and reward_kl.kl_coef 0.05: the KL to the reference counts twice"),
        ({"normalize": "none", "deviation": "sample"},
         "deviation is 'sample' and changes nothing, as normalize is none"),
        ({"normalize": "batch", "deviation": "sample"}, None),
        ({"reward_kl": RewardKL(kl_estimator="k3")},
         "reward_kl.kl_estimator is 'k3' and changes nothing, as reward_kl.kl_coef is 0"),
        ({"kl_to_go": True}, "kl_to_go is True and changes nothing, as reward_kl.kl_coef is 0"),
        ({"actor": replace(role(task), optimizer=OptimizerConfig(lr=1e-3, min_lr_ratio=0.1))},
         "actor.optimizer.min_lr_ratio is 0.1 and changes nothing, as schedule is constant"),
        ({"sampling": SamplingConfig(max_new_tokens=4, min_new_tokens=4)},
         "sampling.min_new_tokens and max_new_tokens are both 4: no answer may end by itself"),
    ):
        lines = _warnings(capsys, "grpo", task, **{"loss": PolicyLossConfig(), **usual, **changes})
        of_other_rules = "sampling.min_new_tokens: actor trains on samples"
        assert [line[: len(says or "")] for line in lines if not line.startswith(of_other_rules)] == (
            [] if says is None else [says]), lines


def test_graphs_whose_changes_are_lost(task, capsys):
    """A graph never changes: a subclass that drops what `replace` returns trains as the class below it."""
    kind = type(make_experiment("grpo", task))

    class Lost(kind):
        def graph(self):
            graph = super().graph()
            train = graph["actor_train"]
            graph.replace(replace(train, work=replace(train.work, epochs=2)))
            return graph

    class Found(kind):
        def graph(self):
            graph = super().graph()
            train = graph["actor_train"]
            return graph.replace(replace(train, work=replace(train.work, epochs=2)))

    lost = "Lost.graph() returns the same graph as CriticFree.graph(): "
    for changed, says in ((Lost, lost), (Found, None)):
        experiment = make_experiment("grpo", task)
        experiment.__class__ = changed
        Trainer(compile_program(experiment, None, world_size=1), World())
        err = capsys.readouterr().err
        assert err == "" if says is None else says in err


def test_columns_of_numbers_and_text(task, capsys):
    """A reward that compares answers gets 3 and "3" as they are."""
    def exact(completions, answer):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    rows = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(8)]
    settings = {"reward_function": exact, "eval_dataset": None}
    assert _warnings(capsys, "grpo", task, dataset=_dataset(task, rows), **settings) == []
    rows[3]["answer"] = 3
    (line,) = _warnings(capsys, "grpo", task, dataset=_dataset(task, rows), **settings)
    assert line.startswith("dataset: column 'answer' has numbers in 1 rows, first in") and "line 4" in line


def test_the_end_of_a_sorted_file_is_held_out(task, capsys):
    def by_level(completions, level):
        return [float(len(text)) for text in completions]

    rows = [{"prompt": f"{i}+0=", "level": "hard" if i >= 24 else "easy"} for i in range(30)]
    for order, is_told in ((rows, True), (rows[::2] + rows[1::2], False)):
        whole = _dataset(task, order)
        train, held_out = replace(whole, split="train[:-6]"), replace(whole, split="train[-6:]")
        lines = _warnings(
            capsys, "grpo", task, dataset=train, eval_dataset=held_out, reward_function=by_level)
        says = 'eval_dataset: all 6 rows have level "hard", and no training row of the same file has it'
        assert [line.startswith(says) for line in lines] == [True] * is_told, lines
