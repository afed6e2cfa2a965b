"""run, check, plan, evaluate and load: realhf from a Python script or from a cell of a notebook.

Each starts the command of the same name in processes of its own, so the caller's process holds no model and
no GPU, and the command line can continue what Python has begun. The experiment travels as a file,
`experiment.py`, that the command line runs like any other.
"""

from __future__ import annotations

import base64
import codecs
import copy
import dataclasses
import html
import io
import json
import linecache
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from realhf.checkpoint.merge import load_model
from realhf.checkpoint.names import find_checkpoints
from realhf.cli import check as check_command
from realhf.cli import eval as eval_command
from realhf.cli import plan as plan_command
from realhf.cli import run as run_command
from realhf.cli.check import sentences as in_words
from realhf.cli.overrides import option_names
from realhf.cli.rollouts import read_evaluations, read_rollouts
from realhf.data.dataset import DatasetConfig, DatasetMixture, as_dataset
from realhf.data.memory_rows import is_of_memory
from realhf.errors import UserError, shown
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Evaluation, Experiment
from realhf.runtime.compile.program import to_json
from realhf.runtime.records.pictures import curves
from realhf.runtime.records.run_directory import check_run_directory, new_run_directory, require_free
from realhf.user_input.files import functions_by_value, read_json_lines, read_object
from realhf.user_input.other_libraries import keyword_hint
from realhf.user_input.suggest import did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FILE = "experiment.py"
_MAX_FILE_BYTES = 12 << 20
_START = (
    "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.argv[:] = ['realhf', *sys.argv[2:]]; "
    "from realhf.__main__ import main; from realhf.signals import end_with_parent; "
    "end_with_parent(by=signal.SIGHUP); sys.exit(main())")
"""The code of a command's process: it saves and ends, as after a closed terminal, when its parent is gone."""
_SENTENCE = "realhf: "
"""The beginning of the sentences and the warnings of a command."""
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What programs write to a terminal beside text, such as colours and moves of the cursor."""
_WORK = re.compile(r"step \d+/\d+: [^:,]+, \d+ s(:|$)")
"""The beginning of a line about what a run is doing, where others have the metrics of a step."""
_SET_HERE = ("help", "json", "output")
"""Options of commands that are no keywords."""
_SHOWN_STEPS = 12
"""Rows of the table in a notebook."""


class RunFailed(RuntimeError):
    """A command that Python has started has failed; what it printed says more."""


def run(
    experiment: Experiment | str | Path, *, nproc: int | None = None,
    plan: ExecutionPlan | str | Path | None = None, out: str | Path | None = None,
    resume: bool | str | Path = False, **options: Any,
) -> TrainingRun:
    """Train an experiment in processes of its own, show its progress, and return the finished run.

    `experiment` is an Experiment or the path of a file that defines one. It is saved as `experiment.py` in
    the run directory `out` (default: a new one below runs/), so that `realhf run` can continue it. With
    `resume` it goes on from the last checkpoint in `out`, or from the one that `resume` names. Other
    `options` are those of `realhf run`, such as `restarts=2` or `track=["wandb"]`.

    An interrupt (Ctrl-C, or the stop button of a notebook) lets the run save a checkpoint after the current
    step and then raises KeyboardInterrupt; a second one ends it at once. Raises UserError if the experiment,
    the plan or an option is wrong, and RunFailed if the run fails.
    """
    _check_call("run", experiment, options, own=("nproc", "plan", "out", "resume"))
    resumes = resume is not False
    if resumes and out is None:
        raise UserError("run: resume needs out, the directory of the run")
    if isinstance(experiment, Experiment):
        directory = new_run_directory(type(experiment).__name__.lower()) if out is None else Path(out)
        check_run_directory(directory, option="out", resumes=resumes)
        directory.mkdir(parents=True, exist_ok=True)
        require_free(directory, option="out")
        file = save_experiment(_with_rows_in(directory, experiment), directory / _FILE)
    else:
        file = Path(experiment)
        directory = new_run_directory(file.stem) if out is None else Path(out)
    if isinstance(plan, ExecutionPlan):
        plan.save(directory / "plan.yaml")
        plan = directory / "plan.yaml"
    words = _words(nproc=nproc, plan=plan, out=directory, **options)
    if resumes:
        words += ["--resume"] if resume is True else ["--resume", str(resume)]
    outcome = _command(["run", str(file), *words], _shower())
    made = TrainingRun(directory)
    if outcome.interrupted:
        raise KeyboardInterrupt(f"{made!r}; run(..., out={str(directory)!r}, resume=True) goes on")
    outcome.require_success()
    return made


def check(
    experiment: Experiment | str | Path, *, nproc: int | None = None,
    plan: ExecutionPlan | str | Path | None = None, cluster: str | Path | None = None, **options: Any,
) -> Checked:
    """Find what is wrong with an experiment and a plan without running it, as `realhf check` does.

    Print warnings and return the counts that follow from the settings. Raises UserError at the first fault.
    """
    _check_call("check", experiment, options, own=("nproc", "plan", "cluster"))
    with _as_file(experiment) as file, _as_plan(plan) as plan_file:
        words = _words(nproc=nproc, plan=plan_file, cluster=cluster, **options)
        outcome = _command(["check", str(file), *words, "--json"], _print, hidden=_hidden(experiment, file))
    return Checked(outcome.document())


def plan(experiment: Experiment | str | Path, **options: Any) -> ExecutionPlan:
    """Return a fast plan for an experiment, as `realhf plan` finds it.

    `options` are those of that command: `cluster="h100-1x8"`, `profile`, `time_limit`, `devices` and others.
    """
    _check_call("plan", experiment, options)
    with _as_file(experiment) as file, tempfile.TemporaryDirectory(prefix="realhf-") as directory:
        target = Path(directory) / "plan.yaml"
        words = [*_words(output=target, **options), "--json"]
        _command(["plan", str(file), *words], _print, hidden=_hidden(experiment, file)).require_success()
        return ExecutionPlan.load(str(target))


def evaluate(
    what: Experiment | TrainingRun | str | Path, *, data: Any = None, out: str | Path | None = None,
    **options: Any,
) -> Evaluated:
    """Evaluate the actor of an experiment, the newest model of a run, or a model's directory.

    `data` are the rows for a run or a model: a file, a hub name, rows in memory, or a dict of several by
    name; a run has its own. `options` are those of `realhf eval`, such as `reward="exact"`, `model` (with an
    experiment: the model to evaluate in its actor's place) and `nproc`.
    """
    _check_call("evaluate", what, options, own=("data", "out"))
    sets = data if isinstance(data, Mapping) else {} if data is None else {"": data}
    names = [f"{name}={_rows_file(rows)}" if name else _rows_file(rows) for name, rows in sets.items()]
    target = what.directory if isinstance(what, TrainingRun) else what
    with _as_file(target) as file:
        words = _words(data=names or None, out=out, **options)
        outcome = _command(["eval", str(file), *words, "--json"], _print, hidden=_hidden(target, file))
    return Evaluated(outcome.document())


def load(directory: str | Path) -> TrainingRun:
    """Return the run in a directory. Raises UserError if there is none."""
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is no run directory: it has no config.json")
    return TrainingRun(directory)


class TrainingRun:
    """A run, read from its directory whenever it is asked, also while it goes on."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    @property
    def metrics(self) -> DataFrame:
        """The metrics of every step, a row for each step; step 0 has the evaluation before the first."""
        return _frame(self._records("metrics.jsonl"))

    @property
    def rollouts(self) -> DataFrame:
        """The samples of training that the run has kept: prompt, completion, score, step and others."""
        return _frame(read_rollouts(self.directory)[1])

    def evaluation(self, name: str = "") -> DataFrame:
        """Return the samples of all evaluations, of one set or of all."""
        return _frame(read_evaluations(self.directory, name)[1])

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the experiment, as JSON."""
        return read_object(self.directory / "config.json")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run; None before that."""
        path = self.directory / "summary.json"
        return read_object(path) if path.is_file() else None

    @property
    def exports(self) -> dict[int, Path]:
        """Step -> directory of the exported model, the newest first."""
        return find_checkpoints(self.directory / "hf")

    def plot(self) -> Figure:
        """Return the curves of what is learned: the reward or the loss, and the held-out score."""
        from matplotlib.figure import Figure

        class Shown(Figure):
            def _repr_png_(self) -> bytes:
                """Return the picture for a notebook, whatever the backend of matplotlib is."""
                buffer = io.BytesIO()
                self.savefig(buffer, format="png")
                return buffer.getvalue()

        return curves(self._records("metrics.jsonl"), kind=Shown)

    def model(self, step: int | None = None) -> PreTrainedModel:
        """Return the exported model of a step, by default the newest, as an object of transformers.

        Adapters are added to the weights of their model.
        """
        return load_model(self._export(step))

    def tokenizer(self, step: int | None = None) -> PreTrainedTokenizerBase:
        """Return the tokenizer of an exported model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            str(self._export(step)), local_files_only=True, trust_remote_code=False)

    def _export(self, step: int | None) -> Path:
        exports = self.exports
        if not exports:
            raise UserError(f"{self.directory} has no exported model yet: export_every exports more often")
        if step is not None and step not in exports:
            raise UserError(
                f"{self.directory} has no exported model of step {step}: there are those of "
                f"{', '.join(map(str, sorted(exports)))}")
        return exports[max(exports) if step is None else step]

    def _records(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        return [row for _, row in read_json_lines(path)] if path.is_file() else []

    def __repr__(self) -> str:
        steps = [record for record in self._records("metrics.jsonl") if record["step"] > 0]
        total = self.config.get("steps") if (self.directory / "config.json").is_file() else None
        parts = [f"{steps[-1]['step'] if steps else 0} of {total or '?'} steps"]
        for name in ("reward/mean", "actor/loss"):
            if values := [step[name] for step in steps if step.get(name) is not None]:
                parts.append(f"{name} {values[0]:.3g} -> {values[-1]:.3g}")
                break
        if (summary := self.summary) is not None and summary.get("eval_metric") is not None:
            ends = f"{summary['eval_first']:.3g} -> {summary['eval_last']:.3g}"
            parts.append(f"{summary['eval_metric']} {ends}")
        if exports := self.exports:
            parts.append(f"model in {exports[max(exports)].relative_to(self.directory)}")
        return f"run {self.directory}: {', '.join(parts)}"


class Checked:
    """The result of a check: `document` has all counts as JSON, and `str` shows them in words."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def __repr__(self) -> str:
        ranks = self.document["ranks"]
        lines = [f"sound on {ranks} rank{'s' * (ranks != 1)}:"]
        lines += [f"  {name:<18} {call['layout']}" for name, call in self.document["calls"].items()]
        return "\n".join([*lines, *in_words(self.document["counts"])])


class Evaluated:
    """The result of an evaluation: `metrics` by name, and the `samples` in a frame."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.metrics: dict[str, float] = document["metrics"]
        self.model: str = document["model"]
        self.directory = Path(document["out"])

    @cached_property
    def samples(self) -> DataFrame:
        """The prompts, completions and scores, a row for each sample."""
        return _frame(read_evaluations(self.directory, "")[1])

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        return f"evaluation of {self.model}: {values} ({self.directory})"


def _frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    import pandas

    return pandas.DataFrame(rows) if rows else pandas.DataFrame({"step": []})


# Experiments as files


_TEMPLATE = '''"""An experiment that was started from Python; `realhf run` can run and continue it, too.

{settings}
"""

import base64
import linecache
import sys

import cloudpickle

CELLS = {cells}
"""Source texts that no file has: they are shown when one of their lines fails."""
for name, text in CELLS.items():
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
sys.path += [path for path in {path!r} if path not in sys.path]
experiment = cloudpickle.loads(base64.b64decode("""
{data}"""))
'''


def save_experiment(experiment: Experiment, path: Path) -> Path:
    """Write an experiment to a Python file, and return its path.

    Functions and classes of a notebook or a script are in it by value, those of modules by name. Raises
    UserError if a value in them cannot be saved.
    """
    try:
        data = base64.encodebytes(cloudpickle.dumps(experiment)).decode()
    except Exception as error:  # Objects raise what they like.
        reason = " ".join(str(error).split())
        raise UserError(
            f"the experiment cannot be saved for its processes ({type(error).__name__}: {reason}): its "
            "functions must not hold open files, locks or connections; let them open these when they run"
        ) from error
    settings = json.dumps(to_json(experiment), indent=2, ensure_ascii=False)
    text = _TEMPLATE.format(
        settings=settings.replace("\\", "\\\\").replace('"""', "'''"), cells=_cells(experiment),
        path=[str(Path(entry).absolute()) for entry in sys.path], data=data)
    if len(text) > _MAX_FILE_BYTES:
        raise UserError(
            f"the functions of the experiment hold {len(text) >> 20} MB of values: let them read large ones "
            "from files")
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
    return path


def _with_rows_in(directory: Path, experiment: Experiment) -> Experiment:
    """Return the experiment with its rows of memory in files of the run directory, which keeps them."""

    def moved(value: Any) -> Any:
        if isinstance(value, DatasetConfig) and isinstance(value.path, str) and is_of_memory(value.path):
            target = directory.absolute() / Path(value.path).name
            if not target.exists():
                shutil.copyfile(value.path, target)
            return dataclasses.replace(value, path=str(target))
        if isinstance(value, DatasetMixture):
            return dataclasses.replace(value, parts=tuple(map(moved, value.parts)))
        if isinstance(value, Evaluation):
            return dataclasses.replace(value, dataset=moved(value.dataset))
        return {name: moved(each) for name, each in value.items()} if isinstance(value, Mapping) else value

    changed = copy.copy(experiment)
    changed.dataset = moved(experiment.dataset)
    changed.eval_dataset = moved(experiment.eval_dataset)
    return changed


def _cells(experiment: Experiment) -> str:
    """Return, as a Python dict, the texts of cells in which functions of an experiment are defined."""
    codes = (getattr(function, "__code__", None) for function in functions_by_value(experiment).values())
    names = {code.co_filename for code in codes if isinstance(code, CodeType)}
    texts = {name: "".join(linecache.getlines(name)) for name in sorted(names) if not Path(name).is_file()}
    entries = []
    for name, text in texts.items():
        quoted = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        entries.append(f'{name!r}: """\\\n{quoted}""",\n')
    return "{" + "".join(entries) + "}" if any(texts.values()) else "{}"


@contextmanager
def _as_file(what: Experiment | str | Path) -> Iterator[Path]:
    """Hold the file of an experiment for a command; it is a temporary one if it is an object."""
    if not isinstance(what, Experiment):
        yield Path(what)
        return
    with tempfile.TemporaryDirectory(prefix="realhf-") as directory:
        yield save_experiment(what, Path(directory) / _FILE)


def _hidden(what: Any, file: Path) -> Path | None:
    return file if isinstance(what, Experiment) else None


@contextmanager
def _as_plan(plan: ExecutionPlan | str | Path | None) -> Iterator[str | Path | None]:
    if not isinstance(plan, ExecutionPlan):
        yield plan
        return
    with tempfile.TemporaryDirectory(prefix="realhf-") as directory:
        path = Path(directory) / "plan.yaml"
        plan.save(path)
        yield path


def _rows_file(rows: Any) -> str:
    return str(rows) if isinstance(rows, str | Path) else str(as_dataset(rows, "data").path)


# Commands as processes


_COMMANDS = {"run": run_command, "check": check_command, "plan": plan_command, "evaluate": eval_command}
"""Function -> the module of its command."""


def _check_call(
    function: str, what: Any, options: Mapping[str, Any], *, own: Sequence[str] = ()
) -> None:
    """Raise UserError if the first argument of a function is of another kind, or if it has no such keyword.

    Keywords are `own` ones, options of the command, and those fields of the experiment that a word can set.
    """
    kinds: list[type] = [Experiment, str, Path, *([TrainingRun] if function == "evaluate" else [])]
    if not isinstance(what, tuple(kinds)):
        runs = "a run, a model's directory, " if function == "evaluate" else ""
        called = f" (did you mean {what.__name__}(...)?)" if isinstance(what, type) else ""
        raise UserError(
            f"{function} is given {shown(what)}{called}: it takes {runs}an experiment, such as GRPO(...), or "
            "the path of a file that defines one")
    parser = ArgumentParser(add_help=False, conflict_handler="resolve")
    _COMMANDS[function].add_arguments(parser)
    words = [name.removeprefix("--").replace("-", "_") for name in option_names(parser)]
    legal = [*own, *(word for word in words if word not in (*own, *_SET_HERE))]
    fields = [field.name for field in dataclasses.fields(what)] if isinstance(what, Experiment) else []
    for name in options:
        if name in legal or name in fields or "." in name or not isinstance(what, Experiment):
            continue  # The command reads the file, and knows the fields of its experiment.
        hint = keyword_hint(name, fields)
        meant = f" ({hint})" if hint else did_you_mean(name, [*legal, *fields])
        raise UserError(f"{function} has no keyword {name!r}{meant}: legal are {', '.join(legal)}")


def _words(**options: Any) -> list[str]:
    """Return keyword arguments as options of the command line."""
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for each in values for word in (option, str(each))]
    return words


class _Outcome(NamedTuple):
    code: int
    output: str
    reason: str
    interrupted: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON document of a command. Raises UserError, RunFailed or KeyboardInterrupt."""
        self.require_success()
        return json.loads(self.output)

    def require_success(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt(self.reason)
        if self.code:
            raise (UserError if self.code == 2 else RunFailed)(self.reason)


def _command(
    words: Sequence[str], show: Callable[[str], None], *, hidden: Path | None = None
) -> _Outcome:
    """Run a command, show what it prints, and pass interrupts on to it.

    With --json among the words, standard output is returned instead. So are the sentences at the end, by
    which a command fails. `hidden` is a temporary file, whose path says nothing to the user.
    """
    is_json = "--json" in words
    paths = json.dumps([str(Path(path).absolute()) for path in sys.path])
    interrupts: list[int] = []
    sentences: list[str] = []
    newest = ""
    is_terminal = show is _print and sys.stderr.isatty()
    reader, writer = _open_terminal() if is_terminal else os.pipe()
    # Notebooks ask for colours (FORCE_COLOR), which rich takes for a terminal.
    environment = dict(os.environ) if is_terminal else os.environ | {"TTY_COMPATIBLE": "0"}
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(
        [sys.executable, "-P", "-c", _START, paths, *words], stdin=subprocess.DEVNULL,
        stdout=output if is_json else writer, stderr=writer, start_new_session=True, env=environment,
    ) as process, _passing_on(process, interrupts):
        os.close(writer)
        for line in _pieces(reader):
            if hidden is not None:
                line = line.replace(f"experiment {hidden}", "experiment").replace(str(hidden), "experiment")
            text = _CONTROLS.sub("", line).rstrip()
            if text.startswith(_SENTENCE) and not text.startswith(f"{_SENTENCE}warning:"):
                sentences.append(text)
                continue
            if text:
                _show_all(sentences, show)
                newest = text
            if is_terminal:
                sys.stderr.write(line)
                sys.stderr.flush()
            elif text:
                show(text)
        os.close(reader)
        code = process.wait()
        output.seek(0)
        printed = output.read()
    reason = "; ".join(sentence.removeprefix(_SENTENCE) for sentence in sentences) or newest
    if code == 0 or interrupts:
        _show_all(sentences, show)
    elif code != 2 and sentences and newest:  # The traceback's last line is the cause.
        reason = f"{newest}; {reason}"
    return _Outcome(code, printed, reason, bool(interrupts) and code != 0)


def _open_terminal() -> tuple[int, int]:
    """Return the two ends of a terminal of the size of this process's own.

    A command that writes to it shows its progress in place, and what it writes can be passed on as it is.
    """
    reader, writer = pty.openpty()
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # Line ends stay as they are: the terminal itself adds to them.
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stderr.fileno()))
    return reader, writer


def _pieces(reader: int) -> Iterator[str]:
    """Yield what is written to the other end: whole lines, and from terminals also parts of lines.

    Lines that may be sentences of a command stay whole.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    is_terminal = os.isatty(reader)
    begun = ""
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # A terminal's other end has been closed.
            data = b""
        *lines, begun = (begun + decoder.decode(data, final=not data)).split("\n")
        yield from (f"{line}\n" for line in lines)
        if begun and (not data or is_terminal and not _SENTENCE.startswith(begun[: len(_SENTENCE)])):
            yield begun
            begun = ""
        if not data:
            return


def _show_all(sentences: list[str], show: Callable[[str], None]) -> None:
    """Show the sentences that turn out not to be the last words of a command."""
    for sentence in sentences:
        show(sentence)
    sentences.clear()


@contextmanager
def _passing_on(process: subprocess.Popen[bytes], interrupts: list[int]) -> Iterator[None]:
    """Send the interrupts of this process, which only its main thread gets, to another one; note them."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        process.send_signal(signal.SIGINT)

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, pass_on) if is_main else None
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


# Progress


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shower() -> Callable[[str], None]:
    """Return what shows the lines of a run: in a notebook, a table that is renewed in place."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return _Cell() if getattr(shell, "kernel", None) is not None else _print


class _Cell:
    """The output of a notebook's cell: lines, and below them a table of the newest steps and what goes on."""

    def __init__(self) -> None:
        self._display = sys.modules["IPython"].display
        self._rows: deque[tuple[str, dict[str, str]]] = deque(maxlen=_SHOWN_STEPS)
        self._work = ""
        self._handle: Any = None

    def __call__(self, line: str) -> None:
        step, colon, values = line.removeprefix("step ").partition(": ")
        if not line.startswith("step ") or not colon:
            print(line, flush=True)
            return
        self._work = line if _WORK.match(line) else ""
        if not self._work:
            columns = (value.rpartition(" ") for value in values.split(", "))
            self._rows.append((step, {name: value for name, _, value in columns}))
        table = self._display.HTML(self._table())
        if self._handle is None:
            self._handle = self._display.display(table, display_id=True)
        else:
            self._handle.update(table)

    def _table(self) -> str:
        names = list(dict.fromkeys(name for _, row in self._rows for name in row))
        rows = [["step", *names]]
        rows += [[step, *(row.get(name, "") for name in names)] for step, row in self._rows]
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        work = f"<p>{html.escape(self._work)}</p>" if self._work else ""
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>{work}"
