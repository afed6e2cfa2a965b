"""Each program of examples/control learns alike under three plans, and goes on exactly after a kill.

The plans of `srl_ppo`, which are inline and remote, are in test_srl_ppo.py.
"""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from realhf.cli.main import main
from tests.cli_tools import ForkedCommand, untimed, wait_until
from tests.control import programs

PLANS = {
    "hil_serl": (
        {"play_alone": "d1@1", "act_alone": "d1@1", "critic_train": "d1@1"},
        {"act": "d1@1", "act_alone": "d2@2-3", "critic_train": "d2@0-1", "actor_train": "d2@2-3"}),
    "ss_orl": (
        dict.fromkeys(("idm_train", "label", "critic_train", "values", "actor_train"), "d2@0-1"),
        {"idm_train": "d2@0-1", "label": "d1@2", "critic_train": "d2@2-3", "values": "d1@1",
         "actor_train": "d2@0-1"}),
    "pasta": (
        dict.fromkeys(("pretrain", "imitate", "clone"), "d2@0-1"),
        {"pretrain": "d2@0-1", "imitate": "d2@2-3", "clone": "d1@1"})}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs")
    programs.write_rows(path)
    return path


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_changes_no_number(pool, directory, name):
    """On one rank, with replicas or calls on two, and with calls apart on four."""
    settings = {"steps": 4}
    one, *others = (
        pool.run(programs.run, name, directory, layouts, settings)[0] for layouts in ({}, *PLANS[name]))
    for other in others:
        assert not programs.differences(other, one)


@pytest.mark.parametrize(
    "name", [pytest.param("srl_ppo", marks=pytest.mark.slow), "hil_serl", "ss_orl", "pasta"])
def test_a_killed_run_goes_on_exactly(directory, monkeypatch, tmp_path, name):
    """It ends with the metrics and the weights, bit for bit, of a run that nobody has killed."""
    monkeypatch.chdir(directory)
    settings = programs.SMALL[name] | {
        "dtype": "float64", "steps": 16, "checkpoint_every": 1, "keep_checkpoints": 2}
    words = ["run", str(programs.EXAMPLES / f"{name}.py")]
    for key, value in settings.items():
        words += [f"--no-{key}"] if value is False else [f"--{key}", str(value)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*words, "--out", str(whole)]) == 0
    with ForkedCommand(*words, "--out", killed, cwd=directory) as command:
        assert wait_until(lambda: any((killed / "checkpoints").glob("step_*")), seconds=120)
        for pid in command.processes():
            os.kill(pid, signal.SIGKILL)
    assert len(untimed(killed / "metrics.jsonl")) < settings["steps"]
    assert main([*words, "--out", str(killed), "--resume"]) == 0
    assert untimed(killed / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
    exported = sorted(path.relative_to(whole) for path in whole.rglob("hf/**/model.safetensors"))
    assert exported
    for path in exported:
        ours, expected = load_file(killed / path), load_file(whole / path)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in expected), path
