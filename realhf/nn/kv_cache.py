"""KVCache: keys and values of one rank's layers during generation, and attention of single tokens over it.

Shape suffixes: B rows, T tokens of all rows end to end, N query heads, K key-value heads, D head dim,
L filled positions of the longest row.
"""

import torch
from torch import Tensor

from realhf.nn.attention import AttentionKind, masked_attention


class KVCache:
    """K and V of `shape` (rows, kv heads, max_len, head_dim) per local layer; `lens` has the rows' lengths.

    With `value_dim`, values are the first dims of the keys and not held a second time.
    Prompts come by one `start` and a `write` in every layer; a decoding step is an `advance`, then a `write`
    and an `attention` in every layer.
    """

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], *, value_dim: int | None = None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        # Zeros: what lies behind a row's end is multiplied by probability zero and must be finite.
        parts = 2 if value_dim is None else 1
        self._kv = [torch.zeros(parts, *shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._value_dim = value_dim
        self._longest = 0
        self.lens = torch.zeros(shape[0], dtype=torch.long, device=device)

    def start(self, lens: Tensor) -> None:
        """The rows now hold prompts of these lengths (on the host)."""
        self.lens, self._longest = lens.to(self.lens.device), int(lens.max())

    def advance(self) -> None:
        """Every row gets one more token."""
        self.lens = self.lens + 1
        self._longest += 1
        self._visible_BL = torch.arange(self._longest, device=self.lens.device) < self.lens[:, None]

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, *, row_T: Tensor, position_T: Tensor) -> None:
        news = (k_TKD, v_TKD) if self._value_dim is None else (k_TKD,)
        for cached, new in zip(self._kv[layer].transpose(2, 3), news, strict=True):
            cached[row_T, position_T] = new

    def attention(self, layer: int, q_BND: Tensor, kind: AttentionKind) -> Tensor:
        """Grouped-query attention of each row's newest token over its cached positions: out_BND."""
        visible_BL = self._visible_BL
        if kind.window is not None and kind.window < self._longest:
            at = torch.arange(self._longest, device=self.lens.device)
            visible_BL = visible_BL & (at >= self.lens[:, None] - kind.window)
        k, *others = self._kv[layer][..., : self._longest, :]
        v = others[0] if others else k[..., : self._value_dim]
        q = q_BND.unflatten(1, (k.shape[1], -1))  # the query heads of a group in the place of positions
        return masked_attention(q, k, v, visible_BL[:, None, None], kind).flatten(1, 2)

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was: drops finished rows, reorders, or copies a row."""
        for layer, old in enumerate(self._kv):
            self._kv[layer] = old[:, rows]
        self.lens = self.lens[rows]
        self._longest = int(self.lens.max()) if len(rows) else 0

    def repeat(self, counts: Tensor) -> None:
        """Each row becomes that many equal neighbours: n samples of one prompt."""
        self.keep(torch.repeat_interleave(counts))
