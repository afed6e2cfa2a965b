"""The layers let the host run ahead of the device: nothing in them waits for it, forward or backward."""

import pytest
import torch

from realhf.calls import Loss, OptimizerConfig, Output, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices import chunk_sizes
from realhf.distributed.process import no_report
from realhf.distributed.world import World
from realhf.engine.base import PassSettings
from realhf.inference.sampling import sample
from realhf.nn.attention import Attend
from realhf.nn.moe import Moe, RouterLosses, RowGroups, gathering, grouped_linear
from realhf.nn.vocab_parallel import Head, head_logprobs, head_top_logprobs, top_tokens
from tests.families import SIZES
from tests.gpu.host_traffic import host_traffic
from tests.gpu.models import engine_of, tokens, write_model
from tests.gpu.pretended import mark_as_there, pretended_device
from tests.nn.test_moe import hf_config
from tests.nn.tiny import build
from tests.samples import marked

LENGTHS = [5, 1, 9, 9, 3]
NAMES = ("qwen2", "gpt2", "mixtral", "qwen3-moe", "deepseek-v3")


def _attend(q_TND, k_TKD, v_TKD, *, kind):
    """Mix heads without a kernel of attention, whose tests are elsewhere."""
    return q_TND[..., : v_TKD.shape[2]] + (k_TKD.mean(1) * v_TKD.mean(1).sum()).sum(-1)[:, None, None]


def _run_blocks(model, x_TH, angles, losses):
    with host_traffic() as traffic:
        for index, block in enumerate(model.blocks):
            x_TH = block(x_TH, None if angles is None else angles(index), [Attend(_attend)], losses)
    return x_TH, traffic


@pytest.mark.parametrize("name", NAMES)
def test_blocks_never_wait(tmp_path, name):
    directory = write_model(tmp_path / "model", name)
    with pretended_device() as device:
        model = engine_of(directory, device=device, dtype="bfloat16").model
        model.enable_grad()
        position_T = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
        length_T = torch.tensor([n for n in LENGTHS for _ in range(n)]).to(device)
        row_T = torch.tensor([i for i, n in enumerate(LENGTHS) for _ in range(n)]).to(device)
        angles = None if model._rope is None else model._rope(position_T, length_T)
        losses = RouterLosses(balance_scale=0.1, z_scale=0.1)
        losses.start(row_T, length_T, num_sequences=len(LENGTHS), group=model.groups.cp)
        x_TH = model._embed(tokens(sum(LENGTHS)).to(device), position_T)
        y_TH, forward = _run_blocks(model, x_TH, angles, losses)
        with host_traffic() as backward:
            y_TH.sum().backward()
        with torch.inference_mode():
            _, decoding = _run_blocks(model, x_TH.detach(), angles, None)
    with_experts = 0 if model.config.moe is None else sum(isinstance(b.mlp, Moe) for b in model.blocks)
    for traffic in (forward, backward, decoding):
        # The backward pass reads how many rows each expert has, whose copies have begun in the forward pass.
        assert not traffic.waits_but("Event.synchronize") and not traffic.uploads
        assert len(traffic.waits) == (with_experts if traffic is backward else 0)
        assert traffic.downloads == (with_experts if traffic is forward else 0)
        assert traffic.launches > 10 * len(model.blocks)
    if model.config.moe is not None:
        assert losses.sums().count_nonzero() == 2


def test_float32_experts_wait_once_in_a_layer(tmp_path):
    """Without a kernel for such experts, the host must know how many rows each has."""
    directory = write_model(tmp_path / "model", "mixtral")
    with pretended_device() as device:
        model = engine_of(directory, device=device, dtype="float32").model
        x_TH = torch.ones(7, 64, device=device)
        with host_traffic() as traffic, torch.inference_mode():
            model.blocks[0].mlp(x_TH)
    assert [wait.split(":")[0] for wait in traffic.waits] == ["tolist realhf/nn/moe.py"]


def _split_experts(world):
    """Return the waits of a layer whose experts are on two ranks, whose memory is said to be a device's."""
    if world.rank > 1:
        return None
    with pretended_device() as device:
        hf = {**hf_config("qwen3-moe"), "moe_intermediate_size": 16}
        model = build(hf, world=world, layout="d2e2@0-1", dtype=torch.bfloat16)
        mark_as_there(model.flat)
        x_TH = torch.ones(7 + world.rank, 32, device=device)
        x_TH = x_TH.bfloat16().requires_grad_()
        with host_traffic() as traffic:
            model.blocks[0].mlp(x_TH).sum().backward()
        layers = [block.mlp for block in model.blocks]
        with torch.no_grad():
            wanted_TH = layers[0](x_TH.detach())
        with host_traffic() as decoding, torch.inference_mode(), gathering(layers, 9):
            y_TH = layers[0](x_TH.detach())
        apart = (y_TH.cpu().float() - wanted_TH.cpu().float()).abs().max() / wanted_TH.cpu().abs().max()
        return traffic.waits, x_TH.grad.is_cuda, decoding.waits, float(apart)


@pytest.mark.slow
def test_split_experts_wait_once_in_a_layer(pool):
    """The ranks must know how many rows each sends to each; the way back and the backward pass know it. While
    decoding, they gather all tokens instead."""
    for waits, has_gradient, waits_of_decoding, apart in pool.run(_split_experts)[:2]:
        assert has_gradient and waits_of_decoding == [] and apart < 0.02
        assert [wait.split(":")[0] for wait in waits] == ["cpu realhf/nn/moe.py"]


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.8}, {"top_p": 0.5, "min_p": 0.1}])
def test_sampling_never_waits(settings):
    group = World().group((0,))
    logits_BV = torch.randn(6, 700, generator=torch.Generator().manual_seed(0))
    uniform_B = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pretended_device() as device:
        found = []
        for where in (device, torch.device("cpu")):
            operands = logits_BV.to(where), uniform_B.to(where)
            with host_traffic() as traffic:
                drawn = sample(*operands, config=SamplingConfig(**settings), vocab_start=0, group=group)
            assert not traffic.waits and not traffic.transfers
            assert (traffic.launches > 0) == (where == device)
            found.append([x.cpu() for x in drawn])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_the_head_never_waits():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (9, 50))
    labels = torch.randint(0, 50, (9, 3), generator=generator)
    with pretended_device() as device:
        head = Head(weight.to(device).requires_grad_(), 0, World(device=device).group((0,)))
        hidden, labels = hidden.to(device).requires_grad_(), labels.to(device)
        with host_traffic() as traffic:
            logprobs, entropy = head_logprobs(hidden, labels, head, entropy=True, chunk_tokens=4)
            (logprobs.sum() + entropy.sum()).backward()
            head_top_logprobs(hidden, head, 4)
    assert not traffic.waits and not traffic.transfers and traffic.launches > 20


def test_most_probable_tokens_on_the_device_are_those_of_the_cpu():
    """With ties, of which the lower indices count; and with infinities."""
    x = torch.randint(0, 4, (40, 30), generator=torch.Generator().manual_seed(0)).float()
    x[3, :20] = -torch.inf
    x[4, 7] = torch.inf
    x[5, 2] = torch.nan
    with pretended_device() as device:
        found = [part.cpu() for part in top_tokens(x.to(device), 6)]
    for ours, wanted in zip(found, top_tokens(x, 6), strict=True):
        assert torch.equal(ours, wanted)


class LogProbsAndEntropy(Loss):
    output = "logprobs"
    entropy = True

    def totals(self, batch):
        return {"samples": len(batch)}

    def __call__(self, outputs, batch, totals):
        return (outputs["logprobs"] + outputs["entropy"]).sum(), {}


@pytest.mark.parametrize("name", ["qwen2", "deepseek-v3"])
@pytest.mark.parametrize("chunk_tokens", marked([4, 1000], quick=[0]))
def test_a_micro_batch_of_training_never_waits(tmp_path, monkeypatch, name, chunk_tokens):
    """The positions of its tokens, the tokens in the mask, and the parts of the loss are computed on the
    host, forward and backward."""
    monkeypatch.setattr(chunk_sizes, "CHUNK_NUMEL", chunk_tokens * SIZES["vocab_size"] // 8)
    directory = write_model(tmp_path / "model", name)
    settings = PassSettings("ids", Output.LOGPROBS, 0.7, loss=LogProbsAndEntropy())
    with pretended_device() as device:
        engine = engine_of(
            directory, device=device, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3))
        mask = torch.arange(sum(LENGTHS)) % 3 > 0
        ids = Packed(tokens(sum(LENGTHS)), LENGTHS)
        batch = Batch(list(range(5)), {"ids": ids, "response_mask": ids.like(mask.float())})
        batch = batch.to(device).select([4, 1, 0, 2, 3])
        with host_traffic() as traffic:
            parts = engine._run_passes([batch], settings, no_report)
    assert not traffic.waits_but("Event.synchronize") and traffic.launches > 50
    assert len(parts) == (4 if chunk_tokens == 4 else 1)


def test_outputs_without_gradients_never_wait(tmp_path):
    directory = write_model(tmp_path / "model", "qwen2")
    with pretended_device() as device:
        engine = engine_of(directory, device=device, dtype="bfloat16")
        batch = Batch([0, 1], {"ids": Packed(tokens(9), [4, 5])}).to(device)
        for top in (0, 3):
            settings = PassSettings("ids", Output.LOGPROBS, top=top)
            with host_traffic() as traffic, torch.no_grad():
                engine._run_passes([batch], settings, no_report)
            assert not traffic.waits and traffic.launches > 20


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0]])
def test_grouped_products_take_the_ends_on_the_device(counts):
    x, weight = torch.randn(sum(counts), 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    ends = torch.tensor(counts).cumsum(0).int()
    wanted = torch.cat([part @ w.T for part, w in zip(x.split(counts), weight, strict=True)])
    with pretended_device() as device:
        groups, x, weight = RowGroups(ends.to(device)), x.to(device), weight.to(device)
        with host_traffic() as traffic:
            found = grouped_linear(x, weight.flatten(0, 1), groups)
        assert not traffic.waits and torch.equal(groups.ends_L.cpu(), ends)
        torch.testing.assert_close(found.cpu(), wanted, rtol=2e-2, atol=2e-2)
