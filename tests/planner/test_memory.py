"""Predicted memory, compared with the storage of real runs and with published figures."""

import itertools
import time
from dataclasses import replace

import pytest
import torch

from realhf.calls import Output, SamplingConfig
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.inference.sampling import sample
from realhf.layout import Layout, ParallelStrategy
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_size
from realhf.planner.call_memory import CallPieces, GenerationMoments
from realhf.planner.efficiencies import OUR_CUDA
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import greatest_load
from realhf.planner.shard import available_bytes, num_params, training_bytes, weights_bytes
from realhf.realloc.schedule import STAGING_BYTES
from tests.planner.measured import Case, measure
from tests.planner.problems import peak_memory
from tests.realloc.test_memory import Storages
from tests.samples import drawn, marked


def _role(dtype="float32", *, trainable=True, vocab=1500, tied=False, head="lm", kv=4, hidden=128, lora=None):
    config = ModelConfig("llama", vocab, hidden, 352, 4, 8, kv, hidden // 8, tied, head)
    return ModelRole(config, dtype, trainable, lora=lora)


def _of(name, dtype="float32", *, trainable=True, **changes):
    """Return a role with a model of the table of families, as wide as the other models here."""
    hf = HF[name] | {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 4} | changes
    return ModelRole(ModelConfig.from_hf(hf), dtype, trainable)


_EXPERTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 96, "intermediate_size": 352, "tie_word_embeddings": False}
HF = {
    "qwen3-moe": _EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
        "num_experts": 8},
    "deepseek-v3": _EXPERTS | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8,
        "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
        "v_head_dim": 12, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 8, "n_positions": 64,
        "n_embd": 128, "n_layer": 4, "tie_word_embeddings": True},
    "gemma3": _EXPERTS | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 64},
}
NARROW = {"vocab": 96}  # With a small vocabulary the layers take more than the logits.
FULL = Workload(num_samples=16, prompt_tokens=16, response_tokens=32)
SHORT = Workload(num_samples=16, prompt_tokens=8, response_tokens=8)
ENTROPY = replace(FULL, entropy=True, minibatches=2)
VALUES, SCORES = replace(FULL, output=Output.VALUES), replace(FULL, output=Output.SCORES)
GENERATE = Workload(16, prompt_tokens=32, response_tokens=8, max_new_tokens=8, samples_per_prompt=4)
FEW_ROWS = replace(GENERATE, samples_per_prompt=1, max_rows=8)



def _in_sections(role, numel=1 << 20):
    """Return the role with gradients that are summed layer by layer."""
    role.__dict__["spec"] = replace(role.spec, section_numel=numel)  # It overrides the cached property.
    return role


TRAIN = [
    Case("d1@0", "train_step", _role(), FULL, 240),
    Case("d1@0", "train_step", _role("bfloat16"), FULL),
    Case("d1@0", "train_step", _role("bfloat16", tied=True, vocab=6000), SHORT, 64),
    Case("d2@0-1", "train_step", _role(hidden=256), SHORT, 64),
    Case("d2@0-1", "train_step", _role("bfloat16", head="score"), VALUES, 240),
    Case("d4@0-3", "train_step", _role("bfloat16", **NARROW), FULL),
    Case("d4@0-3", "train_step", _in_sections(_role(hidden=512, **NARROW)), SHORT, 16),
    Case("d2@0-1", "train_step", _in_sections(_role("bfloat16", hidden=512, **NARROW)), FULL, 96),
    Case("t2@0-1", "train_step", _role("bfloat16", **NARROW), FULL),
    Case("t2@0-1", "train_step", _role(tied=True), ENTROPY, 240),
    Case("t4@0-3", "train_step", _role(**NARROW), FULL),
    Case("t4@0-3", "train_step", _role(kv=2, hidden=512, **NARROW), SHORT, 16),
    Case("p2@0-1", "train_step", _role("bfloat16", **NARROW), FULL, 144),
    Case("p2@0-1", "train_step", _role(tied=True, vocab=6000), SHORT, 64),
    Case("d2t2@0-3", "train_step", _role("bfloat16"), ENTROPY),
    Case("t2p2@0-3", "train_step", _role("bfloat16"), FULL, 144),
    Case("p4@0-3", "train_step", _role(**NARROW), FULL, 96),
    Case("d2p2@0-3", "train_step", _role("bfloat16", **NARROW), FULL, 96),
    Case("c2@0-1", "train_step", _role("bfloat16", **NARROW), FULL),
    Case("c4@0-3", "train_step", _role(), FULL, 240),
    Case("c2t2@0-3", "train_step", _role(kv=2, **NARROW), FULL),
]
RECOMPUTE = [
    Case("d1@0", "train_step", _role("bfloat16", **NARROW), FULL, 384, recompute=True),
    Case("d2t2@0-3", "train_step", _role(**NARROW), FULL, recompute=True),
    Case("t2p2@0-3", "train_step", _role("bfloat16"), FULL, 144, recompute=True),
    Case("p4@0-3", "train_step", _role("bfloat16", **NARROW), FULL, 96, recompute=True),
    Case("c2p2@0-3", "train_step", _role("bfloat16", **NARROW), FULL, 96, recompute=True),
]
FORWARD = [
    Case("d1@0", "forward", _role("bfloat16", trainable=False), FULL),
    Case("d1@0", "forward", _role(trainable=False), SHORT, 64),
    Case("t2@0-1", "forward", _role(trainable=False, **NARROW), FULL),
    Case("p2@0-1", "forward", _role(trainable=False, head="score"), VALUES, 144),
    Case("d1@0", "forward", _role("bfloat16", trainable=False, head="score"), SCORES),
    Case("c2@0-1", "forward", _role("bfloat16", trainable=False, **NARROW), FULL),
    Case("d1@0", "forward", _role(trainable=False), replace(FULL, top_k=64), 240),
    Case("t2@0-1", "forward", _role(trainable=False), replace(FULL, top_k=16)),
    Case("d1@0", "forward", _role(trainable=False, **NARROW), replace(FULL, top_k=90), 96),
    Case("c4@0-3", "forward", _role(trainable=False), FULL, 240),
]
GENERATION = [
    Case("d1@0", "generate", _role("bfloat16", trainable=False, vocab=500), GENERATE),
    Case("d1@0", "generate", _role(trainable=False, tied=True), FEW_ROWS),
    Case("d2@0-1", "generate", _role(trainable=False), GENERATE),
    Case("t2@0-1", "generate", _role("bfloat16", trainable=False, vocab=500), FEW_ROWS),
    Case("p2@0-1", "generate", _role(trainable=False, vocab=500), GENERATE),
    Case("t2p2@0-3", "generate", _role("bfloat16", trainable=False), GENERATE),
    Case("c2@0-1", "generate", _role(trainable=False), GENERATE),
]
LORA = LoraConfig(rank=4)
ADAPTERS = [
    Case("d1@0", "train_step", _role("bfloat16", lora=LORA, **NARROW), FULL),
    Case("d1@0", "train_step", _role(lora=LORA, tied=True), ENTROPY, 240),
    Case("d2t2@0-3", "train_step", _role("bfloat16", lora=LORA, **NARROW), FULL),
    Case("p2@0-1", "train_step", _role(lora=LORA, **NARROW), FULL, 144),
    Case("d1@0", "generate", _role(trainable=False, lora=replace(LORA, merge=True), **NARROW), GENERATE),
    Case("t2@0-1", "forward", _role("bfloat16", trainable=False, lora=LORA, **NARROW), FULL),
]
FAMILIES = [
    Case("e2@0-1", "train_step", _of("qwen3-moe", "bfloat16"), FULL),
    Case("e2@0-1", "generate", _of("qwen3-moe", trainable=False), GENERATE),
    Case("d1@0", "generate", _of("deepseek-v3", trainable=False), GENERATE),
    Case("d1@0", "train_step", _of("gpt2", "bfloat16"), FULL),
    Case("d1@0", "train_step", _of("gemma3", "bfloat16"), FULL),
]
FLOAT32_HEAD = [
    replace(case, role=replace(case.role, float32_head=True))
    for case in (TRAIN[1], TRAIN[2], TRAIN[14], FORWARD[0], GENERATION[3])
]
CASES = TRAIN + RECOMPUTE + FORWARD + GENERATION + ADAPTERS + FAMILIES + FLOAT32_HEAD


def _name(case):
    extra = "-recompute" * case.recompute + "-tied" * case.role.config.tied + "-lora" * bool(case.role.lora)
    extra += "-float32_head" * case.role.float32_head
    extra += "-sections" * (case.role.spec.section_numel <= 1 << 20)
    return f"{case.role.config.family}-{case.layout.split('@')[0]}-{case.kind}-{case.role.dtype}{extra}"


def predict(case, rank):
    """Return the predicted bytes of weights, of training state and of the call on the rank."""
    layout = Layout.parse(case.layout)
    stage = layout.coordinate(rank).pp
    where = (layout.strategy, stage)
    options = {"micro_batch_tokens": case.micro_batch_tokens, "recompute": case.recompute}
    training = training_bytes(case.role, *where) if case.role.trainable else 0
    return (
        weights_bytes(case.role, *where), training,
        peak_memory(case.role, case.kind, case.workload, *where, **options),
    )


@pytest.mark.parametrize("case", drawn(CASES, 4), ids=_name)
def test_peak_is_as_predicted(pool, case):
    ranks = Layout.parse(case.layout).ranks
    for rank, (weights, training, peak) in enumerate(pool.run(measure, case, num_ranks=len(ranks))):
        predicted = predict(case, rank)
        call = predicted[2].num_bytes
        assert predicted[0] == weights
        assert predicted[1] == pytest.approx(training, rel=0.01)
        assert 0.97 * peak <= call <= 1.18 * peak, predicted[2]
        assert sum(predicted[:2]) + call == pytest.approx(weights + training + peak, rel=0.06), predicted[2]


@pytest.mark.parametrize("layout, recompute", [("d1@0", False), ("p2@0-1", False), ("p2@0-1", True)])
def test_mixed_lengths_stay_below_a_bound_that_is_not_wasteful(pool, layout, recompute):
    workload = Workload(num_samples=24, prompt_tokens=8, response_tokens=14, max_new_tokens=28)
    case = Case(layout, "train_step", _role(), workload, 128, recompute, ragged=True)
    for rank, (*_, peak) in enumerate(pool.run(measure, case, num_ranks=len(Layout.parse(layout).ranks))):
        assert peak <= predict(case, rank)[2].num_bytes <= 1.5 * peak


LONG_PROMPTS = [
    Case("d1@0", "generate", _role("bfloat16", trainable=False, vocab=500), replace(
        GENERATE, longest_prompt_tokens=60.0)),
    Case("d2@0-1", "generate", _role(trainable=False, **NARROW), replace(
        FEW_ROWS, longest_prompt_tokens=48.0)),
    Case("d1@0", "forward", _role(trainable=False), replace(FULL, longest_prompt_tokens=28.0), 50),
    Case("p2@0-1", "train_step", _role("bfloat16", **NARROW), replace(FULL, longest_prompt_tokens=28.0), 50),
]


@pytest.mark.parametrize("case", marked(LONG_PROMPTS, quick=[0, 1]), ids=_name)
def test_the_longest_prompts_are_counted(pool, case):
    """Every second prompt is the longest; with prompts of the mean length, less would be predicted."""
    ranks = Layout.parse(case.layout).ranks
    mean = replace(case, workload=replace(case.workload, longest_prompt_tokens=0.0))
    for rank, (*_, peak) in enumerate(pool.run(measure, case, num_ranks=len(ranks))):
        predicted = predict(case, rank)[2].num_bytes
        assert 0.97 * peak <= predicted <= 1.5 * peak
        assert predicted > predict(mean, rank)[2].num_bytes


def test_the_counter_sees_what_autograd_saves():
    x = torch.ones(1000, requires_grad=True)
    with Storages() as storages:
        y = x.exp().sum()  # exp keeps its result
        assert storages.now == 4000 + 4
        y.backward()
        assert storages.now == 4000 + 4  # Now the gradient takes them.
    assert storages.peak == 8000 + 8


# Against published figures and independent computations


@pytest.mark.parametrize(
    "name, total",
    [
        ("llama-7b", 6_738_415_616),
        ("llama-70b", 68_976_648_192),
        ("qwen2.5-0.5b", 494_032_768),  # (the embedding is tied and counts once)
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_parameters_are_those_published(name, total):
    spec = model_spec(ModelConfig.load(name))
    assert num_params(spec, ParallelStrategy(dp=4), 0) == total
    stages = [num_params(spec, ParallelStrategy(pp=4), stage) for stage in range(4)]
    twice = spec.params[0].numel if spec.config.tied else 0
    assert sum(stages) == total + twice


@pytest.mark.parametrize(
    "name, layout",
    marked([
        *(("qwen2.5-0.5b", layout) for layout in ("d1@0", "t2@0-1", "t7p2@0-13", "d2p3@0-5")),
        *(("qwen3-30b-a3b", layout) for layout in ("t8p2@0-15", "d4e4@0-3", "d4e2@0-3", "d3p5t2e3@0-29")),
    ], quick=[1, 2, 3, 5, 6]),
)
def test_sizes_are_those_of_the_fullest_rank(name, layout):
    """The expected sizes come from the regions that the parameter table assigns to every rank."""
    layout, role = Layout.parse(layout), ModelRole(ModelConfig.load(name), trainable=True)
    for stage in range(layout.pp):
        ranks = layout.grid[stage].ravel().tolist()
        held = max(sum(map(region_size, role.spec.held_by(layout, rank).values())) for rank in ranks)
        assert num_params(role.spec, layout.strategy, stage) == held
        assert weights_bytes(role, layout.strategy, stage) == 2 * held
        shards = (role.spec.boxes_held_by(layout, rank, sharded=True).values() for rank in ranks)
        owned = max(sum(map(region_size, itertools.chain(*boxes))) for boxes in shards)
        assert training_bytes(role, layout.strategy, stage) == pytest.approx(4 * (held + 3 * owned), 1e-3)


def test_zero_stage_one_as_published():
    """7.5 B parameters take 120 GB, and 31.4 GB with 64 replicas (Rajbhandari et al. 2020, figure 1).

    Their gradients have 2 bytes, ours 4: 2 + 4 + 12 / 64 bytes per parameter instead of 2 + 2 + 12 / 64.
    """
    role = ModelRole(ModelConfig.load("llama-7b"), trainable=True)
    for dp, published in ((1, 120.0), (64, 31.4)):
        strategy = ParallelStrategy(dp=dp)
        total = weights_bytes(role, strategy, 0) + training_bytes(role, strategy, 0)
        per_param = total / role.spec.numel
        assert 7.5 * (per_param - 2) == pytest.approx(published, abs=0.05)
        assert per_param == pytest.approx(2 + 4 + 12 / dp, rel=1e-4)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_layer_against_megatron(tp):
    """Korthikanti et al. 2022, equation 2 without the s x s matrices (flash attention has none), in bytes:
    s b h (10 + 24 / t) of a layer, for the shape of their 22B model.

    Ours has no dropout (-2 of the 10: two masks). Their GELU MLP keeps 4h twice (16 of the 24), and so does
    our SwiGLU of this width, whose product with the gate is made again. Small beside that: logsumexp of
    attention and scales of norms, which they neglect.
    """
    s, b, h, heads = 2048, 4, 6144, 64

    def activations(num_layers, recompute=False):
        shape = (51200, h, 4 * h, num_layers, heads, heads, h // heads)
        role = ModelRole(ModelConfig("llama", *shape, False, "score"), trainable=True)
        workload = Workload(num_samples=b, response_tokens=s, output=Output.VALUES)
        options = {"micro_batch_tokens": s * b, "recompute": recompute, "fused": True}
        return peak_memory(role, "train_step", workload, ParallelStrategy(tp=tp), 0, **options).activations

    layer = s * b * h * (10 - 2 + 24 / tp) + s * b * (4 * heads / tp + 2 * 4)
    assert activations(5) - activations(4) == pytest.approx(layer, rel=1e-12)
    assert activations(5, True) - activations(4, True) == 2 * s * b * h  # (their full recomputation, too)


@pytest.mark.parametrize(
    "name, token_bytes",
    [
        ("llama-7b", 0.5 * 2**20),
        ("llama-70b", 0.3125 * 2**20),
        ("deepseek-v3", 70_272),  # Insights into DeepSeek-V3 (2025), table 1
    ],
)
def test_kv_cache_of_a_token_as_published(name, token_bytes):
    role, rows = ModelRole(ModelConfig.load(name)), 64
    workload = Workload(rows, 24, response_tokens=1000, max_new_tokens=1000)
    memory = peak_memory(role, "generate", workload, ParallelStrategy(), 0, micro_batch_tokens=4096)
    assert memory.kv_cache == rows * 1024 * token_bytes


def test_a_pass_over_long_prompts_takes_no_more_than_one_over_pieces():
    """DeepSeek-V3 on 8 GPUs: of 16 heads, 8,192 latents of 576 dims are expanded at a time to keys without
    rotation and values of 128 dims each, and to keys and padded values of 192. The output of 8,192 tokens and
    the rows is added up in float32, three times, beside one of 192 dims in bfloat16."""
    role, strategy = ModelRole(ModelConfig.load("deepseek-v3")), ParallelStrategy(tp=8)

    def in_block(prompt_tokens, config=role.config, fused=True):
        work = Workload(16, prompt_tokens, max_new_tokens=1000)
        pieces = CallPieces(replace(role, config=config), work, strategy, 4096, recompute=False, fused=fused)
        return GenerationMoments(pieces).on(pieces.stage(0))[0].activations

    passes = [in_block(tokens) for tokens in (9_000, 30_000, 100_000)]
    assert passes[0] == passes[1] == passes[2]
    pieces = CallPieces(role, Workload(16, 9_000), strategy, 4096, recompute=False, fused=True)
    expanded = 2 * 8192 * (576 + 16 * (128 + 128 + 192 + 192))
    output = 8208 * 16 * (3 * 4 * 128 + 2 * 192)
    assert pieces.expanded_bytes(8208, 100_000) == expanded + output
    assert pieces.expanded_bytes(8208, 100) == expanded * 100 / 8192 + output
    dense = ModelConfig.load("llama-7b")
    passes = [in_block(tokens, dense) for tokens in (9_000, 100_000)]
    assert passes[0] == passes[1] < in_block(100_000, dense, fused=False)


def test_the_check_counts_the_cache_that_a_run_takes():
    """512 rows of a 7B model would not fit an H100 in full, so a cache without a limit takes a share of
    free memory."""
    role, cluster = ModelRole(ModelConfig.load("llama-7b")), Cluster.load("h100-1x8")
    call = FunctionCall("gen", "generate", ("prompts",), ("tokens",), role="actor")
    graph = DataflowGraph((call,), ("prompts",))
    plan = ExecutionPlan({"gen": CallPlan(Layout.parse("d1@0"))})

    def cache(**changes):
        work = replace(Workload(512, 24, 1000.0, max_new_tokens=1000), **changes)
        check = check_memory(Problem(graph, {"actor": role}, {"gen": work}, cluster), plan)
        return check.peaks[0].bytes_by_use["kv_cache"], check.fits

    needed = 512 * 1024 * 2**19
    assert cache(kv_cache_gib=1000.0) == (needed, False)
    weights = weights_bytes(role, ParallelStrategy(), 0)
    whole = peak_memory(
        role, "generate", Workload(512, 24, 1000.0, max_new_tokens=1000), ParallelStrategy(), 0,
        micro_batch_tokens=1, fused=True)
    passes = whole.num_bytes - whole.kv_cache
    taken = 0.9 * (available_bytes(cluster) - weights) - passes
    assert 20e9 < taken < needed / 4
    assert cache() == (pytest.approx(taken), True)
    assert cache(kv_cache_gib=8.0) == (8 * 2**30, True)
    assert cache(max_rows=16) == (needed / 32, True)


@pytest.mark.parametrize("tp", [1, 2])
def test_sampling_by_top_p_takes_what_is_counted(tp):
    """Storages that `sample` allocates on one rank of two or alone, beside the logits that it gets. With two,
    what the other rank sends is a copy."""
    rows, vocab = 24, 6000
    config = SamplingConfig(temperature=0.7, top_p=0.9)
    logits = torch.randn(rows, vocab // tp)
    work = Workload(rows, 8, max_new_tokens=8, sorts_logits=True)
    role = ModelRole(ModelConfig("llama", vocab, 32, 64, 1, 2, 2, 16), "float32")
    with Storages() as storages:
        sample(logits, torch.rand(rows).double(), config=config, vocab_start=0, group=_Twice(tp),
               widest_shard=vocab // tp)
        peak = storages.peak
    moments = GenerationMoments(CallPieces(role, work, ParallelStrategy(tp=tp), 4096, False, fused=False))
    counted = moments.on(moments._pieces.stage(0))[-1].logits
    assert 0.9 * peak <= counted - logits.nbytes <= 1.5 * peak
    on_gpus = [
        peak_memory(role, "generate", w, ParallelStrategy(tp=tp), 0, micro_batch_tokens=1, fused=True).logits
        for w in (work, replace(work, sorts_logits=False))]
    assert on_gpus[0] >= 1.2 * on_gpus[1]


class _Twice:
    """A group of ranks that all have the same."""

    index = 0

    def __init__(self, size):
        self.size = size

    def all_gather(self, x):
        return torch.stack([x] * self.size)

    def all_reduce(self, x):
        return x


def test_recorded_steps_take_memory_for_each_kernel():
    """Up to 100 rows there are nine sizes: powers of two up to 32, then 64, 96 and 128."""
    role = ModelRole(ModelConfig.load("llama-7b"))
    work = Workload(100, 24, response_tokens=1000, max_new_tokens=1000)
    options = {"micro_batch_tokens": 4096}
    graphs = peak_memory(role, "generate", work, ParallelStrategy(), 0, fused=True, **options).graphs
    pool = CallPieces(role, work, ParallelStrategy(), 4096, False, fused=True).forward_temporaries(128)
    assert graphs - pool == 9 * 32 * OUR_CUDA.decode_kernels * 64 * 1024
    assert not peak_memory(role, "generate", work, ParallelStrategy(), 0, **options).graphs


def test_the_busiest_ranks_of_experts_need_more():
    """Of an MLP's activations, the experts' grow with the rows of the busiest rank."""
    role = ModelRole(ModelConfig.load("qwen3-30b-a3b"), trainable=True)
    work = Workload(64, 512, 512, max_new_tokens=512)

    def pieces(strategy):
        return CallPieces(role, work, ParallelStrategy.parse(strategy), 2048, False, fused=True)

    spread = pieces("d8e8")
    tokens, passes = spread.micro_batch.tokens, spread.micro_batch.num_micro_batches
    load = spread.load(tokens, num_passes=passes)
    assert load == greatest_load(tokens * 8 * 8, 8, 128, num_draws=48 * passes)
    assert 1.2 < load < 2 and pieces("d8").load(tokens, num_passes=passes) == 1.0
    assert 1 < spread.load(tokens, num_passes=passes, num_layers=48) < load
    more = spread.block_saved_bytes(tokens, load=load) - spread.block_saved_bytes(tokens)
    # Of each row: gate and up, their product, and what the experts read.
    assert more == pytest.approx((load - 1) * tokens * 8 * 2 * (3 * 768 + 2048))


def test_hundreds_of_strategies_are_asked_for_in_no_time():
    role = ModelRole(ModelConfig.load("deepseek-v3"), trainable=True)
    workload = Workload(512, 1024, 1024, max_new_tokens=2048)
    sizes = (1, 2, 4, 8)
    strategies = [ParallelStrategy(pp=p, dp=d, tp=t) for p in sizes for d in sizes for t in sizes]
    held = sum(param.numel for param in role.spec.params)
    assert num_params(role.spec, strategies[0], 0) == held
    start = time.process_time()
    for strategy in strategies:
        num_params(role.spec, strategy, strategy.pp - 1)
        for kind in ("generate", "forward", "train_step"):
            peak_memory(role, kind, workload, strategy, 0, micro_batch_tokens=4096)
    assert time.process_time() - start < 2.0


def test_available_memory_leaves_a_margin():
    cluster = Cluster.load("h100-8x8")
    left = cluster.device_memory_bytes - available_bytes(cluster)
    assert STAGING_BYTES + 0.05 * cluster.device_memory_bytes < left < 0.1 * cluster.device_memory_bytes
