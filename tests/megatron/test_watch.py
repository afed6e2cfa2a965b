"""Tests that the watch of a run knows the operations of Megatron-Core."""

import pytest
import torch

from realhf.distributed.communicators import Communicators
from realhf.distributed.group import Group, PeerError
from realhf.distributed.process import WatchedProcess
from tests.distributed.test_abort import Backend
from tests.megatron.test_curves import hf_config


@pytest.mark.slow
def test_a_train_step_waits_in_operations_that_are_known(megatron):
    """Without a GPU, over gloo: the waits of the host. Every group of the step has some."""
    for layout, groups, pipelines in [
        ("t2p2@0-3", {(0, 1), (2, 3)}, {(0, 2), (1, 3)}), ("d2@0-1", {(0, 1)}, set()),
    ]:
        ranks = 1 + max(max(group) for group in groups)
        found = megatron("waits", hf_config("qwen2"), layout, num_ranks=ranks)
        seen = [one for of_rank in found for one in of_rank]
        assert {members for _, members in seen} >= groups | pipelines
        assert {("messages", stages) for stages in pipelines} <= set(seen)
        names = {name for name, members in seen if members in groups}
        assert any(name.startswith("reduce_scatter") for name in names), names
        assert any(name.startswith(("allgather", "all_gather")) for name in names), names


@pytest.fixture
def watch():
    """Return the class that watches a process group; its module takes seconds to import."""
    from realhf.engine.megatron.process_groups import _Watched

    return _Watched


class _Inner:
    """A process group of two that notes its posts; they complete when `work` says so."""

    def __init__(self, log):
        self.work = Backend().work
        self._log = log

    def rank(self):
        return 0

    def size(self):
        return 2

    def allreduce(self, tensors):
        self._log.append("allreduce")
        return self.work

    def broadcast(self, tensors):
        self._log.append("broadcast")


class _Joins(Communicators):
    def __init__(self, log):
        super().__init__()
        self._log = log

    def join(self):
        self._log.append("join")


def test_operations_over_nccl_follow_earlier_posts_and_are_unfinished_until_they_complete(watch):
    log, process = [], WatchedProcess("step 3/9")
    process.communicators = _Joins(log)
    inner = _Inner(log)
    watched = watch(inner, Group((0, 1), 0, Backend(), native=True, process=process), process)
    with process.doing("critic_train"):
        posted = watched.allreduce([torch.zeros(2)])
        assert watched.broadcast([torch.zeros(2)]) is None
    assert log == ["join", "allreduce", "join", "broadcast"]
    assert process.unfinished() == []  # Nobody waits for it.
    posted.wait()
    ((text, _),) = process.unfinished()
    assert text == "allreduce 1 of ranks 0-1 (data), posted by critic_train (step 3/9)"
    assert not posted.is_completed()
    inner.work.completed = True
    assert process.unfinished() == [] and posted.is_completed()


def test_after_an_abort_every_operation_says_why(watch):
    process = WatchedProcess()
    watched = watch(_Inner([]), Group((0, 1), 0, Backend(), native=True, process=process), process)
    process.communicators.abort("rank 1 died")
    with pytest.raises(PeerError, match="rank 1 died"):
        watched.allreduce([torch.zeros(2)])
