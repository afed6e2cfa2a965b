"""CacheLimit: how much memory the KV caches of one layout may take if the user does not say."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath

import torch

from realhf.dist.parallel import ParallelGroups
from realhf.kv_blocks import SHARE_OF_FREE

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")
_MINE = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_NEW_FILES = ("memory.max", "memory.current")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


class CacheLimit:
    """A limit on the memory of KV caches: a share of what is free on the rank that has least.

    All ranks of a layout agree on it when they first generate, and keep it for the whole run.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._has_warned = False

    @cached_property
    def num_bytes(self) -> int:
        """The limit of each rank. All ranks of the layout ask for it."""
        ranks = self._groups.layout.ranks
        world = self._groups.world
        neighbours = world.ranks_on_host(world.rank)
        free = free_bytes(world.device, num_users=sum(rank in neighbours for rank in ranks))
        control = world.group(ranks, purpose="control")
        return min(control.all_gather_json(int(SHARE_OF_FREE * free)))

    def warn_once(self, call: str, *, taken: int, needed: int) -> None:
        """Print, once and on one rank, that rows will wait for memory."""
        if taken < needed and not self._has_warned and self._groups.rank == self._groups.layout.ranks[0]:
            self._has_warned = True
            share = f"{SHARE_OF_FREE:.0%} of what is free"
            takes = f"each rank takes {taken / _GIB:.3g} GiB, {share}, for its KV cache"
            needs = f"{needed / _GIB:.3g} GiB would hold all rows, so that some may wait (see kv_cache_gib)"
            print(f"realhf: {call}: {takes}; {needs}", file=sys.stderr, flush=True)


def free_bytes(device: torch.device, *, num_users: int) -> int:
    """Return this process's part of the free memory on its device, which `num_users` processes share if it is
    a host. Memory that torch's allocator keeps for later counts as free."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return _free_on_host() // num_users


def _free_on_host() -> int:
    """Return the bytes that the system and the limits of a container leave."""
    with suppress(OSError, KeyError):
        return max(0, min([_numbers(_MEMINFO)["MemAvailable:"] * 1024, *_left_in_cgroup()]))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # This system has no /proc/meminfo.


def _left_in_cgroup() -> list[int]:
    """Return the bytes that each limit of this process's cgroups (version 2 or 1) leaves, if there are any.

    The kernel counts inactive pages of files as used, but drops them when memory is wanted.
    """
    left = []
    with suppress(OSError):
        for _, controllers, path in (line.split(":", 2) for line in _MINE.read_text().splitlines()):
            if controllers not in ("", "memory"):
                continue
            new = controllers == ""
            root = _CGROUP if new else _CGROUP / "memory"
            for group in (own_group := PurePosixPath(path.lstrip("/")), *own_group.parents):
                with suppress(OSError, ValueError):  # (Without a limit, the file says "max".)
                    files = _NEW_FILES if new else _OLD_FILES
                    limit, used = (int((root / group / name).read_text()) for name in files)
                    stat = _numbers(root / group / "memory.stat")
                    left.append(limit - used + stat["inactive_file" if new else "total_inactive_file"])
    return left


def _numbers(path: Path) -> Mapping[str, int]:
    """Return the first number of each line of a file, by the line's first word."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}
