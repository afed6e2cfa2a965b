"""Facts about the machine that timings depend on, and the memory that processes and connections take."""

import importlib
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from realhf.cluster import host_memory_bytes, num_cores
from realhf.distributed.world import World


def describe(world: World) -> dict[str, Any]:
    """Return the facts about the machine and the software, before anything is measured."""
    package = importlib.import_module("realhf")
    cuda = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    return {
        "platform": platform.platform(), "processor": _processor(), "cores": num_cores(),
        "device": cuda or "cpu", "hosts": world.size // world.ranks_per_host, "processes": world.size,
        "threads_per_process": torch.get_num_threads(), "load_before": round(os.getloadavg()[0], 2),
        "torch": str(torch.__version__), "python": platform.python_version(),
        "realhf": package.__version__, "commit": _commit(Path(__file__).parent)}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit(directory: Path) -> str:
    """Return the commit of the clone that the directory is in, or that it is none."""
    try:
        words = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--exclude", "*"]
        described = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip() if described.returncode == 0 else "not a clone"


def device_bytes(world: World) -> float:
    """Return the memory of this rank's device, or on CPU its part of the host's memory."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return host_memory_bytes() / world.ranks_per_host


def measure_memory(world: World) -> dict[str, float]:
    """Return the bytes that a rank's libraries take, and those of one more group of all ranks.

    They are those of the device, or on CPU the resident memory of the process. The result is empty where the
    system does not tell.
    """
    used = _device_use if world.device.type == "cuda" else _resident_bytes
    if used is _resident_bytes and not Path("/proc/self/statm").exists():
        return {}
    mine = [used(), _growth(world, used) if world.size > 1 else 0.0]
    context, communicator = (max(column) for column in zip(*world.control.all_gather_json(mine), strict=True))
    return {"context_bytes": context, "communicator_bytes": communicator}


def _growth(world: World, used: Callable[[], float]) -> float:
    """Return the bytes that a new group of all ranks takes, with its first messages."""
    before = used()
    group = world.group(range(world.size), purpose="profiled")
    group.all_reduce(torch.zeros(1 << 18, device=world.device))
    return max(0.0, used() - before)


def _device_use() -> float:
    """Return the bytes of the device that are taken by something else than tensors."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def _resident_bytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
