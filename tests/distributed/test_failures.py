"""The failure board: each reason is printed once on every host, with the ranks that have it."""

import threading

import pytest
import torch.distributed as dist

from realhf.distributed.failures import FailureBoard
from realhf.distributed.group import PeerError

HOSTS = (0, 0, 1, 1)


def _boards():
    store = dist.HashStore()
    return [FailureBoard(store, rank=rank, size=4, host=host) for rank, host in enumerate(HOSTS)]


def _at_once(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_equal_sentences_of_all_ranks_are_printed_once_on_each_host(capsys):
    _at_once(*(lambda b=b: b.report("no such file", code=2) for b in _boards()))
    assert capsys.readouterr().err == "realhf: no such file\n" * 2


def test_ranks_are_named_when_others_do_not_fail(capsys):
    boards = _boards()
    _at_once(*(lambda b=b: b.report("no such file", code=2) for b in boards[2:]))
    assert capsys.readouterr().err == "realhf: no such file (ranks 2 and 3)\n"
    assert [board.repeat() for board in boards] == [2, 2, 2, 2]
    by_one_of_host_0 = capsys.readouterr().err
    assert by_one_of_host_0 == "realhf: no such file (ranks 2 and 3, host 1)\n"


def test_different_sentences_are_all_printed(capsys):
    boards = _boards()
    _at_once(*(lambda i=i: boards[i].report(f"reason {i}", code=2) for i in range(2)))
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "realhf: reason 0 (rank 0)", "realhf: reason 1 (rank 1)"
    ]  # fmt: skip


def test_text_takes_the_place_of_the_sentence(capsys):
    text = "Traceback ...\nKeyError"
    _boards()[3].report("rank 3 failed with KeyError", code=1, text=text, names_rank=True)
    assert capsys.readouterr().err == f"{text}\n"


def test_roll_call_ends_when_a_rank_fails_before_it():
    boards, errors = _boards(), []

    def come(board):
        try:
            board.roll_call(20.0)
        except PeerError as error:
            errors.append(str(error))

    _at_once(*(lambda b=b: come(b) for b in boards[:3]), lambda: boards[3].report("no data", code=2))
    assert errors == ["rank 3 has failed: no data"] * 3


def test_roll_call_names_who_does_not_come():
    boards, errors = _boards(), []

    def come(board):
        with pytest.raises(PeerError) as error:
            board.roll_call(0.5)
        errors.append(str(error.value))

    _at_once(*(lambda b=b: come(b) for b in (boards[0], boards[2])))
    assert errors == ["ranks 1 and 3 did not start within 0.5 s"] * 2


def test_roll_call_of_all():
    boards = _boards()
    _at_once(*(lambda b=b: b.roll_call(20.0) for b in boards))
    assert boards[0].failures() == [] and boards[0].repeat() is None
