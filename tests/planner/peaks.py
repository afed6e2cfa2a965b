"""The predicted memory of a call that is not part of a problem."""

from realhf.planner.memory.activation_memory import CallPieces
from realhf.planner.memory.call_memory import CallPeaks


def peak_memory(
    role, kind, workload, strategy, stage, *, micro_batch_tokens, recompute=False, fused=False
):
    """Return the memory that the call adds at its peak on the fullest rank of a stage."""
    pieces = CallPieces(role, workload, strategy, micro_batch_tokens, recompute, fused)
    return CallPeaks(kind, pieces).on(stage)
