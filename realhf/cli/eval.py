"""`realhf eval`: evaluates a model without training, on one or several local workers. Free of torch.

The sets and their settings are those of an experiment file, or what config.json tells of a run, or for
another model the defaults of `Evaluate`. Overrides change their fields, as in every other command.
"""

import dataclasses
import json
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from realhf.algorithms.held_out import Evaluate
from realhf.calls import SamplingConfig
from realhf.checkpoint.names import find_checkpoints
from realhf.checkpoint.peft import CONFIG_FILE
from realhf.cli.experiment_file import (
    add_experiment_arguments,
    experiment_name,
    experiment_of,
    with_overrides,
)
from realhf.cli.launch import LOCAL_LAUNCHER, Job, is_worker, launch
from realhf.cli.program import compile_experiment
from realhf.data.dataset import DatasetConfig
from realhf.errors import UserError, naming, one_line, shown, warn
from realhf.experiment import Evaluation, Experiment, Role, metric_prefix, named_sets, set_field
from realhf.models.lora import LoraConfig
from realhf.rewards.answers import ExactMatch
from realhf.rewards.math_answer import MathAnswer
from realhf.rewards.reward import Reward
from realhf.runtime.compile.program import leaves
from realhf.runtime.records.run_directory import check_run_directory, new_run_directory
from realhf.user_input.files import execute_file, read_json, read_object
from realhf.user_input.suggest import did_you_mean

HELP = "evaluate a model on held-out rows, without training"
EXAMPLES = (
    "realhf eval examples/grpo.py --model runs/grpo",
    "realhf eval runs/first --data held_out.jsonl --reward exact --eval-dataset.samples 8",
    "realhf eval Qwen2.5-0.5B --data easy=a.jsonl --data hard=b.jsonl --reward rewards.py:score --json")
SHIPPED: dict[str, Callable[[str], Any]] = {"exact": ExactMatch, "math": MathAnswer}
"""The shipped rewards by name: each takes the column of the answers."""
_CONFIG = "config.json"
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")
_OF_ROWS = ("path", "name", "split", "revision", "max_rows")
"""Fields of a data set that say which rows it has; most others say how the model reads them."""
_NOT_SAVED = ("map", "shuffle", "preload")
"""Fields of a data set that are not taken from a run: config.json has only the names of functions."""
_TIMEOUT_SECONDS = 600.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf eval`."""
    add_experiment_arguments(parser, "EXP.py or MODEL")
    add = parser.add_argument
    text = "rows to evaluate: a file or a hub name, or NAME=FILE; repeatable; default: a run's held-out sets"
    add("--data", action="append", metavar="FILE", help=text)
    text = f"{', '.join(SHIPPED)} (exact:COLUMN reads the answers there, not in `answer`), FILE.py:FUNCTION, "
    add("--reward", action="append", help=f"{text}or NAME=one of these; repeatable; default: exact")
    add("--model", help="with an experiment file: the model to evaluate, in the place of its actor's")
    add("--out", help="directory of samples and summary; default: a new one, runs/eval-MODEL")
    add("--nproc", type=int, help="local workers; default: as many as the plan uses, else 1")
    add("--plan", help="plan file or shipped name; default: calls split over all ranks by dp")
    add("--json", action="store_true", help="print one JSON document")


def main(options: Namespace, words: list[str]) -> int:
    """Evaluate, print the metrics and return the exit code."""
    if unread := [word for word in words if word.startswith("--dataset.")]:
        option = unread[0].partition("=")[0]
        raise UserError(f"{option}: evaluations read eval_dataset, and not dataset: write --eval-dataset...")
    target = experiment_name(options, words)
    is_file = target is not None and target.endswith(".py")
    run = None if target is None or is_file else find_run(target)
    saved = {} if run is None else _saved(run)
    experiment: Experiment | None = None
    if target is not None:
        experiment = _of_file(target, options, words) if is_file else _of_model(target, options, saved)
    experiment = with_overrides(experiment, options, words, weights=True)
    program, num_ranks = compile_experiment(experiment, options, evaluates=True)
    is_main = not is_worker() or os.environ["RANK"] == "0"
    name = f"eval-{Path(options.experiment).stem if is_file else Path(options.experiment).resolve().name}"
    out = None if options.out is None else Path(options.out)
    if out is not None and is_main:
        check_run_directory(out)
        if (out / "summary.json").exists():
            raise UserError(f"--out {out} already holds an evaluation: choose another directory or remove it")
    if saved and is_main and LOCAL_LAUNCHER not in os.environ:
        _warn_of_training_rows(str(target), saved, _paths(options.data or ()))
        print(f"realhf: {one_line(_told(str(run), saved, experiment))}", file=sys.stderr, flush=True)
    if is_worker() or num_ranks == 1:
        from realhf.cli.worker import evaluate

        job = Job(program, name, out, _TIMEOUT_SECONDS, None, options.traceback,
                  started_in=options.started_in)
        return evaluate(
            job, show=lambda summary, out: print_summary(summary, out=out, as_json=options.json))
    out = out or new_run_directory(name, below=options.started_in)
    return launch([*options.argv, "--out", str(out)], num_ranks, directory=options.started_in)


def _of_file(name: str, options: Namespace, words: list[str]) -> Experiment:
    """Return the experiment of a file with the model to evaluate."""
    for option in ("data", "reward"):
        if getattr(options, option) is not None:
            raise UserError(
                f"--{option} is for a model: an experiment has its own eval_dataset; "
                "change its fields by overrides such as --eval-dataset.path")
    experiment = experiment_of(name, options, words)
    if options.model is not None:
        if not isinstance(actor := getattr(experiment, "actor", None), Role):
            raise UserError(f"--model: the experiment {name} has no actor")
        role = dataclasses.replace(actor, optimizer=None, lora=None, random_init=False)
        experiment.actor = _role(options.model, role)  # type: ignore[attr-defined]
    return experiment


def _of_model(model: str, options: Namespace, saved: Mapping[str, Any]) -> Evaluate:
    """Return the experiment that evaluates a model, with the settings of its run if it has one."""
    if options.model is not None:
        raise UserError("--model is for an experiment file: name the model in its place")
    held_out = saved.get("eval_dataset")
    if not options.data and held_out is None and not options.help:
        why = "the run has no held-out rows" if saved else "a model has none"
        raise UserError(f"realhf eval {model} needs --data FILE, the rows to evaluate: {why}")
    with naming(f"{model}: {_CONFIG}"):
        sets = _sets(saved["dataset"] if held_out is None else held_out) if saved else {"": Evaluation()}
        sampling = _build(SamplingConfig, saved.get("sampling") or {})
    if options.data:
        named = _paths(options.data)
        sets = {name: _with_rows(sets, name, path) for name, path in named.items()}
    rewards = [_reward(text) for text in options.reward or ["exact"]]
    return Evaluate(
        actor=_role(model, Role(model)), seed=saved.get("seed", 0),
        eval_dataset=sets[""] if list(sets) == [""] else sets, sampling=sampling,
        reward_function=rewards if len(rewards) > 1 else rewards[0])


def _warn_of_training_rows(model: str, saved: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """Warn of files that the model was trained on, as config.json of its run tells."""
    dataset = saved.get("dataset") or {}
    trained = {part.get("path"): part.get("split") for part in dataset.get("parts") or [dataset]}
    for path in paths.values():
        places = {str(Path(known).resolve()) for known in trained if known and Path(known).exists()}
        if path in trained or str(Path(path).resolve()) in places:
            warn(f"--data {path}: {model} was trained on rows of it: what was learned by heart counts")


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


def _saved(run: Path) -> dict[str, Any]:
    """Return config.json of a run; empty if it is not that of a run."""
    config = read_json(run / _CONFIG)
    return config if isinstance(config, dict) and isinstance(config.get("dataset"), dict) else {}


def _sets(saved: dict[str, Any]) -> dict[str, Evaluation]:
    """Return the held-out sets that config.json has as one set, or as several by name; mixtures have their
    first part."""
    is_one = "prompt_key" in saved or "correct_above" in saved or "parts" in saved
    sets = {}
    entry: dict[str, Any]
    for name, entry in ({"": saved} if is_one else saved).items():
        held_out: dict[str, Any] = entry if "correct_above" in entry else {"dataset": entry}
        dataset = (held_out["dataset"].get("parts") or [held_out["dataset"]])[0]
        sampling = held_out.get("sampling")
        sets[name] = Evaluation(
            dataset=_build(DatasetConfig, dataset, without=_NOT_SAVED),
            sampling=None if sampling is None else _build(SamplingConfig, sampling),
            **{key: held_out[key] for key in ("samples", "max_rows") if key in held_out})
    return sets


def _build(kind: Any, saved: Mapping[str, Any], *, without: Sequence[str] = ()) -> Any:
    """Return a config of its saved fields. Other releases may have others, which are left out."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in without]
    return kind(**{name: saved[name] for name in names if name in saved})


def _with_rows(sets: Mapping[str, Evaluation], name: str, path: str) -> Evaluation:
    """Return the settings for a file of rows: the set of this name, else of this file, else the first one."""
    of_file = [held_out for held_out in sets.values() if held_out.dataset.path == path]
    chosen = sets.get(name) or next(iter([*of_file, *sets.values()]))
    if chosen.dataset.path == path:
        return chosen
    usual = {field: getattr(DatasetConfig(path), field) for field in _OF_ROWS}
    return dataclasses.replace(chosen, dataset=dataclasses.replace(chosen.dataset, **usual))


def _paths(data: Sequence[str]) -> dict[str, str]:
    """Return the files or hub names of --data by the name of the set, "" for a single one without NAME=."""
    paths: dict[str, str] = {}
    for text in data:
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        path = text if named is None else named[2]
        name = Path(path).stem if named is None else named[1]
        name = "" if named is None and len(data) == 1 else name
        if name in paths:
            raise UserError(f"--data {text}: there are two sets named {name!r}: write NAME=FILE")
        paths[name] = path
    return paths


def _reward(text: str) -> Any:
    """Return the reward of an option `--reward`, with a name if the option gives one."""
    named = None if Path(text.rpartition(":")[0]).exists() else _NAMED.fullmatch(text)
    return reward_by_name(text) if named is None else Reward(reward_by_name(named[2]), name=named[1])


def _role(model: str, role: Role) -> Role:
    """Return the role with the model of a directory: a model, adapters, or a run's newest export."""
    path = Path(model)
    if path.parent.name == "checkpoints" and (path.parent.parent / _CONFIG).is_file():
        raise UserError(
            f"{model} is a checkpoint, by which its run is continued: exported models are in "
            f"{path.parent.parent / 'hf'}")
    if (path / "metrics.jsonl").is_file() or (path / "hf").is_dir():
        exports = find_checkpoints(path / "hf")
        if not exports:
            raise UserError(f"{model} is the directory of a run without an exported model (hf/step_N)")
        path = exports[max(exports)]
        saved = max(find_checkpoints(path.parent.parent / "checkpoints"), default=0)
        if saved > max(exports):
            warn(
                f"{model}: the newest exported model is of step {max(exports)}, and the newest checkpoint of "
                f"step {saved}: the former is evaluated (export_every exports more often)")
        model = str(path)
    if not (path / CONFIG_FILE).is_file():
        return dataclasses.replace(role, model=model)
    base = read_object(path / CONFIG_FILE, what="adapters").get("base_model_name_or_path")
    if not base:
        raise UserError(f"{path / CONFIG_FILE} names no base_model_name_or_path: merge the adapters first")
    return dataclasses.replace(role, model=base, lora=LoraConfig(adapter=model))


def _told(run: str, saved: Mapping[str, Any], experiment: Any) -> str:
    """Return a sentence with the settings that come from a run and from overrides, and what is lost of it."""
    told = []
    for name, held_out in named_sets(experiment.eval_dataset).items():
        drawn = held_out.sampling_for(experiment.sampling)
        settings = {**_changed(held_out.dataset, DatasetConfig(shuffle=False)), "samples": held_out.samples}
        settings |= {"max_new_tokens": drawn.max_new_tokens, **_changed(drawn, SamplingConfig())}
        words = ", ".join(f"{field} {shown(value)}" for field, value in settings.items())
        told.append(f"{set_field(name)} as in {run}: {words}")
    sets = saved.get("eval_dataset") or saved["dataset"]
    own = ["map function"] * any(name.endswith("map") and value for name, value in leaves(sets))
    own += ["reward"] * any(saved.get(name) for name in ("reward_function", "eval_function"))
    if own:
        how = f"`realhf eval EXP.py --model {run}` applies them"
        told.append(f"its own {' and '.join(own)} are in its experiment file, and {how}")
    return "; ".join(told)


def _changed(config: Any, usual: Any) -> dict[str, Any]:
    """Return the fields of a config that are not the usual ones, except those that name rows."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items()
            if name not in _OF_ROWS and value != getattr(usual, name)}


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
    print(f"realhf: samples and summary: {out}", file=sys.stderr)


def reward_by_name(text: str) -> Any:
    """Return a shipped reward (`exact`, or `exact:column`), or the function of a file (`file.py:function`).

    Raises UserError if there is none of this name.
    """
    path, _, function = text.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), function)
    name, _, column = text.partition(":")
    if name not in SHIPPED:
        raise UserError(
            f"--reward {text!r}{did_you_mean(name, list(SHIPPED))}: "
            f"legal are {', '.join(SHIPPED)} and FILE.py:FUNCTION")
    return SHIPPED[name](column or "answer")


def _from_file(path: Path, function: str) -> Any:
    """Execute the user's file as a module and return one of its functions."""
    if not path.is_file():
        raise UserError(f"--reward {path}:{function}: there is no file {path}")
    try:
        module = execute_file(path, name=f"realhf_reward_{path.stem}")
    except (Exception, SystemExit) as error:
        raise UserError(f"--reward {path}: {type(error).__name__}: {error}") from error
    if not callable(reward := getattr(module, function, None)):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"--reward {path}:{function}: the file's functions are {', '.join(names) or 'none'}")
    return reward
