"""Evaluates a model without training."""

import json
import time
from pathlib import Path
from typing import Any

from realhf.dist import tags
from realhf.dist.world import World
from realhf.errors import UserError, warn
from realhf.experiment import Role
from realhf.runtime.compile.program import Program
from realhf.runtime.compile.warnings import check_vocabulary, warnings_of
from realhf.runtime.evaluations import Evaluations, SetRecord, main_metric, report
from realhf.runtime.execute.host_context import HostContext
from realhf.runtime.records.answer_files import AnswerFiles
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
    store = ModelStore(
        world, program.roles, program.homes, program.actions, seed=experiment.seed,
        offloaded=program.offloaded, links=program.links)  # fmt: skip
    evaluations.start(store)
    mine = evaluations.run()
    by_rank = _gather(world, mine)
    evaluations.wait()
    if world.rank != 0:
        return {}
    result = report(program.evaluations, by_rank)
    sets = {
        one.name: {"path": str(one.evaluation.dataset.path), "prompts": prompts[one.name],
                   "samples": one.evaluation.samples}
        for one in program.evaluations}  # fmt: skip
    summary = {
        "model": evaluated_model(next(iter(program.roles.values()))), "sets": sets,
        "metrics": dict(result.metrics),
        "eval_metric": main_metric(list(result.metrics), program.evaluations),
        "seconds": time.time() - started,
    }  # fmt: skip
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
        world.control.send_json([one.to_json() for one in mine], [0], tag=tags.RECORD).wait()
        return []
    theirs = [world.control.recv_json(rank, tag=tags.RECORD) for rank in range(1, world.size)]
    return [mine, *([SetRecord.from_json(one) for one in of_sets] for of_sets in theirs)]
