"""Settings that a generating call and an experiment have in common: their types, with help texts.

`calls.Generate` has the defaults, and `algorithms.on_policy.OnPolicy` the options. Free of torch.
"""

from typing import Annotated, Literal

from typing_extensions import Doc

MaxRows = Annotated[int, Doc("Sequences that a rank decodes at once; the others wait for a free slot.")]
KvCacheGib = Annotated[
    float | None, Doc(
        "GiB of a rank for keys and values. None: enough for `max_rows` sequences of full length, but at "
        "most 90 % of a GPU's free memory less what passes need, or half of a host's free memory.")]
PrefillTokens = Annotated[int, Doc("Prompt tokens per forward pass; a longer prompt is processed in chunks.")]
WorkStealing = Annotated[
    bool, Doc(
        "Whether replicas that finish early take waiting prompts from others. Which prompts they take "
        "depends on timing; this changes the last bits of log-probs, and in bfloat16 a token now and then. "
        "Switch it off for runs that must repeat bit for bit.")]
CudaGraphs = Annotated[
    bool, Doc(
        "Whether a GPU records and replays decoding steps; not for experts in float32, nor where rotations "
        "depend on lengths.")]
CacheOnUpdate = Annotated[
    Literal["recompute", "keep"], Doc(
        "What happens to cached keys and values of unfinished samples when the weights change between rounds "
        "(see `rounds`). `recompute`: they are computed again. `keep`: they stay, computed by older weights; "
        "then the cache must hold all unfinished samples at once, and prompts stay on their replica (no work "
        "stealing).")]
