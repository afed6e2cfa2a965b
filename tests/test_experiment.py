"""What roles leave open: dtypes of model directories, usual learning rates, lengths of schedules."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from realhf import (
    DAPO,
    DPO,
    GRPO,
    PPO,
    SFT,
    DatasetConfig,
    Distillation,
    LoraConfig,
    OptimizerConfig,
    PairwiseRewardModel,
    RewardModel,
    Role,
    ScaleRL,
)
from realhf.calls import LEARNING_RATES, learning_rate
from realhf.cli.main import main
from realhf.cli.planning_problem import model_role
from realhf.distributed.world import World
from realhf.experiment import resolved_roles
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.user_input.shipped import shipped_dir
from tests.runtime.tiny import HF_CONFIG, make_experiment, role, some_reward, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def model_with(directory, **fields):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | fields))
    return str(directory)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float64", "torch_dtype": "bfloat16"}, "float64"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_dtype_is_that_of_config_json(tmp_path, fields, dtype):
    model = model_with(tmp_path / "model", **fields)
    given = Role(model, random_init=True)
    assert given.weights_dtype == dtype
    assert model_role("actor", given).dtype == dtype
    assert given.weights_source == replace(given, dtype=dtype).weights_source
    assert replace(given, dtype="float32").weights_dtype == "float32"
    assert replace(given, follows="actor").weights_dtype == "float32"


def test_dtypes_of_shipped_models():
    named = {path.stem: Role(path.stem).weights_dtype for path in shipped_dir("models").iterdir()}
    assert named["gpt2"] == named["tiny"] == "float32"
    assert set(named.values()) <= {"float32", "bfloat16", "float16"}
    assert named["qwen2.5-0.5b"] == "bfloat16"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("int8", "actor.dtype is not set, and config.json of {model} names 'int8': set it to one of float32"),
        ("float16", "actor.dtype is float16 (from config.json of {model}): training in it needs loss"),
    ],
)
def test_dtypes_that_cannot_be_used_are_refused(task, tmp_path, named, words):
    model = model_with(tmp_path / "model", dtype=named)
    actor = Role(model, random_init=True, optimizer=OptimizerConfig())
    experiment = make_experiment("grpo", task, actor=actor, tokenizer=str(task))
    with pytest.raises(ValueError) as error:
        compile_program(experiment, None, world_size=1)
    assert words.format(model=model) in str(error.value)
    experiment.actor = replace(actor, dtype="bfloat16")
    assert compile_program(experiment, None, world_size=1).roles["actor"].dtype == "bfloat16"


def test_a_bfloat16_model_is_trained_and_exported_in_bfloat16(task, tmp_path):
    from safetensors import safe_open

    model = model_with(tmp_path / "model", dtype="bfloat16")
    actor = Role(model, random_init=True, optimizer=OptimizerConfig(lr=1e-3))
    experiment = make_experiment("grpo", task, actor=actor, tokenizer=str(task), steps=2, eval_dataset=None)
    program = compile_program(experiment, None, world_size=1)
    assert {role.dtype for role in program.roles.values()} == {"bfloat16"}
    Trainer(program, World(), out=tmp_path / "run", quiet=True).run()
    with safe_open(tmp_path / "run" / "hf" / "step_2" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["actor"]["dtype"] is None
    assert {role["dtype"] for role in config["roles"].values()} == {"bfloat16"}


def rates(experiment):
    graph = experiment.graph()
    runs = {call.name: experiment.steps for call in graph.calls}
    found = resolved_roles(experiment.roles(), graph, runs)
    return {name: role.optimizer.lr for name, role in found.items() if role.optimizer is not None}


TRAINED = Role("tiny", optimizer=OptimizerConfig())
SCORE = replace(TRAINED, head="score")
ON_POLICY = {"actor": TRAINED, "reward_function": some_reward}
EXPERIMENTS = {
    "GRPOConfig": GRPO(**ON_POLICY),
    "DAPO": DAPO(**ON_POLICY),
    "PPO": PPO(**ON_POLICY, critic=SCORE),
    "DistillationConfig": Distillation(actor=TRAINED, teachers=(Role("tiny"),)),
    "SFTConfig": SFT(actor=TRAINED),
    "DPOConfig": DPO(actor=TRAINED),
    "RewardModel": RewardModel(reward=SCORE),
    "PairwiseRewardModel": PairwiseRewardModel(reward=SCORE),
}


def test_learning_rates_are_the_usual_ones():
    found = {name: rates(experiment) for name, experiment in EXPERIMENTS.items()}
    assert found == {
        **dict.fromkeys(("GRPOConfig", "DAPO", "DistillationConfig"), {"actor": 1e-6}),
        "PPO": {"actor": 1e-6, "critic": 1e-5},
        "SFTConfig": {"actor": 2e-5},
        "DPOConfig": {"actor": 1e-6},
        **dict.fromkeys(("RewardModel", "PairwiseRewardModel"), {"reward": 1e-5}),
    }
    for full, lora, _ in LEARNING_RATES.values():
        assert lora == pytest.approx(10 * full)
    adapted = SFT(actor=replace(TRAINED, lora=LoraConfig()))
    assert rates(adapted) == {"actor": 2e-4}
    given = SFT(actor=replace(TRAINED, optimizer=OptimizerConfig(lr=0.0)))
    assert rates(given) == {"actor": 0.0}
    assert rates(ScaleRL(reward_function=some_reward)) == {"actor": 5e-7}  # The recipe's own.


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.endswith("Config")])
def test_learning_rates_are_those_of_trl(name):
    trl = pytest.importorskip("trl")
    theirs = getattr(trl, name).__dataclass_fields__["learning_rate"].default
    assert rates(EXPERIMENTS[name]) == {"actor": theirs}


def test_tables_in_the_documentation_have_the_learning_rates():
    text = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text()
    lines = [line.strip(" |") for line in text.splitlines() if "|" in line]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    numbers = [(float(row[1]), float(row[2]), row[3]) for row in rows
               if len(row) == 4 and row[1][:1].isdigit() and "e-" in row[1]]
    assert sorted(numbers) == sorted(LEARNING_RATES.values())


def resolved(optimizer, **settings):
    experiment = PPO(**ON_POLICY, critic=replace(SCORE, optimizer=optimizer), **settings)
    graph = experiment.graph()
    runs = {call.name: experiment.steps for call in graph.calls}
    return resolved_roles(experiment.roles(), graph, runs)["critic"].optimizer


def test_schedules_end_with_the_run():
    linear = OptimizerConfig(lr=1.0, schedule="linear")
    assert resolved(linear, steps=10, minibatches=3, epochs=2).total_steps == 60
    assert resolved(linear, steps=20, minibatches=3, epochs=2).total_steps == 120
    assert resolved(linear, steps=10, batch_size=12, minibatch_size=4).total_steps == 30
    assert resolved(replace(linear, total_steps=7), steps=10).total_steps == 7
    assert resolved(OptimizerConfig(), steps=10).total_steps == 0
    warm = resolved(replace(linear, warmup_ratio=0.15), steps=10, minibatches=1)
    assert (warm.warmup_steps, warm.total_steps) == (2, 10)
    assert learning_rate(warm, 1) == 1.0 and learning_rate(warm, 10) == 0.0
    of_given = resolved(OptimizerConfig(lr=1.0, warmup_ratio=0.5, total_steps=7), steps=100)
    assert of_given.warmup_steps == 4


def test_a_run_follows_its_schedule_to_the_end(task, tmp_path):
    optimizer = OptimizerConfig(lr=1e-3, schedule="linear", min_lr_ratio=0.1, warmup_ratio=0.5)
    experiment = make_experiment(
        "grpo", task, actor=replace(role(task), optimizer=optimizer), steps=4, eval_dataset=None)
    result = Trainer(compile_program(experiment, None, world_size=1), World(), quiet=True).run()
    # Eight optimizer steps, two in each step: four of warm-up, then down to a tenth. Metrics are means.
    expected = [1e-3 * (1 - 0.9 * n / 4) for n in range(4)]
    ups = [1e-3 * (n + 1) / 4 for n in range(4)]
    steps = [*ups, *expected]
    means = [(a + b) / 2 for a, b in zip(steps[::2], steps[1::2], strict=True)]
    assert [m["actor/lr"] for m in result.metrics] == pytest.approx(means)


def test_a_longer_run_continues_on_its_own_schedule(task, tmp_path, capsys):
    """A run that is resumed with more steps follows the schedule of the longer run from there on."""
    file = tmp_path / "experiment.py"
    file.write_text(
        "from pathlib import Path\nfrom dataclasses import replace\n"
        "from tests.runtime.tiny import make_experiment, role, OptimizerConfig\n"
        f"task = Path({str(task)!r})\n"
        "actor = replace(role(task), optimizer=OptimizerConfig(lr=1.0e-3, schedule='linear'))\n"
        "experiment = make_experiment('sft', task, actor=actor, eval_dataset=None)\n"
    )
    out = tmp_path / "run"
    assert main(["run", str(file), "--steps", "4", "--out", str(out)]) == 0
    assert main(["run", str(file), "--steps", "8", "--out", str(out), "--resume"]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    short = [1e-3 * (1 - n / 4) for n in range(4)]
    long = [1e-3 * (1 - n / 8) for n in range(4, 8)]
    assert [line["actor/lr"] for line in lines] == pytest.approx([*short, *long])
    assert "continues as another experiment" not in capsys.readouterr().err


def test_minibatch_size_counts_prompts(task):
    experiment = make_experiment("ppo", task, batch_size=6)
    experiment.minibatches = PPO.minibatches
    experiment.minibatch_size = 2
    graph = experiment.graph()
    assert {graph[name].work.minibatches for name in ("actor_train", "critic_train")} == {3}
    experiment.minibatch_size = 4
    with pytest.raises(ValueError, match="divide batch_size 6: legal are 1, 2, 3, 6"):
        experiment.graph()
    experiment.minibatch_size = 2
    experiment.minibatches = 2
    with pytest.raises(ValueError, match="give one or the other"):
        experiment.graph()
    distillation = Distillation(
        actor=TRAINED, teachers=(Role("tiny"),), batch_size=8, minibatch_size=2, variant="top_k",
        dataset=DatasetConfig("none.jsonl"))
    assert distillation.graph()["actor_train"].work.minibatches == 4
