"""Tests which operations a rank tells its peers of as unfinished."""

import random

import torch

from realhf.distributed import communicators
from realhf.distributed.communicators import Communicators, Operation, _DeviceLane
from realhf.distributed.group import Group
from realhf.distributed.process import WatchedProcess
from tests.distributed.test_abort import Backend


def _operation(number):
    return Operation("all_reduce", (0, 1), "data", number, "actor_train")


def test_a_stream_tells_how_far_it_has_come(monkeypatch):
    """Against a queue of marks that a pretended stream executes late; they begin again several times."""
    monkeypatch.setattr(communicators, "_NUM_MARKS", 16)
    draw = random.Random(0)
    lane, posted, done = _DeviceLane("cpu"), [], 0
    mark = lane.mark
    marks = []
    for number in range(1, 200):
        operation = _operation(number)
        lane.add(operation, None)
        posted.append(operation)
        marks.append(number)
        while marks and (len(marks) > 14 or draw.random() < 0.5):
            done = marks.pop(0)
            count, lane._count = lane._count, done
            mark()  # The device copies the number that was current when the host posted it.
            lane._count = count
        assert lane.unfinished() == posted[done:]


def test_training_marks_a_stream_that_generation_has_used_first():
    with torch.inference_mode():
        lane = _DeviceLane("cpu")
        lane.add(_operation(1), None)
        lane.mark()
    lane.add(second := _operation(2), None)
    assert lane.unfinished() == [second]
    lane.mark()
    assert lane.unfinished() == []


def test_the_oldest_of_each_communicator_is_told_with_the_call_that_posted_it():
    process, backends = WatchedProcess("step 3/9"), [Backend(), Backend()]
    groups = [
        Group((0, 1, 2), 0, backend, native=True, process=process, purpose=purpose)
        for backend, purpose in zip(backends, ("data", "realloc"), strict=True)
    ]
    works = {}
    for name, group, backend in [("a", 0, 0), ("b", 1, 1), ("c", 0, 0), ("d", 1, 1)]:
        backends[backend].work = works[name] = type(backends[backend].work)()
        with process.doing(name):
            groups[group].all_reduce(torch.zeros(2))
    first = "all_reduce {} of ranks 0-2 (data), posted by {} (step 3/9)"
    second = "all_reduce {} of ranks 0-2 (realloc), posted by {} (step 3/9)"
    texts = [text for text, _ in process.unfinished()]
    assert texts == [first.format(1, "a"), second.format(1, "b")]
    works["a"].completed = True
    assert [text for text, _ in process.unfinished()] == [second.format(1, "b"), first.format(2, "c")]
    for work in works.values():
        work.completed = True
    assert process.unfinished() == []


def test_a_wait_over_gloo_comes_first_and_names_its_operation():
    process = WatchedProcess("step 3/9")
    operation = _operation(4)
    with process.waiting((1,), operation), process.waiting((2,), _operation(5)):
        ((text, seconds),) = process.unfinished()
        assert text == "all_reduce 4 of ranks 0-1 (data)" and 0 <= seconds < 60
    assert process.unfinished() == [] and process.waits_in is None


def test_without_a_work_nothing_is_unfinished_on_a_cpu():
    communicators = Communicators()
    communicators.note(_operation(1))
    assert communicators.unfinished() == []
