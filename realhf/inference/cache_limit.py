"""CacheLimit: how much memory the KV cache of a call may take if the user does not say."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from realhf.distributed.parallel import ParallelGroups
from realhf.errors import UserError
from realhf.models.kv_blocks import SHARE_OF_DEVICE, SHARE_OF_HOST, cache_limit

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")
_MINE = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_NEW_FILES = ("memory.max", "memory.current")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


class CacheLimit:
    """A limit on the memory of a call's KV cache: what fits on the rank of its layout that has least.

    All ranks of the layout agree on it when the call first generates, and keep it for the whole run. A run
    that continues from a checkpoint takes over the limit that is `recorded` there. (Another number of blocks
    would change the order in which samples run, and so the last bits of results.)
    """

    def __init__(self, groups: ParallelGroups, *, recorded: int | None = None) -> None:
        self._groups = groups
        self._has_warned = False
        self._is_unproven = recorded is not None
        self.num_bytes = recorded
        """The limit of each rank; None before they have agreed on one."""

    def agree(self, pass_bytes: Callable[[], float], *, takes_all: bool = False) -> int:
        """Return the limit, on which all ranks of the layout agree when they first call this. `pass_bytes`
        returns what the passes need beside the cache; `kv_blocks.cache_limit` explains `takes_all`."""
        if self.num_bytes is None:
            device = self._groups.world.device.type
            limit = cache_limit(self._free(), pass_bytes(), device_type=device, takes_all=takes_all)
            self.num_bytes = min(self._gather(max(0, int(limit))))
        return self.num_bytes

    def require_recorded(self, call: str, taken: int) -> None:
        """Raise UserError on all ranks of the layout if the limit comes from a checkpoint, and on one of them
        the cache (on this rank of `taken` bytes) does not fit any more. All ranks call this."""
        if not self._is_unproven:
            return
        self._is_unproven = False
        by_rank = self._gather([self._groups.rank, taken, int(self._free())])
        rank, need, free = max(by_rank, key=lambda of_rank: of_rank[1] - of_rank[2])
        if need <= free:
            return
        what = f"the KV cache of this run takes {need / _GIB:.3g} GiB on rank {rank}, as when it began"
        raise UserError(
            f"{call}: {what}, and {free / _GIB:.3g} GiB are free now: free memory, or set kv_cache_gib, "
            "after which results may differ in last bits")

    def warn_once(self, call: str, *, taken: int, needed: int) -> None:
        """Print, once and on one rank, that rows will wait for memory."""
        if taken < needed and not self._has_warned and self._groups.rank == self._groups.layout.ranks[0]:
            self._has_warned = True
            on_device = self._groups.world.device.type == "cuda"
            share = f"{SHARE_OF_HOST:.0%} of what is free"
            if on_device:
                share = f"what the passes leave of {SHARE_OF_DEVICE:.0%} of what is free"
            takes = f"each rank takes {taken / _GIB:.3g} GiB, {share}, for its KV cache"
            needs = f"{needed / _GIB:.3g} GiB would hold all rows, so that some may wait (see kv_cache_gib)"
            print(f"realhf: {call}: {takes}; {needs}", file=sys.stderr, flush=True)

    def _free(self) -> int:
        """Return the bytes that are free for this rank."""
        world = self._groups.world
        neighbours = world.ranks_on_host(world.rank)
        num_users = sum(rank in neighbours for rank in self._groups.layout.ranks)
        return free_bytes(world.device, num_users=num_users)

    def _gather(self, document: Any) -> list[Any]:
        """Return the JSON document of every rank of the layout."""
        layout = self._groups.layout
        return self._groups.world.group(layout.ranks, purpose="control").all_gather_json(document)


class CacheLimits:
    """The limits of all calls that an engine runs."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._limits: dict[str, CacheLimit] = {}

    def of(self, call: str) -> CacheLimit:
        """Return the limit of a call."""
        return self._limits.setdefault(call, CacheLimit(self._groups))

    @property
    def agreed(self) -> dict[str, int]:
        """Return the limits that have been agreed on so far, in bytes by call."""
        return {call: limit.num_bytes for call, limit in self._limits.items() if limit.num_bytes is not None}

    def restore(self, agreed: Mapping[str, int]) -> None:
        """Take over the limits of a checkpoint."""
        self._limits = {call: CacheLimit(self._groups, recorded=size) for call, size in agreed.items()}


def free_bytes(device: torch.device, *, num_users: int) -> int:
    """Return the free memory of a GPU, or this process's share of that of a host with `num_users` processes.
    Memory that torch's allocator keeps for later counts as free."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
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
