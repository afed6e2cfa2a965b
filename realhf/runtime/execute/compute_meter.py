"""The compute of a run: model FLOPs of its calls, and their sum and that of device-seconds over the steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from realhf.calls import GenerateOutputs
from realhf.data.batch import Batch
from realhf.data.responses import response_lengths
from realhf.engine.chunked_loss import wanted
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.models.model_flops import ModelFlops, TokenSpan
from realhf.models.param_spec import model_spec
from realhf.models.transformers_config import TransformersConfig
from realhf.runtime.records.step_record import StepRecord
from realhf.sample_ids import prompt_of

DEVICE_SECONDS = "compute/device_seconds"
FLOPS = "compute/flops"


def flops_by_role(roles: Mapping[str, Role]) -> dict[str, ModelFlops]:
    """Return the FLOPs of the models of all roles, except those whose sizes are not known."""
    flops = {}
    for name, role in roles.items():
        config = role.config()
        if not isinstance(config, TransformersConfig) or not config.unplannable:
            flops[name] = ModelFlops.of(model_spec(config), role.resolved_lora())
    return flops


def peaks_by_call(
    calls: Sequence[FunctionCall], roles: Mapping[str, Role], peak_flops: Mapping[str, float]
) -> dict[str, float]:
    """Return the peak FLOP/s of a device for each call whose role has a dtype with a known peak."""
    dtypes = {call.name: roles[call.role].weights_dtype for call in calls if call.role is not None}
    return {name: peak_flops[dtype] for name, dtype in dtypes.items() if dtype in peak_flops}


def generate_flops(
    call: FunctionCall, flops: ModelFlops, prompts: Batch, *, group_size: int, before: Batch,
    after: Sequence[Batch],
) -> int:
    """Return the FLOPs of a round of generation on some samples.

    `before` are the samples that earlier rounds left unfinished, and `after` all samples after this round.
    The samples of a prompt share the pass over it. The last token of a sample is not passed through the
    model.
    """
    if flops.generates_merged:
        flops = replace(flops, adapters=0)
    pairs = zip(*_lengths(prompts, call.inputs[0]), strict=True)
    by_prompt = {prompt_of(sample, group_size): length for sample, length in pairs}
    total = flops.forward(((0, length) for length in by_prompt.values()), 0)
    for sign, samples in ((-1, before), *((1, batch) for batch in after)):
        if samples.ids:
            outputs = GenerateOutputs.of(call)
            drawn = response_lengths(samples[outputs.mask]).tolist()
            lengths = samples[outputs.sequences].lengths
            spans = [(n - d, max(n - d, n - 1)) for n, d in zip(lengths, drawn, strict=True)]
            total += sign * flops.forward(spans, sum(drawn))
    return total


def sampled_tokens(call: FunctionCall, *, before: Batch, after: Sequence[Batch]) -> int:
    """Return the tokens that a round of generation has sampled; the arguments are those of generate_flops."""
    mask = GenerateOutputs.of(call).mask
    total = 0
    for sign, samples in ((-1, before), *((1, batch) for batch in after)):
        if samples.ids:
            total += sign * int(response_lengths(samples[mask]).sum())
    return total


def pass_flops(call: FunctionCall, flops: ModelFlops, minibatches: Sequence[Batch]) -> int:
    """Return the FLOPs of a call that computes log-probs, values or scores, or trains on them."""
    total = 0
    for batch in minibatches:
        if not batch.ids:
            continue
        tokens = batch[call.inputs[0]]
        num_outputs = len(batch.ids)
        if call.work.output != "scores":
            num_outputs = int(wanted(tokens, batch.fields.get("response_mask")).sum())
        spans: list[TokenSpan] = [(0, length) for length in tokens.lengths]
        if call.kind == "train_step":
            total += call.work.epochs * flops.train(spans, num_outputs)
        else:
            total += flops.forward(spans, num_outputs)
    return total


def _lengths(batch: Batch, key: str) -> tuple[list[int], list[int]]:
    return (list(batch.ids), list(batch[key].lengths)) if batch.ids else ([], [])


class ComputeMeter:
    """Adds up device-seconds and FLOPs over the steps of a run, on rank 0.

    A resumed run continues the sums in the last of its `earlier` metrics; others are not logged.
    """

    def __init__(
        self, *, num_devices: int, has_flops: bool, peaks: Mapping[str, float],
        earlier: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """`peaks` are the FLOP/s of a device for each call; MFU is logged only if no call lacks its peak."""
        self._num_devices = num_devices
        self._peaks = peaks
        start = {DEVICE_SECONDS: 0.0, FLOPS: 0.0} if has_flops else {DEVICE_SECONDS: 0.0}
        last = earlier[-1] if earlier else start
        self._totals = {name: last[name] for name in start if name in last}

    def totals(self) -> dict[str, float]:
        """Return the metrics of the compute so far."""
        return dict(self._totals)

    def add(self, records: Sequence[StepRecord], seconds: float) -> dict[str, float]:
        """Add a step, given the records of all ranks; return the metrics of the compute so far, and MFU."""
        flops: dict[str, int] = {}
        for name, value in _counted(records):
            flops[name] = flops.get(name, 0) + value
        for name, value in ((DEVICE_SECONDS, seconds * self._num_devices), (FLOPS, sum(flops.values()))):
            if name in self._totals:
                self._totals[name] += float(value)
        metrics = self.totals()
        if FLOPS in metrics and flops and flops.keys() <= self._peaks.keys():
            at_peak = sum(value / self._peaks[name] for name, value in flops.items())
            metrics["perf/mfu"] = at_peak / (seconds * self._num_devices)
        return metrics


def _counted(records: Sequence[StepRecord]) -> Iterator[tuple[str, Any]]:
    return ((e["name"], e["flops"]) for record in records for e in record.events if "flops" in e)
