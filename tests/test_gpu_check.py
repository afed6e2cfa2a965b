"""The program that checks a GPU: its limits, the pages about it, and its verdicts."""

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest
import torch

import realhf
from benchmarks import gpu_check
from benchmarks.measure.gpu_speed import run_kind
from realhf.runtime.records.about import versions
from tests.cli_tools import REPO
from tests.gpu.models import process_environment

PAGE = (REPO / "docs" / "gpu.md").read_text()


def test_checks_run_in_the_order_of_worth_until_the_time_is_over(monkeypatch, tmp_path, capsys):
    """A failure, of whatever kind, hides nothing; a second call repeats only what has not passed."""
    ran = []
    clock = [0.0]

    def run(name, device, scratch, *, most_seconds):
        ran.append((name, most_seconds))
        clock[0] += 100.0
        if name == "models":
            raise OSError("no space left")
        status = "failed: a kernel" if name == "kernels" and len(ran) < 4 else "passed"
        return {"about": name, "status": status, "seconds": 100.0, "found": {"figure": len(ran)}}

    monkeypatch.setattr(gpu_check, "run_check", run)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    out = tmp_path / "gpu.json"
    arguments = ["gpu_check.py", "--device", "cpu", "--json", str(out), "--minutes", "5.8"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_check.main() == 1
    names = list(gpu_check.CHECKS)
    assert ran == [(names[0], 348.0), (names[1], 248.0), (names[2], 148.0), (names[3], 48.0)]
    checks = json.loads(out.read_text())["checks"]
    assert checks["kernels"]["found"] == {"figure": 2}
    assert checks["models"]["status"] == "failed: OSError: no space left"
    assert checks[names[4]]["status"] == gpu_check.NO_TIME
    ran.clear()
    ran.extend([None] * 4)
    assert gpu_check.main() == 1
    assert [name for name, _ in ran[4:]] == ["kernels", "models", names[4], names[5]]
    assert "passed" in json.loads(out.read_text())["checks"]["kernels"]["status"]


def test_a_failed_part_leaves_the_figures_of_the_others(tmp_path):
    out = tmp_path / "found"

    def kind(device, found):
        with found.part("first"):
            found.add(figure=1)
            raise ValueError("it does not compile\nat all")
        found.add(other=2)

    assert run_kind({"kind": kind}, ["kind", "cpu", str(out)]) == 1
    failed = {"first": "ValueError: it does not compile"}
    assert json.loads(out.read_text()) == {"figure": 1, "failed": failed, "other": 2}


def test_a_check_that_is_ended_says_where_it_is(tmp_path):
    """So do the processes that it has started, and all of them are ended."""
    waits = "def wait():\n    import time\n    time.sleep(100)\nwait()"
    starts = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {waits!r}])\n{waits}"
    output = tmp_path / "output"
    environment = gpu_check._environment("cpu", tmp_path)
    assert gpu_check._run([sys.executable, "-c", starts], environment, output, seconds=3) is None
    printed = output.read_text()
    assert printed.count("Fatal Python error: Aborted") == 2
    assert printed.count("in wait") == 2


@pytest.mark.parametrize("how", ["ends", "is ended"])
def test_tests_for_which_there_was_no_time_are_named(monkeypatch, tmp_path, how):
    """Pytest itself leaves them out, or what it has printed before its end tells the outcomes."""
    report = """<testsuites><testsuite><testcase name="first" time="1"/><testcase name="second" time="0">
        <skipped message="the 1.6 minutes are over"/></testcase></testsuite></testsuites>"""
    printed = "tests/gpu/test_models.py::first PASSED [ 50%]\ntests/gpu/test_models.py::second "

    def run(command, environment, output, *, seconds):
        assert seconds == 120 and "--minutes=1.60" in command
        output.write_text(printed)
        if how == "ends":
            output.with_name("found").write_text(report)
        return 0 if how == "ends" else None

    monkeypatch.setattr(gpu_check, "_run", run)
    result = gpu_check.run_check("models", "cuda:0", tmp_path, most_seconds=120)
    assert result["status"] == gpu_check.NO_TIME and result["tests"][0]["outcome"] == "passed"
    assert result["summary"] == ("1 passed, 1 skipped" if how == "ends" else "1 passed")
    assert result["whole_output"] == printed
    out = tmp_path / "gpu.json"
    gpu_check.Report(out, "cuda").add("models", result)
    assert printed in out.with_suffix(".txt").read_text() and "whole_output" not in out.read_text()


def test_processes_of_gpu_tests_find_packages_of_another_folder(monkeypatch, tmp_path):
    (tmp_path / "of_another_folder.py").write_text("import realhf")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    subprocess.run(
        [sys.executable, "-S", "-c", "import of_another_folder, tests.gpu"], check=True, cwd="/",
        env=process_environment(torch.device("cpu")))


def test_a_run_knows_its_version_where_realhf_is_not_installed(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert versions()["realhf"] == realhf.__version__ and versions()["torch"] == "not installed"


def test_the_page_names_all_checks_and_claims_no_figure():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert {*gpu_check.CHECKS, *gpu_check.NEED_TWO_GPUS} <= named
    figures = PAGE.partition("## Figures")[2].strip().splitlines()[2:]
    assert len(figures) >= 7 and all(row.endswith("| - | - | not taken yet |") for row in figures)


def test_goals_are_judged():
    reached = {
        "mfu": 0.55, "peak_gib": {"actor_train": 30.0, "actor_generate": 21.0},
        "predicted_gib": {"actor_train": 29.0, "actor_generate": 20.0},
    }
    assert gpu_check.goals_missed("train", reached) == []
    worse = {"mfu": 0.4, "peak_gib": {"actor_train": 40.0, "actor_generate": 17.0}}
    missed = gpu_check.goals_missed("train", reached | worse)
    assert [words.partition(",")[0] for words in missed] == [
        "training is at 0.40 of the fastest product", "actor_train took 40.0 GiB at its peak",
        "actor_generate took 17.0 GiB at its peak"]
    decode = {"ratio": 2.0, "decode": {"efficiency": 0.7}}
    assert [words[:32] for words in gpu_check.goals_missed("decode", decode)] == [
        "generation is 2.0 times as fast "]


@pytest.mark.slow
def test_a_check_on_the_cpu_and_what_needs_two_gpus(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--json", str(out)]
    done = subprocess.run(
        [*command, "--only", "no-waits"], cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    check = json.loads(out.read_text())["checks"]["no-waits"]
    assert check["status"] == "passed" and check["found"]["steps"] >= check["found"]["watched_steps"] > 0


@pytest.mark.slow
def test_the_whole_on_a_cpu_and_what_a_second_call_repeats(tmp_path):
    """It takes under 5 minutes on two free cores; others may use these."""
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--json", str(out)]

    def run(minutes):
        done = subprocess.run(
            [*command, "--minutes", str(minutes)], cwd=REPO, capture_output=True, text=True,
            timeout=60 * minutes + 60)
        return done, json.loads(out.read_text())["checks"]

    done, checks = run(40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(checks) == [*gpu_check.CHECKS, *gpu_check.NEED_TWO_GPUS]
    assert {checks[name]["status"] for name in gpu_check.CHECKS} == {"passed"}
    assert {checks[name]["status"] for name in gpu_check.NEED_TWO_GPUS} == {"not run"}
    for name, check in checks.items():
        assert check["summary"] and name in done.stdout
    document = json.loads(out.read_text())
    document["checks"]["kernels"]["status"] = "failed: ended with code 1"
    document["checks"]["environment"]["status"] = gpu_check.NO_TIME
    out.write_text(json.dumps(document))
    again, found = run(10)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line.split()[0] for line in again.stdout.splitlines()] == [
        "environment", "kernels", *gpu_check.NEED_TWO_GPUS, "all"]
    assert found["models"] == checks["models"] and found["kernels"]["status"] == "passed"


@pytest.mark.slow
def test_without_a_device_it_says_so(monkeypatch):
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"], cwd=REPO, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "there is no CUDA device" in done.stderr
