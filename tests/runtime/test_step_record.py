"""The times of a step's events: on a GPU they are those of the device, for which the host waits once."""

from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch

from realhf.runtime.records import step_record
from realhf.runtime.records.step_record import StepRecord
from tests.gpu.host_traffic import host_traffic
from tests.gpu.pretended import pretended_device


class _Clock:
    """A host and a device with times of their own, in seconds."""

    def __init__(self):
        self.host = 100.0
        self.device = 100.0

    def work(self, seconds):
        """Let the device work for so long, after all that it has to do already."""
        self.device = max(self.device, self.host) + seconds


def _event_class(clock):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(clock.device, clock.host)

        def synchronize(self):
            clock.host = max(clock.host, self.at)

        def elapsed_time(self, end):
            return 1000 * (end.at - self.at)

    return Event


def test_events_have_the_times_of_the_device(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", _event_class(clock))
    monkeypatch.setattr(step_record.time, "time", lambda: clock.host)
    record = StepRecord()
    for name, host_seconds, device_seconds in (("a", 1.0, 5.0), ("b", 1.0, 2.0), ("c", 10.0, 0.0)):
        with record.timed(rank=0, name=name, kind="forward"):
            clock.work(device_seconds)
            clock.host += host_seconds
    assert clock.host == 112.0  # It waited for nothing.
    clock.work(3.0)  # Something that no event is about.
    record.settle()
    times = {event["name"]: (event["start"], event["end"]) for event in record.events}
    assert times == {"a": (100.0, 105.0), "b": (105.0, 107.0), "c": (107.0, 112.0)}
    record.settle()
    assert "_marks" not in asdict(record) and clock.host == 115.0


def test_the_host_waits_once_in_a_step():
    record = StepRecord()
    with pretended_device(), patch.object(torch.cuda, "is_available", lambda: True):
        with host_traffic() as calls:
            for _ in range(3):
                with record.timed(rank=0, name="a", kind="forward"):
                    pass
        with host_traffic() as end:
            record.settle()
    assert calls.waits == [] and len(end.waits) == 1 and len(record.events) == 3


@pytest.mark.parametrize("num_calls", [0, 2])
def test_without_a_gpu_nothing_waits(num_calls):
    record = StepRecord()
    for _ in range(num_calls):
        with record.timed(rank=0, name="a", kind="forward"):
            pass
    before = [dict(event) for event in record.events]
    record.settle()
    assert record.events == before
