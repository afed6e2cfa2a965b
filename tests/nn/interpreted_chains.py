"""Runs the kernels of TritonChains by Triton's interpreter beside torch's operations; prints the largest
differences, relative to the largest result, as JSON.

Triton reads TRITON_INTERPRET when it is imported, so that this is a process of its own.
"""

import itertools
import json
import sys
from functools import partial

import torch

from realhf.distributed.world import World
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.nn.fused import CachePlace, TritonChains
from realhf.nn.mlp import ACTIVATIONS
from realhf.nn.norm import Norm
from realhf.nn.vocab_parallel import Head
from tests.nn import chains

FOUND = {}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DTYPE)


def compare(name, *arguments, outputs=lambda found, arguments: found, **settings):
    results = []
    for method in (getattr(TritonChains(), name), partial(chains.BY_TORCH[name], None)):
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        with torch.no_grad():
            results.append(outputs(method(*copies, **settings), copies))
    errors = [
        float((ours.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        for ours, wanted in zip(*results, strict=True)]
    FOUND[name] = max([*errors, FOUND.get(name, 0.0)])


def norm(config, size, *, weight=True, bias=False):
    weights = {"n.weight": 1 + 0.1 * draw(size, seed=3)} if weight else {}
    return Norm(config, weights | ({"n.bias": draw(size, seed=4)} if bias else {}), "n")


def main():
    config = ModelConfig("llama", 64, 40, 32, 1, 4, 2, 4)
    for kind, out_kind, has_y in itertools.product(("rms", "layer", None), ("rms", None), (True, False)):
        norms = {"rms": norm(config, 40), "layer": norm(config, 40, bias=True)}
        norms[None] = norm(config, 40, weight=False)
        compare(
            "add_norm", draw(3, 40), draw(3, 40, seed=1) if has_y else None, scale=0.7,
            norm=norms[kind] if kind or has_y else norms["rms"], out_norm=norms[out_kind])
    for rotated, interleaved, has_norm, stores in itertools.product((0, 4, 12), *[(False, True)] * 3):
        cos, sin = (draw(3, 1, rotated // 2, seed=i) for i in range(2))
        memory = torch.zeros(2, 9, 2, 12).to(DTYPE)
        place = CachePlace(memory, torch.tensor([4, 0, 7])) if stores else None
        compare(
            "rotate_and_store", draw(3, 7, 12), num_kv_heads=2, angles=(cos, sin) if rotated else None,
            interleaved=interleaved, norms=(norm(config, 12), norm(config, 12)) if has_norm else None,
            place=place, outputs=lambda found, _, place=place: [found, *([place.memory] if place else [])])
        if stores:
            assert memory[:, [1, 2, 3, 5, 6, 8]].count_nonzero() == 0 and memory.count_nonzero() > 0
    for rotated, (num_kv, dim) in itertools.product((0, 8), ((2, 8), (1, 12))):
        cos, sin = (draw(3, 1, rotated // 2, seed=i) for i in range(2))
        norms = norm(config, 3 * dim), norm(config, num_kv * dim)
        compare(
            "rotate_and_store", draw(3, 3 + 2 * num_kv, dim), num_kv_heads=num_kv, by_head=False,
            angles=(cos, sin) if rotated else None, interleaved=False, norms=norms, place=None,
            outputs=lambda found, _: [found])
    for rotated, interleaved, stores in itertools.product((0, 4, 6), *[(False, True)] * 2):
        cos, sin = (draw(3, 1, rotated // 2, seed=i) for i in range(2))
        memory = torch.zeros(1, 9, 1, 20 + 6).to(DTYPE)
        place = CachePlace(memory, torch.tensor([4, 0, 7])) if stores else None
        compare(
            "rotate_latent", draw(3, 4, 5 + 6), draw(3, 20 + 6), norm=norm(config, 20),
            angles=(cos, sin) if rotated else None, interleaved=interleaved, place=place,
            outputs=lambda found, _, place=place: [*found, *([place.memory.clone()] if place else [])])
    compare("angles", torch.tensor([0, 5, 1000]), torch.logspace(0, -3, 6), 1.5, DTYPE)
    for function in ACTIVATIONS.values():
        compare("gated", draw(3, 2 * 1300), function.name, outputs=lambda found, _: [found])
        compare(
            "gated_backward", draw(3, 1300), 2 * draw(3, 2 * 1300), function.name,
            outputs=lambda found, arguments: [found, arguments[0]])
    for normalize, num in itertools.product((False, True), (1, 3)):
        moe = MoeConfig(11, num, 8, normalize=normalize, scale=1.5)
        compare("route", draw(5, 11), moe, None, DTYPE)
        for scores, groups, terms in itertools.product(("softmax", "sigmoid"), (1, 4), (0, 3)):
            moe = MoeConfig(
                32, num, 8, normalize=normalize, scale=1.5, scores=scores, num_groups=groups,
                num_groups_per_token=min(2, groups))
            compare("route", draw(6, 32), moe, draw(terms, 32) / 4 if terms else None, DTYPE)
    for num_experts, shape in ((7, (40, 3)), (3, (1, 2)), (5, (700, 2))):
        generator = torch.Generator().manual_seed(num_experts)
        expert_TK = torch.randint(0, num_experts + 1, shape, generator=generator)
        compare("group_rows", expert_TK, num_experts)
        token_R, place_R, _ = chains.group_rows(None, expert_TK, num_experts)
        y_RH = draw(len(token_R), 1100)
        y_RH[-1] = float("nan")
        weights_TK = draw(*shape, seed=5)
        weights_TK.view(-1)[place_R == len(token_R) - 1] = 0
        compare("mix", y_RH, weights_TK, place_R, outputs=lambda found, _: [found])
    group = World().group((0,))
    at = torch.tensor([[0, 3], [4999, 4999], [4097, 0]])
    here = torch.tensor([[True, True], [True, True], [True, False]])
    for softcap, entropy in itertools.product((None, 5.0), (False, True)):
        head = Head(torch.empty(0, 0), 0, group, scale=0.8, softcap=softcap)
        product = draw(3, 5000)
        compare("logit_statistics", product, at, head, 0.7, entropy, outputs=lambda found, _: [found])
        lse = head.to_logits(product, temperature=0.7).logsumexp(1) + torch.tensor([0.0, 0.3, 1.0])
        of_entropy = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -0.1, 0.0])) if entropy else None
        gradients = torch.tensor([[1.0, 0.5], [0.3, -0.2], [1.0, 1.0]])
        compare(
            "logit_gradient", product, gradients, lse, (at, here), of_entropy, head, 0.7,
            outputs=lambda _, arguments: [arguments[0]])
    print(json.dumps(FOUND))


if __name__ == "__main__":
    DTYPE = getattr(torch, sys.argv[1])
    main()
