"""The memory that the passes of a generation need beside the KV cache, as the planner counts it."""

from collections.abc import Sequence

from realhf.calls import Generate
from realhf.inference.rollout_buffer import Size
from realhf.nn.transformer import Transformer
from realhf.planner.memory.activation_memory import CallPieces
from realhf.planner.memory.call_memory import GenerationMoments
from realhf.planner.workload.problem import ModelRole, Workload


def pass_bytes(model: Transformer, work: Generate, sizes: Sequence[Size], *, num_samples: int) -> float:
    """Return the most bytes of prefill, logits, sampling and results beside the cache on this rank.

    The prompts have the given sizes, and a replica has at most `num_samples` samples. Weights with merged
    adapters are left out.
    """
    layout = model.groups.layout
    adapters = model.adapters
    role = ModelRole(
        model.config, str(model.flat.dtype).removeprefix("torch."),
        lora=None if adapters is None else adapters.lora, float32_head=model.float32_head)
    workload = Workload(
        num_samples * layout.dp * layout.cp, max((size.num_tokens for size in sizes), default=1),
        max_new_tokens=work.sampling.max_new_tokens, max_rows=work.max_rows,
        prefill_tokens=work.prefill_tokens)
    pieces = CallPieces(
        role, workload, layout.strategy, micro_batch_tokens=1, recompute=False, fused=model.flat.is_cuda)
    moments = GenerationMoments(pieces).on(pieces.stage(model.groups.at.pp))
    return max(memory.num_bytes - memory.kv_cache - memory.merged for memory in moments)
