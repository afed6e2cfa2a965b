"""What stands between the up- and down-projections of an MLP or an expert."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from realhf.model_config import ModelConfig

Activation = Callable[[Tensor], Tensor]
"""up_TF -> hidden_TF; of a gated MLP the first half of F is the gate and it gives half as many."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(config: ModelConfig) -> Activation:
    act = ACTIVATIONS[config.activation]

    def gated(up_TF: Tensor) -> Tensor:
        gate_TF, up_TF = up_TF.chunk(2, dim=1)
        return act(gate_TF) * up_TF

    return gated if config.gated else act
