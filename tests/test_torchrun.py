"""Real torchrun on two hosts, each a network namespace, gives the metrics of equally many local processes."""

from contextlib import ExitStack

import pytest

from tests.cli_tools import GRPO_LAYOUTS, make_grpo_run, torchrun_on, untimed
from tests.two_hosts import two_hosts_or_skip


@pytest.mark.slow
def test_two_hosts_give_the_metrics_of_two_local_processes(grpo_run, tmp_path):
    experiment, plan, local = grpo_run
    _assert_equal_runs(experiment, plan, local, tmp_path / "run", per_host=1)


@pytest.mark.slow
def test_two_hosts_give_the_metrics_of_four_local_processes(tmp_path):
    make_grpo_run(tmp_path, GRPO_LAYOUTS)
    files = [tmp_path / name for name in ("tiny_experiment.py", "plan.yaml", "run")]
    _assert_equal_runs(*files, tmp_path / "over_hosts", per_host=2)


def _assert_equal_runs(experiment, plan, local, out, *, per_host):
    job = ["-m", "realhf", "run", experiment, "--plan", plan, "--out", out, "--seed", 3]
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_or_skip())
        commands = [stack.enter_context(command) for command in torchrun_on(hosts, *job, per_host=per_host)]
        for command in commands:
            code, _, err = command.finish()
            assert code == 0, err
    assert _metrics(out) == _metrics(local)
    assert (out / "eval.jsonl").read_bytes() == (local / "eval.jsonl").read_bytes()
    for directory in (out, local):
        assert len(_metrics(directory)) == 3


def _metrics(directory):
    """The steps without what depends on the clock or, like bounds, on how many hosts there are."""
    steps = untimed(directory / "metrics.jsonl")
    return [{k: v for k, v in step.items() if not k.startswith("realloc_over_bound/")} for step in steps]
