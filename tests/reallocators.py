"""Reallocators for tests, made from what their schedules are made from."""

from typing import Any

import torch

from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec
from realhf.realloc.execute import Reallocator, assumed_links
from realhf.realloc.schedule import STAGING_BYTES, make_schedule


def make_reallocator(
    spec: ModelSpec, source: Layout, target: Layout, world: World, *, dtype: torch.dtype,
    sharded: bool = False, follow_rate: float = 1.0, staging_bytes: int = STAGING_BYTES, **options: Any,
) -> Reallocator:
    schedule = make_schedule(
        spec, source=source, target=target, itemsize=dtype.itemsize, sharded=sharded,
        links=assumed_links(world), forward=follow_rate == 1, staging_bytes=staging_bytes)
    return Reallocator(schedule, world, dtype=dtype, follow_rate=follow_rate, **options)
