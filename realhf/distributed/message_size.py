"""Checks the sizes that other ranks announce. This module imports no torch."""

MAX_MESSAGE_BYTES = 1 << 34
"""Largest size that a sender may announce. (Parameters travel in messages whose sizes all ranks know.)"""


def checked_length(num_bytes: int, *, rank: int) -> int:
    """Return the size that a rank announces. Raises RuntimeError if no message can have it."""
    if not 0 <= num_bytes <= MAX_MESSAGE_BYTES:
        what = f"rank {rank} announces a message of {num_bytes} bytes, legal are 0 to {MAX_MESSAGE_BYTES}"
        raise RuntimeError(f"{what}: is it a rank of this run, and of the same version of realhf?")
    return num_bytes
