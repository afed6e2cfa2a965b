"""`realhf plan`, and the planning that `realhf run --plan auto` does. Free of torch."""

import json
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from realhf.cluster import Cluster
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.layout import Layout
from realhf.planner import report
from realhf.planner.make import Planned, make_plan
from realhf.planner.profile import Profile, ProfiledRates
from realhf.planner.rates import Rates
from realhf.planner.search import Progress
from realhf.planning import problem_of
from realhf.units import format_seconds

_GAP = 0.001  # The search ends when the plan is proven to be so near the best one.
_ROUNDED_BYTES = 4e9
_AUTO_ROUNDS = 100  # Of the search of --plan auto, which must end alike on every rank.


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", help="cluster file or shipped name such as h100-8x8; default: this machine")
    add("--profile", help="what `realhf profile` measured; its machine is the default cluster")
    add("-o", "--output", metavar="PLAN.yaml", help="where to write the plan")
    text = "seconds of computing that the search may take; default: 2 up to 64 devices, 20 at 1024"
    add("--time-limit", type=float, metavar="S", help=text)
    add("--gap", type=float, default=_GAP, help="search until the plan is within this share of the best one")
    text = "fix the layout of a call, such as actor_train=d8t8@0-63; may be repeated"
    add("--pin", action="append", default=[], metavar="CALL=LAYOUT", help=text)
    text = "calls that share one layout, separated by commas; may be repeated"
    add("--together", action="append", default=[], metavar="CALLS", help=text)
    add("--devices", type=int, metavar="N", help="plan for the first N devices only, such as after a failure")
    add("--json", action="store_true", help="print one JSON document")


def plan(options: Namespace, experiment: Experiment) -> int:
    """Prints the plan and writes it where asked; the exit code."""
    profile = None if options.profile is None else Profile.load(options.profile)
    cluster = _cluster(options, profile)
    rates = _rates(cluster, profile)
    if options.time_limit is not None and not options.time_limit > 0:
        raise UserError(f"--time-limit {options.time_limit:g}: it must be above 0 seconds")
    if not 0 <= options.gap < 1:
        raise UserError(f"--gap {options.gap:g}: it must be at least 0 and below 1")
    if options.output and not Path(options.output).parent.is_dir():
        raise UserError(f"--output {options.output}: there is no directory {Path(options.output).parent}")
    if options.output and Path(options.output).is_dir():
        raise UserError(f"--output {options.output} is a directory: name the file to write")
    limit = options.time_limit or default_time_limit(cluster.num_devices)
    with _reporting(options.experiment), _watched() as progress:
        problem = problem_of(
            experiment, cluster, pins=_pins(options.pin),
            together=[group.split(",") for group in options.together],
        )  # fmt: skip
        planned = make_plan(problem, rates, time_limit=limit, gap=options.gap, progress=progress)
    if options.output:
        planned.plan.save(Path(options.output))
    if options.json:
        print(json.dumps(report.document(planned)))
        return 0
    console = Console()
    console.print(report.render(planned, columns=console.width), soft_wrap=True)
    if options.output:
        console.print(f"\nwritten to {options.output}", highlight=False)
    return 0


def default_time_limit(num_devices: int) -> float:
    """Seconds of computing: 2 up to 64 devices, 20 at 1024."""
    return 2.0 * max(1.0, (num_devices / 64) ** 0.83)


def auto_plan(experiment: Experiment, name: str, *, cluster: Cluster, profile: str | None) -> Planned:
    """A plan for the machines that this runs on; every rank that asks gets the same."""
    rates = _rates(cluster, None if profile is None else Profile.load(profile))
    with _reporting(name):
        problem = problem_of(experiment, cluster)
        return make_plan(problem, rates, time_limit=float("inf"), gap=_GAP, max_rounds=_AUTO_ROUNDS)


def _rates(cluster: Cluster, profile: Profile | None) -> Rates:
    if profile is None:
        return Rates(cluster)
    if (measured := profile.cluster.device_type) != cluster.device_type:
        what = f"it was measured on {measured} devices, the cluster has {cluster.device_type} devices"
        raise UserError(f"--profile: {what}")
    return ProfiledRates(profile, cluster)


def this_machine(num_devices: int | None = None) -> Cluster:
    """This host as a cluster: its GPUs, where a shipped description knows them, else processes on its CPU."""
    found = [p.read_text() for p in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    if not found:
        number = num_devices or os.cpu_count() or 1
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        memory = memory // _ROUNDED_BYTES * _ROUNDED_BYTES or memory  # Alike on hosts that are nearly so.
        cluster = Cluster.load("cpu-laptop")
        return replace(
            cluster, devices_per_host=number, device_memory_bytes=memory / number, host_memory_bytes=memory,
            # What is in host memory is in the same memory: to offload saves nothing.
            host_memory=None,
        )  # fmt: skip
    model = re.search(r"Model:\s*(.*)", found[0])
    for name in ("H200", "H100", "A100"):
        if model is not None and name in model[1]:
            of_one_host = replace(Cluster.load(f"{name.lower()}-8x8"), num_hosts=1)
            return replace(of_one_host, devices_per_host=num_devices or len(found))
    shown = model[1] if model else "unknown"
    raise UserError(f"this machine has GPUs of model {shown!r}, which no shipped cluster file describes: "
                    "write one as in plans/clusters and give --cluster")  # fmt: skip


@contextmanager
def _reporting(experiment: str) -> Iterator[None]:
    """ValueErrors are about the experiment, or an option that they name."""
    try:
        yield
    except ValueError as error:
        about_option = str(error).startswith("--")
        raise UserError(str(error) if about_option else f"{experiment}: {error}") from error


@contextmanager
def _watched() -> Iterator[Progress | None]:
    """Shows on a terminal's standard error how far the search is."""
    if not sys.stderr.isatty():
        yield None
        return
    status = Status("searching", console=Console(stderr=True))

    def show(best: float, bound: float, seconds: float) -> None:
        proven = f"best {format_seconds(best)}, none below {format_seconds(bound)}"
        status.update(f"searching for {seconds:.0f} s: {proven}")

    with status:
        yield show


def _pins(texts: Sequence[str]) -> dict[str, Layout]:
    pins: dict[str, Layout] = {}
    for call, layout in map(_pin, texts):
        if call in pins:
            raise ValueError(f"--pin {call} is given twice: {pins[call]} and {layout}")
        pins[call] = layout
    return pins


def _pin(text: str) -> tuple[str, Layout]:
    call, equals, layout = text.partition("=")
    if not equals:
        raise ValueError(f"--pin {text}: write CALL=LAYOUT, such as actor_train=d8t8@0-63")
    try:
        return call, Layout.parse(layout)
    except ValueError as error:
        raise ValueError(f"--pin {text}: {error}") from error


def _cluster(options: Namespace, profile: Profile | None) -> Cluster:
    if options.cluster:
        cluster = Cluster.load(options.cluster)
    else:
        cluster = this_machine() if profile is None else profile.cluster
    if (number := options.devices) is None:
        return cluster
    per_host = cluster.devices_per_host
    if not 1 <= number <= cluster.num_devices or (number > per_host and number % per_host):
        legal = f"1 to {per_host}, or whole hosts of {per_host} up to {cluster.num_devices}"
        raise UserError(f"--devices {number}: legal are {legal}")
    if number <= per_host:
        return replace(cluster, num_hosts=1, devices_per_host=number)
    return replace(cluster, num_hosts=number // per_host)
