"""`realhf plan`, and the search that `realhf run --plan auto` does. Free of torch."""

import json
import math
import os
import re
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from realhf.cli.experiment_file import add_experiment_arguments, read_experiment
from realhf.cli.launch import is_worker
from realhf.cli.planning_problem import checked_plan, problem_of, without_lag
from realhf.cluster import Cluster, host_memory_bytes, multiplies_bfloat16, num_cores
from realhf.errors import UserError, naming
from realhf.execution_plan import OPTIONS, CallPlan, ExecutionPlan
from realhf.experiment import Experiment
from realhf.layout import Layout
from realhf.planner import report
from realhf.planner.call_group import check_pins
from realhf.planner.comparisons import (
    Expense,
    LagComparison,
    SearchLimits,
    SizedPlan,
    Sizing,
    WhatIf,
    expense_of_step,
    lost_hosts,
    what_if,
)
from realhf.planner.comparisons import render as render_changes
from realhf.planner.deadline import Deadline
from realhf.planner.efficiencies import ENGINES
from realhf.planner.make import Planned, PricedPlan, TooLittleTime, make_plan, price
from realhf.planner.measured_links import fitted_links
from realhf.planner.problem import Problem
from realhf.planner.profile import Profile
from realhf.planner.profiled_rates import ProfiledRates, not_measured
from realhf.planner.ranges import Robust, robust_plan
from realhf.planner.rates import Rates
from realhf.planner.reasons import change
from realhf.planner.search import gap_of
from realhf.signals import end_by_signal
from realhf.user_input.files import require_output
from realhf.user_input.suggest import did_you_mean
from realhf.user_input.units import format_seconds

_REPORT_SECONDS = 5.0
"""Seconds between two lines about the search if standard error is not a terminal."""


class SearchWatch:
    """A context that shows a search on standard error: live on a terminal, else as a line every few seconds.

    The first plan is shown at once. From then on, the first signal ends the search with the best plan so far,
    and the message goes on with `then`, such as "the run begins with". A second signal, or one before there
    is a plan, ends the command.
    """

    def __init__(self, *signals: signal.Signals, then: str = "") -> None:
        self._signals = signals
        self._then = then
        self._before: dict[signal.Signals, Any] = {}
        self._has_plan = False
        self._requested: signal.Signals | None = None
        self._is_announced = False
        self._what = ""
        self._last = -math.inf
        self._status: Status | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in self._signals}
        if sys.stderr.isatty():
            self._status = Status("searching: no plan yet", console=Console(stderr=True))
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, what: str) -> None:
        """Begin a search, and show its name."""
        self._what = f" {what}"
        self._last = time.monotonic()

    def progress(self, best: float, bound: float, seconds: float) -> None:
        """Show the best step seconds so far (infinite: there is no plan yet) and the lower bound."""
        is_first = not self._has_plan and math.isfinite(best)
        self._has_plan |= is_first
        if self._status is not None:
            self._status.update(self._state(best, bound, seconds))
        elif is_first or time.monotonic() - self._last >= _REPORT_SECONDS:
            self._last = time.monotonic()
            print(f"realhf: {self._state(best, bound, seconds)}", file=sys.stderr, flush=True)

    def should_stop(self) -> bool:
        """Return whether a signal has asked for the end of the search; announce it the first time."""
        if self._requested is not None and not self._is_announced:
            self._is_announced = True
            ended = f"the search is ended by {self._requested.name}: {self._then} the best plan so far"
            if self._status is not None:
                self._status.console.print(f"realhf: {ended}", highlight=False)
            else:
                print(f"realhf: {ended}", file=sys.stderr, flush=True)
        return self._requested is not None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._has_plan and self._requested is None:
            self._requested = signal.Signals(number)
            return
        if self._status is not None:
            self._status.stop()
        more = "; no plan is taken" if self._has_plan else " before there was a plan"
        end_by_signal(signal.Signals(number), more)

    def _state(self, best: float, bound: float, seconds: float) -> str:
        if not math.isfinite(best):
            proven = f"no plan yet, lower bound {format_seconds(bound)}"
        else:
            near = "no lower bound yet"
            if bound > 0:
                near = f"lower bound {format_seconds(bound)}, gap {report.format_gap(best, bound)}"
            proven = f"best {format_seconds(best)} per step, {near}"
        return f"searching{self._what} for {seconds:.1f} s: {proven}"


HELP = "search for a fast plan for a cluster, with a lower bound over the plans enumerated"
EXAMPLES = (
    "realhf plan examples/ppo_7b.py --cluster h100-2x8 -o plan.yaml",
    "realhf plan examples/grpo.py --profile profile.yaml --devices 4",
    "realhf plan examples/ppo_7b.py --cluster h100-2x8 --what-if response_tokens=2000",
)
_SLACK = 0.01
"""A plan with more free memory or simpler layouts may take so much longer than the fastest one found."""
_GAP = 0.01
"""The search ends when the gap, as a share of the step, is at most this."""
TIME_LIMIT = 60.0
"""Seconds for a plan; the search gets four fifths of them (planner/make.py). Each question gets as many."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf plan`."""
    add_experiment_arguments(parser)
    add = parser.add_argument
    add("--cluster", help="cluster file or shipped name such as h100-8x8; default: this machine")
    add("--profile", help="file of `realhf profile`; without --cluster, plan for its machine")
    text = "output of nccl-tests, to which links are fitted; may be repeated, one collective each"
    add("--links", action="append", default=[], metavar="FILE", help=text)
    text = f"price passes as those of this engine: {', '.join(ENGINES)}; default: realhf"
    add("--engine", default="realhf", metavar="NAME", help=text)
    add("-o", "--output", metavar="PLAN.yaml", help="where to write the plan")
    text = f"most seconds for the plan, and as many for each question; default: {TIME_LIMIT:g}"
    add("--time-limit", type=float, default=TIME_LIMIT, metavar="S", help=text)
    text = "stop when the lower bound over the plans enumerated is at most this share of a step below it"
    add("--gap", type=float, default=_GAP, help=f"{text}; default: {_GAP:g}")
    text = "prefer free memory, few layouts and hosts to the fastest plan, up to so much longer a step"
    add("--slack", type=float, default=_SLACK, help=f"{text}; default: {_SLACK:g}")
    text = "choose the plan with the least regret over ranges of lengths and efficiencies"
    add("--robust", action="store_true", help=text)
    text = "fix the layout or options of a call: actor_generate=d8t8@0-63,max_rows=40; may be repeated"
    add("--pin", action="append", default=[], metavar="CALL=LAYOUT[,OPTION=VALUE]", help=text)
    text = "calls that share one layout, separated by commas; may be repeated"
    add("--together", action="append", default=[], metavar="CALLS", help=text)
    text = "plan for the first N devices; several (8,16,...,256): a table of steps, and how many are enough"
    add("--devices", metavar="N[,N...]", help=text)
    text = "what one device costs per hour: prints the cost of a step, and of 1,000 steps and samples"
    add("--cost-per-hour", type=float, metavar="X", help=text)
    text = "show what a step takes with N hosts fewer, such as after a failure"
    add("--lost-hosts", type=int, metavar="N", help=text)
    text = "show what a change does to the plan, such as response_tokens=8000; may be repeated"
    add("--what-if", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "price this plan, such as one by hand, instead of searching; exit code 1 if it does not fit"
    add("--price", metavar="PLAN.yaml", help=text)
    add("--html", metavar="FILE", help="also write the plan as a page: step, memory, mesh, other layouts")
    add("--json", action="store_true", help="print one JSON document")


def main(options: Namespace, words: list[str]) -> int:
    """Search a plan, print it, write it to --output and return the exit code."""
    deadline = Deadline(options.time_limit)
    experiment = read_experiment(options, words)
    _check_numbers(options)
    numbers = _device_numbers(options.devices)
    cluster = _cluster(options, numbers[-1] if numbers else None)
    rates, notes = _rates_of(options, cluster)
    cluster = rates.cluster
    for number in numbers[:-1]:
        _cluster(options, number)  # It refuses numbers that are not legal.
    if len(numbers) > 1:
        return _plan_sizes(experiment, options, [
            cluster.first_devices(number) for number in numbers], rates, notes, deadline)
    if options.price is not None:
        return _price(experiment, options, cluster, rates, notes)
    return _plan(experiment, options, cluster, rates, notes, deadline)


def _plan(
    experiment: Experiment, options: Namespace, cluster: Cluster, rates: Rates, notes: Sequence[str],
    deadline: Deadline,
) -> int:
    """Search a plan for one number of devices, answer the further questions, and print and write both."""
    if options.output:
        require_output(Path(options.output), "--output", first="calls:", what="plan")
    if options.robust:
        _refuse_others(options, ("what_if", "lost_hosts"), why="--robust has changes of its own")
    found = _searched(experiment, options, cluster, rates, deadline)
    priced = found.priced
    if options.output:
        priced.plan.save(Path(options.output))
    _write_page(options, priced, found.what_ifs)
    unmeasured = [*notes, *not_measured(rates, priced.problem, priced.plan)]
    cost = _cost(priced, options)
    if options.json:
        print(json.dumps(found.document(cost, unmeasured)))
        return 0
    console = Console()
    found.print(console, cost, unmeasured)
    if options.output:
        console.print(f"\nwritten to {options.output}", highlight=False)
    return 0


def _write_page(options: Namespace, priced: PricedPlan, what_ifs: Sequence[WhatIf] = ()) -> None:
    """Write the page of --html, if it is wanted."""
    if options.html is not None:
        from realhf.report.plan_page import plan_page  # Here, as plotly is slow.

        require_output(Path(options.html), "--html", first="<!doctype html>", what="page")
        title = f"Plan of {Path(options.experiment).stem}"
        plan_page(priced, title=title, what_ifs=what_ifs).save(Path(options.html))


def _searched(
    experiment: Experiment, options: Namespace, cluster: Cluster, rates: Rates, deadline: Deadline
) -> "_Found":
    """Run the searches that the options ask for, within the time limit."""
    comparison = None
    robust = None
    signals = (signal.SIGINT, signal.SIGTERM)
    with _reporting(options.experiment), SearchWatch(*signals, then="this is") as watch:
        problem = _problem(experiment, options, cluster)
        check_pins(problem)
        changes = _changes(problem, rates, options.what_if)
        _check_limits(options)
        if options.lost_hosts is not None and options.lost_hosts >= cluster.num_hosts:
            has = f"the cluster has {cluster.num_hosts}, and one must be left"
            raise UserError(f"--lost-hosts {options.lost_hosts}: {has}")
        limit = deadline.left
        if limit <= 0:
            took = f"reading the experiment took {format_seconds(deadline.spent)}"
            raise UserError(f"--time-limit {options.time_limit:g}: {took}")
        if experiment.max_lag and not experiment.has_own_program:
            planned = _search(problem, options, rates, time_limit=limit / 2, watch=watch, parts=2)
            synchronous = _problem(without_lag(experiment), options, cluster)
            other = _search(
                synchronous, options, rates, time_limit=deadline.left, watch=watch, explain=False, parts=2)
            comparison = LagComparison(
                experiment.max_lag, experiment.num_rounds, planned.result, other.result)
        else:
            planned = _search(problem, options, rates, time_limit=limit, watch=watch)
        if options.robust:
            robust = robust_plan(
                planned, time_limit=options.time_limit, gap=options.gap, slack=options.slack,
                should_stop=watch.should_stop, begin=lambda change: watch.begin(f"with {change}"))
        limits = SearchLimits(options.time_limit, options.gap, watch.progress, watch.should_stop)
        what_ifs = []
        for values in changes:
            watch.begin(" ".join(["with", *(f"{key}={value}" for key, value in values.items())]))
            what_ifs.append(what_if(planned, values, limits))
        if options.lost_hosts is not None:
            watch.begin(f"with {options.lost_hosts} hosts fewer")
            what_ifs += lost_hosts(planned, options.lost_hosts, limits)
    return _Found(planned, comparison, robust, what_ifs)


@dataclass(frozen=True)
class _Found:
    """The plan that a search has found, and the answers to further questions about it."""

    planned: Planned
    comparison: LagComparison | None
    robust: Robust | None
    what_ifs: Sequence[WhatIf]

    @property
    def priced(self) -> PricedPlan:
        """The plan to print and to write."""
        return self.planned if self.robust is None else self.robust.priced

    def document(self, cost: Expense | None, unmeasured: Sequence[str]) -> dict[str, Any]:
        """Return the answer of --json."""
        document = report.document(self.planned) | {"not_measured": unmeasured}
        if self.robust is not None:
            document |= report.priced_document(self.priced) | {"robust": self.robust.document()}
            document["gap"] = gap_of(document["step_seconds"], document["lower_bound_seconds"])
        document |= self.comparison.document() if self.comparison else {}
        document |= {"cost": cost.document()} if cost is not None else {}
        if self.what_ifs:
            document["what_if"] = [answer.document() for answer in self.what_ifs]
        return document

    def print(self, console: Console, cost: Expense | None, unmeasured: Sequence[str]) -> None:
        """Print the answer for people."""
        if isinstance(self.priced, Planned):
            console.print(report.render(self.priced, columns=console.width), soft_wrap=True)
        else:
            console.print(report.render_priced(self.priced, columns=console.width), soft_wrap=True)
        if self.robust is not None:
            console.print(Text(), self.robust.render(columns=console.width), soft_wrap=True)
        if cost is not None:
            console.print(Text(f"\n{cost}"), soft_wrap=True)
        if self.comparison:
            console.print(Text(), self.comparison.render(), soft_wrap=True)
        if self.what_ifs:
            changes = render_changes(self.planned, self.what_ifs, columns=console.width)
            console.print(Text(), changes, soft_wrap=True)
        if unmeasured:
            console.print(Text("\n" + "\n".join(unmeasured)), soft_wrap=True)


def _check_numbers(options: Namespace) -> None:
    """Raise UserError about a cost or a number of hosts that is not legal."""
    if options.cost_per_hour is not None and not 0 < options.cost_per_hour < math.inf:
        raise UserError(f"--cost-per-hour {options.cost_per_hour:g}: it must be above 0")
    if options.lost_hosts is not None and options.lost_hosts < 1:
        raise UserError(f"--lost-hosts {options.lost_hosts}: it must be at least 1")


def _check_limits(options: Namespace) -> None:
    """Raise UserError about a limit of the search that is not legal."""
    if not options.time_limit > 0:
        raise UserError(f"--time-limit {options.time_limit:g}: it must be above 0 seconds")
    if not 0 <= options.gap < 1:
        raise UserError(f"--gap {options.gap:g}: it must be at least 0 and below 1")
    if not 0 <= options.slack < 1:
        raise UserError(f"--slack {options.slack:g}: it must be at least 0 and below 1")


def _refuse_others(options: Namespace, names: Sequence[str], *, why: str) -> None:
    """Raise UserError if one of these options is given, which do not go with another one."""
    if given := [name for name in names if getattr(options, name)]:
        raise UserError(f"--{given[0].replace('_', '-')}: {why}, leave one of both out")


def _cost(priced: PricedPlan, options: Namespace) -> Expense | None:
    if options.cost_per_hour is None:
        return None
    return expense_of_step(priced.problem, priced.step_seconds, options.cost_per_hour)


def _plan_sizes(
    experiment: Experiment, options: Namespace, clusters: Sequence[Cluster], rates: Rates,
    notes: Sequence[str], deadline: Deadline,
) -> int:
    """Search a plan on each cluster, print the table of their steps and return the exit code.

    Each gets an equal share of the time that those before it have left. The plan for as many devices as are
    enough is written to --output.
    """
    others = ("price", "what_if", "lost_hosts", "robust", "html")
    _refuse_others(options, others, why="--devices with several numbers prints a table")
    if options.output:
        require_output(Path(options.output), "--output", first="calls:", what="plan")
    sizes: list[SizedPlan] = []
    with _reporting(options.experiment), SearchWatch(signal.SIGINT, signal.SIGTERM, then="this is") as watch:
        _check_limits(options)
        for cluster in clusters:
            watch.begin(f"on {cluster.num_devices} devices")
            limit = deadline.left / (len(clusters) - len(sizes))
            planned, obstacle = None, None
            problem = _problem(experiment, options, cluster)
            try:
                planned = _search(
                    problem, options, rates.on(cluster), time_limit=limit, watch=watch, explain=False,
                    parts=len(clusters))
            except ValueError as error:
                obstacle = str(error)
            sizes.append(SizedPlan(cluster.num_devices, planned, obstacle))
    table = Sizing(sizes, options.cost_per_hour)
    enough = table.enough
    if enough is None or enough.planned is None:
        raise UserError(f"{options.experiment}: {sizes[-1].obstacle}")
    if options.output:
        enough.planned.plan.save(Path(options.output))
    if options.json:
        print(json.dumps(table.document() | {"not_measured": list(notes)}))
    else:
        console = Console()
        console.print(table.render(columns=console.width), soft_wrap=True)
        if notes:
            console.print(Text("\n" + "\n".join(notes)), soft_wrap=True)
        if options.output:
            console.print(f"\nwritten to {options.output}: {enough.num_devices} devices", highlight=False)
    return 0


def _price(
    experiment: Experiment, options: Namespace, cluster: Cluster, rates: Rates, notes: Sequence[str]
) -> int:
    """Print the seconds and the memory of the plan of --price, and return 0 if it fits, else 1."""
    others = ("output", "pin", "together", "what_if", "lost_hosts", "robust")
    _refuse_others(options, others, why="--price searches no plan")
    plan = ExecutionPlan.load(options.price)
    with _reporting(options.experiment):
        problem = problem_of(experiment, cluster)
    _check_limits(options)
    with naming(f"--price {options.price}"):
        plan = checked_plan(experiment, plan, num_devices=cluster.num_devices)
        priced = price(problem, rates, plan)
    _write_page(options, priced)
    unmeasured = [*notes, *not_measured(rates, problem, plan)]
    cost = _cost(priced, options)
    if options.json:
        document = report.priced_document(priced) | {"not_measured": unmeasured}
        print(json.dumps(document | ({"cost": cost.document()} if cost is not None else {})))
    else:
        console = Console()
        console.print(report.render_priced(priced, columns=console.width), soft_wrap=True)
        if cost is not None:
            console.print(Text(f"\n{cost}"), soft_wrap=True)
        if unmeasured:
            console.print(Text("\n" + "\n".join(unmeasured)), soft_wrap=True)
    return 0 if priced.lacks is None else 1


def _problem(experiment: Experiment, options: Namespace, cluster: Cluster) -> Problem:
    together = [group.split(",") for group in options.together]
    layouts, fixed = _pins(options.pin)
    return problem_of(experiment, cluster, pins=layouts, together=together, pinned_options=fixed)


def _changes(problem: Problem, rates: Rates, texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the changes of --what-if, each as values by key. Raises UserError if one is not legal."""
    changes = []
    for text in texts:
        with naming(f"--what-if {text}"):
            pairs = [pair.partition("=") for pair in text.split(",")]
            if not all(key and value for key, _, value in pairs):
                raise ValueError("write KEY=VALUE, such as response_tokens=8000; several joined by commas")
            changes.append({key: value for key, _, value in pairs})
            change(problem, rates, changes[-1])
    return changes


def _search(
    problem: Problem, options: Namespace, rates: Rates, *, time_limit: float, watch: SearchWatch,
    explain: bool = True, parts: float = 1.0,
) -> Planned:
    return make_plan(
        problem, rates, time_limit=time_limit, gap=options.gap, progress=watch.progress,
        should_stop=watch.should_stop, explain=explain, slack=options.slack, parts=parts)


def _rates_of(options: Namespace, cluster: Cluster) -> tuple[Rates, list[str]]:
    """Return the rates with fitted links and the path of the engine, and notes about the fit."""
    if options.engine not in ENGINES:
        meant = did_you_mean(options.engine, [*ENGINES])
        raise UserError(f"--engine {options.engine}{meant}: legal are {', '.join(ENGINES)}")
    path = ENGINES[options.engine]
    if path is not None and options.profile is not None:
        raise UserError("--engine: the profile has measured this engine, leave one of both out")
    if path is not None and cluster.device_type != "cuda":
        raise UserError(f"--engine {options.engine}: its path is that on a GPU, the cluster has none")
    if not options.links:
        return (_rates(cluster, options.profile) if path is None else Rates(cluster, path=path)), []
    fitted = fitted_links(cluster, options.links)
    if options.profile is None:
        return Rates(fitted.cluster, fitted.efficiencies, path), list(fitted.notes)
    try:
        return ProfiledRates(Profile.load(options.profile), fitted.cluster, link=1.0), list(fitted.notes)
    except ValueError as error:
        raise UserError(f"--profile {options.profile}: {error}") from error


def auto_plan(experiment: Experiment, name: str, *, cluster: Cluster, profile: str | None) -> ExecutionPlan:
    """Return a plan for the machines of this run, and say on standard error how good it is.

    In the launcher, Ctrl-C ends the search, and the run begins with the best plan so far.
    """
    rates = _rates(cluster, profile)
    signals = () if is_worker() else (signal.SIGINT,)
    with _reporting(name), SearchWatch(*signals, then="the run begins with") as watch:
        try:
            planned = make_plan(
                problem_of(experiment, cluster), rates, time_limit=TIME_LIMIT, gap=_GAP, explain=False,
                slack=_SLACK, progress=watch.progress, should_stop=watch.should_stop)
        except TooLittleTime as error:
            command = f"`realhf plan {name} --time-limit {error.limit_seconds:g} -o plan.yaml`"
            raise ValueError(f"{error.reason}: make one by {command}, and run --plan plan.yaml") from None
    step = f"{format_seconds(planned.result.step_seconds)} per step predicted"
    took = format_seconds(planned.search_seconds)
    near = report.nearness(planned.result)
    print(f"realhf: planned in {took}: {step}, {near}", file=sys.stderr, flush=True)
    return planned.plan


def _rates(cluster: Cluster, name: str | None) -> Rates:
    if name is None:
        return Rates(cluster)
    profile = Profile.load(name)
    try:
        return ProfiledRates(profile, cluster)
    except ValueError as error:
        raise UserError(f"--profile {name}: {error}") from error


def cluster_at_hand(*, nproc: int | None, cluster: str | None, profile: str | None) -> Cluster:
    """Return the cluster that `--plan auto` plans for: the named one, else torchrun's hosts, else this host.

    The figures of unnamed hosts come from the profile, or without one from a shipped description.
    """
    if cluster is not None:
        return Cluster.load(cluster)
    num_hosts = 1
    if is_worker():
        nproc = int(os.environ["LOCAL_WORLD_SIZE"])
        num_hosts = int(os.environ["WORLD_SIZE"]) // nproc
    if profile is None:
        return replace(this_machine(nproc), num_hosts=num_hosts)
    return _as_measured(Profile.load(profile).cluster, profile, num_hosts=num_hosts, nproc=nproc)


def _as_measured(measured: Cluster, name: str, *, num_hosts: int, nproc: int | None) -> Cluster:
    """Return these hosts with the profile's figures. Raises UserError if it lacks a link that they need."""
    per_host = nproc or measured.devices_per_host
    here = "cuda" if _gpus() else "cpu"
    if measured.device_type != here:
        raise UserError(
            f"--profile {name}: it was measured on {measured.device_type} devices, "
            f"this machine has {here} devices")
    mend = "or name a cluster file that says how fast it is (--cluster)"
    if num_hosts > 1 and measured.inter_host is None:
        why = f"measured on one host, it knows no link between the {num_hosts} hosts of this run"
        raise UserError(f"--profile {name}: {why}: measure under torchrun on several, {mend}")
    if per_host > 1 and measured.devices_per_host == 1:
        why = f"measured with one worker per host, it knows no link between the {per_host} workers of a host"
        raise UserError(f"--profile {name}: {why}: measure with --nproc {per_host}, {mend}")
    memory = measured.device_memory_bytes if here == "cuda" else measured.host_memory_bytes / per_host
    return replace(measured, num_hosts=num_hosts, devices_per_host=per_host, device_memory_bytes=memory)


def _gpus() -> list[str]:
    """Return the driver's description of each GPU of this host."""
    return [p.read_text() for p in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]


def this_machine(num_devices: int | None = None) -> Cluster:
    """Return this host as a cluster: its GPUs, or if it has none, processes on its CPU.

    Raises UserError if no shipped description knows the GPUs.
    """
    gpus = _gpus()
    if not gpus:
        number = num_devices or num_cores()
        memory = host_memory_bytes()
        cluster = Cluster.load("cpu-laptop")
        peaks = dict(cluster.peak_flops)
        if not multiplies_bfloat16():  # Then products in bfloat16 are computed in float32.
            peaks["bfloat16"] = peaks["float32"]
        return replace(
            cluster, devices_per_host=number, device_memory_bytes=memory / number, host_memory_bytes=memory,
            peak_flops=peaks, cores_per_host=num_cores(),
            host_memory=None,  # Devices use the same memory, so offloading would save nothing.
        )
    model = re.search(r"Model:\s*(.*)", gpus[0])
    for name in ("H200", "H100", "A100"):
        if model is not None and name in model[1]:
            of_one_host = replace(Cluster.load(f"{name.lower()}-8x8"), num_hosts=1)
            return replace(of_one_host, devices_per_host=num_devices or len(gpus))
    shown = model[1] if model else "unknown"
    raise UserError(f"this machine has GPUs of model {shown!r}, which no shipped cluster file describes: "
                    "write one as in plans/clusters and give --cluster")


@contextmanager
def _reporting(experiment: str) -> Iterator[None]:
    """Turn a ValueError into a UserError that names the experiment, unless it names an option."""
    try:
        yield
    except ValueError as error:
        about_option = str(error).startswith("--")
        raise UserError(str(error) if about_option else f"{experiment}: {error}") from error


_PIN_OPTIONS = tuple(part.name for part in fields(CallPlan) if part.name not in ("layout", "predicted"))


def _pins(texts: Sequence[str]) -> tuple[dict[str, Layout], dict[str, dict[str, Any]]]:
    """Return the layouts and the options that --pin fixes, by call."""
    layouts: dict[str, Layout] = {}
    fixed: dict[str, dict[str, Any]] = {}
    known: dict[str, str] = {}
    for text in texts:
        call, equals, values = text.partition("=")
        with naming(f"--pin {text}"):
            if not equals or not values:
                raise ValueError(
                    "write CALL=LAYOUT, such as actor_train=d8t8@0-63, with options behind commas")
            layout, options = _pin(values)
        if call in known:
            raise ValueError(f"--pin {call} is given twice: {known[call]} and {values}")
        known[call] = values
        if layout is not None:
            layouts[call] = layout
        if options:
            fixed[call] = options
    return layouts, fixed


def _pin(text: str) -> tuple[Layout | None, dict[str, Any]]:
    """Return the layout (None: any) and the options of a pin. Ranks may have commas, too."""
    places = []
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals and name not in OPTIONS:
            places.append(part)
            continue
        if name not in _PIN_OPTIONS:
            legal = ", ".join(_PIN_OPTIONS)
            raise ValueError(f"unknown option {name!r}{did_you_mean(name, _PIN_OPTIONS)}: legal are {legal}")
        number = int(value) if value.isdecimal() else value
        options[name] = {"true": True, "false": False, "": name in OPTIONS}.get(value.lower(), number)
    layout = Layout.parse(",".join(places)) if places else None
    CallPlan(layout or Layout.parse("d1@0"), **options)  # It refuses values that are not legal.
    return layout, options


def _device_numbers(text: str | None) -> list[int]:
    """Return the numbers of --devices. In `8,16,...,256` each is twice the one before, in `8,12,...,32` it is
    larger by 4."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    numbers: list[int] = []
    try:
        for position, part in enumerate(parts):
            if part not in ("...", "\u2026"):
                numbers.append(int(part))
                continue
            before, last = numbers[-2:], int(parts[position + 1])
            factor, difference = before[1] / before[0], before[1] - before[0]
            while difference > 0 and numbers[-1] < last:
                further = numbers[-1] * factor if factor == int(factor) else numbers[-1] + difference
                if further >= last:
                    break
                numbers.append(int(further))
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"--devices {text}: write a number, or several such as 8,16,...,256") from error
    if numbers != sorted(set(numbers)):
        raise UserError(f"--devices {text}: the numbers must rise")
    return numbers


def _cluster(options: Namespace, number: int | None) -> Cluster:
    if options.cluster:
        cluster = Cluster.load(options.cluster)
    else:
        cluster = this_machine() if options.profile is None else Profile.load(options.profile).cluster
    if number is None:
        return cluster
    per_host = cluster.devices_per_host
    if not 1 <= number <= cluster.num_devices or (number > per_host and number % per_host):
        legal = f"1 to {per_host}, or whole hosts of {per_host} up to {cluster.num_devices}"
        if not options.cluster and options.profile is not None and cluster.inter_host is None:
            mend = "for several, name a cluster file (--cluster)"
            legal += f"; {options.profile} was measured on one host: {mend}"
        raise UserError(f"--devices {number}: legal are {legal}")
    return cluster.first_devices(number)
