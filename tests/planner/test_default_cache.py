"""The cache that a run takes by default on an H100: it fits by the accountant and by arithmetic.

The arithmetic is written out here, for models whose config.json is shipped:

- `llama-7b`: 6.738 B parameters, 32 layers, hidden 4096, MLP 11008, 32 key-value heads of 128, vocabulary
  32000;
- `qwen2.5-7b`: 7.616 B parameters, 28 layers, hidden 3584, MLP 18944, 4 key-value heads of 128, vocabulary
  152064.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest

from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.kv_blocks import cache_limit
from realhf.models.model_config import ModelConfig
from realhf.planner.memory_account import check_memory, require_fit
from realhf.planner.problem import ModelRole, Problem, Workload

GB = 1e9
DEVICE = 79.1 * 2**30  # Bytes of an H100 SXM as torch reports them, of the 81,559 MiB that nvidia-smi shows.
ROWS, GROUP = 512, 8
H100 = Cluster.load("h100-1x8")


class Case(NamedTuple):
    name: str
    prompt: int
    response: int
    parameters: float
    layers: int
    kv_width: int  # Elements of a token's keys and values in a layer.
    hidden: int
    mlp: int
    vocabulary: int

    @property
    def token_bytes(self):
        return 2 * self.layers * self.kv_width

    @property
    def whole_bytes(self):
        """The cache of 512 rows of full length in groups of 8: prompts are shared in blocks of 64 tokens, and
        are there for twice as many groups as run, but there are only 64 of them."""
        own = self.response
        shared = self.prompt + 64  # The last block is copied by all samples but one.
        return self.token_bytes * (ROWS * own + ROWS // GROUP * shared)


LLAMA = Case("llama-7b", 256, 256, 6_738_415_616, 32, 2 * 32 * 128, 4096, 11008, 32000)
QWEN = Case("qwen2.5-7b", 1024, 4096, 7_615_616_512, 28, 2 * 4 * 128, 3584, 18944, 152064)
CASES = [LLAMA, QWEN]


def _check(case, layout, *, trains, cluster=H100, **changes):
    calls = [FunctionCall("actor_generate", "generate", ("prompts",), ("tokens",), role="actor")]
    if trains:
        calls.append(FunctionCall("actor_train", "train_step", ("tokens",), (), role="actor"))
    graph = DataflowGraph(tuple(calls), ("prompts",))
    role = ModelRole(ModelConfig.load(case.name), trainable=trains, **changes)
    # All ranks generate for the same 512 rows each, and responses may get as long as allowed.
    ranks = len(Layout.parse(layout).ranks)
    lengths = (case.prompt, case.response, case.response)
    work = {
        "actor_generate": Workload(ROWS * ranks, *lengths, samples_per_prompt=GROUP),
        "actor_train": Workload(ROWS * ranks, *lengths),
    }
    plan = {"actor_generate": CallPlan(Layout.parse(layout))}
    if trains:
        plan["actor_train"] = CallPlan(Layout.parse(layout), micro_batch_tokens=8192, recompute=True)
    assert cluster.device_memory_bytes == DEVICE
    problem = Problem(graph, {"actor": role}, work, cluster)
    if cluster is not H100:
        return require_fit(problem, ExecutionPlan(plan))
    return check_memory(problem, ExecutionPlan(plan))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_default_cache_fits_beside_weights_and_passes(case):
    """One GPU has the weights in bfloat16 and generates. The whole cache would not fit, so rows wait."""
    check = _check(case, "d1@0", trains=False)
    assert check.fits
    parts = check.by_call["actor_generate"].bytes_by_use
    weights = 2 * case.parameters
    assert parts["actor weights"] == weights
    # The device less 5 % for fragmentation, 1 GiB of context, 128 MiB of workspaces and 256 MiB of staging;
    # 0.9 of it less the passes.
    available = 0.95 * DEVICE - 2**30 - 2**27 - 2**28
    passes = check.by_call["actor_generate"].num_bytes - weights - parts["kv_cache"]
    cache = min(case.whole_bytes, 0.9 * (available - weights) - passes)
    assert parts["kv_cache"] == pytest.approx(cache, rel=0.03)
    assert weights + passes + cache < DEVICE
    # The passes: 8,192 prompt tokens in a layer, or float32 logits and three float64 copies of 512 rows.
    logits = ROWS * case.vocabulary * 28
    layer = 8192 * 2 * (3 * case.mlp + 4 * case.hidden)
    assert max(logits, layer) < passes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_takes_what_the_accountant_counts(case):
    """The rule of a run, on the free memory of such a device before the first generation."""
    parts = _check(case, "d1@0", trains=False).by_call["actor_generate"].bytes_by_use
    passes = sum(parts.values()) - parts["actor weights"] - parts["kv_cache"]
    free = 0.95 * DEVICE - 2**30 - 2**27 - 2**28 - 2 * case.parameters
    limit = cache_limit(free, passes, device_type="cuda")
    assert min(case.whole_bytes, limit) == pytest.approx(parts["kv_cache"], rel=0.03)
    assert limit + passes == pytest.approx(0.9 * free)
    assert cache_limit(free, passes, device_type="cpu") == free / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_and_generation_take_turns_on_eight_gpus(case):
    """With ZeRO-1 on 8 GPUs: bfloat16 weights, an eighth of 12 bytes per parameter of optimizer, and 4 bytes
    of gradients, which exist while training runs. The cache gets the room of the gradients."""
    check = _check(case, "d8@0-7", trains=True)
    assert check.fits
    generate = check.by_call["actor_generate"].bytes_by_use
    train = check.by_call["actor_train"].bytes_by_use
    assert generate["actor optimizer"] == pytest.approx(12 / 8 * case.parameters, rel=0.01)
    assert "actor gradients" not in generate
    assert train["actor gradients"] == 4 * case.parameters
    assert "kv_cache" not in train
    resting = 3.5 * case.parameters
    communicators = generate["communicators"]
    available = 0.95 * DEVICE - 2**30 - 2**27 - 2**28 - communicators
    passes = sum(generate.values()) - communicators - resting - generate["kv_cache"]
    cache = min(case.whole_bytes, 0.9 * (available - resting) - passes)
    assert generate["kv_cache"] == pytest.approx(cache, rel=0.03)
    half = 0.5 * (available - resting - 4 * case.parameters)
    assert generate["kv_cache"] > 1.3 * min(half, case.whole_bytes) or cache == case.whole_bytes


def test_an_offloaded_optimizer_leaves_its_memory_to_the_device():
    """12 bytes per parameter go to the host; two buffers of 2^24 parameters come while the optimizer runs.
    One GPU can then train a 7B model, which it cannot do otherwise."""
    plain = _check(LLAMA, "d1@0", trains=True)
    offloaded = _check(LLAMA, "d1@0", trains=True, offloads_optimizer=True)
    assert not plain.fits and offloaded.fits
    assert plain.by_call["actor_train"].bytes_by_use["actor optimizer"] == 12 * LLAMA.parameters
    assert "actor optimizer" not in offloaded.by_call["actor_train"].bytes_by_use
    assert offloaded.on_host == {"actor optimizer": 12 * LLAMA.parameters}
    assert offloaded.host_bytes == 12 * LLAMA.parameters
    generate = offloaded.by_call["actor_generate"]
    assert generate.bytes_by_use["kv_cache"] > 20 * GB


def test_offloaded_optimizers_need_room_in_the_host_and_are_shown():
    """A host with 100 GB has 80 GB for them, and the state takes a little more."""
    check = _check(LLAMA, "d1@0", trains=True, offloads_optimizer=True)
    assert check.host_sentences() == ["actor's optimizer is in host memory between steps: 80.9 GB for a rank"]
    assert check.document()["on_host"] == {"actor optimizer": 12 * LLAMA.parameters}
    small = replace(H100, host_memory_bytes=100 * GB)
    message = "offloaded to host memory: actor optimizer, 80.9 GB on one host, and 80 GB are available there"
    with pytest.raises(ValueError, match=message):
        _check(LLAMA, "d1@0", trains=True, offloads_optimizer=True, cluster=small)
