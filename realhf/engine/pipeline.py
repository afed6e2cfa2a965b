"""Pipeline parallelism: the order of a stage's micro-batches, and the messages between stages."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from realhf.dist.group import Pending
from realhf.dist.parallel import ParallelGroups


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


def run_pipeline(
    forward: Callable[[int, torch.Tensor | None], torch.Tensor], groups: ParallelGroups,
    *, hidden_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Run micro-batches through the stages, with backward passes if autograd is on; return the last stage's
    results.

    `forward(i, hidden)` computes micro-batch i from the previous stage's hidden states (None on the first)
    and returns hidden states; the last stage returns a loss to differentiate, or any result. Each direction
    has its own group and a stage waits for old sends only, so that no order of stages can deadlock.
    """
    stage = groups.at.pp
    train = torch.is_grad_enabled()
    passes = one_forward_one_backward(len(hidden_shapes), stage=stage, num_stages=groups.layout.pp)
    if not train:
        passes = [step for step in passes if step.direction == "forward"]
    inputs: dict[int, torch.Tensor | None] = {}
    outputs: dict[int, torch.Tensor] = {}
    pending: list[Pending] = []
    for direction, i in passes:
        if direction == "forward":
            hidden = None
            if not groups.is_first_stage:
                hidden = torch.empty(hidden_shapes[i], dtype=dtype, device=groups.world.device)
                groups.pp.exchange([], [(stage - 1, hidden)])
                hidden.requires_grad_(train)
            output = forward(i, hidden)
            if train:
                inputs[i] = hidden
            if train or groups.is_last_stage:
                outputs[i] = output
            if not groups.is_last_stage:
                pending.append(groups.pp.post([(stage + 1, output.detach().contiguous())], []))
        else:
            hidden = inputs.pop(i)
            output = outputs.pop(i)
            grad = None if groups.is_last_stage else torch.empty_like(output)
            if grad is not None:
                groups.pp_back.exchange([], [(stage + 1, grad)])
            torch.autograd.backward(output, grad)
            if hidden is not None:
                assert hidden.grad is not None
                pending.append(groups.pp_back.post([(stage - 1, hidden.grad.contiguous())], []))
        while len(pending) > 2:  # Older messages have arrived; waiting for them frees their tensors.
            pending.pop(0).wait()
    for message in pending:
        message.wait()
    return list(outputs.values()) if groups.is_last_stage else []

