"""Translates an Experiment into the planner's Problem. Free of torch."""

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from realhf.calls import (
    ForwardFunction,
    Generate,
    HostFunction,
    LogProbs,
    ModelWork,
    TopLogProbs,
    TrainFunction,
    TrainStep,
    longest_response,
)
from realhf.checkpoint.names import METRICS
from realhf.cluster import Cluster
from realhf.data.dataset import (
    IS_CHOSEN,
    START_IDS,
    ArrayDataset,
    DatasetConfig,
    DatasetMixture,
    reads_pairs,
)
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.row_files import is_of_hub
from realhf.data.rows import load_rows
from realhf.data.sequence_tokens import Oddities
from realhf.data.tokenized import RowCounts, RowTokenizer, texts_of
from realhf.environments.rollouts import EnvironmentTurnSourceFactory
from realhf.execution_plan import ExecutionPlan, home_layouts
from realhf.experiment import Evaluation, Expected, Experiment, Role, named_sets
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.lora import adapter_spec
from realhf.models.model_config import TransformersConfig
from realhf.planner.lengths import USUALLY_ALIKE, Lengths, alike_share, geometric, long_tail, observed
from realhf.planner.problem import ModelRole, PlannedCall, Problem, Workload
from realhf.planner.slices import BUSY, QuestionSeconds, SliceTimes
from realhf.planner.slowest_replica import ScoringTime
from realhf.planner.turns import Turns
from realhf.rewards.scoring import RewardCall
from realhf.runtime.compile.actions import complete_plan
from realhf.runtime.compile.checks import check_graph, check_numbers, check_plan
from realhf.runtime.compile.eval_program import evaluation_graphs, legal_names
from realhf.runtime.compile.step_trial import checked_parts
from realhf.runtime.records.rollout_file import ROLLOUTS
from realhf.user_input.field_types import require
from realhf.user_input.files import read_json_lines

_ROWS = 1000  # Rows of the dataset whose lengths are measured.
_ANSWERS = 5000  # The newest answers of a run whose lengths are read.


def sequence_lengths(experiment: Experiment, limit: int, *, turns: Turns | None = None) -> dict[str, Any]:
    """Return the lengths as fields of a Workload: as expected, else measured or at the limit.

    `limit` is the most tokens of a response; 0 if none is generated. With `turns`, the lengths of responses
    follow from them. Raises ValueErrors that name the field.
    """
    expected = experiment.expected
    if not experiment.tokenizer_dir():  # There are no sequences, and a row counts as one token.
        return {"prompt_tokens": 1.0, "response_tokens": 0.0, "max_new_tokens": 0}
    if turns is not None:
        whole = turns.whole(limit)
        mean = expected.prompt_tokens
        measured = _measured(experiment, limit) if mean is None else None
        alike = expected.length_correlation
        if alike is None and expected.lengths_from is not None:
            alike = _alike_in(_rollouts_of(expected.lengths_from))
        return _fields(expected, measured, whole, whole.mean, limit, alike) | {"turns": turns}
    _check(expected, limit)
    measured = None
    responses = None
    alike = expected.length_correlation
    if expected.lengths_from is not None:
        responses, alike_in_run = _lengths_of_run(expected.lengths_from, limit)
        alike = alike_in_run if alike is None else alike
    response = expected.response_tokens or (responses.mean if responses is not None else limit or None)
    if expected.prompt_tokens is None or response is None:
        measured = _measured(experiment, limit)
        if response is None:
            responses = measured.completions
            alike = measured.completions_alike if alike is None else alike
            response = responses.mean
    if expected.response_p99 is not None:
        try:
            responses = long_tail(response, expected.response_p99, limit)
        except ValueError as error:
            raise ValueError(f"expected.response_tokens and expected.response_p99: {error}") from error
        response = responses.mean
    return _fields(expected, measured, responses, response, limit, alike)


def _fields(
    expected: Expected, measured: "_Measured | None", responses: Lengths | None, response: float, limit: int,
    alike: float | None,
) -> dict[str, Any]:
    """Return these lengths as fields of a Workload; those of the prompts may be given by `expected`."""
    prompts = measured.prompts if measured is not None and expected.prompt_tokens is None else None
    common = expected.common_prompt_tokens
    if common is None:
        common = measured.common_prompt_tokens if measured is not None and prompts is not None else 0
    prompt = float(expected.prompt_tokens or (prompts.mean if prompts is not None else 0))
    longest_prompt = expected.longest_prompt_tokens or (0 if prompts is None else prompts.limit)
    return {
        "prompt_tokens": prompt, "response_tokens": float(response),
        "max_new_tokens": limit or (round(response) if responses is None else responses.limit),
        "prompt_lengths": prompts, "response_lengths": responses,
        "alike": USUALLY_ALIKE if alike is None else alike,
        "longest_prompt_tokens": float(longest_prompt), "common_prompt_tokens": float(min(common, prompt))}


def _check(expected: Expected, limit: int) -> None:
    """Raise a ValueError that names the field if an expected length is impossible."""
    for name in ("prompt_tokens", "longest_prompt_tokens", "response_tokens", "response_p99"):
        value = getattr(expected, name)
        require(value is None or value >= 1, f"expected.{name}", value, "be at least 1")
    alike = expected.length_correlation
    require(alike is None or 0 <= alike <= 1, "expected.length_correlation", alike, "be from 0 to 1")
    mean, longest = expected.prompt_tokens, expected.longest_prompt_tokens
    if longest is not None:
        require(
            mean is not None and longest >= mean, "expected.longest_prompt_tokens", longest,
            "be at least expected.prompt_tokens")
    common = expected.common_prompt_tokens
    require(common is None or common >= 0, "expected.common_prompt_tokens", common, "be at least 0")
    if common is not None and mean is not None:
        require(common <= mean, "expected.common_prompt_tokens", common, "be at most expected.prompt_tokens")
    response, p99 = expected.response_tokens, expected.response_p99
    if response is not None and limit and response > limit:
        raise ValueError(f"expected.response_tokens is {response}: sampling.max_new_tokens allows {limit}")
    if expected.lengths_from is not None:
        require(bool(limit), "expected.lengths_from", expected.lengths_from, "be None: nothing is generated")
        if given := [f"expected.{n}" for n in ("response_tokens", "response_p99") if getattr(expected, n)]:
            raise ValueError(f"expected.lengths_from has the lengths of a run: leave out {given[0]}")
    if p99 is not None:
        require(
            response is not None and response < p99 < limit, "expected.response_p99", p99,
            f"be above expected.response_tokens and below sampling.max_new_tokens ({limit})")


def _lengths_of_run(run: str, limit: int) -> tuple[Lengths, float | None]:
    """Return the lengths of the newest answers that a run has kept, cut off at the limit, and how much those
    of one prompt resemble each other (None: no two prompts have several answers).

    Raises ValueError if there are none, or if answers were cut off before the limit.
    """
    answers = _rollouts_of(run)
    lengths = [answer["length"] for answer in answers]
    cut = max((a["length"] for a in answers if not a.get("finished", True)), default=limit)
    if cut < limit:
        raise ValueError(
            f"expected.lengths_from is {run!r}: its answers were cut off at {cut} tokens, so it does not say "
            f"how long they get with sampling.max_new_tokens {limit}")
    return observed(lengths, limit), _alike_in(answers)


def _rollouts_of(run: str) -> list[dict[str, Any]]:
    """Return the newest answers that a run has kept, those with a length. Raises ValueError if none has."""
    path = Path(run) / ROLLOUTS
    if not path.is_file():
        raise ValueError(f"expected.lengths_from is {run!r}: there is no {path}")
    newest = deque((row for _, row in read_json_lines(path)), _ANSWERS)
    if not (answers := [answer for answer in newest if "length" in answer]):
        raise ValueError(f"expected.lengths_from is {run!r}: {path} has no answers")
    return answers


def _alike_in(answers: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how much the answers to one prompt resemble each other in length; None: no two prompts have
    several."""
    prompts: dict[Any, list[int]] = {}
    for answer in answers:
        if "prompt_number" in answer:
            prompts.setdefault((answer.get("step"), answer["prompt_number"]), []).append(answer["length"])
    groups = [group for group in prompts.values() if len(group) > 1]
    return alike_share(groups) if len(groups) > 1 else None


_TURN_FIELDS = ("turns", "env_seconds", "observation_tokens")


def expected_turns(experiment: Experiment, graph: DataflowGraph) -> Turns | None:
    """Return the turns of the experiment's rollouts, as expected or as measured in a run; None: they have
    none, or nothing is known about them. Raises ValueErrors that name the field."""
    expected = experiment.expected
    given = {name: value for name in _TURN_FIELDS if (value := getattr(expected, name)) is not None}
    in_turns = [
        work for work in graph.works(Generate) if isinstance(work.environment, EnvironmentTurnSourceFactory)]
    if not in_turns:
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(f"expected.{name} is {value:g}: nothing is generated with an environment")
        return None
    (work, *_) = in_turns
    assert isinstance(work.environment, EnvironmentTurnSourceFactory)
    most = work.environment.environment.max_turns
    for name, value in given.items():
        least = int(name == "turns")
        require(least <= value < math.inf, f"expected.{name}", value, f"be at least {least}")
    if expected.turns is not None and expected.turns > most:
        raise ValueError(f"expected.turns is {expected.turns:g}: environment.max_turns allows {most}")
    limit = work.sampling.max_new_tokens
    measured = None
    if expected.lengths_from is not None:
        measured = _turns_of_run(expected.lengths_from, most, limit)
    if measured is None and expected.turns is None:
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(f"expected.{name} is {value:g}: set expected.turns, too")
        return None
    _check(expected, limit)
    lengths = geometric(expected.response_tokens or limit, limit)
    if expected.lengths_from is not None and measured is None:
        lengths, _ = _lengths_of_run(expected.lengths_from, limit)
    if expected.response_tokens is not None and expected.response_p99 is not None:
        lengths = long_tail(expected.response_tokens, expected.response_p99, limit)
    turns = measured or Turns(geometric(1, most), lengths)
    if expected.turns is not None:
        turns = dataclasses.replace(turns, counts=geometric(expected.turns, most))
    if expected.env_seconds is not None:
        turns = dataclasses.replace(turns, seconds=expected.env_seconds)
    if expected.observation_tokens is not None:
        turns = dataclasses.replace(turns, observation_tokens=expected.observation_tokens)
    return turns


def _turns_of_run(run: str, most: int, limit: int) -> Turns | None:
    """Return the turns that a run has kept: their numbers, the tokens drawn in each, the mean tokens between
    two and the mean seconds after each; None if its rollouts have none."""
    rollouts = [rollout["turns"] for rollout in _rollouts_of(run) if rollout.get("turns")]
    if not rollouts:
        return None
    spans = [span for spans in rollouts for span in spans]
    between = [after["start"] - before["stop"] for spans in rollouts for before, after in pairwise(spans)]
    return Turns(
        observed([len(spans) for spans in rollouts], most),
        observed([span["stop"] - span["start"] for span in spans], limit),
        fmean(between) if between else 0.0, fmean(span["seconds"] for span in spans))


def most_response_tokens(graph: DataflowGraph, turns: Turns | None) -> int:
    """Return the most tokens of a response, those of an environment included; 0 if none is generated."""
    limit = longest_response(graph)
    if turns is None:
        return limit
    settings = (work.environment for work in graph.works(Generate))
    if all(of.environment.max_tokens for of in settings if isinstance(of, EnvironmentTurnSourceFactory)):
        return limit
    per_turn = turns.lengths.limit + math.ceil(turns.observation_tokens)
    return max(limit, turns.counts.limit * per_turn)


class _Measured(NamedTuple):
    """Lengths in tokens of the rows of a dataset."""

    prompts: Lengths
    completions: Lengths
    completions_alike: float
    """How much the completions of a row resemble each other in length."""
    common_prompt_tokens: int
    """Tokens with which all prompts begin."""


def _measured(experiment: Experiment, limit: int) -> _Measured:
    """Return the lengths of the dataset's rows, tokenised as a run does it: prompts up to what is learned."""
    unknown = [f"expected.{name}" for name in ("prompt_tokens", "response_tokens")
               if getattr(experiment.expected, name) is None and (name == "prompt_tokens" or not limit)]
    options = " ".join(f"--{name.replace('_', '-')} N" for name in unknown)
    hint = f"set {' and '.join(unknown)} ({options}) to plan without data and tokenizer"
    dataset = experiment.dataset
    inputs = experiment.graph().inputs
    prompt = START_IDS if START_IDS in inputs else "prompt_ids"
    keys = [prompt, *(key for key in ("sequence_ids", IS_CHOSEN) if key in inputs)]
    try:
        rows = [load_rows(part, keys)[:_ROWS] for part in dataset.parts]
        directory = experiment.tokenizer_dir()
        if not (Path(directory) / "tokenizer.json").exists():
            raise ValueError(f"tokenizer {directory!r} has no tokenizer.json")
        tokenizer = LightTokenizer(directory)
        samples: list[list[dict[str, Any]]] = []
        for part, part_rows in zip(dataset.parts, rows, strict=True):
            tokens = RowTokenizer(part, tokenizer, keys=keys, counts=RowCounts(), oddities=Oddities())
            tokenized = (tokens.samples(texts_of(row, part, keys)) for row in part_rows)
            samples += [of_row for of_row in tokenized if of_row]
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from error
    learned = [[sum(map(bool, one.get("response_mask", ()))) for one in of_row] for of_row in samples]
    before = [
        len(one.get("sequence_ids", one["prompt_ids"])) - count
        for of_row, counts in zip(samples, learned, strict=True)
        for one, count in zip(of_row, counts, strict=True)]
    return _Measured(
        observed(before or [1]), observed([count for counts in learned for count in counts] or [1]),
        alike_share(learned), _common_length([of_row[0]["prompt_ids"] for of_row in samples]))


def _common_length(prompts: Sequence[list[int]]) -> int:
    """Return how many tokens all prompts begin with."""
    if not prompts:
        return 0
    first, last = min(prompts), max(prompts)  # All others are between them in dictionary order.
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


_EVAL_PROMPTS = 1024  # Held-out prompts that are assumed if no data are read.


def problem_of(
    experiment: Experiment, cluster: Cluster,
    *, pins: Mapping[str, Layout] | None = None, together: Sequence[Sequence[str]] = (),
    pinned_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Problem:
    """Return the planning problem of an experiment. Raises ValueErrors that name the field.

    It needs no weights, and if `expected` has the lengths, neither data nor a tokenizer.
    """
    check_numbers(experiment)
    experiment = _without_hub_data(experiment)
    roles = {name: model_role(name, role) for name, role in experiment.roles().items()}
    graph = experiment.graph()
    check_graph(experiment, graph, experiment.roles())
    if not any(call.role for call in graph.calls):
        raise ValueError("the graph has no calls on models: there is nothing to plan")
    if unused := [name for name in roles if not graph.using(name)]:
        raise ValueError(f"role {unused[0]!r} has no call in the graph")
    for name, seconds in experiment.expected.call_seconds.items():
        if name not in [call.name for call in graph.calls]:
            there_are = ", ".join(call.name for call in graph.calls)
            raise ValueError(f"expected.call_seconds has {name!r}: the calls are {there_are}")
        require(seconds >= 0, f"expected.call_seconds[{name!r}]", seconds, "not be negative")
    for name, count in experiment.expected.questions.items():
        asking = [c.name for c in graph.calls if isinstance(c.work, HostFunction) and c.work.asks]
        if name not in asking:
            there_are = ", ".join(asking) or "none"
            raise ValueError(f"expected.questions has {name!r}: the host calls that ask are {there_are}")
        require(count >= 0, f"expected.questions[{name!r}]", count, "not be negative")
    size = experiment.expected.question_bytes
    require(size >= 0, "expected.question_bytes", size, "not be negative")
    turns = expected_turns(experiment, graph)
    lengths = sequence_lengths(experiment, most_response_tokens(graph, turns), turns=turns)
    parts = checked_parts(experiment, graph)
    runs = _part_runs(experiment, parts)
    num_samples = experiment.batch_size * experiment.group_size
    of_step = {**lengths, "samples_per_prompt": experiment.group_size}
    num_rounds = experiment.num_rounds
    workloads = {
        name: _workload(
            experiment, graph, graph[name], num_samples, of_step | {"runs": runs[part]}, rounds=num_rounds)
        for part, names in parts.items() for name in names}
    if experiment.expected.seconds_from is not None:
        for name, (mean, deviation) in _seconds_of_run(experiment.expected, graph).items():
            workloads[name] = dataclasses.replace(
                workloads[name], seconds=mean, seconds_deviation=deviation)
        for name, measured in asking_of_run(Path(experiment.expected.seconds_from), graph).items():
            questions = workloads[name].questions or measured.questions
            slices = None if name in experiment.expected.call_seconds else measured.slices
            workloads[name] = dataclasses.replace(workloads[name], questions=questions, slices=slices)
    order = ("score", "rollout", "train") if runs_ahead(experiment) else _in_order(parts, graph)
    return Problem(
        graph, roles, workloads, cluster, pins or {}, tuple(map(tuple, together)),
        run_order=tuple(name for part in order for name in _in_graph_order(parts[part], graph)),
        ahead=frozenset(parts["rollout"] if runs_ahead(experiment) else ()),
        evaluations=tuple(_evaluations(experiment, lengths)),
        pinned_options=pinned_options or {},
    )


def _seconds_of_run(expected: Expected, graph: DataflowGraph) -> dict[str, tuple[float, float]]:
    """Return the mean seconds per step, and their deviation, that a run has measured of calls in plain Python
    and of functions on modules, without those in `call_seconds`.

    A step in which a call has not run counts as 0 seconds; the first step does not count. Raises ValueError
    if the run has no steps after it, or has had a call on several ranks.
    """
    run = expected.seconds_from
    assert run is not None
    path = Path(run) / METRICS
    steps = [row for _, row in read_json_lines(path)][1:] if path.is_file() else []
    if not steps:
        raise ValueError(f"expected.seconds_from is {run!r}: {path} must have two steps or more")
    works = HostFunction | ForwardFunction | TrainFunction
    asked = _asked(graph)
    names = [c.name for c in graph.calls if isinstance(c.work, works) and c.name not in expected.call_seconds]
    plan = ExecutionPlan.load(str(Path(run) / "plan.yaml"))
    if several := [name for name in names if name in plan.calls and len(plan[name].layout.ranks) > 1]:
        raise ValueError(
            f"expected.seconds_from is {run!r}: it must have run each call on one rank, and has run "
            f"{several[0]} at {plan[several[0]].layout}")
    seconds = {name: [step.get(f"timing_s/{name}", 0.0) for step in steps] for name in names}
    seconds |= {name: [0.0] for name in names if name in asked}  # Those that ask wait for them.
    return {name: (fmean(values), pstdev(values)) for name, values in seconds.items()}


def _asked(graph: DataflowGraph) -> set[str]:
    """Return the names of the calls that host calls ask."""
    return {name for call in graph.calls if isinstance(call.work, HostFunction) for name in call.work.asks}


_MEASURED = {
    "num", "slices", "steps", "rolling_seconds", "rolling_cpu_seconds", "handling_cpu_seconds",
    "step_seconds", "step_deviation", "step_cpu_seconds", "cores"}
"""Figures of a call's environments that tell what its slices take (see `VectorSource.taken`)."""


class MeasuredAsking(NamedTuple):
    """The measurements of a host call that asks: its questions in a step, and its environments' turns."""

    questions: float
    slices: SliceTimes | None


def asking_of_run(run: Path, graph: DataflowGraph) -> dict[str, MeasuredAsking]:
    """Return what a run has measured of each host call that asks, without the first step.

    The slices are None if the call has not measured any (see `HostContext.measured`).
    """
    plan = ExecutionPlan.load(str(run / "plan.yaml"))
    path = run / "timeline.jsonl"
    events = [event for _, event in read_json_lines(path)] if path.is_file() else []
    events = [event for event in events if event["step"] > 1 and "asking" in event]
    found = {}
    for call in graph.calls:
        asks = call.work.asks if isinstance(call.work, HostFunction) else ()
        of_call = [event for event in events if event["name"] == call.name]
        if not asks or not of_call:
            continue
        far = [event for event in events if event["name"] in asks]
        answering = {rank for name in asks for rank in plan[name].layout.ranks}
        is_far = not answering & set(plan[call.name].layout.ranks)
        num_steps = len({event["step"] for event in of_call})
        answers = [
            row for event in (far if is_far else of_call) for rows in event["asking"]["answers"].values()
            for row in rows]
        questions = sum(count for _, count, _ in answers)
        slices = None
        if answers and all(event["asking"].keys() >= _MEASURED for event in of_call):
            slices = _slice_times(of_call, far, answers, num_steps=num_steps, is_far=is_far)
        found[call.name] = MeasuredAsking(questions / num_steps, slices)
    return found


def _slice_times(
    of_call: Sequence[Mapping[str, Any]], far: Sequence[Mapping[str, Any]],
    answers: Sequence[tuple[int, int, float]], *, num_steps: int, is_far: bool,
) -> SliceTimes:
    """Return the times of a call's environments from its events, and those of a rank that answers it.

    The seconds of answers to other numbers of rows than those of the slices follow from the tries, by which
    fewer rows never take longer. If several calls are asked, the tries are those of the first.
    """
    asking = [event["asking"] for event in of_call]
    first = asking[0]
    num, num_slices = int(first["num"]), int(first["slices"])

    def total(name: str) -> float:
        return sum(one[name] for one in asking)

    def mean(name: str) -> float:
        return sum(one[name] * one["steps"] for one in asking) / total("steps")

    rounds = total("steps")
    questions = sum(count for _, count, _ in answers)
    own = total("rolling_cpu_seconds") + total("acting_cpu_seconds")
    own -= total("answering_cpu_seconds") + total("sending_cpu_seconds")
    of_messages = 0.0
    if is_far:  # Also those of gloo's own thread.
        whole_cpu = sum(event["cpu_seconds"] for event in of_call)
        of_messages = whole_cpu - total("calling_cpu_seconds") - total("acting_cpu_seconds")
        of_messages += total("sending_cpu_seconds")
    handling = total("handling_cpu_seconds")
    rows = num // num_slices
    usual = [(count, seconds) for number, count, seconds in answers if number == rows] or [
        (count, seconds) for _, count, seconds in answers]
    answer = sum(seconds for _, seconds in usual) / sum(count for count, _ in usual)
    tried = [row for event in (far if is_far else of_call) for of_ask in event["asking"]["tried"].values()
             for row in of_ask][:4]
    numbers = tuple(number for number, _ in tried) or (rows,)
    seconds = tuple(min(taken for _, taken in tried[i:]) for i in range(len(tried))) or (answer,)
    scale = answer / float(np.interp(rows, numbers, seconds))
    messages = None
    if is_far:
        handled = sum(event["cpu_seconds"] for event in far) - sum(seconds for *_, seconds in answers)
        messages = QuestionSeconds(max(0.0, of_messages / questions), max(0.0, handled / questions), 0.0)
    cores = int(first["cores"])
    busy = own + of_messages + num * rounds * mean("step_cpu_seconds")
    busy += sum(seconds for *_, seconds in answers)
    is_crowded = busy > BUSY * cores * total("rolling_seconds")
    measured_step = (mean("step_seconds"), mean("step_deviation"))
    step, deviation = (mean("step_cpu_seconds"), 0.0) if is_crowded else measured_step
    whole = sum(event["end"] - event["start"] for event in of_call)
    return SliceTimes(
        num, num_slices, rounds / num_steps, max(0.0, whole - total("rolling_seconds")) / num_steps,
        step, deviation, mean("step_cpu_seconds"), max(0.0, own - handling) / (num_slices * rounds),
        handling / (num * rounds), tuple((n, scale * s) for n, s in zip(numbers, seconds, strict=True)),
        cores, messages)


def checked_plan(experiment: Experiment, plan: ExecutionPlan, *, num_devices: int) -> ExecutionPlan:
    """Return a plan by hand with calls in plain Python added. Raises ValueErrors that name the field if the
    experiment cannot follow it on so many devices."""
    roles = experiment.roles()
    graph = experiment.graph()
    check_graph(experiment, graph, roles)
    whole = complete_plan(plan, graph, {})
    names = legal_names(evaluation_graphs(experiment))
    whole.check(graph, world_size=num_devices, also=names, absent=experiment.absent_calls())
    home_layouts(graph, whole, roles)
    offloaded = {call.role for call in graph.calls if call.role is not None and whole[call.name].offload}
    check_plan(graph, whole, roles, offloaded)
    return whole


def _without_hub_data(experiment: Experiment) -> Experiment:
    """Return the experiment without paths of data sets of the hub, if `expected` has the lengths.

    So the hub is not asked for columns. Those that the planner would use, such as completions of held-out
    rows, are assumed to exist.
    """
    expected = experiment.expected
    if expected.prompt_tokens is None:
        return experiment
    known = copy.copy(experiment)
    known.dataset = _without_path(experiment.dataset)
    held_out = {
        name: dataclasses.replace(evaluation, dataset=_without_path(evaluation.dataset))
        for name, evaluation in named_sets(experiment.eval_dataset).items()}
    known.eval_dataset = held_out.get("", held_out or None)
    has_lengths = expected.response_tokens or expected.lengths_from or longest_response(known.graph())
    return known if has_lengths else experiment


def _without_path(dataset: DatasetConfig) -> DatasetConfig:
    """Return the settings of a data set without its path if that is on the hub, also in a mixture."""
    if isinstance(dataset, DatasetMixture):
        return dataclasses.replace(dataset, parts=tuple(map(_without_path, dataset.parts)))
    paths = (dataset.path,) if isinstance(dataset.path, str) else dataset.path
    return dataclasses.replace(dataset, path="") if any(map(is_of_hub, paths)) else dataset


def without_lag(experiment: Experiment) -> Experiment:
    """Return a copy of the experiment with synchronous steps."""
    synchronous = copy.copy(experiment)
    synchronous.max_lag = 0
    synchronous.rounds = None
    return synchronous


def runs_ahead(experiment: Experiment) -> bool:
    """Return whether generation for the next step runs while this step trains."""
    return experiment.max_lag > 0 and experiment.overlaps and not experiment.has_own_program


def _in_order(parts: Mapping[str, Sequence[str]], graph: DataflowGraph) -> list[str]:
    """Sort the parts so that each comes after those that it needs."""
    part_of = {name: part for part, names in parts.items() for name in names}
    between = nx.DiGraph()
    between.add_nodes_from(parts)
    between.add_edges_from((part_of[a], part_of[b]) for a, b in graph.nx_graph.edges)
    between.remove_edges_from(list(nx.selfloop_edges(between)))
    return list(nx.lexicographical_topological_sort(between, key=list(parts).index))


def _in_graph_order(names: Collection[str], graph: DataflowGraph) -> list[str]:
    return [call.name for call in graph.order if call.name in names]


def _part_runs(experiment: Experiment, parts: Collection[str]) -> dict[str, float]:
    """Return how often a step is expected to run each part."""
    expected = experiment.expected.part_runs
    for part, runs in expected.items():
        if part not in parts:
            raise ValueError(f"expected.part_runs has {part!r}: the parts are {', '.join(parts)}")
        require(runs > 0, f"expected.part_runs[{part!r}]", runs, "be above 0")
    return {part: expected.get(part, 1.0) for part in parts}


def model_role(name: str, role: Role) -> ModelRole:
    """Return a role as the planner sees it. Raises ValueError if it cannot be planned."""
    config = role.config()
    if isinstance(config, TransformersConfig) and config.unplannable:
        raise ValueError(
            f"{name}.model {role.model} cannot be planned: {config.unplannable}; write the plan by hand")
    try:
        dtype = role.weights_dtype
        if (lora := role.resolved_lora()) is not None:
            adapter_spec(config, lora)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error
    frozen = role.follows is None and (role.optimizer is None or lora is not None)
    source = role.weights_source if frozen else None
    offloads = role.optimizer is not None and role.optimizer.offload
    return ModelRole(
        config, dtype, role.optimizer is not None, role.follows, lora, source, role.float32_head, offloads)


def _workload(
    experiment: Experiment, graph: DataflowGraph, call: FunctionCall, num_samples: int,
    settings: Mapping[str, Any], *, rounds: int = 1,
) -> Workload:
    """Return the workload of a call of the step or of an evaluation; `settings` are what its calls share."""
    work = call.work
    of_call: dict[str, Any] = {} if isinstance(work, Generate) else {"turns": None}
    if isinstance(work, HostFunction):
        scoring = _scoring_time(experiment.expected, work.function)
        seconds = experiment.expected.call_seconds.get(call.name, experiment.expected.host_seconds)
        questions = experiment.expected.questions.get(call.name, 0.0) * settings["runs"]
        of_call |= {
            "seconds": seconds * settings["runs"], "scoring": scoring, "questions": questions,
            "question_bytes": experiment.expected.question_bytes}
    elif isinstance(work, ForwardFunction | TrainFunction):
        of_call["seconds"] = experiment.expected.call_seconds.get(call.name, 0.0) * settings["runs"]
        of_call["is_asked"] = call.name in _asked(graph)
        if isinstance(work, TrainFunction):
            of_call |= {"minibatches": work.minibatches, "epochs": work.epochs}
    elif isinstance(work, Generate):
        keeps = work.cache_on_update == "keep" and rounds > 1
        steals = work.work_stealing and not keeps and work.environment is None
        of_call |= {"rounds": rounds, "keeps_cache": keeps, "work_stealing": steals}
        of_call |= {name: getattr(work, name) for name in ("max_rows", "kv_cache_gib", "prefill_tokens")}
        of_call["weights"] = work.generation_weights
        of_call["sorts_logits"] = work.sampling.top_p < 1 and work.sampling.temperature > 0
    elif isinstance(work, TopLogProbs):
        of_call["top_k"] = work.k
    elif isinstance(work, LogProbs):
        of_call["entropy"] = work.entropy
    elif isinstance(work, TrainStep):
        of_call |= {name: getattr(work, name) for name in ("minibatches", "epochs", "group_size")}
        producers = filter(None, map(graph.producer, work.loss.token_ids))
        of_call["entropy"] = work.loss.entropy
        of_call["top_k"] = sum(made.work.k for made in producers if isinstance(made.work, TopLogProbs))
    if isinstance(work, ModelWork):
        of_call["output"] = work.output
    return Workload(num_samples, **{**settings, **of_call})


def _evaluations(experiment: Experiment, lengths: Mapping[str, Any]) -> Iterator[PlannedCall]:
    """Yield the calls on models of all evaluations. Prompts are assumed to be as long as in training."""
    for set_name, (evaluation, graph) in experiment.eval_graphs().items():
        limit = most_response_tokens(graph, lengths.get("turns")) or lengths["max_new_tokens"]
        response = min(lengths["response_tokens"], limit)
        per_prompt = 2 if reads_pairs(graph.inputs) else evaluation.samples
        num_samples = per_prompt * _num_eval_prompts(experiment, evaluation, graph)
        settings = {**lengths, "samples_per_prompt": per_prompt, "runs": 1}
        if (response, limit) != (lengths["response_tokens"], lengths["max_new_tokens"]):
            settings |= {"response_tokens": response, "max_new_tokens": limit, "response_lengths": None}
            settings["turns"] = None
        for call in graph.calls:
            if call.role is None:
                continue
            workload = _workload(experiment, graph, call, num_samples, settings)
            of_set = [f"eval/{set_name}/{call.name}"] * bool(set_name)
            names = (*of_set, f"eval/{call.name}", call.name)
            yield PlannedCall(
                names[0], call.kind, call.role, workload, names, is_evaluation=True, reads=call.reads)


def _num_eval_prompts(experiment: Experiment, evaluation: Evaluation, graph: DataflowGraph) -> int:
    """Return the number of prompts of a held-out set; it is assumed if `expected` has the lengths."""
    if experiment.expected.prompt_tokens is not None:
        return evaluation.max_rows or _EVAL_PROMPTS
    if isinstance(evaluation.dataset, ArrayDataset):
        rows = evaluation.dataset.count()
    else:
        rows = sum(len(load_rows(part, graph.inputs)) for part in evaluation.dataset.parts)
    return min(rows, evaluation.max_rows or rows)


def _scoring_time(expected: Expected, function: Any) -> ScoringTime | None:
    """Return the time in which a function scores answers; None if it has no rewards, or none is expected."""
    rewards = function.rewards if isinstance(function, RewardCall) else ()
    mean, p99 = expected.reward_seconds, expected.reward_p99_seconds
    require(mean >= 0, "expected.reward_seconds", mean, "be at least 0")
    require(p99 is None or p99 > mean > 0, "expected.reward_p99_seconds", p99,
            "be above expected.reward_seconds, which is above 0")
    if not rewards or not mean:
        return None
    slowest = min(rewards, key=lambda reward: reward.concurrency or 1)
    limit = None
    if slowest.concurrency is not None:  # Else it is for all answers together.
        limit = slowest.timeout_seconds or function.limits.timeout_seconds
    if limit is not None and p99 is not None:
        require(p99 < limit, "expected.reward_p99_seconds", p99, f"be below the time limit, {limit:g}")
    time = ScoringTime(mean, p99, limit, slowest.concurrency or 1)
    try:
        time.of_slowest(1, 1)
    except ValueError as error:
        raise ValueError(f"expected.reward_p99_seconds is {p99:g}: {error}") from error
    return time
