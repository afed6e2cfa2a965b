"""The counter of waits, copies and launches on the device that is not there finds each kind of them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.gpu.host_traffic import host_traffic
from tests.gpu.pretended import CUDA, Tape, pretended_device


def _read(x):
    return {
        "item": lambda: x[0, 0].item(), "bool": lambda: bool(x[0, 0] > 0), "float": lambda: float(x[0, 0]),
        "int": lambda: range(5)[(x[0, 0] * 0).long()], "tolist": x.tolist, "cpu": x.cpu,
        "to": lambda: x.to("cpu"), "print": lambda: repr(x[0, 0]), "equal": lambda: torch.equal(x, x + 1),
        "any": lambda: assert_(x.isnan().any()), "copy_": lambda: torch.empty(4, 3).copy_(x),
        "copy to pageable memory": lambda: torch.empty(4, 3).copy_(x, non_blocking=True),
    }


def assert_(found):
    assert not found


def _sized_by_data(x):
    whole = (x > 0).long()
    return {
        "nonzero": lambda: x.nonzero(), "bincount": lambda: whole.flatten().bincount(minlength=9),
        "mask": lambda: x[x > 0], "masked_select": lambda: x.masked_select(x > 0),
        "masked tensor": lambda: x.__setitem__(x > 0, x[x > 0] * 2), "unique": lambda: x.unique(),
        "where": lambda: torch.where(x > 0), "repeat": lambda: x.repeat_interleave(whole[:, 0], 0),
    }


def _write(x):
    here = torch.ones(4, 3)
    return {
        "tensor": lambda: torch.tensor([1.0, 2.0], device=CUDA), "new_tensor": lambda: x.new_tensor([1.0]),
        "to": lambda: here.to(CUDA), "numpy": lambda: torch.from_numpy(np.ones(3)).to(CUDA),
        "not blocking": lambda: here.to(CUDA, non_blocking=True), "copy_": lambda: x.copy_(here),
        "pinned, blocking": lambda: here.pin_memory().to(CUDA), "list": lambda: x[[0, 2]],
        "indices": lambda: x[torch.tensor([0, 2])], "number": lambda: x.__setitem__(x[:2, 0].long(), 7.0),
        "_foreach_copy_": lambda: torch._foreach_copy_([x], [here]),
    }


def _without_wait(x):
    pinned = torch.ones(4, 3).pin_memory()
    mask = x > 0
    return {
        "arithmetic": lambda: (x @ x.T + 1).softmax(-1).topk(2),
        "number in a mask": lambda: x.mul_(1).__setitem__(mask, 0.0),
        "pinned": lambda: pinned.to(CUDA, non_blocking=True),
        "pinned copy_": lambda: x.copy_(pinned, non_blocking=True),
        "not blocking": lambda: x.to("cpu", non_blocking=True),
        "into pinned": lambda: pinned.copy_(x, non_blocking=True),
        "made there": lambda: torch.zeros(4, device=CUDA) + torch.arange(4, device=CUDA),
        "counts": lambda: torch.zeros(9, dtype=torch.long, device=CUDA).scatter_add_(
            0, mask.long().flatten(), mask.flatten().long()),
        "where": lambda: torch.where(mask, x, 0.0), "fill_": lambda: x[0].fill_(2.0),
        "repeat": lambda: x.repeat_interleave(mask.long()[:, 0] + 1, 0, output_size=8),
        "grouped_mm": lambda: F.grouped_mm(
            x.bfloat16()[:, :1].expand(4, 16).contiguous(), torch.ones(2, 16, 8, device=CUDA).bfloat16(),
            offs=torch.full((2,), 4, dtype=torch.int32, device=CUDA)),
    }


def _kinds(actions):
    with pretended_device():
        return list(actions(torch.ones(4, 3, device=CUDA)))


def _traffic(actions, kind):
    with pretended_device():
        action = actions(torch.ones(4, 3, device=CUDA))[kind]
        with host_traffic() as traffic:
            action()
    return traffic


@pytest.mark.parametrize("actions", [_read, _sized_by_data, _write])
def test_every_wait_is_found(actions):
    for kind in _kinds(actions):
        traffic = _traffic(actions, kind)
        assert traffic.waits, kind
        assert all("tests/test_host_traffic.py:" in wait for wait in traffic.waits), kind
        assert actions is not _read or traffic.downloads or kind == "equal", kind
        assert actions is not _write or traffic.uploads, kind


def test_nothing_else_is_a_wait():
    for kind in _kinds(_without_wait):
        traffic = _traffic(_without_wait, kind)
        assert not traffic.waits, kind
        assert traffic.launches or traffic.transfers, kind


def test_copies_and_launches_are_counted():
    with pretended_device() as device:
        weight = torch.ones(3, 5, device=device, requires_grad=True)
        here = torch.ones(4, 3).pin_memory()
        with host_traffic() as traffic:
            x = here.to(device, non_blocking=True)
            y = (x @ weight).t().view(5, 4)[1:]  # One product; the others are views.
            z = y.sum()
        assert (traffic.uploads, traffic.downloads, traffic.launches) == (1, 0, 2)
        with host_traffic() as traffic:
            z.backward()
        assert traffic.launches > 1 and not traffic.waits
        with host_traffic() as traffic:
            made = y.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        assert made.is_pinned() and not made.is_cuda
        assert (traffic.transfers, traffic.downloads, traffic.launches) == (1, 1, 0)
        assert not traffic.waits_but("Event.synchronize") and len(traffic.waits) == 1


def test_float32_experts_wait_in_the_kernel():
    """torch's grouped product multiplies group by group unless the operands are in bfloat16."""
    with pretended_device() as device:
        x = torch.ones(4, 16, device=device)
        ends = torch.full((1,), 4, dtype=torch.int32, device=device)
        with host_traffic() as traffic:
            F.grouped_mm(x, torch.ones(1, 16, 8, device=device), offs=ends)
    assert [wait.split()[0] for wait in traffic.waits] == ["grouped_mm"]


def test_a_replay_is_one_launch():
    with pretended_device() as device:
        x = torch.ones(4, device=device)
        tape = Tape(lambda: (x * 2).exp() + 1)
        with host_traffic() as traffic:
            assert tape().is_cuda
    assert (traffic.replays, traffic.launches, traffic.waits) == (1, 0, [])


def test_a_backward_pass_sees_the_device():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append((grad.is_cuda, bool(grad.isnan().any())))
            return grad * 2

    with pretended_device() as device:
        x = torch.ones(3, device=device, requires_grad=True)
        with host_traffic() as traffic:
            Noting.apply(x).sum().backward()
        assert x.grad is not None and x.grad.is_cuda
    assert seen == [(True, False)] and len(traffic.waits) == 1
