"""The program that checks a GPU: its limits, the pages about it, and its verdicts."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import gpu_check
from tests.cli_tools import REPO

PAGE = (REPO / "docs" / "gpu.md").read_text()


def test_all_checks_take_less_than_nine_minutes():
    assert gpu_check.longest_seconds(gpu_check.CHECKS, at_once=4) < 9 * 60
    durations = {"models": 150, "generation": 150, "nccl": 60, "environment": 30}
    assert all(gpu_check.CHECKS[name].seconds == seconds for name, seconds in durations.items())
    assert gpu_check.longest_seconds(durations, at_once=1) == sum(durations.values())
    assert gpu_check.longest_seconds(durations, at_once=2) == 150 + 60 + 30
    assert gpu_check.longest_seconds(durations, at_once=9) == 150 + 30


def test_the_page_names_all_checks_and_claims_no_figure():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert {*gpu_check.CHECKS, *gpu_check.NEED_TWO_GPUS} <= named
    figures = PAGE.partition("## Figures")[2].strip().splitlines()[2:]
    assert len(figures) >= 7 and all(row.endswith("| - | - | not taken yet |") for row in figures)


def test_goals_are_judged():
    reached = {
        "mfu": 0.5, "peak_gib": {"actor_train": 30.0, "actor_generate": 21.0},
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
def test_without_a_device_it_says_so(monkeypatch):
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"], cwd=REPO, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "there is no CUDA device" in done.stderr
