"""`realhf check`: finds faults of an experiment and a plan without running it. Free of torch."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from realhf.calls import ForwardFunction, Generate, TrainFunction, Training, learning_rate
from realhf.cli.dry_run import try_out
from realhf.cli.experiment_file import add_experiment_arguments, read_experiment
from realhf.cli.plan import this_machine
from realhf.cli.planning_problem import expected_turns, model_role, problem_of
from realhf.cli.program import add_plan_argument, compile_experiment, prove_here
from realhf.cluster import Cluster
from realhf.environments.rollouts import EnvironmentTurnSourceFactory
from realhf.errors import UserError, naming, warn
from realhf.experiment import Role, optimizer_steps
from realhf.graph import FunctionCall, Work
from realhf.layout import even_split
from realhf.planner.memory_account import MemoryCheck, require_fit
from realhf.planner.shard import training_bytes, weights_bytes
from realhf.runtime.compile.actions import adapters_of, parameter_specs
from realhf.runtime.compile.checks import language_models
from realhf.runtime.compile.program import Program
from realhf.user_input.units import format_bytes

HELP = "find what is wrong with an experiment and a plan, without running it"
EXAMPLES = (
    "realhf check examples/grpo.py --plan grpo-4 --steps 50",
    "realhf check examples/ppo_7b.py --cluster h100-2x8")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf check`."""
    add_experiment_arguments(parser)
    add_plan_argument(parser)
    add = parser.add_argument
    add("--nproc", type=int, help="ranks to check against; default: as many as the plan uses")
    add("--cluster", help="cluster file or shipped name: its devices are the ranks")
    add("--json", action="store_true", help="print one JSON document")


def main(options: Namespace, words: list[str]) -> int:
    """Check the experiment, print the result and return the exit code."""
    experiment = read_experiment(options, words)
    cluster = Cluster.load(options.cluster) if options.cluster is not None else None
    num_devices = cluster.num_devices if cluster is not None and options.nproc is None else None
    program, num_ranks = compile_experiment(experiment, options, num_devices)
    with naming(options.experiment):
        trial = try_out(program)
        counts = derived_counts(program, num_rows=trial.num_rows)
        for sentence in (*trial.warnings, *uneven_splits(counts), *uncounted_turns(program)):
            warn(sentence)
        kernels = kernels_on_cuda(program) if device_type(cluster) == "cuda" else {}
    unproved = ""
    with naming(options.experiment):
        problem = None if cluster is None else problem_of(experiment, cluster)
    with naming(f"plan {options.plan}" if options.plan else options.experiment):
        if problem is not None:
            proof: MemoryCheck | None = require_fit(problem, program.plan, allow_tight=True)
        else:
            proof, unproved = prove_here(experiment, program)
    if options.json:
        homes = {role: str(layout) for role, layout in program.homes.items()}
        answer = {"ranks": num_ranks, "calls": program.plan.to_dict()["calls"], "homes": homes,
                  "counts": counts}
        if kernels:
            answer["kernels"] = kernels
        if trial.first_prompt is not None:
            answer["first_prompt"] = trial.first_prompt._asdict()
        if trial.first_learned is not None:
            answer["first_learned"] = trial.first_learned._asdict()
        if trial.played is not None:
            answer["played"] = trial.played._asdict()
        print(json.dumps(answer | ({"memory": proof.document()} if proof is not None else {})))
        return 0
    print(f"{options.experiment} is sound on {num_ranks} rank{'s' * (num_ranks != 1)}:")
    for call in program.graph.order:
        where = program.plan[call.name]
        columns = f"{call.name:<18} {call.kind:<10} {call.role or '-':<8} {where.layout}"
        print("  ".join(("", columns, *where.options)))
    print("\n".join(sentences(counts)))
    for name, choices in kernels.items():
        print(f"kernels of {name}, by the packages of this machine:")
        print("\n".join(f"  {choice['work']}: {choice['kernels']}{because(choice['reason'])}"
                        for choice in choices))
    for shown in (trial.first_prompt, trial.first_learned, trial.played):
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


def device_type(cluster: Cluster | None) -> str:
    """Return the type of the devices of a cluster, or of this machine if there is none."""
    try:
        return (cluster or this_machine()).device_type
    except UserError:  # GPUs that no file describes.
        return "cuda"


def kernels_on_cuda(program: Program) -> dict[str, list[dict[str, str]]]:
    """Return, for each role, what computes its work on a GPU with the packages of this machine, and why
    nothing else does. Those of the cluster may differ, so that it is no fault if nothing does."""
    import torch

    from realhf.attention.choose import installed_for, kernel_choices

    installed = installed_for(torch.device("cuda", 0))
    found: dict[str, list[dict[str, str]]] = {}
    for name, role in program.roles.items():
        generating = [call for call in program.graph.of_kind("generate") if call.role == name]
        choices = found[name] = []
        if role.engine != "native":
            what = "other calls than generate" if role.engine == "megatron" else "all calls"
            library = {"megatron": "Megatron-Core, with our attention", "transformers": "transformers"}
            choices.append({"work": what, "kernels": library[role.engine], "reason": f"engine {role.engine}"})
        if role.engine != "transformers":
            splits = any(program.plan[call.name].layout.tp > 1 for call in generating)
            int8 = any(call.work_as(Generate).generation_weights == "int8" for call in generating)
            try:
                choices += [choice._asdict() for choice in kernel_choices(
                    role.config(), getattr(torch, role.weights_dtype), installed, generates=bool(generating),
                    splits_logits=splits, int8=int8)]
            except UserError as error:
                choices.append({"work": "attention", "kernels": "none", "reason": str(error)})
    return found


def because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def derived_counts(program: Program, *, num_rows: int | None) -> dict[str, Any]:
    """Return the counts of a run as JSON; `num_rows` are those of the dataset, None if they are not known.

    Ranges are [least, most]. A step program is counted as if its filters let all samples pass.
    """
    experiment = program.experiment
    prompts = experiment.steps * experiment.batch_size
    return {
        "steps": experiment.steps,
        "prompts_per_step": experiment.batch_size,
        "samples_per_prompt": experiment.group_size,
        "prompts_are": "prompts" if language_models(program.roles) else "rows",
        "samples_per_step": experiment.batch_size * experiment.group_size,
        "prompts": prompts,
        "rows": num_rows,
        "epochs": None if num_rows is None else prompts / num_rows,
        "max_lag": experiment.max_lag,
        "rounds": experiment.num_rounds,
        "parts": {name: list(calls) for name, calls in experiment.parts(program.graph).items()},
        "own_step_program": experiment.has_own_program,
        "calls": {call.name: _of_call(program, call) for call in program.graph.order},
        "roles": {name: _of_role(program, name, role) for name, role in program.roles.items()},
        "evaluations": _num_evaluations(program),
        "exports": _times(experiment.export_every, experiment.steps),
        "checkpoint_every": experiment.checkpoint_every,
        "checkpoints": _num_checkpoints(program)}


def uncounted_turns(program: Program) -> Iterator[str]:
    """Yield a warning if rollouts have turns that plans do not count; one rank needs no plan."""
    if program.num_ranks == 1:
        return
    in_turns = [
        call.name for call in program.graph.order
        if isinstance(call.work, Generate) and call.work.environment is not None]
    if in_turns and expected_turns(program.experiment, program.graph) is None:
        yield (
            f"call {in_turns[0]} has an environment, and expected.turns is None: plans count one turn of "
            "each sample and no waits; set expected.turns, expected.env_seconds and "
            "expected.observation_tokens, or expected.lengths_from to a run that has them")


def uneven_splits(counts: dict[str, Any]) -> list[str]:
    """Return a warning for each call whose samples do not divide evenly over mini-batches or ranks."""
    warnings = []
    for name, call in counts["calls"].items():
        unit = "samples" if call["samples_together"] == 1 else f"groups of {call['samples_together']} samples"
        least, most = call["samples_per_minibatch"]
        if set(call["prompts_per_run"]) != {counts["prompts_per_step"]}:
            continue  # A step program decides how many samples it has.
        if least != most:
            what = f"{counts['prompts_per_step']} prompts do not divide by {call['minibatches']} mini-batches"
            warnings.append(f"call {name}: {what}, which have {least} or {most} samples")
        elif call["samples_per_rank"][0] != call["samples_per_rank"][1]:
            count = most // call["samples_together"]
            ranks = " or ".join(map(str, call["samples_per_rank"]))
            of = " of a mini-batch" if call["minibatches"] > 1 else ""
            what = f"{count} {unit}{of} do not divide by dp {call['dp']}"
            warnings.append(f"call {name}: {what}, so that a rank has about {ranks} samples")
    return warnings


def sentences(counts: dict[str, Any]) -> Iterator[str]:
    """Yield the counts in words, line by line."""
    noun = counts["prompts_are"].removesuffix("s")
    prompts = _number(counts["prompts_per_step"], noun)
    samples = counts["samples_per_step"]
    if noun == "prompt" or counts["samples_per_prompt"] > 1:
        prompts += f" x {counts['samples_per_prompt']} = {samples} samples"
    yield f"a step: {prompts}"
    epochs = "" if counts["epochs"] is None else f", {counts['epochs']:.3g} epochs of {counts['rows']} rows"
    yield f"the run: {_number(counts['steps'], 'step')}, {_number(counts['prompts'], noun)}{epochs}"
    if counts["max_lag"]:
        rounds = _number(counts["rounds"], "round")
        yield f"lag: at most {_number(counts['max_lag'], 'update')}, answers in {rounds}"
    if len(counts["parts"]) > 1 or counts["own_step_program"]:
        described = " of its own step program" if counts["own_step_program"] else ""
        parts = (f"{name} ({', '.join(calls)})" for name, calls in counts["parts"].items())
        yield f"parts{described}: {'; '.join(parts)}"
    for name, call in counts["calls"].items():
        yield f"  {name:<18} {_call_words(call)}"
    for name, role in counts["roles"].items():
        yield f"  {name:<18} {_role_words(role)}"
    yield f"evaluations: {counts['evaluations']}; exports: {counts['exports']}; checkpoints: {_saved(counts)}"


def _of_call(program: Program, call: FunctionCall) -> dict[str, Any]:
    experiment = program.experiment
    plan = program.plan[call.name]
    work = call.work_as(Work)
    together = experiment.group_size if isinstance(work, Generate) or work.group_size > 1 else 1
    minibatches = work.num_minibatches
    of_part = next(program.counts[part] for part, calls in experiment.parts(program.graph).items()
                   if call.name in calls)
    least, most = of_part.fewest_prompts, of_part.most_prompts
    bounds = (even_split(prompts, minibatches, i) for prompts in (least, most) for i in range(minibatches))
    sizes = [(stop - start) * experiment.group_size for start, stop in bounds]
    units = [size // together for size in (min(sizes), max(sizes))]
    dp = plan.layout.dp
    counts: dict[str, Any] = {
        "samples": most * experiment.group_size,
        "prompts_per_run": [least, most],
        "runs_per_step": of_part.runs / experiment.steps,
        "runs_are_exact": of_part.is_exact,
        "samples_together": together,
        "dp": dp,
        "minibatches": minibatches,
        "samples_per_minibatch": [min(sizes), max(sizes)],
        "samples_per_rank": [units[0] // dp * together, -(-units[1] // dp) * together]}
    if isinstance(work, Training):
        counts |= {"epochs": work.epochs, "optimizer_steps_per_run": work.optimizer_steps}
        counts["optimizer_steps"] = work.optimizer_steps * of_part.runs
    if call.kind in ("train_step", "forward"):
        counts["micro_batch_tokens"] = plan.micro_batch_tokens
        counts["tokens_are"] = "rows" if isinstance(work, ForwardFunction | TrainFunction) else "tokens"
    if isinstance(work, Generate):
        counts |= {"max_rows": work.max_rows, "max_new_tokens": work.sampling.max_new_tokens}
        if isinstance(work.environment, EnvironmentTurnSourceFactory):
            environment = work.environment.environment
            counts |= {"max_turns": environment.max_turns, "max_tokens": environment.max_tokens}
    return counts


def _of_role(program: Program, name: str, role: Role) -> dict[str, Any]:
    """Return the counts of a role with its settings filled in."""
    specs = parameter_specs(program.roles)
    trained = specs[adapters_of(name)] if role.lora is not None else specs[name]
    counts: dict[str, Any] = {"dtype": role.dtype, "parameters": specs[name].numel}
    counts |= _memory(program, name, role)
    if role.optimizer is None:
        return counts
    count = optimizer_steps(program.graph, name, program.num_runs)
    last = max(0, count - 1)
    edge_steps = {0, min(last, max(0, role.optimizer.warmup_steps - 1))}
    rates = [learning_rate(role.optimizer, step) for step in sorted(edge_steps)]
    return counts | {
        "trained_parameters": sum(param.numel for param in trained.params if param.trainable),
        "optimizer_steps": count,
        "schedule": role.optimizer.schedule,
        "warmup_steps": role.optimizer.warmup_steps,
        "lr_start": rates[0],
        "lr_peak": max(rates),
        "lr_end": learning_rate(role.optimizer, max(0, count - 1)),
    }


def _memory(program: Program, name: str, role: Role) -> dict[str, Any]:
    """Return the most bytes of a rank for weights and for training; nothing if the sizes are not known."""
    try:
        model = model_role(name, role)
    except ValueError:
        return {}
    strategy = program.homes[name].strategy
    stages = range(strategy.pp)
    trains = [training_bytes(model, strategy, stage) for stage in stages] if model.trainable else [0]
    weights = max(weights_bytes(model, strategy, stage) for stage in stages)
    return {"weights_bytes_per_rank": weights, "training_bytes_per_rank": max(trains)}


def _times(period: int, steps: int) -> int:
    """Return how often a thing happens that is due after every `period` steps (0: never) and the last one."""
    return 1 if not period else -(-steps // period)


def _num_checkpoints(program: Program) -> int | None:
    """Return the number of checkpoints of the run; None if the clock decides."""
    period, seconds = program.experiment.checkpoint_period()
    if seconds:
        return None
    return _times(period, program.experiment.steps) if period else 0


def _num_evaluations(program: Program) -> int:
    """Return the number of evaluations of the run."""
    experiment = program.experiment
    if not program.evaluations:
        return 0
    return _times(experiment.eval_every, experiment.steps) + experiment.eval_at_start


def _call_words(call: dict[str, Any]) -> str:
    times = call["runs_per_step"]
    if not times:
        return "never runs"
    fewest, most = call["prompts_per_run"]
    words = [f"{'' if fewest == most else 'at most '}{call['samples']} samples"]
    if times != 1:
        about = "" if call["runs_are_exact"] else "about "
        words.append(f"runs {about}{times:.3g} times per step")
    if call["minibatches"] > 1:
        words.append(f"{call['minibatches']} mini-batches of {_range(call['samples_per_minibatch'])}")
    if call["dp"] > 1:
        words.append(f"{_range(call['samples_per_rank'])} on each of {call['dp']} data-parallel ranks")
    if "optimizer_steps" in call:
        words.append(f"{_number(call['optimizer_steps_per_run'], 'optimizer step')} per "
                     + ("step" if times == 1 else "run"))
    if "micro_batch_tokens" in call:
        words.append(f"micro-batches of up to {call['micro_batch_tokens']} {call['tokens_are']}")
    if "max_rows" in call:
        words.append(f"up to {call['max_rows']} at once on a rank")
        new = f"{call['max_new_tokens']} new tokens"
        turns = call.get("max_turns")
        words.append(f"{new} each" if turns is None else f"at most {_number(turns, 'turn')} of {new}")
    if call.get("max_tokens") is not None:
        words.append(f"{call['max_tokens']} tokens with those of the environment")
    return ", ".join(words)


def _role_words(role: dict[str, Any]) -> str:
    words = [f"{role['dtype']}, {role['parameters']:,} parameters"]
    if "weights_bytes_per_rank" in role:
        words.append(f"{format_bytes(role['weights_bytes_per_rank'])} of weights on a rank")
    if "optimizer_steps" not in role:
        return ", ".join((*words, "frozen"))
    if role["trained_parameters"] != role["parameters"]:
        words.append(f"of which {role['trained_parameters']:,} are trained")
    if role.get("training_bytes_per_rank"):
        words.append(f"{format_bytes(role['training_bytes_per_rank'])} of gradients and optimizer")
    words.append(_number(role["optimizer_steps"], "optimizer step"))
    named = (("at first", "lr_start"), ("at most", "lr_peak"), ("at last", "lr_end"))
    rates = [f"{role[key]:.3g} {when}" for when, key in named]
    is_flat = role["lr_start"] == role["lr_peak"] == role["lr_end"]
    words.append(f"learning rate {role['lr_peak']:.3g}" if is_flat else f"learning rate {', '.join(rates)}")
    return ", ".join(words)


def _saved(counts: dict[str, Any]) -> str:
    every = counts["checkpoint_every"]
    return f"every {every}, and the last" if counts["checkpoints"] is None else str(counts["checkpoints"])


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _range(ends: list[int]) -> str:
    least, most = ends
    return str(least) if least == most else f"{least} to {most}"
