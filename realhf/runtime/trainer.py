"""Trainer: the step loop. Every rank runs it; it is blind to the algorithm."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from realhf.data.batch import Batch
from realhf.data.loader import Loader, load_tokenizer
from realhf.dist.group import Pending, World
from realhf.engine.work import HostFunction
from realhf.errors import UserError
from realhf.graph import DataflowGraph, FunctionCall
from realhf.plan import CallPlan, ExecutionPlan
from realhf.runtime.actions import DATASET, compile_actions
from realhf.runtime.check import Program
from realhf.runtime.exchange import Exchange
from realhf.runtime.executor import Executor, HostContext, StepRecord
from realhf.runtime.models import ModelStore
from realhf.runtime.pictures import draw_pictures
from realhf.runtime.progress import Progress
from realhf.runtime.recorder import Recorder, merge_metrics

_EVAL_COLUMNS = ("prompt", "answer", "ground_truth", "completion", "score")


@dataclass(frozen=True)
class RunResult:
    """What a finished run returns on rank 0 (elsewhere everything is empty)."""

    metrics: list[dict[str, float]]
    summary: dict[str, Any]


class Trainer:
    """Runs a checked program on this world; rank 0 writes the run directory `out`, if there is one."""

    def __init__(
        self, program: Program, world: World, *, out: Path | None = None, quiet: bool = False
    ) -> None:
        self._program = program
        self._world = world
        self._out = out
        self._is_main = world.rank == 0
        experiment = program.experiment
        self._context = HostContext(
            load_tokenizer(experiment.tokenizer_dir()) if self._needs_tokenizer() else None
        )
        self._eval_rows: list[dict[str, Any]] = []
        self._loader = self._eval_batch = None
        if self._is_main:
            self._check_vocabulary()
            self._loader = self._make_loader(experiment.dataset, program.graph, experiment.group_size)
        plan, eval_actions = program.plan, program.eval_actions
        if program.eval_graph is not None:
            graph, plan = _with_record_of_answers(program.eval_graph, plan, self._keep_answers)
            eval_actions = compile_actions(graph, plan, program.roles, program.homes)
            if self._is_main:
                loader = self._make_loader(experiment.eval_dataset, graph, 1)
                self._eval_batch = loader.batch(first_prompt=0, num_prompts=len(loader))
        store = self._store = ModelStore(
            world, program.roles, program.homes, (*program.actions, *eval_actions), seed=experiment.seed
        )
        exchange = Exchange(world)
        self._executor = Executor(
            world, program.actions, plan, store, exchange, self._context, group_size=experiment.group_size
        )
        self._evaluator = None
        if program.eval_graph is not None:
            self._evaluator = Executor(
                world, eval_actions, plan, store, exchange, self._context, group_size=1
            )
        self._recorder = Recorder(out) if self._is_main and out is not None else None
        self._progress = Progress(program, quiet=quiet or not self._is_main)
        self._sent: Pending | None = None
        if self._is_main and out is not None:
            (out / "config.json").write_text(json.dumps(to_json(experiment), indent=2) + "\n")
            program.plan.save(out / "plan.yaml")

    def run(self) -> RunResult:
        experiment, started = self._program.experiment, time.time()
        history: list[dict[str, float]] = []
        scores: list[float] = []
        self._progress.start(self._loader, self._eval_batch)
        if self._evaluator is not None:
            scores.append(self._evaluate(step=0))
            self._record(0, {"eval/score": scores[-1]}, [])
        for step in range(1, experiment.steps + 1):
            metrics, records = self._step(step)
            last = step == experiment.steps
            if self._evaluator is not None and (
                last or (experiment.eval_every and step % experiment.eval_every == 0)
            ):
                scores.append(self._evaluate(step))
                metrics["eval/score"] = scores[-1]
            self._record(step, metrics, records)
            history.append(metrics)
            if last or (experiment.export_every and step % experiment.export_every == 0):
                self._export(step)
        summary = self._finish(history, scores, started) if self._is_main else {}
        self._world.control.barrier()
        return RunResult(history if self._is_main else [], summary)

    def _record(self, step: int, metrics: dict[str, float], records: list[StepRecord]) -> None:
        if self._recorder is not None:
            self._recorder.step(step, metrics, records)

    def _step(self, step: int) -> tuple[dict[str, float], list[StepRecord]]:
        """One training step; its metrics and all ranks' records on rank 0, empty elsewhere."""
        experiment, started = self._program.experiment, time.time()
        self._context.step = step
        batch = None
        if self._loader is not None:
            first = (step - 1) * experiment.batch_size
            batch = self._loader.batch(first_prompt=first, num_prompts=experiment.batch_size)
        records = self._collect(self._executor.run(batch))
        if not self._is_main:
            return {}, []
        metrics = merge_metrics(records)
        metrics["timing_s/step"] = time.time() - started
        metrics["perf/tokens_per_s"] = metrics.pop("perf/trained_tokens", 0.0) / metrics["timing_s/step"]
        self._progress.step(step, metrics)
        return metrics, records

    def _evaluate(self, step: int) -> float:
        """Greedy answers to all held-out prompts; the mean score on rank 0, 0 elsewhere."""
        assert self._evaluator is not None
        self._collect(self._evaluator.run(self._eval_batch))
        if not self._is_main:
            return 0.0
        score = sum(row["score"] for row in self._eval_rows) / len(self._eval_rows)
        if self._recorder is not None:
            self._recorder.evaluation(self._eval_rows)
        self._progress.evaluation(step, score)
        return score

    def _keep_answers(self, batch: Batch, context: HostContext) -> dict[str, Any]:
        """Host function at the end of an evaluation: keeps its rows on rank 0."""
        columns = {
            key: batch[key] if isinstance(batch[key], list) else batch[key].tolist() for key in batch.fields
        }
        self._eval_rows = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        return {}

    def _collect(self, record: StepRecord) -> list[StepRecord]:
        """All ranks' records on rank 0; the others send theirs and go on."""
        control = self._world.control
        if not self._is_main:
            if self._sent is not None:
                self._sent.wait()
            self._sent = control.send_json(asdict(record), [0])
            return []
        others = [StepRecord(**control.recv_json(rank)) for rank in range(1, self._world.size)]
        return [record, *others]

    def _export(self, step: int) -> None:
        """Trainable roles as Hugging Face directories: the first at hf/step_N, others in folders of their
        name below it.
        """
        if self._out is None:
            return
        trainable = [name for name, role in self._program.roles.items() if role.optimizer is not None]
        for i, name in enumerate(trainable):
            directory = self._out / "hf" / f"step_{step}"
            directory = directory / name if i else directory
            self._store.export(name, directory)
            if self._world.rank == self._program.homes[name].head(0):
                _copy_tokenizer(Path(self._program.experiment.tokenizer_dir()), directory)

    def _finish(self, history: list[dict[str, float]], scores: list[float], started: float) -> dict[str, Any]:
        roles = sorted(
            {name.split("/", 1)[1] for m in history for name in m if name.startswith("realloc_bytes/")}
        )
        steps = self._program.experiment.steps
        summary: dict[str, Any] = {
            "eval_first": scores[0] if scores else None,
            "eval_last": scores[-1] if scores else None,
            "steps": steps,
            "seconds": time.time() - started,
            "hf_dir": str(self._out / "hf" / f"step_{steps}") if self._out else None,
            "realloc": {
                role: {
                    "bytes_per_step": max(m.get(f"realloc_bytes/{role}", 0.0) for m in history),
                    "over_bound": max(m.get(f"realloc_over_bound/{role}", 1.0) for m in history),
                }
                for role in roles
            },
        }
        if self._recorder is not None and self._out is not None:
            self._recorder.summary(summary)
            draw_pictures(self._out)
        self._progress.finish(summary, self._out)
        return summary

    def _needs_tokenizer(self) -> bool:
        layouts = [
            self._program.plan[c.name].layout
            for g in (self._program.graph, self._program.eval_graph)
            if g
            for c in g.calls
            if c.kind == "host"
        ]
        return self._is_main or any(self._world.rank in layout for layout in layouts)

    def _check_vocabulary(self) -> None:
        largest = max(self._context.tokenizer.get_vocab().values())
        for name, role in self._program.roles.items():
            size = role.config().vocab_size
            if largest >= size:
                raise UserError(
                    f"tokenizer {self._program.experiment.tokenizer_dir()} has token ids up to {largest}, "
                    f"but the vocabulary of {name}.model {role.model} ends at {size - 1}"
                )

    def _make_loader(self, config: Any, graph: DataflowGraph, group_size: int) -> Loader:
        return Loader(
            config,
            keys=graph.inputs,
            tokenizer=self._context.tokenizer,
            group_size=group_size,
            seed=self._program.experiment.seed,
        )


def _with_record_of_answers(
    graph: DataflowGraph, plan: ExecutionPlan, function: Any
) -> tuple[DataflowGraph, ExecutionPlan]:
    """The evaluation's graph with a last call on rank 0 that receives all answers."""
    known = [*graph.inputs, *(key for call in graph.calls for key in call.outputs)]
    keys = tuple(key for key in _EVAL_COLUMNS if key in known)
    call = FunctionCall("eval_record", "host", keys, work=HostFunction(function))
    return graph.add(call), ExecutionPlan({**plan.calls, call.name: CallPlan(DATASET)}, plan.predicted)


def _copy_tokenizer(source: Path, target: Path) -> None:
    patterns = (
        "tokenizer*",
        "special_tokens_map.json",
        "chat_template*",
        "vocab*",
        "merges.txt",
        "generation_config.json",
    )
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def to_json(value: Any) -> Any:
    """A JSON form of configs: dataclasses as objects, functions and classes by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
