"""Compiles the Triton kernel for a GPU that need not be here; prints its bytes of shared memory and the CPU
seconds that this took, as JSON.

Arguments: dtype, compute capability, dims of keys and values, heads of a group, queries, whether it has a
soft cap.
"""

import json
import resource
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from realhf.attention import paged_kernel, triton_paged
from realhf.attention.interface import AttentionKind, Pages

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", float: "fp32", int: "i32"}


class Launched(Exception):
    """Carries what the backend passes to the kernel."""


class Recorder:
    """Stands where the kernel is, and raises what it is launched with."""

    def __getitem__(self, grid):
        def launch(*args, **constants):
            raise Launched(args, constants)

        return launch


def arguments(dtype, dim, value_dim, group, max_q, softcap):
    """Return the arguments and constants with which the backend launches the kernel, for meta tensors."""
    table = torch.zeros(2, 8, dtype=torch.int32)
    at = Pages(torch.tensor([0, max_q, 2 * max_q]).int(), max_q, table, table[:, 0], 512)
    q = torch.empty(2 * max_q, 2 * group, dim, dtype=dtype)
    k = torch.empty(16, 64, 2, dim, dtype=dtype)
    v = k[..., :value_dim] if value_dim < dim else torch.empty_like(k)
    kernel = paged_kernel.attend_to_pages
    paged_kernel.attend_to_pages = Recorder()
    try:
        triton_paged.TritonAttention().paged(q, k, v, at, AttentionKind(0.1, softcap=softcap))
    except Launched as launched:
        return kernel, *launched.args
    raise AssertionError("the kernel was not launched")


def cpu_seconds():
    """Return the CPU seconds of this process and of those that have ended, such as ptxas."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(dtype, capability, dim, value_dim, group, max_q, has_softcap):
    softcap = 30.0 if has_softcap else None
    kernel, args, constants = arguments(getattr(torch, dtype), dim, value_dim, group, max_q, softcap)
    options = {"num_warps": constants.pop("num_warps")}
    signature, attributes = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        signature[name] = TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
        if isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    start = cpu_seconds()
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(json.dumps({"shared": compiled.metadata.shared, "seconds": cpu_seconds() - start}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
