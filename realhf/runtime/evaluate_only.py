"""Evaluates a model without training."""

import json
import time
from pathlib import Path
from typing import Any

from realhf.distributed import tags
from realhf.distributed.world import World
from realhf.errors import UserError, warn
from realhf.experiment import Role
from realhf.runtime.compile.program import Program
from realhf.runtime.compile.warnings import check_vocabulary, warnings_of
from realhf.runtime.evaluations import Evaluations, SetRecord, main_metric, report
from realhf.runtime.execute.host_context import HostContext
from realhf.runtime.records.progress import Progress
from realhf.runtime.records.recorder import AnswerFiles
from realhf.runtime.weights.model_store import ModelStore


def evaluate(program: Program, world: World, *, out: Path | None = None) -> dict[str, Any]:
    """Evaluate all sets once; every rank calls this.

    Return the summary on rank 0, which writes it to `out` with the answers, and an empty one elsewhere.
    """
    started = time.time()
    experiment = program.experiment
    context = HostContext(experiment.tokenizer_dir())
    evaluations = Evaluations(program, world, context)
    if world.rank == 0:
        largest = max(context.tokenizer.get_vocab().values())
        check_vocabulary(program.roles, largest, tokenizer=context.tokenizer_dir)
        for sentence in warnings_of(program, None, evaluations.loaders):
            warn(sentence)
    prompts = evaluations.count_prompts()
    store = ModelStore(world, program)
    evaluations.start(store)
    progress = Progress(program, world.activity) if world.rank == 0 else None
    if progress is not None:
        progress.watch()
    try:
        mine = evaluations.run()
        by_rank = _gather(world, mine)
        evaluations.wait()
    finally:
        if progress is not None:
            progress.stop()
    if world.rank != 0:
        return {}
    result = report(program.evaluations, by_rank)
    for sentence in result.faults:
        warn(sentence)
    sets = {
        name: {"path": str(evaluation.dataset.path), "prompts": prompts[name], "samples": evaluation.samples}
        for name, evaluation in ((eval_set.name, eval_set.evaluation) for eval_set in program.evaluations)}
    summary = {
        "model": evaluated_model(next(iter(program.roles.values()))), "sets": sets,
        "metrics": dict(result.metrics),
        "eval_metric": main_metric(list(result.metrics), program.evaluations),
        "seconds": time.time() - started}
    if out is not None:
        try:
            AnswerFiles(out).write(0, result.answers)
            program.plan.save(out / "plan.yaml")
            (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from error
    return summary


def evaluated_model(role: Role) -> str:
    """Return the model that is evaluated: that of the adapters, if the role has some."""
    return role.model if role.lora is None or role.lora.adapter is None else role.lora.adapter


def _gather(world: World, mine: list[SetRecord]) -> list[list[SetRecord]]:
    """Return the records of all ranks on rank 0."""
    if world.rank != 0:
        world.control.send_json([record.to_json() for record in mine], [0], tag=tags.RECORD).wait()
        return []
    theirs = [world.control.recv_json(rank, tag=tags.RECORD) for rank in range(1, world.size)]
    return [mine, *([SetRecord.from_json(document) for document in documents] for documents in theirs)]
