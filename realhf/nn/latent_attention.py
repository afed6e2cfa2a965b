"""LatentAttention: DeepSeek's multi-head latent attention (arXiv:2405.04434, section 2.1).

Shape suffixes: T tokens, H hidden, N this rank's heads, C latent dims, L = C + R cached dims; per head: P
dims of queries and keys without rotation, R rotated ones, D = P + R, V value dims.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from realhf.attention.choose import packed_backend
from realhf.attention.interface import AttentionKind, AttentionShape
from realhf.devices.half_precision import widened
from realhf.distributed.autograd import copy_to_group, sum_over_group
from realhf.distributed.group import Group
from realhf.models.model_config import ModelConfig
from realhf.nn.attention import Attend, attend_each
from realhf.nn.lora import Adapted, adapted_linear
from realhf.nn.norm import rms_norm
from realhf.nn.rope import Angles, rotate

_NORM_EPS = 1e-6  # The latents' norms do not use the epsilon of config.json, as in transformers.


class LatentAttention:
    """Attention over this rank's heads, with keys and values computed from one latent vector per token.

    The cache holds the latent and the rotated dims of the key, which all heads share. Attention to the cache
    is multi-query attention over these: instead of keys and values, queries and outputs are multiplied with
    the up-projections.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, tp: Group, adapters: Adapted
    ) -> None:
        assert config.mla is not None
        self.config = config
        self.mla = config.mla
        self.tp = tp
        self.adapters = adapters
        modules = ("q", "q_a", "q_b", "kv_a", "kv_b", "o")
        self.linears = {name: weights[f"{name}.weight"] for name in modules if f"{name}.weight" in weights}
        self.q_a_norm = weights.get("q_a_norm.weight")
        self.kv_a_norm = weights["kv_a_norm.weight"]
        self.num_heads = self.linears["o"].shape[1] // config.mla.v_head_dim
        self.kind = AttentionKind.of(config, layer)
        mla = config.mla
        weight = self.linears["o"]
        dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        packed_backend(weight.device, AttentionShape(self.kind, dim, mla.v_head_dim, weight.dtype))

    def __call__(self, x_TH: Tensor, angles: Angles | None, attends: Sequence[Attend]) -> Tensor:
        mla = self.mla
        q_TNP, q_TNR = self._queries(x_TH).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=2)
        latent_TC, k_TR = self._project("kv_a", x_TH).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=1)
        latent_TC = rms_norm(latent_TC, self.kv_a_norm, _NORM_EPS)
        latent_TC, k_T1R = (copy_to_group(x, self.tp) for x in (latent_TC, k_TR[:, None]))
        if angles is not None:
            turn = partial(rotate, angles=angles, interleaved=self.config.rope_interleaved)
            q_TNR, k_T1R = turn(q_TNR), turn(k_T1R)
        out_TNV = attend_each(attends, self._attended, q_TNP, q_TNR, latent_TC, k_T1R)
        return sum_over_group(self._project("o", out_TNV.flatten(1)), self.tp)

    def _attended(
        self, attend: Attend, q_TNP: Tensor, q_TNR: Tensor, latent_TC: Tensor, k_T1R: Tensor
    ) -> Tensor:
        """Return out_TNV for the tokens of one Attend."""
        cached_T1L = torch.cat((latent_TC[:, None], k_T1R), dim=2)
        if attend.from_cache:
            up_NPC, up_NVC = self._up()
            q_TNL = torch.cat((_by_head("tnp,npc->tnc", q_TNP, up_NPC), q_TNR), dim=2)
            out_TNC = attend(self.kind, q_TNL, cached_T1L, latent_TC[:, None])
            return _by_head("tnc,nvc->tnv", out_TNC, up_NVC)
        q_TND = torch.cat((q_TNP, q_TNR), dim=2)
        k_TND, v_TNV = self._keys_and_values(latent_TC, k_T1R)
        return attend(
            self.kind, q_TND, k_TND, v_TNV, cached=(cached_T1L, latent_TC[:, None]), expand=self._expanded)

    def _keys_and_values(self, latent_TC: Tensor, k_T1R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this rank's heads: k_TND, v_TNV."""
        kv = self._project("kv_b", latent_TC).unflatten(1, (self.num_heads, -1))
        k_TNP, v_TNV = kv.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=2)
        return torch.cat((k_TNP, k_T1R.expand(-1, self.num_heads, -1)), dim=2), v_TNV

    def _expanded(self, cached_J1L: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of cached tokens."""
        latent_J1C, k_J1R = cached_J1L.split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=2)
        return self._keys_and_values(latent_J1C[:, 0], k_J1R)

    def _queries(self, x_TH: Tensor) -> Tensor:
        if "q" in self.linears:
            q = self._project("q", copy_to_group(x_TH, self.tp))
        else:
            assert self.q_a_norm is not None
            latent = self._project("q_a", x_TH)
            latent = rms_norm(latent, self.q_a_norm, _NORM_EPS)
            q = self._project("q_b", copy_to_group(latent, self.tp))
        return q.unflatten(1, (self.num_heads, -1))

    def _project(self, module: str, x: Tensor) -> Tensor:
        return adapted_linear(x, self.linears[module], adapter=self.adapters.get(f"{module}.weight"))

    def _up(self) -> tuple[Tensor, Tensor]:
        """Return the up-projections from the latent to keys (without rotation) and to values."""
        adapter = self.adapters.get("kv_b.weight")
        weight = self.linears["kv_b"] if adapter is None else adapter.merged()
        per_head = weight.unflatten(0, (self.num_heads, -1))
        key, value = per_head.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=1)
        return key, value


def _by_head(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return each head's product with its own weight."""
    return torch.einsum(equation, widened(x), widened(weight)).to(x.dtype)
