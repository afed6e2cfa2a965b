"""The planner's micro-batches beside those into which the engine splits what the exchange deals out."""

import random

import pytest

from realhf import DPO, Cluster, DatasetConfig, Expected, OptimizerConfig, Role
from realhf.cli.planning_problem import problem_of
from realhf.data.micro_batch import micro_batches
from realhf.data.order import groups_of
from realhf.layout import ParallelStrategy
from realhf.planner.micro_batches import largest_micro_batch, mean_micro_batch
from realhf.planner.problem import Workload
from realhf.runtime.samples.exchange import Routing, assign


def _dealt(work, dp):
    """Return the ids of each data-parallel rank in each mini-batch, if all sequences have one length."""
    routing = Routing(work.samples_per_prompt, work.minibatches, keep_groups=work.group_size > 1)
    costs = dict.fromkeys(range(work.num_samples), work.tokens)
    return [shard for minibatch in assign(costs, dp=dp, routing=routing) for shard in minibatch]


def test_equal_sequences_are_split_as_the_engine_splits_them():
    rng = random.Random(0)
    for _ in range(300):
        group_size = rng.choice([1, 2, 3])
        per_prompt = group_size * rng.choice([1, 2])
        prompt, response = rng.randint(1, 30), rng.randint(1, 30)
        prompts = rng.randint(1, 12)
        work = Workload(
            prompts * per_prompt, prompt, response, response, samples_per_prompt=per_prompt,
            minibatches=rng.randint(1, min(3, prompts)), group_size=group_size)
        dp, max_tokens = rng.randint(1, 4), rng.randint(1, 400)
        shards = _dealt(work, dp)
        assert max(map(len, shards)) == work.most_samples("train_step", dp)
        assert min(map(len, _dealt(work, work.most_replicas("train_step")))) > 0
        shard = max(shards, key=len)
        lengths = [prompt + response] * len(shard)
        groups = groups_of(shard, group_size)
        parts = micro_batches(lengths, max_tokens=max_tokens, groups=groups, at_least=1)
        found = largest_micro_batch(work, ParallelStrategy(dp=dp), max_tokens)
        assert found.tokens == max(map(len, parts)) * (prompt + response)
        assert found.response_tokens == max(map(len, parts)) * response
        mean = mean_micro_batch(work, ParallelStrategy(dp=dp), max_tokens)
        assert mean.num_micro_batches == len(parts)
        assert mean.num_micro_batches * mean.tokens == pytest.approx(sum(lengths))


def test_a_group_of_different_lengths_fits_in_the_largest_micro_batch():
    work = Workload(8, 10, 20, 50, samples_per_prompt=2, group_size=2)
    for max_tokens in (1, 60, 200, 10_000):
        found = largest_micro_batch(work, ParallelStrategy(), max_tokens)
        assert found.tokens >= 2 * (10 + 50)
        assert found.response_tokens >= 2 * 50


def test_the_planner_knows_that_dpo_compares_pairs(tmp_path):
    model = {"model": "qwen2.5-0.5b", "random_init": True}
    experiment = DPO(
        actor=Role(optimizer=OptimizerConfig(), **model), dataset=DatasetConfig(str(tmp_path / "none.jsonl")),
        batch_size=8, expected=Expected(prompt_tokens=20, response_tokens=30))
    problem = problem_of(experiment, Cluster.load("cpu-laptop"))
    train, ref = (problem.workloads[name] for name in ("actor_train", "ref_forward"))
    assert (train.num_samples, train.group_size, ref.group_size) == (16, 2, 1)
    assert train.most_samples("train_step", 3) == 6 and ref.most_samples("forward", 3) == 6
    assert train.most_replicas("train_step") == 8 and ref.most_replicas("forward") == 16
