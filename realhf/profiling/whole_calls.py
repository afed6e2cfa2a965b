"""Time whole calls, and compare them with what the measured parts add up to.

A call walks through all of its parts, so that each finds colder caches than when it is repeated. It also
allocates memory, and ends with its slowest rank.
"""

from collections.abc import Callable, Iterator

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_cost import call_cost
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.profiling.clock import Clock
from realhf.profiling.engine_calls import EngineCalls
from realhf.profiling.models import MANY
from realhf.profiling.sizes import MeasuredModel, Sizes

_LONGEST = 1.5  # Expected seconds of a timed call; if all samples take longer, there are fewer.
_BUDGET = 3.0  # Seconds for the repetitions of a call.
_NEW_TOKENS = (32, 256)  # New tokens of each row, at least and at most.

Timed = tuple[str, float, Callable[[], object]]


def whole_calls(
    clock: Clock, model: MeasuredModel, strategy: ParallelStrategy, sizes: Sizes, rates: Rates
) -> dict[str, float]:
    """Return the measured seconds of a call of each kind, relative to its price.

    All ranks of a host run it, as replicas of this strategy. All sequences are as long as the mean of the
    experiment. The mean over repetitions counts, since a step adds up calls, slow ones among them, and sums
    of medians would be too short. Every rank must call this.
    """
    return {
        kind: round(clock.mean_of_slowest(run, budget=_BUDGET) / price, 4)
        for kind, price, run in _timed_calls(clock, model, strategy, sizes, rates)}


def _timed_calls(
    clock: Clock, model: MeasuredModel, strategy: ParallelStrategy, sizes: Sizes, rates: Rates
) -> Iterator[Timed]:
    """Yield the kind of each call, its price, and the function that runs it."""
    world = clock.world
    calls = EngineCalls(model, world)
    replicas = world.ranks_per_host // strategy.num_ranks
    first = world.rank - world.rank % world.ranks_per_host
    mesh = DeviceMesh(tuple(range(first, first + world.ranks_per_host)))
    layout = Layout(ParallelStrategy(dp=replicas * strategy.dp, tp=strategy.tp, ep=strategy.ep), mesh)
    plan = CallPlan(layout)
    engine = calls.engine(MANY, calls.main, layout, trains=calls.trains)
    role = ModelRole(engine.model.config, model.dtype, trainable=calls.trains)

    def price(kind: str, workload: Workload) -> float:
        call = FunctionCall(kind, kind, (), role="role")
        cost = call_cost(rates, call, role, workload, plan, per_host=world.ranks_per_host)
        return float(cost.seconds)  # Tables are interpolated in NumPy, whose floats YAML cannot write.

    def sequences(samples: int) -> Workload:
        return Workload(samples, response_tokens=sizes.tokens, output=calls.main,
                        entropy=calls.finds_entropy(calls.main))

    ways = {"forward": calls.forward} | ({"train_step": calls.train} if calls.trains else {})
    for kind, way in ways.items():
        samples = max(1, sizes.samples // layout.dp)
        while (seconds := price(kind, sequences(samples * layout.dp))) > _LONGEST and samples > 1:
            samples = max(1, samples // 2)
        batch = calls.sequences(samples * sizes.tokens, sizes.tokens)
        yield kind, seconds, way(engine, calls.main, batch, most_tokens=plan.micro_batch_tokens)
    if calls.generates:
        generation = calls.generates[0]
        prompt = max(1, sizes.prompt_tokens)
        least, most = _NEW_TOKENS
        new = max(1, min(most, sizes.tokens - prompt))
        samples = max(1, min(generation.max_rows, sizes.samples // layout.dp))

        def rows() -> Workload:
            return Workload(
                samples * layout.dp, prompt, new, new, max_rows=generation.max_rows,
                prefill_tokens=generation.prefill_tokens)

        while (seconds := price("generate", rows())) > _LONGEST and max(samples, new // least) > 1:
            if new >= 2 * least:
                new //= 2
            else:
                samples = max(1, samples // 2)
        yield "generate", seconds, calls.generate(engine, samples, prompt, new, in_one_pass=False)
