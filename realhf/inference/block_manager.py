"""BlockManager: which blocks of a KV cache are free, and how many users the others have."""

import heapq
from collections.abc import Iterable


class BlockManager:
    """Blocks that rows will share are taken from the front, others from the back: so both lie together."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.num_free = num_blocks, num_blocks
        self._users = [0] * num_blocks
        self._front = list(range(num_blocks))  # Heaps; what has been taken by way of the other stays in them.
        self._back = [-block for block in reversed(self._front)]

    def allocate(self, count: int, *, to_share: bool = False) -> list[int]:
        """Free blocks, each now with one user; there are enough of them."""
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
        """Another user of each."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free"
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user of each less; those without any are free."""
        for block in blocks:
            assert self._users[block] > 0, f"block {block} is free"
            self._users[block] -= 1
            if self._users[block] == 0:
                self.num_free += 1
                heapq.heappush(self._front, block)
                heapq.heappush(self._back, -block)
