"""Real torchrun on two hosts, each a network namespace: the same run as four local processes."""

import sys
from contextlib import ExitStack

from tests.cli_tools import Command, grpo_run, untimed
from tests.two_hosts import two_hosts_or_skip

PORT = 29400


def test_two_hosts_give_the_metrics_of_four_local_processes(tmp_path):
    experiment, plan, local = grpo_run()
    out = tmp_path / "run"
    job = ["-m", "realhf", "run", experiment, "--plan", plan, "--out", out, "--seed", 3]
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_or_skip())
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{PORT}", "--rdzv-id=test"]
        commands = []
        for i, host in enumerate(hosts):
            # Both namespaces have this machine's name, so torchrun is told who it is.
            identity = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(i == 0)}"]
            command = Command(*host.inside, *torchrun, *identity, *job, GLOO_SOCKET_IFNAME=host.interface)
            commands.append(stack.enter_context(command))
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
