"""Run directories belong to one run."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from realhf.errors import UserError
from realhf.runtime.records.run_directory import (
    LOCK,
    RunDirectory,
    check_run_directory,
    find_resumption,
    new_run_directory,
)


def test_many_runs_at_once_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(new_run_directory("grpo"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16
    assert {path.name for path in found} == {"grpo", *(f"grpo-{i}" for i in range(2, 17))}


def test_a_directory_in_use_is_refused_until_its_process_ends(tmp_path):
    code = (
        "import sys, pathlib; from realhf.runtime.records.run_directory import RunDirectory;"
        "d = RunDirectory(pathlib.Path(sys.argv[1])); print('claimed', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(UserError, match=f"run is in use by another run, process {other.pid} on "):
            RunDirectory(tmp_path / "run")
        other.kill()
    RunDirectory(tmp_path / "run").release()


@pytest.mark.parametrize("record", [None, "", '{"step": 0, "eval/sc'])
def test_a_run_without_a_record_leaves_its_directory_free(tmp_path, record):
    (tmp_path / "config.json").write_text("{}")
    if record is not None:
        (tmp_path / "metrics.jsonl").write_text(record)
    claimed = RunDirectory(tmp_path)
    assert claimed.path == tmp_path
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    claimed.release()


def test_a_directory_stays_where_it_was_when_the_current_one_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claimed = RunDirectory(Path("runs/mine"))
    monkeypatch.chdir("/")
    assert claimed.path == tmp_path / "runs" / "mine" and claimed.path.is_dir()
    claimed.release()


def test_a_run_with_a_record_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="already holds a run: add --resume to continue it"):
        RunDirectory(tmp_path)


def test_paths_where_no_directory_can_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file is a file: name a directory"):
        check_run_directory(tmp_path / "file")
    with pytest.raises(UserError, match=r"--out .*file/run: .*(file is a file|Not a directory)"):
        check_run_directory(tmp_path / "file" / "run")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # (Root may write everywhere.)
    with pytest.raises(UserError, match=r"--out .*run: there is no permission to write in "):
        check_run_directory(tmp_path / "run")


def test_what_resume_may_name(tmp_path):
    run = tmp_path / "run"
    for name in ("step_2", "step_10", "step_4.part", "step_6.removed", "step_best"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    steps = {10: run / "checkpoints/step_10", 2: run / "checkpoints/step_2"}
    for source in (run, run / "checkpoints"):
        found = find_resumption("run", resume=str(source), out=None)
        assert (found.out, list(found.checkpoints.items())) == (run, list(steps.items()))
    for name in ("step_2", "step_best"):  # The latter is a copy that somebody has kept.
        with pytest.raises(UserError, match="the run has a checkpoint of step 10: branch off to a new dir"):
            find_resumption("run", resume=str(run / "checkpoints" / name), out=None)
        found = find_resumption("run", resume=str(run / "checkpoints" / name), out=tmp_path / "new")
        assert list(found.checkpoints.values()) == [run / "checkpoints" / name]
    with pytest.raises(UserError, match="is no directory: name a run directory or one of its checkpoints"):
        find_resumption("run", resume=str(tmp_path / "nothing"), out=None)
