"""StepDecisions: all ranks save or stop after the same step, without waiting for one another."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from realhf.distributed import tags
from realhf.distributed.group import Outbox
from realhf.distributed.world import World

_STOP = "stop"
"""Key of the store that another rank than 0 sets when a signal has asked it to stop."""


@dataclass(frozen=True)
class Decision:
    """The decision about what follows a step: whether a checkpoint is saved, and whether the run ends."""

    saves: bool = False
    stops: bool = False


class StepDecisions:
    """Rank 0 decides after each step about the next one, so that other ranks may be a step ahead of it.

    So a run of several ranks that is asked to stop in step 10 stops after step 11, because rank 0 has already
    sent the decision about step 10. If only another rank is asked, and rank 0 hears of it after its decision
    about step 11, the run stops after step 12.
    """

    def __init__(
        self, world: World, outbox: Outbox, *, last_step: int, is_due: Callable[[int], bool]
    ) -> None:
        """Take the run's last step and a function that returns, on rank 0, whether to save after a step."""
        self._world = world
        self._outbox = outbox
        self._last_step = last_step
        self._is_due = is_due
        self._store = world.unused_store("decisions") if world.size > 1 else None
        self._has_asked = False
        self._ahead = Decision()
        """On rank 0, the decision about the next step, which it has sent."""

    def begin(self, first_step: int) -> None:
        """Decide about the first step; every rank calls this before it."""
        self._decide(first_step, wants_stop=False)

    def after(self, step: int, *, wants_stop: bool) -> Decision:
        """Return the decision about a step; every rank calls this after it, and says if it wants to stop."""
        if self._store is None:
            return Decision(self._is_due(step), wants_stop)
        if self._world.rank == 0:
            decision = self._ahead
            if not decision.stops:
                self._decide(step + 1, wants_stop=wants_stop)
            return decision
        if wants_stop and not self._has_asked:
            self._has_asked = True
            self._store.set(_STOP, "")
        return Decision(**self._world.control.recv_json(0, tag=tags.DECISION))

    def _decide(self, step: int, *, wants_stop: bool) -> None:
        if self._store is not None and self._world.rank == 0 and step <= self._last_step:
            stops = wants_stop or self._store.check([_STOP])
            self._ahead = Decision(self._is_due(step), stops)
            peers = range(1, self._world.size)
            self._outbox.add(self._world.control.send_json(asdict(self._ahead), peers, tag=tags.DECISION))
