"""Room for calls on a GPU: pages stay between calls beside which they fit, with a prediction or without."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from realhf.calls import Generate, LogProbs, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.runtime.compile.actions import Run
from realhf.runtime.execute.meters import MemoryMeter
from realhf.runtime.weights.engine_store import EngineStore
from tests.gpu.models import OUTPUTS, tokens, write_model
from tests.gpu.pretended import pretended_device
from tests.inference.paged import PagedReference

LAYOUT = Layout.parse("d1@0")
TOTAL = 1000 << 20
OUTSIDE = 100 << 20
"""Bytes of the device that are not torch's."""
GENERATE = FunctionCall(
    "gen", "generate", ("prompt_ids",), OUTPUTS, role="actor",
    work=Generate(SamplingConfig(max_new_tokens=4), kv_cache_gib=0.001))
FORWARD = FunctionCall("ref_forward", "forward", OUTPUTS[:2], ("logprobs",), role="ref", work=LogProbs())


class Calls:
    """Two engines on one device, and a meter of their calls."""

    def __init__(self, directory, device, predicted):
        world = World(device=device)
        spec = model_spec(ModelConfig.load(str(directory)))
        self.actor, self.ref = (
            NativeEngine(spec, LAYOUT, world, dtype="float32", paged=PagedReference(), lora=lora)
            for lora in (LoraConfig(rank=2, merge=True), None))
        for engine in (self.actor, self.ref):
            engine.load(directory, seed=0)
        store = EngineStore(world, SimpleNamespace(home=lambda role: LAYOUT))
        store._engines = {("actor", LAYOUT): self.actor, ("ref", LAYOUT): self.ref}
        self.meter = MemoryMeter(world, store, predicted)
        self.batch = Batch([0, 1], {"prompt_ids": Packed.of([tokens(9), tokens(12)])})

    def generate(self):
        with self.meter.of_call(Run(GENERATE, LAYOUT), {}):
            self.made = self.actor.generate(GENERATE, self.batch).batch

    def forward(self, peak):
        """Run the other call, at whose peak torch has given out `peak` bytes; return its event."""
        event = {}
        measured = patch.object(torch.cuda, "max_memory_allocated", lambda device: peak)
        with measured, self.meter.of_call(Run(FORWARD, LAYOUT), event):
            self.ref.forward(FORWARD, self.made, micro_batch_tokens=100)
        return event


@pytest.fixture
def calls(tmp_path):
    """Return a function that makes Calls with predictions, on a device that is not there."""
    directory = write_model(tmp_path / "model", "qwen2", max_position_embeddings=64)
    memory = patch.multiple(
        torch.cuda, reset_peak_memory_stats=lambda device: None, max_memory_allocated=lambda device: 0,
        get_device_properties=lambda device: SimpleNamespace(total_memory=TOTAL))
    with pretended_device() as device, memory:
        free = patch.multiple(
            torch.cuda, mem_get_info=lambda device: (TOTAL - OUTSIDE - (50 << 20), TOTAL),
            memory_reserved=lambda device: 50 << 20)
        with free:
            yield lambda predicted: Calls(directory, device, predicted)


def test_pages_stay_beside_a_call_whose_memory_is_known_from_earlier_runs(calls):
    made = calls({})
    made.generate()
    kept = sum(made.actor.caches.values())
    assert made.actor.caches["cache"] > 0 and made.actor.caches["merged"] > 0
    made.forward(300 << 20)  # Nobody knows what it needs.
    assert sum(made.actor.caches.values()) == 0
    made.generate()
    cache = made.actor.pages.cache
    made.forward(300 << 20)
    made.generate()
    made.forward((300 << 20) + kept)
    assert made.actor.pages.cache is cache and sum(made.actor.caches.values()) == kept
    made.forward((800 << 20) + kept)  # Longer samples: it needs more than 0.95 * 1000 - 100 MiB with a tenth.
    assert made.actor.pages.cache is cache
    made.forward(1)
    assert sum(made.actor.caches.values()) == 0


@pytest.mark.parametrize("need, stays", [(0.90, True), (0.96, False)])
def test_predictions_decide_where_there_are_some(calls, need, stays):
    made = calls({"ref_forward": {0: {"weights": need * TOTAL / 2, "logits": need * TOTAL / 2}}})
    made.generate()
    kept = sum(made.actor.caches.values())
    assert kept < 0.04 * TOTAL
    event = made.forward(700 << 20)
    assert event["predicted_memory_bytes"] == round(need * TOTAL)
    assert event["memory_bytes"] == (700 << 20) + made.actor.mapped_bytes
    assert sum(made.actor.caches.values()) == (kept if stays else 0)


def test_a_generation_keeps_its_own_pages(calls):
    made = calls({})
    made.generate()
    cache = made.actor.pages.cache
    made.generate()
    assert made.actor.pages.cache is cache
