"""Turns errors of a model's call into sentences that say what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realhf.errors import UserError
from realhf.graph import FunctionCall

_MEMORY = {
    "generate": "lower max_rows, sampling.max_new_tokens or (native engine) kv_cache_gib, prefill_tokens",
    "forward": "lower calls.{name}.micro_batch_tokens in the plan",
    "train_step": "lower calls.{name}.micro_batch_tokens in the plan, or set calls.{name}.recompute",
}
"""Kind of call -> advice when memory runs out."""


@contextmanager
def explaining(call: FunctionCall, rank: int, step: int) -> Iterator[None]:
    """Raise UserError with advice if the call runs out of memory or diverges."""
    try:
        yield
    except FloatingPointError as error:
        advice = f"lower {call.role}.optimizer.lr, or look for extreme rewards and data"
        if call.kind != "train_step":
            advice = (
                f"weights of {call.role} are NaN or too large, by a damaged file, by a learning rate that is "
                "too high, or because its dtype cannot hold their products")
        raise UserError(f"call {call.name!r} in step {step}: {error}: {advice}") from error
    except (MemoryError, RuntimeError) as error:
        what = str(error).partition("DefaultCPUAllocator: ")[2]
        if not what and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        what = ". ".join((what or str(error) or type(error).__name__).split(". ")[:2]).rstrip(".")
        advice = f"{_MEMORY[call.kind].format(name=call.name)}, or give it another layout"
        raise UserError(f"call {call.name!r} ran out of memory on rank {rank} ({what}): {advice}") from error
