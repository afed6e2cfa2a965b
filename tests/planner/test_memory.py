"""Predicted memory: against the storage of real runs, and against published figures."""

import pytest

from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.planner.memory import call_bytes, training_bytes, weights_bytes
from realhf.planner.problem import ModelRole, Workload
from tests.planner.measured import Case, measure


def _role(dtype="float32", *, trainable=True, vocab=1500, tied=False, head="lm", layers=6, hidden=128):
    config = ModelConfig("llama", vocab, hidden, 352, layers, 8, 4, hidden // 8, 1e-6, 1e4, False, tied, head)
    return ModelRole(config, dtype, trainable)


NARROW = {"vocab": 96, "layers": 8}  # What the layers keep is most; else it is the logits.
FULL = Workload(num_samples=32, prompt_tokens=16, response_tokens=32)
SHORT = Workload(num_samples=16, prompt_tokens=8, response_tokens=8)
GENERATE = Workload(
    num_samples=32, prompt_tokens=32, response_tokens=16, max_new_tokens=16, samples_per_prompt=4
)
FEW_ROWS = Workload(num_samples=32, prompt_tokens=32, response_tokens=16, max_new_tokens=16, max_rows=8)
VALUES = Workload(num_samples=32, prompt_tokens=16, response_tokens=32, output="values")
SCORES = Workload(num_samples=32, prompt_tokens=16, response_tokens=32, output="scores")
ENTROPY = Workload(num_samples=32, prompt_tokens=16, response_tokens=32, entropy=True, minibatches=2)

CASES = [
    Case("d1@0", "train_step", _role(), FULL, 480),
    Case("d1@0", "train_step", _role("bfloat16"), FULL),
    Case("d1@0", "train_step", _role("bfloat16", tied=True, vocab=6000), SHORT, 64),
    Case("d2@0-1", "train_step", _role(hidden=256), SHORT, 64),
    Case("d2@0-1", "train_step", _role("bfloat16", head="score"), VALUES, 480),
    Case("d4@0-3", "train_step", _role("bfloat16", **NARROW), FULL),
    Case("t2@0-1", "train_step", _role("bfloat16", **NARROW), FULL),
    Case("t2@0-1", "train_step", _role(tied=True), ENTROPY, 480),
    Case("t4@0-3", "train_step", _role(**NARROW), FULL),
    Case("p2@0-1", "train_step", _role("bfloat16", **NARROW), FULL, 240),
    Case("p2@0-1", "train_step", _role(tied=True, vocab=6000), SHORT, 64),
    Case("d2t2@0-3", "train_step", _role("bfloat16"), ENTROPY),
    Case("t2p2@0-3", "train_step", _role("bfloat16"), FULL, 240),
    Case("p4@0-3", "train_step", _role(**NARROW), FULL, 144),
    Case("d2p2@0-3", "train_step", _role("bfloat16", **NARROW), FULL, 144),
    Case("d1@0", "train_step", _role("bfloat16", **NARROW), FULL, 768, recompute=True),
    Case("d2t2@0-3", "train_step", _role(**NARROW), FULL, recompute=True),
    Case("t2p2@0-3", "train_step", _role("bfloat16"), FULL, 240, recompute=True),
    Case("p4@0-3", "train_step", _role("bfloat16", **NARROW), FULL, 144, recompute=True),
    Case("d1@0", "forward", _role("bfloat16", trainable=False), FULL),
    Case("d1@0", "forward", _role(trainable=False), SHORT, 64),
    Case("t2@0-1", "forward", _role(trainable=False, **NARROW), FULL),
    Case("t4@0-3", "forward", _role("bfloat16", trainable=False), FULL, 480),
    Case("d2p2@0-3", "forward", _role("bfloat16", trainable=False), FULL, 144),
    Case("p2@0-1", "forward", _role(trainable=False, head="score"), VALUES, 240),
    Case("d2t2@0-3", "forward", _role("bfloat16", trainable=False, head="score"), SCORES),
    Case("d1@0", "generate", _role("bfloat16", trainable=False, vocab=500), GENERATE),
    Case("d1@0", "generate", _role(trainable=False, tied=True), FEW_ROWS),
    Case("d2@0-1", "generate", _role(trainable=False), GENERATE),
    Case("t2@0-1", "generate", _role("bfloat16", trainable=False, vocab=500), FEW_ROWS),
    Case("p2@0-1", "generate", _role(trainable=False, vocab=500), GENERATE),
    Case("t2p2@0-3", "generate", _role("bfloat16", trainable=False), GENERATE),
    Case("d2t2@0-3", "generate", _role(trainable=False), GENERATE),
]


def _name(case):
    extra = "-recompute" * case.recompute + "-tied" * case.role.config.tied
    return f"{case.layout.split('@')[0]}-{case.kind}-{case.role.dtype}{extra}"


def predict(case, rank):
    """(weights, training, call's parts) of the rank."""
    layout = Layout.parse(case.layout)
    stage = layout.coordinate(rank).pp
    where = (layout.strategy, stage)
    options = {"micro_batch_tokens": case.micro_batch_tokens, "recompute": case.recompute}
    training = training_bytes(case.role, *where) if case.role.trainable else 0
    return (
        weights_bytes(case.role, *where), training,
        call_bytes(case.role, case.kind, case.workload, *where, **options),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_peak_is_as_predicted(pool, case):
    ranks = Layout.parse(case.layout).ranks
    for rank, (weights, training, peak) in enumerate(pool.run(measure, case, num_ranks=len(ranks))):
        predicted = predict(case, rank)
        call = sum(predicted[2].values())
        assert predicted[0] == weights
        assert predicted[1] == pytest.approx(training, rel=0.01)
        assert call == pytest.approx(peak, rel=0.2), predicted[2]
        assert sum(predicted[:2]) + call == pytest.approx(weights + training + peak, rel=0.1), predicted[2]
