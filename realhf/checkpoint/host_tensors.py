"""Tensors as files have them: the order of their dims, and their bytes in host memory."""

import ctypes

import torch
from torch import Tensor

from realhf.nn.split_float32 import joined, wide
from realhf.param_spec import ParamSpec


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, which must outlive this view of them.

    (After `Tensor.numpy` torch would never again free or resize its storage.)
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def in_file_order(param: ParamSpec, shard: Tensor) -> Tensor:
    """A region with the dims as in a checkpoint: a view, but for the sum of limbs."""
    if param.limbs > 1:
        return joined(shard)
    return shard.T if param.in_file.transposed else shard


def dtype_in_file(param: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """What a parameter of a model of this dtype is written in."""
    return wide(dtype) if param.limbs > 1 else dtype
