"""Generation through a pipeline by the code for NCCL, over gloo: its posts drain as one chain."""

from dataclasses import replace
from unittest.mock import PropertyMock, patch

import pytest
import torch

from realhf.devices.pinned import Download
from realhf.layout import Layout
from tests.distributed.emulated_nccl import NcclWorld
from tests.distributed.recording import MESSAGES, Post, fault_of
from tests.engine.reference import plain_model
from tests.inference.rounds import EOS, SIZES, Case, alone, generate_in_rounds, prompts_of
from tests.samples import marked

A, B, C = prompts_of(3, [30, 3, 24])
CASE = Case([[A, A, B, B, C, C, B, A], [A, C]], [7], 16, {"max_rows": 6, "prefill_tokens": 40})
RUNS = [
    ("p2@0-1", False, False), ("p4@0-3", False, False), ("p4@0-3", True, True), ("d2p2@0-3", True, False),
    ("d2p2@0-3", False, True), ("t2p2@0-3", False, True), ("t2p2@0-3", True, False), ("e2p2@0-3", True, True),
    ("e2t2@0-3", True, True),
]


class _Noted:
    """A communicator over gloo that also notes its messages, as if they were posts to NCCL."""

    def __init__(self, group, log):
        self._gloo, self._group, self._log = group.backend, group, log

    def send(self, tensors, peer, tag):
        self._note(tensors[0], sends=((self._group.ranks[peer], tensors[0].nbytes),))
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self._note(tensors[0], recvs=((self._group.ranks[peer], tensors[0].nbytes),))
        return self._gloo.recv(tensors, peer, tag)

    def _note(self, tensor, **ends):
        name = f"tokens {list(self._group.ranks)}"
        self._log.add(Post(name, self._group.ranks, MESSAGES, tensor.nbytes, tensor.dtype, **ends))


class _World(NcclWorld):
    def group(self, ranks, *, purpose="data"):
        group = super().group(ranks, purpose=purpose)
        if purpose == "tokens" and group.size > 1 and not isinstance(group.backend, _Noted):
            assert not group._native
            group._backend = _Noted(group, self.log)
        return group


def _generate(world, layout, case, late):
    """Return this rank's rows and posts, tokens included. If they are `late`, the last stage sends them when
    it is the cohort's turn again, as it does with a GPU."""
    if world.rank not in Layout.parse(layout):
        return {}, []
    store = torch.distributed.PrefixStore(f"pipeline order {layout} {case.paged} {late}", world._store)
    size = len(Layout.parse(layout).ranks)
    nccl = _World(rank=world.rank, size=size, store=store, shared_memory=False)
    is_here = PropertyMock(return_value=False) if late else Download.is_here
    with patch.object(Download, "is_here", is_here):
        rows, _ = generate_in_rounds(nccl, layout, case)
    return rows, nccl.log.posts


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Samples of a model whose four layers can be four stages."""
    directory = tmp_path_factory.mktemp("pipeline")
    plain_model(directory, eos_token_id=EOS, **SIZES | {"num_hidden_layers": 4}).save_pretrained(directory)
    return replace(CASE, model=str(directory))


def _without_tokens(logs):
    return {
        rank: [post for post in posts if not post.communicator.startswith("tokens")]
        for rank, posts in logs.items()}


@pytest.mark.parametrize(("layout", "late", "paged"), marked(RUNS, quick=[0]))
def test_posts_drain_and_tokens_are_those_of_gloo(pool, case, layout, late, paged):
    case = replace(case, paged=paged, model=None if layout.startswith("e") else case.model)
    expected, _ = alone(case)
    assert len({len(row[0]) for row in expected.values()}) > 3
    over_gloo, found, logs = {}, {}, {}
    for rows, _ in pool.run(generate_in_rounds, layout, case):
        over_gloo |= rows
    for rank, (rows, posts) in enumerate(pool.run(_generate, layout, case, late)):
        found |= rows
        logs[rank] = posts
    assert found.keys() == over_gloo.keys() == expected.keys()
    for i, row in expected.items():
        assert torch.equal(found[i][0], over_gloo[i][0]) and torch.equal(found[i][0], row[0]), i
    assert fault_of(_without_tokens(logs)) == ""
    if not late:  # Tokens in the chain would wait for the next cohort's hidden states, and these for them.
        assert "waits in messages" in fault_of(logs) and "on tokens" in fault_of(logs)


def test_swapped_cohorts_are_found(pool, case):
    """Every swap of two neighbouring hidden states of one stage, if their sizes differ."""
    logs = _without_tokens(dict(enumerate(posts for _, posts in pool.run(_generate, "p2@0-1", case, True))))
    num_swaps = 0
    for rank in (0, 1):
        posts = logs[rank]
        for i in range(len(posts) - 1):
            if posts[i].num_bytes != posts[i + 1].num_bytes:
                swapped = [*posts[:i], posts[i + 1], posts[i], *posts[i + 2 :]]
                assert "differ" in fault_of({**logs, rank: swapped})
                num_swaps += 1
    assert num_swaps > 4
