"""The parameter table: sizes of known models, transformers' own names and shapes, who holds what."""

import numpy as np
import pytest

from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec


def small(*, heads=8, kv_heads=2, layers=5, tied=True, head="lm", family="Qwen2"):
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
    }
    return ModelConfig.from_hf(hf, head=head)


def box(region):
    return tuple(slice(start, stop) for start, stop in region)


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-70b", 68_976_648_192),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_sizes_of_known_models(name, numel):
    assert model_spec(ModelConfig.load(name)).numel == numel


@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(tied=False),
        small(family="Llama", kv_heads=8),
        small(family="Llama", head="score"),
        small(head="score"),
    ],
)
def test_names_and_shapes_are_those_of_transformers(config):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf = config.to_hf()
    hf_config = transformers.AutoConfig.for_model(**hf)
    with torch.device("meta"):
        model = getattr(transformers, hf["architectures"][0])(hf_config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {p.name: p.shape for p in model_spec(config).params} == theirs


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
