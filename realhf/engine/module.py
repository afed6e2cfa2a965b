"""ModuleEngine: runs the functions of calls on any torch.nn.Module, of which every rank holds all."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from realhf.calls import ForwardFunction, HeldOutLosses, OptimizerConfig, TrainFunction
from realhf.data.batch import Batch, Packed
from realhf.distributed.pieces import Shards
from realhf.distributed.process import Report, no_report
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.base import (
    DTYPES,
    NOTHING_BESIDE,
    Engine,
    Metrics,
    output_batch,
    require_numbers,
    sum_metrics,
)
from realhf.errors import UserError, described, user_line
from realhf.graph import FunctionCall
from realhf.inference.sampling import stream_seed, uniform
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModuleConfig
from realhf.models.modules import module_of, named_tensors
from realhf.models.param_spec import ModelSpec, ParamSpec
from realhf.nn.linear import Weight
from realhf.nn.parameters import ShardedParameters
from realhf.user_input.files import open_regular

_OWN_METRICS = ("loss", "lr", "grad_norm", "skipped_updates", "empty_updates")


class ModuleParameters(ShardedParameters):
    """The parameters and floating-point buffers of a module, which lie in flat memory."""

    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype, memory: Tensor | None = None
    ) -> None:
        super().__init__(spec, groups, dtype=dtype, memory=memory)
        self.module = module_of(_config_of(spec), dtype=str(dtype).removeprefix("torch."))
        self.module.to(groups.world.device)
        self._buffers: list[tuple[Any, str, Tensor]] = []
        """The module of each buffer, its name there, and its memory."""
        trained = {param.name for param in spec.params if param.trainable}
        for names, tensor in named_tensors(self.module):
            view = self.shards()[names[0]].view(tensor.shape)
            weight: Tensor = view
            if names[0] in trained:
                if tensor.dim() == 0:  # A single number stays one.
                    self._weight_of[names[0]] = Weight(view, requires_grad=False)
                    self._by_layer[0][names[0]] = self._weight_of[names[0]]
                weight = self.of_layer(0)[names[0]]
            elif isinstance(tensor, torch.nn.Parameter):
                weight = torch.nn.Parameter(view, requires_grad=False)
            else:  # It may change in place between a forward pass and its backward pass, as weights may not.
                weight = view = view.data
            for name in names:
                path, _, attribute = name.rpartition(".")
                owner = self.module.get_submodule(path)
                setattr(owner, attribute, weight)  # Some modules list their parameters when these are set.
                if weight is view:
                    self._buffers.append((owner, attribute, view))

    def _weight_name(self, param: ParamSpec) -> str:
        return param.short_name

    @torch.no_grad()
    def load(self, directory: Path | None, *, seed: int) -> None:
        """Load the weights of an export, or draw them from `seed` by the module's own initialisation.

        Raises ValueError that names the file and the tensor.
        """
        if directory is None:
            drawn = named_tensors(module_of(_config_of(self.spec), seed=seed))
            tensors = {names[0]: tensor for names, tensor in drawn}
        else:
            tensors = _read(directory / "model.safetensors")
        for param in self.spec.params:
            if param.name not in tensors:
                raise ValueError(f"{directory}/model.safetensors has no tensor {param.name}")
            shape = tuple(tensors[param.name].shape) or (1,)
            if shape != param.shape:
                raise ValueError(
                    f"{directory}/model.safetensors: tensor {param.name} has shape {shape}; the module has "
                    f"{param.shape}")
            self.shards()[param.name].copy_(tensors[param.name].view(param.shape))

    @torch.no_grad()
    def average_buffers(self, share: float) -> None:
        """Let all replicas have the mean of their buffers, of which this one's has the weight `share`."""
        if not self._buffers:
            return
        for owner, attribute, memory in self._buffers:
            now = getattr(owner, attribute)
            if now is not memory:  # The function has put another tensor there.
                memory.copy_(now)
                setattr(owner, attribute, memory)
        if self.groups.all.size > 1:
            views = [memory.view(-1) for _, _, memory in self._buffers]
            mean = self.groups.all.all_reduce(torch.cat(views) * share)
            for view, value in zip(views, mean.split([len(view) for view in views]), strict=True):
                view.copy_(value)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            return load(file.read())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def _config_of(spec: ModelSpec) -> ModuleConfig:
    assert isinstance(spec.config, ModuleConfig)
    return spec.config


class ModuleEngine(Engine):
    """An engine for any module under data parallelism."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: Tensor | None = None,
        float32_head: bool = False,
    ) -> None:
        assert lora is None and adapter_memory is None and not float32_head, "a ModuleRole has none"
        groups = ParallelGroups.create(world, layout)
        self._model = ModuleParameters(spec, groups, dtype=DTYPES[dtype], memory=memory)
        self._seed = 0
        super().__init__(self._model, optimizer=optimizer)
        self._model.requires_grad_(False)  # Other roles' calls may read it before its own first train step.

    @property
    def module(self) -> torch.nn.Module:
        """The module, whose weights are those of this engine."""
        return self._model.module

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        self._seed = seed
        self._model.load(directory, seed=seed)

    def export_shards(self) -> Shards:
        return self._model.pieces()

    def forward(
        self, call: FunctionCall, batch: Batch, *, micro_batch_tokens: int, report: Report = no_report,
        beside: Mapping[str, Engine] = NOTHING_BESIDE,
    ) -> Batch:
        parts = []
        for i, rows in enumerate(_micro_batches(batch, micro_batch_tokens)):
            report(f"micro-batch {i + 1}")
            columns = self.answer(call, rows, beside=beside)
            if lacking := [key for key in call.outputs if key not in columns]:
                legal = ", ".join(columns) or "nothing"
                raise UserError(
                    f"call {call.name!r} declares the output {lacking[0]!r}, and {named_function(call)} "
                    f"returned {legal}")
            checked = list(columns.values()) if isinstance(call.work, HeldOutLosses) else [
                _column(columns[key], key, call, len(rows)) for key in call.outputs]
            parts.append(output_batch(call, rows.ids, checked))
        outputs = Batch.concat(parts)
        for key in () if isinstance(call.work, HeldOutLosses) else call.outputs:
            require_numbers(outputs, key, rank=self.groups.rank)
        return outputs

    @torch.no_grad()
    def answer(
        self, call: FunctionCall, rows: Batch, *, beside: Mapping[str, Engine] = NOTHING_BESIDE
    ) -> Mapping[str, Any]:
        """Return what the function of a forward call returns for some rows: tensors by name."""
        _evaluating(self.module)
        work = call.work_as(ForwardFunction)
        if isinstance(work, HeldOutLosses):
            rows = Batch(rows.ids, {**rows.fields, **self._noise(call, rows, 0)})
        on_device = rows.to(self.groups.world.device)
        before = self._random_states()
        if isinstance(work, HeldOutLosses):  # A loss may draw random numbers, or ask for gradients of inputs.
            with self._random(call, 0, 0), torch.enable_grad():
                columns = self._call(call, work.function, on_device, beside)
                losses, metrics = _loss_and_metrics(columns, call, len(rows))
            values = {name: value.tolist() for name, value in {"loss": losses, **metrics}.items()}
            columns = {call.outputs[0]: [
                dict(zip(values, of_row, strict=True)) for of_row in zip(*values.values(), strict=True)]}
        else:
            columns = self._call(call, work.function, on_device, beside)
        # A host function may draw some while a second thread answers questions.
        is_alone = current_thread() is main_thread()
        after = self._random_states()
        if is_alone and any(not torch.equal(*pair) for pair in zip(before, after, strict=True)):
            raise UserError(
                f"call {call.name!r} draws random numbers of torch, which would be others in a resumed run: "
                "give it a column of random numbers, drawn by the host call that asks, from a seed")
        if not isinstance(columns, Mapping):
            raise UserError(
                f"call {call.name!r} returned {type(columns).__name__}: it must be a dict of tensors by key")
        return columns

    def _call(
        self, call: FunctionCall, function: Callable[..., Any], rows: Batch, beside: Mapping[str, Engine]
    ) -> Any:
        """Call a user's function. Raises UserError about an exception in it."""
        modules = {}
        for role, engine in beside.items():
            assert isinstance(engine, ModuleEngine), "calls read module roles only"
            modules[role] = _evaluating(engine.module)
        try:
            return function(self.module, rows, **modules)
        except (FloatingPointError, MemoryError, UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if _raised_by_batch(error):
                place = user_line(error)
                legal = ", ".join(rows.fields) or "none"
                what = f"reads the column {error.args[0]!r}{f' at {place}' if place else ''}"
                raise UserError(f"call {call.name!r} {what}: its columns are {legal}") from error
            of_dtypes = isinstance(error, RuntimeError) and "dtype" in str(error)
            hint = self._other_dtypes(rows) if of_dtypes else ""
            if isinstance(error, TypeError | AttributeError):
                lists = [
                    key for key, column in rows.fields.items() if not isinstance(column, Tensor | Packed)]
                hint = "".join(
                    f"; column {key!r} is a list of Python values: let the call that makes it return a "
                    "tensor or an array of numpy" for key in lists[:1])
            raise UserError(f"call {call.name!r} raised {described(error)}{hint}") from error

    def _other_dtypes(self, rows: Batch) -> str:
        """Return, in words, which columns have floating-point numbers of another dtype than the module."""
        floats = {key: column for key, column in rows.fields.items()
                  if isinstance(column, Tensor) and column.is_floating_point()}
        others = [key for key, column in floats.items() if column.dtype != self.flat.dtype]
        if not others:
            return ""
        dtypes = (self.flat.dtype, floats[others[0]].dtype)
        mine, theirs = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return (
            f"; column {others[0]!r} is {theirs} and the module {mine}: convert the column, or set "
            f"ModuleRole(dtype={theirs!r})")

    def _compute_grads(
        self, call: FunctionCall, batch: Batch, *, max_tokens: int, recompute: bool, report: Report,
        beside: Mapping[str, Engine],
    ) -> Metrics | None:
        weights = _weights(call, batch)
        mine = {"rows": float(len(batch)), "weight": float(len(batch) if weights is None else weights.sum())}
        totals = self._summed(mine)
        if not totals["weight"]:
            return None
        step = self.optimizer.num_steps
        if noise := self._noise(call, batch, step):
            batch = Batch(batch.ids, batch.fields | noise)
        parts: list[Metrics] = []
        if not self.module.training:
            self.module.train()
        for i, rows in enumerate(_micro_batches(batch, max_tokens)):
            if not rows.ids:
                continue
            report(f"micro-batch {i + 1}")
            losses, metrics = self._losses(call, rows, step=step, number=i, beside=beside)
            weights = _weights(call, rows)
            if weights is None:
                weights = torch.ones(len(rows), dtype=torch.float64, device=self.flat.device)
            shares = weights / totals["weight"]
            (losses * shares).sum().backward()
            parts.append(_weighted({"loss": losses, **metrics}, shares))
        self._model.average_buffers(mine["rows"] / totals["rows"])
        return self._summed(sum_metrics(parts))

    def losses(
        self, call: FunctionCall, rows: Batch, *, step: int, number: int, beside: Mapping[str, Engine]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the losses and metrics of rows in an optimizer step, which has random numbers of its own.

        Raises UserError if the function returns something else.
        """
        fields = {**rows.fields, **self._noise(call, rows, step)}
        rows = Batch(rows.ids, fields).to(self.flat.device)
        return self._losses(call, rows, step=step, number=number, beside=beside)

    def _losses(
        self, call: FunctionCall, rows: Batch, *, step: int, number: int, beside: Mapping[str, Engine]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        with self._random(call, step, number):
            returned = self._call(call, call.work_as(TrainFunction).function, rows, beside)
        losses, metrics = _loss_and_metrics(returned, call, len(rows))
        if not losses.requires_grad:
            raise UserError(
                f"call {call.name!r}: the losses depend on no parameter of {call.role} that is trained: "
                f"{named_function(call)} returned them without gradients (after detach, no_grad or numpy?)")
        return losses, metrics

    def _summed(self, metrics: Metrics) -> Metrics:
        """Return the sums of metrics over the replicas."""
        control = self.groups.dp_control
        return metrics if control.size == 1 else sum_metrics(control.all_gather_json(metrics))

    def _noise(self, call: FunctionCall, batch: Batch, step: int) -> dict[str, Tensor]:
        """Return the columns of noise for an optimizer step."""
        columns = {}
        noise: Mapping[str, tuple[int, ...]] = getattr(call.work, "noise", {})
        for key, shape in noise.items():
            size = int(np.prod(shape, dtype=int))
            ids = np.repeat(np.array(batch.ids, np.int64), size)
            places = np.tile(step * size + np.arange(size), len(batch))
            drawn = uniform(stream_seed(self._seed, f"{call.name}/{key}"), sample_ids=ids, positions=places)
            normal = torch.special.ndtri(torch.from_numpy(drawn) + 2.0**-54)
            columns[key] = normal.view(len(batch), *shape).to(self.flat.dtype).to(self.flat.device)
        return columns

    @contextmanager
    def unchanged(self, beside: Mapping[str, Engine]) -> Iterator[None]:
        """Put back, at the end, the buffers of this module and of those beside it, and random states.

        Random states are those of torch for this engine's device, of numpy and of Python.
        """
        modules = [self.module]
        for engine in beside.values():
            assert isinstance(engine, ModuleEngine), "calls read module roles only"
            modules.append(engine.module)
        parts = {id(part): part for module in modules for part in module.modules()}.values()
        kept = [(part, dict(part._buffers)) for part in parts]
        values = {id(b): b.clone() for _, buffers in kept for b in buffers.values() if b is not None}
        states = (self._random_states(), np.random.get_state(), random.getstate())
        try:
            yield
        finally:
            for part, buffers in kept:
                part._buffers.clear()
                part._buffers.update(buffers)
                for buffer in buffers.values():
                    if buffer is not None:
                        buffer.data.copy_(values[id(buffer)])
            for generator, state in zip(self._generators(), states[0], strict=True):
                generator.set_state(state)
            np.random.set_state(states[1])
            random.setstate(states[2])

    def _random_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """Return torch's generators of which functions on this engine's device draw."""
        if self.flat.device.type != "cuda":
            return [torch.default_generator]
        return [torch.default_generator, torch.cuda.default_generators[self.flat.device.index or 0]]

    @contextmanager
    def _random(self, call: FunctionCall, step: int, number: int) -> Iterator[None]:
        """Hold a random state of its own for each micro-batch of each optimizer step."""
        seed = stream_seed(self._seed, f"{call.name}/{step}/{number}/{self.groups.at.dp}")
        generators = self._generators()
        before = self._random_states()
        try:
            # torch.manual_seed would also keep a stack of each call for CUDA, as long as that is not in use.
            for generator in generators:
                generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def _evaluating(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in evaluation mode. (To set that in all of its parts takes as long as a question.)"""
    return module.eval() if module.training else module


def _micro_batches(batch: Batch, most: int) -> list[Batch]:
    """Split a batch into consecutive parts of at most so many rows; one part, if there are no rows."""
    starts = range(0, max(1, len(batch)), most)
    if len(starts) == 1:
        return [batch]
    return [batch.select(range(start, min(start + most, len(batch)))) for start in starts]


def _check_metrics(metrics: Any, call: str) -> None:
    """Raise UserError unless a function has returned metrics by names that the engine does not use itself."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"call {call!r} returned {type(metrics).__name__} as metrics: they must be a dict")
    if taken := [name for name in metrics if name in _OWN_METRICS]:
        raise UserError(f"call {call!r} returned the metric {taken[0]!r}, which the engine logs: rename it")


def _weighted(metrics: Mapping[str, Tensor], shares: Tensor) -> Metrics:
    """Return each metric's sum over rows, weighted by their shares; or its maximum, if its name says so."""
    of_rows_MR = torch.stack([metric.detach().double() for metric in metrics.values()])
    values = dict(zip(metrics, (of_rows_MR * shares).sum(1).tolist(), strict=True))
    return values | {
        name: metric.max().item() for name, metric in metrics.items() if name.endswith("/max")}


def _weights(call: FunctionCall, rows: Batch) -> Tensor | None:
    """Return the weights of rows in means; None if all have the weight 1."""
    key = call.work_as(TrainFunction).weights
    if key is None:
        return None
    column = rows[key]
    shape = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
    if shape != (len(rows),):
        raise UserError(
            f"call {call.name!r}: column {key!r}, its weights, must be a tensor with one number "
            f"for each row, of shape ({len(rows)},), and is {shape}")
    return column.double()


def named_function(call: FunctionCall) -> str:
    """Return the name of the function of a call, and where it is written."""
    function: Any = getattr(call.work, "function", None)
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if code is None:  # It may be an object that can be called.
        code = getattr(type(function).__call__, "__code__", None)
    return f"{name}()" if code is None else f"{name}() ({code.co_filename}:{code.co_firstlineno})"


def _raised_by_batch(error: Exception) -> bool:
    """Return whether the exception says that a batch has no such column, and not some dict of the user's."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_there = last is not None and last.tb_frame.f_code is Batch.__getitem__.__code__
    return isinstance(error, KeyError) and is_there


def _loss_and_metrics(returned: Any, call: FunctionCall, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses and metrics of `count` rows. Raises UserError if they are something else."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    losses, metrics = returned if is_pair else (returned, {})
    if isinstance(losses, Tensor) and not losses.is_floating_point():
        raise UserError(
            f"call {call.name!r}: the losses must be floating-point numbers, and {named_function(call)} "
            f"returned {str(losses.dtype).removeprefix('torch.')}")
    losses = _per_row(losses, "the losses", call, count)
    _check_metrics(metrics, call.name)
    return losses, {
        name: _per_row(value, f"metric {name!r}", call, count) for name, value in metrics.items()}


def _per_row(values: Any, what: str, call: FunctionCall, count: int) -> Tensor:
    """Return a tensor with one number for each row. Raises UserError if it has another shape."""
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (count,):
        returned = f"a tensor of shape {shape}" if isinstance(values, Tensor) else shape
        raise UserError(
            f"call {call.name!r}: {what} must be a tensor with one number for each row, of shape ({count},), "
            f"and {named_function(call)} returned {returned}")
    return values


def _column(values: Any, key: str, call: FunctionCall, count: int) -> Any:
    """Return an output column. Raises UserError unless it has one entry for each row."""
    if not isinstance(values, Tensor | Packed) or not getattr(values, "shape", True) or len(values) != count:
        is_tensor = isinstance(values, Tensor)
        has = f"a tensor of shape {tuple(values.shape)}" if is_tensor else type(values).__name__
        raise UserError(
            f"call {call.name!r}: column {key!r} must be a tensor with one entry for each of the {count} "
            f"rows, and {named_function(call)} returned {has}")
    return values
