"""UnfinishedSamples: the answers that a round of generation leaves for the next one."""

from typing import Any

from realhf.data.batch import Batch
from realhf.graph import FunctionCall
from realhf.runtime.samples.sample_store import SampleStore


class UnfinishedSamples:
    """This rank's unfinished samples of generating calls, whose columns are in the sample store.

    An engine that keeps its cache between rounds holds them, too; others get them again for each round.
    """

    def __init__(self, samples: SampleStore, num_rounds: int) -> None:
        self._samples = samples
        self._num_rounds = num_rounds
        self._held_by_engine: set[str] = set()

    def has(self, call: FunctionCall) -> bool:
        """Return whether a call may leave samples unfinished."""
        return call.kind == "generate" and self._num_rounds > 1

    def engine_holds(self, call: FunctionCall) -> bool:
        """Return whether the engine holds the call's samples from the last round."""
        return call.name in self._held_by_engine

    def of(self, call: FunctionCall) -> Batch:
        """Return the columns of the call's samples."""
        return self._samples.unfinished.get(call.name, Batch([]))

    def options(self, call: FunctionCall) -> dict[str, Any]:
        """Return the options of `generate` for the next round of a call."""
        if not self.has(call):
            return {}
        budget = -(-call.work.sampling.max_new_tokens // self._num_rounds)
        return {"budget": budget, "unfinished": None if self.engine_holds(call) else self.of(call)}

    def put(self, call: FunctionCall, samples: Batch) -> None:
        """Store the samples that a round left unfinished, which the engine may hold, too."""
        self._samples.unfinished[call.name] = samples
        if call.work.cache_on_update == "keep":
            self._held_by_engine.add(call.name)

    def replace(self, call: FunctionCall, samples: Batch) -> None:
        """Store other samples for the next round, which the engine does not hold."""
        self._samples.unfinished[call.name] = samples

    def engine_has_forgotten(self, call: FunctionCall) -> None:
        """Note that the engine does not hold the samples any more, so that the next round gets them."""
        self._held_by_engine.discard(call.name)
