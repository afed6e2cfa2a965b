"""Windows: steps whose number and shapes the ranks of an expert-parallel group have agreed on.

These ranks decode different rows but pass through the experts together, so each takes part in the steps of
the others. Before the first step of a window they agree on the number of its steps and on their shapes.
Inside the window they exchange no further messages about it: a rank without rows computes padding until the
window ends.

A window in which prompts are prefilled has a single step, because the number of rows grows after it.
"""

from dataclasses import dataclass

from realhf.distributed.group import Group
from realhf.inference.rollout_buffer import RolloutBuffer
from realhf.inference.scheduler import Scheduler
from realhf.inference.steps import Step
from realhf.models.kv_blocks import padded_size

MOST_STEPS = 16
"""Most steps of a window. Free slots are filled only when it ends, and its last steps may have no rows."""


@dataclass(frozen=True)
class DecodeWindow:
    """Steps of one cohort, which are the same on all ranks of an ep group."""

    num_steps: int = 0  # 0: no rank has anything left.
    num_rows: int = 0  # Rows of every rank that decode in a step, with padding; 0: none do.
    num_pages: int = 0  # Width of their tables.
    prefills: bool = False  # Whether some rank prefills prompts in the step.


class DecodeWindows:
    """Plans the steps of a cohort, window by window; a group of one rank has windows of one step."""

    def __init__(self, group: Group) -> None:
        """`group` has the ranks of an ep group, over gloo."""
        self._group = group
        self._num_left = 0
        self.now = DecodeWindow()
        """The window of the step that has been planned last."""

    def next_step(self, scheduler: Scheduler, buffer: RolloutBuffer, *, num_pages: int) -> Step | None:
        """Return this rank's next step; None if only other ranks have one, or if all have ended.

        `num_pages` is the width of this rank's tables, which does not change in a round.
        """
        begins = self._num_left == 0
        step = scheduler.plan(prefills=begins)
        if begins and self._group.size == 1:
            num_rows = 0 if step is None else len(step.rows)
            prefills = step is not None and len(step.chunks) > 0
            self.now = DecodeWindow(int(step is not None), _padded(num_rows), num_pages, prefills)
        elif begins:
            self.now = self._agree(step, scheduler, buffer, num_pages)
        self._num_left = self.now.num_steps if begins else self._num_left
        self._num_left = max(0, self._num_left - 1)
        return step

    def _agree(
        self, step: Step | None, scheduler: Scheduler, buffer: RolloutBuffer, num_pages: int
    ) -> DecodeWindow:
        """Return the window that covers the steps of all ranks of the group."""
        prefilled = scheduler.prefilled_samples
        wish = (scheduler.most_rows, max(buffer.num_left(prefilled), default=0), num_pages)
        prefills = step is not None and len(step.chunks) > 0
        wishes = self._group.all_gather_json([*wish, prefills])
        num_rows, num_steps, num_pages, prefills = map(max, zip(*wishes, strict=True))
        num_steps = 1 if prefills else min(MOST_STEPS, num_steps)
        return DecodeWindow(num_steps, _padded(num_rows), num_pages, prefills)


def _padded(num_rows: int) -> int:
    return padded_size(num_rows) if num_rows else 0
