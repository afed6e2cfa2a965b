"""Compiles the kernels of TritonChains and of sampling for an H100, which need not be here; prints, as JSON,
each kernel's compile times in seconds and its most bytes of shared memory.

Each kernel is replaced by an object that compiles instead of launching, with the arguments and constants that
it is launched with. Arguments: dtypes.
"""

import json
import sys
import time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from realhf.calls import SamplingConfig
from realhf.distributed.world import World
from realhf.inference import sampling_kernels
from realhf.inference.sampling import draw_by_kernels
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.nn import fused_kernels
from realhf.nn.fused import CachePlace, TritonChains
from realhf.nn.norm import Norm
from realhf.nn.vocab_parallel import Head

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", float: "fp32", int: "i32"}
FOUND = {}


class Compiled:
    """Stands where a kernel is, and compiles it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, num_warps=4, **constants):
        names = self.kernel.arg_names
        signature, attributes = {}, {}
        for i, (name, value) in enumerate(zip(names, args, strict=False)):
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype if is_tensor else type(value)]
            if is_tensor or isinstance(value, int) and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=places, attrs=attributes)
        start = time.perf_counter()
        made = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
        found = FOUND.setdefault(self.kernel.__name__, {"seconds": [], "shared": 0})
        found["seconds"].append(round(time.perf_counter() - start, 2))
        found["shared"] = max(found["shared"], made.metadata.shared)


def main(dtypes):
    for module in (fused_kernels, sampling_kernels):
        for name, kernel in list(vars(module).items()):
            is_helper = name.startswith("_") or name == fused_kernels.logits_at.__name__
            if isinstance(kernel, triton.JITFunction) and not is_helper:
                setattr(module, name, Compiled(kernel))
    config = ModelConfig("llama", 64, 1536, 32, 1, 12, 2, 128)
    chains = TritonChains()
    for dtype in dtypes:

        def draw(*shape, dtype=dtype):
            return torch.zeros(shape, dtype=dtype)

        rms = Norm(config, {"n.weight": draw(1536)}, "n")
        layer = Norm(config, {"n.weight": draw(1536), "n.bias": draw(1536)}, "n")
        for norm, out_norm, y in ((rms, None, None), (rms, None, 1), (rms, rms, 1), (layer, None, 1)):
            x = draw(2, 1536)
            chains.add_norm(x, None if y is None else x, scale=1.0, out_norm=out_norm, norm=norm)
        place = CachePlace(draw(2, 64, 2, 128), torch.zeros(2, dtype=torch.int64))
        head = Norm(config, {"n.weight": draw(128)}, "n")
        angles = (draw(2, 1, 64), draw(2, 1, 64))
        norms_of_heads = (head, head)
        for interleaved, norms, where in (
            (False, None, place), (True, norms_of_heads, place), (False, None, None),
        ):
            chains.rotate_and_store(
                draw(2, 16, 128), num_kv_heads=2, angles=angles, interleaved=interleaved, norms=norms,
                place=where)
        latent = Norm(config, {"n.weight": draw(512)}, "n")
        cached = CachePlace(draw(1, 64, 1, 576), torch.zeros(2, dtype=torch.int64))
        for where in (None, cached):
            chains.rotate_latent(
                draw(2, 128, 192), draw(2, 576), norm=latent, angles=(draw(2, 1, 32), draw(2, 1, 32)),
                interleaved=True, place=where)
        chains.angles(torch.zeros(2, dtype=torch.int64), torch.zeros(64), 1.0, dtype)
        for activation in ("silu", "gelu", "gelu_tanh"):
            chains.gated(draw(2, 2 * 8960), activation)
            chains.gated_backward(draw(2, 8960), draw(2, 2 * 8960), activation)
        whole = tuple(Norm(config, {"n.weight": draw(n * 128)}, "n") for n in (12, 2))
        chains.rotate_and_store(
            draw(2, 16, 128), num_kv_heads=2, angles=angles, interleaved=False, norms=whole, place=place,
            by_head=False)
        chains.route(draw(2, 128), MoeConfig(128, 8, 768), None, dtype)
        deepseek = MoeConfig(
            256, 8, 768, scores="sigmoid", num_groups=8, num_groups_per_token=4, router_bias=True)
        chains.route(torch.zeros(2, 256), deepseek, draw(3, 256), dtype)
        _, place_R, _ = chains.group_rows(torch.zeros(2, 8, dtype=torch.int64), 128)
        chains.mix(draw(16, 2048), draw(2, 8), place_R)
        of_tokens = [torch.zeros(2) for _ in range(3)]
        for softcap, of_entropy in ((None, None), (30.0, (of_tokens[0], of_tokens[1]))):
            output = Head(torch.empty(0, 0), 0, World().group((0,)), softcap=softcap)
            labels = torch.zeros(2, 1, dtype=torch.int64)
            product = draw(2, 151936)
            chains.logit_statistics(product, labels, output, 1.0, of_entropy is not None)
            chains.logit_gradient(
                product, torch.zeros(2, 1), of_tokens[2], (labels, labels == 0), of_entropy, output, 1.0)
        filters = {"top_p": 0.9, "top_k": 9}
        for settings, softcap in (({}, None), ({"temperature": 0.0}, None), (filters, 3.0)):
            draw_by_kernels(
                draw(2, 151936), torch.zeros(2, dtype=torch.float64), config=SamplingConfig(**settings),
                scale=1.0, softcap=softcap)
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main([getattr(torch, name) for name in sys.argv[1:]])
