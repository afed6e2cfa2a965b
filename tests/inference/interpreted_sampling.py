"""Samples by the Triton kernels with Triton's interpreter, beside `sample`; prints, as JSON, the rows whose
tokens differ and the largest difference of log-probs, for each way of sampling.

Triton reads TRITON_INTERPRET when it is imported, so that this is a process of its own.
"""

import json
import sys

import torch

from realhf.calls import SamplingConfig
from realhf.distributed.world import World
from realhf.inference.sampling import draw_by_kernels, sample
from realhf.nn.vocab_parallel import Head

SETTINGS = [
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.02},
    {"temperature": 1.4, "top_k": 300, "top_p": 0.9, "min_p": 0.001},
]


def main(dtype, size, rows):
    generator = torch.Generator().manual_seed(size)
    product = 2 * torch.randn(rows, size, generator=generator)
    product[0] = 0.0
    product[1, : size // 2] = -torch.inf
    product[2, size - 1] = 50.0
    product[3] = product[3].round()
    product = product.to(dtype)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    uniform[4] = 0.0
    uniform[5] = 1 - 2**-53
    group = World().group((0,))
    found = []
    for settings in SETTINGS:
        for softcap in (None, 3.0):
            config = SamplingConfig(**settings)
            head = Head(torch.empty(0, 0), 0, group, scale=0.9, softcap=softcap)
            ours = draw_by_kernels(product, uniform, config=config, scale=0.9, softcap=softcap)
            logits = head.to_logits(product, temperature=1.0)
            wanted = sample(logits, uniform, config=config, vocab_start=0, group=group)
            same = ours[0] == wanted[0]
            apart = (ours[1] - wanted[1])[same].abs().max()
            found.append([settings, softcap, (~same).nonzero()[:, 0].tolist(), float(apart)])
    for name, value in (("nan", torch.nan), ("inf", torch.inf)):
        product[:, 7] = value
        tokens, logprobs = draw_by_kernels(
            product, uniform, config=SamplingConfig(top_p=0.9), scale=1.0, softcap=None)
        assert ((tokens >= 0) & (tokens < size)).all() and logprobs.isnan().all(), name
    print(json.dumps(found))


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
