"""RewardLimits: time limits, retries, and samples that are dropped with their groups."""

import asyncio
import math
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

from realhf import RewardLimits
from realhf.algorithms.advantages import AdvantageConfig, SampleAdvantages, TokenAdvantages
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.algorithms.ppo import ValueLoss
from realhf.calls import HostFunction
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.rewards.reward import reward_columns
from realhf.rewards.scoring import RewardCall
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.host_call import call_host_function
from realhf.runtime.trainer import Trainer
from realhf.signals import time_limit
from tests.cli_tools import read_jsonl
from tests.runtime.tiny import make_experiment, write_task


def _scores(function, limits, texts=("a", "bb", "ccc", "dddd")):
    call = RewardCall(function, reward_columns(function), limits)
    ids = list(range(len(texts)))
    return call.scores(ids, [f"prompt {t}" for t in texts], list(texts), [[1]] * len(texts), {})


def test_a_call_that_takes_too_long_is_named_with_its_sample():
    def slow(completions, **kwargs):
        if "ccc" in completions:
            time.sleep(60)
        return [1.0] * len(completions)

    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        _scores(slow, RewardLimits(timeout_seconds=0.3))
    assert time.monotonic() - started < 30
    assert "slow raised TimeoutError: it has not returned within 0.3 s" in str(caught.value)
    assert "on sample 2 with the prompt 'prompt ccc'" in str(caught.value)
    repeats = "; reward_limits.retries repeats a call"
    assert str(caught.value).endswith(f"{repeats}, reward_limits.on_failure='drop' leaves such samples out")


def test_async_functions_are_cancelled():
    ended = []

    async def slow(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(completions)

    with pytest.raises(UserError, match="has not returned within 0.1 s"):
        _scores(slow, RewardLimits(timeout_seconds=0.1))
    assert ended[0] == ["a", "bb", "ccc", "dddd"]


def test_failed_calls_are_made_again():
    calls = []

    def shaky(completions, **kwargs):
        calls.append(completions)
        if len(calls) < 3:
            raise ConnectionError("the judge is away")
        return [2.0] * len(completions)

    assert _scores(shaky, RewardLimits(retries=2, retry_seconds=0.01)) == [2.0] * 4
    assert len(calls) == 3


@pytest.mark.parametrize("failure", ["raises", "hangs", "nan"])
def test_failed_samples_are_dropped(failure, capsys):
    def reward(completions, **kwargs):
        if "bb" in completions and failure == "raises":
            raise KeyError("bb")
        if "bb" in completions and failure == "hangs":
            time.sleep(2)
        return [math.inf if text == "bb" and failure == "nan" else float(len(text)) for text in completions]

    limits = RewardLimits(timeout_seconds=0.4 if failure == "hangs" else None, on_failure="drop")
    scores = _scores(reward, limits)
    assert math.isnan(scores[1]) and [scores[0], *scores[2:]] == [1.0, 3.0, 4.0]
    expected = "reward function test_failed_samples_are_dropped.<locals>.reward failed on 1 of 4 samples"
    cause = {"raises": "KeyError: 'bb' (", "hangs": "TimeoutError: it has not", "nan": "it returned inf"}
    said = capsys.readouterr().err
    assert f"{expected} (sample 1 first): {cause[failure]}" in said
    assert "; they are dropped with their groups" in said


def _batch(score, group):
    """Samples of 2 prompt and 3 response tokens with these scores."""
    count = len(score)
    generator = torch.Generator().manual_seed(0)

    def packed(values):
        return Packed(values, [5] * count)

    mask = packed(torch.tensor([0.0, 0, 1, 1, 1]).repeat(count))
    logps = {key: packed(torch.randn(5 * count, generator=generator) * mask.values)
             for key in ("gen_logprobs", "ref_logprobs", "values")}
    return Batch(list(range(count)), {
        "score": torch.tensor(score), "response_mask": mask, "finished": torch.ones(count), **logps})


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_a_dropped_group_leaves_the_loss_of_the_others_as_it_is(average):
    """Losses and gradients of the batch are those of a batch without the group."""
    batch = _batch([1.0, 2.0, math.nan, 4.0, 5.0, 9.0], 2)
    kept = batch.select([0, 1, 4, 5])
    losses = []
    for some in (batch, kept):
        columns, metrics = SampleAdvantages(2)(some, None)
        some.fields.update(columns)
        loss = PolicyLoss(PolicyLossConfig(kl_coef=0.1, average=average))
        logprobs = (some["gen_logprobs"].values * 0.9).requires_grad_()
        entropy = torch.zeros_like(logprobs)
        value, _ = loss({"logprobs": logprobs, "entropy": entropy}, some, loss.totals(some))
        value.backward()
        gradient = Packed(logprobs.grad, some["gen_logprobs"].lengths)
        losses.append((value.item(), gradient, metrics))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert torch.allclose(losses[0][1].select([0, 1, 4, 5]).values, losses[1][1].values, rtol=1e-5)
    assert losses[0][1].select([2, 3]).values.abs().max() == 0
    assert losses[0][2]["reward/mean"] == pytest.approx((1 + 2 + 4 + 5 + 9) / 5)
    assert losses[0][2]["reward/failed"] == pytest.approx(1 / 6) and "reward/failed" not in losses[1][2]


@pytest.mark.parametrize("lam", [0.0, 0.95])
def test_a_dropped_sample_of_ppo(lam):
    batch = _batch([1.0, math.nan, -1.0], 1)
    kept = batch.select([0, 2])
    results = []
    for some in (batch, kept):
        columns, metrics = TokenAdvantages(AdvantageConfig(lam=lam))(some, None)
        some.fields.update(columns)
        loss = ValueLoss()
        values = some["values"].values * 1.1
        results.append((loss({"values": values}, some, loss.totals(some))[0].item(), columns, metrics))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    advantages = results[0][1]["advantages"].select([0, 2]).values
    assert torch.allclose(advantages, results[1][1]["advantages"].values, rtol=1e-5)
    explained = "critic/explained_variance"
    assert results[0][2][explained] == pytest.approx(results[1][2][explained])


def test_a_run_goes_on_without_the_failed_samples(tmp_path):
    def reward(completions, completion_ids, answer, **kwargs):
        if any(sum(ids) % 9 == 0 for ids in completion_ids):
            raise ValueError("no multiples of nine")
        return [float(len(text)) for text in completions]

    experiment = make_experiment("grpo", write_task(tmp_path), steps=2, eval_dataset=None)
    experiment.reward_function = reward
    experiment.reward_limits = RewardLimits(on_failure="drop")
    out = tmp_path / "run"
    Trainer(compile_program(experiment, None, world_size=1), World(), out=out, quiet=True).run()
    metrics = read_jsonl(out / "metrics.jsonl")
    assert all(0 < step["reward/failed"] < 1 for step in metrics)
    assert all(math.isfinite(value) for step in metrics for value in step.values())


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_an_outage_of_the_reward_skips_steps(algorithm, tmp_path, capsys):
    """A step without any reward changes no weights, and the run ends after too many in a row."""
    outages = {2}

    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step in outages:
            raise ConnectionError("the judge is away")
        return [float(len(text) % 3) for text in completions]

    data = write_task(tmp_path)
    experiment = make_experiment(algorithm, data, steps=3, eval_dataset=None)
    experiment.reward_function = reward
    experiment.reward = None
    experiment.reward_limits = RewardLimits(on_failure="drop", max_failed_steps=1)
    experiment.export_every = 1
    out = tmp_path / "run"
    Trainer(compile_program(experiment, None, world_size=1), World(), out=out, quiet=True).run()
    metrics = read_jsonl(out / "metrics.jsonl")
    assert [step.get("reward/failed", 0.0) for step in metrics] == [0.0, 1.0, 0.0]
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    assert metrics[1]["actor/empty_updates"] > 0 and "actor/empty_updates" not in metrics[2]
    weights = [load_file(out / f"hf/step_{i}/model.safetensors") for i in (1, 2, 3)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    assert "the reward of every sample of step 2 has failed" in capsys.readouterr().err
    outages |= {1}
    trainer = Trainer(compile_program(experiment, None, world_size=1), World(), quiet=True)
    with pytest.raises(UserError, match="reward_limits.max_failed_steps allows 1 such steps in a row"):
        trainer.run()


def test_a_call_that_never_returns_is_interrupted_wherever_it_is():
    """Regular expressions, loops, waits and nested limits end; only the main thread can be interrupted."""
    sockets = socket.socketpair()
    calls = {
        "expression": lambda: re.match("(a+)+$", "a" * 40 + "b"), "loop": lambda: [0 for _ in iter(int, 1)],
        "wait": lambda: threading.Event().wait(60), "socket": lambda: sockets[0].recv(1),
        "swallows": lambda: _swallows(), "pool": lambda: queue.SimpleQueue().get()}
    for name, endless in calls.items():
        def hangs(completions, endless=endless, **kwargs):
            endless()
            return [1.0] * len(completions)

        started = time.monotonic()
        with pytest.raises(UserError, match="hangs raised TimeoutError: it has not returned within 0.2 s"):
            _scores(hangs, RewardLimits(timeout_seconds=0.2), texts=("a",))
        assert time.monotonic() - started < 30, name
    with time_limit(5.0, AssertionError):
        with pytest.raises(KeyError), time_limit(0.05, KeyError):
            time.sleep(10)
        assert 4 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with pytest.raises(KeyError), time_limit(0.05, KeyError), time_limit(5.0, AssertionError):
        time.sleep(10)


def test_a_process_that_is_stuck_in_a_library_ends(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import hashlib\nfrom realhf import signals as t\nt._STUCK_SECONDS = 0.3\n"
        "with t.time_limit(0.1, KeyError):\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**10)\n")
    started = time.monotonic()
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and f'File "{script}", line 5' in ended.stderr
    assert time.monotonic() - started < 20


def _swallows():
    while True:
        with suppress(Exception):
            time.sleep(10)


def test_calls_have_limits_by_default(tmp_path):
    """A reward may take half an hour, and so may any other host call; that of the rewards has no other."""
    assert RewardLimits().timeout_seconds == HostFunction(print).timeout_seconds == 1800.0
    experiment = make_experiment("grpo", write_task(tmp_path), steps=2, eval_dataset=None)
    limits = {call.name: call.work.timeout_seconds for call in experiment.graph().of_kind("host")}
    assert limits == {"reward_forward": None, "advantages": 1800.0}


def test_a_host_call_that_takes_too_long_ends_the_run():
    def slow(batch, context):
        time.sleep(10)

    call = FunctionCall("slow", "host", ("score",), work=HostFunction(slow, timeout_seconds=0.1))
    with pytest.raises(UserError) as caught:
        call_host_function(call, _batch([1.0], 1), None)
    expected = "host call 'slow' raised TimeoutError: it has not returned within 0.1 s (HostFunction.timeout"
    assert str(caught.value).startswith(expected) and "test_limits.py:" in str(caught.value)
    with pytest.raises(ValueError, match="HostFunction.timeout_seconds is 0: it must be above 0, or None"):
        HostFunction(slow, timeout_seconds=0)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"timeout_seconds": 0.0}, "reward_limits.timeout_seconds is 0.0: it must be above 0"),
    ({"retry_seconds": -1.0}, "reward_limits.retry_seconds is -1.0: it must not be negative"),
    ({"max_failed_steps": -1}, "reward_limits.max_failed_steps is -1"),
    ({"retries": -1}, "reward_limits.retries is -1: it must not be negative"),
    ({"on_failure": "ignore"}, "reward_limits.on_failure"),
])
def test_wrong_limits(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        RewardLimits(**fields)
