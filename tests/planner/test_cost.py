"""Costs against the formulas of the papers, on clusters where all but one thing is free."""

import math
from dataclasses import replace

import numpy as np
import pytest

from realhf.calls import Output
from realhf.cluster import Cluster, Link
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.inference.cpu_decoding import DecodingSteps
from realhf.inference.kv_cache import BlockTables
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.kv_blocks import tokens_read
from realhf.models.model_config import MegatronConfig, ModelConfig
from realhf.planner.call_cost import call_cost, in_busiest_cohort
from realhf.planner.efficiencies import OUR_CPU, Efficiencies
from realhf.planner.links import Span
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates, busiest_load

FREE = 1e30
PERFECT = Efficiencies()
LLAMA = ModelConfig.load("llama-7b")
ROLE = ModelRole(LLAMA, trainable=True)
WORK = Workload(64, 1024, 1024, 1024)


def _rates(*, flops=FREE, memory=FREE, intra=FREE, inter=FREE, latency=1e-30, pcie=FREE, path=None):
    cluster = Cluster(
        16, 8, 80e9, 1e12, memory, {"bfloat16": flops}, Link(latency, intra), Link(latency, inter),
        host_memory=Link(1e-30, pcie),
    )
    return Rates(cluster, PERFECT, path)


def _cost(rates, kind, strategy, *, role=ROLE, work=WORK, micro_batch_tokens=4096, **options):
    outputs = () if kind == "train_step" else ("y",)
    call = FunctionCall("call", kind, ("x", "response_mask"), outputs, role="actor")
    parsed = ParallelStrategy.parse(strategy)
    layout = Layout(parsed, DeviceMesh(tuple(range(parsed.num_ranks))))
    call_plan = CallPlan(layout, micro_batch_tokens, **options)
    return call_cost(rates, call, role, work, call_plan, per_host=min(8, parsed.num_ranks))


def _flops(tokens, samples, chosen):
    """Return the FLOPs of matrix products (2 per parameter and token) and of causal attention in a forward
    pass.

    Logits are computed for `chosen` tokens only.
    """
    matrices = ROLE.spec.numel - 2 * LLAMA.vocab_size * LLAMA.hidden_size - (2 * 32 + 1) * LLAMA.hidden_size
    attention = samples * 2 * 2048**2 * LLAMA.hidden_size * LLAMA.num_layers  # 4 s^2 h per layer, half of it
    return 2 * tokens * matrices + 2 * chosen * LLAMA.vocab_size * LLAMA.hidden_size, attention


@pytest.mark.parametrize("kind", ["generate", "forward", "train_step"])
def test_what_rates_remember_is_no_other_strategys_cost(kind):
    """A cluster's rates remember costs for the calls and strategies that have them in common."""
    bandwidths = {"flops": 1e15, "memory": 3e12, "intra": 4e11, "inter": 5e10, "latency": 1e-5, "pcie": 5e10}
    shared = _rates(**bandwidths)
    roles = (ROLE, ModelRole(ModelConfig.load("qwen3-30b-a3b"), trainable=True))
    strategies = (
        "d16", "d4c4", "c16", "d8t2", "d4c2t2", "d2c2t4", "d2t4p2", "c2t4p2", "d4c2p2", "d2c4e2", "d8e2")
    rows = (4, 64) if kind == "generate" else (None,)
    for role in roles:
        for strategy in strategies if role.config.moe else strategies[:-2]:
            for work in (WORK, replace(WORK, num_samples=60, minibatches=2), replace(WORK, runs=2.0)):
                for max_rows in rows:
                    options = {"role": role, "work": work, "max_rows": max_rows}
                    alone = _cost(_rates(**bandwidths), kind, strategy, **options)
                    assert _cost(shared, kind, strategy, **options) == alone


def test_ranks_of_a_context_group_generate_rows_of_their_own():
    rates = _rates(flops=1e15, memory=3e12, intra=4e11, inter=5e10)
    for strategies in (("d8t2", "d2c4t2", "c8t2"), ("d4p4", "c4p4")):
        expected, *others = (_cost(_rates(
            flops=1e15, memory=3e12, intra=4e11, inter=5e10), "generate", s, max_rows=8) for s in strategies)
        assert all(other == expected for other in others)
        assert all(_cost(rates, "generate", strategy, max_rows=8) == expected for strategy in strategies)


def test_training_takes_three_times_the_forward_flops():
    """Training takes 6 N FLOPs per token (Kaplan et al. 2020), flash attention's backward 2.5 times its
    forward."""
    matrices, attention = _flops(64 * 2048, 64, 64 * 1024)
    forward = _cost(_rates(flops=1e15), "forward", "d1").seconds
    assert forward == pytest.approx((matrices + attention) / 1e15, rel=1e-6)
    train = _cost(_rates(flops=1e15), "train_step", "d1").seconds
    assert train == pytest.approx((3 * matrices + 3.5 * attention) / 1e15, rel=1e-6)
    again = _cost(_rates(flops=1e15), "train_step", "d1", recompute=True).seconds
    head = 2 * 64 * 1024 * LLAMA.vocab_size * LLAMA.hidden_size
    assert again - train == pytest.approx((matrices - head + attention) / 1e15, rel=1e-6)


@pytest.mark.parametrize(("micro_batch_tokens", "strategy", "sharing"), [
    (8 * 2048, "d1", 8), (4096, "d1", 2), (2048, "d1", 1), (1 << 20, "d2", 4), (1 << 20, "c2", 1)])
def test_on_a_cpu_a_prompt_passes_once_in_a_micro_batch(micro_batch_tokens, strategy, sharing):
    work = replace(WORK, samples_per_prompt=8, alike=1.0)
    prompts = 64 // sharing
    matrices, attention = _flops(prompts * 1024 + 64 * 1024, 64, 64 * 1024)
    attention *= (prompts * 1024**2 + 64 * (2048**2 - 1024**2)) / (64 * 2048**2)
    ranks = ParallelStrategy.parse(strategy).num_ranks
    on_cpu, on_gpu = (
        _cost(
            _rates(flops=1e15, path=path), "train_step", strategy, work=work,
            micro_batch_tokens=micro_batch_tokens).seconds
        for path in (OUR_CPU, None))
    assert on_cpu == pytest.approx((3 * matrices + 3.5 * attention) / 1e15 / ranks, rel=1e-6)
    assert (on_cpu < 0.95 * on_gpu) == (sharing > 1)


@pytest.mark.parametrize("strategy", ["d4", "t4", "d2t2", "t8", "d8t2", "c4", "d2c2t2"])
def test_flops_are_shared_by_data_and_tensor_parallel_ranks(strategy):
    parsed = ParallelStrategy.parse(strategy)
    one, many = (_cost(_rates(flops=1e15), "train_step", s).seconds for s in ("d1", strategy))
    assert many == pytest.approx(one / parsed.num_ranks, rel=1e-6)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_pipeline_idles_p_minus_1_of_m_slots(stages):
    """1F1B adds (p - 1) / m of the ideal time (Narayanan et al. 2021)."""
    values = Workload(64, 1024, 1024, 1024, output=Output.VALUES)  # All stages alike: no logits.
    cost = _cost(_rates(flops=1e15), "train_step", f"p{stages}", work=values, micro_batch_tokens=2048)
    assert cost.num_micro_batches == 64
    seconds = cost.seconds_by_cause
    assert seconds["pipeline"] / seconds["compute"] == pytest.approx((stages - 1) / 64)


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaved_chunks_idle_a_fraction_of_the_slots(chunks):
    """Interleaving v chunks divides the idle time of 1F1B by v (Narayanan et al. 2021)."""
    role = ModelRole(MegatronConfig.load("llama-7b"), trainable=True)
    values = Workload(64, 1024, 1024, 1024, output=Output.VALUES)
    options = {"role": role, "work": values, "micro_batch_tokens": 2048}
    cost = _cost(_rates(flops=1e15), "train_step", f"p4v{chunks}", **options)
    seconds = cost.seconds_by_cause
    assert seconds["pipeline"] / seconds["compute"] == pytest.approx(3 / chunks / 64)
    slow = _rates(flops=1e15, intra=1e6)
    more, fewer = (_cost(slow, "train_step", text, **options).seconds for text in (f"p4v{chunks}", "p4"))
    assert more > fewer  # It sends more.


def test_pipelines_send_hidden_states_between_stages():
    rates = _rates(intra=1e9)
    values = Workload(1, 1024, 1024, 1024, output=Output.VALUES)
    sent = 2048 * LLAMA.hidden_size * 2
    assert _cost(rates, "forward", "p4", work=values).seconds == pytest.approx(3 * sent / 1e9)
    assert _cost(rates, "train_step", "p4", work=values).seconds == pytest.approx(6 * sent / 1e9)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_sums_twice_per_block_and_direction(tp):
    """A block has two all-reduces of tokens x hidden forward and two backward (Shoeybi et al. 2019); each
    moves 2 (n - 1) / n of its bytes over a rank's link."""
    values = Workload(2, 1024, 1024, 1024, output=Output.VALUES)
    each = 2 * (tp - 1) / tp * 2 * 2048 * LLAMA.hidden_size * 2 / 1e9
    assert _cost(_rates(intra=1e9), "forward", f"t{tp}", work=values).seconds == pytest.approx(64 * each)
    assert _cost(_rates(intra=1e9), "train_step", f"t{tp}", work=values).seconds == pytest.approx(128 * each)


@pytest.mark.parametrize(
    ("model", "strategy", "kv_heads"),
    [("llama-7b", "c4", 32), ("llama-7b", "c4t2", 16), ("llama-70b", "c2", 8), ("qwen2.5-7b", "c7", 28)],
)
def test_context_parallelism_exchanges_queries_keys_values_and_outputs(model, strategy, kv_heads):
    """A block sends four messages per direction (arXiv:2309.14509, section 3.2), with keys and values
    repeated as ranks need them. A rank has 1 / n of the tokens and sends (n - 1) / n of their data."""
    config, parsed = ModelConfig.load(model), ParallelStrategy.parse(strategy)
    role = ModelRole(config, trainable=True)
    values = Workload(2, 1024, 1024, 1024, output=Output.VALUES)
    tokens, cp = 2 * 2048 / parsed.cp, parsed.cp
    heads = 2 * config.num_heads / parsed.tp + 2 * kv_heads
    each = (cp - 1) / cp * tokens * heads * config.head_dim * 2 / 1e9
    for kind, directions in (("forward", 1), ("train_step", 2)):
        rates, alone = _rates(intra=1e9), strategy.replace(f"c{cp}", "")
        seconds = _cost(rates, kind, strategy, role=role, work=values).seconds_by_cause
        of_alone = _cost(rates, kind, alone, role=role, work=values).seconds_by_cause
        reduced = of_alone.get("tensor parallel", 0.0) / cp
        within = seconds["context parallel" if parsed.tp == 1 else "tensor and context parallel"]
        assert within - reduced == pytest.approx(directions * config.num_layers * each, rel=1e-6)


def test_zero_reduces_float32_gradients_and_gathers_bfloat16_parameters():
    """Each optimizer step moves (n - 1) / n of 4 + 2 bytes per parameter (Rajbhandari et al. 2020). After
    the last step parameters are not gathered, since reallocation reads them where they are."""
    values = Workload(64, 1024, 1024, 1024, minibatches=4, output=Output.VALUES)
    seconds = _cost(_rates(intra=1e9), "train_step", "d8", work=values).seconds
    assert seconds == pytest.approx(7 / 8 * (4 * 4 + 3 * 2) * ROLE.spec.numel / 1e9, rel=1e-2)


def test_groups_over_hosts_share_the_ports_of_their_members():
    rates = _rates(inter=1e9)
    assert rates.all_gather(8e9, Span(8, 8)) == pytest.approx(0.0, abs=1e-9)
    assert rates.all_gather(8e9, Span(8, 1)) == pytest.approx(7.0)
    assert rates.all_gather(8e9, Span(16, 8)) == pytest.approx(0.5)  # half comes from outside, over 8 ports


def test_decoding_reads_weights_and_cache_once_per_token():
    """At small batches a step takes bytes / bandwidth (Pope et al. 2022)."""
    rates, work = _rates(memory=1e12, path=OUR_CPU), Workload(4, 1024, 64, 64)
    spent = _cost(rates, "generate", "d1", work=work).seconds_by_cause["decode"]
    layers = LLAMA.num_layers * (4 * 4096**2 + 3 * 4096 * LLAMA.intermediate_size)
    head = LLAMA.vocab_size * LLAMA.hidden_size
    context = np.ceil(np.arange(1025, 1089) / 128) * 128  # Whole blocks are read.
    read = 2 * (64 * (layers + head) + (4 * context * 2 * LLAMA.hidden_size * LLAMA.num_layers).sum())
    sampling = 64 * 4 * 8 * LLAMA.vocab_size * 4
    assert spent == pytest.approx((read + sampling) / 1e12, rel=1e-3)
    # Twice the bytes per token with float32 weights and cache, half of them on each of two ranks.
    half = _cost(rates, "generate", "t2", work=work).seconds_by_cause["decode"]
    assert half == pytest.approx(spent / 2, rel=1e-3)


def test_samples_of_a_prompt_read_its_cache_once():
    """Only whole blocks are shared: all of 1024 tokens, but 15 blocks of 64 of 1023 tokens.

    Other blocks of all rows are read up to the newest token if there is one of each, and else as a whole.
    """
    rates = _rates(memory=1e12, path=OUR_CPU)
    token = 2 * 4096 * 2 * 32  # bytes: keys and values, hidden, bfloat16, layers
    for prompt, in_blocks in ((1024, 1024), (1023, 960), (63, 0)):
        work = Workload(64, prompt, 256, 256)
        own, shared = (
            _cost(rates, "generate", "d1", work=replace(work, samples_per_prompt=count)).seconds_by_cause
            for count in (1, 8)
        )
        size = 64 if in_blocks else 128  # Prompts that can share blocks have small ones.
        saved = 0.0
        for last in range(prompt + 1, prompt + 257):
            rest = last - in_blocks
            alone = last if last <= 128 else math.ceil(last / 128) * 128
            together = rest if rest <= size else math.ceil(rest / size) * size
            saved += 64 * (alone - together) - 8 * in_blocks
        # Steps are priced in ranges, each with its mean context.
        assert own["decode"] - shared["decode"] == pytest.approx(saved * token / 1e12, rel=0.01, abs=1e-9)


@pytest.mark.parametrize(("length", "size"), [(40, 64), (100, 64), (127, 128), (128, 128), (300, 128)])
def test_a_decode_step_reads_the_blocks_that_are_priced(length, size):
    per_row = math.ceil((length + 1) / size)
    tables = BlockTables(num_slots=6, num_blocks=6 * per_row, block_size=size, blocks_per_row=per_row)
    for slot in range(6):
        tables.start(slot, range(slot * per_row, (slot + 1) * per_row), length=length)
    (own,) = DecodingSteps(tables).advance().sets
    assert len(own.rows_PS) * own.width == 6 * tokens_read(length + 1, length + 1, size)


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_the_largest_cohort_is_that_of_drawn_rows(alike):
    """Rows of 16 prompts end at random, in groups of 4 if they are alike, and 2 or 4 cohorts have them."""
    rng = np.random.default_rng(0)
    for cohorts in (2, 4):
        for share in (0.2, 0.5, 0.9):
            drawn = rng.random((20_000, cohorts, 16 // cohorts, 4))
            runs = (drawn[..., :1] if alike else drawn) < share
            rows = (runs * np.ones(4)).sum(axis=(2, 3)).max(axis=1).mean()
            mean = np.array([64 / cohorts * share])
            found = in_busiest_cohort(mean, 64 / cohorts, cohorts, 1 + 3 * alike)
            assert found == pytest.approx(rows, rel=0.07)


def test_short_responses_end_early():
    rates = _rates(memory=1e12)
    full = _cost(rates, "generate", "d1", work=Workload(1, 8, 512, 512)).seconds
    short = _cost(rates, "generate", "d1", work=Workload(1, 8, 128, 512)).seconds
    assert short == pytest.approx(full / 4, rel=0.1)  # One row: as many steps as it has tokens.
    many = _cost(rates, "generate", "d1", work=Workload(256, 8, 128, 512)).seconds
    assert many > 3.5 * short  # Some row decodes until the limit.


def test_response_lengths_have_their_mean():
    for mean, limit in ((20.0, 64), (100.0, 100), (1.0, 50), (63.5, 64)):
        work = Workload(prompt_tokens=10, response_tokens=mean, max_new_tokens=limit)
        rng, survival = np.random.default_rng(0), work.survival
        assert survival.sum() == pytest.approx(mean)
        lengths = (rng.random(200_000)[:, None] < survival[None]).sum(axis=1)
        assert work.squared_tokens == pytest.approx(((10.0 + lengths) ** 2).mean(), rel=2e-2)


def test_offload_brings_the_weights_back_once():
    frozen = replace(ROLE, trainable=False)
    plain = _cost(_rates(pcie=1e9), "forward", "t2", role=frozen)
    offloaded = _cost(_rates(pcie=1e9), "forward", "t2", role=frozen, offload=True)
    assert offloaded.seconds - plain.seconds == pytest.approx(ROLE.spec.numel * 2 / 2 / 1e9, rel=1e-3)


def test_the_states_of_an_offloaded_optimizer_go_both_ways_at_once():
    """12 bytes per parameter, shared by 8 replicas, cross PCIe in each of 4 optimizer steps, while others are
    updated."""
    work = replace(WORK, minibatches=4)
    role = replace(ROLE, offloads_optimizer=True)
    plain = _cost(_rates(pcie=1e9), "train_step", "d8", work=work)
    offloaded = _cost(_rates(pcie=1e9), "train_step", "d8", role=role, work=work)
    update = offloaded.seconds_by_cause["optimizer"]
    assert update == pytest.approx(4 * 12 * ROLE.spec.numel / 8 / 1e9, rel=1e-3)
    assert offloaded.seconds - plain.seconds == pytest.approx(update, rel=1e-3)
    slow = _rates(pcie=1e15, memory=1e9)  # Here the update takes longer: 30 bytes of memory per parameter.
    costs = [_cost(slow, "train_step", "d8", role=some, work=work) for some in (ROLE, role)]
    updates = [cost.seconds_by_cause["optimizer"] for cost in costs]
    assert updates[0] == updates[1] == pytest.approx(4 * 30 * ROLE.spec.numel / 8 / 1e9, rel=1e-3)


def test_parts_add_up():
    rates = Rates(Cluster.load("h100-8x8"))
    for kind in ("generate", "forward", "train_step"):
        for strategy in ("d1", "d8t8", "d4t2p8", "t8p8", "d2t4p4"):
            cost = _cost(rates, kind, strategy)
            assert sum(cost.seconds_by_cause.values()) == pytest.approx(cost.seconds), (kind, strategy)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_experts_cost_what_tokens_activate(name):
    """The published counts of active parameters per token are 3B of 30B and 37B of 671B."""
    active = {"qwen3-30b-a3b": 3.3e9, "deepseek-v3": 37e9}[name]
    role = ModelRole(ModelConfig.load(name))
    work = Workload(256, 1, 0, 0, output=Output.VALUES)  # One token each: hardly any attention.
    seconds = _cost(_rates(flops=1e15), "forward", "d1", role=role, work=work).seconds
    vocabulary = role.config.vocab_size * role.config.hidden_size * 2
    assert seconds * 1e15 / 256 / 2 == pytest.approx(active - vocabulary, rel=0.06)
    spread = _cost(_rates(intra=1e9), "forward", "d8e8", role=role, work=work).seconds
    c = role.config
    layers = c.num_layers - c.moe.num_dense_layers
    sent = 2 * layers * 32 * c.moe.num_experts_per_token * c.hidden_size * 2 * 7 / 8
    routed = 32 * c.moe.num_experts_per_token * 8
    busiest = busiest_load(routed, 8, c.moe.num_experts)  # (See test_rates.py.)
    assert spread == pytest.approx(busiest * sent / 1e9, rel=1e-6)
