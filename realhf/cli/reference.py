"""`realhf reference`: writes the reference's log-probs of preference pairs into their rows, once and for all.

Training on these rows needs no reference. Free of torch.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from realhf.cli.experiment_file import add_experiment_arguments, read_experiment
from realhf.cli.launch import Job, is_worker, launch
from realhf.cli.program import compile_experiment
from realhf.data.memory_rows import json_form
from realhf.data.rows import DatasetRows
from realhf.errors import UserError, naming
from realhf.experiment import Experiment
from realhf.runtime.compile.actions import parameter_specs
from realhf.runtime.compile.program import Program
from realhf.user_input.files import read_json_lines
from realhf.user_input.units import format_bytes

HELP = "compute the log-probs of the reference once, and write them into rows of pairs"
EXAMPLES = ("realhf reference dpo.py -o pairs_with_reference.jsonl --nproc 2",)
_TIMEOUT_SECONDS = 600.0
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf reference`."""
    add_experiment_arguments(parser)
    add = parser.add_argument
    text = "JSONL file to write: the rows with the columns ref_chosen_logps and ref_rejected_logps"
    add("-o", "--output", metavar="ROWS", help=text)
    add("--nproc", type=int, help="local workers; default: as many as the plan uses, else 1")
    add("--plan", help="plan file or shipped name; default: the call split over all ranks by dp")


def main(options: Namespace, words: list[str]) -> int:
    """Compute the log-probs, write the rows and return the exit code."""
    experiment = read_experiment(options, words, weights=True)
    if options.output is None:
        raise UserError("--output is missing: name the JSONL file to write")
    target = Path(options.output)
    sums = target.with_name(f".{target.name}.sums")
    if target.exists() and not is_worker():
        raise UserError(f"--output {target} exists: name a new file")
    if not target.parent.is_dir():
        raise UserError(f"--output {target}: there is no directory {target.parent}")
    make = getattr(experiment, "reference_pass", None)
    if make is None:
        kind = type(experiment).__name__
        raise UserError(f"{options.experiment}: {kind} does not learn from pairs, as DPO does")
    with naming(options.experiment):
        reference = make(str(sums))
    program, num_ranks = compile_experiment(reference, options, evaluates=True)
    if is_worker() or num_ranks == 1:
        from realhf.cli.worker import compute

        job = Job(program, "reference", None, _TIMEOUT_SECONDS, traceback=options.traceback,
                  started_in=options.started_in)
        code = compute(job)
        if code or os.environ.get("RANK", "0") != "0" or num_ranks > 1:
            return code
    else:
        code = launch(options.argv, num_ranks, directory=options.started_in)
    try:
        if not code:
            print(f"realhf: {_write(experiment, sums, target, program)}", file=sys.stderr)
    finally:
        sums.unlink(missing_ok=True)
    return code


def _write(experiment: Experiment, sums: Path, target: Path, program: Program) -> str:
    """Write the rows with the sums, in the order of the rows; return what has been written, in words."""
    rows = DatasetRows(experiment.dataset)
    computed = {values.pop("row"): values for _, values in read_json_lines(sums)}
    part = target.with_name(f".{target.name}.part")
    added = 0
    with part.open("w") as file:
        for number in sorted(computed):
            row = rows[number]
            assert row is not None, "rows that the map function leaves out have no sums"
            line = json.dumps(json_form({**row, **computed[number]}, as_text=True))
            added += len(line) - len(json.dumps(json_form(row, as_text=True)))
            file.write(f"{line}\n")
    part.rename(target)
    role = program.roles["ref"]
    weights = parameter_specs(program.roles)["ref"].numel * _DTYPE_BYTES[role.weights_dtype]
    left_out = len(rows) - len(computed)
    without = f" ({left_out} rows without a sum are left out)" if left_out else ""
    return (
        f"wrote {len(computed)} pairs to {target}{without}: the sums take {format_bytes(added)}; with "
        f"DPOLoss(precomputed_ref=True) training does not hold the reference's {format_bytes(weights)} of "
        "weights")
