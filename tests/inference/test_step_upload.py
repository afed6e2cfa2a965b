"""Uploads of many steps, none of which is read in between."""

import numpy as np
import torch

from realhf.inference.step_passes import _NUM_BUFFERS, StepUpload
from tests.gpu.pretended import pretended_device


class _LateEvent:
    """An event that the device reaches only when the host waits for it."""

    made: list["_LateEvent"] = []

    def __init__(self):
        self.is_past = False
        self.made.append(self)

    def record(self):
        pass

    def query(self):
        return self.is_past

    def synchronize(self):
        for event in self.made[: self.made.index(self) + 1]:  # A stream comes to its events in order.
            event.is_past = True


def test_a_buffer_is_written_again_only_after_its_copy(monkeypatch):
    _LateEvent.made = []
    with pretended_device() as device:
        monkeypatch.setattr(torch.cuda, "Event", _LateEvent)
        upload = StepUpload(device)
        for number in range(4 * _NUM_BUFFERS):
            numbers = np.arange(5 + number) + number
            ids, rows = upload([numbers, np.array([number])])
            assert rows.tolist() == [number] and ids.tolist() == numbers.tolist()
            waiting = [event for event in _LateEvent.made if not event.is_past]
            assert len(waiting) == min(number + 1, _NUM_BUFFERS), "as many copies as buffers are under way"
