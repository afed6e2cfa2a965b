"""Adapters against PEFT on one process, layouts against one process, and PEFT directories.

PEFT is imported where it is used: it takes seconds, and worker processes do without it.
"""

import json
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realhf.checkpoint.hf import load_adapters, load_weights, save_weights
from realhf.checkpoint.peft import resolved
from realhf.distributed.world import ParallelGroups, World
from realhf.layout import Layout
from realhf.models.lora import LoraConfig, adapter_spec, legal_targets
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.nn.lora import Adapters
from realhf.nn.transformer import Transformer
from tests.families import CASES, MOE_CASES
from tests.nn.test_layouts import _pass_through
from tests.nn.tiny import SEQ_LENS, backward_of_both, compare, hf_config, step, tokens
from tests.samples import marked

FAMILIES = ("llama", "llama-bias", "qwen3", "phi-3", "gpt2", "gemma-2", "glm-4")
LAYOUTS = ("t4@0-3", "p2@0,1", "t2p2@0-3")


def build(config, lora, *, world=None, layout="d1@0", dtype=torch.float64):
    """Return a random base model with random adapters whose products are not zero."""
    groups = ParallelGroups.create(world or World(), Layout.parse(layout))
    adapters = Adapters(config, lora, groups, dtype=dtype)
    model = Transformer(model_spec(config), groups, dtype=dtype, adapters=adapters)
    model.init_random(seed=3)
    adapters.init_random(seed=4)
    for param in adapters.spec.params:
        if param.short_name.endswith("lora_B") and param.name in adapters.regions:
            generator = torch.Generator().manual_seed(len(param.name))
            whole = torch.empty(param.shape).normal_(0.0, 0.1, generator=generator)
            index = tuple(slice(*extent) for extent in adapters.regions[param.name])
            adapters.shards()[param.name].copy_(whole[index])
    return model


def by_peft(directory, name, *, head="lm", **settings):
    """Return transformers' model in float32 with PEFT's adapters, saved to base/ and adapter/."""
    import peft

    torch.manual_seed(0)
    case = (CASES | MOE_CASES)[name]
    hf = case.hf(attn_implementation="eager", **({} if head == "lm" else {"num_labels": 1}))
    auto = "AutoModelForCausalLM" if head == "lm" else "AutoModelForSequenceClassification"
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(**hf))
    model.save_pretrained(directory / "base")
    task = "CAUSAL_LM" if head == "lm" else "SEQ_CLS"
    settings = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"} | settings
    config = peft.LoraConfig(task_type=task, fan_in_fan_out=name == "gpt2", **settings)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, weight in adapted.named_parameters():
            if "lora_B" in key:
                weight.normal_(0.0, 0.1)
    adapted.save_pretrained(directory / "adapter")
    return adapted.eval()


def ours(directory, *, dtype=torch.float32, head="lm", world=None, layout="d1@0"):
    config = ModelConfig.load(str(directory / "base"), head=head)
    lora = resolved(LoraConfig(adapter=str(directory / "adapter")))
    model = build(config, lora, dtype=dtype, world=world, layout=layout)
    load_weights(directory / "base", model)
    load_adapters(directory / "adapter", model.adapters)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(tmp_path, name):
    reference, model, ids = by_peft(tmp_path, name), ours(tmp_path), tokens()
    model.adapters.enable_grad()
    torch.testing.assert_close(*backward_of_both(model, reference, ids), rtol=1e-4, atol=1e-4)
    grads = {key.replace(".default", ""): weight.grad for key, weight in reference.named_parameters()}
    for param in model.adapters.spec.params:
        rows = slice(param.in_file.start, param.in_file.start + param.shape[0])
        theirs = grads[param.in_file.name]
        scale = theirs.abs().max()
        assert scale > 0
        grad = model.adapters.grad_shards()[param.name]
        torch.testing.assert_close(grad / scale, theirs[rows] / scale, rtol=0, atol=2e-4, msg=param.name)
    assert not any(weight.requires_grad for weight in model.weights())


def test_scores_are_those_of_peft(tmp_path):
    import peft

    reference, ids = by_peft(tmp_path, "llama", head="score"), tokens()
    model = ours(tmp_path, head="score")
    scores = model.scores(model(ids, SEQ_LENS)).split(SEQ_LENS)
    for part, score in zip(ids.split(SEQ_LENS), scores, strict=True):
        torch.testing.assert_close(score[-1], reference(part[None]).logits[0, 0], rtol=1e-4, atol=1e-4)
    save_weights(tmp_path / "again", model.adapters, base="base")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "again")
    torch.testing.assert_close(again(ids[None]).logits, reference(ids[None]).logits, rtol=1e-5, atol=1e-5)


def _save(world, directory, layout):
    if world.rank in Layout.parse(layout):
        save_weights(directory / layout, ours(directory, world=world, layout=layout).adapters, base="base")


@pytest.mark.parametrize("name", ["qwen3", "phi-3", "gpt2"])
def test_directories_are_peft_directories(pool, tmp_path, name):
    import peft

    reference, ids = by_peft(tmp_path, name, use_rslora=True), tokens()
    theirs = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for layout in ("d1@0", "t2@0-1", "p2@0-1", "t2p2@0-3"):
        pool.run(_save, tmp_path, layout)
        saved = load_file(tmp_path / layout / "adapter_model.safetensors")
        assert saved.keys() == theirs.keys() and all(torch.equal(theirs[key], saved[key]) for key in saved)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    opened = peft.PeftModel.from_pretrained(plain, tmp_path / "t2p2@0-3")
    torch.testing.assert_close(opened(ids[None]).logits, reference(ids[None]).logits, rtol=1e-5, atol=1e-5)
    files = (tmp_path / directory / "adapter_config.json" for directory in ("d1@0", "adapter"))
    kept, given = (json.loads(file.read_text()) for file in files)
    for settings in (kept, given):
        settings["target_modules"] = set(settings["target_modules"])
        del settings["base_model_name_or_path"]
    assert kept["use_rslora"] and kept.items() <= given.items()


def _train(world, hf, lora, layout, recompute):
    if world.rank not in Layout.parse(layout):
        return None
    return step(build(ModelConfig.from_hf(hf), lora, world=world, layout=layout), recompute=recompute)


SOME = LoraConfig(rank=3, target_modules=("q_proj", "v_proj", "up_proj", "down_proj"))
ALL = LoraConfig(rank=3)
HF = {
    "qwen2": hf_config(),
    "phi-3": {"architectures": ["Phi3ForCausalLM"], **CASES["phi-3"].hf(rope_parameters=None)},
    "qwen2-moe": {"architectures": ["Qwen2MoeForCausalLM"], **MOE_CASES["qwen2-moe"].hf()},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], **MOE_CASES["deepseek-v3"].hf()},
}


@pytest.mark.parametrize(
    "family, lora, layout",
    marked([
        ("deepseek-v3", ALL, "e2c2@0-3"),
        ("qwen2-moe", ALL, "e2p2@0-3"),
        *(("qwen2", ALL, layout) for layout in ("t2@0,1", *LAYOUTS, "d2t2@0-3")),
        *(("qwen2", SOME, layout) for layout in LAYOUTS),
        *(("phi-3", LoraConfig(), layout) for layout in LAYOUTS),
    ], quick=(0, 2, 12)),
)
def test_layouts_compute_what_one_process_does(pool, layout, family, lora):
    hf = HF[family]
    alone = step(build(ModelConfig.from_hf(hf), lora))
    results = [r for r in pool.run(_train, hf, lora, layout, layout[0] == "t") if r is not None]
    assert compare(results, alone) == ([], set(range(sum(SEQ_LENS))))


def _merged_logits(world, hf, layout):
    lora = LoraConfig(rank=3)
    model, ids = build(ModelConfig.from_hf(hf), lora, world=world, layout=layout), tokens()
    before = model.flat.clone()
    forward = partial(_pass_through, model, (len(ids), 32), ids)
    with torch.no_grad():
        separate = forward(lambda x: model(x, SEQ_LENS))[1]
        with model.merged():
            merged = forward(lambda x: model(x, SEQ_LENS))[1]
        again = forward(lambda x: model(x, SEQ_LENS))[1]
        copy = model.merged_model()
        whole = forward(lambda x: copy(x, SEQ_LENS))[1]
    return torch.equal(before, model.flat), separate, merged, again, whole


@pytest.mark.parametrize("layout", ["d1@0", "t2p2@0-3", "t4@0-3"])
def test_merged_weights_compute_the_same_and_leave_nothing_behind(pool, layout):
    num_ranks = len(Layout.parse(layout).ranks)
    for unchanged, separate, merged, again, whole in pool.run(
        _merged_logits, hf_config(), layout, num_ranks=num_ranks
    ):
        assert unchanged and torch.equal(again, separate)
        assert not torch.equal(merged, separate) and torch.equal(whole, merged)
        torch.testing.assert_close(merged, separate, rtol=1e-10, atol=1e-10)


def test_a_merged_directory_is_a_whole_model(tmp_path):
    reference, ids = by_peft(tmp_path, "gpt2"), tokens()
    save_weights(tmp_path / "merged", ours(tmp_path).merged_model())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids[None]).logits, reference(ids[None]).logits, rtol=1e-4, atol=1e-4)


def test_the_other_kind_of_export_goes_first(tmp_path):
    """An export of adapters replaces a model of several files, and the reverse, with unfinished files."""
    model = build(ModelConfig.from_hf(hf_config()), LoraConfig(rank=3), dtype=torch.float32)
    save_weights(tmp_path, model, max_shard_bytes=20_000, beside={"README.md": "ours"})
    assert len(list(tmp_path.glob("model-*"))) > 3
    (tmp_path / "model-00001-of-00009.safetensors.part").touch()
    (tmp_path / "notes.part").touch()
    kept = {"README.md", "notes.part"}
    save_weights(tmp_path, model.adapters, base="base")
    adapters = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == kept | adapters
    (tmp_path / "adapter_config.json.part").touch()
    (tmp_path / "adapter_model.safetensors.part").touch()
    save_weights(tmp_path, model)
    assert {path.name for path in tmp_path.iterdir()} == kept | {"config.json", "model.safetensors"}


def test_first_values_are_those_of_peft():
    """A is drawn like Kaiming's with a = sqrt(5), uniform up to 1 / sqrt(in); B is zero."""
    config = ModelConfig.from_hf(hf_config())
    groups = ParallelGroups.create(World(), Layout.parse("d1@0"))
    adapters = Adapters(config, LoraConfig(rank=16), groups, dtype=torch.float32)
    adapters.init_random(seed=0)
    for param in adapters.spec.params:
        shard = adapters.shards()[param.name]
        if param.short_name.endswith("lora_B"):
            assert not shard.any()
            continue
        expected = torch.nn.init.kaiming_uniform_(torch.empty(param.shape), a=5**0.5)
        assert shard.abs().max() <= param.shape[1] ** -0.5
        assert shard.std() == pytest.approx(expected.std().item(), rel=0.1)


# The table


def _config(name):
    config = transformers.AutoConfig.for_model(**(CASES | MOE_CASES)[name].hf())
    architecture = transformers.AutoModelForCausalLM.from_config(config).__class__.__name__
    return config, ModelConfig.from_hf({**config.to_dict(), "architectures": [architecture]})


@pytest.mark.parametrize("name", [*CASES, *MOE_CASES])
def test_names_and_shapes_are_those_of_peft(name):
    import peft

    hf, config = _config(name)
    targets = tuple(legal_targets(config))
    shapes: dict[str, tuple[int, int]] = {}
    for param in adapter_spec(config, LoraConfig(rank=3, target_modules=targets)).params:
        rows, _ = shapes.get(param.in_file.name, (0, 0))
        shapes[param.in_file.name] = (rows + param.shape[0], param.shape[1])
    settings = peft.LoraConfig(r=3, target_modules=list(targets), fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(hf), settings)
    theirs = peft.get_peft_model_state_dict(model)
    assert shapes == {key: tuple(value.shape) for key, value in theirs.items()}


@pytest.mark.parametrize(
    "name, targets, message",
    [
        ("llama", ("q",), "has 'q': legal are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj"),
        ("phi-3", ("q_proj",), "has 'q_proj': legal are qkv_proj, o_proj, gate_up_proj, down_proj, or"),
        ("gpt2", ("lm_head",), "has 'lm_head': legal are c_attn, c_proj, c_fc, or all-linear"),
        ("qwen3-moe", ("q_proj", "up_proj"), "'up_proj': routed experts and routers cannot be targeted"),
        ("deepseek-v3", ("down_proj",), "'down_proj': routed experts and routers cannot be targeted"),
        ("mixtral", ("gate",), "'gate': routed experts and routers cannot be targeted; legal are q_proj"),
    ],
)
def test_wrong_targets_are_named(name, targets, message):
    with pytest.raises(ValueError, match=message):
        adapter_spec(_config(name)[1], LoraConfig(target_modules=targets))


@pytest.mark.parametrize("name, layer", [("llama", "k_proj"), ("phi-3", "o_proj"), ("gpt2", "c_attn")])
def test_no_rank_is_higher_than_the_smallest_layer(name, layer):
    hf, config = _config(name)
    model = transformers.AutoModelForCausalLM.from_config(hf)
    shapes = [w.shape for key, w in model.named_parameters() if w.ndim == 2 and f".{layer}." in key]
    most = min(map(min, shapes))
    adapter_spec(config, LoraConfig(rank=most, target_modules=(layer,)))
    adapter_spec(config, LoraConfig(rank=most + 1, target_modules=(layer,), adapter="trained with it"))
    message = f"lora.rank is {most + 1}: it must be at most {most}, the smaller dim of {layer}"
    with pytest.raises(ValueError, match=message):
        adapter_spec(config, LoraConfig(rank=most + 1, target_modules=(layer,)))


def test_target_modules_become_a_tuple():
    for given, kept in (
        (["q_proj", "v_proj"], ("q_proj", "v_proj")), ("q_proj", ("q_proj",)), ("all-linear", "all-linear"),
    ):
        assert LoraConfig(target_modules=given).target_modules == kept


@pytest.mark.parametrize(
    "field, value",
    [
        ("rank", 0), ("rank", 2.0), ("rank", True), ("rank", "8"), ("alpha", 0.0), ("alpha", "8"),
        ("alpha", float("nan")), ("target_modules", ()), ("target_modules", ""), ("target_modules", 5),
        ("target_modules", [5]),
    ],
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(ValueError, match=f"lora.{field} is"):
        LoraConfig(**{field: value})


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("use_dora", True, "use_dora is true; supported is false"),
        ("bias", "all", 'bias is "all"; supported is "none"'),
        ("rank_pattern", {"q_proj": 2}, 'rank_pattern is {"q_proj": 2}; supported is null'),
        ("layers_to_transform", [0], r"layers_to_transform is \[0\]; supported is null"),
        ("modules_to_save", ["lm_head"], r'modules_to_save is \["lm_head"\]; supported is null and'),
        ("modules_to_save", 5, r'modules_to_save is 5; supported is null and \["score"\]'),
        ("modules_to_save", [["score"]], r'modules_to_save is \[\["score"\]\]; supported is null'),
        ("r", True, "r is true; supported is a whole number of at least 1"),
        ("lora_alpha", "4", 'lora_alpha is "4"; supported is a number above 0'),
        ("use_rslora", "no", 'use_rslora is "no"; supported is true and false'),
        ("target_modules", ".*q_proj", 'target_modules is ".*q_proj"; supported is a list of names'),
        ("peft_type", "IA3", 'peft_type is "IA3"; supported is "LORA"'),
        ("init_lora_weights", "pissa", 'init_lora_weights is "pissa"; supported is true, false'),
        ("something_new", {"x": 1}, 'something_new is {"x": 1}; supported is null'),
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path, field, value, message):
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    settings["lora_dropout"] = 0.1
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert resolved(LoraConfig(adapter=str(tmp_path))).rank == 2
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {field: value}))
    with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
        resolved(LoraConfig(adapter=str(tmp_path)))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"rank": 3}, "lora.rank is 3, but .*adapter_config.json says 2: leave it out"),
        ({"alpha": 5.0}, "lora.alpha is 5.0, but .* says 4.0"),
        ({"use_rslora": True}, "lora.use_rslora is True, but .* says False"),
        ({"target_modules": ("q_proj",)}, r"lora.target_modules is \('q_proj',\), but .* says \('k_proj'"),
        ({"rank": 2, "alpha": 4.0, "target_modules": ("q_proj", "k_proj")}, None),
        ({}, None),
    ],
)
def test_settings_must_not_contradict_the_adapters(tmp_path, given, words):
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    lora = LoraConfig(adapter=str(tmp_path), **given)
    if words is None:
        assert resolved(lora).target_modules == ("k_proj", "q_proj")
        assert resolved(resolved(lora)) == resolved(lora)
        return
    with pytest.raises(ValueError, match=words):
        resolved(lora)


def test_wrong_tensors_are_named(tmp_path):
    by_peft(tmp_path, "llama")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, name = load_file(file), "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    for change, message in (
        ({name: torch.zeros(4, 32)}, rf"{name} has shape \(4, 32\); the config says \(3, 32\)"),
        ({"base_model.model.other.lora_A.weight": torch.zeros(3, 32)}, "is no adapter of this llama model"),
    ):
        save_file(tensors | change, file)
        with pytest.raises(ValueError, match=message):
            ours(tmp_path)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        ours(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="has no adapter_model.safetensors"):
        ours(tmp_path)
