"""Checks of an experiment, its rows and a plan. Each raises ValueError at the first fault. Free of torch."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx

from realhf.calls import (
    ForwardFunction,
    Generate,
    HostFunction,
    InsertedPhrase,
    ModelWork,
    TokenLimits,
    TopLogProbs,
    TrainFunction,
    TrainStep,
    longest_response,
)
from realhf.checkpoint.peft import open_adapters
from realhf.checkpoint.tensor_files import check_tensors, open_checkpoint
from realhf.data.dataset import ArrayDataset, DatasetConfig, column_of, reads_pairs
from realhf.data.light_tokenizer import first_differing_token, token_bytes, word_tokens
from realhf.data.rows import MissingColumnError, RowFault, load_rows
from realhf.data.sequence_tokens import end_of_turn
from realhf.data.tokenized import TokenizedDataset
from realhf.errors import UserError, shown
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.models.lora import adapter_spec
from realhf.models.model_config import check_megatron_installed
from realhf.runtime.compile.actions import spec_of
from realhf.runtime.compile.step_trial import checked_parts, try_step_program
from realhf.user_input.field_types import require
from realhf.user_input.hub import is_incomplete


def check_sampling(graph: DataflowGraph, roles: Mapping[str, Role]) -> None:
    """Raise ValueError if a generating call has a token that its model does not have, or if its texts cannot
    be read by its tokenizer."""
    for call in graph.of_kind("generate"):
        if call.role is not None:
            _check_tokens(call, roles[call.role])


def _check_tokens(call: FunctionCall, role: Role) -> None:
    work = call.work_as(Generate)
    sampling = work.sampling
    size = role.config().vocab_size
    named = list(sampling.token_ids)
    if sampling.reads_text:
        try:
            words = word_tokens(work.tokenizer, sampling.bad_words)
            token_bytes(work.tokenizer)
        except ValueError as error:
            field = "bad_words" if sampling.bad_words else "stop"
            raise ValueError(f"sampling.{field} needs the tokenizer: {error}") from error
        named += [("bad_words", token) for word in words for token in word]
    for name, token in named:
        if token >= size:
            raise ValueError(
                f"sampling.{name} has the token {token}: it must be below {size}, "
                f"as the vocabulary of {call.role} has {size} tokens")


def unknown_turn_end(role: Role, tokenizer: str) -> tuple[int, str] | None:
    """Return the token with which the tokenizer's chat template ends turns, and its text, if the files of the
    role's model do not name it as a token that ends answers, else None."""
    config = role.config()
    end = end_of_turn(tokenizer)
    is_unknown = end is not None and end[0] not in config.eos_token_ids and end[0] < config.vocab_size
    return end if is_unknown else None


def ending_with_turns(graph: DataflowGraph, roles: Mapping[str, Role], tokenizer: str) -> DataflowGraph:
    """Return the graph with answers that also end at the token with which the chat template ends turns."""
    changed = []
    for call in graph.of_kind("generate"):
        sampling = call.work_as(Generate).sampling
        if call.role is None or sampling.ignore_eos:
            continue
        end = unknown_turn_end(roles[call.role], tokenizer)
        if end is not None and end[0] not in sampling.stop_token_ids:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, end[0]))
            changed.append(call.with_work(sampling=sampling))
    return graph.replace(*changed)


def check_numbers(experiment: Experiment) -> None:
    """Raise ValueError if a number of the experiment's fields is too small, or does not fit another."""
    experiment.checkpoint_period()
    for name in ("steps", "batch_size", "group_size", "log_every", "keep_checkpoints"):
        value = getattr(experiment, name)
        require(value >= 1, name, value, "be at least 1")
    for name in ("early_stopping", "best_by"):
        if getattr(experiment, name) is not None and not (experiment.eval_every and experiment.eval_dataset):
            raise ValueError(f"{name} is set: it needs an eval_dataset, and eval_every above 0")
    for name in ("eval_every", "export_every", "keep_checkpoint_every", "keep_exports", "seed"):
        value = getattr(experiment, name)
        require(value >= 0, name, value, "not be negative")
    experiment.check_lag()


def language_models(roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return the roles whose models read tokens."""
    return {name: role for name, role in roles.items() if role.is_language_model}


def check_role_names(roles: Mapping[str, Role]) -> None:
    """Raise ValueError if a role's name has a dot, as the names of adapter sets have."""
    if dotted := [name for name in roles if "." in name]:
        raise ValueError(f"role {dotted[0]!r}: the name of a role must not contain a dot")


def check_graph(experiment: Experiment, graph: Any, roles: Mapping[str, Role]) -> None:
    """Raise ValueError unless `Experiment.graph` has returned a graph whose calls suit the roles."""
    if not isinstance(graph, DataflowGraph):
        raise ValueError(
            f"{type(experiment).__name__}.graph() returned {type(graph).__name__}: "
            "it must return a DataflowGraph")
    check_inputs(graph)
    group_size = experiment.group_size
    require(
        group_size == 2 or not reads_pairs(graph.inputs), "group_size", group_size,
        "be 2, as the graph reads pairs: the samples of a prompt are a chosen and a rejected completion")
    for call in graph.calls:
        _check_call(call, roles, batch_size=experiment.batch_size, group_size=group_size)
    check_asks(graph, experiment.parts(graph))
    if experiment.num_rounds > 1 and not graph.of_kind("generate"):
        raise ValueError(
            f"max_lag is {experiment.max_lag} and rounds {experiment.num_rounds}: without a generating call "
            "max_lag must be at most 1, and rounds 1, as a host call that asks ends in the step in which it "
            "begins: with a larger lag its samples would wait and grow older, and nothing would be faster")


def check_asks(graph: DataflowGraph, parts: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError unless each call that a host call asks is a forward call beside it in its part."""
    names = [call.name for call in graph.calls]
    part_of = {name: part for part, calls in parts.items() for name in calls}
    for call in graph.calls:
        for name in call.work.asks if isinstance(call.work, HostFunction) else ():
            if name not in names or not isinstance(graph[name].work, ForwardFunction):
                legal = [one.name for one in graph.calls if isinstance(one.work, ForwardFunction)]
                raise ValueError(
                    f"call {call.name!r} asks {name!r}: it must be a call with a ForwardFunction, and there "
                    f"{'are ' + ', '.join(legal) if legal else 'is none'}")
            if graph[name].outputs:
                raise ValueError(
                    f"call {name!r} has outputs, and call {call.name!r} asks it: what it returns goes to the "
                    "asker alone, so leave the outputs out")
            if part_of.get(name) != part_of.get(call.name):
                raise ValueError(f"call {call.name!r} asks {name!r}: both must be in one part")
            if nx.has_path(graph.nx_graph, call.name, name) or nx.has_path(graph.nx_graph, name, call.name):
                raise ValueError(
                    f"call {call.name!r} asks {name!r}: neither may need an output of the other, as they run "
                    "at the same time")


def check_inputs(graph: DataflowGraph) -> None:
    """Raise ValueError if a call has no inputs."""
    for call in graph.calls:
        if not call.inputs:
            raise ValueError(
                f"call {call.name!r} has no inputs: it must read at least one key, "
                "from which it learns what samples there are")


def check_evaluation(graph: DataflowGraph) -> None:
    """Raise ValueError if the calls of an evaluation yield nothing that is logged."""
    if graph.producer("score") is None and not graph.of_kind("host"):
        raise ValueError(
            "eval_graph() has nothing to log: a call must write `score`, or a host call must return metrics")


def _check_call(
    call: FunctionCall, roles: Mapping[str, Role], *, batch_size: int, group_size: int
) -> None:
    work = call.require_work()
    if isinstance(work, HostFunction):
        _check_function(call.name, work.function, "the batch and the context")
    elif isinstance(work, ForwardFunction | TrainFunction):
        also = f", and {', '.join(call.reads)} by name" if call.reads else ""
        _check_function(call.name, work.function, f"the module and the batch{also}", names=call.reads)
    if (minibatches := work.num_minibatches) > batch_size:
        raise ValueError(f"call {call.name!r} has {minibatches} minibatches: at most batch_size {batch_size}")
    compared = work.group_size
    require(
        group_size % compared == 0, "group_size", group_size,
        f"be a multiple of {compared}, as call {call.name!r} has a loss that compares {compared} samples of "
        "a prompt")
    if call.role is None:
        return
    if call.role not in roles:
        raise ValueError(f"call {call.name!r} is for role {call.role!r}: there are {', '.join(roles)}")
    role = roles[call.role]
    if call.kind == "train_step" and role.optimizer is None:
        raise ValueError(
            f"call {call.name!r} trains the role {call.role!r}, which has no optimizer: "
            "give it one, " + ("Role(..., optimizer=OptimizerConfig())" if role.is_language_model else
                               "ModuleRole(..., optimizer=OptimizerConfig(lr=1e-3)), for example"))
    _check_module_work(call, roles)
    if role.engine != "native" and isinstance(work, TrainStep) and work.has_router_losses:
        raise ValueError(
            f"call {call.name!r}: router losses need engine native; {call.role}.engine is {role.engine}")
    if isinstance(work, Generate) and work.interruption is not None:
        _check_phrase(work.interruption, role)
    if isinstance(work, ModelWork) and role.head != (head := work.output.head):
        raise ValueError(f"call {call.name!r} needs {call.role}.head {head!r}; it is {role.head!r}")
    if isinstance(work, TopLogProbs) and work.k > (size := role.config().vocab_size):
        raise ValueError(
            f"call {call.name!r}: k is {work.k}: "
            f"it must be at most {size}, the vocabulary of {call.role}")


def _check_module_work(call: FunctionCall, roles: Mapping[str, Role]) -> None:
    """Raise ValueError unless the work of a call suits the kinds of its roles."""
    assert call.role is not None
    role = roles[call.role]
    work = call.require_work()
    has_function = isinstance(work, ForwardFunction | TrainFunction)
    if has_function == role.is_language_model:
        need = "ForwardFunction or TrainFunction, as a ModuleRole has"
        if role.is_language_model:
            need = "that of a language model, and not a function: only a ModuleRole has these"
        raise ValueError(f"call {call.name!r} has work {type(work).__name__}: it must be {need}")
    if isinstance(work, TrainFunction):
        if work.weights is not None and work.weights not in call.inputs:
            raise ValueError(
                f"call {call.name!r}: weights is {work.weights!r}: it must be one of its inputs, "
                f"{', '.join(call.inputs)}")
        if taken := [key for key in work.noise if key in call.inputs]:
            raise ValueError(f"call {call.name!r}: noise has {taken[0]!r}, which is an input: rename it")
    for name in call.reads:
        if name not in roles:
            raise ValueError(f"call {call.name!r} reads role {name!r}: there are {', '.join(roles)}")
        if role.is_language_model or roles[name].is_language_model:
            raise ValueError(f"call {call.name!r} reads role {name!r}: only ModuleRoles read each other")


def _check_phrase(interruption: InsertedPhrase, role: Role) -> None:
    """Raise ValueError if the model has no such token as an inserted phrase, or ends at one."""
    config = role.config()
    for token in interruption.phrase:
        if token in config.eos_token_ids or token >= config.vocab_size:
            what = "the model ends answers at" if token in config.eos_token_ids else "the model does not have"
            raise ValueError(f"interruption.phrase has the token {token}, which {what}: use another text")


def _check_function(name: str, function: Any, given: str, *, names: Sequence[str] = ()) -> None:
    """Raise ValueError unless the function can be called with what is `given`, in words: two arguments, and
    others by name."""
    if not callable(function):
        raise ValueError(f"call {name!r}: its work is {function!r}, which is no function")
    try:
        inspect.signature(function).bind(None, None, **dict.fromkeys(names))
    except TypeError as error:
        called = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"call {name!r}: {called} cannot be called with two arguments, {given} ({error})") from error
    except ValueError:  # Some functions written in C do not tell their parameters.
        return


def check_roles(roles: Mapping[str, Role]) -> None:
    """Raise ValueError unless every role's files can be read and used with its settings."""
    for name, role in roles.items():
        _check_model(name, role)
        _check_adapters(name, role)
        if role.follows is not None:
            _check_follower(name, role, roles)


def _check_model(name: str, role: Role) -> None:
    try:
        config = role.config()
        if config.moe is not None:
            config.moe.check_groups()
        spec = spec_of(config)
        if role.optimizer is not None:
            spec.config.to_hf()  # Raises if the trained model could not be exported.
    except ValueError as error:
        field = "model" if role.is_language_model else "module"
        raise ValueError(f"{name}.{field}: {error}") from error
    if not role.is_language_model:
        _check_export(name, role)
        return
    _check_dtype(name, role)
    if role.engine == "megatron":
        try:
            check_megatron_installed()
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error
        if role.optimizer is not None and role.optimizer.offload:
            raise ValueError(
                f"{name}.optimizer.offload is true: the megatron engine keeps its optimizer's state on the "
                "device; set it to false")
    if role.random_init:
        return
    directory = role.model_path()
    if is_incomplete(directory):
        return  # A run downloads the rest.
    if not _has_weights(directory):
        raise ValueError(
            f"{name}.model {role.model!r} holds no safetensors weights: give a Hugging Face model "
            f"directory, or set {name}.random_init"
        )
    try:
        if role.engine != "transformers":
            open_checkpoint(directory, spec)
        else:  # transformers checks the rest when it loads them.
            check_tensors(directory, spec)
    except ValueError as error:
        raise ValueError(f"{name}.model: {error}") from error


def _check_export(name: str, role: Role) -> None:
    """Raise ValueError if a module's role names a directory without an export."""
    if role.model and not (Path(role.model) / "model.safetensors").is_file():
        raise ValueError(f"{name}.model {role.model!r} has no model.safetensors: give an export of a module")


def _check_dtype(name: str, role: Role) -> None:
    """Raise ValueError if the role has no legal dtype, or one in which it cannot be trained."""
    try:
        dtype = role.weights_dtype
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error
    if role.engine == "megatron" and dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{name}.dtype is {dtype}: the megatron engine has float32 and bfloat16")
    if role.optimizer is not None and dtype == "float16":
        origin = "" if role.dtype is not None else f" (from config.json of {role.model})"
        raise ValueError(
            f"{name}.dtype is float16{origin}: training in it needs loss scaling, "
            "which realhf does not have; set it to bfloat16 or float32")


def _has_weights(directory: Path) -> bool:
    """Return whether there are weights; pickled ones count, because the loader says how to convert them."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    return directory.is_dir() and any(next(directory.glob(p), None) for p in patterns)


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
            if lora.adapter is not None and not is_incomplete(Path(lora.adapter)):
                open_adapters(Path(lora.adapter), spec)
    except ValueError as error:
        where = "" if str(error).startswith("lora") else "lora.adapter: "
        raise ValueError(f"{name}.{where}{error}") from error


def _check_follower(name: str, role: Role, roles: Mapping[str, Role]) -> None:
    """Raise ValueError unless the role, a moving average, can follow the role that it names."""
    if role.dtype in ("bfloat16", "float16"):
        raise ValueError(f"{name}.dtype is {role.dtype}: a moving average would stand still; use float32")
    leader = roles.get(role.follows or "")
    if leader is not None and leader.engine != role.engine:
        raise ValueError(
            f"{name}.engine is {role.engine}: it follows {role.follows}, which has {leader.engine}")
    if leader is None or leader.optimizer is None:
        raise ValueError(f"{name}.follows is {role.follows!r}: it must name a trainable role")
    if leader.lora is not None:
        raise ValueError(f"{name}.follows is {role.follows!r}: a role that trains adapters has no followers")
    if role.config() != leader.config():
        raise ValueError(f"{name}.model has another shape than {role.follows}.model, which it follows")


def check_plan(
    graph: DataflowGraph, plan: ExecutionPlan, roles: Mapping[str, Role], offloaded: Collection[str]
) -> None:
    """Raise ValueError unless the calls can run in their layouts, and offloaded roles can be offloaded.

    An offloaded role must be frozen, and all of its calls, and no others, must have `offload`.
    """
    for call in graph.calls:
        _check_layout(call, plan, roles)
    for call in graph.calls:
        if plan[call.name].offload:
            _check_is_frozen(call, roles)
    for call in graph.calls:
        if call.role is not None and plan[call.name].offload != (call.role in offloaded):
            raise ValueError(
                f"calls.{call.name}.offload is {str(plan[call.name].offload).lower()}: "
                f"all calls of role {call.role!r} must have the same")


def _check_layout(call: FunctionCall, plan: ExecutionPlan, roles: Mapping[str, Role]) -> None:
    layout = plan[call.name].layout
    if isinstance(call.work, HostFunction) and not call.work.splittable and layout.dp > 1:
        raise ValueError(f"calls.{call.name}.layout {layout}: this call needs all samples on one rank")
    for role in call.roles:
        try:
            config = roles[role].config()
            (config.check_generation_layout if call.kind == "generate" else config.check_layout)(layout)
        except ValueError as error:
            raise ValueError(f"calls.{call.name}: {error}") from error


def _check_is_frozen(call: FunctionCall, roles: Mapping[str, Role]) -> None:
    """Raise ValueError unless a call that is planned with `offload` has weights that never change."""
    where = f"calls.{call.name}.offload"
    if call.role is None:
        raise ValueError(f"{where}: a host call has no weights to offload")
    if roles[call.role].engine == "megatron":
        raise ValueError(f"{where}: the megatron engine of role {call.role!r} does not offload")
    if roles[call.role].optimizer is not None:
        raise ValueError(f"{where}: role {call.role!r} has an optimizer; only frozen roles can offload")
    if roles[call.role].follows is not None:
        raise ValueError(f"{where}: role {call.role!r} follows another; only frozen roles can offload")


def check_data(
    experiment: Experiment, roles: Mapping[str, Role],
    datasets: Mapping[str, tuple[DatasetConfig, DataflowGraph]],
) -> None:
    """Raise ValueError unless the models have enough positions for the datasets and fit the tokenizer.

    The datasets and the graphs that read them go by the names of the experiment's fields.
    """
    _check_positions(datasets, language_models(roles))
    for _, graph in datasets.values():
        check_sampling(graph, roles)
    _check_tokenizer(experiment, roles)


def _check_positions(
    datasets: Mapping[str, tuple[DatasetConfig, DataflowGraph]], roles: Mapping[str, Role]
) -> None:
    """Raise ValueError if a sequence can become longer than a model has positions."""
    new = max(longest_response(graph) for _, graph in datasets.values())
    calls = [call for _, graph in datasets.values() for call in graph.calls]
    for name in roles.keys() & {call.role for call in calls}:
        limit = spec_of(roles[name].config()).config.num_positions
        long = [f"{key}.max_prompt_tokens ({dataset.max_prompt_tokens})"
                for key, (dataset, _) in datasets.items()
                if limit is not None and dataset.max_prompt_tokens + new > limit]
        if limit is not None and long:
            raise ValueError(
                f"{name}.model has {limit} positions, and responses may have {new} tokens: "
                + (f"set {' and '.join(long)} to at most {limit - new}" if limit > new else
                   f"set sampling.max_new_tokens below {limit}")
            )


def check_vocabulary(roles: Mapping[str, Role], largest: int, *, tokenizer: str) -> None:
    """Raise UserError if a model has no embedding for the tokenizer's largest token id."""
    for name, role in language_models(roles).items():
        if largest >= (size := role.config().vocab_size):
            raise UserError(
                f"tokenizer {tokenizer} has token ids up to {largest}, "
                f"but the vocabulary of {name}.model {role.model} ends at {size - 1}"
            )


def check_lengths(roles: Mapping[str, Role], graph: DataflowGraph, rows: TokenizedDataset) -> None:
    """Raise UserError if a dataset has a sequence that is longer than a model's learned positions.

    Rows that are read later are checked when they are read.
    """
    used = {call.role for call in graph.calls}
    limits = {
        name: spec_of(role.config()).config.num_positions
        for name, role in sorted(language_models(roles).items()) if name in used}
    limited = {name: limit for name, limit in limits.items() if limit is not None}
    if limited:
        name = min(limited, key=lambda role: limited[role])
        for part in rows.parts:
            part.require_at_most(limited[name], f"{name}.model has learned {limited[name]} positions")


def check_rows(config: DatasetConfig, name: str, graph: DataflowGraph) -> list[dict[str, Any]]:
    """Check the rows of a dataset (a sample of large files) and return them; `name` is the field's name.

    Raises ValueError if the graph cannot read them.
    """
    try:
        if isinstance(config, ArrayDataset):
            config.check_keys(graph.inputs)
            return []
        if name == "dataset" and config.parts == (config,) and not config.path:
            raise ValueError(
                "dataset is not given: it must be a file or rows, DatasetConfig(...), or for modules "
                "ArrayDataset(...)")
        if name != "dataset" and len(config.parts) > 1:
            raise ValueError("dataset is a mixture: held-out rows are of one DatasetConfig")
        return load_rows(config, graph.inputs, row_faults=row_faults_of(graph))
    except ValueError as error:
        readers = _readers_of(error.column, graph) if isinstance(error, MissingColumnError) else []
        read = f"; it is read by reward function {' and '.join(readers)}" if readers else ""
        raise ValueError(f"{name}{str(error).removeprefix('dataset')}{read}") from error


def _readers_of(column: str, graph: DataflowGraph) -> list[str]:
    """Return the names of the reward functions that read a column of the dataset."""
    functions = [work.function for work in graph.works(HostFunction)]
    return [name for f in functions if hasattr(f, "readers_of") for name in f.readers_of(column)]


def row_faults_of(graph: DataflowGraph) -> list[RowFault]:
    """Return the functions by which losses and host calls say what is wrong with a row."""
    readers: list[Any] = [work.loss for work in graph.works(TrainStep)]
    readers += [work.function for work in graph.works(HostFunction)]
    answering = [c for c in graph.of_kind("generate") if c.work_as(Generate).environment is None]
    limits = [key for call in answering for key in call.inputs[1:2]]
    readers += [TokenLimits(column_of(key)) for key in limits if graph.producer(key) is None]
    return [reader.row_fault for reader in readers if hasattr(reader, "row_fault")]


def _check_tokenizer(experiment: Experiment, roles: Mapping[str, Role]) -> None:
    """Raise ValueError if there is no tokenizer, or if a model was made for another one."""
    if not experiment.tokenizer_dir():
        return
    directory = Path(experiment.tokenizer_dir())
    if not (directory / "tokenizer_config.json").is_file() and not (directory / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer {str(directory)!r}: there is no tokenizer.json; set `tokenizer`")
    ours = directory / "tokenizer.json"
    for name, role in language_models(roles).items():
        if role.random_init or not ours.is_file():
            continue
        theirs = role.model_path() / "tokenizer.json"
        if not theirs.is_file():
            continue
        if (differing := first_differing_token(ours, theirs)) is not None:
            number, here, there = differing
            read = "another one" if there is None else repr(there)
            raise ValueError(
                f"{name}.model {role.model} was made for another tokenizer than {directory}, whose tokens it "
                f"would get: token {number} is {read} there and {here!r} here"
            )


def check_step(experiment: Experiment, graph: DataflowGraph, roles: Mapping[str, Role]) -> None:
    """Raise ValueError unless the experiment's parts and its step program suit the graph."""
    _check_resting_caches(experiment, graph, roles)
    _check_int8(graph, roles)
    _check_hooks(experiment)
    checked_parts(experiment, graph)
    try_step_program(experiment, graph)


def _check_hooks(experiment: Experiment) -> None:
    """Raise ValueError unless each hook is a function that can be called with one argument."""
    for name in ("on_step", "on_evaluation", "on_checkpoint"):
        if (hook := getattr(experiment, name)) is None:
            continue
        if not callable(hook):
            raise ValueError(f"{name} is {shown(hook)}: it must be a function of one argument, the StepEvent")
        try:
            inspect.signature(hook).bind(None)
        except TypeError as error:
            raise ValueError(
                f"{name}: {getattr(hook, '__qualname__', type(hook).__name__)} cannot be called with one "
                f"argument, the StepEvent ({error})") from error
        except ValueError:  # Some functions written in C do not tell their parameters.
            continue


def _check_int8(graph: DataflowGraph, roles: Mapping[str, Role]) -> None:
    """Raise ValueError if a role cannot generate with weights in int8."""
    for call in graph.of_kind("generate"):
        if call.role is None or call.work_as(Generate).generation_weights != "int8":
            continue
        role = roles[call.role]
        name = "generation_weights"
        if role.engine == "transformers":
            why = f"{call.role}.engine is transformers, which has them in full precision only"
            raise ValueError(f"{name} is int8, and {why}: set it to full")
        if role.lora is not None and role.lora.merge:
            why = f"{call.role}.lora.merge writes the adapters into weights of full precision"
            raise ValueError(f"{name} is int8, and {why}: set {name} to full, or that to false")


def _check_resting_caches(
    experiment: Experiment, graph: DataflowGraph, roles: Mapping[str, Role]
) -> None:
    """Raise ValueError if caches cannot rest between rounds, or timed checkpoints would drop them."""
    resting = [
        call for call in graph.calls
        if isinstance(call.work, Generate) and call.work.cache_on_update == "keep"]
    if not resting or experiment.num_rounds == 1:
        return
    for role in (call.role for call in resting if call.role is not None):
        if roles[role].engine == "transformers":
            why = "the transformers engine keeps no cache"
            raise ValueError(f"cache_on_update is 'keep', and {why}: set it to 'recompute'")
    if experiment.checkpoint_period()[1]:
        every = experiment.checkpoint_every
        why = "a checkpoint drops the caches that cache_on_update 'keep' keeps, which changes last bits"
        raise ValueError(f"checkpoint_every is {every!r}: {why}, so it must be a number of steps, or 0")
