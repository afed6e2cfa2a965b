"""Weight: a parameter whose gradients are added directly to the gradient buffer.

Autograd would allocate a gradient for every use of a weight and then add it to the buffer. Instead, linear
layers and embeddings add to the buffer themselves, and the first gradient of a step overwrites it. So no
gradient of a weight's size is ever allocated (Megatron-LM's gradient accumulation fusion).

Shape suffixes: T tokens, O and I outputs and inputs of a layer.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from realhf.nn import half_matmul
from realhf.sizes.chunk_sizes import block_numel


class Weight(torch.nn.Parameter):
    """A parameter, frozen at first, that sums up its gradients of a step."""

    total: Tensor | None = None
    """The sum of the gradients, a view of the gradient buffer; None before `collect`."""
    is_empty = True
    """True before the first gradient of a step: until then, the values of `total` have no meaning."""

    def collect(self, total: Tensor) -> None:
        """Make the parameter trainable and add its gradients to `total` from now on."""
        self.total = total
        self.requires_grad_(True).register_post_accumulate_grad_hook(_move)

    def add_gradient(self, grad: Tensor) -> None:
        assert self.total is not None
        if self.is_empty:
            self.total.copy_(grad)
        else:
            self.total.add_(grad)
        self.is_empty = False

    def add_product(self, grad_TO: Tensor, x_TI: Tensor) -> None:
        """Add grad^T x to the sum."""
        assert self.total is not None
        total_OI = self.total
        if total_OI.dtype == grad_TO.dtype == x_TI.dtype:
            if self.is_empty:
                torch.mm(grad_TO.T, x_TI, out=total_OI)
            else:
                total_OI.addmm_(grad_TO.T, x_TI)
        elif half_matmul.needs_float32(grad_TO) or grad_TO.dtype != x_TI.dtype:
            half_matmul.add_product(total_OI, grad_TO, x_TI, is_empty=self.is_empty)
        else:
            numel = block_numel(is_cuda=grad_TO.is_cuda)
            rows = max(1, numel // total_OI.shape[1])
            for grad, total in zip(grad_TO.split(rows, dim=1), total_OI.split(rows), strict=True):
                product = grad.T @ x_TI
                total.copy_(product) if self.is_empty else total.add_(product)
        self.is_empty = False

    def add_rows(self, index_T: Tensor, rows_TI: Tensor) -> None:
        """Add rows to the rows of the sum at these indices."""
        self.finish()
        assert self.total is not None
        add_rows(self.total, index_T, rows_TI.to(self.total.dtype))

    def finish(self) -> None:
        """Set the sum to 0 if the step had no gradient."""
        assert self.total is not None
        if self.is_empty:
            self.total.zero_()
        self.is_empty = False


def add_rows(x: Tensor, index_T: Tensor, rows_T: Tensor) -> Tensor:
    """Add rows in place to the rows of `x` at these indices, and return `x`."""
    if x.is_cuda:  # On CUDA index_add_ adds in any order: runs would differ.
        return x.index_put_((index_T,), rows_T, accumulate=True)
    return x.index_add_(0, index_T, rows_T)


def _move(weight: Any) -> None:
    """Add a gradient that autograd has computed. Autograd also calls this when it has computed none."""
    if weight.grad is not None:
        weight.add_gradient(weight.grad)
        weight.grad = None


def collects(weight: Tensor) -> TypeGuard[Weight]:
    """Return whether a weight sums up its gradients itself."""
    return isinstance(weight, Weight) and weight.total is not None and weight.requires_grad
