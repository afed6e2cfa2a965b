"""The memory of KV caches without a user's limit: what is free, agreed by all ranks, reported once."""

import pytest
import torch

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.inference import cache_memory
from realhf.inference.cache_memory import CacheLimits, CacheSizes, GenerationLimits, PassMemory
from realhf.inference.response_buffer import PromptGroup
from realhf.layout import Layout, even_split
from realhf.models.kv_blocks import SHARE_OF_HOST
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.nn.tiny import hf_config
from tests.samples import marked

MAX_NEW = 40
BLOCK = 4 * 2 * 64 * 2 * 8 * 8
"""Bytes of a block: layers * keys and values * tokens * heads * dims * bytes of a number."""


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_free_on_a_host(monkeypatch, tmp_path, version):
    for name, path in (("_MEMINFO", "meminfo"), ("_MINE", "mine"), ("_CGROUP", "cgroup")):
        monkeypatch.setattr(cache_memory, name, tmp_path / path)
    _write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nHugePages_Total: 0\n")
    cpu = torch.device("cpu")
    assert cache_memory.free_bytes(cpu, num_users=4) == 2000 * 1024
    files = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    _write(tmp_path / "mine", "0::/jobs/mine\n" if version == 2 else "3:cpu:/\n4:memory:/jobs/mine\n0::/\n")
    jobs = tmp_path / "cgroup" / ("memory" if version == 1 else "") / "jobs"
    for folder, limit, used in ((jobs / "mine", "max", 7000), (jobs, 5_000_000, 3_000_000)):
        _write(folder / files[0], str(limit))
        _write(folder / files[1], str(used))
        _write(folder / "memory.stat", f"anon 5\n{files[2]} 500000\n")
    assert cache_memory.free_bytes(cpu, num_users=2) == 1_250_000
    _write(jobs / files[1], "9000000")  # Above the limit for a moment.
    assert cache_memory.free_bytes(cpu, num_users=2) == 0


def test_a_7b_model_takes_no_more_than_it_may():
    """Rows of full length would need 124 GB."""
    llama, work = 2 * 32 * 4096 * 2, Generate(SamplingConfig(max_new_tokens=256), max_rows=512)
    groups = [PromptGroup([1] * 200, [8 * i + j for j in range(8)]) for i in range(64)]
    sizes = [group.size for group in groups]
    free = GenerationLimits(sizes, work, token_bytes=llama, num_cohorts=1)
    limited = GenerationLimits(sizes, work, token_bytes=llama, num_cohorts=1, cache_bytes=20 << 30)
    assert CacheSizes(sizes, free).num_blocks * 64 * llama > 80e9
    assert 19 << 30 < CacheSizes(sizes, limited).num_blocks * 64 * llama <= 20 << 30
    assert CacheSizes(sizes, limited).num_wanted == CacheSizes(sizes, free).num_blocks
    none = GenerationLimits(sizes, work, token_bytes=llama, num_cohorts=1, cache_bytes=0)
    none.check(None)  # One sample can run all the same.
    assert CacheSizes(sizes, none).num_blocks == -(-456 // 64) + 1


def _generated(world, layout, free):
    """Generate twice, with `free` bytes per rank; return sequences by sample id, and the limit in bytes."""
    layout = Layout.parse(layout)
    if world.rank not in layout:
        return None
    real = cache_memory.free_bytes
    cache_memory.free_bytes = lambda device, *, num_users: free[world.rank]
    try:
        config = hf_config(tied=True) | {"eos_token_id": [3], "max_position_embeddings": 256}
        engine = NativeEngine(model_spec(ModelConfig.from_hf(config)), layout, world, dtype="float64")
        engine.load(None, seed=0)
        work = Generate(SamplingConfig(max_new_tokens=MAX_NEW), seed=3)
        call = FunctionCall("gen", "generate", ("prompts",), ("s", "m", "l", "f"), role="actor", work=work)
        start, stop = even_split(24, layout.dp, layout.coordinate(world.rank).dp)
        prompts = Packed.of([torch.full((70 + i // 3,), 4 + i // 3) for i in range(start, stop)])
        batch = Batch(list(range(start, stop)), {"prompts": prompts})
        for _ in range(2):
            made = engine.generate(call, batch).batch
        rows = dict(zip(made.ids, made["s"].split(), strict=True)) if made.fields else {}
        return {i: row.tolist() for i, row in rows.items()}, engine.cache_limits.of("gen").num_bytes
    finally:
        cache_memory.free_bytes = real


@pytest.mark.slow
@pytest.mark.parametrize("layout", marked(["d2@0-1", "t2p2@0-3", "d2t2@0-3"], quick=[1]))
def test_ranks_agree_on_the_least_and_tokens_stay(pool, layout):
    """Rank 1 has memory for 20 blocks; the rows want more."""
    expected, roomy = _generated(World(), "d1@0", [1 << 40])
    assert roomy == int(SHARE_OF_HOST * (1 << 40))
    scarce = int(20 * BLOCK / SHARE_OF_HOST)
    results = [r for r in pool.run(_generated, layout, [1 << 40, scarce, 1 << 40, 1 << 40]) if r is not None]
    assert {taken for _, taken in results} == {int(SHARE_OF_HOST * scarce)}
    found = {i: row for rows, _ in results for i, row in rows.items()}
    assert found == expected


def test_limits_are_measured_again_once(monkeypatch):
    """At the end of the first step; not those of a checkpoint, nor of a cache that is in use."""
    free = [1 << 20]
    monkeypatch.setattr(cache_memory, "free_bytes", lambda device, *, num_users: free[0])
    groups = ParallelGroups.create(World(), Layout.parse("d1@0"))
    limits = CacheLimits(groups)
    limits.restore({"old": 5})
    agreed = [limits.of(call).agree(lambda: PassMemory(0)) for call in ("old", "new", "kept")]
    assert agreed == [5, 1 << 19, 1 << 19]
    free[0] = 1 << 10
    limits.settle(besides={"kept"})
    assert limits.agreed == {"old": 5, "new": 1 << 9, "kept": 1 << 19}
    free[0] = 1 << 30
    limits.settle(besides={"kept"})
    assert limits.agreed["new"] == 1 << 9


@pytest.mark.parametrize("takes_all, expected", [(False, 1 << 18), (True, (1 << 19) - 7)])
def test_a_cache_leaves_room_for_copies_of_weights(monkeypatch, takes_all, expected):
    """Packed ones do not exist when the limit is agreed. When it is settled, merged ones may not, either."""
    monkeypatch.setattr(cache_memory, "free_bytes", lambda device, *, num_users: 1 << 20)
    limits = CacheLimits(ParallelGroups.create(World(), Layout.parse("d1@0")))
    absent = [1 << 19, (1 << 19) + (1 << 18)]
    agreed = limits.of("gen").agree(lambda: PassMemory(7, absent=absent.pop(0)), takes_all=takes_all)
    assert agreed == expected
    limits.settle()
    assert limits.agreed == {"gen": expected - (1 << 18 if takes_all else 1 << 17)}


def test_it_is_said_once_what_was_taken(capsys):
    _generated(World(), "d1@0", [1 << 40])
    assert capsys.readouterr().err == ""
    _generated(World(), "d1@0", [int(20.5 * BLOCK / SHARE_OF_HOST)])
    (line,) = capsys.readouterr().err.splitlines()
    taken = f"{20 * BLOCK / 2**30:.3g} GiB, 50% of what is free, for its KV cache"
    assert line.startswith(f"realhf: gen: each rank takes {taken}; ") and line.endswith("(see kv_cache_gib)")
