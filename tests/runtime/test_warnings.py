"""What a person is warned of, in runs of one process; adapters of another model are in test_lora.py."""

import json
from dataclasses import replace

import pytest

from realhf import DatasetConfig, SamplingConfig
from realhf.dist.group import World
from realhf.nn import narrow
from realhf.runtime.check import compile_program
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import HF_CONFIG, make_experiment, role, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _warnings(capsys, kind: str, task, **changes) -> list[str]:
    """What a trainer of this experiment says before its first step, without the common beginning."""
    experiment = make_experiment(kind, task, **changes)
    Trainer(compile_program(experiment, None, world_size=1), World())
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert all(line.startswith("realhf: warning: ") for line in lines)
    return [line.removeprefix("realhf: warning: ") for line in lines]


def _lengths(task, key: str = "prompt") -> list[int]:
    return [len(json.loads(line)[key]) for line in (task / "data.jsonl").read_text().splitlines()]


def test_nothing_is_said_of_a_usual_run(task, capsys):
    assert _warnings(capsys, "grpo", task) == []
    assert _warnings(capsys, "sft", task) == []


def test_rows_that_are_left_out(task, capsys):
    lengths, limit = _lengths(task), 5
    count = sum(length > limit for length in lengths)
    assert 0 < count < len(lengths)
    dataset = DatasetConfig(str(task / "data.jsonl"), max_prompt_tokens=limit)
    why = f"are left out, as their prompts are longer than max_prompt_tokens {limit}"
    assert _warnings(capsys, "grpo", task, dataset=dataset) == [
        f"dataset: {count} of {len(lengths)} rows {why}"]


def test_settings_that_the_engine_does_not_have(task, capsys):
    actor = replace(role(task), engine="transformers")
    what = "actor.engine is transformers, which does not have kv_cache_gib and work_stealing"
    assert _warnings(capsys, "grpo", task, actor=actor, kv_cache_gib=1.0, work_stealing=False) == [what]
    assert _warnings(capsys, "grpo", task, actor=actor, max_rows=8) == []


def test_a_dtype_in_which_the_cpu_is_slow(task, capsys, monkeypatch):
    """The native engine computes in float32 there; transformers' classes do not."""
    ours = replace(role(task), dtype="bfloat16")
    theirs = replace(ours, engine="transformers")
    monkeypatch.setattr(narrow, "_has_units", lambda dtype: False)
    (what,) = _warnings(capsys, "sft", task, actor=theirs)
    assert what.startswith("actor.dtype is bfloat16, for which this CPU has no units")
    assert _warnings(capsys, "sft", task, actor=ours) == []
    monkeypatch.setattr(narrow, "_has_units", lambda dtype: True)
    assert _warnings(capsys, "sft", task, actor=theirs) == []


def test_greedy_samples_of_one_prompt(task, capsys):
    greedy = SamplingConfig(max_new_tokens=7, temperature=0.0)
    what = "sampling.temperature is 0: the 4 samples of a prompt are all the same"
    assert _warnings(capsys, "grpo", task, sampling=greedy) == [what]
    assert _warnings(capsys, "ppo", task, sampling=greedy, group_size=1) == []


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    "rope, limit",
    [(None, 64), ({"rope_type": "linear", "factor": 2.0}, 128), (YARN, 80), (YARN | {"factor": 1.5}, 64)],
)
@pytest.mark.parametrize("beyond", [0, 1])
def test_sequences_longer_than_the_model_was_made_for(tmp_path, capsys, rope, limit, beyond):
    task = write_task(tmp_path)
    assert HF_CONFIG["max_position_embeddings"] == 64
    fields = {} if rope is None else {"rope_parameters": {"rope_theta": 1e4, **rope}}
    (task / "config.json").write_text(json.dumps(HF_CONFIG | fields))
    longest = max(_lengths(task))
    new, none = limit - longest + beyond, {"eval_dataset": None}
    found = _warnings(capsys, "grpo", task, sampling=SamplingConfig(max_new_tokens=new), **none)
    what = (
        f"model was made for {limit} positions (max_position_embeddings), but a sequence may have "
        f"{longest + new}: {longest} from dataset and sampling.max_new_tokens {new}")
    assert found == [f"{role}.{what}" for role in ("actor", "ref")] * beyond


def test_answers_of_the_evaluation_count(task, capsys):
    found = _warnings(capsys, "sft", task, sampling=SamplingConfig(max_new_tokens=64))
    assert len(found) == 1 and "from eval_dataset and sampling.max_new_tokens 64" in found[0]


def test_whole_sequences_of_a_dataset_count(tmp_path, capsys):
    task = write_task(tmp_path)
    longest = max(a + b + 1 for a, b in zip(_lengths(task), _lengths(task, "completion"), strict=True))
    (task / "config.json").write_text(json.dumps(HF_CONFIG | {"max_position_embeddings": longest - 1}))
    experiment = {"sampling": SamplingConfig(max_new_tokens=1), "eval_dataset": None}
    found = _warnings(capsys, "sft", task, **experiment)
    assert [line.partition(",")[0] for line in found] == [
        f"actor.model was made for {longest - 1} positions (max_position_embeddings)"]


def test_no_prompt_fits_where_responses_fill_all_positions(tmp_path):
    task = write_task(tmp_path)
    learned = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 16, "vocab_size": HF_CONFIG["vocab_size"], "eos_token_id": 1,
    }  # fmt: skip
    (task / "config.json").write_text(json.dumps(learned))
    experiment = make_experiment("grpo", task, sampling=SamplingConfig(max_new_tokens=12))
    with pytest.raises(ValueError, match=r"set dataset.max_prompt_tokens \(4096\) and .* to at most 4$"):
        compile_program(experiment, None, world_size=1)
    experiment.sampling = replace(experiment.sampling, max_new_tokens=16)
    with pytest.raises(ValueError, match="set sampling.max_new_tokens below 16$"):
        compile_program(experiment, None, world_size=1)
