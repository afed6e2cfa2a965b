"""Real torchrun on two hosts, each a network namespace: the same run as four local processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.cli_tools import Command, grpo_run, untimed

PORT = 29400


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of a wire."""

    namespace: str
    interface: str
    address: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts joined by a veth pair."""
    pid = os.getpid()
    made = [Host(f"realhf-{pid}-{i}", f"rh{pid}v{i}", f"10.203.77.{i + 1}") for i in range(2)]
    try:
        try:
            for host in made:
                _ip("netns", "add", host.namespace)
            ends = [host.interface for host in made]
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for host in made:
                _ip("link", "set", host.interface, "netns", host.namespace)
                _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
                _ip("-n", host.namespace, "link", "set", host.interface, "up")
                _ip("-n", host.namespace, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            pytest.skip(f"no network namespaces can be made here (needs root and iproute2): {reason}")
        yield made
    finally:
        for host in made:  # The wire goes with its ends.
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
            subprocess.run(["ip", "link", "delete", host.interface], capture_output=True)


def test_two_hosts_give_the_metrics_of_four_local_processes(hosts, tmp_path):
    experiment, plan, local = grpo_run()
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{hosts[0].address}:{PORT}",
        "--rdzv-id",
        "test",
    ]
    job = ["-m", "realhf", "run", experiment, "--plan", plan, "--out", out, "--seed", 3]
    with ExitStack() as stack:
        commands = []
        for i, host in enumerate(hosts):
            inside = ["ip", "netns", "exec", host.namespace]
            # Both namespaces have this machine's name, so torchrun is told who it is.
            identity = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(i == 0)}"]
            command = Command(*inside, *torchrun, *identity, *job, GLOO_SOCKET_IFNAME=host.interface)
            commands.append(stack.enter_context(command))
        for command in commands:
            code, _, err = command.finish()
            assert code == 0, err
    assert untimed(out / "metrics.jsonl") == untimed(local / "metrics.jsonl")
    assert (out / "eval.jsonl").read_bytes() == (local / "eval.jsonl").read_bytes()
    for directory in (out, local):
        assert len(untimed(directory / "metrics.jsonl")) == 3
