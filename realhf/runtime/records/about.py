"""about.json: what a run was started with besides its settings and its plan. Imports no torch by itself."""

import hashlib
import importlib
import importlib.metadata
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realhf.distributed import tags
from realhf.realloc.links import Links
from realhf.runtime.compile.program import Program
from realhf.user_input.files import read_bytes, read_object

if TYPE_CHECKING:
    from realhf.distributed.world import World

ABOUT = "about.json"
PROFILES = "profile"
"""The folder with the traces of torch's profiler, step_N_rank_R.json.gz."""
_ROUND_TRIPS = 8
"""Of so many round trips between two hosts, the fastest tells most about their clocks."""
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
_MOST_SOURCE_BYTES = 10_000_000


def versions() -> dict[str, str]:
    """Return the versions of what computes, and as `realhf code` a digest of this package's files."""
    package = importlib.import_module("realhf")  # It need not be installed, so that it has no metadata.
    found = {"python": platform.python_version(), "realhf": package.__version__}
    found["realhf code"] = _digest_of_package()
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def _digest_of_package() -> str:
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(read_bytes(path, most=_MOST_SOURCE_BYTES))
    return digest.hexdigest()[:16]


def clocks_ahead(world: "World", *, now: Callable[[], float] = time.time) -> dict[int, float]:
    """Return the seconds by which the clock of each rank is ahead of that of rank 0, on rank 0.

    Ranks on the host of rank 0 are left out. Every rank calls this.
    """
    ahead: dict[int, float] = {}
    for leader in range(world.ranks_per_host, world.size, world.ranks_per_host):
        fastest = math.inf
        for _ in range(_ROUND_TRIPS):
            if world.rank == 0:
                sent = now()
                world.control.send_json(None, [leader], tag=tags.CLOCK).wait()
                theirs = world.control.recv_json(leader, tag=tags.CLOCK)
                received = now()
                if received - sent < fastest:
                    fastest = received - sent
                    offset = theirs - (sent + received) / 2
                    ranks = range(leader, min(leader + world.ranks_per_host, world.size))
                    ahead |= dict.fromkeys(ranks, offset)
            elif world.rank == leader:
                world.control.recv_json(0, tag=tags.CLOCK)
                world.control.send_json(now(), [0], tag=tags.CLOCK).wait()
    return ahead


def about_run(
    program: Program, *, ranks_per_host: int, device: str, links: Links, data: Mapping[str, Any],
    sources: Mapping[str, Any], tokenizer: str, clocks: Mapping[int, float], earlier: Path | None = None,
) -> dict[str, Any]:
    """Return the document of about.json.

    `data` and `sources` are the fingerprints of rows, code and models; `clocks` are the seconds by which the
    clock of a rank is ahead of that of rank 0. `earlier` is the file of the run that this one continues.
    """
    commands = read_object(earlier).get("commands", []) if earlier is not None and earlier.is_file() else []
    command = shlex.join(["realhf", *sys.argv[1:]])
    calls = [
        {"name": call.name, "kind": call.kind, "role": call.role, "inputs": list(call.inputs),
         "outputs": list(call.outputs), "layout": str(program.plan[call.name].layout)}
        for call in program.graph.order]
    memory = {
        call: {
            str(rank): {part: round(size) for part, size in parts.items()} for rank, parts in ranks.items()}
        for call, ranks in program.predicted_memory.items()}
    return {
        "commands": [*commands, {"command": command, "time": time.time(), "directory": os.getcwd()}],
        "versions": versions(), "host": socket.gethostname(), "device": device, "cores": os.cpu_count(),
        "num_ranks": program.num_ranks, "ranks_per_host": ranks_per_host,
        "links": links.about, "tokenizer": os.path.abspath(tokenizer),
        "calls": calls, "data": dict(data), "sources": dict(sources),
        "clocks": {str(rank): ahead for rank, ahead in clocks.items()},
        "predicted": dict(program.predicted) | ({"memory": memory} if memory else {})}
