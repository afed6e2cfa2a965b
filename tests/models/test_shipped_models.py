"""Shipped model configs: every name loads, and has the number of parameters that its checkpoint has."""

import json
from dataclasses import replace

import pytest

from realhf.layout import Layout
from realhf.models.families import FAMILIES
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_size
from realhf.user_input.shipped import resolve, shipped_dir
from tests.families import CASES, MOE_CASES, SIZES
from tests.samples import drawn

NUM_PARAMS = {
    "codellama-34b": 33_743_970_304,
    "deepseek-v3": 671_026_419_200,  # Without the layer that predicts a second token.
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472 - 419_816_304,  # The second number: SigLIP and the projector, here and below.
    "gemma-3-12b": 12_187_325_040 - 421_290_864,
    "gemma-3-27b": 27_432_406_640 - 423_060_336,
    "glm-4-9b": 9_400_279_040,
    "gpt2": 124_439_808,
    "granite-3.3-8b": 8_170_864_640,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,  # The checkpoints of 0.6 B and 1.7 B repeat the tied head.
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "smollm3-3b": 3_075_098_624,
}
"""Elements in the published checkpoint. A tied embedding counts once, rotary buffers do not count."""


def test_every_shipped_config_loads_by_its_name():
    names = {path.name.removesuffix(".json") for path in shipped_dir("models").iterdir()}
    assert names == {*NUM_PARAMS, "tiny"}
    for name in names:
        config = ModelConfig.load(name)
        config.check_layout(Layout.parse("t2p2@0-3"))
        assert config.head == "lm" and config.eos_token_ids


@pytest.mark.parametrize(("name", "num_params"), NUM_PARAMS.items())
def test_parameter_tables_have_the_published_size(name, num_params):
    assert model_spec(ModelConfig.load(name)).numel == num_params


@pytest.mark.parametrize(("name", "num_params"), drawn(NUM_PARAMS.items(), 8))
def test_transformers_makes_models_of_the_published_size(name, num_params):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf = json.loads(resolve(name, kind="models", suffix=".json").read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    biases = (b for at, b in model.named_buffers() if at.endswith("e_score_correction_bias"))
    assert sum(tensor.numel() for tensor in (*model.parameters(), *biases)) == num_params
    assert [type(model).__name__] == hf["architectures"]


SMOLLM3 = {"model_type": "smollm3", "num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 16}
CONFIGS = {
    **{name: case.hf() for name, case in {**CASES, **MOE_CASES}.items()},
    **{name: json.loads(resolve(name, kind="models", suffix=".json").read_text()) for name in NUM_PARAMS},
    "smollm3-windows": {**SIZES, **SMOLLM3},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_and_rotary_parameters_are_those_that_transformers_reads(name):
    transformers = pytest.importorskip("transformers")
    hf = CONFIGS[name]
    theirs = transformers.AutoConfig.for_model(**hf)
    family = FAMILIES[hf["model_type"]]
    config = ModelConfig.from_hf({**hf, "architectures": [family.architecture("lm")]})
    window, types = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None)
    if types is None:  # Then transformers' classes take the window for all layers, or have none.
        slides = hf["model_type"] in ("mistral", "mixtral", "phi3") and window
        types = ["sliding_attention" if slides else "full_attention"] * config.num_layers
    windows = [window if kind == "sliding_attention" else None for kind in types]
    assert [config.window(i) for i in range(config.num_layers)] == windows
    no_rope = getattr(theirs, "no_rope_layers", [1] * config.num_layers)
    assert config.rope_layers == (() if all(no_rope) else tuple(map(bool, no_rope)))
    if config.positions == "rope":
        kinds = theirs.rope_parameters
        kinds = kinds if any(isinstance(rope, dict) for rope in kinds.values()) else {"": kinds}
        ours = config.rope_kinds()
        assert ours.keys() == kinds.keys()
        for kind, rope in kinds.items():  # (longrope's boundary is taken from transformers' config.)
            for key in rope.keys() - {"type", "original_max_position_embeddings"}:
                assert ours[kind][key] == rope[key], (kind, key)


@pytest.mark.parametrize("name", [name for name in NUM_PARAMS if ModelConfig.load(name).moe is not None])
@pytest.mark.parametrize("text", ["d1@0", "t4@0-3", "d8e8@0-7", "d4e4t2@0-7"])
def test_weights_of_experts_are_aligned(name, text):
    """torch's grouped kernel wants 16 bytes, or 8 elements in 16 bits; weights elsewhere would be copied."""
    layout = Layout.parse(text)
    spec = model_spec(replace(ModelConfig.load(name), num_layers=6))
    parts = {param.name: param.short_name for param in spec.params}
    for rank in (layout.ranks[0], layout.ranks[-1]):
        starts = {}
        start = 0
        for param, region in spec.held_by(layout, rank).items():
            starts.setdefault((spec.layer_of[param], parts[param]), start)
            start += region_size(region)
        experts = {key: start for key, start in starts.items() if key[1].startswith("expert_")}
        assert len(experts) >= 2 and not any(start % 8 for start in experts.values())
