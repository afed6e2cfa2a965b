"""Attacks on the sandbox fail, as root and as an ordinary user; each succeeds without it."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rewards import attacks
from tests.rewards.attacks import ATTACKS, CHEATS, applies

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the sandbox needs Linux")
LANDLOCK = [True, pytest.param(False, marks=pytest.mark.slow)]


def _failures(chosen, outcomes):
    """Return the attacks that have succeeded, or failed for another reason than theirs."""
    return [(attack.kind, outcome) for attack, outcome in zip(chosen, outcomes, strict=True)
            if outcome.is_hit or outcome.reason not in attack.reasons.split("|")]


def _as_ordinary_user(*arguments):
    """Run the table as another user, with the system's interpreter, as only root may read this one."""
    python = "/usr/bin/python3"
    readable = all(path.stat().st_mode & 0o005 == 0o005 for path in (ROOT, *ROOT.parents))
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"],
                             capture_output=True, text=True) if os.path.exists(python) else None
    if os.geteuid() != 0 or not readable or version is None or "True" not in version.stdout:
        pytest.skip("needs root, a readable checkout and Python 3.11 of the system")
    result = subprocess.run(
        [python, "-B", "-m", "tests.rewards.attacks", *arguments], cwd=ROOT, capture_output=True, text=True,
        user=4321, group=4321, extra_groups=[])
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def _failed_controls(rows):
    """Return the attacks that do no harm without a sandbox. A container may refuse some by itself."""
    failed = [row for row in rows if not row[2]]
    words = ("Operation not permitted", "Permission denied", "Function not implemented")
    refused = [row for row in failed if any(word in row[3] for word in words)]
    return [row for row in failed if row not in refused or len(refused) > len(rows) / 5]


def test_the_table_has_attacks_of_each_kind():
    kinds = Counter(attack.kind for attack in ATTACKS)
    assert len(kinds) == 13 and min(kinds.values()) >= 9
    assert len({(attack.kind, attack.name) for attack in ATTACKS}) == len(ATTACKS)
    assert len(ATTACKS) + len(CHEATS) > 230


@pytest.mark.parametrize("landlock", LANDLOCK)
def test_no_attack_succeeds(landlock):
    chosen = [attack for attack in ATTACKS
              if applies(attack, landlock=landlock) and "slow" not in attack.flags]
    assert _failures(chosen, attacks.all_outcomes(chosen, landlock=landlock)) == []


@pytest.mark.slow
@pytest.mark.parametrize("landlock", [True, False])
def test_no_attack_succeeds_that_has_a_sandbox_for_itself(landlock):
    chosen = [attack for attack in ATTACKS if applies(attack, landlock=landlock)]
    assert _failures(chosen, attacks.all_outcomes(chosen, landlock=landlock, alone=True)) == []


@pytest.mark.slow
def test_no_attack_of_an_ordinary_user_succeeds():
    rows = _as_ordinary_user("--quick")
    assert [row for row in rows if not row[-1]] == [] and len(rows) > 150


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--alone",), ("--no-landlock",)])
def test_no_attack_of_all_of_an_ordinary_user_succeeds(option):
    rows = _as_ordinary_user(*option)
    assert [row for row in rows if not row[-1]] == [] and len(rows) > 190



@pytest.mark.parametrize("chosen", [
    [attack for attack in ATTACKS if attack.kind == "kernel's memory"],
    pytest.param([attack for attack in ATTACKS if applies(attack)], marks=pytest.mark.slow),
], ids=["kernel", "all"])
def test_each_attack_succeeds_without_a_sandbox(chosen):
    rows = [(a.kind, a.name, is_hit, output) for a, (is_hit, output) in attacks.controls(chosen).items()]
    assert _failed_controls(rows) == []


@pytest.mark.slow
def test_each_attack_of_an_ordinary_user_succeeds_without_a_sandbox():
    rows = _as_ordinary_user("--controls")
    assert _failed_controls(rows) == [] and len(rows) > 190


def test_cheats_get_no_reward():
    with ThreadPoolExecutor(3) as pool:
        rewards = list(pool.map(lambda cheat: attacks.reward_of(*cheat[1:]), CHEATS))
    assert [cheat for cheat, reward in zip(CHEATS, rewards, strict=True) if reward != 0.0] == []
    for form in ("text", "near", "close"):
        assert attacks.reward_of(form, "def square(n): return n * n") == 1.0
    assert attacks.reward_of("program", "print(int(input()) ** 2)") == 1.0


@pytest.mark.slow
def test_each_cheat_deceives_a_naive_judge():
    assert [cheat for cheat in CHEATS if not attacks.deceives_a_naive_judge(*cheat[1:])] == []


def test_the_script_prints_each_attack():
    result = subprocess.run(
        [sys.executable, "-m", "tests.rewards.attacks", "shared memory: messages"], cwd=ROOT,
        capture_output=True, text=True)
    assert json.loads(result.stdout) == ["shared memory", "messages", False, "error", True]
