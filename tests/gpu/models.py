"""Tiny models of several families whose sizes suit the kernels of a GPU, by us and by transformers."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file

from realhf.calls import Generate, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_slices
from tests.families import CASES, LONGROPE, MOE_CASES, SIZES

REPO = Path(__file__).parents[2]
VARIABLE = "REALHF_GPU_DEVICE"
"""Names where our side runs in place of `cuda`."""
FAMILIES = ("llama", "qwen2", "qwen3", "gemma-2", "gpt2", "olmo-2", "mixtral", "qwen3-moe", "deepseek-v3")
LENGTHS = [5, 1, 9, 9, 3, 40, 7]
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
_MORE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16}, "gemma-2": {"head_dim": 16}, "gpt2": {"n_embd": 64},
    "phi-3": {"rope_parameters": LONGROPE | {"short_factor": [1.0, 1.5] * 2, "long_factor": [2.0, 4.0] * 2}},
    "qwen3-moe": {"head_dim": 16, "moe_intermediate_size": 16},
    "deepseek-v3": {
        "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16},
}
"""Head dims are multiples of 8, and rows of 16 bytes."""
_AS_PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


class Passed(NamedTuple):
    """What a forward and backward pass gave, on the host."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def process_environment(device: torch.device) -> dict[str, str]:
    """The environment of a process on the device, which finds this repository and what this process finds.

    Packages may lie in a folder that only PYTHONPATH names.
    """
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | hidden


def write_model(directory: Path, name: str, **changes: Any) -> Path:
    """A model directory with random weights of a family of `tests/families.py`."""
    torch.manual_seed(0)
    fields = {**CASES, **MOE_CASES}[name].hf(**{**_SIZES, **_MORE.get(name, {}), **changes})
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [x for key, x in model.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for value in (*(p for p in model.parameters() if p.dim() == 1), *biases):
            value.add_(torch.randn_like(value) * 0.2)  # Norms and biases start as ones and zeros.
    model.save_pretrained(directory)
    return directory


def tokens(count: int, *, seed: int = 1) -> torch.Tensor:
    """No 0: transformers gives the padding token no gradient."""
    return torch.randint(1, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def _logit_weights() -> torch.Tensor:
    """The loss is the sum of the logits times these."""
    shape = (sum(LENGTHS), SIZES["vocab_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def theirs(directory: Path, *, device: torch.device, dtype: str) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), **_AS_PLAIN)
    return model.eval().to(device)


def their_pass(directory: Path, scratch: Path, *, device: torch.device, dtype: str) -> Passed:
    """Gradients by name in the checkpoint."""
    model, ids = theirs(directory, device=device, dtype=dtype), tokens(sum(LENGTHS)).to(device)
    logits = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)]).float()
    (logits * _logit_weights().to(device)).sum().backward()
    # Gradients in the place of weights: save_pretrained knows their names in the checkpoint.
    with torch.no_grad():
        for value in model.parameters():
            value.data = torch.zeros_like(value) if value.grad is None else value.grad.clone()
    model.save_pretrained(scratch)
    return Passed(logits.detach().cpu(), load_file(scratch / "model.safetensors"))


def engine_of(
    directory: Path, *, device: torch.device, dtype: str, optimizer: OptimizerConfig | None = None,
    lora: LoraConfig | None = None, float32_head: bool = False, world: World | None = None,
    layout: str = "d1@0",
) -> NativeEngine:
    spec = model_spec(ModelConfig.load(str(directory)))
    engine = NativeEngine(
        spec, Layout.parse(layout), world or World(device=device), dtype=dtype, optimizer=optimizer,
        lora=lora, float32_head=float32_head)
    engine.load(directory, seed=0)
    return engine


def our_pass(directory: Path, *, device: torch.device, dtype: str) -> Passed:
    """Gradients by our names of the parameters."""
    model = engine_of(directory, device=device, dtype=dtype).model
    model.enable_grad()
    logits = model.logits(model(tokens(sum(LENGTHS)).to(device), LENGTHS))
    (logits * _logit_weights().to(device)).sum().backward()
    model.finish_grads()
    return Passed(logits.detach().cpu(), {name: x.cpu() for name, x in model.grad_shards().items()})


def gradient_pairs(directory: Path, ours: Passed, other: Passed) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of every trained parameter its gradient by us, by them, and the largest entry of its whole tensor's."""
    pairs = {}
    for param in model_spec(ModelConfig.load(str(directory))).params:
        if param.trainable:
            _, start, transposed = param.in_file
            whole = other.gradients[param.in_file.name].float()
            region = [(0, size) for size in ours.gradients[param.name].shape]
            (low, high), *rest = region
            part = (whole.T if transposed else whole)[region_slices(((low + start, high + start), *rest))]
            pairs[param.name] = ours.gradients[param.name], part, whole.abs().max()
    return pairs


OUTPUTS = ("sequence_ids", "response_mask", "gen_logprobs", "finished")


def generate(
    engine: NativeEngine, prompts: list[torch.Tensor], *, settings: dict[str, Any] | None = None,
    **sampling: Any,
) -> Batch:
    """The columns of a generating call; `settings` are those of `Generate`."""
    call = FunctionCall(
        "actor_generate", "generate", ("prompt_ids",), OUTPUTS, role="actor",
        work=Generate(SamplingConfig(**sampling), **(settings or {})))
    batch = Batch(list(range(len(prompts))), {"prompt_ids": Packed.of(prompts)})
    return engine.generate(call, batch).batch
