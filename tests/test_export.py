"""What a run leaves behind: the files of the contract, and models that plain transformers opens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from realhf.cli.experiment_file import load_experiment
from realhf.distributed.process import WatchedProcess
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Role
from realhf.models.model_config import ModelConfig
from realhf.runtime.compile.program import compile_program
from realhf.runtime.records.progress import Progress
from realhf.runtime.trainer import Trainer
from realhf.runtime.weights.model_store import config_fields, files_beside
from tests.cli_tools import TWO_RANKS, read_jsonl, write_experiment, write_plan
from tests.runtime.tiny import HF_CONFIG, make_experiment, write_task

COMMON = {
    "reward/mean",
    "response_length/mean",
    "actor/loss",
    "actor/pg_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/clip_fraction",
    "actor/approx_kl",
    "timing_s/actor_generate",
    "timing_s/reward_forward",
    "timing_s/ref_forward",
    "timing_s/actor_train",
    "timing_s/step",
    "timing_s/realloc/actor",
    "realloc_bytes/actor",
    "realloc_over_bound/actor",
    "perf/realloc_gbytes_per_s/actor",
    "perf/tokens_per_s",
}
CRITIC = {"critic/vf_loss", "critic/explained_variance", "critic/grad_norm", "timing_s/critic_forward"}


@pytest.fixture(scope="module")
def grpo(grpo_run) -> Path:
    return grpo_run[2]


@pytest.fixture(scope="module")
def ppo(pool, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ppo")
    experiment = write_experiment(directory, "ppo", model={"pad_token_id": None}, steps=2)
    out = directory / "run"
    layouts = {
        "actor_generate": "d2@0-1",
        "reward_forward": "d1@0",
        "ref_forward": "d1@1",
        "critic_forward": "p2@0-1",
        "actor_train": "t2@0-1",
        "critic_train": "t2@0-1",
    }
    out.mkdir()
    pool.run(_train, experiment, write_plan(directory, layouts), out)
    return out


def _train(world, experiment, plan, out):
    plan = ExecutionPlan.load(str(plan))
    program = compile_program(load_experiment(experiment), plan, world_size=world.size)
    Trainer(program, world, quiet=True, out=out).run()


def test_files(grpo):
    names = {path.name for path in grpo.iterdir()}
    assert names >= {
        "config.json",
        "plan.yaml",
        "metrics.jsonl",
        "timeline.jsonl",
        "tensorboard",
        "hf",
        "eval.jsonl",
        "summary.json",
        "reward.png",
        "timeline.png",
    }
    assert [path.name for path in (grpo / "hf").iterdir()] == ["step_2"]
    assert any((grpo / "tensorboard").iterdir())
    for picture in ("reward.png", "timeline.png"):
        assert (grpo / picture).read_bytes().startswith(b"\x89PNG")


def test_config_holds_overrides(grpo):
    config = json.loads((grpo / "config.json").read_text())
    assert (config["seed"], config["steps"], config["actor"]["dtype"]) == (3, 2, "float64")
    assert config["reward_function"] == "tests.runtime.tiny.some_reward"


def test_plan_can_be_run_again(grpo):
    calls = ExecutionPlan.load(str(grpo / "plan.yaml")).calls
    assert {name: str(calls[name].layout) for name in TWO_RANKS} == TWO_RANKS


def test_metrics(grpo, ppo):
    evaluation, *steps = read_jsonl(grpo / "metrics.jsonl")
    assert evaluation["eval/score"] > 0 and evaluation["realloc_bytes/actor"] > 0
    assert [step["step"] for step in (evaluation, *steps)] == [0, 1, 2]
    assert steps[-1].keys() >= COMMON | {"eval/score"}
    assert steps[-1]["realloc_bytes/actor"] > 0
    assert read_jsonl(ppo / "metrics.jsonl")[-1].keys() >= COMMON | CRITIC


def test_timeline(grpo):
    events = read_jsonl(grpo / "timeline.jsonl")
    assert {event["step"] for event in events} == {0, 1, 2}
    before = [event for event in events if event["step"] == 0]
    assert {event["kind"] for event in before if not event["name"].startswith("eval/")} == {"realloc"}
    assert {event["kind"] for event in before} >= {"generate", "host"}
    for call, ranks in {
        "actor_generate": {0, 1},
        "ref_forward": {1},
        "actor_train": {0, 1},
    }.items():
        assert {e["rank"] for e in events if e["name"] == call and e["kind"] != "move"} == ranks
    assert all(event["start"] <= event["end"] for event in events)


def test_summary(grpo):
    summary = json.loads((grpo / "summary.json").read_text())
    assert summary.keys() >= {"eval_first", "eval_last", "steps", "seconds", "hf_dir", "realloc"}
    steps = read_jsonl(grpo / "metrics.jsonl")
    assert (summary["eval_first"], summary["eval_last"]) == (steps[0]["eval/score"], steps[-1]["eval/score"])
    assert (summary["steps"], summary["hf_dir"]) == (2, str(grpo / "hf" / "step_2"))
    assert summary["realloc"]["actor"]["bytes_per_step"] == steps[-1]["realloc_bytes/actor"]
    assert summary["realloc"]["actor"]["over_bound"] >= 1  # Computed, for the links that were named;
    assert summary["realloc"]["actor"]["links"].startswith("cpu-laptop's links: 4.4 GB/s per rank")
    name = "perf/realloc_gbytes_per_s/actor"  # and measured.
    rates = [step[name] for step in steps[1:] if name in step]
    assert min(rates) <= summary["realloc"]["actor"]["gbytes_per_s"] <= max(rates)
    assert 0 < min(rates) <= max(rates) < 1000


def test_what_is_printed_tells_measured_from_computed(grpo, capsys):
    summary = json.loads((grpo / "summary.json").read_text())
    realloc = summary["realloc"]["actor"]
    program = compile_program(load_experiment(grpo.parent / "tiny_experiment.py"), None, world_size=1)
    Progress(program, WatchedProcess()).finish(summary, None)
    err = capsys.readouterr().err
    assert f"MB per step, measured {realloc['gbytes_per_s']:.3g} GB/s into the busiest rank" in err
    assert f"computed at {realloc['over_bound']:.2f} x its lower bound ({realloc['links']})" in err


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_eval_rows(kind, request):
    run = request.getfixturevalue(kind)
    rows = read_jsonl(run / "eval.jsonl")
    data = read_jsonl(Path(json.loads((run / "config.json").read_text())["eval_dataset"]["path"]))
    assert [(row["prompt"], row["answer"]) for row in rows] == [
        (row["prompt"], row["answer"]) for row in data[:5]
    ]
    assert all(row.keys() >= {"completion", "score"} for row in rows)
    score = json.loads((run / "summary.json").read_text())["eval_last"]
    assert sum(row["score"] for row in rows) / len(rows) == pytest.approx(score)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_transformers_generates_the_same(kind, request):
    """The greedy answers of plain transformers are those of the last evaluation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = request.getfixturevalue(kind)
    directory = json.loads((run / "summary.json").read_text())["hf_dir"]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for row in read_jsonl(run / "eval.jsonl"):
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=7, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == row["completion"]


def test_what_goes_along(tmp_path):
    task = write_task(tmp_path)
    (task / "LICENSE").write_text("terms")
    (task / "README.md").write_text("the base's own card")
    (task / "generation_config.json").write_text('{"eos_token_id": 1}')
    experiment = make_experiment("ppo", task)
    for role, kind in (("actor", "text-generation"), ("critic", "text-classification")):
        files = files_beside(experiment, role, step=2)
        card = files.pop("README.md")
        others = {"config.json", "data.jsonl", "held_out.jsonl", "README.md"}
        names = {path.name for path in task.iterdir()} - others
        names -= {"generation_config.json"} if role == "critic" else set()
        assert files == {name: task / name for name in names}
        _, front, text = card.split("---\n")
        tags = {"library_name": "transformers", "pipeline_tag": kind, "tags": ["realhf", "ppo"]}
        assert yaml.safe_load(front) == tags
        assert f"The {role} of a PPO run of realhf, trained from random weights for 2 steps." in text


def test_export_has_the_tokenizer_as_it_was(grpo):
    source = Path(json.loads((grpo / "config.json").read_text())["actor"]["model"])
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((grpo / "hf" / "step_2" / n).read_bytes() == (source / n).read_bytes() for n in names)
    found = {path.name for path in (grpo / "hf" / "step_2").iterdir()}
    assert found == {"config.json", "model.safetensors", "README.md", *names}


def test_the_padding_is_the_tokenizers_where_the_config_says_none():
    config = ModelConfig.from_hf({**HF_CONFIG, "pad_token_id": None}, head="score")
    assert config_fields(config, pad_token_id=5) == {"pad_token_id": 5}
    assert config_fields(config, pad_token_id=None) == {}
    assert config_fields(config, pad_token_id=1) == {}, "it ends responses, whose last token has the score"
    assert config_fields(replace(config, head="lm"), pad_token_id=5) == {}
    assert config_fields(replace(config, hf=HF_CONFIG), pad_token_id=5) == {}


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "OlmoeForCausalLM"])
def test_a_critic_that_transformers_cannot_open_is_refused(tmp_path, architecture):
    experts = {"num_experts": 2, "num_experts_per_tok": 1}
    task = write_task(tmp_path)
    (task / "config.json").write_text(json.dumps({**HF_CONFIG, **experts, "architectures": [architecture]}))
    experiment = make_experiment("ppo", task)
    with pytest.raises(ValueError, match="critic.model: transformers has no sequence classification model"):
        compile_program(experiment, None, world_size=1)
    compile_program(make_experiment("grpo", task), None, world_size=1)


def test_the_base_model_is_named(tmp_path):
    role = Role(str(tmp_path / "model"))
    assert role.base_name() == str(tmp_path / "model")
    (tmp_path / "model").symlink_to("models--org--other")
    assert role.base_name() == "org/other"
    task = write_task(tmp_path / "models--org--base")
    experiment = make_experiment("grpo", task)
    experiment.actor = replace(experiment.actor, random_init=False)
    files = files_beside(experiment, "actor", step=1)
    assert yaml.safe_load(files["README.md"].split("---\n")[1]) == {
        "base_model": "org/base", "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["realhf", "grpo"],
    }


def test_transformers_opens_the_critic(ppo):
    import torch
    from transformers import AutoModelForSequenceClassification

    directory = Path(json.loads((ppo / "summary.json").read_text())["hf_dir"]) / "critic"
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    assert model.score.weight.shape == (1, 32)
    with torch.no_grad():
        alone = [model(torch.tensor([ids])).logits for ids in ([3, 4, 5], [6, 7])]
        ids, mask = [[3, 4, 5], [6, 7, 0]], [[1, 1, 1], [1, 1, 0]]
        padded = model(torch.tensor(ids), attention_mask=torch.tensor(mask))
    torch.testing.assert_close(padded.logits, torch.cat(alone), rtol=1e-9, atol=1e-9)
