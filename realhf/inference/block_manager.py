"""BlockManager: which blocks of a KV cache are free, and how many users each of the others has."""

import heapq
from collections.abc import Iterable


class BlockManager:
    """An allocator of blocks with reference counts.

    It takes shared blocks from the front and other blocks from the back, so that blocks of each kind lie
    close together.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._users = [0] * num_blocks
        # Two heaps of the free blocks; a block that was taken from one of them stays in the other.
        self._front = list(range(num_blocks))
        self._back = [-block for block in reversed(self._front)]

    def allocate(self, count: int, *, to_share: bool = False) -> list[int]:
        """Take `count` free blocks, which then have one user each. There must be enough of them."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        self.num_free -= count
        taken: list[int] = []
        while len(taken) < count:
            block = heapq.heappop(self._front) if to_share else -heapq.heappop(self._back)
            if self._users[block] == 0:
                self._users[block] = 1
                taken.append(block)
        return taken

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
                self.num_free += 1
                heapq.heappush(self._front, block)
                heapq.heappush(self._back, -block)
