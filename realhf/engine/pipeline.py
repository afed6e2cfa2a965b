"""Pipeline parallelism: the order of a stage's micro-batches, and the messages between stages."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from realhf.distributed.group import Messages, Pending
from realhf.distributed.world import ParallelGroups


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage."""

    direction: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(num_micro_batches: int, *, stage: int, num_stages: int) -> list[Pass]:
    """Return the passes of one stage in 1F1B order (Narayanan et al. 2021, arXiv:2104.04473)."""
    num_warmup = min(num_stages - stage - 1, num_micro_batches)
    # Warm-up: fill the pipeline.
    passes = [Pass("forward", i) for i in range(num_warmup)]
    # Steady state: one forward, one backward.
    for i in range(num_warmup, num_micro_batches):
        passes += [Pass("forward", i), Pass("backward", i - num_warmup)]
    # Cool-down: drain it.
    first = num_micro_batches - num_warmup
    return passes + [Pass("backward", i) for i in range(first, num_micro_batches)]


class _Exchange:
    """The messages of one stage during a batch."""

    def __init__(
        self, groups: ParallelGroups, hidden_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._groups = groups
        self._hidden_shapes = hidden_shapes
        self._dtype = dtype
        self._sent: list[Pending] = []

    def __call__(self, sends: Messages, following: Pass | None, *, at_once: bool) -> torch.Tensor | None:
        """Post a result, and return the input of the pass that follows, if another stage makes it.

        With `at_once` both are one post, as the neighbour sends at the same time.
        """
        groups = self._groups
        received = None
        recvs: Messages = []
        if following is not None:
            peer = groups.at.pp + (-1 if following.direction == "forward" else 1)
            if 0 <= peer < groups.layout.pp:
                shape = self._hidden_shapes[following.micro_batch]
                received = torch.empty(shape, dtype=self._dtype, device=groups.world.device)
                recvs = [(peer, received)]
        if at_once:
            outgoing, incoming = groups.pp.post_both(sends, recvs)
        else:
            outgoing = groups.pp.post(sends, [])
            incoming = groups.pp.post([], recvs)
        if sends:
            self._sent.append(outgoing)
        while len(self._sent) > 2:  # Older messages have arrived; waiting for them frees their tensors.
            self._sent.pop(0).wait()
        incoming.wait()
        return received

    def finish(self) -> None:
        """Wait until all results have been received."""
        for message in self._sent:
            message.wait()


def forward_passes(
    groups: ParallelGroups, outputs: dict[int, Any],
    *, hidden_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield each micro-batch's number and its hidden states from the previous stage (None on the first).

    The caller stores in `outputs`, by this number, what it computes of them: hidden states or, on the last
    stage, the loss to differentiate (None without one). Before it gets the next micro-batch, hidden states
    are sent on, and if autograd is on, the backward passes run that 1F1B order puts here.

    In the steady state, where two neighbours send to each other at the same time, each posts its result with
    the request for its next input, as Megatron-LM does. So no stage blocks even if every post waits for its
    peers, and the posts of a stage for one another.
    """
    stage = groups.at.pp
    train = torch.is_grad_enabled()
    passes = one_forward_one_backward(len(hidden_shapes), stage=stage, num_stages=groups.layout.pp)
    if not train:
        passes = [step for step in passes if step.direction == "forward"]
    inputs: dict[int, torch.Tensor | None] = {}
    exchange = _Exchange(groups, hidden_shapes, dtype)
    received = exchange([], passes[0] if passes else None, at_once=False)
    for (direction, i), following in zip(passes, [*passes[1:], None], strict=False):
        sends: Messages = []
        if direction == "forward":
            hidden = None if received is None else received.requires_grad_(train)
            yield i, hidden
            output = outputs[i] if train else outputs.pop(i)
            if not groups.is_last_stage:
                sends = [(stage + 1, output.detach().contiguous())]
            if train:
                inputs[i] = hidden
        else:
            hidden = inputs.pop(i)
            torch.autograd.backward(outputs.pop(i), received)
            if hidden is not None:
                assert hidden.grad is not None
                sends = [(stage - 1, hidden.grad.contiguous())]
        # In the steady state forward and backward passes take turns: the backward pass that follows is of the
        # micro-batch that entered `later_stages` earlier, and the neighbour sends its gradient meanwhile.
        later_stages = groups.layout.pp - stage - 1
        neighbour_sends = following is not None and following.direction != direction and (
            direction == "backward" or i - following.micro_batch == later_stages)
        received = exchange(sends, following, at_once=neighbour_sends)
    exchange.finish()
