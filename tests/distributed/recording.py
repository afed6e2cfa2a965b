"""Records what ranks post to their communicators, and finds orders in which they would wait for one another.

A rank's posts form chains. A post begins when the post before it has ended in its chain and on its
communicator, and when all earlier posts of the rank have begun. It ends when the other members have begun it,
too. So the posts of all ranks must drain.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from realhf.distributed.communicators import Chain, Communicators
from realhf.distributed.group import Group
from realhf.distributed.process import WatchedProcess
from realhf.distributed.world import OVER_GLOO, World

MESSAGES = "messages"


@dataclass(frozen=True)
class Post:
    """A launch of one rank: a collective, or messages that it exchanges with some members at once.

    `sends` and `recvs` are the ranks at the other end of its messages, with their bytes, in order.
    """

    communicator: str
    ranks: tuple[int, ...]
    operation: str
    num_bytes: int
    dtype: torch.dtype
    sends: tuple[tuple[int, int], ...] = ()
    recvs: tuple[tuple[int, int], ...] = ()
    chain: Chain = "calls"

    @property
    def what(self) -> tuple[object, ...]:
        """What must be equal on all members of a collective."""
        return self.communicator, self.operation, self.num_bytes, self.dtype

    def __str__(self) -> str:
        return f"{self.operation} of {self.num_bytes} bytes on {self.communicator}"


class PostLog:
    """The posts of one rank in their order. Only one thread may post.

    The `communicators` of its process tell the chain of each post; None: there is one chain.
    """

    def __init__(self, communicators: Communicators | None = None) -> None:
        self.posts: list[Post] = []
        self.communicators = communicators
        self._thread: threading.Thread | None = None

    def add(self, post: Post) -> None:
        now = threading.current_thread()
        first = self._thread = self._thread or now
        if now is not first:
            raise AssertionError(f"two threads post: {first.name}, and {now.name} {post}")
        if self.communicators is not None:
            post = replace(post, chain=self.communicators.posting)
        self.posts.append(post)


class Done:
    """A work that has ended."""

    def wait(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


class RecordingBackend:
    """A communicator that notes what is posted, and passes it on to `inner` if there is one."""

    def __init__(
        self, name: str, ranks: Sequence[int], index: int, log: PostLog, *, inner: Any = None
    ) -> None:
        self._name = name
        self._ranks = tuple(ranks)
        self._index = index
        self._log = log
        self._inner = inner
        self._messages: list[tuple[bool, int, torch.Tensor]] | None = None

    def allreduce(self, tensors, *options):
        return self._note("all_reduce", tensors[0], "allreduce", tensors, *options)

    def _allgather_base(self, out, own):
        assert out.numel() == own.numel() * len(self._ranks) and out.is_contiguous()
        return self._note("all_gather", out, "_allgather_base", out, own)

    def _reduce_scatter_base(self, own, whole):
        assert whole.numel() == own.numel() * len(self._ranks) and whole.is_contiguous()
        return self._note("reduce_scatter", whole, "_reduce_scatter_base", own, whole)

    def broadcast(self, tensor, root):
        return self._note(f"broadcast from {root}", tensor, "broadcast", tensor, root)

    def reduce(self, tensor, root):
        return self._note(f"reduce to {root}", tensor, "reduce", tensor, root)

    def _note(self, operation: str, tensor: torch.Tensor, method: str, *args: Any) -> Any:
        self._log.add(Post(self._name, self._ranks, operation, tensor.nbytes, tensor.dtype))
        return Done() if self._inner is None else getattr(self._inner, method)(*args)

    def _start_coalescing(self) -> None:
        self._messages = []

    def send(self, tensors, peer, tag):
        return self._message(True, peer, tensors[0])

    def recv(self, tensors, peer, tag):
        return self._message(False, peer, tensors[0])

    def _message(self, sending: bool, peer: int, tensor: torch.Tensor) -> Done:
        assert self._messages is not None, "messages over NCCL are coalesced"
        self._messages.append((sending, peer, tensor))
        return Done()

    def _end_coalescing(self) -> Any:
        messages, self._messages = self._messages, None
        ends = [(sending, self._ranks[peer], x.nbytes) for sending, peer, x in messages]
        sends = tuple((rank, num_bytes) for sending, rank, num_bytes in ends if sending)
        recvs = tuple((rank, num_bytes) for sending, rank, num_bytes in ends if not sending)
        total = sum(num_bytes for *_, num_bytes in ends)
        self._log.add(
            Post(self._name, self._ranks, MESSAGES, total, messages[0][2].dtype, sends, recvs))
        return Done() if self._inner is None else self._inner.exchange(messages)


class _Echo(Group):
    """A control group in which all members say what this one says."""

    def all_gather_json(self, document: Any) -> list[Any]:
        return [document] * self.size


class RecordedWorld(World):
    """One rank of a World whose groups record, and need no peers."""

    def __init__(self, rank: int, size: int, *, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.process = WatchedProcess()
        self.ranks_per_host = size
        self.memory = None
        self.log = PostLog(self.process.communicators)
        self._groups = {}

    def group(self, ranks: Sequence[int], *, purpose: str = "data") -> Group:
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            index = key[0].index(self.rank)
            kind = _Echo if purpose in OVER_GLOO else Group
            backend = None
            if kind is Group and len(key[0]) > 1:
                backend = RecordingBackend(f"{purpose} {list(key[0])}", key[0], index, self.log)
            self._groups[key] = kind(key[0], index, backend, native=True, process=self.process)
        return self._groups[key]


def fault_of(logs: Mapping[int, Sequence[Post]]) -> str:
    """Return why the posts of these ranks do not all complete, or an empty string if they do."""
    left = {rank: deque(posts) for rank, posts in logs.items()}
    ready = list(left)
    while ready:
        rank = ready.pop()
        for post in _begun(left[rank]):
            members = _together(rank, post, left)
            if isinstance(members, str):
                return members
            for member, theirs in members.items():
                left[member].remove(theirs)  # The first equal one: that of its communicator that has begun.
            if members:
                ready += members
                break
    stuck = {rank: posts[0] for rank, posts in left.items() if posts}
    return "; ".join(f"rank {rank} waits in {post}" for rank, post in sorted(stuck.items()))


def _begun(posts: Sequence[Post]) -> Iterator[Post]:
    """Yield the posts of a rank that have begun, given all that have not ended."""
    chains: set[str] = set()
    communicators: set[str] = set()
    for post in posts:
        if post.chain in chains or post.communicator in communicators:
            return
        chains.add(post.chain)
        communicators.add(post.communicator)
        yield post


def _together(rank: int, first: Post, left: Mapping[int, Sequence[Post]]) -> dict[int, Post] | str:
    """Return the posts that complete together with one of `rank` that has begun, by rank; none if one must
    wait.

    Return a sentence if the posts contradict one another.
    """
    found = {rank: first}
    queue = [rank]
    while queue:
        here = queue.pop()
        post = found[here]
        peers = post.ranks if post.operation != MESSAGES else [peer for peer, _ in (*post.sends, *post.recvs)]
        for peer in dict.fromkeys(peers):
            theirs = next((x for x in _begun(left[peer]) if x.communicator == first.communicator), None)
            if theirs is None:
                return {}
            if theirs.operation == MESSAGES and not _names(theirs, here):
                return {}  # It first exchanges messages with others.
            if post.operation != MESSAGES and theirs.what != post.what:
                return f"rank {here} posts {post}, and rank {peer} {theirs}"
            if post.operation == MESSAGES and not _match(here, post, peer, theirs):
                return f"messages of ranks {here} and {peer} on {first.communicator} differ: {post}, {theirs}"
            if peer not in found:
                found[peer] = theirs
                queue.append(peer)
    return found


def _names(post: Post, rank: int) -> bool:
    """Return whether a rank is at the other end of any of the messages."""
    return any(end == rank for end, _ in (*post.sends, *post.recvs))


def _match(rank: int, post: Post, peer: int, theirs: Post) -> bool:
    """Return whether two ranks send each other what the other expects."""

    def between(messages: tuple[tuple[int, int], ...], other: int) -> list[int]:
        return [num_bytes for end, num_bytes in messages if end == other]

    return theirs.operation == MESSAGES and (
        between(post.sends, peer) == between(theirs.recvs, rank)
        and between(post.recvs, peer) == between(theirs.sends, rank))
