"""The engine on a device that is not there: nothing may be left on the host that the device needs, nor the
other way round. Tests marked `gpu` show the rest on a real one."""

import pytest
import torch

from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.calls import InsertedPhrase, LogProbs, OptimizerConfig, TrainStep
from realhf.data.batch import Batch, Packed
from realhf.devices import half_precision
from realhf.graph import FunctionCall
from tests.gpu.models import OUTPUTS, engine_of, generate, tokens, write_model
from tests.gpu.pretended import pretended_device
from tests.samples import marked


@pytest.mark.parametrize("name", marked(["gemma-2", "deepseek-v3"], quick=[1]))
def test_generation_forward_pass_and_training(tmp_path, name):
    directory = write_model(tmp_path / "model", name)
    prompts = [prompt for prompt in tokens(20).split([3, 10, 7]) for _ in range(2)]
    found = []
    with pretended_device() as pretended:
        for device in (pretended, torch.device("cpu")):
            engine = engine_of(directory, device=device, dtype="float32", optimizer=OptimizerConfig(lr=1e-3))
            settings = {"max_rows": 4, "prefill_tokens": 8}
            made = generate(engine, prompts, settings=settings, max_new_tokens=6)
            forward = FunctionCall(
                "ref_forward", "forward", OUTPUTS[:2], ("logprobs",), role="ref", work=LogProbs())
            logprobs = engine.forward(forward, made, micro_batch_tokens=50)["logprobs"]
            found.append((made["sequence_ids"].values.tolist(), logprobs.values, _train(engine, made)))
    (ids, logprobs, metrics), (other_ids, other_logprobs, other_metrics) = found
    assert ids == other_ids
    torch.testing.assert_close(logprobs, other_logprobs, rtol=1e-4, atol=1e-4)
    assert metrics == pytest.approx(other_metrics, rel=1e-3, abs=1e-5)


def _train(engine, made):
    mask = made["response_mask"]
    columns = {key: made[key] for key in OUTPUTS[:3]}
    columns["advantages"] = Packed(mask.values * 0.5, mask.lengths)
    work = TrainStep(PolicyLoss(PolicyLossConfig()), router_aux_loss_coef=0.01)
    call = FunctionCall("actor_train", "train_step", tuple(columns), role="actor", work=work)
    return engine.train(call, [Batch(made.ids, columns)], micro_batch_tokens=50)


def test_it_refuses_what_a_real_one_refuses():
    with pretended_device() as device:
        here, there = torch.ones(3), torch.ones(3, device=device)
        assert (there + 1).device == device and there.is_cuda and not here.is_cuda
        with pytest.raises(RuntimeError, match="mixes"):
            here + there
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert there.cpu().numpy().tolist() == [1.0, 1.0, 1.0]


def test_inserted_phrases_and_a_head_in_float32(tmp_path):
    directory = write_model(tmp_path / "model", "qwen2")
    prompts = list(tokens(20).split([3, 10, 7]))
    phrase = InsertedPhrase(2, phrase=(7, 8), end=(5, 6))
    answers = None
    metrics = []
    with pretended_device() as pretended:
        for device in (pretended, torch.device("cpu")):
            engine = engine_of(
                directory, device=device, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3),
                float32_head=True)
            made = generate(engine, prompts, settings={"interruption": phrase}, max_new_tokens=6)
            rows = zip(prompts, *(made[key].split() for key in OUTPUTS[:2]), strict=True)
            for start, tokens_of_row, mask in ((len(prompt), *row) for prompt, *row in rows):
                assert mask[start:].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0][: len(mask) - start]
                assert tokens_of_row[start + 2 : start + 4].tolist() == [7, 8]
            answers = answers or made
            metrics.append(_train(engine, answers))
    largest = [found.pop("mismatch/max") for found in metrics]
    assert all(0 < value < 0.2 for value in largest)  # One token's rounding decides.
    assert metrics[0] == pytest.approx(metrics[1], rel=0.02, abs=1e-3)


def test_float32_products_of_16_bit_units():
    """A GPU multiplies parts of the float32 operand; nothing is lost."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(40, 30, generator=generator) * torch.logspace(-6, 6, 30)
    weight = torch.randn(30, 20, generator=generator).bfloat16()
    x = torch.randn(40, 20, generator=generator).bfloat16()
    total = torch.full((30, 20), torch.nan)
    with pretended_device() as device:
        made = torch.zeros(40, 20, device=device)
        half_precision.product(grad.to(device), weight.to(device), out=made)
        there = total.to(device)
        half_precision.add_product(there, grad.to(device), x.to(device), is_empty=True)
        logits = half_precision.affine_float32(x.to(device), weight.to(device))
        found = [made.cpu(), there.cpu(), logits.cpu()]
    exact = [grad.double() @ weight.double(), grad.double().T @ x.double(), x.double() @ weight.double().T]
    for ours, wanted in zip(found, exact, strict=True):
        largest = wanted.abs().amax(1, keepdim=True)
        assert ((ours - wanted).abs() / largest).max() < 2e-6
