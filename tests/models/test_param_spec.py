"""The parameter table: transformers' own names and shapes, and who holds what."""

import re

import numpy as np
import pytest

from realhf.layout import DeviceMesh, Layout, ParallelStrategy, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec

EXTRA = {
    "Qwen3Moe": {
        "model_type": "qwen3_moe",
        "head_dim": 6,
        "moe_intermediate_size": 9,
        "num_experts": 7,
        "num_experts_per_tok": 2,
    },
    "DeepseekV3": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 2,
        "kv_lora_rank": 5,
        "moe_intermediate_size": 9,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "q_lora_rank": 7,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
    },
}


def small(*, heads=8, kv_heads=2, layers=5, tied=True, head="lm", family="Qwen2", **changes):
    hf = {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": 4 * heads,
        "intermediate_size": 10,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": 13,
        "model_type": family.lower(),
        **EXTRA.get(family, {}),
        **changes,
    }
    return ModelConfig.from_hf(hf, head=head)


def box(region):
    return tuple(slice(start, stop) for start, stop in region)


@pytest.mark.parametrize(
    "config",
    [
        small(family="Qwen3Moe", head="score"),
        small(family="DeepseekV3", q_lora_rank=None, first_k_dense_replace=0, num_nextn_predict_layers=1),
    ],
)
def test_names_and_shapes_are_those_of_transformers(config):
    """Of what tests/models/test_families.py, which has every family, lacks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf = config.to_hf()
    hf_config = transformers.AutoConfig.for_model(**hf)
    with torch.device("meta"):
        model = getattr(transformers, hf["architectures"][0])(hf_config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    theirs |= {n: tuple(b.shape) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    spec = model_spec(config)
    assert spec.numel == sum(map(np.prod, theirs.values()))
    assert {p.name: p.shape for p in spec.as_in_checkpoints().params} == dict(unfused(theirs))


def unfused(shapes):
    """Shapes as in the checkpoint, where each expert has its own; transformers stacks them in memory."""
    for name, shape in shapes.items():
        at, _, kind = name.rpartition(".experts.")
        if not at:
            yield name, shape
            continue
        num_experts, rows, columns = shape
        for j in range(num_experts):
            if kind == "down_proj":
                yield f"{at}.experts.{j}.down_proj.weight", (rows, columns)
            else:
                yield f"{at}.experts.{j}.gate_proj.weight", (rows // 2, columns)
                yield f"{at}.experts.{j}.up_proj.weight", (rows // 2, columns)


def random_layout(rng, config, max_ranks=48):
    while True:
        pp, ep, tp, outer, cp = (int(n) for n in rng.integers(1, (6, 6, 9, 4, 3)))
        size = pp * ep * outer * tp * cp
        if size > max_ranks:
            continue
        ranks = tuple(int(r) for r in rng.permutation(max_ranks)[:size])
        layout = Layout(ParallelStrategy(pp=pp, dp=ep * outer, cp=cp, tp=tp, ep=ep), DeviceMesh(ranks))
        try:
            config.check_layout(layout)
        except ValueError:
            continue
        return layout


FAMILIES = [
    *(("Qwen2", tied) for tied in (True, False)),
    *(("Qwen3Moe", tied) for tied in (True, False)),
    ("DeepseekV3", True),
]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_placements_agree_with_what_ranks_hold(family, tied):
    rng, spec = np.random.default_rng(0), model_spec(small(family=family, tied=tied))
    for _ in range(40):
        layout = random_layout(rng, spec.config)
        held = {rank: spec.held_by(layout, rank) for rank in layout.ranks}
        for p, placement in zip(spec.params, spec.placements(layout), strict=True):
            expected = {}
            for rank in sorted(layout.ranks):
                if p.name in held[rank]:
                    expected.setdefault(held[rank][p.name], []).append(rank)
            assert {region: list(ranks) for region, ranks in placement} == expected
            assert len(placement) == len(expected)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_experts_are_spread_over_neighbours_in_dp(family):
    rng, spec = np.random.default_rng(1), model_spec(small(family=family))
    num_experts = spec.config.moe.num_experts
    for _ in range(20):
        layout = random_layout(rng, spec.config)
        for rank in layout.ranks:
            at, held = layout.coordinate(rank), spec.held_by(layout, rank)
            stage = spec.stage_layers(layout.strategy, at.pp)
            own = range(*even_split(num_experts, layout.ep, at.dp % layout.ep))
            names = re.findall(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.", " ".join(held))
            found = {(int(layer), int(j)) for layer, j in names}
            first = spec.config.moe.num_dense_layers
            assert found == {(layer, j) for layer in stage if layer >= first for j in own}
            for layer, j in found:
                at_expert = f"model.layers.{layer}.mlp.experts.{j}"
                rows = even_split(9, layout.tp, at.tp)
                assert held[f"{at_expert}.gate_proj.weight"] == held[f"{at_expert}.up_proj.weight"]
                assert held[f"{at_expert}.gate_proj.weight"] == (rows, (0, spec.config.hidden_size))
                assert held[f"{at_expert}.down_proj.weight"] == ((0, spec.config.hidden_size), rows)


def test_latent_attention_splits_by_heads():
    held = model_spec(small(family="DeepseekV3")).held_by(Layout.parse("t4@0-3"), 1)  # heads 2 and 3 of 8
    attention = {name.split(".")[-2]: region for name, region in held.items() if "layers.3.self_attn" in name}
    assert attention == {
        "q_a_proj": ((0, 7), (0, 32)),
        "q_a_layernorm": ((0, 7),),
        "q_b_proj": ((12, 24), (0, 7)),
        "kv_a_proj_with_mqa": ((0, 7), (0, 32)),
        "kv_a_layernorm": ((0, 5),),
        "kv_b_proj": ((14, 28), (0, 5)),
        "o_proj": ((0, 32), (6, 12)),
    }


def test_parameters_placed_alike_share_one_placement():
    """Of the largest table, on 1024 ranks: schedules are computed once per placement."""
    spec, layout = model_spec(ModelConfig.load("deepseek-v3")), Layout.parse("d64e64p16@0-1023")
    placements = spec.placements(layout)
    assert len(placements) == len(spec.params) > 45_000 and 0 < len(spec.held_by(layout, 5)) < 100
    assert len({id(placement) for placement in placements}) == len(set(placements)) < 2500


@pytest.mark.parametrize("layout", ["@0", "d3@0-2", "t2@0-1", "t4@0-3", "t8@0-7", "p5@0-4", "d2t2p3@0-11"])
@pytest.mark.parametrize("tied", [True, False])
def test_regions_cover_every_element_with_one_multiplicity(layout, tied):
    spec, layout = model_spec(small(tied=tied)), Layout.parse(layout)
    covered = {p.name: np.zeros(p.shape, int) for p in spec.params}
    primary = {p.name: np.zeros(p.shape, int) for p in spec.params}
    for rank in layout.ranks:
        held = spec.held_by(layout, rank)
        for p in spec.params:
            if p.name in held:
                covered[p.name][box(held[p.name])] += 1
                if spec.is_primary(p, layout, layout.coordinate(rank)):
                    primary[p.name][box(held[p.name])] += 1
    for p in spec.params:
        copies = layout.dp
        if p.name.endswith("norm.weight"):
            copies *= layout.tp
        if "k_proj" in p.name or "v_proj" in p.name:
            copies *= max(1, layout.tp // spec.config.num_kv_heads)
        if "embed" in p.name and tied and layout.pp > 1:
            copies *= 2
        assert (covered[p.name] == copies).all(), p.name
        assert (primary[p.name] == layout.dp).all(), p.name


def test_who_is_outside_holds_nothing():
    assert model_spec(small()).held_by(Layout.parse("t2@2-3"), 0) == {}


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 8), (12, 4), (6, 1)])
def test_query_heads_find_their_kv_heads_on_the_same_rank(heads, kv_heads):
    spec = model_spec(small(heads=heads, kv_heads=kv_heads))
    by_name = {p.name.removeprefix("model.layers.0."): p for p in spec.params}
    tried = 0
    for tp in range(1, heads + 1):
        try:
            spec.config.check_layout(Layout.parse(f"t{tp}@0-{tp - 1}"))
        except ValueError:
            continue
        tried += 1
        for index in range(tp):
            q, k, v, o = (by_name[f"self_attn.{n}_proj.weight"].region(tp, index) for n in "qkvo")
            held = {row // 4 for row in range(*k[0])}  # head_dim is 4
            needed = {row // 4 * kv_heads // heads for row in range(*q[0])}
            assert held == needed and k == v and o[1] == q[0]
            assert by_name["self_attn.k_proj.bias"].region(tp, index) == (k[0],)
            up, down = (by_name[f"mlp.{n}_proj.weight"].region(tp, index) for n in ("up", "down"))
            assert up[0] == down[1]
    assert tried >= 3


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sharers_hold_equal_regions(tp):
    for p in model_spec(small()).params:
        regions = [p.region(tp, i) for i in range(tp)]
        for i in range(tp):
            assert p.sharers(tp, i) == tuple(j for j in range(tp) if regions[j] == regions[i])
        # a norm is computed in full by everybody; a kv head by each of its sharers for its own query heads
        partial = p.has_partial_gradient(tp)
        assert partial == ("norm" not in p.name and len(p.sharers(tp, 0)) > 1)


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_stages_hold_consecutive_layers_and_the_ends(pp):
    spec, layout = model_spec(small(tied=False)), Layout.parse(f"p{pp}@0-{pp - 1}")
    layers = []
    for stage in range(pp):
        names = spec.held_by(layout, stage)
        here = sorted({int(n.split(".")[2]) for n in names if n.startswith("model.layers.")})
        assert here == list(spec.stage_layers(layout.strategy, stage)) and here
        layers += here
        assert ("model.embed_tokens.weight" in names) == (stage == 0)
        assert ("model.norm.weight" in names) == ("lm_head.weight" in names) == (stage == pp - 1)
    assert layers == list(range(5))


def test_interleaved_stages_hold_chunks_in_turn():
    """As in Megatron-LM: with 8 layers on 2 stages, chunks of 2 layers alternate between the stages."""
    spec, layout = model_spec(small(layers=8)), Layout.parse("p2v2@0-1")
    assert spec.chunk_layers(layout.strategy, 0) == [range(2), range(4, 6)]
    assert spec.chunk_layers(layout.strategy, 1) == [range(2, 4), range(6, 8)]
    held = [spec.held_by(layout, rank) for rank in layout.ranks]
    for stage, layers in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        assert sorted({int(n.split(".")[2]) for n in held[stage] if n.startswith("model.layers.")}) == layers
    for param, placement in zip(spec.params, spec.placements(layout), strict=True):
        holders = tuple(rank for rank in layout.ranks if param.name in held[rank])
        assert placement == ((param.region(1, 0), holders),)
        primary = [rank for rank in holders if spec.is_primary(param, layout, layout.coordinate(rank))]
        assert primary == [holders[0]]
