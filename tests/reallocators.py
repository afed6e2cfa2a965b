"""Reallocators for tests, made from what their schedules are made from."""

from dataclasses import replace
from typing import Any

import torch

from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec, model_spec
from realhf.realloc.execute import Reallocator, Staging, assumed_links
from realhf.realloc.quantise import Int8Reallocator, make_int8_schedules
from realhf.realloc.schedule import STAGING_BYTES, make_schedule


def make_reallocator(
    spec: ModelSpec, source: Layout, target: Layout, world: World, *, dtype: torch.dtype,
    sharded: bool = False, follow_rate: float = 1.0, staging_bytes: int = STAGING_BYTES, **options: Any,
) -> Reallocator:
    schedule = make_schedule(
        spec, source=source, target=target, itemsize=dtype.itemsize, sharded=sharded,
        links=assumed_links(world), forward=follow_rate == 1, staging_bytes=staging_bytes)
    return Reallocator(schedule, world, dtype=dtype, follow_rate=follow_rate, **options)


def make_int8_reallocator(
    spec: ModelSpec, source: Layout, target: Layout, world: World, *, dtype: torch.dtype,
    sharded: bool = False, staging_bytes: int = STAGING_BYTES,
) -> Int8Reallocator:
    schedules = make_int8_schedules(
        spec, source=source, target=target, itemsize=dtype.itemsize, sharded=sharded,
        links=assumed_links(world))
    return Int8Reallocator(
        schedules, world, dtype=dtype, staging=Staging(world.device), role="a model", posts=False)


def in_int8(engine: NativeEngine) -> NativeEngine:
    """Return a copy of an engine for generation, in the same layout."""
    world = engine.groups.world
    layout = replace(engine.groups.layout, form="int8")
    spec = model_spec(engine.model.config)
    copy = NativeEngine(spec, layout, world, dtype=str(engine.flat.dtype).removeprefix("torch."))
    reallocator = make_int8_reallocator(spec, engine.groups.layout, layout, world, dtype=engine.flat.dtype)
    reallocator.run(engine.shards(), copy.shards())
    return copy
