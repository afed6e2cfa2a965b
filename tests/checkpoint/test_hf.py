"""Loading and saving of Hugging Face directories: families, layouts, and errors for broken directories."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from realhf.checkpoint.hf import CheckpointWriter, assign_writes, load_weights, read_shards, save_weights
from realhf.devices.half_precision import joined, split_into
from realhf.distributed.pieces import one_piece_each, shards_of
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_size
from tests.families import CASES, MOE_CASES
from tests.nn.tiny import SEQ_LENS, build, hf_config, tokens

EVERY = CASES | MOE_CASES
CHOICE_BIAS = "e_score_correction_bias"

def _save_by_transformers(directory, case, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**EVERY[case].hf())
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for module in model.modules():
        if hasattr(module, CHOICE_BIAS):  # In float32 in a model of any dtype, as from_pretrained has it.
            setattr(module, CHOICE_BIAS, torch.randn_like(getattr(module, CHOICE_BIAS), dtype=torch.float32))
    model.save_pretrained(directory, **options)


def _all_tensors(directory):
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _differing(theirs, ours):
    """Return the names of tensors that differ, or exist on one side only."""
    both = theirs.keys() & ours.keys()
    same = {n for n in both if theirs[n].dtype == ours[n].dtype and torch.equal(theirs[n], ours[n])}
    return (theirs.keys() | ours.keys()) - same


def _copy(world, source, target, dtype, layout, leader=0, max_shard_bytes=5 * 10**9):
    """Read and write this rank's shard in a layout; return the parameters that the files lack."""
    layout, spec = Layout.parse(layout), model_spec(ModelConfig.load(str(source)))
    regions = spec.held_by(layout, world.rank)
    shards = shards_of(torch.full((sum(map(region_size, regions.values())),), -1.0, dtype=dtype), regions)
    missing = read_shards(source, spec, one_piece_each(shards, regions)) if shards else []
    if shards or world.rank == leader:
        options = {"dtype": dtype, "leader": leader, "max_shard_bytes": max_shard_bytes}
        writer = CheckpointWriter(spec, layout, world, **options)
        writer.write(target, one_piece_each(shards, regions), beside={})
    return missing


@pytest.mark.parametrize("case", ["gpt2", "deepseek-v3"])
def test_bfloat16_comes_out_as_transformers_wrote_it(tmp_path, case):
    source, target = tmp_path / "source", tmp_path / "target"
    _save_by_transformers(source, case)
    assert _copy(World(), source, target, torch.bfloat16, "d1@0") == []
    assert not _differing(load_file(source / "model.safetensors"), load_file(target / "model.safetensors"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(target, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_float32_in_a_bfloat16_model(tmp_path):
    """The bias of DeepSeek's choice of experts stays float32 in memory, when moved, and in files."""
    _save_by_transformers(tmp_path / "theirs", "deepseek-v3")
    config = ModelConfig.load(str(tmp_path / "theirs"))
    model = build(config.to_hf(), dtype=torch.bfloat16)
    load_weights(tmp_path / "theirs", model)
    save_weights(tmp_path / "ours", model)
    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    biases = {name: tensor for name, tensor in theirs.items() if name.endswith(CHOICE_BIAS)}
    assert len(biases) == 3 and {tensor.dtype for tensor in biases.values()} == {torch.float32}
    assert not _differing(theirs, ours)
    for name, bias in biases.items():
        assert not torch.equal(bias, bias.bfloat16().float())
        assert torch.equal(joined(model.shards()[name].float().bfloat16()), bias)  # (The optimizer's copy.)
        moe = model.blocks[int(name.split(".")[2])].mlp
        assert torch.equal(joined(moe.choice_bias), bias)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert {b.dtype for n, b in again.named_buffers() if n.endswith(CHOICE_BIAS)} == {torch.float32}


@pytest.mark.parametrize("dtype, lost", [
    (torch.float64, 0), (torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 2**-25)])
def test_parts_add_up_to_the_values(dtype, lost):
    values = torch.cat([torch.randn(1000) * scale for scale in (1, 1e-3, 30)])
    values = torch.cat([values, torch.tensor([0.0, 1.0, 1 - 2**-24, 2 - 2**-23, -(1 + 2**-23)])])
    parts = torch.empty(3, len(values), dtype=dtype)
    split_into(parts, values)
    assert (joined(parts) - values).abs().max() <= lost


@pytest.mark.parametrize("layout", ["t2p2@0-3", "d2t2@0-3"])
@pytest.mark.parametrize("case", ["gpt2", "phi-3"])  # Fused and transposed; fused.
def test_layouts_read_and_write_sharded_files(pool, tmp_path, case, layout):
    source, target = tmp_path / "source", tmp_path / "target"
    _save_by_transformers(source, case, max_shard_size="20KB")
    assert not any(pool.run(_copy, source, target, torch.bfloat16, layout, 0, 20_000))
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    theirs, ours = (_all_tensors(d) for d in (source, target))
    assert not _differing(theirs, ours)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in ours.values())
    assert index["weight_map"].keys() == ours.keys() and set(index["weight_map"].values()) == set(files)
    for file in files:
        assert sum(t.nbytes for t in load_file(target / file).values()) <= 20_000
    assert {path.name for path in target.iterdir()} == {*files, "config.json", "model.safetensors.index.json"}
    transformers.AutoModelForCausalLM.from_pretrained(target)


@pytest.mark.parametrize("layout", ["d2e2t2@0-3", "p2d2e2@0-3"])
def test_layouts_read_and_write_experts(pool, tmp_path, layout):
    source, target = tmp_path / "source", tmp_path / "target"
    _save_by_transformers(source, "deepseek-v3", max_shard_size="20KB")
    assert not any(pool.run(_copy, source, target, torch.bfloat16, layout, 0, 20_000))
    assert not _differing(*(_all_tensors(d) for d in (source, target)))


def _copy_between_hosts(world, source, target, layout):
    store = dist.PrefixStore(f"hosts/{layout}", world._store)
    hosts = {"ranks_per_host": 2, "shared_memory": False}
    world = World(rank=world.rank, size=4, store=store, timeout_seconds=60, **hosts)
    target = target / str(world.rank // 2)  # Each host has its own disk.
    return _copy(world, source, target, torch.bfloat16, layout)


@pytest.mark.parametrize("layout", ["t2@2-3", "t4@0-3", "p2@1-2", "d2t2@0-3"])
def test_only_the_leaders_host_writes(pool, tmp_path, layout):
    source, target = tmp_path / "source", tmp_path / "target"
    _save_by_transformers(source, "gpt2")
    assert not any(pool.run(_copy_between_hosts, source, target, layout))
    assert not _differing(*(load_file(d / "model.safetensors") for d in (source, target / "0")))
    assert not (target / "1").exists()


def test_long_rows_are_read_piece_by_piece(pool, tmp_path):
    config = transformers.AutoConfig.for_model(**EVERY["llama"].hf(intermediate_size=5000, vocab_size=8))
    source, target = tmp_path / "source", tmp_path / "target"
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(source)
    assert not any(pool.run(_copy, source, target, torch.bfloat16, "t4@0-3"))
    assert not _differing(*(load_file(d / "model.safetensors") for d in (source, target)))


def test_replicas_share_the_writing_evenly():
    spec = model_spec(ModelConfig.from_hf(hf_config()))
    jobs = assign_writes(spec, Layout.parse("d4@0-3"), range(4))
    assert all(job.sender == job.writer for job in jobs)
    written = [sum(region_size(job.region) for job in jobs if job.writer == rank) for rank in range(4)]
    assert sum(written) == spec.numel and max(written) - min(written) <= max(p.numel for p in spec.params)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_cast(tmp_path, stored, dtype):
    save_weights(tmp_path, build(hf_config(), dtype=stored))
    model = build(hf_config(), dtype=dtype)
    load_weights(tmp_path, model)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.dtype == stored and torch.equal(tensor.to(dtype), model.shards()[name])
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")


def test_transformers_computes_the_same(tmp_path):
    model = build(hf_config(), dtype=torch.float32)
    save_weights(tmp_path, model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = torch.cat([reference(part[None]).logits[0] for part in tokens().split(SEQ_LENS)])
    torch.testing.assert_close(model.logits(model(tokens(), SEQ_LENS)), expected, rtol=1e-4, atol=1e-4)


def test_memory_can_go_and_come_back(directory):
    """A model's memory can be freed and allocated again after loading and saving, as offloading does."""
    memory = torch.zeros(build(hf_config()).flat.numel())
    model = build(hf_config(), dtype=torch.float32, memory=memory)
    load_weights(directory, model)
    values = memory.clone()
    save_weights(directory / "again", model)
    memory.untyped_storage().resize_(0)
    memory.untyped_storage().resize_(values.nbytes)
    load_weights(directory / "again", model)
    assert torch.equal(memory, values) and values.any()


def test_a_directory_with_a_config_is_whole(tmp_path):
    model = build(hf_config(), dtype=torch.float32)
    save_weights(tmp_path, model, max_shard_bytes=20_000, beside={"README.md": "one", "a/b.txt": "two"})
    assert len(list(tmp_path.glob("model-*"))) > 3 and (tmp_path / "a" / "b.txt").read_text() == "two"
    with pytest.raises(OSError, match="nowhere"):
        save_weights(tmp_path, model, beside={"README.md": Path("nowhere")})
    assert not (tmp_path / "config.json").exists()
    save_weights(tmp_path, model)
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {"README.md", "model.safetensors", "config.json"}
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    load_weights(tmp_path, model)
    save_weights(tmp_path, model)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.*")}


# Further contents of checkpoints


@pytest.fixture
def directory(tmp_path):
    """Return a model directory of one file."""
    save_weights(tmp_path, build(hf_config(), dtype=torch.float32))
    return tmp_path


def _rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt2"])
def test_base_models_have_no_prefix(tmp_path, case):
    _save_by_transformers(tmp_path / "lm", case)
    _save_by_transformers(tmp_path / "base", case)
    tensors = load_file(tmp_path / "lm" / "model.safetensors")
    base = {re.sub(r"^(model|transformer)\.", "", name): tensor for name, tensor in tensors.items()}
    base |= {f"h.{i}.attn.{n}": torch.ones(1, 1, 9, 9) for i in range(4) for n in ("bias", "masked_bias")}
    base |= {f"layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    save_file(base, tmp_path / "base" / "model.safetensors")
    assert _copy(World(), tmp_path / "base", tmp_path / "out", torch.bfloat16, "d1@0") == []
    assert not _differing(tensors, load_file(tmp_path / "out" / "model.safetensors"))


def test_a_tied_head_may_be_there_twice(directory):
    tied = build(hf_config(tied=True), dtype=torch.float32)
    wanted = load_file(directory / "model.safetensors")["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lm_head.weight differs .* set it to false"):
        load_weights(directory, tied)
    _rewrite(directory, lambda tensors: tensors.update({"model.embed_tokens.weight": wanted.clone()}))
    assert load_weights(directory, tied) == []
    _rewrite(directory, lambda tensors: {k: v for k, v in tensors.items() if "embed_tokens" not in k})
    tied.flat.zero_()
    assert load_weights(directory, tied) == []
    assert torch.equal(tied.shards()["model.embed_tokens.weight"], wanted)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path, capsys):
    _save_by_transformers(tmp_path / "source", "deepseek-v3")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    more = {f"model.layers.{i}.{n}.weight": torch.ones(3) for i in (4, 5) for n in ("eh_proj", "enorm")}
    save_file(tensors | more, tmp_path / "source" / "model.safetensors")
    assert _copy(World(), tmp_path / "source", tmp_path / "out", torch.bfloat16, "d1@0") == []
    assert not _differing(tensors, load_file(tmp_path / "out" / "model.safetensors"))
    assert capsys.readouterr().err.endswith(": layers past num_hidden_layers 4 are left out: 4, 5\n")


def test_score_head_from_a_language_model_and_back(directory):
    model = build(hf_config(), head="score", dtype=torch.float32)
    before = model.shards()["score.weight"].clone()
    assert load_weights(directory, model) == ["score.weight"]
    assert torch.equal(model.shards()["score.weight"], before) and before.any()
    save_weights(directory / "critic", model)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    critic, info = load(directory / "critic", output_loading_info=True)
    assert torch.equal(critic.score.weight, before)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    critic.save_pretrained(directory / "again")
    model.flat.zero_()
    assert load_weights(directory / "again", model) == []
    assert torch.equal(model.shards()["score.weight"], before)
    tied = build(hf_config(tied=True), dtype=torch.float32)  # Back: the head is the embedding.
    assert load_weights(directory / "again", tied) == []


# Error -> change of the tensors, words of the message.
TENSORS = {
    "missing": (
        lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"},
        "parameter model.norm.weight is in none of the safetensors files",
    ),
    "no head": (
        lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"},
        "parameter lm_head.weight is in none",
    ),
    "shape": (
        lambda t: t | {"model.norm.weight": torch.ones(33)},
        "model.safetensors: tensor model.norm.weight has shape (33,); the config says (32,)",
    ),
    "unknown": (
        lambda t: t | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)},
        "model.safetensors: a qwen2 model has no parameter model.layers.0.self_attn.q_norm.weight",
    ),
    "dtype": (
        lambda t: t | {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)},
        "model.norm.weight has dtype F8_E4M3: supported are F64, F32, BF16, F16; dequantise the checkpoint",
    ),
    "integers": (
        lambda t: t | {"model.norm.weight": torch.ones(32, dtype=torch.int8)},
        "model.norm.weight has dtype I8: supported are",
    ),
    "twice": (
        lambda t: t | {"norm.weight": torch.ones(32)},
        "has model.norm.weight twice, with and without the prefix 'model.'",
    ),
}


@pytest.mark.parametrize("fault", TENSORS)
def test_wrong_tensors_are_named(directory, fault):
    change, says = TENSORS[fault]
    _rewrite(directory, change)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        load_weights(directory, build(hf_config()))
    assert "\n" not in str(caught.value)


def test_fused_tensors_have_their_whole_shape(tmp_path):
    _save_by_transformers(tmp_path, "gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    _rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name].T.contiguous()})
    with pytest.raises(ValueError, match=rf"{name} has shape \(96, 32\); the config says \(32, 96\)"):
        _copy(World(), tmp_path, tmp_path / "out", torch.bfloat16, "d1@0")


def test_reward_models_have_one_label(directory):
    _rewrite(directory, lambda tensors: tensors | {"score.weight": torch.ones(3, 32)})
    with pytest.raises(ValueError, match="score.weight has 3 rows: .* num_labels 1"):
        load_weights(directory, build(hf_config(), head="score"))
    assert load_weights(directory, build(hf_config())) == []


def test_quantised_checkpoints_are_named(directory):
    with pytest.raises(ValueError, match="config.json says that the checkpoint is quantised: dequantise it"):
        load_weights(directory, build(hf_config() | {"quantization_config": {"quant_method": "fp8"}}))


def _header(text, length=None):
    raw = text.encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


ENTRY = '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [%d, %d]}}'

# Error -> the file's bytes, words of the message.
FILES = {
    "empty": (b"", "model.safetensors is truncated: its header ends at byte 8, the file at 0"),
    "no header": (_header("{}", 500), "is truncated: its header ends at byte 508, the file at 10"),
    "text": (b"version of a text, not weights", "no safetensors file: its header would have"),
    "no JSON": (_header("{]"), "is corrupt: its header is no JSON object"),
    "a list": (_header("[]"), "is corrupt: its header is no JSON object"),
    "no fields": (_header('{"a": {}}'), "is corrupt: its header does not say what tensor a is"),
    "offsets": (_header(ENTRY % (0, 4)) + bytes(4), "is corrupt: tensor a, F32 of shape (2,), has 4 bytes"),
    "a hole": (_header(ENTRY % (4, 12)) + bytes(12), "is corrupt: tensor a starts at byte "),
    "short": (_header(ENTRY % (0, 8)) + bytes(7), "is truncated: its tensors end at byte "),
    "long": (_header(ENTRY % (0, 8)) + bytes(9), "is corrupt: its tensors end at byte "),
    "a nest": (_header("[" * 100_000), "is corrupt: its header is no JSON object"),
    "a list as dtype": (
        _header('{"a": {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]}}') + bytes(4),
        "is corrupt: its header does not say what tensor a is",
    ),
    "a list as shape": (
        _header('{"a": {"dtype": "F32", "shape": [[1]], "data_offsets": [0, 4]}}') + bytes(4),
        "is corrupt: its header does not say what tensor a is",
    ),
    "a new dtype": (_header('{"a": {"dtype": "F7", "shape": [], "data_offsets": [0, 0]}}'), "dtype 'F7'"),
}


@pytest.mark.parametrize("fault", FILES)
def test_broken_files_are_named(directory, fault):
    content, says = FILES[fault]
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        load_weights(directory, build(hf_config()))
    assert str(caught.value).startswith(str(directory / "model.safetensors"))


def test_a_file_that_shrinks_is_named(directory, monkeypatch):
    model = build(hf_config())
    monkeypatch.setattr("os.preadv", lambda *_: 0)  # The kernel's answer behind the end of a file.
    with pytest.raises(ValueError, match="model.safetensors is truncated: it ends before byte"):
        load_weights(directory, model)


# Error -> the index, given the names of the tensors; words of the message.
INDICES = {
    "no JSON": (lambda names: "{", "index.json is not JSON: "),
    "a nest": (lambda names: "[" * 100_000, "index.json is nested too deeply"),
    "a list": (lambda names: [], "index.json is not a JSON object"),
    "no map": (lambda names: {"metadata": {}}, "it needs an object weight_map"),
    "lacks a file": (
        lambda names: {"weight_map": names | {"lm_head.weight": "gone.safetensors"}},
        "index.json names the file gone.safetensors, which is missing",
    ),
    "lacks an entry": (
        lambda names: {"weight_map": {n: file for n, file in names.items() if n != "lm_head.weight"}},
        "index.json has no entry for tensor lm_head.weight, which all.safetensors holds",
    ),
    "lacks a tensor": (
        lambda names: {"weight_map": names | {"lm_head.weight": "norm.safetensors"}},
        "index.json promises tensor lm_head.weight in norm.safetensors, where it is not",
    ),
    "a long name": (
        lambda names: {"weight_map": names | {"lm_head.weight": "x" * 3000}},
        "xxx: files must lie beside it",
    ),
    "outside": (
        lambda names: {"weight_map": names | {"lm_head.weight": "../gone.safetensors"}},
        "index.json names the file ../gone.safetensors: files must lie beside it",
    ),
}


@pytest.mark.parametrize("fault", INDICES)
def test_broken_indices_are_named(directory, fault):
    index, says = INDICES[fault]
    (directory / "model.safetensors").rename(directory / "all.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, directory / "norm.safetensors")
    model = build(hf_config())
    found = index(dict.fromkeys(model.shards(), "all.safetensors"))
    path = directory / "model.safetensors.index.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    with pytest.raises(ValueError, match=re.escape(says)):
        load_weights(directory, model)
    path.write_text(json.dumps({"weight_map": dict.fromkeys(model.shards(), "all.safetensors")}))
    assert load_weights(directory, model) == []


def test_directories_without_safetensors_are_named(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no model.safetensors and no model.safetensors.index.json"):
        load_weights(directory, build(hf_config()))
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"pickled .*save_pretrained\(directory, safe_serialization=True\)"):
        load_weights(directory, build(hf_config()))
    shutil.rmtree(directory)
    with pytest.raises(ValueError, match="has no model.safetensors"):
        load_weights(directory, build(hf_config()))
