"""Who waits for a reallocation on a GPU: the stream of the calls, and the host only where it asks for times.

Pretended streams execute on a clock of their own, and note who waits.
"""

import pytest
import torch

from realhf.layout import Layout
from realhf.realloc.execute import ReallocStats
from realhf.runtime.compile.actions import Reallocate
from realhf.runtime.weights.reallocations import Arrivals, FinishedReallocation, PostedTask, StreamRunner


class _Device:
    """Two streams of a device; each is a time, in milliseconds, until which it has work."""

    def __init__(self, monkeypatch):
        device = self
        self.host_waits = 0
        self.main, self.side = _Stream(), _Stream()
        self.current = self.main

        class _Event:
            def __init__(self, enable_timing=False):
                self.time = None

            def record(self):
                self.time = device.current.time

            def synchronize(self):
                device.host_waits += 1

            def elapsed_time(self, end):
                return end.time - self.time

        class _On:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before, device.current = device.current, self.stream

            def __exit__(self, *_):
                device.current = self.before

        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.side)
        monkeypatch.setattr(torch.cuda, "stream", _On)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)


class _Stream:
    def __init__(self):
        self.time = 0.0

    def wait_event(self, event):
        self.time = max(self.time, event.time)

    def wait_stream(self, other):
        self.time = max(self.time, other.time)


def _post(device, *, before, takes):
    """Post a transfer that takes so many milliseconds, after as many of work on the stream of the calls."""
    device.main.time = before
    stream = StreamRunner(torch.device("cuda"))

    def transfer():
        assert device.current is device.side
        device.side.time += takes
        return "moved"

    return stream.submit(transfer)


def test_the_stream_waits_and_the_host_does_not(monkeypatch):
    device = _Device(monkeypatch)
    posted = _post(device, before=30.0, takes=200.0)
    device.main.time += 50.0  # Other calls run meanwhile.
    assert posted.result() == posted.result() == "moved"
    assert device.main.time == 230.0 and device.host_waits == 0
    device.main.time += 1000.0  # The call that needs the weights.
    assert posted.arrived() == pytest.approx(posted.asked_at + 0.15)
    assert posted.ended() == pytest.approx(posted.posted_at + 0.2)


def test_weights_that_are_there_hold_up_nothing(monkeypatch):
    device = _Device(monkeypatch)
    posted = _post(device, before=30.0, takes=200.0)
    device.main.time += 500.0
    posted.result()
    assert device.main.time == 530.0 and posted.arrived() == posted.asked_at


def test_a_call_begins_when_its_weights_have_come(monkeypatch):
    device = _Device(monkeypatch)
    posted = _post(device, before=0.0, takes=200.0)
    layout = Layout.parse("d1@0")
    action = Reallocate("actor", layout, "actor", Layout.parse("d1@1"))
    posted.result()
    arrivals = Arrivals()
    posted.asked_at = 10.0
    moved = FinishedReallocation(action, ReallocStats(3, 4, 1.0), 7.0, posted.ended, posted.arrived)
    arrivals.add([moved, moved])  # Both arrive at the same time.
    event = {"start": 10.05, "end": 11.0, "waited": 0.5}
    arrivals.delay(event)
    arrivals.delay(later := {"start": 20.0, "end": 21.0, "waited": 0.0})
    arrivals.settle()
    assert event == {"start": pytest.approx(10.2), "end": 11.0, "waited": pytest.approx(0.65)}
    assert later == {"start": 20.0, "end": 21.0, "waited": 0.0}
    told, _ = arrivals.take_events(rank=1)
    assert (told["rank"], told["kind"], told["start"], told["sent_bytes"]) == (1, "realloc", 7.0, 3)
    assert told["end"] == posted.ended()
    arrivals.take_events(rank=1)
    arrivals.add([moved])
    arrivals.delay(late := {"start": 30.0, "end": 31.0, "waited": 0.0})  # It waited for samples meanwhile.
    arrivals.settle()
    assert late == {"start": 30.0, "end": 31.0, "waited": 0.0}


def test_on_a_cpu_a_task_has_ended_when_it_is_posted():
    posted = StreamRunner(torch.device("cpu")).submit(lambda: 5)
    assert posted.result() == 5 and posted.arrived() == posted.ended()
    assert posted.posted_at <= posted.ended() <= posted.posted_at + 60
    assert PostedTask(1, 0.0).result() == 1
