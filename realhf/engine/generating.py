"""GeneratingEngine: an engine that also generates, and may keep caches of keys and values between rounds."""

from abc import abstractmethod
from functools import cached_property

from realhf.data.batch import Batch
from realhf.dist.activity import Report, no_report
from realhf.engine.base import Engine
from realhf.engine.protocol import CallResult
from realhf.graph import FunctionCall
from realhf.inference.cache_limit import CacheLimits
from realhf.inference.rounds import Round


class GeneratingEngine(Engine):
    """An engine that also generates."""

    last_cache_bytes = 0
    """Bytes of the keys and values of the last call that generated."""

    @cached_property
    def cache_limits(self) -> CacheLimits:
        """The limits of the KV caches of its calls, which checkpoints hold."""
        return CacheLimits(self.groups)

    def generate(
        self, call: FunctionCall, batch: Batch, *, unfinished: Batch | None = None, budget: int | None = None,
        version: int = 0, report: Report = no_report,
    ) -> CallResult:  # fmt: skip
        """Continue this rank's share of the prompts, and the `unfinished` samples of earlier rounds.

        Every sample gets at most `budget` tokens (None: as many as the call allows), which are of this
        `version`. If the call keeps its cache in rounds, the engine holds the unfinished samples itself;
        others may be passed.
        """
        begun = Batch([])
        if unfinished is not None and unfinished.ids:
            limits = [key for key in call.inputs[1:2] if key in unfinished.fields]
            begun = unfinished.pick([*call.outputs, *limits])
        batch = batch.to(self.groups.world.device)
        ended, unfinished = self._generate(call, batch, Round(begun, budget, version), report)
        return CallResult(ended, {}, unfinished)

    @abstractmethod
    def _generate(
        self, call: FunctionCall, batch: Batch, round_: Round, report: Report
    ) -> tuple[Batch, Batch]:
        """Return the output columns of samples that have ended and of unfinished ones."""

    @abstractmethod
    def flush_cache(self, call: str) -> None:
        """Free the cache that a call keeps between rounds, if there is one, with the samples in it.

        The next round must be given these samples again. All ranks of the layout call this between the same
        rounds.
        """
