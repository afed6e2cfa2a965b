"""`realhf merge`: adapters as peft merges them, means as a formula computes them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.checkpoint.merge import load_model
from realhf.cli.main import main
from tests.hub import model_repository

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    for name, content in model_repository().files.items():
        (directory / name).write_bytes(content)
    return directory


def others(base: Path, directory: Path, scale: float) -> Path:
    """Write a copy of the model with weights times `scale`."""
    model = AutoModelForCausalLM.from_pretrained(base)
    for tensor in model.parameters():
        tensor.data *= scale
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


def adapters(base: Path, directory: Path, *, use_rslora: bool) -> Path:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], use_rslora=use_rslora,
        init_lora_weights=False, task_type="CAUSAL_LM")
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    made.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters_are_merged_as_by_peft(base, tmp_path, use_rslora):
    directory = adapters(base, tmp_path / "adapters", use_rslora=use_rslora)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(directory).merge_and_unload().state_dict()
    assert main(["merge", str(directory), "-o", str(tmp_path / "merged")]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(ours[name], plain[name]) for name in ours)


def test_models_are_averaged(base, tmp_path):
    run = tmp_path / "run/hf"
    models = [others(base, run / f"step_{step}", scale) for step, scale in ((2, 1.0), (9, 3.0), (10, 5.0))]
    plain = load_model(models[0]).state_dict()

    def factor(*words: str) -> float:
        target = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        assert main(["merge", *words, "-o", str(target)]) == 0
        made = load_model(target).state_dict()
        assert AutoTokenizer.from_pretrained(target)("ab")["input_ids"]
        factors = [(made[n] * plain[n]).sum() / (plain[n] ** 2).sum() for n in plain if plain[n].any()]
        assert max(factors) - min(factors) < 1e-5
        return float(factors[0])

    names = [str(models[i]) for i in (2, 0, 1)]  # As a shell sorts them.
    assert factor(*names) == pytest.approx(3.0)
    assert factor(*names, "--weights", "1,0,3") == pytest.approx((5 + 3 * 3) / 4)
    assert factor(*names, "--ema", "0.9") == pytest.approx(0.9 * (0.9 * 1 + 0.1 * 3) + 0.1 * 5)
    assert factor(str(tmp_path / "run")) == pytest.approx(5.0)  # The newest export.


def test_the_dtype_is_changed(base, tmp_path):
    assert main(["merge", str(base), "--dtype", "bfloat16", "-o", str(tmp_path / "half")]) == 0
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert next(load_model(tmp_path / "half").parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("words, sentence", [
    (["--weights", "1,2"], "--weights 1,2: there must be 1 numbers"),
    (["--ema", "1"], "--ema 1: it must be from 0 to below 1"),
    (["--dtyp", "float32"], "merge has no option --dtyp"),
])
def test_mistakes_are_named(base, tmp_path, capsys, words, sentence):
    assert main(["merge", str(base), "-o", str(tmp_path / "new"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["merge", str(base), "-o", str(base)]) == 2
    assert f"--output {base} exists: name a new directory" in capsys.readouterr().err
