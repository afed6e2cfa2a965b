"""Runs the Triton kernel by its interpreter beside the reference; prints the largest differences as JSON.

Triton reads TRITON_INTERPRET when it is imported, so that this is a process of its own.
"""

import json
import sys

import torch

from realhf.attention.reference import ReferenceAttention
from realhf.attention.triton_paged import TritonAttention
from tests.attention.cases import random_case

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def main(name: str, num_cases: int) -> None:
    found = []
    for seed in range(num_cases):
        case = random_case(
            seed, dtype=DTYPES[name], pages=(16, 20, 40), dims=(8, 24, 40), most=(3, 2, 2))
        ours = TritonAttention().paged(*case.arguments(), num_splits=(None, 1, 2, 5)[seed % 4])
        wanted = ReferenceAttention().paged(*case.arguments())
        found.append([float((x.float() - y.float()).abs().max()) for x, y in zip(ours, wanted, strict=True)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
