"""Chats in runs: the loss of whole conversations, and where turns end if the model's files do not say it."""

import json

import pytest
import torch

from realhf import GRPO, SFT, DatasetConfig, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig
from realhf.data.loader import load_tokenizer
from realhf.data.sequence_tokens import end_of_turn
from realhf.distributed.world import World
from realhf.models.model_config import ModelConfig
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.hub import model_repository

EOS = 256  # <|endoftext|>, with which the model's files end answers.
END = 258  # <|im_end|>, with which the chat template ends turns.


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Return a directory with a model that stops at EOS alone, and rows."""
    directory = tmp_path_factory.mktemp("turns")
    for name, content in model_repository(eos_token_id=EOS).files.items():
        (directory / name).write_bytes(content)
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}],
             "completion": [{"role": "assistant", "content": str(i)}]} for i in range(8)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _settings(task, **model):
    actor = Role(str(task), dtype="float64", optimizer=OptimizerConfig(lr=1e-3), **model)
    dataset = DatasetConfig(str(task / "data.jsonl"))
    return {"actor": actor, "dataset": dataset, "steps": 1, "batch_size": 8, "checkpoint_every": 0}


def score(completions):
    return [0.0 for _ in completions]


def _warnings(capsys) -> list[str]:
    start = "realhf: warning: "
    return [line.removeprefix(start) for line in capsys.readouterr().err.splitlines() if start in line]


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_answers_end_where_the_template_ends_turns(task, tmp_path, capsys, engine):
    seen: list[list[int]] = []

    def reward(completion_ids):
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    sampling = SamplingConfig(max_new_tokens=60, logit_bias={END: 2.0, EOS: 2.0})
    experiment = GRPO(
        **_settings(task, engine=engine), reward_function=reward, group_size=4, sampling=sampling)
    Trainer(compile_program(experiment, None, world_size=1), World(), out=tmp_path / "run").run()
    ends = [ids[-1] for ids in seen]
    assert len(seen) == 32 and {EOS, END} <= set(ends)
    assert all(token not in (EOS, END) for ids in seen for token in ids[:-1])
    says = (
        f"actor.model stops at {EOS} (eos_token_id), but the chat template ends turns with the token {END} "
        "(<|im_end|>): answers end there, too, and exports name it in generation_config.json")
    assert says in _warnings(capsys)


def test_ignoring_eos_ignores_the_end_of_turns(task):
    sampling = SamplingConfig(max_new_tokens=9, ignore_eos=True)
    settings = _settings(task) | {"reward_function": score, "group_size": 4}
    for changes, stops in ((sampling, ()), (SamplingConfig(max_new_tokens=9), (END,))):
        program = compile_program(
            GRPO(**settings, sampling=changes, loss=PolicyLossConfig()), None, world_size=1)
        (call,) = program.graph.of_kind("generate")
        assert call.work.sampling.stop_token_ids == stops


@pytest.mark.slow
def test_exports_name_the_end_of_turns(task, tmp_path, capsys):
    """A model that was fine-tuned on chats ends its answers in transformers and here."""
    from transformers import GenerationConfig

    def trained(model, name):
        experiment = SFT(**(_settings(task) | {"actor": Role(str(model), optimizer=OptimizerConfig())}))
        program = compile_program(experiment, None, world_size=1)
        Trainer(program, World(), out=tmp_path / name).run()
        return tmp_path / name / "hf" / "step_1"

    export = trained(task, "first")
    assert any("ends turns with the token 258" in warning for warning in _warnings(capsys))
    assert GenerationConfig.from_pretrained(export).eos_token_id == [EOS, END]
    assert ModelConfig.load(export).eos_token_ids == (EOS, END)
    again = trained(export, "second")
    assert not any("ends turns" in warning for warning in _warnings(capsys))
    assert ModelConfig.load(again).eos_token_ids == (EOS, END)


def test_a_model_for_exchanged_special_tokens_is_refused(task, tmp_path):
    """The reference would read the beginning of a turn where it ends."""
    for path in task.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    start, end = (next(t for t in content["added_tokens"] if t["id"] == i) for i in (257, 258))
    start["content"], end["content"] = end["content"], start["content"]
    content["model"]["vocab"] = {
        token: number for token, number in content["model"]["vocab"].items() if number < 256}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    experiment = GRPO(
        **_settings(task), reward_function=score, group_size=4, ref=Role(str(tmp_path)),
        loss=PolicyLossConfig(kl_coef=0.1))
    what = r"ref.model .* was made for another tokenizer .*: token 257 is '<\|im_end\|>' there and '<\|im_sta"
    with pytest.raises(ValueError, match=what):
        compile_program(experiment, None, world_size=1)


@pytest.mark.parametrize("template, expected", [
    ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
    ("{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{% endif %}{{ m.content }}{% endfor %}",
     "<|im_start|>"),  # The next question ends a turn.
    ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
    ("{{ raise_exception('no') }}", None),
])
def test_the_token_that_ends_turns(tmp_path, template, expected):
    for name, content in model_repository().files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "chat_template.jinja").write_text(template)
    end = end_of_turn(str(tmp_path))
    assert (None if end is None else end[1]) == expected
    (tmp_path / "chat_template.jinja").unlink()
    assert end_of_turn(str(tmp_path)) is None


def test_the_loss_of_whole_conversations_is_that_of_transformers(task, tmp_path):
    """The loss counts the assistant's turns, between which are others."""
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    def says(role, text):
        return {"role": role, "content": text}

    chats = [
        [says("user", "1?"), says("assistant", "a"), says("user", f"{i}?"), says("assistant", "b" * i)]
        for i in range(1, 4)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    held_out = DatasetConfig(str(data))
    experiment = SFT(**(_settings(task) | {"dataset": held_out, "eval_dataset": held_out, "batch_size": 3}))
    Trainer(compile_program(experiment, None, world_size=1), World(), out=tmp_path / "run").run()
    model = AutoModelForCausalLM.from_pretrained(task, dtype=torch.float64)
    tokenizer = load_tokenizer(str(task))
    total = count = 0.0
    for chat in chats:
        header = "<|im_start|>assistant\n"
        ids: list[int] = []
        labels: list[int] = []
        for message in chat:
            answer = tokenizer.encode(f"{message['content']}<|im_end|>\n")
            is_answer = message["role"] == "assistant"
            before = tokenizer.encode(header if is_answer else "<|im_start|>user\n")
            ids += before + answer
            labels += [-100] * len(before) + (answer if is_answer else [-100] * len(answer))
        logits = model(torch.tensor([ids])).logits[0, :-1]
        total += cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        count += sum(label != -100 for label in labels)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert abs(summary["eval_first"] - total / count) < 1e-7  # transformers rotates in float32.
