"""Runs of algorithms on sampled answers: a plan that splits all calls gives the results of one process."""

import math

import pytest
import torch

from realhf import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    SAPO,
    SFT,
    DatasetConfig,
    GenerativeReward,
    ModelReward,
    PolicyLossConfig,
    ProcessReward,
    ReinforcePlusPlus,
    ReMax,
    RepetitionPenalty,
    RewardKL,
    RewardLimits,
    SamplingConfig,
    ScaleRL,
    SoftOverlongPenalty,
)
from realhf.execution_plan import ExecutionPlan
from realhf.rewards.reward import column_key
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import common, role, some_reward, write_task
from tests.samples import marked

SPREAD = {
    "actor_generate": "d2t2@0-3", "greedy_generate": "d4@0-3", "ref_forward": "p2@2-3",
    "actor_train": "d2p2@0-3", "reward_forward": "d2@0-1", "actor_forward": "d2t2@0-3",
    "critic_forward": "p2@0-1", "critic_train": "p2@2-3", "reward_model_forward": "d2@1-2",
    "reward_process_forward": "t2@2-3", "reward_process_steps": "d2@0-1", "reward_judge_prompts": "d1@2",
    "reward_judge_generate": "d2@1-2", "reward_judge_read": "d2@2-3",
}


def passes(completions, completion_ids):
    """Return 1 or 0, so that the samples of a prompt often have the same."""
    return [float(sum(ids) % 3 > 0) for ids in completion_ids]


def own_loss(logprobs, gen_logprobs, advantages, answer_length):
    """Return a loss that a user might write, with a column of the dataset."""
    ratio = (logprobs - gen_logprobs).exp().clamp(max=2.0).detach()
    return -ratio * advantages * logprobs / answer_length


def best_of_n(scores, groups, answer_length):
    """Return 1 for the best samples of each prompt, and leave the others out."""
    return torch.ones_like(scores).masked_fill(scores < scores.amax(1, keepdim=True), math.nan)


def _length(row):
    return {"answer_length": len(row["answer"])}


def _experiments(directory):
    settings = common(directory) | {
        "eval_dataset": None, "steps": 2, "actor": role(directory), "reward_function": some_reward,
        "minibatches": 2, "dataset": DatasetConfig(str(directory / "data.jsonl"), map=_length)}
    scorer = role(directory, head="score", trainable=False)
    narrow = PolicyLossConfig(ratio="sequence_mean", clip_low=0.01, clip_high=0.02)
    return {
        "rloo": RLOO(**settings),
        "remax": ReMax(**settings),
        "reinforce++": ReinforcePlusPlus(
            **settings, reward_kl=RewardKL(kl_coef=0.1, kl_target=0.5, kl_horizon=50)),
        "reinforce++-baseline": ReinforcePlusPlus(
            **settings, baseline="group_mean", group_size=4, reward_kl=RewardKL(),
            loss=PolicyLossConfig(average="token", kl_coef=0.1, kl_estimator="k2")),
        "gspo": GSPO(**settings, loss=narrow),
        "cispo": CISPO(**settings, normalize="batch", score_shaping=SoftOverlongPenalty(7, 4)),
        "dr-grpo": GRPO(
            **settings, normalize="none", loss=PolicyLossConfig(average="constant", entropy_coef=0.01),
            token_rewards=(RepetitionPenalty(ngram=2),)),
        "sapo": SAPO(**settings, loss=PolicyLossConfig(
            objective="sapo", mask_truncated=True, top_entropy_quantile=0.5)),
        "masks": GRPO(
            **settings, epochs=2, shuffle_minibatches=True, loss=PolicyLossConfig(
                proximal="recomputed", importance_floor=0.5, importance_cap=2.0, importance_mode="mask",
                importance_ratio="sequence", off_policy_mask_threshold=0.01, mask_truncated=True)),
        "own": GRPO(**settings, loss=own_loss, advantages=best_of_n),
        "ppo": PPO(
            **settings, critic=role(directory, head="score"), group_size=4, epochs=2,
            shuffle_minibatches=True, loss=PolicyLossConfig(
                average="token", mask_truncated=True, top_entropy_quantile=0.4)),
        "models": GRPO(
            **settings, reward_limits=RewardLimits(on_failure="drop"), reward_models=(
                ModelReward(scorer, weight=0.5), ProcessReward(scorer, step_end="1", reduce="mean"),
                GenerativeReward(
                    role(directory, trainable=False), prompt="{prompt}{completion}=", pattern=r"(\d)",
                    scale=9.0, sampling=SamplingConfig(max_new_tokens=4)))),
        "dapo": DAPO(**settings | {"reward_function": passes}, group_size=3, overlong_buffer=3),
    }


def _run(world, name, directory, layouts):
    experiment = _experiments(directory)[name]
    calls = {
        call.name: {"layout": layouts.get(call.name, "d1@0"), "micro_batch_tokens": 40}
        for call in experiment.graph().calls
    }
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    metrics = Trainer(program, world, quiet=True).run().metrics
    return metrics if world.rank == 0 else None


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


NAMES = ("remax", "dapo", "reinforce++-baseline", "dr-grpo", "rloo", "reinforce++", "gspo", "cispo", "sapo",
         "masks", "own", "ppo", "models")


CASES = [(name, "d2p2@0-3") for name in NAMES[:8]] + [
    (name, layout) for name in NAMES[8:] for layout in ("d2t2@0-3", "p2@1-2")]


@pytest.mark.parametrize(("name", "train"), marked(CASES, quick=[0, 10, 12, 17]))
def test_a_plan_does_not_change_the_algorithm(pool, task, name, train):
    alone = pool.run(_run, name, task, {})[0]
    spread = pool.run(_run, name, task, SPREAD | {"actor_train": train})[0]
    measured = ("timing_s/", "perf/", "realloc", "bubble/", "compute/")
    for ours, expected in zip(spread, alone, strict=True):
        names = [key for key in expected if not key.startswith(measured)]
        assert {"reward/mean", "actor/loss", "actor/grad_norm"} <= set(names)
        for key in names:
            assert math.isclose(ours[key], expected[key], rel_tol=1e-9, abs_tol=1e-12), key
        assert expected["actor/grad_norm"] > 1e-3
    assert spread[-1]["actor/approx_kl"] > 1e-9


def test_greedy_answers_belong_to_single_samples(task):
    experiment = _experiments(task)["remax"]
    experiment.group_size = 2
    with pytest.raises(ValueError, match="group_size is 2: it must be 1, as a prompt has one greedy"):
        experiment.graph()


def test_group_baselines_need_a_group(task):
    experiment = _experiments(task)["rloo"]
    experiment.group_size = 1
    with pytest.raises(ValueError, match="group_size is 1: it must be at least 2, as RLOO compares"):
        experiment.graph()


@pytest.mark.parametrize("kind", [CISPO, GSPO, ScaleRL])
def test_a_loss_of_another_algorithm_is_refused(task, kind):
    experiment = kind(actor=role(task), reward_function=some_reward, loss=PolicyLossConfig())
    with pytest.raises(ValueError, match="a new PolicyLossConfig must say"):
        experiment.graph()


def test_every_key_that_a_call_writes_is_taken(task):
    """So a column of a dataset with the same name gets another key."""
    settings = {"actor": role(task), "reward_function": passes}
    others = [PPO(**settings, critic=role(task)), SFT(**settings)]
    for experiment in [*_experiments(task).values(), *others]:
        graphs = [experiment.graph(), *filter(None, [experiment.eval_graph()])]
        written = {key for graph in graphs for call in graph.calls for key in call.outputs}
        assert all(column_key(key) != key for key in written), written
