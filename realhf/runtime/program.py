"""Compiles an experiment and a plan into a Program, and checks both before the run. Free of torch."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realhf.calls import HostFunction, longest_response
from realhf.checkpoint.peft import open_adapters
from realhf.checkpoint.read import check_tensors, open_checkpoint
from realhf.data.dataset import load_rows, place
from realhf.data.vocabulary import first_difference
from realhf.dist.tags import FIRST_INPUT
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.lora import adapter_spec
from realhf.plan import ExecutionPlan, home_layouts
from realhf.realloc.links import Links
from realhf.runtime.actions import (
    RANK_0,
    Action,
    adapters_of,
    compile_actions,
    compile_parts,
    complete_plan,
    parameter_specs,
    spec_of,
)
from realhf.runtime.dry_trace import checked_parts, try_step_program


@dataclass(frozen=True)
class Program:
    """An experiment and a plan that fit each other, compiled into actions for all ranks."""

    experiment: Experiment
    roles: Mapping[str, Role]
    graph: DataflowGraph
    eval_graph: DataflowGraph | None
    plan: ExecutionPlan
    homes: Mapping[str, Layout]
    num_ranks: int
    offloaded: frozenset[str]
    """Frozen roles whose weights stay in host memory while no call needs them."""
    parts: Mapping[str, tuple[Action, ...]]
    """The actions of each part of a step."""
    eval_actions: tuple[Action, ...]
    links: Links | None = None
    """The links for which reallocations are scheduled; None: they are unknown."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of all parts, and then those of the evaluation."""
        return (*(action for part in self.parts.values() for action in part), *self.eval_actions)

    @property
    def adapter_sizes(self) -> dict[str, tuple[int, int]]:
        """Return for each role with adapters the number of their parameters and of its model's."""
        specs = parameter_specs(self.roles)
        with_adapters = (name for name, role in self.roles.items() if role.lora is not None)
        return {name: (specs[adapters_of(name)].numel, specs[name].numel) for name in with_adapters}


def compile_program(experiment: Experiment, plan: ExecutionPlan | None, *, world_size: int) -> Program:
    """Check everything that can be known before the first step, and compile the actions.

    Without a plan, every call is split over all ranks by dp. Raises ValueError at the first fault.
    """
    _check_numbers(experiment)
    roles = experiment.roles()
    eval_graph = _eval_graph(experiment)
    if dotted := [name for name in roles if "." in name]:  # Names of adapter sets have one.
        raise ValueError(f"role {dotted[0]!r}: the name of a role must not contain a dot")
    graph = experiment.graph()
    if not isinstance(graph, DataflowGraph):
        made = f"{type(experiment).__name__}.graph() returned {type(graph).__name__}"
        raise ValueError(f"{made}: it must return a DataflowGraph")
    graph = experiment.seeded(graph)
    _check_inputs(graph)
    for call in graph.calls:
        _check_call(call, roles, batch_size=experiment.batch_size)
    if plan is None:
        plan = ExecutionPlan.single(graph, Layout.parse(f"d{world_size}@0-{world_size - 1}"))
    plan = complete_plan(plan, graph, {})
    names = [call.name for call in graph.calls]
    eval_names = [call.name for call in eval_graph.calls] if eval_graph is not None else []
    plan.check(graph, world_size=world_size, also=eval_names)
    homes = home_layouts(graph, plan, roles)
    _check_models(roles)
    _check_layouts(roles, graph, plan)
    offloaded = _offloaded_roles(roles, graph, plan)
    _check_positions(experiment, roles, graph, eval_graph)
    _rows(experiment, "dataset", graph)
    _check_tokenizer(experiment, roles)
    graph = _with_max_rows(graph, plan)
    eval_actions: tuple[Action, ...] = ()
    specs = parameter_specs(roles)
    _check_kept_caches(experiment, graph)
    part_names = checked_parts(experiment, graph)
    try_step_program(experiment, graph)
    parts = compile_parts(
        graph, plan, roles, homes, specs, part_names, in_rounds=experiment.num_rounds > 1)
    if eval_graph is not None:
        plan = complete_plan(plan, eval_graph, homes, offloaded=offloaded)
        plan.check(eval_graph, world_size=world_size, also=names)
        _check_layouts(roles, eval_graph, plan)
        eval_graph = _with_max_rows(eval_graph, plan)
        _offloaded_roles(roles, eval_graph, plan, expected=offloaded)
        first_tag = FIRST_INPUT + sum(map(len, parts.values()))  # An action has at most one tag.
        eval_actions = compile_actions(eval_graph, plan, roles, homes, specs, first_tag=first_tag)
    return Program(
        experiment, roles, graph, eval_graph, plan, homes, world_size, offloaded, parts, eval_actions)


def _eval_graph(experiment: Experiment) -> DataflowGraph | None:
    """Return the evaluation's graph, with a last call on rank 0 that keeps the answers for eval.jsonl."""
    graph = experiment.eval_graph() if experiment.eval_dataset is not None else None
    if graph is None:
        return None
    _check_inputs(graph)
    rows = _rows(experiment, "eval_dataset", graph)
    shown = ["prompt", *(key for key in ("answer", "ground_truth") if all(key in row for row in rows))]
    keys = (*shown, "completion", "score")
    record = FunctionCall("eval_record", "host", keys, work=HostFunction(_keep_answers))
    return experiment.seeded(graph).add(record, inputs=[key for key in shown if key not in graph.inputs])


def _with_max_rows(graph: DataflowGraph, plan: ExecutionPlan) -> DataflowGraph:
    """Return the graph with the plan's `max_rows` in its generating calls."""
    limited = [(call, rows) for call in graph.calls if (rows := plan[call.name].max_rows) is not None]
    return graph.replace(*(replace(c, work=replace(c.work, max_rows=rows)) for c, rows in limited))


def _keep_answers(batch: Any, context: Any) -> dict[str, Any]:
    columns = [column if isinstance(column, list) else column.tolist() for column in batch.fields.values()]
    context.answers = [dict(zip(batch.fields, row, strict=True)) for row in zip(*columns, strict=True)]
    return {}


def _check_numbers(experiment: Experiment) -> None:
    experiment.checkpoint_period()
    for name in ("steps", "batch_size", "group_size", "log_every", "keep_checkpoints"):
        if getattr(experiment, name) < 1:
            raise ValueError(f"{name} is {getattr(experiment, name)}: it must be at least 1")
    for name in ("eval_every", "export_every", "keep_checkpoint_every", "seed"):
        if getattr(experiment, name) < 0:
            raise ValueError(f"{name} is {getattr(experiment, name)}: it must not be negative")
    experiment.check_lag()


def _check_kept_caches(experiment: Experiment, graph: DataflowGraph) -> None:
    """Raise ValueError if caches that are kept between rounds would be dropped at times of the clock."""
    keeps = any(call.work.cache_on_update == "keep" for call in graph.of_kind("generate"))
    if keeps and experiment.num_rounds > 1 and experiment.checkpoint_period()[1]:
        every = experiment.checkpoint_every
        why = "a checkpoint drops the caches that cache_on_update 'keep' keeps, which changes last bits"
        raise ValueError(f"checkpoint_every is {every!r}: {why}, so it must be a number of steps, or 0")


def _check_inputs(graph: DataflowGraph) -> None:
    for call in graph.calls:
        if not call.inputs:
            why = "it must read at least one key, from which it learns what samples there are"
            raise ValueError(f"call {call.name!r} has no inputs: {why}")


def _check_host_function(call: FunctionCall) -> None:
    """Raise ValueError unless the function can be called with a batch and a context."""
    function = call.work.function
    if not callable(function):
        raise ValueError(f"call {call.name!r}: its work is {function!r}, which is no function")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        what = f"{name} cannot be called with two arguments, the batch and the context"
        raise ValueError(f"call {call.name!r}: {what} ({error})") from error
    except ValueError:  # Some functions written in C do not tell their parameters.
        return


def _check_call(call: FunctionCall, roles: Mapping[str, Role], *, batch_size: int) -> None:
    call.require_work()
    if call.kind == "host":
        _check_host_function(call)
    if call.work.num_minibatches > batch_size:
        minibatches = call.work.num_minibatches
        raise ValueError(f"call {call.name!r} has {minibatches} minibatches: at most batch_size {batch_size}")
    if call.role is None:
        return
    if call.role not in roles:
        raise ValueError(f"call {call.name!r} is for role {call.role!r}: there are {', '.join(roles)}")
    role = roles[call.role]
    if call.kind == "train_step" and role.optimizer is None:
        raise ValueError(f"call {call.name!r} trains the role {call.role!r}, which has no optimizer")
    routers = ("router_aux_loss_coef", "router_z_loss_coef")
    if role.engine != "native" and any(getattr(call.work, coef, 0) for coef in routers):
        why = f"router losses need engine native; {call.role}.engine is {role.engine}"
        raise ValueError(f"call {call.name!r}: {why}")
    head = "lm" if call.kind == "generate" or call.work.output == "logprobs" else "score"
    if role.head != head:
        raise ValueError(f"call {call.name!r} needs {call.role}.head {head!r}; it is {role.head!r}")


def _check_models(roles: Mapping[str, Role]) -> None:
    for name, role in roles.items():
        if role.optimizer is not None and role.dtype == "float16":
            why = "training in it needs loss scaling, which realhf does not have; use bfloat16 or float32"
            raise ValueError(f"{name}.dtype is float16: {why}")
        try:
            config = role.config()
            if config.moe is not None:
                config.moe.check_groups()
            spec = spec_of(config)
            if role.optimizer is not None:
                spec.config.to_hf()  # Raises if the trained model could not be exported.
        except ValueError as error:
            raise ValueError(f"{name}.model: {error}") from error
        if not role.random_init and not _has_weights(Path(role.model)):
            raise ValueError(
                f"{name}.model {role.model!r} holds no safetensors weights: give a Hugging Face model "
                f"directory, or set {name}.random_init"
            )
        if not role.random_init:
            try:
                if role.engine == "native":
                    open_checkpoint(Path(role.model), spec)
                else:  # transformers checks the rest when it loads them.
                    check_tensors(Path(role.model), spec)
            except ValueError as error:
                raise ValueError(f"{name}.model: {error}") from error
        _check_adapters(name, role)
        if role.follows is None:
            continue
        if role.dtype in ("bfloat16", "float16"):
            raise ValueError(f"{name}.dtype is {role.dtype}: a moving average would stand still; use float32")
        if role.follows in roles and roles[role.follows].engine != role.engine:
            engine = roles[role.follows].engine
            raise ValueError(f"{name}.engine is {role.engine}: it follows {role.follows}, which has {engine}")
        if role.follows not in roles or roles[role.follows].optimizer is None:
            raise ValueError(f"{name}.follows is {role.follows!r}: it must name a trainable role")
        if roles[role.follows].lora is not None:
            why = "a role that trains adapters has no followers"
            raise ValueError(f"{name}.follows is {role.follows!r}: {why}")
        if config != roles[role.follows].config():
            raise ValueError(f"{name}.model has another shape than {role.follows}.model, which it follows")


def _check_adapters(name: str, role: Role) -> None:
    try:
        if (lora := role.resolved_lora()) is not None:
            spec = adapter_spec(role.config(), lora)
            if lora.adapter is None and role.optimizer is None:
                raise ValueError("lora: adapters of a frozen role do nothing unless lora.adapter is given")
            if role.random_init and role.optimizer is not None and not lora.export_merged:
                raise ValueError(
                    "lora: adapters of random weights fit no model that is kept: train from a model "
                    "directory, or set lora.export_merged"
                )
            if lora.adapter is not None:
                open_adapters(Path(lora.adapter), spec)
    except ValueError as error:
        where = "" if str(error).startswith("lora") else "lora.adapter: "
        raise ValueError(f"{name}.{where}{error}") from error


def _check_positions(
    experiment: Experiment, roles: Mapping[str, Role], graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> None:
    """Raise ValueError if a sequence can become longer than a model has positions."""
    datasets = {"dataset": experiment.dataset}
    if eval_graph is not None and experiment.eval_dataset is not None:
        datasets["eval_dataset"] = experiment.eval_dataset
    new = max(map(longest_response, filter(None, (graph, eval_graph))))
    for name in {call.role for call in graph.calls if call.role is not None}:
        limit = spec_of(roles[name].config()).config.num_positions
        long = [f"{key}.max_prompt_tokens ({dataset.max_prompt_tokens})" for key, dataset in datasets.items()
                if limit is not None and dataset.max_prompt_tokens + new > limit]
        if limit is not None and long:
            raise ValueError(
                f"{name}.model has {limit} positions, and responses may have {new} tokens: "
                + (f"set {' and '.join(long)} to at most {limit - new}" if limit > new else
                   f"set sampling.max_new_tokens below {limit}")
            )


def _check_layouts(roles: Mapping[str, Role], graph: DataflowGraph, plan: ExecutionPlan) -> None:
    for call in graph.calls:
        layout = plan[call.name].layout
        if call.name == "eval_record" and layout != RANK_0:
            raise ValueError(f"calls.eval_record.layout {layout}: answers are recorded at {RANK_0}")
        if call.kind == "host" and not call.work.splittable and layout.dp > 1:
            raise ValueError(f"calls.{call.name}.layout {layout}: this call needs all samples on one rank")
        if call.role is not None:
            try:
                roles[call.role].config().check_layout(layout)
            except ValueError as error:
                raise ValueError(f"calls.{call.name}: {error}") from error


def _offloaded_roles(
    roles: Mapping[str, Role], graph: DataflowGraph, plan: ExecutionPlan,
    *, expected: frozenset[str] | None = None,
) -> frozenset[str]:  # fmt: skip
    """Return the roles whose calls are planned with `offload`.

    Raises ValueError if one is not frozen or only some of its calls have the option. `expected` are the roles
    of the training graph, with which an evaluation must agree.
    """
    offloading = [call for call in graph.calls if plan[call.name].offload]
    offloaded = frozenset(call.role for call in offloading if call.role is not None)
    for call in offloading:
        where = f"calls.{call.name}.offload"
        if call.role is None:
            raise ValueError(f"{where}: a host call has no weights to offload")
        if roles[call.role].optimizer is not None:
            raise ValueError(f"{where}: role {call.role!r} has an optimizer; only frozen roles can offload")
        if roles[call.role].follows is not None:
            raise ValueError(f"{where}: role {call.role!r} follows another; only frozen roles can offload")
    wanted = offloaded if expected is None else expected
    for call in graph.calls:
        if call.role is not None and plan[call.name].offload != (call.role in wanted):
            must = f"all calls of role {call.role!r} must have the same"
            raise ValueError(f"calls.{call.name}.offload is {str(plan[call.name].offload).lower()}: {must}")
    return offloaded


def _has_weights(directory: Path) -> bool:
    """Return whether there are weights; pickled ones count, as the loader explains how to convert them."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    return directory.is_dir() and any(next(directory.glob(p), None) for p in patterns)


def _rows(experiment: Experiment, name: str, graph: DataflowGraph) -> list[dict[str, Any]]:
    """Return all rows of `dataset` or `eval_dataset`. Raises ValueError if the graph cannot read them."""
    config = getattr(experiment, name)
    try:
        rows = load_rows(config, graph.inputs)
        losses = [call.work.loss for call in graph.of_kind("train_step")]
        for loss in (loss for loss in losses if hasattr(loss, "row_fault")):  # Optional method of a Loss.
            for number, row in enumerate(rows):
                if fault := loss.row_fault(row):
                    raise ValueError(f"{place(config, number)}: {fault}")
    except ValueError as error:
        raise ValueError(f"{name}{str(error).removeprefix('dataset')}") from error
    return rows


def _check_tokenizer(experiment: Experiment, roles: Mapping[str, Role]) -> None:
    """Raise ValueError if there is no tokenizer, or if a model was made for another one."""
    directory = Path(experiment.tokenizer_dir())
    if not (directory / "tokenizer_config.json").is_file() and not (directory / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer {str(directory)!r}: there is no tokenizer.json; set `tokenizer`")
    ours = directory / "tokenizer.json"
    for name, role in roles.items():
        theirs = Path(role.model) / "tokenizer.json"
        if role.random_init or not ours.is_file() or not theirs.is_file():
            continue
        if (differing := first_difference(ours, theirs)) is not None:
            number, here, there = differing
            raise ValueError(
                f"{name}.model {role.model} was made for another tokenizer than {directory}, whose tokens it "
                f"would get: token {number} is {there!r} there and {here!r} here"
            )
