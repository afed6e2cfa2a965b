"""Calls the functions of modules on a few rows, as `realhf check` and the start of a run do.

So mistakes in them are found before the first step. A call is tried if its inputs are columns of the dataset,
or outputs of calls that were tried. What is tried here changes nothing of a run: functions are copies, and
random numbers of Python, numpy and torch begin where they did.
"""

import contextlib
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from realhf.calls import ForwardFunction, HostFunction, TrainFunction
from realhf.data.batch import Batch
from realhf.data.dataset import ArrayDataset
from realhf.data.loader import make_loader
from realhf.distributed.world import World
from realhf.engine.base import Engine
from realhf.engine.module import ModuleEngine, named_function
from realhf.errors import UserError, innermost_user_line, shown
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.runtime.compile.actions import Ask, spec_of
from realhf.runtime.compile.program import Program
from realhf.runtime.compile.step_trial import PartCount
from realhf.runtime.execute.asking import Answers, Asker
from realhf.runtime.execute.host_call import HostContext, call_host_function
from realhf.signals import time_limit

_COUNTS = (7, 11, 13, 17, 19)
"""Numbers of rows of a trial, of which the first is taken that is no size of a tensor: then a tensor of shape
(rows, rows) is a mistake."""
_PLAY_SECONDS = 20.0
"""Longest trial of a host call."""
_ROWS_AT_ONCE = 256
"""Most rows of a call of a forward function."""
_ONE_RANK = Layout.parse("d1@0")
_CPU = torch.device("cpu")


def try_functions(program: Program, *, plays: bool, device: torch.device = _CPU) -> list[str]:
    """Call the functions of the graph's calls on modules on a device; with `plays`, also host calls.

    Return warnings. Raises UserError about what would end a run.
    """
    roles = {name: role for name, role in program.roles.items() if not role.is_language_model}
    if not roles or not program.parts or not isinstance(program.experiment.dataset, ArrayDataset):
        return []
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        trial = _Trial(program, roles, device)
        with contextlib.redirect_stdout(io.StringIO()), catch_warnings():
            simplefilter("ignore")  # torch warns of some of the shapes that are refused here.
            return list(trial.run(plays=plays))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _copy(call: FunctionCall) -> FunctionCall | None:
    """Return a call with a copy of its function, which may keep something; None if it has no copy."""
    assert isinstance(call.work, ForwardFunction | TrainFunction | HostFunction)
    try:
        return replace(call, work=replace(call.work, function=deepcopy(call.work.function)))
    except Exception:
        return None


def _kept(thing: Any) -> dict[str, Any]:
    """Return copies of the attributes of an object that are numbers, text or collections of these.

    Those of its class count, too.
    """
    attributes: dict[str, Any] = {}
    for owner in (*reversed(type(thing).__mro__), thing):
        attributes |= getattr(owner, "__dict__", {})
    kept = {}
    for name, value in attributes.items():
        with contextlib.suppress(RecursionError):  # It may hold itself.
            if _is_plain(value) and name != "training":
                kept[name] = deepcopy(value)
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    return isinstance(value, bool | int | float | str)


class _Attributes:
    """The attributes of a call's function, and of the modules of its role, which no checkpoint holds.

    An attribute that is set by its first use, such as a cache, is not meant.
    """

    def __init__(self, call: FunctionCall, module: torch.nn.Module | None) -> None:
        assert isinstance(call.work, ForwardFunction | TrainFunction | HostFunction)
        self._call = call
        self._owners: dict[str, Any] = {"its function": call.work.function}
        if module is not None:
            self._owners |= {
                f"the module {'.'.join(filter(None, (call.role, name)))}": part
                for name, part in module.named_modules()}
        self._before = {name: _kept(owner) for name, owner in self._owners.items()}

    def doubts(self) -> Iterator[str]:
        """Yield a warning for each owner some of whose attributes the call has changed."""
        is_host = isinstance(self._call.work, HostFunction)
        for name, owner in self._owners.items():
            before, now = self._before[name], _kept(owner)
            if changed := [key for key in before if repr(now.get(key)) != repr(before[key])]:
                where = "context.state" if is_host else "a floating-point buffer of the module"
                yield (
                    f"call {self._call.name!r} changes the attribute {changed[0]!r} of {name}, which no "
                    f"checkpoint holds: a resumed run begins with {shown(before[changed[0]])} again; "
                    f"keep it in {where}")


class _Engines:
    """The modules of a trial, as a host call that asks sees them."""

    def __init__(self, program: Program, roles: Mapping[str, Role], world: World) -> None:
        self._engines = {}
        for name, role in roles.items():
            engine = ModuleEngine(spec_of(role.config()), _ONE_RANK, world, dtype=role.weights_dtype)
            directory = None if role.random_init else role.model_path()
            engine.load_base(directory, seed=program.experiment.seed)
            self._engines[name] = engine

    def __getitem__(self, key: tuple[str, Layout]) -> ModuleEngine:
        return self._engines[key[0]]

    def beside(self, call: FunctionCall, layout: Layout) -> dict[str, Engine]:
        return {role: self._engines[role] for role in call.reads}

    def sizes(self) -> set[int]:
        """Return all sizes of dims of parameters."""
        engines = self._engines.values()
        return {size for engine in engines for tensor in engine.module.parameters() for size in tensor.shape}


class _Trial:
    def __init__(self, program: Program, roles: Mapping[str, Role], device: torch.device) -> None:
        self._program = program
        self._world = World(device=device)
        self._engines = _Engines(program, roles, self._world)
        self._parts = program.experiment.parts(program.graph)
        self._asked = {name for work in program.graph.works(HostFunction) for name in work.asks}
        experiment = program.experiment
        self._loader = make_loader(
            experiment.dataset, keys=program.graph.inputs, tokenizer=None, group_size=experiment.group_size,
            seed=experiment.seed)
        self._made: dict[str, Batch] = {}
        """The output columns of calls that were tried, by key."""

    def run(self, *, plays: bool) -> Iterator[str]:
        """Try the calls in their order; yield warnings."""
        for original in self._program.graph.order:
            rows = self._rows(original)
            outputs: Batch | None = None
            if rows is None or not isinstance(original.work, ForwardFunction | TrainFunction | HostFunction):
                continue
            if (call := _copy(original)) is None:
                continue
            attributes = _Attributes(call, None if call.role is None else self._of(call)[0].module)
            if isinstance(call.work, ForwardFunction) and call.name not in self._asked:
                outputs = self._forward(call, rows)
            elif isinstance(call.work, TrainFunction):
                yield from self._train(call, rows)
            elif isinstance(call.work, HostFunction) and plays:
                warnings: list[str] = []
                outputs = self._play(call, rows, warnings)
                yield from warnings
            yield from attributes.doubts()
            if outputs is not None and outputs.ids == rows.ids:  # Filters let all pass in a trial.
                self._made |= {key: outputs.pick([key]) for key in outputs.fields}

    def _rows(self, call: FunctionCall) -> Batch | None:
        """Return the inputs of a call; None if it has none that are known."""
        made = [self._made[key] for key in call.inputs if key in self._made]
        of_dataset = [key for key in call.inputs if key in self._program.graph.inputs]
        if len(made) + len(of_dataset) < len(call.inputs) or not self._part(call).most_prompts:
            return None
        loaded = self._loader.batch(range(self._part(call).most_prompts))
        count = min(len(batch) for batch in (loaded, *made))
        if count < len(loaded) and isinstance(call.work, HostFunction):
            return None  # It may count on the number of its rows.
        columns = loaded.pick(of_dataset).select(range(count)).fields
        for batch in made:
            columns |= batch.select(range(count)).fields
        return Batch(loaded.ids[:count], columns)

    def _part(self, call: FunctionCall) -> PartCount:
        """Return the counts of a call's part."""
        (part,) = [part for part, calls in self._parts.items() if call.name in calls]
        return self._program.counts[part]

    def _forward(self, call: FunctionCall, rows: Batch) -> Batch:
        engine, beside = self._of(call)
        try:
            return engine.forward(call, rows, micro_batch_tokens=_ROWS_AT_ONCE, beside=beside)
        except FloatingPointError as error:
            raise UserError(f"call {call.name!r}: {named_function(call)} returned NaN or infinite values "
                            f"for rows of the dataset, with the first weights ({error})") from error

    def _of(self, call: FunctionCall) -> tuple[ModuleEngine, Mapping[str, Engine]]:
        assert call.role is not None
        return self._engines[call.role, _ONE_RANK], self._engines.beside(call, _ONE_RANK)

    def _train(self, call: FunctionCall, rows: Batch) -> Iterator[str]:
        sizes = {size for column in rows.fields.values() if isinstance(column, Tensor)
                 for size in column.shape[1:]} | self._engines.sizes()
        count = next((count for count in _COUNTS if count not in sizes), _COUNTS[0])
        few = rows.select(range(min(count, len(rows))))
        watcher = _RowPairs(len(few))
        try:
            with watcher:
                losses = self._losses(call, few)
        except UserError as error:
            if watcher.place is None and len(rows) > len(few):
                self._losses(call, rows)  # Does the function count on the number of rows?
                return
            if watcher.place is None:
                raise
            raise UserError(_mixed(call, watcher.place)) from error
        if watcher.place is not None:
            raise UserError(_mixed(call, watcher.place))
        if (wrong := ~losses.isfinite()).any():
            row = int(wrong.nonzero()[0])
            odd = [
                key for key, column in few.fields.items()
                if isinstance(column, Tensor) and not column[row].isfinite().all()]
            why = f", and so is column {odd[0]!r}" if odd else ", with the first weights"
            raise UserError(
                f"call {call.name!r}: {named_function(call)} returned the loss {float(losses[row])} for row "
                f"{row} of {len(few)}{why}: losses must be finite")
        yield from self._dependence(call, few, losses)

    def _losses(
        self, call: FunctionCall, rows: Batch, *, number: int = 0, evaluates: bool = False
    ) -> Tensor:
        """Return the losses of rows; `number` gives other random numbers."""
        engine, beside = self._of(call)
        with torch.random.fork_rng(devices=[]):
            engine.module.train(not evaluates)
            engine.module.requires_grad_(True)
            losses, _ = engine.losses(call, rows, step=0, number=number, beside=beside)
            engine.module.requires_grad_(False)
        return losses.detach()

    def _dependence(self, call: FunctionCall, rows: Batch, losses: Tensor) -> Iterator[str]:
        """Yield a warning if the losses of some rows are others without the rest."""
        if len(rows) < 4 or call.work_as(TrainFunction).weights is not None:
            return
        count = len(rows) - 2
        try:
            whole, again = (self._losses(call, rows, number=number, evaluates=True) for number in (0, 1))
            fewer = self._losses(call, rows.select(range(count)), evaluates=True)
        except UserError:
            return
        if torch.equal(whole, again) and not torch.allclose(whole[:count], fewer, rtol=1e-3, atol=1e-5):
            yield (
                f"call {call.name!r}: in {named_function(call)} the loss of a row depends on which other "
                "rows are beside it, so that results depend on micro_batch_tokens and on the number of "
                "replicas; let it follow from the row alone, or run the call on one rank in one micro-batch")

    def _play(self, call: FunctionCall, rows: Batch, warnings: list[str]) -> Batch | None:
        """Return what a host call returns; None if it cannot be tried."""
        work = call.work_as(HostFunction)
        program = self._program
        asked = [_copy(program.graph[name]) for name in work.asks]
        if None in asked:
            return None
        asks = tuple(Ask(call.name, _ONE_RANK, one, _ONE_RANK, 0) for one in asked if one is not None)
        context = HostContext(
            program.experiment.tokenizer_dir(), step=1, updates=dict.fromkeys(program.roles, 0),
            run_state=MappingProxyType(dict(self._part(call).state)))
        over = _TooLong()
        try:
            with context.of_call(call.name), time_limit(_PLAY_SECONDS, lambda: over):
                answers = Answers(self._engines, tries=False)  # type: ignore[arg-type]
                context.asker = Asker(self._world, answers, asks)
                result = call_host_function(call.with_work(timeout_seconds=None), rows, context)
        except (UserError, _TooLong) as error:
            if over not in (error, error.__cause__):
                raise
            warnings.append(
                f"call {call.name!r} was not tried to its end, as it takes longer than {_PLAY_SECONDS:g} s, "
                "nor were the calls that need it")
            return None
        return result.batch


class _TooLong(Exception):
    """The end of a host call that takes too long for a trial."""


class _RowPairs(TorchFunctionMode):
    """Finds where a value of each row meets a column of shape (rows, 1), or the other way round.

    Broadcasting then makes a value of each pair of rows, which is hardly ever meant. `place` is where it
    happened in the user's code; None if it did not.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.place: str | None = None
        self._num_rows = num_rows
        self._pairs: list[Tensor] = []
        """Tensors without gradients that were made in this way, such as wrong targets."""
        self._places: list[str] = []

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        n = self._num_rows
        if n < 2 or self.place is not None or not isinstance(result, Tensor):
            return result
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)][:2]
        if len(given) < 2 or not all(one.is_floating_point() for one in given):
            return result
        shapes = {tuple(one.shape) for one in given}
        num_learned = sum(one.requires_grad for one in given)
        is_made_of_pairs = shapes == {(n, 1), (n,)} and (result.shape == (n, n) or result.dim() == 0)
        if is_made_of_pairs and num_learned == 1:
            self.place = innermost_user_line()
        elif is_made_of_pairs and num_learned == 0 and result.shape == (n, n):
            self._pairs.append(result)
            self._places.append(innermost_user_line())
        elif num_learned == 1 and shapes == {(n,), (n, n)}:
            for pairs, place in zip(self._pairs, self._places, strict=True):
                if any(one is pairs for one in given):
                    self.place = place
        return result


def _mixed(call: FunctionCall, place: str) -> str:
    return (
        f"call {call.name!r}: in {named_function(call)}, at {place}, a tensor of shape (rows, 1) meets one "
        "of shape (rows,), and the result has a number for each pair of rows, so that the loss of a row "
        "mixes it with all others: use squeeze(-1) on the first (or [None, :] on the second, to mean pairs)")
