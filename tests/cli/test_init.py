"""`realhf init`, and examples by name."""

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from realhf.cli.experiment_file import load_experiment
from realhf.cli.init import template_names
from realhf.cli.main import main
from realhf.data.rows import read_rows
from tests.cli_tools import REPO
from tests.samples import marked

PYTEST = (Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def _forgets_other_directories(monkeypatch, tmp_path_factory):
    """Forget the reward.py of other tests' directories: each command has a process of its own."""
    base = str(tmp_path_factory.getbasetemp())
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(base)])


@pytest.fixture(scope="module", params=marked(["grpo", "sft", "dpo"], quick=[0]))
def made(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "new"
    assert main(["init", str(directory), "--template", request.param]) == 0
    return directory


def test_every_template_is_tested():
    assert template_names() == ["dpo", "environment", "grpo", "sft"]


def test_a_new_experiment_is_sound_and_runs(made, monkeypatch, capsys):
    monkeypatch.chdir(made)
    assert main(["check", "experiment.py"]) == 0
    captured = capsys.readouterr()
    assert "sound on 1 rank" in captured.out and captured.err == ""
    assert main(["run", "experiment.py", "--steps", "2"]) == 0
    lines = (made / "runs" / "experiment" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert all("eval/score" in json.loads(line) for line in (lines[0], lines[-1]))


def test_the_test_of_the_reward_passes_and_can_fail(made):
    command = [*PYTEST, made / "test_reward.py"]
    # The file is edited within a second and keeps its size, so a compiled copy would pass for the new one.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    shutil.rmtree(made / "__pycache__", ignore_errors=True)
    # As inside a project of another kind, from its directory.
    around = '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n'
    (made.parent / "pyproject.toml").write_text(around)
    assert subprocess.run(command, cwd=made.parent, env=env).returncode == 0
    reward = made / "reward.py"
    text = reward.read_text()
    reward.write_text(text.replace("0.5 if", "1.0 if"))
    failed = subprocess.run(command, cwd=made, env=env, capture_output=True, text=True)
    reward.write_text(text)
    assert failed.returncode == 1 and "1 failed, 3 passed" in failed.stdout


def test_readme_names_the_files_that_are_there(made):
    lines = (made / "README.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    named = [word.strip("`,") for cell in cells for word in cell.split()]
    assert sorted(named) == sorted(
        ["experiment.py", "reward.py", "test_reward.py", "pytest.ini", "train.jsonl", "held_out.jsonl",
         "model/"])
    assert all((made / name).exists() for name in named)


@pytest.mark.slow
def test_grpo_of_the_template_learns(tmp_path):
    assert main(["init", str(tmp_path / "new")]) == 0
    command = [sys.executable, "-m", "realhf", "run", "experiment.py", "--nproc", "2"]
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path / "new", env=env, check=True)
    summary = json.loads((tmp_path / "new" / "runs" / "experiment" / "summary.json").read_text())
    assert summary["eval_first"] < 0.2 and summary["eval_last"] > 0.7


GAME_FILES = [
    "experiment.py", "environment.py", "test_environment.py", "pytest.ini", "train.jsonl", "held_out.jsonl",
    "model/"]


@pytest.fixture
def game(tmp_path, monkeypatch, capsys):
    """A new experiment with an environment, as the working directory."""
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["init", str(tmp_path / "game"), "--template", "environment"]) == 0
    assert "has an experiment with an environment of 10 files" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "game")
    return tmp_path / "game"


def test_a_new_experiment_with_an_environment_is_sound_and_runs(game, capsys):
    assert main(["check", "experiment.py"]) == 0
    captured = capsys.readouterr()
    assert "the chat template is append-only" in captured.out and captured.err == ""
    small = ["--steps", "2", "--batch_size", "4", "--group_size", "4", "--eval_dataset.max_rows", "4"]
    assert main(["run", "experiment.py", "--nproc", "1", "--out", "out", *small]) == 0
    rows = [json.loads(line) for line in Path("out/rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 16 and all(row["messages"][0]["role"] == "user" for row in rows)
    cells = [line.split("|")[1] for line in Path("README.md").read_text().splitlines() if "| `" in line]
    assert [word.strip("`,") for cell in cells for word in cell.split()] == GAME_FILES
    assert all(Path(name).exists() for name in GAME_FILES)


def test_text_that_the_tiny_model_does_not_know_is_told(game, capsys):
    text = Path("environment.py").read_text()
    Path("environment.py").write_text(text.replace("A coin", "Die Münze"))
    assert main(["check", "experiment.py"]) == 0
    said = "does not know all that the environment said when check played it, such as 'ü'"
    assert said in capsys.readouterr().err


def test_its_tests_pass_and_can_fail(game):
    command = [*PYTEST, "test_environment.py"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run(command, env=env).returncode == 0
    text = Path("environment.py").read_text()
    Path("environment.py").write_text(text.replace("answer == str", "answer != str"))
    assert subprocess.run(command, env=env, capture_output=True).returncode == 1


@pytest.mark.slow
def test_the_game_of_the_template_is_learned(game):
    """Who looks and says what follows from it wins all games, and who guesses then half of them."""
    command = [sys.executable, "-m", "realhf", "run", "experiment.py", "--nproc", "2", "--out", "out"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPO)}, check=True)
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["eval_first"] < 0.0 and summary["eval_last"] > 0.9


def test_rows_and_model_of_ones_own_for_an_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"game": {i}, "ask": "?"}}\n' for i in range(30)))
    given = ["--template", "environment", "--data", "rows.jsonl"]
    assert main(["init", "own", *given, "--model", "some-org/some-model", "--prompt-key", "ask"]) == 0
    assert "own/environment.py reads a column `game`" in capsys.readouterr().err
    assert not Path("own/model").exists() and not Path("own/train.jsonl").exists()
    monkeypatch.chdir("own")
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    experiment = load_experiment("experiment.py")
    assert experiment.actor.model == "some-org/some-model" and experiment.dataset.prompt_key == "ask"
    assert len(read_rows(experiment.dataset)) == 27 and len(read_rows(experiment.eval_dataset)) == 3
    assert main(["init", "other", *given, "--answer-key", "game"]) == 2
    assert "has no reward that reads answers" in capsys.readouterr().err


def test_model_and_data_of_ones_own(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text((made / "train.jsonl").read_text())
    given = ["--model", "some-org/some-model", "--data", "rows.jsonl"]
    assert main(["init", "mine", "--template", "sft", *given]) == 0
    files = {path.name for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert files == {"README.md", "pytest.ini", "experiment.py", "reward.py", "test_reward.py"}
    experiment = load_experiment("mine/experiment.py")
    assert experiment.actor.model == "some-org/some-model" and not experiment.actor.random_init
    assert experiment.actor.optimizer.lr is None and experiment.eval_dataset.split == "train[-7:]"
    assert experiment.dataset.path == str(tmp_path / "rows.jsonl")


OWN = {
    "grpo": {"answer": [7, 12]}, "sft": {"completion": ["7 €", "é\n"]},
    "dpo": {"chosen": ["7", "12"], "rejected": ["ü", "1"]},
}
"""Columns of one's own rows for each template, apart from the prompts."""


@pytest.mark.parametrize(
    ("template", "is_chat"), marked(product(["grpo", "sft", "dpo"], [False, True]), quick=[1]))
def test_rows_of_ones_own_without_a_model(template, is_chat, tmp_path, monkeypatch, capsys):
    def of(role, value):
        return [{"role": role, "content": value}] if is_chat and isinstance(value, str) else value

    monkeypatch.chdir(tmp_path)
    prompts = ["Was ist 3+4?\n", "Wie heißt 'summer'?"]
    key = "question" if is_chat else "prompt"
    rows = [{key: of("user", prompt)} | {k: of("assistant", v[i]) for k, v in OWN[template].items()}
            for i, prompt in enumerate(prompts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    options = ["--template", template, "--data", "rows.jsonl", *(["--prompt-key", key] if is_chat else [])]
    assert main(["init", "own", *options]) == 0
    files = {path.name for path in (tmp_path / "own").rglob("*") if path.is_file()}
    assert files == {"README.md", "pytest.ini", "experiment.py", "reward.py", "test_reward.py", "config.json",
                     "tokenizer.json", "tokenizer_config.json"}
    assert ("column `answer`" in capsys.readouterr().err) == (template != "grpo")
    monkeypatch.chdir("own")
    tests = Path("test_reward.py").read_text()
    assert Path("experiment.py").read_text().count("prompt_key='question'") == (2 if is_chat else 0)
    assert (f"ROWS = Path({str(tmp_path / 'rows.jsonl')!r})" in tests) == (template == "grpo")
    assert ("test_every_row_has" in tests) == ("json" in tests) == (template == "grpo")
    command = [*PYTEST, "test_reward.py"]
    assert subprocess.run(command, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}).returncode == 0
    assert main(["check", "experiment.py", "--batch_size", "2", "--json"]) == 0
    captured = capsys.readouterr()
    text = f"user: {prompts[0]}\nassistant: " if is_chat else prompts[0]
    assert json.loads(captured.out)["first_prompt"] == {"text": text, "tokens": len(text)}
    assert captured.err == ""  # No character is unknown, and all fit into the model's positions.
    assert main(["run", "experiment.py", "--steps", "2", "--batch_size", "2"]) == 0
    summary = json.loads((tmp_path / "own" / "runs" / "experiment" / "summary.json").read_text())
    assert Path(summary["hf_dir"]).name == "step_2"


@pytest.mark.parametrize("template", ["sft", "dpo"])
def test_whole_conversations_of_ones_own(template, tmp_path, monkeypatch, capsys):
    """The tiny model knows the characters of `messages`, and of pairs without a prompt."""
    monkeypatch.chdir(tmp_path)
    chats = [[{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": text}] for text in "78"]
    row = {"messages": chats[0]} if template == "sft" else {"chosen": chats[0], "rejected": chats[1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["init", "own", "--template", template, "--data", "rows.jsonl"]) == 0
    monkeypatch.chdir("own")
    capsys.readouterr()
    assert main(["check", "experiment.py", "--batch_size", "1", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["first_prompt"]["text"] == "user: 3+4?\nassistant: "
    assert answer["first_learned"] == {"text": "7<eos>\n", "tokens": 3} and captured.err == ""


def test_columns_of_ones_own_and_a_held_out_part(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1=", "target": i + 1} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", "rows.jsonl", "--prompt-key", "question", "--answer-key", "target"]
    assert main(["init", "own", *words]) == 0
    monkeypatch.chdir("own")
    monkeypatch.syspath_prepend(str(tmp_path / "own"))  # Before the directories of other tests.
    reward = Path("reward.py").read_text()
    assert "target: list" in reward and "`target` is a column" in reward and "the right answer" in reward
    command = [*PYTEST, "test_reward.py"]
    assert subprocess.run(command, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}).returncode == 0
    experiment = load_experiment("experiment.py")
    assert read_rows(experiment.dataset) == rows[:27] and read_rows(experiment.eval_dataset) == rows[27:]
    capsys.readouterr()
    assert main(["run", "experiment.py", "--steps", "1", "--batch-size", "2"]) == 0
    assert "27 training prompts, 3 held out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["there"], ["there already has reward.py", "name another directory"]),
        (["file"], ["file is a file: name a directory"]),
        (["new", "--template", "grop"], ["--template grop", "(did you mean grpo?)", "dpo, environment, gr"]),
        (["new", "--data", "row.jsonl"], ["--data 'row.jsonl': there is no such file (did you mean rows"]),
        (["new", "--data", "rows.jsonl"],
         ["--data rows.jsonl: --template grpo reads a column 'answer', and row 2 has prompt, chosen"]),
        (["new", "--data", "rows.jsonl", "--template", "dpo"],
         ["--template dpo reads a column 'chosen', and row 1 has prompt, answer"]),
        (["new", "--data", "rows.jsonl", "--prompt-key", "question"],
         ["reads a column 'question', and row 1 has prompt, answer: name the column of the prompts with"]),
        (["new", "--prompt-key", "question"], ["--prompt-key names a column of --data, which is not given"]),
        (["new", "--answer-key", "target"], ["--answer-key names a column of --data, which is not given"]),
        (["new", "--data", "rows.jsonl", "--answer-key", "the answer"],
         ["--answer-key 'the answer': the reward function has an argument of this name, so it must be a "]),
        (["new", "--data", "rows.jsonl", "--answer-key", "prompts"],
         ["--answer-key 'prompts': ", "a name in Python other than prompts, completions, completion_ids, "]),
        (["new", "--model", "some-org/some-model", "--data", "file"], ["--data 'file' ends in ''"]),
        (["new", "--data", "bad.jsonl"], ["bad.jsonl line 1 begins a document over several lines: every"]),
        (["new", "--modle", "x"], ["no option --modle (did you mean --model?)"]),
    ],
)
def test_faults_are_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "reward.py").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "a", "chosen": "1"}\n')
    (tmp_path / "bad.jsonl").write_text("{")
    assert main(["init", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(part in err for part in says), err
    assert (tmp_path / "there" / "reward.py").read_text() == "mine"
    assert not (tmp_path / "there" / "experiment.py").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["ppo_7b", "ppo_7b.py", "examples/ppo_7b.py"])
def test_examples_are_found_by_name_from_any_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert type(load_experiment(name)).__name__ == "PPO"


def test_a_file_goes_before_an_example_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo_7b.py").write_text("from realhf import SFT\nexperiment = SFT()\n")
    assert type(load_experiment("ppo_7b.py")).__name__ == "SFT"


def test_an_unknown_example_is_answered_with_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "gproo"]) == 2
    err = capsys.readouterr().err
    assert "experiment 'gproo': there is no such file (did you mean grpo?), nor a shipped example of " in err
    assert "grpo, " in err and "arithmetic" not in err
