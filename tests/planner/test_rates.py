"""Rates against simulations and counts: tiles, experts, caches, messages, launches; the table of figures."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.cluster import ACCELERATORS, Cluster, Link
from realhf.devices import half_precision
from realhf.distributed.world import ParallelGroups, World
from realhf.layout import Layout
from realhf.models.kv_blocks import padded_size
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.models.param_spec import model_spec
from realhf.nn.transformer import Transformer
from realhf.planner.efficiencies import EFFICIENCIES, OUR_CPU, OUR_CUDA, TABLE, Efficiencies, padded_sizes
from realhf.planner.links import Span
from realhf.planner.problem import ModelRole
from realhf.planner.rates import SKEW, Rates, busiest_load, greatest_load, used_experts

ONE = Span(1, 1)
PAGE = Path(__file__).parents[2] / "docs" / "cost-model.md"


def _cluster(*, flops=1e30, memory=1e30, **options):
    link = Link(1e-30, 1e30)
    return Cluster(16, 8, 80e9, 1e12, memory, {"bfloat16": flops}, link, link, **options)


@pytest.mark.parametrize("size", [(300, 4096, 512), (4096, 1000, 64), (5000, 5120, 2048)])
def test_half_of_the_last_wave_of_tiles_is_idle(size):
    """Count the waves in which 132 units compute tiles of 128 x 128, for sizes near the given one."""
    rows, columns, depth = size
    e = Efficiencies(tile=128, units=132)
    rates = Rates(_cluster(flops=1.0), e)
    role = ModelRole(ModelConfig.load("tiny"))
    rng = np.random.default_rng(0)
    counted = predicted = 0.0
    for _ in range(2000):
        m, n = rng.integers(rows, 2 * rows), rng.integers(columns, 2 * columns)
        tiles = (m / 128) * (n / 128)  # (Tiles at the edges are another effect.)
        counted += np.ceil(tiles / 132) * 132 * 2 * 128 * 128 * depth
        predicted += rates.matmul(role, tokens=m, params=n * depth, depth=depth)
    assert predicted == pytest.approx(counted, rel=0.03)


def test_each_group_of_a_grouped_product_fills_tiles_of_its_own():
    rates = Rates(_cluster(flops=1.0), Efficiencies(tile=128, units=0))
    role = ModelRole(ModelConfig.load("tiny"))
    for mean in (200, 1000):
        sizes = np.random.default_rng(0).integers(1, 2 * mean, size=10_000)
        tiled = 2 * 64 * (np.ceil(sizes / 128) * 128).mean()  # 64 parameters in each group
        assert rates.grouped_matmul(role, tokens=mean, groups=1, params=64, depth=8) == pytest.approx(
            tiled, rel=0.02)


@pytest.mark.parametrize(("tokens", "ranks", "experts"), [(64, 2, 8), (4096, 8, 128), (100, 16, 256)])
def test_the_busiest_rank_sets_the_pace(tokens, ranks, experts):
    """Experts have shares with the stated deviation, ranks have equal parts of the experts."""
    rng = np.random.default_rng(0)
    loads = []
    for _ in range(2000):
        shares = rng.gamma(1 / SKEW**2, size=experts)
        by_rank = shares.reshape(ranks, -1).sum(1)
        loads.append(rng.multinomial(tokens, by_rank / by_rank.sum()).max() / (tokens / ranks))
    assert busiest_load(float(tokens), ranks, experts) == pytest.approx(np.mean(loads), rel=0.06)
    assert busiest_load(float(tokens), 1, experts) == 1.0


@pytest.mark.parametrize(
    ("tokens", "ranks", "experts", "layers"), [(512, 8, 128, 1), (4096, 4, 8, 1), (256, 16, 64, 6)])
def test_memory_has_room_for_the_busiest_rank_of_many_layers(tokens, ranks, experts, layers):
    """In 99 of 100 cases no rank gets more in any of 24 draws, each the mean of some layers."""
    rng = np.random.default_rng(0)
    num_draws = 24
    shares = rng.gamma(1 / SKEW**2, size=(600, num_draws, layers, experts))
    by_rank = shares.reshape(*shares.shape[:-1], ranks, -1).sum(-1)
    drawn = rng.multinomial(tokens, by_rank / by_rank.sum(-1, keepdims=True)).mean(2)
    worst = (drawn / (tokens / ranks)).max((1, 2))
    room = greatest_load(float(tokens), ranks, experts, num_draws=num_draws, num_layers=layers)
    assert np.quantile(worst, 0.98) < room < 1.15 * np.quantile(worst, 0.99)
    assert room > 1.05 * busiest_load(float(tokens), ranks, experts) or layers > 1
    assert greatest_load(float(tokens), 1, experts, num_draws=num_draws) == 1.0


def test_few_tokens_use_few_experts():
    rng = np.random.default_rng(0)
    for experts, chosen, tokens in ((8, 2, 3), (128, 8, 16), (256, 8, 64)):
        used = [len({*np.concatenate([rng.permutation(experts)[:chosen] for _ in range(tokens)])})
                for _ in range(300)]
        assert used_experts(experts, chosen, tokens) == pytest.approx(np.mean(used), rel=0.03)


def test_recorded_sizes_are_those_of_the_engine():
    counts = np.arange(1, 5000)
    assert padded_sizes(counts).tolist() == [padded_size(int(count)) for count in counts]


@pytest.mark.parametrize("name", ["llama-7b", "deepseek-v3"])
def test_decoding_reads_the_tokens_of_each_row_once(name):
    """However long the longest row is."""
    config = ModelConfig.load(name)
    config = config if config.moe is None else replace(config, moe=None)
    width = 576 if config.mla else 2 * 4096
    role, rows, context = ModelRole(config), np.array([8.0]), np.array([1000.0])
    step = {}
    for path in (OUR_CUDA, OUR_CPU):
        rates = Rates(_cluster(memory=1e12), Efficiencies(), path)
        short, long = (rates.decode_block(role, ONE, ONE, rows=rows, context=c, longest=2 * c)[0][0]
                       for c in (context, 2 * context))
        step[path] = (long - short) * 1e12
    assert step[OUR_CUDA] == step[OUR_CPU] == pytest.approx(8 * 1000 * width * 2)


def test_decoding_multiplies_queries_with_the_latent():
    """DeepSeek's cached latent of 512 dims serves all 128 heads, with 64 rotated dims for scores alone."""
    config = replace(ModelConfig.load("deepseek-v3"), moe=None)
    rates = Rates(_cluster(flops=1e15), Efficiencies(), OUR_CPU)
    short, long = (rates.decode_block(ModelRole(config), ONE, ONE, rows=np.ones(1), context=c)[0][0]
                   for c in (np.zeros(1), np.full(1, 1000.0)))
    assert (long - short) * 1e15 == pytest.approx(1000 * 128 * 2 * (512 + 64 + 512))


def test_messages_of_an_exchange_grow_with_its_peers():
    rates = Rates(_cluster(), Efficiencies(message_seconds=1e-6))
    few, many = (rates.all_to_all(1.0, Span(n, min(n, 8))) for n in (8, 64))
    assert many - few == pytest.approx(56e-6)


def test_experts_across_ranks_make_the_host_wait():
    """Without them launches are hidden behind longer kernels; with them they are added."""
    config = ModelConfig.load("qwen3-30b-a3b")
    seconds = {}
    for launch in (0.0, 1e-5):
        rates = Rates(_cluster(flops=1e15), Efficiencies(launch_seconds=launch), OUR_CUDA)
        for ep in (ONE, Span(8, 8)):
            block = rates.block(ModelRole(config), ONE, ep, tokens=1e5, squared=0.0)
            seconds[launch, ep.size] = block.compute
    assert seconds[1e-5, 1] == seconds[0.0, 1]
    assert seconds[1e-5, 8] - seconds[0.0, 8] == pytest.approx((17 + 17) * 1e-5)


def test_decoding_gathers_the_rows_of_all_ranks_that_share_experts():
    """Each rank receives the hidden states of the 7 others, and sums of as many outputs; the busiest rank
    multiplies more rows than the mean."""
    config = ModelConfig.load("qwen3-30b-a3b")
    ep = Span(8, 8)
    shape = {"rows": np.full(1, 64.0), "context": np.zeros(1)}
    rates = Rates(replace(_cluster(), intra_host=Link(1e-30, 1e9)), Efficiencies(), OUR_CUDA)
    _, exchanged = rates.decode_block(ModelRole(config), ONE, ep, **shape)
    assert exchanged[0] == pytest.approx(2 * 7 * 64 * config.hidden_size * 2 / 1e9)
    rates = Rates(_cluster(flops=1e15), Efficiencies(tile=1), OUR_CUDA)
    alone, spread = (rates.decode_block(ModelRole(config), ONE, span, **shape)[0][0] for span in (ONE, ep))
    active = 8 * 3 * config.hidden_size * config.moe.expert_width  # Parameters of a token's experts.
    more = busiest_load(64.0 * 8 * 8, 8, 128) - 1
    assert more > 0.1 and (spread - alone) * 1e15 == pytest.approx(more * 2 * 64 * active)


_NO_KERNELS = (
    "view", "t", "transpose", "unsqueeze", "squeeze", "slice", "select", "split", "detach", "expand", "alias",
    "as_strided", "permute", "unbind", "chunk", "empty", "new_empty", "unflatten", "flatten", "reshape",
    "promote_types", "unsafe", "resize", "to", "copy",
)


class Operators(TorchDispatchMode):
    """Counts operators that would be kernels on a GPU: no views, nor the CPU's conversions of small
    products."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not any(part in _NO_KERNELS for part in (name, name.strip("_"), name.strip("_").split("_")[0])):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_experts", [False, True])
def test_kernels_are_counted_from_the_code(has_experts, monkeypatch):
    """A CPU without bfloat16 units would multiply in float32, with conversions that no GPU needs. Those of
    decode steps are counted in tests/nn/test_fused.py."""
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: True)
    moe = MoeConfig(8, 2, 32) if has_experts else None
    counts = []
    for layers in (1, 2):
        family = "qwen3_moe" if has_experts else "llama"
        config = ModelConfig(family, 64, 64, 96, layers, 4, 2, 16, moe=moe)
        groups = ParallelGroups.create(World(), Layout.parse("d1@0"))
        model = Transformer(model_spec(config), groups, dtype=torch.bfloat16)
        model.init_random(seed=0)
        with torch.inference_mode(), Operators() as operators:
            model(torch.arange(24), [12, 12])
        counts.append(len(operators.names))
    expected = OUR_CUDA.kernels + (OUR_CUDA.expert_kernels if has_experts else 0)
    assert counts[1] - counts[0] == pytest.approx(expected, rel=0.15)


# The table


def test_every_figure_has_a_source_and_every_accelerator_all_figures():
    assert tuple(TABLE) == ACCELERATORS
    for name, figures in TABLE.items():
        for field, (value, source) in figures.items():
            assert len(source) > 10, (name, field)
            assert getattr(EFFICIENCIES[name], field) == value
        gpu = {field.name for field in fields(Efficiencies)}
        assert set(figures) == gpu if name != "cpu" else set(figures) <= gpu


def test_the_page_shows_the_table():
    page = PAGE.read_text()
    for field in fields(Efficiencies):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{field.name}` |"))
        cells = [cell.strip() for cell in row.split("|")[2:6]]
        shown = [f"{getattr(EFFICIENCIES[name], field.name):g}" for name in ACCELERATORS]
        assert cells == shown, field.name


def test_shipped_clusters_name_their_accelerator():
    assert Cluster.load("a100-8x8").accelerator_name == "a100"
    assert Cluster.load("h200-8x8").accelerator_name == "h200"
    assert Cluster.load("cpu-laptop").accelerator_name == "cpu"
    assert _cluster().accelerator_name == "h100" and _cluster(device_type="cpu").accelerator_name == "cpu"
    with pytest.raises(ValueError, match="accelerator is 'b200': legal are h100, h200, a100, cpu"):
        _cluster(accelerator="b200")
