"""Memory of a generation's KV cache: how much it may take, how many rows decode at once, and their blocks.

CacheLimit measures what is free if the user sets no limit. All replicas agree on GenerationLimits; each
cohort of samples derives its CacheSizes from them.
"""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from realhf.calls import Generate
from realhf.distributed.world import ParallelGroups
from realhf.errors import UserError
from realhf.inference.kv_cache import BlockTables
from realhf.inference.response_buffer import PromptGroup, Size
from realhf.models.kv_blocks import (
    SHARE_OF_DEVICE,
    SHARE_OF_HOST,
    SMALL,
    block_size,
    blocks_for,
    cache_limit,
    num_blocks,
)

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")
_MINE = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_NEW_FILES = ("memory.max", "memory.current")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


class GenerationLimits:
    """The limits of all cohorts, the same on all replicas: none refuses a prompt that another one accepts."""

    def __init__(
        self, sizes: Sequence[Size], work: Generate, *, token_bytes: int, num_cohorts: int,
        cache_bytes: int | None = None, budget: int | None = None, fixed_block_size: int | None = None,
        page_tokens: int | None = None, most_response: int | None = None,
    ) -> None:
        """A token takes `token_bytes` of a rank's cache. The cohorts share the rows and the memory of `work`;
        if that sets no limit, `cache_bytes` is a rank's limit (None: there is none). A row gets at most
        `budget` tokens (None: as many as `work` allows). A cache that rests has a `fixed_block_size`;
        blocks of a paged cache have a multiple of `page_tokens`. `most_response` are the most tokens of a
        response in turns, for which the caller has seen to the model's positions."""
        self._is_in_turns = most_response is not None
        max_new = work.sampling.max_new_tokens if most_response is None else most_response
        self._max_new = max_new
        self.work = work
        self.num_cohorts = num_cohorts
        self.budget = budget
        self.new_tokens = max_new if budget is None else min(budget, max_new)
        """Most tokens that are drawn for a row."""
        self._token_bytes = token_bytes
        self._cache_bytes = cache_bytes
        self._longest = max((size.num_undrawn for size in sizes), default=0) + max_new
        prompts = [(size.num_undrawn, size.num_samples) for size in sizes]
        self.block_size = block_size(prompts or [(0, 1)], max_new_tokens=max_new, page_tokens=page_tokens)
        has_begun = any(size.num_drawn for size in sizes)
        if page_tokens is None and has_begun and self.affordable(self._least) < self._least:
            # The samples were accepted in an earlier round, perhaps with small blocks.
            self.block_size = min(self.block_size, SMALL)
        if fixed_block_size is not None:
            self.block_size = fixed_block_size

    @property
    def block_bytes(self) -> int:
        return self._token_bytes * self.block_size

    @property
    def _least(self) -> int:
        """Number of blocks with which a cohort can run any sample."""
        return num_blocks(self._longest, self.block_size) + 1

    def affordable(self, count: int) -> int:
        """Return how many of `count` blocks a cohort may have: at least enough for one sample, unless the
        user has set the limit."""
        if (gib := self.work.kv_cache_gib) is not None:
            return min(count, int(gib * _GIB / self.num_cohorts) // self.block_bytes)
        if self._cache_bytes is None:
            return count
        return min(count, max(self._least, self._cache_bytes // self.num_cohorts // self.block_bytes))

    def admit(self, longest: int) -> None:
        """Take a sample of so many tokens into account. Raises UserError if it cannot fit in the cache."""
        self._longest = max(self._longest, longest)
        self.check(None)

    def check(self, num_positions: int | None) -> None:
        """Raise UserError if a sample cannot fit in the model's positions or in the cache."""
        if not self._is_in_turns:
            check_positions(self._longest - self._max_new, self._max_new, num_positions)
        if self.affordable(self._least) < self._least:
            least_gib = self._least * self.num_cohorts * self.block_bytes / _GIB
            least_gib *= 1.01  # This exceeds what rounding to three digits takes away.
            most = "the most of its turns" if self._is_in_turns else "sampling.max_new_tokens"
            raise UserError(
                f"kv_cache_gib is {self.work.kv_cache_gib:g} GiB: one sample of {self._longest} tokens "
                f"(prompt and {most}) needs {least_gib:.3g} GiB")


class CacheSizes:
    """The sizes of a cohort's cache and tables, large enough that prompts of these sizes can run."""

    def __init__(self, sizes: Sequence[Size], limits: GenerationLimits) -> None:
        self.block_size = limits.block_size
        num_samples = sum(size.num_samples for size in sizes)
        self.num_slots = min(-(-limits.work.max_rows // limits.num_cohorts), num_samples)
        # (For rows that end in this round, because they reach `max_new_tokens`, this is too much.)
        self._longest = max((size.num_tokens for size in sizes), default=0) + limits.new_tokens
        self.num_wanted = blocks_for(
            [(size.num_tokens, size.num_samples) for size in sizes], size=self.block_size,
            num_slots=self.num_slots, max_new_tokens=limits.new_tokens)
        """Blocks with which no row has to wait for memory."""
        self.num_blocks = limits.affordable(self.num_wanted)

    def tables(self, cached_blocks: int | None = None) -> BlockTables:
        """Return empty tables for a cache of `cached_blocks` blocks (None: `num_blocks`)."""
        count = self.num_blocks if cached_blocks is None else cached_blocks
        return BlockTables(
            num_slots=self.num_slots, num_blocks=count, block_size=self.block_size,
            blocks_per_row=num_blocks(self._longest, self.block_size))

    def num_at_once(self, groups: Sequence[PromptGroup]) -> int:
        """Return how many of the groups, from the first on, find slots and blocks at the beginning."""
        rows = blocks = 0
        for number, size in enumerate(group.size for group in groups):
            own_blocks = min(size.num_samples, self.num_slots - rows) * (size.num_samples > 1)
            blocks += num_blocks(size.num_tokens, self.block_size) + own_blocks
            if rows >= self.num_slots or blocks > self.num_blocks:
                return number
            rows += size.num_samples
        return len(groups)


def agreed_sizes(groups: Sequence[PromptGroup], gather: Callable[[Any], list[Any]]) -> list[Size]:
    """Return three sizes of each replica: of its longest prompt, of its longest prompt with several samples,
    and of the prompt that is longest without drawn tokens.

    GenerationLimits depend on no other sizes. Each replica passes its own groups; `gather` returns the JSON
    documents of all replicas. Raises UserError on all replicas if a prompt is empty.
    """
    sizes = [group.size for group in groups]
    several = [size for size in sizes if size.num_samples > 1]
    longest = [max(candidates) for candidates in (sizes, several) if candidates]
    longest += [max(sizes, key=lambda size: size.num_undrawn)] if sizes else []
    empty = [i for group in groups if not group.tokens for i in group.ids]
    gathered = gather([longest, empty])
    if empty := [i for _, ids in gathered for i in ids]:
        raise UserError(f"the prompt of sample {min(empty)} is empty: it must have at least one token")
    return [Size(*size) for sizes, _ in gathered for size in sizes]


def check_positions(longest_prompt: int, max_new_tokens: int, num_positions: int | None) -> None:
    """Raise UserError if a prompt of this many tokens and its response exceed the model's positions."""
    if num_positions is not None and longest_prompt + max_new_tokens > num_positions:
        raise UserError(
            f"a prompt has {longest_prompt} tokens and sampling.max_new_tokens is {max_new_tokens}: "
            f"the model has {num_positions} positions")


class PassMemory(NamedTuple):
    """The bytes that passes need on a rank beside the KV cache."""

    temporary: float  # At their peak.
    absent: float = 0.0  # Copies of weights that the call makes and that do not exist now.


class CacheLimit:
    """A limit on the memory of a call's KV cache: what fits on the rank of its layout that has least.

    All ranks of the layout agree on it when the call first generates, and `settle` it after the first step,
    for the whole run. A run that continues from a checkpoint takes over the limit that is `recorded` there.
    (Another number of blocks would change the order in which samples run, and so the last bits of results.)
    """

    def __init__(self, groups: ParallelGroups, *, recorded: int | None = None) -> None:
        self._groups = groups
        self._has_warned = False
        self._is_unproven = recorded is not None
        self._measure: Callable[[], float] | None = None
        """Measures the limit of this rank again; None once it is settled."""
        self.num_bytes = recorded
        """The limit of each rank; None before they have agreed on one."""

    def agree(self, pass_bytes: Callable[[], PassMemory], *, takes_all: bool = False) -> int:
        """Return the limit, on which all ranks of the layout agree when they first call this. `pass_bytes`
        returns what the passes need now beside the cache, and is called again when the limit is settled:
        copies of weights that a call releases at its end do not exist then. `kv_blocks.cache_limit` explains
        `takes_all`."""
        if self.num_bytes is None:
            device = self._groups.world.device.type

            def measured() -> float:
                passes = pass_bytes()
                free = self._free() - passes.absent
                return cache_limit(free, passes.temporary, device_type=device, takes_all=takes_all)

            self._measure = measured
            self.num_bytes = self._least(measured())
        return self.num_bytes

    def settle(self) -> None:
        """Measure the limit again, if this run has agreed on it. All ranks of the layout call this when every
        call of a step has run."""
        if self._measure is not None:
            self.num_bytes = self._least(self._measure())
            self._measure = None

    def _least(self, limit: float) -> int:
        return min(self._gather(max(0, int(limit))))

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
        return self._limits.setdefault(call, CacheLimit(self._groups))

    @property
    def agreed(self) -> dict[str, int]:
        """Return the limits that have been agreed on so far, in bytes by call."""
        return {call: limit.num_bytes for call, limit in self._limits.items() if limit.num_bytes is not None}

    def settle(self, *, besides: Collection[str] = ()) -> None:
        """Settle all limits but those of some calls, whose caches are in use."""
        for call, limit in self._limits.items():
            if call not in besides:
                limit.settle()

    def restore(self, agreed: Mapping[str, int]) -> None:
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
