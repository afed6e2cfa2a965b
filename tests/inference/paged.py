"""Engines that generate by the paged path of a GPU, on a CPU: the reference backend attends to pages."""

import transformers

from realhf.attention.reference import ReferenceAttention
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.inference.forward_batch import PagedBackends
from realhf.inference.page_pool import PagePool
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.families import CASES, MOE_CASES
from tests.gpu.pretended import Tape


class PagedReference(ReferenceAttention):
    """The reference, which a Tape can record, with the page size of some kernel."""

    in_graph = True

    def __init__(self, page_tokens=16):
        self.page_tokens = page_tokens


def write_family(name, directory):
    """Write the config of a small model of this family."""
    hf = {**CASES, **MOE_CASES}[name].hf(eos_token_id=[5, 11, 23], initializer_range=0.4)
    config = transformers.AutoConfig.for_model(**hf)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)


def engine_of(directory, *, paged=None, world=None, layout="d1@0", dtype="float64", lora=None):
    """Return an engine with a random model of the config in this directory."""
    spec = model_spec(ModelConfig.load(str(directory)))
    engine = NativeEngine(
        spec, Layout.parse(layout), world or World(), dtype=dtype, paged=paged, lora=lora)
    engine.load(None, seed=0)
    return engine


def recorded(engine, backend):
    """Let the engine record its decoding passes; return the list of tapes."""
    tapes = []

    def record(compute):
        tapes.append(Tape(compute))
        return tapes[-1]

    engine.pages = PagePool(engine.model, backends=PagedBackends(engine.model, backend), record=record)
    return tapes
