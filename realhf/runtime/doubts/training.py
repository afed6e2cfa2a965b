"""Doubts about training: losses, optimizers, the graph, the plan and the records of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from realhf.calls import Loss, OptimizerConfig, TrainStep, default_rates, response_keys
from realhf.data.tokenized import TokenizedDataset
from realhf.experiment import Experiment, Role, optimizer_steps
from realhf.runtime.compile.actions import spec_of
from realhf.runtime.compile.program import Program, leaves, to_json
from realhf.runtime.compile.step_trial import growing_pools
from realhf.user_input.field_types import unused

_SMALL_MODEL = 10_000_000  # Parameters.
_HIGH_RATE = 50
"""So many times the usual learning rate is too much for a pretrained model."""
_HIGHEST_RATE = 0.03
"""Too high a learning rate for any model (with Adam a weight changes by nearly that much in a step)."""
_LOW_RATE = 1e4
"""The usual learning rate divided by this hardly changes a model."""
_LOW_GRAD_NORM = 1e-3
_HIGH_KL = 1.0
_HIGH_ENTROPY = 0.1


@runtime_checkable
class _LossOfRows(Protocol):
    """A loss that knows what seems wrong with the columns that it reads."""

    def doubts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]: ...


def unusual_training(program: Program) -> Iterator[str]:
    """Yield warnings about settings of training with which a model hardly learns, or is soon destroyed."""
    for name, role in program.roles.items():
        trains = program.graph.works(TrainStep, role=name)
        if role.optimizer is not None and trains:
            yield from _unusual_rate(name, role, role.optimizer, trains[0].loss)
            num_steps = optimizer_steps(program.graph, name, program.num_runs)
            yield from _unusual_optimizer(f"{name}.optimizer", role.optimizer, num_steps)
    if getattr(program.experiment, "ref", None) is not None and "ref" not in program.roles:
        has_kl = hasattr(getattr(program.experiment, "loss", None), "kl_coef")
        mend = "set loss.kl_coef above 0, or leave it out" if has_kl else "leave it out"
        yield f"ref is given, and no call uses it: {mend}"
    for name, value in leaves(to_json(program.experiment)):
        if name.endswith("entropy_coef") and isinstance(value, int | float) and value > _HIGH_ENTROPY:
            yield f"{name} is {value:g}: the model learns to be random (0 to 0.01 is usual)"
        if name.rpartition(".")[2] == "kl_coef" and isinstance(value, int | float) and value >= _HIGH_KL:
            yield f"{name} is {value:g}: the reward hardly counts beside it (0 to 0.1 is usual)"


def _unusual_rate(name: str, role: Role, optimizer: OptimizerConfig, loss: Loss) -> Iterator[str]:
    """Yield warnings about a learning rate that is 0, or far from the usual one.

    Small models, and those with random weights, bear far higher rates than pretrained ones.
    """
    rates = default_rates(loss)
    usual = rates.full if role.lora is None else rates.lora
    assert optimizer.lr is not None, "roles are resolved"
    is_new = role.random_init or spec_of(role.config()).numel < _SMALL_MODEL
    limit = _HIGHEST_RATE if is_new else min(_HIGHEST_RATE, _HIGH_RATE * usual)
    known = f"above {_HIGHEST_RATE:g}, for any model" if is_new else f"{usual:g} is usual for what it learns"
    if optimizer.lr == 0:
        yield f"{name}.optimizer.lr is 0: the model does not change"
    elif optimizer.lr > limit:
        yield f"{name}.optimizer.lr is {optimizer.lr:g} ({known}): a few steps at such a rate destroy a model"
    elif optimizer.lr < usual / _LOW_RATE:
        yield f"{name}.optimizer.lr is {optimizer.lr:g} ({usual:g} is usual): the model hardly changes"


def _unusual_optimizer(name: str, optimizer: OptimizerConfig, num_steps: int) -> Iterator[str]:
    """Yield warnings about the other settings of an optimizer that takes `num_steps` steps."""
    if optimizer.warmup_steps > num_steps:
        yield (
            f"{name}.warmup_steps is {optimizer.warmup_steps}, and the run has {num_steps} optimizer steps: "
            "the learning rate never reaches lr")
    if optimizer.schedule != "constant" and optimizer.total_steps < num_steps:
        last = optimizer.min_lr_ratio * (optimizer.lr or 0.0)
        yield (
            f"{name}.total_steps is {optimizer.total_steps}, and the run has {num_steps} optimizer steps: "
            f"after {optimizer.total_steps} the learning rate is {last:g}")
    falls = (optimizer.schedule != "constant", "schedule is constant")
    yield from unused(optimizer, f"{name}.", min_lr_ratio=falls)
    if optimizer.betas[0] > optimizer.betas[1]:
        yield f"{name}.betas are {optimizer.betas}: the first is usually the smaller one, as in (0.9, 0.95)"
    if optimizer.weight_decay >= 1:
        yield f"{name}.weight_decay is {optimizer.weight_decay:g}: it shrinks the weights (0 to 0.1 is usual)"
    if optimizer.max_grad_norm < _LOW_GRAD_NORM:
        yield f"{name}.max_grad_norm is {optimizer.max_grad_norm:g}: every gradient is cut to nearly nothing"


def doubted_losses(program: Program, rows: TokenizedDataset) -> Iterator[str]:
    """Yield warnings of losses about the columns that they read."""
    for loss in (work.loss for work in program.graph.works(TrainStep)):
        if isinstance(loss, _LossOfRows):
            doubts = loss.doubts([row for part in rows.parts for row in part.rows])
            yield from (f"dataset: {doubt}" for doubt in doubts)


def unchanged_graph(program: Program) -> Iterator[str]:
    """Yield a warning if a user's `graph` returns what the class below returns."""
    kind = type(program.experiment)
    below: Any = next((base for base in kind.__mro__[1:] if "graph" in vars(base)), None)
    if "graph" not in vars(kind) or below is None or kind.__module__.startswith("realhf."):
        return
    if below is not Experiment and _is_same(program.experiment.graph(), below.graph(program.experiment)):
        yield (
            f"{kind.__name__}.graph() returns the same graph as {below.__name__}.graph(): a graph never "
            "changes, so return what graph.replace(...) or graph.add(...) returns")


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, or objects of one class of this package with equal attributes."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    is_ours = type(a).__module__.startswith("realhf.") and type(a) is type(b)
    if is_ours and hasattr(a, "__dict__"):
        names = [field.name for field in fields(a)] if is_dataclass(a) else vars(a)
        names = [name for name in names if not name.startswith("_")]
        return all(_is_same(getattr(a, name), getattr(b, name, None)) for name in names)
    return bool(a is b or a == b)


def repeated_rows(program: Program, rows: TokenizedDataset) -> Iterator[str]:
    """Yield a warning about batches of more rows than there are."""
    size = program.experiment.batch_size
    count = sum(part.num_in_file - part.counts.left_out for part in rows.parts)
    if size > count:
        yield (
            f"batch_size is {size}, and there are {count} rows in dataset: "
            "each step has some rows more than once")


def idle_ranks(program: Program) -> Iterator[str]:
    """Yield a warning about ranks for which the plan has no call."""
    parts = [(eval_set.graph, eval_set.plan) for eval_set in program.evaluations]
    parts += [(program.graph, program.plan)] if program.parts else []
    busy = {rank for graph, plan in parts for call in graph.calls for rank in plan[call.name].layout.ranks}
    if idle := [rank for rank in range(program.num_ranks) if rank not in busy]:
        which = f"rank {idle[0]} has" if len(idle) == 1 else f"{len(idle)} ranks ({_listed(idle)}) have"
        yield f"{which} no call in the plan and will do nothing, of {program.num_ranks} ranks"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown


def unclear_rollouts(program: Program) -> Iterator[str]:
    """Yield a warning if answers are to be logged, and it is not clear which of the calls has them."""
    generating = [call.name for call in program.graph.of_kind("generate")]
    if program.experiment.rollouts.is_on and generating and response_keys(program.graph) is None:
        yield (
            f"rollouts are not kept: {' and '.join(generating)} generate, and no call writes response_mask, "
            "which says what of sequence_ids is the answer")


def filling_pools(program: Program) -> Iterator[str]:
    """Yield warnings about pools that a program of the user's own fills faster than it empties them."""
    if program.experiment.has_own_program:
        yield from growing_pools(program.experiment, program.graph)


def of_the_algorithm(program: Program) -> Iterator[str]:
    """Yield the doubts that the experiment's class has about its own settings."""
    yield from program.experiment.doubts()
