"""Tokens that pass in training, in log-probs and in prefill: what the planner counts against what the engine
passes for drawn samples."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from realhf import GRPO, SFT, Cluster, DatasetConfig, Expected, OptimizerConfig, Role, SamplingConfig
from realhf.calls import Generate, Output
from realhf.cli.planning_problem import problem_of, sequence_lengths
from realhf.data.batch import Batch, Packed
from realhf.data.loader import load_tokenizer
from realhf.data.micro_batch import micro_batches
from realhf.data.order import groups_of
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.engine.shared_prefixes import keep_prompts_together, pass_tokens
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.call_cost import call_cost, prefilled
from realhf.planner.lengths import geometric, observed
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.planner.reasons import _scaled
from realhf.runtime.samples.exchange import Routing, assign
from tests.engine.training import minibatch
from tests.hub import byte_tokenizer_files
from tests.nn.tiny import hf_config

CONFIG = ModelConfig.from_hf(hf_config() | {"max_position_embeddings": 4096})
KEY = "sequence_ids"


class _CountingRates(Rates):
    """Rates of a CPU that keep the sizes of the last pass."""

    last_pass = (0.0, 0.0)

    def block(self, role, tp, ep, *, tokens, squared, backward=False):
        self.last_pass = tokens, squared
        return super().block(role, tp, ep, tokens=tokens, squared=squared, backward=backward)


def _engine():
    return NativeEngine(model_spec(CONFIG), Layout.parse("d1@0"), World(), dtype="float32")


def _drawn(rng, work, own, alike):
    """Return (prompt, completion) rows: `own` tokens of each prompt follow those that all have."""
    common = rng.integers(2, 67, int(work.common_prompt_tokens)).tolist()
    rows = []
    for _ in range(work.prompts):
        if work.prompt_lengths is not None:
            own = int(work.prompt_lengths.draw(rng, 1)[0])
        prompt = common + rng.integers(2, 67, own).tolist()
        lengths = work.lengths.draw(rng, work.samples_per_prompt)
        lengths = np.full_like(lengths, lengths[0]) if alike else lengths
        rows += [(prompt, rng.integers(2, 67, int(length)).tolist()) for length in lengths]
    return rows


def _passed(model, rows, strategy, work, max_tokens):
    """Return what the slowest rank passes: tokens, and the sum of squared lengths without those of shared
    prefixes."""
    costs = {i: float(len(prompt) + len(answer)) for i, (prompt, answer) in enumerate(rows)}
    routing = Routing(work.samples_per_prompt, 1, keep_groups=work.group_size > 1)
    (shards,) = assign(costs, dp=strategy.dp, routing=routing)
    by_rank = []
    for shard in shards:
        batch = minibatch([rows[i] for i in shard])
        groups = keep_prompts_together(
            batch, KEY, groups_of(shard, work.group_size), max_tokens=max_tokens)
        tokens = squared = 0
        for part in micro_batches(batch[KEY].lengths, max_tokens=max_tokens, groups=groups):
            passed = pass_tokens(model, batch.select(part), KEY)
            tokens += len(passed.ids_T)
            starts = np.cumsum([0, *passed.lens])[:-1]
            for start, length in zip(starts, passed.lens, strict=True):
                keys = sum(p.num_keys for p in passed.prefixes if p.queries.start <= start < p.queries.stop)
                squared += (keys + length) ** 2 - keys**2
        by_rank.append((tokens, squared))
    return max(by_rank)


@pytest.mark.parametrize(("changes", "own", "strategy", "max_tokens"), [
    ({}, 24, "d1", 1 << 20),
    ({}, 24, "d1", 1500),
    ({"common_prompt_tokens": 56}, 26, "d1", 1 << 20),
    ({"common_prompt_tokens": 56}, 26, "d1", 2000),
    ({"common_prompt_tokens": 56}, 26, "d4", 1 << 20),
    ({"common_prompt_tokens": 40, "samples_per_prompt": 1}, 10, "d2", 1 << 20),
    ({"samples_per_prompt": 4}, 40, "d4", 1 << 20),
    ({"samples_per_prompt": 4, "alike": 1.0}, 40, "d4", 1 << 20),
    ({"samples_per_prompt": 4, "alike": 1.0}, 40, "d2", 1 << 20),
    ({"samples_per_prompt": 2, "group_size": 2}, 30, "d4", 600),
    ({"prompt_lengths": observed(range(12, 25))}, 18, "d1", 1 << 20),
    ({"samples_per_prompt": 4}, 12, "d1", 1 << 20),
    ({"samples_per_prompt": 2, "response_tokens": 400.0}, 20, "d1", 1 << 20),
])
def test_predicted_tokens_are_those_that_the_engine_passes(changes, own, strategy, max_tokens):
    """The last two share nothing: their prompts are too short, or a small part."""
    common = changes.get("common_prompt_tokens", 0)
    mean = changes.get("response_tokens", 30.0)
    work = replace(
        Workload(64, float(own + common), mean, 600, samples_per_prompt=8, output=Output.VALUES,
                 response_lengths=geometric(mean, 600)), **changes)
    parsed = ParallelStrategy.parse(strategy)
    model = _engine().model
    rng = np.random.default_rng(3)
    found = np.mean(
        [_passed(model, _drawn(rng, work, own, work.alike), parsed, work, max_tokens) for _ in range(8)],
        axis=0)
    rates = _CountingRates(Cluster.load("cpu-laptop"))
    call = FunctionCall("train", "train_step", (KEY, "response_mask"), (), role="actor")
    layout = Layout(parsed, DeviceMesh(tuple(range(parsed.num_ranks))))
    cost = call_cost(
        rates, call, ModelRole(CONFIG, "float32", trainable=True), work, CallPlan(layout, max_tokens),
        per_host=parsed.num_ranks)
    predicted = np.multiply(rates.last_pass, cost.num_micro_batches)
    assert predicted[0] == pytest.approx(found[0], rel=0.08)
    assert predicted[1] == pytest.approx(found[1], rel=0.3)


@pytest.mark.parametrize(("common", "group", "prefill_tokens"), [
    (40, 2, 8192), (40, 1, 8192), (40, 1, 120), (0, 2, 8192), (12, 2, 8192)])
def test_predicted_prefill_is_what_the_engine_computes(common, group, prefill_tokens):
    """Of one new token each, all that passes is the prompts."""
    work = Workload(
        12, 60.0, 1.0, 1, samples_per_prompt=group, prefill_tokens=prefill_tokens,
        common_prompt_tokens=float(common))
    rng = np.random.default_rng(1)
    prompts = [torch.tensor(prompt) for prompt, _ in _drawn(rng, work, 60 - common, True)]
    generate = Generate(SamplingConfig(max_new_tokens=1), seed=1, prefill_tokens=prefill_tokens)
    call = FunctionCall(
        "actor_generate", inputs=("prompt_ids",), role="actor", work=generate,
        outputs=(KEY, "response_mask", "gen_logprobs", "finished"))
    engine = _engine()
    engine.load(None, seed=0)
    engine.generate(call, Batch(list(range(12)), {"prompt_ids": Packed.of(prompts)}))
    tokens, squared = prefilled(work, 12, shares_prefixes=True)
    assert tokens == pytest.approx(engine.last_num_computed, rel=1e-6)
    assert squared <= prefilled(work, 12)[1] == 12 / group * 60**2


def _reward(completions, **columns):
    return [0.0 for _ in completions]


def _with_rows(tmp_path, rows, algorithm, **settings):
    for name, content in byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    role = Role(model="qwen2.5-0.5b", random_init=True, optimizer=OptimizerConfig())
    return algorithm(
        actor=role, dataset=DatasetConfig(str(tmp_path / "rows.jsonl")), batch_size=2,
        tokenizer=str(tmp_path), **settings)


def _chats():
    system = {"role": "system", "content": "Answer in one short line, please."}
    return [[system, {"role": "user", "content": "1" * count + "+1?"}] for count in (1, 5, 9)]


def test_chats_are_measured_as_their_template_writes_them(tmp_path):
    chats = _chats()
    experiment = _with_rows(
        tmp_path, [{"prompt": chat, "answer": "1"} for chat in chats], GRPO, reward_function=_reward,
        sampling=SamplingConfig(max_new_tokens=8), group_size=2)
    theirs = load_tokenizer(str(tmp_path))
    written = [
        theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    lengths = sequence_lengths(experiment, 8)
    assert lengths["prompt_lengths"] == observed([len(ids) for ids in written])
    common = next(i for i, tokens in enumerate(zip(*written, strict=False)) if len(set(tokens)) > 1)
    assert lengths["common_prompt_tokens"] == common > 40
    assert problem_of(experiment, Cluster.load("cpu-laptop")).workloads["actor_train"].common_prompt_tokens \
        == common


def test_completions_are_measured_as_they_are_learned(tmp_path):
    chats = _chats()
    answers = [{"role": "assistant", "content": "2" * count} for count in (1, 3, 5)]
    rows = [{"prompt": chat, "completion": [answer]} for chat, answer in zip(chats, answers, strict=True)]
    experiment = _with_rows(tmp_path, rows, SFT)
    theirs = load_tokenizer(str(tmp_path))
    pairs = zip(chats, answers, strict=True)
    whole = [theirs.apply_chat_template([*chat, answer], return_dict=False) for chat, answer in pairs]
    lengths = sequence_lengths(experiment, 0)
    asked = [
        theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    assert lengths["prompt_lengths"] == observed([len(ids) for ids in asked])
    learned = [len(ids) - len(prompt) for ids, prompt in zip(whole, asked, strict=True)]
    assert lengths["response_lengths"] == observed(learned)


@pytest.mark.parametrize(("expected", "common", "says"), [
    ({}, 0, None), ({"common_prompt_tokens": 20}, 20, None),
    ({"common_prompt_tokens": 31}, None, "expected.common_prompt_tokens is 31: it must be at most"),
    ({"common_prompt_tokens": -1}, None, "expected.common_prompt_tokens is -1: it must be at least 0"),
])
def test_users_say_what_all_prompts_begin_with(tmp_path, expected, common, says):
    experiment = _with_rows(
        tmp_path, [], GRPO, reward_function=_reward, sampling=SamplingConfig(max_new_tokens=8),
        expected=Expected(prompt_tokens=30, **expected))
    if says is None:
        assert sequence_lengths(experiment, 8)["common_prompt_tokens"] == common
    else:
        with pytest.raises(ValueError, match=says):
            sequence_lengths(experiment, 8)


def test_a_price_does_not_depend_on_what_was_priced_before():
    """Ranks of a context group share no prefixes, and replicas do."""
    role = ModelRole(ModelConfig.from_hf(hf_config()), "float32", False)
    work = Workload(64, 200.0, 8.0, 8, max_rows=64, common_prompt_tokens=150.0)
    call = FunctionCall(
        "actor_generate", inputs=("prompt_ids",), role="actor", outputs=(KEY,),
        work=Generate(SamplingConfig(max_new_tokens=8), seed=1))

    def seconds(rates: Rates, layout: str) -> float:
        return call_cost(rates, call, role, work, CallPlan(Layout.parse(layout)), per_host=2).seconds

    rates = Rates(Cluster.load("cpu-laptop"))
    apart = seconds(rates, "d2@0-1")
    assert apart < seconds(rates, "c2@0-1") == seconds(Rates(Cluster.load("cpu-laptop")), "c2@0-1")


def test_what_all_prompts_begin_with_grows_with_them():
    work = Workload(64, 200.0, 8.0, 8, common_prompt_tokens=150.0)
    fewer = _scaled(work, prompt=0.5, response=1.0)
    assert (fewer.prompt_tokens, fewer.common_prompt_tokens) == (100.0, 75.0)
    assert prefilled(fewer, 64, shares_prefixes=True)[0] > 0
