"""`realhf eval`: evaluates a model without training, on one or several local workers. Free of torch."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
import typing
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from realhf.algorithms.held_out import Evaluate
from realhf.calls import SamplingConfig
from realhf.checkpoint.names import find_checkpoints
from realhf.checkpoint.peft import CONFIG_FILE
from realhf.cli.experiment_file import read_experiment
from realhf.cli.launch import LOCAL_LAUNCHER, Job, is_worker
from realhf.cli.overrides import override
from realhf.data.dataset import DatasetConfig
from realhf.data.row_files import is_of_hub
from realhf.data.rows import extra_columns
from realhf.errors import UserError, naming, one_line
from realhf.experiment import Evaluation, Experiment, Role, metric_prefix
from realhf.models.lora import LoraConfig
from realhf.plan import ExecutionPlan
from realhf.rewards.by_name import SHIPPED, reward_by_name
from realhf.rewards.limits import RewardLimits
from realhf.rewards.reward import Reward
from realhf.runtime.compile.program import Program, compile_evaluation
from realhf.runtime.records.run_directory import check_run_directory, new_run_directory
from realhf.user_input.files import read_json, read_object
from realhf.user_input.hub import find_model

_CONFIG = "config.json"
_OF_PROMPTS = ("prompt_key", "chat", "system_prompt", "tools", "tools_key", "chat_template_kwargs",
               "max_prompt_tokens", "too_long")
OF_CHATS = ("chat", "system_prompt", "tools", "tools_key", "chat_template_kwargs")
"""Fields of a data set that make chats of prompts that are text."""
_MAX_SHOWN = 60
"""Most characters of a value in the sentence about the settings."""


@dataclass(frozen=True)
class RunSettings:
    """The settings with which a run made prompts (of DatasetConfig) and sampled answers (of SamplingConfig).

    They are the settings of one of its held-out sets, or of training if it has none.
    """

    run: Path
    prompts: Mapping[str, Any]
    sampling: Mapping[str, Any]
    has_own_sampling: bool = False  # Whether the sampling is that of the set, and not of training.
    unused: tuple[str, ...] = ()
    """Settings of the run, in words, of which config.json has only the names, such as its map function."""

    def temperature(self, samples: int) -> float:
        """Return the temperature with which the run would draw so many answers to a prompt.

        It is 1 if several answers would be equal.
        """
        if samples == 1 and not self.has_own_sampling:
            return 0.0
        temperature: float = self.sampling.get("temperature", 1.0)
        return 1.0 if samples > 1 and temperature == 0 else temperature

    def described(self, prompts: Mapping[str, Any], sampling: Mapping[str, Any]) -> str:
        """Return a sentence that names the settings that were taken from the run."""
        words = [*_prompt_words(prompts), *_sampling_words(sampling)]
        text = f"prompts and limits as in {self.run}"
        text += f": {', '.join(words)}" if words else ""
        if self.unused:
            instead = f"`realhf eval EXP.py --model {self.run}` does"
            text += f"; this does not apply {' and '.join(self.unused)}: {instead}"
        return text


def find_run(model: str) -> Path | None:
    """Return the directory of the run that has written a model; None for other models.

    `model` is the run directory or one of its hf/step_N.
    """
    path = Path(model)
    for run in (path, path.parent.parent) if path.parent.name == "hf" else (path,):
        has_run = (run / "metrics.jsonl").is_file() or (run / "hf").is_dir()
        if has_run and (run / _CONFIG).is_file():
            return run
    return None


def read_settings(run: Path, *, name: str, path: str) -> RunSettings | None:
    """Return the settings of a run with which to evaluate the file `path` as the set `name`.

    Of several held-out sets of the run, take that of this name, else of this file, else the first.
    Return None if config.json is not that of a run. Raises UserError if it cannot be read.
    """
    file = run / _CONFIG
    config = read_json(file)
    if not isinstance(config, dict) or not isinstance(training := config.get("dataset"), dict):
        return None
    sets = _sets(config.get("eval_dataset"))
    by_path = [held_out for held_out in sets.values() if held_out["dataset"].get("path") == path]
    default = {"dataset": training, "sampling": None}
    chosen = sets.get(name) or next(iter([*by_path, *sets.values()]), default)
    own_sampling = chosen.get("sampling")
    saved_sampling = own_sampling or config.get("sampling") or {}
    names = {field.name for field in fields(SamplingConfig)}
    dataset = _first_part(chosen["dataset"])
    prompts = {key: dataset[key] for key in _OF_PROMPTS if key in dataset}
    if "tools" in prompts:
        prompts["tools"] = tuple(prompts["tools"])
    unused = _map_words(dataset.get("map"))
    unused += _reward_words(
        chosen.get("function") or config.get("eval_function") or config.get("reward_function"))
    sampling = {key: value for key, value in saved_sampling.items() if key in names}
    return RunSettings(
        run, prompts, sampling, has_own_sampling=own_sampling is not None, unused=tuple(unused))


def _sets(saved: Any) -> dict[str, dict[str, Any]]:
    """Return the held-out sets of a run by name, each as the fields of an Evaluation."""
    if not isinstance(saved, dict):
        return {}
    if "prompt_key" in saved or "correct_above" in saved:
        return {"": _set(saved)}
    return {name: _set(entry) for name, entry in saved.items() if isinstance(entry, dict)}


def _set(saved: dict[str, Any]) -> dict[str, Any]:
    return saved if "correct_above" in saved else {"dataset": saved}


def _first_part(dataset: Any) -> dict[str, Any]:
    """Return the fields of a data set, or of the first one of a mixture."""
    parts = dataset.get("parts")
    return dict(parts[0] if parts else dataset)


def _map_words(name: str | None) -> list[str]:
    return [] if name is None else [f"its map function {_last(name)}"]


def _reward_words(saved: Any) -> list[str]:
    """Describe the rewards of a run; config.json has the names of functions, and the fields of objects."""
    rewards = saved if isinstance(saved, list) else [saved] * (saved is not None)
    if not rewards:
        return []
    names = [name for reward in rewards if (name := _reward_name(reward))]
    shown = f" ({', '.join(names)})" if names else ""
    return [f"its own reward{'s' if len(rewards) > 1 else ''}{shown}"]


def _reward_name(reward: Any) -> str | None:
    if isinstance(reward, dict):
        function = reward.get("function")
        return reward.get("name") or (_last(function) if isinstance(function, str) else None)
    return _last(str(reward))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _prompt_words(prompts: Mapping[str, Any]) -> list[str]:
    """Describe the settings of prompts that are not the defaults."""
    words = []
    if prompts.get("prompt_key", "prompt") != "prompt":
        words.append(f"prompts of column {prompts['prompt_key']!r}")
    if prompts.get("system_prompt") is not None:
        words.append(f"system prompt {_short(prompts['system_prompt'])}")
    elif prompts.get("chat"):
        words.append("prompts as chats")
    if tools := prompts.get("tools"):
        words.append(f"{len(tools)} tools" if len(tools) > 1 else "1 tool")
    if prompts.get("tools_key") is not None:
        words.append(f"tools of column {prompts['tools_key']!r}")
    words += [f"{key}={_short(value)}" for key, value in (prompts.get("chat_template_kwargs") or {}).items()]
    usual = DatasetConfig()
    if prompts.get("max_prompt_tokens", usual.max_prompt_tokens) != usual.max_prompt_tokens:
        words.append(f"at most {prompts['max_prompt_tokens']} prompt tokens")
    if prompts.get("too_long", usual.too_long) != usual.too_long:
        words.append(f"too_long {prompts['too_long']}")
    return words


def _sampling_words(sampling: Mapping[str, Any]) -> list[str]:
    """Describe the settings of sampling: the limit of answers, and those that are not the defaults."""
    words = []
    usual = SamplingConfig()
    for name, value in sampling.items():
        now = tuple(value) if isinstance(value, list) else value
        if name == "max_new_tokens":
            words.append(f"{value} new tokens")
        elif name == "temperature":
            words.append(f"temperature {value:g}" if value else "greedy")
        elif now != getattr(usual, name):
            words.append(f"{name.replace('_', ' ')} {_shown(value)}")
    return words


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_short(part) for part in value)
    return _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 4]}...{text[0]}"


def fetch_models(experiment: Experiment, *, weights: bool) -> None:
    """Download the models, adapters and tokenizers with names of the hub that are not in its cache.

    Without `weights`, download only configs and tokenizers. Raises UserError, which names the field.
    """
    try:
        roles = experiment.roles()
        names = experiment.hub_names()
    except (Exception, SystemExit):  # Compiling the experiment raises it again, with a better sentence.
        return
    drawn = {f"{name}.model" for name, role in roles.items() if role.random_init}
    for field, name in names.items():
        with naming(field):
            find_model(name, weights=weights and field != "tokenizer" and field not in drawn)


HELP = "evaluate a model on held-out rows, without training"
EXAMPLES = (
    "realhf eval examples/grpo.py --model runs/grpo",
    "realhf eval runs/first --data held_out.jsonl --reward exact --samples 8",
    "realhf eval Qwen2.5-0.5B --data easy=a.jsonl --data hard=b.jsonl --reward rewards.py:score --json")
_SAMPLING = {name: hint for name, hint in typing.get_type_hints(SamplingConfig).items()
             if hint in (int, float, tuple[str, ...])}
"""The settings of sampling that have options: numbers, and texts, whose options may be repeated."""
_DEFAULTS = {"max_new_tokens": "the run's, else 256",
             "temperature": "0 (greedy), with several samples the run's, else 1"}
_OF_MODEL = (
    "data", "prompt_key", "answer_key", "split", "name", "system_prompt", "chat", "reward", "retries",
    "samples", *_SAMPLING, "max_rows", "dtype")
"""Options for a model; an experiment file has fields instead."""
_FIELD = re.compile(r"\b(?:Evaluation\.sampling|Evaluation|sampling|reward_limits)\.(\w+)")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of `realhf eval`."""
    add = parser.add_argument
    text = "model directory or hub name, run directory (its newest hf/step_N), or experiment file"
    add("target", metavar="MODEL", help=text)
    text = "rows to evaluate: a file or a hub name, or NAME=FILE; repeat it for several sets"
    add("--data", action="append", metavar="FILE", help=text)
    add("--prompt-key", help="column of the prompts; default: the run's, else prompt")
    add("--answer-key", help="column of the answers, for shipped rewards; default: answer")
    add("--split", help="split, or a part of one such as train[90%%:]; files are one split, train")
    add("--name", help="configuration of a data set of the hub")
    text = "first message of every chat; default: the run's, else none; '' for none"
    add("--system-prompt", metavar="TEXT", help=text)
    text = "make a chat of each prompt that is text, for the chat template; default: as the run, else not"
    add("--chat", action=BooleanOptionalAction, help=text)
    text = f"{', '.join(SHIPPED)}, or FILE.py:FUNCTION, or NAME=one of them; repeatable; default: exact"
    add("--reward", action="append", help=text)
    text = "how often a call of a reward that has failed is made again; default: 0, as in training"
    add("--retries", type=int, help=text)
    add("--samples", type=int, help="answers to each prompt; default: 1")
    _add_sampling_options(add)
    add("--max-rows", type=int, help="most rows of each set, spread evenly; default: all")
    add("--seed", type=int, help="decides the sampled tokens; default: 0")
    add("--dtype", help="type of the weights; default: the role's")
    add("--model", help="with an experiment file: the model to evaluate, in the place of its actor's")
    add("--out", help="directory of answers and summary; default: a new one, runs/eval-MODEL")
    add("--nproc", type=int, help="local workers; default: as many as the plan uses, else 1")
    add("--plan", help="plan file; default: calls split over all ranks by dp")
    add("--json", action="store_true", help="print one JSON document")
    add("--traceback", action="store_true", help="show the traceback of an error, too")


def _add_sampling_options(add: Callable[..., Any]) -> None:
    """Declare an option for each setting of sampling; the help is what SamplingConfig says of its field."""
    field = r'^    (\w+): [^#\n]+(?:  # ([^\n]+)|\n    """([^"]+)""")$'
    for name, *texts in re.findall(field, inspect.getsource(SamplingConfig), re.MULTILINE):
        if (hint := _SAMPLING.get(name)) is not None:
            text = " ".join("".join(texts).split()).removesuffix(".")
            text += f"; default: {_DEFAULTS[name]}" if name in _DEFAULTS else ""
            how = {"type": hint} if hint in (int, float) else {"action": "append", "metavar": "TEXT"}
            add(f"--{name.replace('_', '-')}", help=text, **how)


def run(options: Namespace, words: list[str]) -> int:
    """Evaluate, print the metrics and return the exit code."""
    target = Path(options.target)
    is_file = target.suffix == ".py"
    target_model = _FromModel(_of_file(options, words)) if is_file else _of_model(options, words)
    experiment = target_model.experiment
    fetch_models(experiment, weights=True)
    program, num_ranks = _compile(experiment, options, renames=not is_file)
    name = f"eval-{target.stem if is_file else target.resolve().name}"
    out = None if options.out is None else Path(options.out)
    started_in = getattr(options, "started_in", None)
    if started_in and out is None and not is_worker():
        out = new_run_directory(name, below=started_in)
    if out is not None and (not is_worker() or os.environ["RANK"] == "0"):
        _check_out(out)
    if not is_worker() or (os.environ["RANK"] == "0" and LOCAL_LAUNCHER not in os.environ):
        _say(target_model)
    if is_worker() or num_ranks == 1:
        job = Job(program, name, out, 600.0, None, options.traceback)
        return importlib.import_module("realhf.cli.worker").evaluate(job, as_json=options.json)
    out = out or new_run_directory(name)
    argv = [*_words(options, words), "--out", str(out)]
    return importlib.import_module("realhf.cli.launch").launch(
        argv, num_ranks, directory=started_in)


def _words(options: Namespace, words: Sequence[str]) -> list[str]:
    """Return the words of this command without --out, for the workers."""
    argv = ["eval", options.target, *words]
    for name, value in vars(options).items():
        option = f"--{name.replace('_', '-')}"
        if name in ("target", "command", "out", "started_in") or value is None or value is False:
            continue
        for part in value if isinstance(value, list) else [value]:
            argv.append(option if part is True else f"{option}={part}")
    return [*argv, "--no-chat"] if options.chat is False else argv


def _check_out(out: Path) -> None:
    check_run_directory(out)
    if (out / "summary.json").exists():
        raise UserError(f"--out {out} already holds an evaluation: choose another directory or remove it")


def _of_file(options: Namespace, words: list[str]) -> Experiment:
    """Return the experiment of a file, with overrides and with the model to evaluate."""
    if unfit := [name for name in _OF_MODEL if getattr(options, name) is not None]:
        raise UserError(
            f"--{unfit[0].replace('_', '-')} is for a model: an experiment has its own eval_dataset; "
            "change its fields by overrides such as --eval-dataset.path")
    experiment = override(read_experiment(options.target, options, words), words)
    if options.seed is not None:
        experiment.seed = options.seed
    if options.model is not None:
        if not isinstance(actor := getattr(experiment, "actor", None), Role):
            raise UserError(f"--model: the experiment {options.target} has no actor")
        role = dataclasses.replace(actor, optimizer=None, lora=None, random_init=False)
        experiment.actor = _role(options.model, role)  # type: ignore[attr-defined]
    return experiment


@dataclasses.dataclass(frozen=True)
class _FromModel:
    """An experiment that evaluates a model, and notes about settings that it takes from the model's run."""

    experiment: Experiment
    notes: tuple[str, ...] = ()


def _of_model(options: Namespace, words: Sequence[str]) -> _FromModel:
    """Return the experiment that evaluates a model as the options and its run say."""
    if words:
        raise UserError(f"realhf eval has no option {words[0]!r}: see realhf eval --help")
    if options.model is not None:
        raise UserError("--model is for an experiment file: name the model in its place")
    if not options.data:
        raise UserError("realhf eval MODEL needs --data FILE")
    if options.system_prompt and options.chat is False:
        raise UserError("--system-prompt is for chats: leave out --no-chat")
    rewards = [_reward(text, options.answer_key or "answer") for text in options.reward or ["exact"]]
    reward = rewards if len(rewards) > 1 else rewards[0]
    samples = 1 if options.samples is None else options.samples
    run = find_run(options.target)
    paths = _paths(options)
    any_on_hub = any(map(is_of_hub, paths.values()))
    if options.name is not None and not any_on_hub:
        raise UserError(f"--name {options.name!r} is for data sets of the hub: leave it out")
    sets = {}
    notes = []
    try:
        role = Role(options.target) if options.dtype is None else Role(options.target, dtype=options.dtype)
        for name, path in paths.items():
            settings = None if run is None else read_settings(run, name=name, path=path)
            prompts, from_run = _prompts(settings, options)
            if any_on_hub and not is_of_hub(path):  # Both options are then about the hub.
                prompts = {key: value for key, value in prompts.items() if key not in ("name", "split")}
            drawn, sampling = _sampling(settings, options, samples)
            config = DatasetConfig(path, shuffle=False, **prompts)
            chosen = SamplingConfig(**sampling)
            sets[name] = Evaluation(config, samples, chosen, options.max_rows or 0, reward)
            notes += [] if settings is None else [settings.described(from_run, drawn)]
        limits = RewardLimits(retries=options.retries or 0)
    except ValueError as error:
        text = f"--{error}" if str(error).startswith("dtype ") else _FIELD.sub(_option, str(error))
        raise UserError(text) from error
    if any(text in SHIPPED for text in options.reward or ["exact"]):
        _require_answers(sets, options.answer_key or "answer")
    first = next(iter(sets.values()))
    held_out: Any = sets if len(sets) > 1 or "" not in sets else first
    experiment = Evaluate(
        dataset=first.dataset, eval_dataset=held_out, seed=options.seed or 0,
        sampling=first.sampling or SamplingConfig(), actor=_role(options.target, role),
        reward_function=reward, reward_limits=limits)
    return _FromModel(experiment, tuple(dict.fromkeys(notes)))


def _reward(text: str, answer_key: str) -> Any:
    """Return the reward of an option `--reward`, with a name if the option gives one."""
    named = None if Path(text.rpartition(":")[0]).exists() else _NAMED.fullmatch(text)
    if named is None:
        return reward_by_name(text, answer_key=answer_key)
    return Reward(reward_by_name(named[2], answer_key=answer_key), name=named[1])


def _prompts(settings: RunSettings | None, options: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the data set, and those of them that come from the run rather than options."""
    names = ("prompt_key", "split", "name", "system_prompt", "chat")
    from_options = {name: value for name in names if (value := getattr(options, name)) is not None}
    if from_options.get("system_prompt") == "":  # A chat without a first message.
        from_options |= {"system_prompt": None, "chat": True}
    of_run = {} if settings is None else settings.prompts
    left_out = (*from_options, *(OF_CHATS if options.chat is False else ()))
    from_run = {name: value for name, value in of_run.items() if name not in left_out}
    return from_run | from_options, from_run


def _sampling(
    settings: RunSettings | None, options: Namespace, samples: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of SamplingConfig that come from the run, and all: those, options and defaults."""
    from_options = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    if settings is None:
        return {}, {"temperature": 0.0 if samples == 1 else 1.0, **from_options}
    of_run = {**settings.sampling, "temperature": settings.temperature(samples)}
    from_run = {name: value for name, value in of_run.items() if name not in from_options}
    limit = from_options.get("max_new_tokens")
    if limit is not None and from_run.get("min_new_tokens", 0) > limit:
        from_run["min_new_tokens"] = limit
    return from_run, from_run | from_options


def _say(target_model: _FromModel) -> None:
    """Print which settings come from the run."""
    for note in target_model.notes:
        print(f"realhf: {one_line(note)}", file=sys.stderr, flush=True)


def _option(match: re.Match[str]) -> str:
    return f"--{match[1].replace('_', '-')}"


def _paths(options: Namespace) -> dict[str, str]:
    """Return the files or hub names of --data by the name of the set, "" for a single one without NAME=."""
    paths: dict[str, str] = {}
    for text in options.data:
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        path = text if named is None else named[2]
        name = Path(path).stem if named is None else named[1]
        name = "" if named is None and len(options.data) == 1 else name
        if name in paths:
            raise UserError(f"--data {text}: there are two sets named {name!r}: write NAME=FILE")
        paths[name] = path
    return paths


def _require_answers(sets: Mapping[str, Evaluation], answer_key: str) -> None:
    """Raise UserError if a dataset lacks the column of the answers."""
    for evaluation in sets.values():
        columns = extra_columns(evaluation.dataset)
        if columns and answer_key not in columns:
            there_are = f"its other columns are {', '.join(columns)}"
            path = evaluation.dataset.path
            raise UserError(
                f"{path} has no column {answer_key!r}: {there_are}; --answer-key says which has the answers")


def _role(model: str, role: Role) -> Role:
    """Return the role with the model of a directory: a model, adapters, or a run's newest export."""
    path = Path(model)
    if (path / "metrics.jsonl").is_file() or (path / "hf").is_dir():
        exports = find_checkpoints(path / "hf")
        if not exports:
            raise UserError(f"{model} is the directory of a run without an exported model (hf/step_N)")
        path = exports[max(exports)]
        model = str(path)
    if not (path / CONFIG_FILE).is_file():
        return dataclasses.replace(role, model=model)
    base = read_object(path / CONFIG_FILE, what="adapters").get("base_model_name_or_path")
    if not base:
        raise UserError(f"{path / CONFIG_FILE} names no base_model_name_or_path: merge the adapters first")
    return dataclasses.replace(role, model=base, lora=LoraConfig(adapter=model))


def _compile(experiment: Experiment, options: Namespace, *, renames: bool) -> tuple[Program, int]:
    """Return the program and its number of ranks. Messages have the names of options if `renames`."""
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc is {options.nproc}: it must be at least 1")
    plan = None if options.plan is None else ExecutionPlan.load(options.plan)
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_worker() else options.nproc
    num_ranks = num_ranks or (plan.num_ranks if plan is not None else 1)
    try:
        return compile_evaluation(experiment, plan, world_size=num_ranks), num_ranks
    except ValueError as error:
        text = str(error)
        if renames:
            text = re.sub(r"eval_dataset(\.[\w.-]+?)?\.path\b", "--data", text)
            text = re.sub(r"^eval_dataset(\.[\w-]+)?", "--data", text).replace("actor.model", "MODEL")
            text = text.replace("; prompt_key says", "; --prompt-key says")
        where = f"plan {options.plan}: " if text.startswith("calls.") and options.plan else ""
        prefix = where or ("" if renames else f"{options.target}: ")
        raise UserError(f"{prefix}{text}") from error


def print_summary(summary: Mapping[str, Any], *, out: Path | None, as_json: bool) -> None:
    """Print the metrics on standard output: a table with a column for each set, or one JSON document."""
    if as_json:
        print(json.dumps({**summary, "out": None if out is None else str(out)}))
        return
    table = Table("metric", *(name or "value" for name in summary["sets"]), title=summary["model"])
    columns = []
    for name in summary["sets"]:
        prefix = metric_prefix(name)
        columns.append({key.removeprefix(prefix): value for key, value in summary["metrics"].items()
                        if key.startswith(prefix)})
    for metric in dict.fromkeys(metric for column in columns for metric in column):
        table.add_row(metric, *(f"{column[metric]:z.4f}" if metric in column else "" for column in columns))
    counts = [f"{numbers['prompts']} x {numbers['samples']}" for numbers in summary["sets"].values()]
    table.add_row("prompts x samples", *counts)
    Console().print(table)
    print(f"realhf: answers and summary: {out}", file=sys.stderr)
