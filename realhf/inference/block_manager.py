"""BlockManager: which blocks of a KV cache are free, and how many users each of the others has."""

from bisect import insort
from collections.abc import Iterable


class BlockManager:
    """An allocator of blocks with reference counts.

    It takes shared blocks from the front and other blocks from the back, so that blocks of each kind lie
    close together.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._free = sorted(blocks)
        """The free blocks, rising."""
        self._users = dict.fromkeys(self._free, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        return len(self._users)

    @property
    def blocks(self) -> list[int]:
        """All blocks, free or not."""
        return list(self._users)

    def grow(self, blocks: Iterable[int]) -> None:
        """Add free blocks."""
        for block in blocks:
            self._users[block] = 0
            insort(self._free, block)

    def allocate(self, count: int, *, to_share: bool = False) -> list[int]:
        """Take `count` free blocks, which then have one user each. There must be enough of them."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        start = 0 if to_share else self.num_free - count
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        for block in taken:
            self._users[block] = 1
        return taken if to_share else taken[::-1]

    def share(self, blocks: Iterable[int]) -> None:
        """Add one user to each block."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free"
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each block; a block without users becomes free."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free"
            self._users[block] -= 1
            if self._users[block] == 0:
                insort(self._free, block)
