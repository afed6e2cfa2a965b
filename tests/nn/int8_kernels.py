"""Runs the product with weights in int8 by Triton's interpreter, or compiles it for an H100; prints JSON."""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from realhf.nn import int8_kernel


def interpreted():
    errors = {}
    for rows, outputs, inputs in ((1, 5, 7), (3, 16, 256), (17, 33, 300), (64, 16, 512), (70, 20, 33)):
        generator = torch.Generator().manual_seed(rows)
        values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(outputs, generator=generator) / 100
        x = torch.randn(rows, inputs, generator=generator)
        expected = x.double() @ values.double().T * scale.double()
        found = int8_kernel.int8_product(x, values, scale).double()
        errors[f"{rows}x{outputs}x{inputs}"] = float((found - expected).abs().max() / expected.abs().max())
    return errors


def compiled():
    most = 0
    for rows in (16, 32, 64):
        names = int8_kernel._product.arg_names
        types = ("*bf16", "*i8", "*bf16", "*bf16", "i32", "i32", "i32")
        constants = {"BLOCK_T": rows, "BLOCK_O": int8_kernel._OUTPUTS, "BLOCK_I": int8_kernel._INPUTS}
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            fn=int8_kernel._product, signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 5, 6)})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        most = max(most, made.metadata.shared)
    return {"shared": most}


if __name__ == "__main__":
    print(json.dumps({"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()))
