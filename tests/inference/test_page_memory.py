"""The memory behind pages goes and comes; addresses, and the passes recorded over them, stay."""

import gc
import random

import pytest
import torch

from realhf.devices import reserved
from realhf.devices.reserved import CudaPlanes, HostPlanes
from realhf.distributed.world import World
from realhf.inference.page_pool import PagePool
from realhf.runtime.execute.meters import resident_bytes
from tests.gpu import emulated_driver
from tests.gpu.emulated_driver import GRANULE, EmulatedDriver
from tests.gpu.pretended import pretended_device
from tests.inference.paged import PagedReference, engine_of, recorded, write_family
from tests.inference.test_generate import _generate, long_prompts
from tests.samples import drawn

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """A driver of a device that is not there, with a limit that a test may change."""
    emulated = EmulatedDriver(total=1 << 30)
    monkeypatch.setattr(reserved, "tensor_at", emulated_driver.tensor_at)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    properties = type("Properties", (), {"total_memory": emulated.total})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return emulated


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("seed", drawn(range(20), 3))
def test_planes_keep_what_they_hold_and_the_rest_is_zero(kind, seed, driver):
    draw = random.Random(seed)
    num = draw.randint(1, 5)
    planes = HostPlanes(num, 1000) if kind == "host" else CudaPlanes(num, 1000, CUDA, driver)
    address = planes.bytes_PU.data_ptr()
    capacity = planes.bytes_PU.shape[1]
    assert capacity >= (1 << 30) // num
    expected = torch.zeros((num, 64 * GRANULE), dtype=torch.uint8)
    for _ in range(12):
        size = draw.randint(0, 64 * GRANULE)
        before = planes.held
        planes.resize(size)
        assert size <= planes.held and (planes.held <= before or planes.held - size < GRANULE)
        expected[:, planes.held :] = 0
        start = draw.randint(0, size)
        planes.bytes_PU[:, start:size] = expected[:, start:size] = draw.randint(1, 255)
        assert torch.equal(planes.bytes_PU[:, : planes.held], expected[:, : planes.held])
        if kind == "device":
            assert driver.used_bytes == num * planes.held
    planes.resize(0)
    assert planes.held == 0 and planes.bytes_PU.data_ptr() == address
    if kind == "device":
        assert driver.used_bytes == 0 and len(driver.ranges) == 1
        del planes
        gc.collect()
        assert not driver.ranges


def test_a_full_device_is_asked_twice_and_nothing_is_lost(driver, monkeypatch):
    """The second time, torch has given back what it keeps for later."""
    asked = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(driver.used_bytes))
    planes = CudaPlanes(3, 10 * GRANULE, CUDA, driver)
    planes.bytes_PU[:, : planes.held] = 7
    driver.total = 50 * GRANULE
    with pytest.raises(torch.OutOfMemoryError, match="KV cache"):
        planes.resize(17 * GRANULE)  # Two of three planes find memory.
    assert asked == [44 * GRANULE] and driver.used_bytes == 30 * GRANULE
    assert planes.held == 10 * GRANULE and (planes.bytes_PU[:, : planes.held] == 7).all()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(driver, "total", 60 * GRANULE))
    planes.resize(17 * GRANULE)
    assert driver.used_bytes == 51 * GRANULE and not planes.bytes_PU[:, 10 * GRANULE : planes.held].any()


def test_memory_of_a_process_comes_back_between_generations(tmp_path):
    """Measured by the system. A pass that was recorded before is replayed afterwards."""
    write_family("gpt2", tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    tapes = recorded(engine, PagedReference())
    expected, _ = _generate(engine_of(tmp_path), long_prompts(), seed=3, max_new_tokens=30)
    pages = engine.pages.lease(40_000, page_size=64)
    for layer in engine.pages.cache.layers:
        layer.fill_(float("inf"))
    held = resident_bytes()
    size = engine.pages.num_bytes
    assert size > 150 << 20
    engine.pages.give_back(pages)
    engine.release("cache")
    assert held - resident_bytes() == pytest.approx(size, rel=0.05) and "cache" not in engine.memory()
    counts = []
    for _ in range(3):
        made, _ = _generate(engine, long_prompts(), seed=3, max_new_tokens=30)
        assert made == expected
        counts.append(len(tapes))
        engine.release("cache")
    assert counts[1] == counts[2] and sum(tape.num_replays for tape in tapes) > 40


def test_a_pool_grows_under_its_recorded_passes(tmp_path):
    write_family("gpt2", tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    tapes = recorded(engine, PagedReference())
    for _ in range(2):
        made, _ = _generate(engine, long_prompts(), seed=3, max_new_tokens=30)
    before = len(tapes), engine.pages.cache.layers[0].data_ptr()
    extra = engine.pages.lease(engine.pages.cache.num_blocks, page_size=64)  # All and more.
    engine.pages.lease(5, page_size=64)
    again, _ = _generate(engine, long_prompts(), seed=3, max_new_tokens=30)
    assert again == made and min(extra) > 0
    assert before == (len(tapes), engine.pages.cache.layers[0].data_ptr())


def test_leased_pages_stay_and_those_behind_go(tmp_path):
    write_family("gpt2", tmp_path)
    engine = engine_of(tmp_path)
    pool = PagePool(engine.model, backends=PagedReference())
    first = pool.lease(3, page_size=16)
    second = pool.lease(4, page_size=16)
    assert first == [1, 2, 3] and second == [4, 5, 6, 7]
    for layer in pool.cache.layers:
        layer[:, 1:] = 1.0
    pool.give_back(second)
    pool.release()
    assert pool.cache.num_blocks == 4 and pool.lease(2, page_size=16) == [4, 5]
    for layer in pool.cache.layers:
        assert (layer[:, first] == 1).all() and not layer[:, [0, 4, 5]].any()


def test_pages_of_a_device_are_given_back_to_its_driver(tmp_path):
    """The pretended device; its memory beyond what is mapped cannot be touched."""
    write_family("gpt2", tmp_path)
    expected, _ = _generate(engine_of(tmp_path, dtype="float32"), long_prompts(), seed=3, max_new_tokens=20)
    with pretended_device() as device:
        driver = reserved.cuda_driver()
        engine = engine_of(tmp_path, paged=PagedReference(), dtype="float32", world=World(device=device))
        tapes = recorded(engine, PagedReference())
        counts = []
        for _ in range(3):
            made, _ = _generate(engine, long_prompts(), seed=3, max_new_tokens=20)
            assert made == expected
            assert engine.pages.num_bytes <= engine.mapped_bytes == driver.used_bytes > 0
            engine.release("cache")
            assert engine.mapped_bytes == driver.used_bytes == 0
            counts.append(len(tapes))
        assert counts[1] == counts[2] > 0
        engine.release("graphs")
        _generate(engine, long_prompts(), seed=3, max_new_tokens=20)
        assert len(tapes) > counts[2]
        del engine, tapes
        gc.collect()
        assert driver.used_bytes == 0 and not driver.ranges
