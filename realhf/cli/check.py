"""`realhf check`: finds faults of an experiment and a plan without running it. Free of torch."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.console import Console

from realhf.cli.derived_counts import derived_counts, sentences, uneven_splits
from realhf.cli.dry_run import try_out
from realhf.cli.experiment_file import add_plan_option, compile_experiment
from realhf.cli.memory_prediction import prove_here
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.errors import naming, warn
from realhf.experiment import Experiment
from realhf.planner.memory_account import MemoryCheck, require_fit
from realhf.user_input.units import format_bytes

HELP = "find what is wrong with an experiment and a plan, without running it"
EXAMPLES = (
    "realhf check examples/grpo.py --plan grpo-4 --steps 50",
    "realhf check examples/ppo_7b.py --cluster h100-2x8")


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of `realhf check`."""
    add_plan_option(parser)
    add = parser.add_argument
    add("--nproc", type=int, help="ranks to check against; default: as many as the plan uses")
    add("--cluster", help="cluster file or shipped name: its devices are the ranks")
    add("--json", action="store_true", help="print one JSON document")


def run(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    """Check the experiment, print the result and return the exit code."""
    cluster = Cluster.load(options.cluster) if options.cluster is not None else None
    num_devices = cluster.num_devices if cluster is not None and options.nproc is None else None
    program, num_ranks = compile_experiment(experiment, options, num_devices)
    with naming(options.experiment):
        trial = try_out(program)
        counts = derived_counts(program, num_rows=trial.num_rows)
        for sentence in (*trial.warnings, *uneven_splits(counts)):
            warn(sentence)
    unproved = ""
    with naming(f"plan {options.plan}" if options.plan else options.experiment):
        if cluster is not None:
            proof: MemoryCheck | None = require_fit(
                problem_of(experiment, cluster), program.plan, allow_tight=True)
        else:
            proof, unproved = prove_here(experiment, program)
    if options.json:
        homes = {role: str(layout) for role, layout in program.homes.items()}
        answer = {"ranks": num_ranks, "calls": program.plan.to_dict()["calls"], "homes": homes,
                  "counts": counts}
        if trial.first_prompt is not None:
            answer["first_prompt"] = trial.first_prompt._asdict()
        if trial.first_learned is not None:
            answer["first_learned"] = trial.first_learned._asdict()
        print(json.dumps(answer | ({"memory": proof.document()} if proof is not None else {})))
        return 0
    print(f"{options.experiment} is sound on {num_ranks} rank{'s' * (num_ranks != 1)}:")
    for call in program.graph.order:
        where = program.plan[call.name]
        columns = f"{call.name:<18} {call.kind:<10} {call.role or '-':<8} {where.layout}"
        print("  ".join(("", columns, *where.options)))
    print("\n".join(sentences(counts)))
    for shown in (trial.first_prompt, trial.first_learned):
        if shown is not None:
            print(shown)
    if unproved:
        print(f"memory was not checked: {unproved}")
    if proof is not None:
        peak = proof.fullest
        has = f"{format_bytes(peak.num_bytes)} of {format_bytes(peak.available)} available"
        place = "" if cluster is not None else " on this machine"
        fits = f"it fits{place}, but is tight" if proof.is_tight else f"it fits{place}"
        print(f"{fits}: the fullest device, rank {peak.rank}, needs {has} while {peak.call} runs")
    if proof is not None and cluster is not None:
        Console().print(proof.render(), soft_wrap=True)
    return 0
