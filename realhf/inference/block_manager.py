"""BlockManager: which blocks of a KV cache are free, and how many users each of the others has."""

from bisect import insort
from collections.abc import Iterable


class BlockManager:
    """An allocator of blocks with reference counts.

    It takes shared blocks from the front and other blocks from the back, so that blocks of each kind lie
    close together.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        """The free blocks, rising."""
        self._users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        return len(self._users)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks at the end, so that there are `num_blocks` in all."""
        self._free += range(self.num_blocks, num_blocks)
        self._users += [0] * (num_blocks - self.num_blocks)

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
