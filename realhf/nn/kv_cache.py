"""KVCache: keys and values of one rank's layers during generation, and attention of single tokens over it.

Shape suffixes: B rows in use, T tokens of all rows end to end, N query heads, K key-value heads, D head dim,
L filled positions.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


class KVCache:
    """Preallocated K and V of shape (rows, kv heads, max_len, head_dim) per local layer.

    `lens` has the filled length of each row in use. One decoding step is an `append` in every layer, then one
    `advance`.
    """

    def __init__(
        self, num_layers: int, *, rows: int, kv_heads: int, max_len: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        # Zeros: what lies behind a row's end is multiplied by probability zero and must be finite.
        zeros = partial(torch.zeros, (rows, kv_heads, max_len, head_dim), dtype=dtype, device=device)
        self.k, self.v = [zeros() for _ in range(num_layers)], [zeros() for _ in range(num_layers)]
        self.max_len = max_len
        self.lens = torch.zeros(rows, dtype=torch.long, device=device)
        self._longest = 0
        self._step: tuple[Tensor, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lens)

    def start(self, seq_lens: Sequence[int]) -> None:
        """Rows 0.. now hold prompts of these lengths; the layers fill them in by `write_prefill`."""
        self.lens = torch.tensor(seq_lens, dtype=torch.long, device=self.lens.device)
        self._set_longest(max(seq_lens, default=0))

    def write_prefill(
        self, layer: int, k_TKD: Tensor, v_TKD: Tensor, *, row_T: Tensor, position_T: Tensor
    ) -> None:
        """Writes packed prompts to (row, position) of each token."""
        self.k[layer].transpose(1, 2)[row_T, position_T] = k_TKD
        self.v[layer].transpose(1, 2)[row_T, position_T] = v_TKD

    def append(self, layer: int, k_BKD: Tensor, v_BKD: Tensor) -> None:
        """Writes one token per row in use at position `lens`."""
        self.write_prefill(layer, k_BKD, v_BKD, row_T=self._step_inputs()[0], position_T=self.lens)

    def advance(self) -> None:
        """Counts the appended tokens, once all layers have them."""
        self.lens = self.lens + 1
        self._set_longest(self._longest + 1)

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was: drops finished rows, reorders, or copies a row."""
        for buffers in (self.k, self.v):
            for layer, old in enumerate(buffers):
                if len(rows) > len(old):
                    buffers[layer] = old.new_zeros((len(rows), *old.shape[1:]))
                buffers[layer][: len(rows), :, : self._longest] = old[:, :, : self._longest][rows]
        self.lens = self.lens[rows]
        self._set_longest(int(self.lens.max()) if len(rows) else 0)

    def repeat(self, counts: int | Sequence[int] | Tensor) -> None:
        """Each row becomes that many equal neighbours: n samples of one prompt. Grows the cache if needed."""
        each = torch.as_tensor(counts, device=self.lens.device).expand(self.num_rows)
        self.keep(torch.arange(self.num_rows, device=self.lens.device).repeat_interleave(each))

    def _set_longest(self, longest: int) -> None:
        assert longest <= self.max_len, "a row is longer than the cache was made for"
        self._longest, self._step = longest, None

    def _step_inputs(self) -> tuple[Tensor, Tensor]:
        """Row numbers (B) and an additive mask (B, L) that hides what lies behind each row's new token."""
        if self._step is None:
            rows = torch.arange(self.num_rows, device=self.lens.device)
            hidden_BL = torch.arange(self._longest + 1, device=self.lens.device) > self.lens[:, None]
            mask_BL = torch.zeros(hidden_BL.shape, dtype=self.k[0].dtype, device=self.lens.device)
            self._step = rows, mask_BL.masked_fill_(hidden_BL, float("-inf"))
        return self._step

    def attention_inputs(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of what is filled, just appended tokens included: k and v as (B * K, L, D), and mask_BL."""
        k, v = (x[: self.num_rows].flatten(0, 1) for x in (self.k[layer], self.v[layer]))
        return k[:, : self._longest + 1], v[:, : self._longest + 1], self._step_inputs()[1]


def decode_attention(q_BND: Tensor, cache: KVCache, layer: int) -> Tensor:
    """Grouped-query attention of each row's newest token over its cached positions: out_BND.

    Reads the cache in place. The softmax runs in float32, or float64 when the model does.
    """
    k, v, mask_BL = cache.attention_inputs(layer)
    (B, N, D), L = q_BND.shape, mask_BL.shape[1]
    K = k.shape[0] // max(B, 1)
    q = q_BND.reshape(B * K, N // K, D)
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, N, L)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probs = (scores.to(wide) * D**-0.5 + mask_BL[:, None]).softmax(-1).to(v.dtype)
    return torch.bmm(probs.view(B * K, N // K, L), v).view(B, N, D)
