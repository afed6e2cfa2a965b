"""Two hosts on one machine: network namespaces joined by a wire. Needs root and iproute2."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BURST_BYTES = 1 << 15
"""What an idle wire may send at once: a few of the largest packets."""


class NoNamespacesError(RuntimeError):
    """This machine does not let us make network namespaces."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the wire."""

    namespace: str
    interface: str
    address: str

    @property
    def inside(self) -> list[str]:
        """What a command starts with to run on this host."""
        return ["ip", "netns", "exec", self.namespace]


@contextmanager
def two_hosts(*, mbit: int | None = None, mtu: int = 1500) -> Iterator[list[Host]]:
    """Two hosts whose wire carries `mbit` megabits per second each way, or as much as the machine can.

    With a rate, packets leave one by one as on a real wire, none larger than `mtu`, so that the counters of
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
        for host in hosts:  # The wire goes with its ends.
            for what in (["netns", "delete", host.namespace], ["link", "delete", host.interface]):
                subprocess.run(["ip", *what], capture_output=True, check=False)


def _make(hosts: list[Host], *, mbit: int | None, mtu: int) -> None:
    for host in hosts:
        _run("ip", "netns", "add", host.namespace)
    one, other = (host.interface for host in hosts)
    _run("ip", "link", "add", one, "mtu", mtu, "type", "veth", "peer", "name", other, "mtu", mtu)
    for host in hosts:
        ip, name = ("ip", "-n", host.namespace), host.interface
        _run("ip", "link", "set", name, "netns", host.namespace)
        _run(*ip, "address", "add", f"{host.address}/24", "dev", name)
        if mbit is not None:
            _run(*ip, "link", "set", name, "gso_max_segs", 1)
            limits = ("rate", f"{mbit}mbit", "burst", _BURST_BYTES, "latency", "1s")
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", name, "root", "tbf", *limits)
        _run(*ip, "link", "set", name, "up")
        _run(*ip, "link", "set", "lo", "up")


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
