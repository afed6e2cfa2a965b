"""Makes two hosts on one machine: network namespaces joined by a link. Needs root and iproute2."""

import json
import os
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from realhf.distributed.world import World

_PORT = 29400
_TIMEOUT_SECONDS = 120.0

_BURST_BYTES = 1 << 15
"""An idle link may send this much at once: a few of the largest packets."""


class NoNamespacesError(RuntimeError):
    """An error: this machine does not let us make network namespaces."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the link."""

    namespace: str
    interface: str
    address: str

    @property
    def inside(self) -> list[str]:
        """Return the words that make a command run on this host, if they are put before it."""
        return ["ip", "netns", "exec", self.namespace]


@contextmanager
def two_hosts(*, mbit: int | None = None, mtu: int = 1500) -> Iterator[list[Host]]:
    """Make two hosts whose link carries `mbit` megabits per second each way, or as much as the machine can.

    With a rate, packets leave one by one as on a real link, none larger than `mtu`, so that the counters of
    the interfaces count every header.
    """
    pid = os.getpid()
    hosts = [Host(f"realhf-{pid}-{i}", f"rh{pid}v{i}", f"10.203.77.{i + 1}") for i in range(2)]
    try:
        try:
            _make(hosts, mbit=mbit, mtu=mtu)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            raise NoNamespacesError(
                f"no network namespaces can be made here (needs root and iproute2): {reason}"
            ) from None
        yield hosts
    finally:
        for host in hosts:  # The link disappears with its ends.
            for what in (["netns", "delete", host.namespace], ["link", "delete", host.interface]):
                subprocess.run(["ip", *what], capture_output=True, check=False)


def _make(hosts: list[Host], *, mbit: int | None, mtu: int) -> None:
    for host in hosts:
        _run("ip", "netns", "add", host.namespace)
    first, other = (host.interface for host in hosts)
    _run("ip", "link", "add", first, "mtu", mtu, "type", "veth", "peer", "name", other, "mtu", mtu)
    for host in hosts:
        ip = ("ip", "-n", host.namespace)
        name = host.interface
        _run("ip", "link", "set", name, "netns", host.namespace)
        _run(*ip, "address", "add", f"{host.address}/24", "dev", name)
        if mbit is not None:
            _run(*ip, "link", "set", name, "gso_max_segs", 1)
            limits = ("rate", f"{mbit}mbit", "burst", _BURST_BYTES, "latency", "1s")
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", name, "root", "tbf", *limits)
        _run(*ip, "link", "set", name, "up")
        _run(*ip, "link", "set", "lo", "up")


@contextmanager
def stranger_of(host: Host) -> Iterator[Host]:
    """Make a third host, joined to the first by a link of its own, which reaches all addresses of that."""
    pid = os.getpid()
    other = Host(f"realhf-{pid}-s", f"rh{pid}s", "10.203.78.2")
    ip = ("ip", "-n", host.namespace)
    try:
        _run("ip", "netns", "add", other.namespace)
        _run(*ip, "link", "add", f"rh{pid}t", "type", "veth", "peer", "name", other.interface)
        _run(*ip, "link", "set", other.interface, "netns", other.namespace)
        _run(*ip, "address", "add", "10.203.78.1/24", "dev", f"rh{pid}t")
        _run(*ip, "link", "set", f"rh{pid}t", "up")
        there = ("ip", "-n", other.namespace)
        _run(*there, "address", "add", f"{other.address}/24", "dev", other.interface)
        _run(*there, "link", "set", other.interface, "up")
        _run(*there, "route", "add", f"{host.address}/32", "via", "10.203.78.1")
        yield other
    finally:
        subprocess.run(["ip", "netns", "delete", other.namespace], capture_output=True, check=False)


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


def add_options(parser: ArgumentParser, *, mbit: int) -> None:
    """Add the options that benchmarks between two hosts share, and those that `run_again` sets."""
    parser.add_argument("--mbit", type=int, default=mbit, help="rate of the link, each way")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rank", type=int, help=SUPPRESS)
    parser.add_argument("--address", help=SUPPRESS)


def run_again(hosts: list[Host], *, ranks_per_host: int) -> Any:
    """Run this command again in processes of one thread on each host, and return the JSON that rank 0 prints.

    The processes get `--rank`, and the `--address` of the first host.
    """
    processes = []
    try:
        for rank in range(ranks_per_host * len(hosts)):
            host = hosts[rank // ranks_per_host]
            command = [*host.inside, sys.executable, *sys.argv]
            command += ["--rank", str(rank), "--address", hosts[0].address]
            settings = {
                "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": host.interface,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # Hosts need no names.
            }
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=os.environ | settings, stdout=out, text=True))
        text, _ = processes[0].communicate()
        for rank, process in enumerate(processes):
            if process.wait():
                raise RuntimeError(f"rank {rank} failed, see above")
        return json.loads(text)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def meet(rank: int, address: str, *, ranks_per_host: int) -> World:
    """Return the world of a process that `run_again` has started."""
    timeout = timedelta(seconds=_TIMEOUT_SECONDS)
    store = dist.TCPStore(address, _PORT, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
    return World(
        rank=rank, size=2 * ranks_per_host, store=store, timeout_seconds=_TIMEOUT_SECONDS,
        ranks_per_host=ranks_per_host)
