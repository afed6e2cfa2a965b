"""Messages: one rank's part of a Schedule, as what it sends to and receives from each peer, by round."""

from typing import NamedTuple

from realhf.realloc.schedule import Schedule
from realhf.region import Region, region_size

LARGE_BYTES = 1 << 20
"""Boxes of at least this size travel alone, so that they need no packing where they lie end to end in memory;
smaller ones to the same peer share one message per round."""


class Message(NamedTuple):
    """Boxes, in global indices, that travel end to end to or from a peer. `forwarded`: as in Transfer."""

    peer: int
    sending: bool
    forwarded: bool
    boxes: list[tuple[str, Region]]


def messages_of(schedule: Schedule, rank: int) -> list[list[Message]]:
    """The messages of a rank, by round.

    Both ends of a wire list theirs in the same order. A rank starts with the peers behind itself, so that no
    port is everybody's first.
    """
    rounds: list[list[Message]] = [[] for _ in range(schedule.num_rounds)]
    shared: dict[tuple[int, int, bool, bool], Message] = {}
    for number, (source, target, name, region, forwarded) in schedule.transfers(rank):
        sending = source == rank
        peer = target if sending else source
        if region_size(region) * schedule.itemsize >= LARGE_BYTES:
            rounds[number].append(Message(peer, sending, forwarded, [(name, region)]))
        elif (key := (number, peer, sending, forwarded)) in shared:
            shared[key].boxes.append((name, region))
        else:
            shared[key] = Message(peer, sending, forwarded, [(name, region)])
            rounds[number].append(shared[key])
    for messages in rounds:
        messages.sort(key=lambda message: (message.peer <= rank, message.peer))
    return rounds
