"""realhf from Python: run, check, evaluate and load, with functions that no file has."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

import realhf
from realhf.python import _Cell, save_experiment
from realhf.user_input.files import code_fingerprints, execute_file
from tests.cli_tools import REALHF, REPO, Command, read_jsonl, untimed
from tests.runtime.tiny import make_experiment, write_task

CELL = '''
WEIGHT = 0.5

def shorter(text):
    return WEIGHT / (1 + len(text))

def score(completions, completion_ids):
    return [sum(ids) % 7 / 7 + shorter(text) for ids, text in zip(completion_ids, completions)]
'''


def cell(text: str = CELL) -> dict[str, Any]:
    """Execute a text as notebooks do: its functions are those of `__main__`, and no file has them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), names)
    return names


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def experiment(task: Path, text: str = CELL, **changes: Any) -> Any:
    """GRPO on the tiny task, whose rewards and rows are in memory alone."""
    changes = {"dataset": rows_of(task / "data.jsonl")} | changes
    return make_experiment("grpo", task, reward_function=cell(text)["score"], checkpoint_every=1, **changes)


def interrupt_after(directory: Path, step: int) -> None:
    """Interrupt this process as soon as a run has recorded a step."""
    metrics = directory / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step + 1:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_is_started_interrupted_and_continued(task, tmp_path, capfd):
    of_file = realhf.DatasetConfig(str(task / "data.jsonl"))
    whole = realhf.run(experiment(task, dataset=of_file), out=tmp_path / "whole")
    assert re.fullmatch(
        rf"run {whole.directory}: 3 of 3 steps, reward/mean [\d.]+ -> [\d.]+, eval/score [\d.]+ -> [\d.]+, "
        "model in hf/step_3", repr(whole))
    half = tmp_path / "half"
    threading.Thread(target=interrupt_after, args=(half, 1), daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="run .*half: . of 3 steps"):
        realhf.run(experiment(task), out=half)
    assert f"to continue: realhf run {half}/experiment.py --resume --out {half}" in capfd.readouterr().err
    assert not realhf.load(half).summary
    resumed = realhf.run(experiment(task), out=half, resume=True)
    assert "has changed" not in capfd.readouterr().err
    assert untimed(half / "metrics.jsonl") == untimed(whole.directory / "metrics.jsonl")
    frame = resumed.metrics
    assert list(frame["step"]) == [0, 1, 2, 3] and "step" in resumed.rollouts
    assert frame["reward/mean"].iloc[-1] == read_jsonl(half / "metrics.jsonl")[-1]["reward/mean"]
    assert {"prompt", "completion", "score"} <= set(resumed.rollouts.columns)
    assert len(resumed.evaluation()) == 10
    assert [axes.get_title(loc="left") for axes in resumed.plot().axes] == ["mean reward"]
    ids = torch.tensor([[3, 4, 5]])
    logits = [run.model()(input_ids=ids).logits for run in (whole, resumed)]
    assert torch.equal(*logits)
    assert resumed.tokenizer()("1+1")["input_ids"] == [3, 12, 3]


@pytest.mark.slow
def test_two_processes_are_killed_and_continued_on_rows_in_memory(task, tmp_path):
    of_file = realhf.DatasetConfig(str(task / "data.jsonl"))
    whole = realhf.run(experiment(task, dataset=of_file, steps=6), nproc=2, out=tmp_path / "whole")
    half = tmp_path / "half"
    threading.Thread(target=interrupt_after, args=(half, 1), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        realhf.run(experiment(task, steps=6), nproc=2, out=half)
    code, _, err = Command(*REALHF, "run", half / "experiment.py", "--resume").finish()
    assert code == 0, err
    assert untimed(half / "metrics.jsonl") == untimed(whole.directory / "metrics.jsonl")


def fingerprints(task: Path, path: Path, text: str = CELL) -> dict[str, str]:
    """What a process finds that executes the file of an experiment."""
    path.parent.mkdir(exist_ok=True)
    save_experiment(experiment(task, text), path)
    name = f"realhf_experiment_{path.stem}"
    try:
        execute_file(path, name=name)
        return code_fingerprints()[path.name]
    finally:
        del sys.modules[name]


def test_fingerprints_of_functions_without_a_file(task, tmp_path):
    first = fingerprints(task, tmp_path / "mine.py")
    assert set(first) == {"WEIGHT", "score", "shorter"}
    assert fingerprints(task, tmp_path / "mine.py", "\n# Moved.\n" + CELL) == first
    edits = (("0.5", "0.25", "WEIGHT"), ("% 7", "% 5", "score"), ("(1 +", "(2 +", "shorter"))
    for before, after, name in edits:
        changed = fingerprints(task, tmp_path / "mine.py", CELL.replace(before, after))
        assert {key for key in first if first[key] != changed[key]} == {name}


def test_mistakes_are_one_sentence(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(realhf.UserError, match="^experiment: batch_size is 0: it must be "):
        realhf.check(experiment(task, batch_size=0))
    with pytest.raises(realhf.UserError, match="cannot be saved .*let them open these when they run"):
        realhf.check(experiment(task, CELL.replace("0.5", "__import__('threading').Lock()")))
    with pytest.raises(realhf.UserError, match="resume needs out"):
        realhf.run(experiment(task), resume=True)
    with pytest.raises(realhf.UserError, match="no run directory"):
        realhf.load(tmp_path)
    with pytest.raises(realhf.UserError, match=r"run has no keyword 'learning_rate' \(here it is Role"):
        realhf.run(experiment(task), out="run", learning_rate=1e-3)


@pytest.mark.parametrize(("function", "keywords", "sentence"), [
    ("run", {"otu": "x"}, r"run has no keyword 'otu' \(did you mean out\?\): legal are nproc, plan, out, "),
    ("run", {"step": 3}, r"run has no keyword 'step' \(did you mean steps\?\)"),
    ("check", {"nprocs": 2}, r"check has no keyword 'nprocs' \(did you mean nproc\?\): legal are .* cluster"),
    ("plan", {"clusters": "a"}, r"plan has no keyword 'clusters' \(did you mean cluster\?\)"),
    ("evaluate", {"rewards": "exact"}, r"evaluate has no keyword 'rewards' \(did you mean reward\?\)"),
])
def test_a_misspelt_keyword_is_named(task, function, keywords, sentence):
    with pytest.raises(realhf.UserError, match=sentence):
        getattr(realhf, function)(experiment(task), **keywords)


@pytest.mark.parametrize(("function", "what", "sentence"), [
    ("run", realhf.GRPO, r"run is given the class GRPO \(did you mean GRPO\(...\)\?\): it takes an "),
    ("check", None, "check is given None: it takes an experiment"),
    ("evaluate", {}, "evaluate is given {}: it takes a run, a model's directory, an experiment"),
])
def test_other_things_than_experiments_are_named(function, what, sentence):
    with pytest.raises(realhf.UserError, match=sentence):
        getattr(realhf, function)(what)


def test_rows_of_memory_are_named_by_what_they_were(task):
    rows = rows_of(task / "data.jsonl")
    rows[3] |= {"prompt": 5}
    for form, name in ((pandas.DataFrame(rows), "(a DataFrame)"), (rows, "(rows in memory)"),
                       ((row for row in rows), "(rows in memory)")):
        with pytest.raises(realhf.UserError, match=re.escape(f"dataset {name} row 3: prompt is 5: it must")):
            realhf.check(experiment(task, dataset=form))
    with pytest.raises(realhf.UserError, match=re.escape("eval_dataset (a DataFrame) row 3: prompt is 5")):
        realhf.check(experiment(task, eval_dataset=pandas.DataFrame(rows)))


TERMINAL = """
import sys
sys.path.insert(0, {repo!r})
import realhf
from tests.test_python import experiment
from pathlib import Path
task = Path({task!r})
try:
    realhf.run("missing.py", out="no")
except realhf.UserError as error:
    print("caught:", error, flush=True)
print(realhf.run(experiment(task, steps=2, eval_dataset=None), out="run"), flush=True)
"""


def test_on_a_terminal_progress_is_in_place(task, tmp_path):
    """The script's terminal gets what the command line shows on one, and each sentence once."""
    (tmp_path / "script.py").write_text(TERMINAL.format(repo=str(REPO), task=str(task)))
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 132))
    environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=end,
        stderr=end, start_new_session=True,
    ) as process:
        os.close(end)
        shown = b""
        while True:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:
                break
            shown += data
    text = shown.decode()
    assert process.returncode == 0, text
    assert "caught: experiment 'missing.py': " in text and text.count("experiment 'missing.py'") == 1
    assert "\r\r" not in text
    assert "\x1b[1A" in text or "\x1b[2K" in text  # The table moves up and is written again.
    table = [line for line in text.splitlines() if re.search(r"reward +spread|reward.*seconds", line)]
    assert table and "step 1/2: reward" not in text
    assert "run run: 2 of 2 steps" in text


def test_what_a_run_does_is_no_row_of_the_table_in_a_notebook(capsys):
    pytest.importorskip("IPython.display")
    cell = _Cell()
    for line in ("step 1/3: reward 0.5, cut off 0%", "step 2/3: actor_train, 4 s: batch 1 of 1, pass 2 of 5",
                 "step 2/3: reward 0.75, cut off 1%", "step 3/3: actor_generate, 12 s"):
        cell(line)
    rows, _, work = cell._table().partition("</table>")
    assert re.findall("<tr>(.*?)</tr>", rows) == [
        "<td>step</td><td>reward</td><td>cut off</td>", "<td>1/3</td><td>0.5</td><td>0%</td>",
        "<td>2/3</td><td>0.75</td><td>1%</td>"]
    assert work == "<p>step 3/3: actor_generate, 12 s</p>"
    cell("step 3/3: reward 1, cut off 0%")
    assert cell._table().endswith("<td>3/3</td><td>1</td><td>0%</td></tr></table>")
