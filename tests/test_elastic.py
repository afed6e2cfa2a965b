"""Real torchrun on two hosts, one of which is lost: the run goes on with the other under a new plan."""

import subprocess
from contextlib import ExitStack

import pytest

from tests.cli_tools import (
    GRPO_LAYOUTS,
    ForkedCommand,
    read_jsonl,
    torchrun_on,
    untimed,
    wait_until,
    write_experiment,
    write_plan,
)
from tests.two_hosts import two_hosts_or_skip

STEPS = 60


@pytest.mark.slow
def test_a_lost_host(tmp_path):
    experiment = write_experiment(tmp_path, steps=STEPS, eval_dataset=None, checkpoint_every=1)
    plan, whole, out = write_plan(tmp_path, GRPO_LAYOUTS), tmp_path / "whole", tmp_path / "run"
    with ForkedCommand("run", experiment, "--plan", plan, "--out", whole) as command:
        code, _, err = command.finish()
        assert code == 0, err
    job = ["-m", "realhf", "run", experiment, "--plan", plan, "--out", out, "--timeout", 8]
    elastic = ["--max-restarts", 3, "--nnodes", "1:2"]
    metrics = out / "metrics.jsonl"
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_or_skip())
        started = torchrun_on(hosts, *elastic, *job, per_host=2, rendezvous="c10d")
        commands = [stack.enter_context(command) for command in started]

        def has_begun():
            return metrics.exists() and metrics.read_text().count("\n") > 5

        assert wait_until(lambda: has_begun() or commands[0].ended, seconds=120)
        assert not commands[0].ended, commands[0].finish()
        down = ["ip", "link", "set", hosts[1].interface, "down"]
        subprocess.run([*hosts[1].inside, *down], check=True)
        code, _, err = commands[0].finish(timeout=300)
    assert code == 0, err
    assert "needs 4 ranks, and there are 2: the run has a new plan" in err
    assert "(restart 1 after a failure)" in err
    steps, expected = untimed(metrics), untimed(whole / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for ours, theirs in zip(steps, expected, strict=True):
        for name in theirs.keys() - {name for name in theirs if name.startswith("realloc_")}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-9), (ours["step"], name)
    assert any(event["rank"] == 3 for event in read_jsonl(out / "timeline.jsonl"))
    records = sorted(path.name for path in (out / "failures").iterdir())
    assert {"rank_0.txt", "rank_1.txt"} <= set(records)
    assert "last action: " in (out / "failures" / "rank_0.txt").read_text()
