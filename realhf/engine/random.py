"""Counter-based uniform numbers: Philox4x32-10 (Salmon et al., SC 2011)."""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox_4x32(counter: list[torch.Tensor], key: tuple[int, int], *, rounds: int = 10) -> list[torch.Tensor]:
    """Four 32-bit words, as int64 tensors, from a counter of four such words and a key of two numbers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        low0, high0 = _multiply(c0, _MULTIPLIERS[0])
        low1, high1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return [c0, c1, c2, c3]


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of a 32 x 32 bit product; done in halves, because int64 has a sign."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return ((high & 0xFFFF) << 16) | (low & 0xFFFF), high >> 16


def uniform(seed: int, *, sample_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) of float64 with 53 random bits, a function of (seed, sample id, position) alone."""
    zero = torch.zeros_like(positions)
    words = philox_4x32(
        [sample_ids & _MASK, (sample_ids >> 32) & _MASK, positions, zero],
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    return (words[0] >> 5 << 26 | words[1] >> 6).to(torch.float64) / 2.0**53
