"""The command line in one process: faults that `check` finds, its JSON, and help."""

import json
import os
import pickle
import py_compile
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from realhf.checkpoint.tensor_files import pack_header, pack_index, params_by_tensor, tensor_shape
from realhf.cli.experiment_file import load_experiment
from realhf.cli.main import main
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.user_input.files import require_output
from tests.cli_tools import GRPO_LAYOUTS, REALHF, REPO, Command, read_jsonl, write_experiment, write_plan
from tests.runtime.tiny import write_task
from tests.samples import drawn, pairs

GRAPH = """
graph = experiment.graph()
def host(name, inputs, outputs):
    return FunctionCall(name, "host", inputs, outputs, work=HostFunction(print))
experiment.graph = lambda: {}
"""
SFT_FILE = REPO / "templates/sft/experiment.py"
TRAIN_TWICE = 'graph.add(replace(graph["actor_train"], name="more_train"))'
ONE = {**dict.fromkeys(GRPO_LAYOUTS, "d1@0")}

# What is wrong -> code that changes the graph, and words of the sentence.
GRAPHS = {
    "a key nobody produces": (
        'graph.add(host("late", ("nowhere",), ()))',
        "call 'late' needs the key 'nowhere'",
        "score",
    ),
    "a key produced twice": (
        'graph.add(host("again", ("prompt",), ("score",)))',
        "key 'score' is produced twice",
        "'reward_forward'",
        "'again'",
    ),
    "a cycle": (
        'graph.add(host("a", ("y",), ("x",)), host("b", ("x",), ("y",)))',
        "form a cycle: a -> b -> a",
    ),
    "a role that does not exist": (
        'graph.replace(replace(graph["actor_train"], role="student"))',
        "role 'student'",
        "there are actor, ref",
    ),
    "a role with a dot": (
        'graph; roles = experiment.roles(); experiment.roles = lambda: {**roles, "a.lora": roles["actor"]}',
        "role 'a.lora': the name of a role must not contain a dot",
    ),
    "a frozen role that is trained": (
        'graph.replace(replace(graph["actor_train"], role="ref"))',
        "'ref', which has no optimizer: give it one, Role(..., optimizer=OptimizerConfig())",
    ),
    "a call without work": (
        'graph.replace(replace(graph["actor_train"], work=None))',
        "call 'actor_train' of kind 'train_step' has work NoneType: it must be TrainStep",
    ),
    "work of another kind": (
        'graph.replace(replace(graph["ref_forward"], work=graph["actor_train"].work))',
        "call 'ref_forward' of kind 'forward' has work TrainStep",
        "it must be LogProbs, TopLogProbs, Values or Scores",
    ),
}

# What is wrong -> fields of the model's config.json, layout of actor_train, words of the sentence.
LAYOUTS: dict[str, tuple[dict[str, int], str, list[str]]] = {
    "heads": ({}, "t3@0-2", ["calls.actor_train", "tp=3 does not divide the model's 4 attention heads"]),
    "layers": ({}, "p5@0-4", ["calls.actor_train", "pp=5 exceeds the model's 4 layers"]),
    "kv heads": (
        {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4},
        "t6@0-5",
        ["tp=6 neither divides nor is a multiple of the 4 kv heads"],
    ),
    "vocabulary": ({"vocab_size": 3}, "t4@0-3", ["tp=4 exceeds the vocabulary 3"]),
    "an axis that the family lacks": ({}, "e2@0-1", ["ep=2 is not supported", "use ep=1"]),
    "heads over two axes": ({}, "c4t2@0-7", ["tp*cp=8 does not divide the model's 4 attention heads"]),
    "ranks and strategy": (
        {},
        "d2t2@0-2",
        ["calls.actor_train", "d2t2 needs 4 ranks and the mesh 0-2 has 3"],
    ),
    "a rank twice": ({}, "d2@1,1", ["calls.actor_train", "rank 1 stands twice"]),
    "no layout": ({}, "fast", ["calls.actor_train", "'fast' is not a layout", "d2t4"]),
    "no size": ({}, "d0@0", ["calls.actor_train", "dp=0", " 1"]),
}

# Words after `realhf check EXP.py` -> words of the sentence.
WORDS: dict[str, list[str]] = {
    "--actor.model /nowhere": ["actor.model", "'/nowhere' is neither a path nor a shipped name", "llama-7b"],
    "--actor.model {here}": ["actor.model", "there is no {here}/config.json"],
    "--actor.dtype float16": [
        "actor.dtype is float16: training in it needs loss scaling, which realhf does not have",
        "set it to bfloat16 or float32",
    ],
    "--actor.model {here}/adapters": [
        "actor.model: {here}/adapters holds LoRA adapters of org/base, and no model",
        "set lora.adapter to {here}/adapters",
    ],
    "--actor.model {here}/run": [
        "actor.model: {here}/run is the directory of a run, and its model is {here}/run/hf/step_10"
    ],
    "--actor.no-random-init": ["actor.model", "holds no safetensors weights", "actor.random_init"],
    "--tokenizer /nowhere": ["tokenizer '/nowhere'", "tokenizer.json"],
    "--dataset.path nowhere.jsonl": ["dataset.path 'nowhere.jsonl'", "no such file"],
    "--eval-dataset.path nowhere.jsonl": ["eval_dataset.path 'nowhere.jsonl'", "no such file"],
    "--dataset.path {here}/experiment.py": ["dataset.path", ".py", ".jsonl", ".parquet"],
    "--dataset.prompt-key question": ["no column 'question'", "prompt, completion, answer"],
    "--eval-dataset.prompt-key question": [
        "eval_dataset",
        "no column 'question'",
        "prompt, completion, answer",
    ],
    "--dataset.path {here}/no_answer.jsonl": [
        "no_answer.jsonl",
        "no column 'answer'",
        "its columns are prompt",
    ],
    "--dataset.path {here}/broken.jsonl": ["broken.jsonl line 2 is not JSON"],
    "--actor.optimizer.lrr 1": [
        "unknown override '--actor.optimizer.lrr'",
        "did you mean",
        "--actor.optimizer.lr",
    ],
    "--actor.lora 3": ["unknown override '--actor.lora'", "did you mean", "--actor.lora.rank"],
    "--reward.lora.rank 3": ["override '--reward.lora.rank'", "reward is not set", "experiment file"],
    "--filter-groups False": [
        "'--filter-groups False': filter_groups",
        "legal are --filter-groups and --no-filter-groups",
    ],
    "--steps 3 --no_filter_groups=true": [
        "filter_groups takes no value",
        "legal are --filter-groups and --no-filter-groups",
    ],
    "--actor.lora.merge 1 --steps 3": ["--actor.lora.merge and --actor.lora.no-merge"],
    "--step 4": ["unknown override '--step'", "did you mean", "--steps"],
    "stray": ["'stray'"],
    "--nothing-of-the-kind 4": ["unknown override '--nothing-of-the-kind'", "--help"],
    "--steps many": ["--steps", "many", "a whole number"],
    "--steps 0": ["steps is 0", " 1"],
    "--batch-size -4": ["batch_size is -4", " 1"],
    "--loss.average mean": ["--loss.average", "sequence", "token"],
    "--actor.dtype int8": ["--actor.dtype", "float32", "float64"],
    "--kv-cache-gib 8GB": ["'--kv-cache-gib 8GB': --kv-cache-gib must be a number or None"],
    "--max-rows 1.5": ["'--max-rows 1.5': --max-rows must be a whole number"],
    "--no-work-steeling": ["did you mean --no-work-stealing or --work-stealing"],
    "--kv-cache-gib inf": ["kv_cache_gib is inf", "must be a number of GiB above 0"],
    "--sampling.temperature nan": ["sampling.temperature is nan", "must be a number of at least 0"],
    "--actor.optimizer.lr -1": ["optimizer.lr is -1", "must not be negative"],
    "--sampling.top-p 2": ["sampling.top_p is 2", "at most 1"],
    "--minibatches 0": ["minibatches is 0", " 1"],
    "--actor.optimizer.total-steps -1": ["optimizer.total_steps is -1", "must not be negative"],
    "--actor.optimizer.warmup-ratio 0.1": ["warmup_ratio is 0.1: it must be 0, as", "warmup_steps is 2"],
    "--actor.optimizer.warmup-steps 0 --actor.optimizer.warmup-ratio 2": ["warmup_ratio is 2", "at most 1"],
    "--learning_rate 1e-5": ["'--learning_rate'", "did you mean --actor.optimizer.lr?"],
    "--max-completion-length=9": ["did you mean --sampling.max-new-tokens?"],
    "--num_train_epochs 3": ["did you mean --dataset-epochs? (in the place of `steps`"],
    "--epsilon 0.3": ["did you mean --loss.clip-low and --loss.clip-high?"],
    "--trainer.total_epochs=3": ["did you mean --dataset-epochs?"],
    "trainer.total_epochs=3": ["did you mean --dataset-epochs?"],
    "--actor_rollout_ref.rollout.n 4": ["did you mean --group-size?"],
    "--actor_rollout_ref.rollout.name vllm": ["not needed: realhf has its own generation engine"],
    "--actor_rollout_ref.actor.optim.lr 1": ["did you mean --actor.optimizer.lr?"],
    "--critic.optim.lr 1": ["here it is --critic.optimizer.lr, which this command and this experiment"],
    "--trainer.n-gpus-per-node 2": ["did you mean --nproc?"],
    "--vllm_gpu_memory_utilization 0.3": ["not needed: realhf has its own generation engine"],
    "--reward_weights 1": ["write reward_function=[f, Reward(g, weight=...)] in the experiment file"],
    "--report_to wandb": ["here it is --track, which this command"],
    "--num-generations-eval 3": ["Evaluation(DatasetConfig(...), samples=...) in the experiment file"],
    "--sampling.stop-strings x": ["did you mean --sampling.stop?\n"],
    "--actor.optimizer.beta 0": ["did you mean --actor.optimizer.betas?\n"],
    "--actor.optimizer.foo 0": ["--help behind the experiment lists them all"],
    "--temperature 0": ["did you mean --sampling.temperature?\n"],
    "--data.seed 0": ["did you mean --seed?\n"],
    "--strange.path x": ["--help behind the experiment lists them all"],
    "--npro 2": ["unknown override '--npro'", "did you mean --nproc"],
    "--minibatch-size 3": ["minibatch_size is 3: it must be None, as minibatches is 2: give one"],
    "--minibatches 1 --minibatch-size 4": ["minibatch_size is 4", "divide batch_size 6: legal are 1, 2, 3"],
    "--nproc 0": ["--nproc is 0", " 1"],
    "--nproc few": ["--nproc", "few", "int"],
    "--plan": ["--plan", "expected one argument"],
    "--nproc 2 --plan {here}/good.yaml": [
        "good.yaml",
        "calls.actor_generate",
        "rank 2",
        "there are 2 ranks (0 to 1)",
    ],
    "--plan nowhere.yaml": ["'nowhere.yaml' is neither a path nor a shipped name in plans", "grpo-4"],
    "--plan {here}": ["plan {here}"],
    "--cluster nowhere": ["'nowhere' is neither a path nor a shipped name in plans/clusters", "h100-8x8"],
    "--cluster {here}/cluster.yaml": ["cluster {here}/cluster.yaml", "num_hosts is 'many'", " 1"],
    "--cluster {here}/malformed.yaml": ["cluster {here}/malformed.yaml"],
    "--cluster {here}/good.yaml": ["cluster {here}/good.yaml", "calls is not a field", "num_hosts"],
    "--cluster {here}/typo.yaml": ["typo.yaml: num_host is not a field (did you mean num_hosts?)"],
    "--cluster {here}/binary.yaml": ["cluster {here}/binary.yaml is not UTF-8 text"],
    "--cluster {here}/one.yaml --plan {here}/good.yaml": [
        "calls.actor_generate",
        "rank 1",
        "there are 1 ranks",
    ],
}

# Text of a plan file -> words of the sentence.
PLANS: dict[str, list[str]] = {
    "calls: {actor_train: [": ["plan.yaml line 1 column 23 is not YAML: while parsing a flow node"],
    "calls:\n  actor_train: {layout: d1@0}\n  actor_train: {layout: d1@1}": [
        "plan.yaml line 3 column 3 is not YAML: 'actor_train' is given twice"
    ],
    "calls: {actor_train: {layuot: d1@0}}": [
        "plan.yaml: calls.actor_train has an unknown field 'layuot' (did you mean layout?)"
    ],
    "calls: {actor_train: {layout: d2@0,1}}": [
        'plan.yaml: calls.actor_train.layout has commas: put it in quotes, {layout: "d2@0,1"}'
    ],
    "calls: {actor_train: {layout: 4}}": ["plan.yaml: calls.actor_train: 4 is not a layout", "d2t4@0-7"],
    "": ["plan.yaml", "calls is missing"],
    "- actor_train": ["plan.yaml", "calls is missing"],
    "calls: {actor_train: d1@0}": ["plan.yaml", "calls.actor_train.layout is missing", "{layout: d2t4@0-7}"],
    "calls: {actor_train: {layout: d1@0}}": ["plan.yaml", "calls.actor_generate is missing"],
    yaml.safe_dump({"calls": {c: {"layout": "d1@0"} for c in [*ONE, "critic_train"]}}): [
        "plan.yaml",
        "calls.critic_train",
        "no such call",
        "as GRPO has no critic", "actor_generate, reward_forward",
    ],
    yaml.safe_dump({"calls": {c: {"layout": "d1@0", "tokens": 3} for c in ONE}}): [
        "plan.yaml",
        "unknown field 'tokens'",
        "layout, micro_batch_tokens",
    ],
    yaml.safe_dump({"calls": {c: {"layout": "d1@0", "micro_batch_tokens": 0} for c in ONE}}): [
        "plan.yaml",
        "micro_batch_tokens is 0",
        " 1",
    ],
    yaml.safe_dump({"calls": {c: {"layout": "d1@0"} for c in ONE}, "call": 1}): [
        "plan.yaml",
        "unknown field 'call'",
    ],
    yaml.safe_dump(
        {"calls": {c: {"layout": "d1@0"} for c in ONE} | {"reward_forward": {"layout": "t2@0-1"}}}
    ): ["plan.yaml", "calls.reward_forward", "over dp only"],
    yaml.safe_dump(
        {"calls": {c: {"layout": "d1@0"} for c in ONE} | {"advantages": {"layout": "d2@0-1"}}}
    ): ["plan.yaml", "calls.advantages", "one rank"],
}

# Text of an experiment file -> words of the sentence.
EXPERIMENTS: dict[str, list[str]] = {
    "from realhf import GRPO\nexperiment = GRPO(group_sizes=4)": [
        "experiment.py line 2: TypeError: ", "keyword argument 'group_sizes' (did you mean group_size?)",
    ],
    "from realhf import SamplingConfig\nSamplingConfig(max_completion_length=20)": [
        "experiment.py line 2: TypeError: ", "'max_completion_length' (did you mean max_new_tokens?)",
    ],
    "from realhf import GRPO\nexperiment = GRPO(reward_funcs=[])": [
        "keyword argument 'reward_funcs' (write reward_function=[f, Reward(g, weight=...)] in the experiment",
    ],
    "from realhf import GRPO\nexperiment = GRPO(steps='2')": [
        "experiment.py: steps is '2': it must be a whole number"
    ],
    "from realhf import GRPO\nclass Mine(GRPO):\n    def roles(self): return {}\n"
    "    def graph(self): pass\nexperiment = Mine()": [
        "experiment.py: Mine.graph() returned NoneType: it must return a DataflowGraph"
    ],
    "from realhf import GRPO\nclass Mine(GRPO):\n    def roles(self): return {}['x']\nexperiment = Mine()": [
        "experiment.py line 3: KeyError: 'x'"
    ],
    "x = 1 / 0": ["experiment.py line 1", "ZeroDivisionError", "division by zero"],
    "def f(:": ["experiment.py", "SyntaxError"],
    "import nowhere": ["experiment.py line 1", "ModuleNotFoundError", "nowhere"],
    "from realhf import GROP": ["experiment.py line 1", "GROP"],
    "x = 1": ["experiment.py", "must define `experiment`"],
    "experiment = 'GRPO'": ["experiment.py", "must define `experiment`"],
    "raise SystemExit(3)": [
        "experiment.py line 1: SystemExit: 3; the file gets no arguments of the command line: fields are",
    ],
    "def experiment(): pass": ["must define `experiment`", "`experiment` is a function"],
    "class experiment: pass": ["must define `experiment`", "`experiment` is a class: define an object of it"],
    "from realhf import GRPO\ntrainer = GRPO()": ["`trainer` is one: call it `experiment`"],
    "if __name__ == '__main__':\n    experiment = 1": ["`if __name__ == \"__main__\"` is not executed"],
    "from realhf import GRPO\nexperiment = GRPO()\nexperiment.reward_functions = []": [
        "experiment.py: experiment.reward_functions is set, and GRPO has no such field "
        "(did you mean reward_function?)"
    ],
    "from realhf import GRPO\nclass Mine(GRPO):\n    batch_size = 4\nexperiment = Mine()": [
        "experiment.py: Mine.batch_size has no effect: the field batch_size of the experiment is 32"
    ],
}


@pytest.mark.parametrize(
    ("statement", "legal"),
    [("set_grad_enabled(False)", "True"), ("set_default_dtype(torch.float64)", "torch.float32"),
     ("set_default_device('meta')", "cpu")],
)
def test_an_experiment_leaves_the_settings_of_torch(tmp_path, call, statement, legal):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\nfrom realhf import GRPO\ntorch.{statement}\nexperiment = GRPO()\n")
    try:
        code, _, error = call("check", path)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    function = statement.partition("(")[0]
    assert code == 2 and f"it has called torch.{function}(" in error and f"must leave {legal}" in error


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    """A sound experiment; beside it lie the files that the table above names."""
    path = write_experiment(tmp_path_factory.mktemp("sound"))
    write_plan(path.parent, GRPO_LAYOUTS).rename(path.parent / "good.yaml")
    cluster = yaml.safe_load((REPO / "plans/clusters/h100-8x8.yaml").read_text())
    files = {
        "experiment.py": "",
        "no_answer.jsonl": '{"prompt": "1+1="}\n',
        "broken.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n',
        "cluster.yaml": yaml.safe_dump(cluster | {"num_hosts": "many"}),
        "one.yaml": yaml.safe_dump(cluster | {"num_hosts": 1, "devices_per_host": 1}),
        "malformed.yaml": "num_hosts: [",
        "typo.yaml": yaml.safe_dump({"num_host": 1} | cluster),
    }
    (path.parent / "binary.yaml").write_bytes(b"num_hosts: \xff\xfe")
    for name, text in files.items():
        (path.parent / name).write_text(text)
    for step in (5, 10):
        (path.parent / "run" / "hf" / f"step_{step}").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (path.parent / "run" / name).write_text("{}")
    (path.parent / "adapters").mkdir()
    adapter = json.dumps({"base_model_name_or_path": "org/base"})
    (path.parent / "adapters" / "adapter_config.json").write_text(adapter)
    return path


@pytest.fixture
def call(capsys):
    """Return a function that calls the command line and returns exit code, output and error text."""

    def run(*words: Any) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as error:
            code = error.code
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(call):
    """Return a function that asserts that a command is refused with exit code 2 and one sentence."""

    def run(*words: Any, says: list[str]) -> None:
        code, out, err = call(*words)
        assert (code, out) == (2, ""), err
        assert err.startswith("realhf: ") and err.endswith("\n") and err.count("\n") == 1, err
        assert "Traceback" not in err
        for part in says:
            assert part in err

    return run


@pytest.mark.parametrize("fault", GRAPHS)
def test_check_finds_graph(tmp_path, refused, fault):
    change, *says = GRAPHS[fault]
    refused(
        "check", write_experiment(tmp_path, body=GRAPH.format(change)), says=["tiny_experiment.py", *says]
    )


@pytest.mark.parametrize("fault", LAYOUTS)
def test_check_finds_layout(tmp_path, refused, fault):
    model, layout, says = LAYOUTS[fault]
    path = write_experiment(tmp_path, model=model)
    plan = write_plan(path.parent, {**ONE, "actor_train": layout})
    refused("check", path, "--plan", plan, says=["plan.yaml", *says])


def _weights(directory, fault):
    """A model directory of the tiny task whose one shard has a fault."""
    config = ModelConfig.load(str(write_task(directory)))
    tensors = params_by_tensor(model_spec(config).params)
    shapes = {name: tensor_shape(params) for name, params in tensors.items()}
    if fault == "shape":
        shapes["model.norm.weight"] = (31,)
    dtypes = {"model.norm.weight": "F8_E4M3"} if fault == "dtype" else {}
    start, ends = pack_header((name, dtypes.get(name, "F32"), shape) for name, shape in shapes.items())
    shard = directory / "model-00001-of-00001.safetensors"
    if fault != "file":
        shard.write_bytes(start + bytes(ends[""] - len(start) - (fault == "truncated")))
    names = dict.fromkeys([*shapes, *(["lm_head.weight"] if fault == "promise" else [])], shard.name)
    (directory / "model.safetensors.index.json").write_text(pack_index(names, 0))
    return directory


WEIGHTS = {
    "shape": ["00001.safetensors: tensor model.norm.weight has shape (31,); the config says (32,)"],
    "dtype": ["tensor model.norm.weight has dtype F8_E4M3", "F32, BF16, F16; dequantise the checkpoint"],
    "truncated": ["model-00001-of-00001.safetensors is truncated: its tensors end at byte"],
    "file": ["index.json names the file model-00001-of-00001.safetensors, which is missing"],
    "promise": ["index.json promises tensor lm_head.weight in model-00001-of-00001.safetensors"],
}


@pytest.mark.parametrize(("command", "fault"), pairs(["check", "run"], WEIGHTS))
def test_check_finds_weights(tmp_path, refused, fault, command):
    weights = _weights(tmp_path, fault)
    words = ["--actor.model", weights, "--actor.no-random-init"]
    words += ["--out", tmp_path / "run"] if command == "run" else []
    says = ["actor.model: ", str(weights), *WEIGHTS[fault]]
    refused(command, write_experiment(tmp_path), *words, says=says)
    assert not (tmp_path / "run").exists()


def test_check_accepts_weights(tmp_path, call):
    experiment, weights = write_experiment(tmp_path), _weights(tmp_path, "")
    code, _, err = call("check", experiment, "--actor.model", weights, "--actor.no-random-init")
    assert (code, err) == (0, "")


def test_check_finds_a_model_with_another_tokenizer(tmp_path, call, refused):
    (tmp_path / "other").mkdir()
    experiment, weights = write_experiment(tmp_path), _weights(tmp_path, "")
    own = weights / "tokenizer.json"
    words = ["--actor.model", weights, "--actor.no-random-init", "--tokenizer"]
    words.append(write_task(tmp_path / "other"))
    assert call("check", experiment, *words)[0] == 0
    tokens = json.loads(own.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["1"], vocabulary["7"] = vocabulary["7"], vocabulary["1"]
    own.write_text(json.dumps(tokens))
    says = [f"actor.model {weights} was made for another tokenizer than", "token 3 is '7' there and '1' here"]
    refused("check", experiment, *words, says=says)


def test_check_finds_two_homes(tmp_path, refused):
    path = write_experiment(tmp_path, body=GRAPH.format(TRAIN_TWICE))
    plan = write_plan(path.parent, {**ONE, "actor_train": "t2@0-1", "more_train": "d2@0-1"})
    says = [
        "role 'actor' has two homes",
        "actor_train at t2@0-1",
        "more_train at d2@0-1",
        "must train in one layout",
    ]
    refused("check", path, "--plan", plan, says=says)


@pytest.mark.parametrize("words", drawn(WORDS, 12))
def test_check_finds_words(experiment, refused, words):
    here = str(experiment.parent)
    refused(
        "check",
        experiment,
        *words.format(here=here).split(),
        says=[part.format(here=here) for part in WORDS[words]],
    )


@pytest.mark.parametrize("text", PLANS)
def test_check_finds_plan(tmp_path, experiment, refused, text):
    (tmp_path / "plan.yaml").write_text(text)
    refused("check", experiment, "--plan", tmp_path / "plan.yaml", says=PLANS[text])


def test_check_names_the_line_of_a_file_in_the_current_directory(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n1 / 0\n")
    refused("check", "mine.py", says=["experiment mine.py line 2: ZeroDivisionError"])
    (tmp_path / "their_module.py").write_text("\n\n{}['key']\n")
    (tmp_path / "mine.py").write_text("import their_module\n")
    refused("check", "mine.py", says=["experiment mine.py (", "their_module.py line 3): KeyError: 'key'"])


WATCH = """
from realhf.algorithms.on_policy import graph_of
call = FunctionCall("watch", "host", ("score",), ("seen",), work=HostFunction(lambda batch: {}))
add, experiment.graph = call, (lambda graph=experiment.graph: graph().add(call))
"""


def test_check_finds_a_host_function_without_context(tmp_path, refused):
    says = ["call 'watch': <lambda> cannot be called with two arguments, the batch and the context"]
    refused("check", write_experiment(tmp_path, body=WATCH), says=says)


def test_check_finds_tokens_beyond_the_vocabulary(tmp_path, refused):
    experiment = write_experiment(tmp_path, model={"vocab_size": 5})
    says = ["has token ids up to", "but the vocabulary of actor.model", "ends at 4"]
    refused("check", experiment, says=says)


def test_a_plan_replaces_no_other_file(tmp_path, experiment, refused):
    mine = tmp_path / "mine.py"
    mine.write_text("experiment = 1\n")
    says = [f"--output {mine} exists and is no plan: name another file"]
    refused("plan", experiment, "--cluster", "cpu-laptop", "-o", mine, says=says)
    refused("profile", experiment, "-o", mine, says=[f"--out {mine} exists and is no profile"])
    refused("profile", experiment, "-o", tmp_path, says=[f"--out {tmp_path} is a directory"])
    refused("profile", experiment, "-o", "no/p.yaml", says=["--out no/p.yaml: there is no directory no"])
    assert mine.read_text() == "experiment = 1\n"
    plan = tmp_path / "plan.yaml"
    plan.write_text("# by hand\n\ncalls: {}\n")
    require_output(plan, "--output", first="calls:", what="plan")
    require_output(tmp_path / "new.yaml", "--output", first="calls:", what="plan")


def test_a_run_that_diverges_ends_in_a_sentence(tmp_path, call):
    words = ["--actor.optimizer.lr", "1e30", "--eval-every", "0", "--steps", "6"]
    code, _, err = call("run", write_experiment(tmp_path), "--out", tmp_path / "run", *words)
    assert code == 2 and "Traceback" not in err, err
    sentence, way_on = [line for line in err.splitlines() if line.startswith("realhf: ")][-2:]
    assert sentence.startswith("realhf: call 'actor_train' in step ")
    assert way_on.startswith("realhf: the last checkpoint is that of step ")
    assert "the gradient norm is " in sentence and "lower actor.optimizer.lr" in sentence


@pytest.mark.parametrize("text", EXPERIMENTS)
def test_check_finds_experiment(tmp_path, refused, text):
    path = tmp_path / "experiment.py"
    path.write_text(text)
    refused("check", path, says=EXPERIMENTS[text])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check"], ["needs an experiment file"]),
        (["check", "--steps", 2], ["needs an experiment file"]),
        (["check", "nowhere.py"], ["'nowhere.py'", "no such file"]),
        (["check", REPO / "README.md"], ["README.md", ".py"]),
        (["check", REPO], [f"{str(REPO)!r} is a directory: name the file of an experiment (it has none)"]),
        (["check", REPO / "templates/sft"], ["is a directory", f"({REPO}/templates/sft/experiment.py)"]),
        (["chek", "x.py"], ["there is no command 'chek' (did you mean check?): the commands are run, check"]),
        (["trian"], ["there is no command 'trian' (did you mean run?)"]),
        (["evaluate"], ["there is no command 'evaluate' (did you mean eval?)"]),
        (["mine.py"], ["mine.py: a command comes before the file (did you mean realhf run mine.py?)"]),
        (["version"], ["there is no command 'version' (did you mean --version?)"]),
        ([], ["a command is missing: the commands are run"]),
        (["check", SFT_FILE.with_name("experimnet.py")], [f"did you mean {SFT_FILE}?"]),
        (["check", SFT_FILE.with_name("experiment")], [f"did you mean {SFT_FILE}?"]),
        (["check", REPO / "templat/sft/experiment.py"], [f"did you mean {SFT_FILE}?"]),
        (["check", REPO / "templates/sft/experiment.py", "reward.py"], ["there are two experiment files"]),
        (["chekc"], ["chekc", "run", "check"]),
        ([], ["run", "check"]),
    ],
    ids=str,
)
def test_check_finds_command(refused, words, says):
    refused(*words, says=says)


ELSEWHERE = """
import os
from realhf import DatasetConfig
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
"""


def test_paths_of_the_command_line_begin_where_it_was_started(tmp_path, call, monkeypatch):
    """Those of the file begin where it has changed to."""
    body = ELSEWHERE + 'experiment.eval_dataset = DatasetConfig("held_out.jsonl")'
    path = write_experiment(tmp_path, body=body, steps=1)
    rows = [json.dumps({"prompt": f"{i}+", "answer": "1"}) + "\n" for i in range(8)]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/held_out.jsonl").write_text(rows[0])
    (tmp_path / "rows.jsonl").write_text("".join(rows[1:]))
    write_plan(tmp_path, ONE).rename(tmp_path / "one.yaml")
    for field in ([], ["--dataset.path", "rows.jsonl"], ["--dataset.path=rows.jsonl"]):
        monkeypatch.chdir(tmp_path)
        code, out, err = call("check", path.name, "--plan", "one.yaml", "--json", *field)
        assert code == 0 and json.loads(out)["calls"]["actor_train"]["layout"] == "d1@0", err
        assert json.loads(out)["first_prompt"]["text"].startswith("1+") == bool(field)
    monkeypatch.chdir(tmp_path)
    code, _, err = call("run", path.name, "--plan", "one.yaml")
    assert code == 0, err
    run = tmp_path / f"runs/{path.stem}"
    assert read_jsonl(run / "eval.jsonl")[0]["prompt"] == "0+"
    monkeypatch.chdir(tmp_path)
    code, _, err = call("run", path.name, "--resume", "--steps", 2)
    assert code == 0 and (run / "hf/step_2").is_dir(), err
    monkeypatch.chdir(tmp_path)
    words = ["--model", f"runs/{path.stem}", "--plan", "one.yaml", "--out", "out"]
    code, _, err = call("eval", path.name, *words)
    assert code == 0 and read_jsonl(tmp_path / "out/eval.jsonl") == read_jsonl(run / "eval.jsonl"), err


@pytest.mark.slow
def test_workers_start_where_the_command_was_started(tmp_path):
    path = write_experiment(tmp_path, body=ELSEWHERE, steps=1)
    with Command(*REALHF, "run", path.name, "--nproc", 2, "--out", "out", cwd=tmp_path,
                 PYTHONPATH=str(REPO)) as command:
        code, _, err = command.finish()
    assert code == 0 and (tmp_path / "out/hf/step_1/config.json").is_file(), err


def test_an_experiment_that_reads_the_command_line_finds_nothing_there(tmp_path, call):
    parser = "import argparse, sys\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"
    parser += "assert (parser.parse_args().lr, len(sys.argv)) == (None, 1)"
    path = write_experiment(tmp_path, body=parser)
    argv = sys.argv
    code, out, err = call("check", path, "--steps", 3, "--json")
    assert code == 0 and json.loads(out)["counts"]["steps"] == 3 and sys.argv is argv, err


def test_an_experiment_hides_no_module(tmp_path):
    (tmp_path / "neighbour.py").write_text("number = 5")
    (tmp_path / "wave.py").write_text("")
    path = write_experiment(tmp_path, body="import neighbour\ndef reward(): return neighbour.number")
    load_experiment(str(path.rename(tmp_path / "colorsys.py")))
    import colorsys
    import wave

    assert colorsys.rgb_to_hsv(0, 0, 1) and wave.Wave_read
    function = sys.modules["realhf_experiment_colorsys"].reward
    assert pickle.loads(pickle.dumps(function))() == 5


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("m/model.gguf", "GGUF", ["is a GGUF file", "gguf_file='model.gguf'", "examples/smollm2.py"]),
        ("m", None, ["there is no {}/m/config.json: model.gguf is a GGUF file, and a model is a directory"]),
        ("s/model.safetensors", "", ["model.safetensors is a file of its own: give the directory with"]),
        ("outer", None, ["there is no {0}/outer/config.json (did you mean {0}/outer/inner?)"]),
        ("empty", None, ["there is no {}/empty/config.json, which every Hugging Face model directory has"]),
        ("outr/inner", None, ["'{0}/outr/inner' is neither a path nor a shipped name in models (did you mean "
                              "{0}/outer/inner?)"]),
        ("Qwen2.5-0.5B", None, ["(did you mean qwen2.5-0.5b?); a model of the hub is named organisation"]),
    ],
)
def test_check_says_what_a_path_is_instead_of_a_model(tmp_path, refused, experiment, name, content, says):
    for path in ("m/model.gguf", "outer/inner/config.json", "empty/readme"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    model = tmp_path / name if "/" in name or name in ("m", "outer", "empty") else name
    if content is not None:
        model.parent.mkdir(exist_ok=True)
        model.write_text(content)
    refused("check", experiment, "--actor.model", model, says=[part.format(tmp_path) for part in says])


def test_a_field_of_the_experiment_is_not_one_of_a_role(tmp_path, refused):
    path = tmp_path / "mine.py"
    for text, says in (
        ("from realhf import Role\nRole('x', tokenizer='y')", "(it is a field of the experiment itself"),
        ("from realhf import OptimiserConfig", "cannot import name 'OptimiserConfig' from 'realhf'"),
        ("from realhf import OptimiserConfig", "(did you mean OptimizerConfig?)")):
        path.write_text(text)
        refused("check", path, says=[says])


def test_a_plan_for_other_calls_says_why(tmp_path, refused, experiment):
    plan = write_plan(tmp_path, ONE)
    no_kl = ["calls.ref_forward: the experiment has no such call, as no reference model takes part: "
             "set loss.kl_coef above 0, or remove ref_forward from the plan"]
    refused("check", experiment, "--plan", plan, "--loss.kl-coef", "0", says=no_kl)
    plan = write_plan(tmp_path, ONE | {"critic_forward": "d1@0", "critic_train": "d1@0"})
    others = ["no such call, nor critic_train; its calls are", "is the plan for another algorithm?"]
    refused("check", experiment, "--plan", plan, says=others)
    refused("check", experiment, "--plan", "h100-1x8", says=["it is one in plans/clusters; --cluster takes"])
    refused("check", experiment, "--plan", "grpo4", says=["(did you mean grpo-4?)"])
    refused("check", experiment, "--plan", tmp_path, says=["is a directory: name a YAML file"])
    refused("check", experiment, "--plan", tmp_path / "plann.yaml", says=[f"(did you mean {plan}?)"])


def test_check_proves_the_memory_of_this_machine(tmp_path, call, monkeypatch, experiment):
    """A machine of 64 GB has enough for the tiny model, and not for 7 billion parameters in one process."""
    monkeypatch.setattr("realhf.cli.plan.host_memory_bytes", lambda: 64e9)
    code, out, _ = call("check", experiment)
    assert code == 0 and "\nit fits on this machine: the fullest device, rank 0, needs " in out
    large = tmp_path / "large.py"
    large.write_text(
        "from realhf import GRPO, DatasetConfig, Expected, OptimizerConfig, Role\n"
        "from tests.runtime.tiny import some_reward\n"
        "actor = Role('llama-7b', dtype='bfloat16', random_init=True, optimizer=OptimizerConfig())\n"
        "experiment = GRPO(actor=actor,\n"
        f"    dataset=DatasetConfig({str(tmp_path / 'rows.jsonl')!r}), reward_function=some_reward,\n"
        f"    batch_size=1, tokenizer={str(write_task(tmp_path))!r}, expected=Expected(prompt_tokens=100))\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    code, _, err = call("check", large)
    warning, sentence = err.splitlines()  # The tiny task's tokenizer has no special tokens.
    assert code == 2 and warning.startswith("realhf: warning: actor.model stops at 2 (eos_token_id)")
    assert "large.py: this machine has too little memory: calls.actor_train needs" in sentence
    assert sentence.endswith("; --cluster checks for others")
    code, out, _ = call("check", large, "--nproc", "64")
    assert code == 0 and "memory was not checked: 64 ranks are more than this machine's " in out


def test_an_edit_of_equal_length_within_a_second_counts(tmp_path):
    """Python would use the compiled copy, whose source has the same size and time."""
    names = ("experiment.py", "beside.py", "package/__init__.py", "package/in_it.py", "plain/inner/it.py")
    files = {name: tmp_path / name for name in names}
    (tmp_path / "package").mkdir()
    (tmp_path / "plain/inner").mkdir(parents=True)
    files["package/__init__.py"].write_text("")
    for steps in (3, 7):
        files["beside.py"].write_text(f"STEPS = {steps}\n")
        files["package/in_it.py"].write_text(f"SEED = {steps}\n")
        files["plain/inner/it.py"].write_text(f"PERIOD = {steps}\n")
        files["experiment.py"].write_text(
            "from realhf import SFT\nfrom beside import STEPS\nfrom package.in_it import SEED\n"
            "from plain.inner.it import PERIOD\n"
            f"experiment = SFT(steps=STEPS, seed=SEED, batch_size={steps}, checkpoint_every=PERIOD)\n")
        for file in files.values():
            os.utime(file, (10**9, 10**9))
            if steps == 3:
                py_compile.compile(str(file))
    load = f"load_experiment({str(files['experiment.py'])!r})"
    code = f"from realhf.cli.experiment_file import load_experiment; e = {load}; "
    code += f"print(e.steps, e.seed, e.batch_size, e.checkpoint_every); {load}; import sys; "
    code += f"print(sys.path.count({str(tmp_path)!r}))"
    for directory in ("/", tmp_path):  # The current directory may be on Python's path already.
        found = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True)
        assert found.stdout == "7 7 7 7\n1\n", found.stderr


def test_run_refuses_what_check_refuses(experiment, refused, tmp_path):
    out = tmp_path / "run"
    refused(
        "run",
        experiment,
        "--out",
        out,
        "--dataset.path",
        "nowhere.jsonl",
        says=["dataset.path 'nowhere.jsonl'"],
    )
    assert not out.exists()


def test_check_accepts_sound_input(experiment, call):
    changes = ("--steps", 5, "--batch-size", 8)
    code, out, err = call("check", experiment, "--plan", experiment.parent / "good.yaml", *changes)
    assert (code, err) == (0, "")
    assert "sound on 4 ranks" in out
    assert [line.split() for line in out.splitlines()[1:6]] == [
        ["actor_generate", "generate", "actor", "d4@0-3"],
        ["reward_forward", "host", "-", "d1@0"],
        ["ref_forward", "forward", "ref", "t2@2-3"],
        ["advantages", "host", "-", "d1@0"],
        ["actor_train", "train_step", "actor", "d2t2@0-3"],
    ]


@pytest.mark.parametrize("body", ["", "print('a word from the experiment')"])
def test_check_json_is_one_document(tmp_path, experiment, call, body):
    path = write_experiment(tmp_path, body=body)
    code, out, _ = call("check", path, "--plan", experiment.parent / "good.yaml", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["ranks"] == 4
    assert document["homes"] == {"actor": "d2t2@0-3", "ref": "t2@2-3"}
    assert {name: document["calls"][name]["layout"] for name in GRPO_LAYOUTS} == GRPO_LAYOUTS


def test_check_shows_options(tmp_path, experiment, call):
    plan = yaml.safe_load((experiment.parent / "good.yaml").read_text())
    plan["calls"]["ref_forward"]["offload"] = plan["calls"]["actor_train"]["recompute"] = True
    (path := tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    _, out, _ = call("check", experiment, "--plan", path)
    ends = {"ref_forward": "offload", "actor_train": "recompute"}
    rows = [line.split() for line in out.splitlines()[1:6]]
    assert {row[0]: row[4] for row in rows if len(row) > 4} == ends
    calls = json.loads(call("check", experiment, "--plan", path, "--json")[1])["calls"]
    assert {name: calls[name][end] for name, end in ends.items()} == dict.fromkeys(ends, True)


def test_check_counts_the_cluster(experiment, call):
    code, out, _ = call("check", experiment, "--cluster", "h100-8x8", "--json")
    document = json.loads(out)
    assert (code, document["ranks"]) == (0, 64)
    kernels = {role: {row["work"]: row for row in rows} for role, rows in document["kernels"].items()}
    assert "sampling" in kernels["actor"] and "sampling" not in kernels["ref"]
    assert any("attention" in work for work in kernels["actor"])
    words = call("check", experiment, "--cluster", "h100-8x8")[1]
    row = kernels["ref"]["norms, rotation, activations, logits"]
    reason = f" ({row['reason']})" if row["reason"] else ""
    assert "kernels of ref, by the packages of this machine:" in words
    assert f"{row['work']}: {row['kernels']}{reason}" in words


def test_help(experiment, call):
    for words, says in {
        ("--help",): ["run", "check", "find what is wrong"],
        ("run", "--help"): ["EXP.py", "--nproc", "--plan", "--out"],
        ("check", "--help"): ["EXP.py", "--cluster", "--json"],
        ("run", experiment, "--help"): [
            "--plan",
            "--actor.optimizer.lr",
            "--steps",
            "--loss.average",
            "--sampling.top-p",
        ],
    }.items():
        code, out, err = call(*words)
        assert (code, err) == (0, "")
        for part in says:
            assert part in out
        assert "<function" not in out  # Functions cannot be changed by options.


COMMANDS = (
    "run", "check", "profile", "plan", "realloc", "scaling", "eval", "rollouts", "report", "init",
    "reference")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_explained(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    options, examples = out.split("\noptions:\n")[1].split("\nexamples:\n")
    entries = re.split(r"\n  (?=-)", f"\n{options}")[1:]
    assert entries and [entry for entry in entries if not re.search(r"(  |\n +)\w", entry)] == []
    lines = examples.splitlines()
    assert 1 <= len(lines) <= 4
    for line in lines:
        words = line.removeprefix("  torchrun --nproc-per-node 4 -m").split()
        assert words[:2] == ["realhf", command]
        assert all((REPO / word).is_file() for word in words if word.startswith("examples/"))
        given = {word for word in words if word.startswith("-")}
        fields = {"--steps", "--actor.optimizer.lr", "--eval-dataset.samples"}
        assert given <= {*re.findall(r"--[\w-]+|-o", options)} | fields


ALL_FIELDS = """
from realhf import *
data = DatasetConfig("data.jsonl")
part = Role("m", optimizer=OptimizerConfig(), lora=LoraConfig())
experiment = {}
"""


@pytest.mark.parametrize("kind", [
    "GRPO(data, data, actor=part, ref=part, reward=part)", "PPO(data, data, actor=part, critic=part)",
    "RewardModel(data, data, reward=part)", "SFT(data, data, actor=part)",
])
def test_every_field_is_explained(tmp_path, call, monkeypatch, kind):
    monkeypatch.setenv("COLUMNS", "110")  # Wider terminals get two columns.
    (tmp_path / "mine.py").write_text(ALL_FIELDS.format(kind))
    code, out, _ = call("run", tmp_path / "mine.py", "--help")
    assert code == 0
    lines = [line.strip("│ ") for line in out.split("\nusage: ")[0].splitlines()]
    explained = {line: below for line, below in pairwise(lines) if re.match(r"--\w[\w.-]*(\s|$)", line)}
    assert len(explained) > 30
    assert [line for line, below in explained.items() if below.startswith(("--", "("))] == []
    assert "--actor.lora.rank INT" in explained or "--reward.lora.rank INT" in explained


def test_options_may_stand_before_the_experiment(experiment, call):
    code, out, err = call("check", "--steps", 2, "--no-filter-groups", experiment, "--json", "--batch-size=2")
    assert (code, err) == (0, "")
    assert json.loads(out)["ranks"] == 1


def test_help_names_the_options_of_parts_that_are_not_set(experiment, call):
    out = " ".join(call("run", experiment, "--help")[1].split())
    assert "Parts that are not set have the options" in out and " --actor.lora.no-merge, " in out


def test_version(call):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert call("--version") == (0, f"realhf {project['version']}\n", "")
    assert project["version"] == "0.1.0"


def test_check_leaves_torch_alone(experiment):
    code = "import sys; from realhf.cli.main import main"
    code += "; sys.exit(main(sys.argv[1:]) or 7 * ('torch' in sys.modules))"
    command = [
        sys.executable,
        "-c",
        code,
        "check",
        str(experiment),
        "--plan",
        str(experiment.parent / "good.yaml"),
    ]
    assert subprocess.run(command, cwd=REPO, capture_output=True).returncode == 0
