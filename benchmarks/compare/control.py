"""Compares examples/control/srl_ppo.py with Sample Factory and with PPO on EnvPool, and measures the ring.

    make control-bench-setup
    python benchmarks/compare/control.py sides                # everything; about an hour
    python benchmarks/compare/control.py sides --quick        # a try: one seed, few frames
    python benchmarks/compare/control.py ring                 # an environment of 5 ms, rings of 1 to 16
    python benchmarks/compare/control.py curves --runs RUN... --picture FILE    # draws returns by frames

`sides` trains HalfCheetah with PPO: the same network (two layers of 64 units with tanh for the policy, and as
many for the value), the same settings, and the same two cores, the first two of this process. The sides take
turns, and each seed begins with another one. They are

- ours: `realhf run` on one rank, with the environments in EnvPool's threads;
- ours_remote: the same with the policy on another rank, and a ring of two;
- ours_processes: on one rank, with gymnasium's environments in processes, and a ring of two;
- sample_factory: Sample Factory 2.1.1, with two workers, which wait for each update;
- sample_factory_async: the same, but its workers go on with the last weights meanwhile;
- envpool: one loop in one process with EnvPool 1.2.5, as CleanRL writes PPO for continuous actions.

Frames per second and CPU seconds are those between a side's first update and its last, of all its processes.
The time to a return counts from the start of the command until the mean return of the last `window` frames'
episodes is as high; these are episodes of training, with noise. The policy that is left plays once in each
of 16 environments of EnvPool with other seeds, without noise, for all sides alike: its held-out return.

Known differences: ours normalises observations by the mini-batches of training, as Sample Factory does, and
envpool by what it has played, with each step. Ours counts the value at the end of an episode that was
truncated, and envpool counts nothing. Ours scales the advantages of a whole step, and envpool those of a
mini-batch. Sample Factory clips ratios at 1/1.2, starts its last layer with a gain of 1, and clips normalised
observations at 5, not 10.

`ring` runs the same example on an environment that sleeps for 5 ms in each step. Each slice of the ring has
`per_slice` environments, a process each, so that a larger ring has more of them, as in SRL. The policy is on
the rank of the environments, on another rank, or on another host: a network namespace, which needs root and
iproute2. The ratio is to a ring of one. With `num_envs`, all rings have as many environments. Each row is
followed by what the planner predicts from the figures that one of its runs has recorded.

On a machine that is not idle, frames per CPU second are a better guide than frames per second.

The exit code is 1 if a goal was missed.
"""

import importlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.two_hosts import two_hosts
from realhf import Cluster, Expected
from realhf.cli.planning_problem import problem_of
from realhf.execution_plan import ExecutionPlan
from realhf.planner.rates import Rates
from realhf.planner.step_time import host_seconds
from realhf.user_input.files import read_json_lines

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples" / "control" / "srl_ppo.py"
THEIRS = Path(__file__).with_name("control_theirs.py")
THEIR_PYTHON = REPO / ".venv-control-bench" / "bin" / "python"
"""The environment that `make control-bench-setup` makes."""
OURS = ("ours", "ours_remote", "ours_processes")
SIDES = (*OURS, "sample_factory", "sample_factory_async", "envpool")
SLOW = "benchmarks.compare.control_task:Slow-v0"
_HELD_OUT_SEED = 10_000
_PAUSE_SECONDS = 0.05


@dataclass
class Settings:
    """Settings that all sides share, in the words of the example."""

    num_envs: int = 16
    horizon: int = 128
    epochs: int = 10
    minibatches: int = 16
    lr: float = 3e-4
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    reward_scale: float = 0.1


THEIR_SETTINGS = {"value_coef": 0.25, "max_grad_norm": 0.5}
"""What the example fixes, and rivals are told."""


@dataclass
class Sides:
    """Trains HalfCheetah with all sides in turns."""

    sides: tuple[str, ...] = SIDES
    seeds: tuple[int, ...] = (0, 1, 2)
    frames: int = 409_600
    task: str = "HalfCheetah-v4"
    target: float = 1000.0
    """The return whose time is measured."""
    window: int = 32_768
    """Frames whose episodes' returns are averaged for that."""
    workers: int = 2
    """Processes or threads for the rivals' environments, one for each core."""
    settings: Settings = field(default_factory=Settings)
    out: Path = Path("runs/control_sides")
    """Directory for the runs; those in it are replaced."""
    quick: bool = False
    """One seed of 16,384 frames."""
    json: bool = False
    """Print one JSON document."""


@dataclass
class Curves:
    """Draws the returns of runs of the example by their frames, and prints their first and best ones."""

    runs: tuple[Path, ...]
    """Directories of runs."""
    picture: Path
    """File for the picture."""
    window: int = 16_384
    """Frames whose episodes' returns are averaged."""
    json: bool = False
    """Print one JSON document."""


Place = Literal["inline", "remote", "two_hosts", "spread"]


@dataclass
class Ring:
    """Measures frames per second of an environment that sleeps, by the size of the ring."""

    rings: tuple[int, ...] = (1, 2, 4, 8, 16)
    per_slice: int = 1
    """Environments of each slice, in a process each."""
    num_envs: int | None = None
    """Environments of all slices together; None: `per_slice` in each."""
    planned_from: int | None = None
    """The ring of the run by which the planner predicts the others of its row; None: the smallest."""
    places: tuple[Place, ...] = ("inline", "remote", "two_hosts", "spread")
    """Where the policy answers: on the rank of the environments, on another one, or on another host. With
    `spread`, half of the environments are on either of two hosts, and one of these answers both."""
    repeats: int = 3
    steps: int = 4
    """Steps of training in each run, of which the first is left out."""
    horizon: int = 128
    out: Path = Path("runs/control_ring")
    quick: bool = False
    """Rings of 1 and 4, inline, once."""
    json: bool = False
    """Print one JSON document."""


class Point(NamedTuple):
    """The frames and returns of a side after an update. Seconds count from the start of its command."""

    frames: int
    mean_return: float | None
    """That of the episodes that ended since the last update."""
    seconds: float
    cpu_seconds: float


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and all its descendants, with those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It has ended.
        parents[int(path.parent.name)] = int(words[1])
        ticks[int(path.parent.name)] = sum(map(int, words[11:15]))
    family, new = set[int](), {root} & ticks.keys()
    while new:
        family |= new
        new = {pid for pid, parent in parents.items() if parent in new}
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(
    command: Sequence[str], log: Path, *, variables: Mapping[str, str] | None = None, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command with one thread for each process; what it says besides its results goes to `log`.

    What is still running at the end is ended. Raises RuntimeError if the command fails.
    """
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment |= variables or {}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stderr=errors, text=True, **more)
        try:
            yield process
            code = process.wait()
        finally:
            process.terminate()
            process.wait()
    if code:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)} ended with code {code}:\n{tail}")


def train(side: str, seed: int, options: Sides) -> list[Point]:
    """Train from a seed, and return where the side was after each update."""
    out = options.out / side / f"seed{seed}"
    remove(out)
    start = time.perf_counter()

    def point(frames: int, mean_return: float | None, pid: int) -> Point:
        return Point(frames, mean_return, time.perf_counter() - start, cpu_seconds(pid))

    if side.startswith("ours"):
        per_step = options.settings.num_envs * options.settings.horizon
        words = asdict(options.settings) | {
            "task": options.task, "seed": seed, "steps": options.frames // per_step, "out": out / "run",
            "ring": 1 if side == "ours" else 2}
        words |= {"envpool": options.task} if side != "ours_processes" else {}
        with ours(words, out, place="remote" if side == "ours_remote" else "inline") as process:
            rows = follow(out / "run" / "metrics.jsonl", process)
            return [point(per_step * row["step"], row.get("return/mean"), process.pid) for row in rows]
    kind = side.removesuffix("_async")
    settings = asdict(options.settings) | THEIR_SETTINGS | {
        "task": options.task, "seed": seed, "frames": options.frames, "out": str(out),
        "workers": options.workers, "asynchronous": side.endswith("_async")}
    with theirs(kind, settings, out) as process:
        assert process.stdout is not None
        lines = map(json.loads, process.stdout)
        return [point(line["frames"], line["return"], process.pid) for line in lines]


@contextmanager
def ours(words: Mapping[str, Any], out: Path, *, place: str = "inline") -> Iterator[subprocess.Popen[str]]:
    """Run the example with the policy in a place: on the rank of the environments, on another one, or on
    another host."""
    command = ["-m", "realhf", "run", str(EXAMPLE)]
    plan = "two_hosts.yaml" if place == "spread" else "remote.yaml"
    command += [] if place == "inline" else ["--plan", str(EXAMPLE.with_name(plan))]
    for key, value in words.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    with ExitStack() as stack:
        if place not in ("two_hosts", "spread"):
            command = [sys.executable, *command, "--nproc", "1" if place == "inline" else "2"]
            yield stack.enter_context(running(command, out / "log.txt", stdout=subprocess.DEVNULL))
            return
        hosts = stack.enter_context(two_hosts())
        meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address]
        processes = [
            stack.enter_context(running(
                [*host.inside, sys.executable, "-m", "torch.distributed.run", *meeting, "--node-rank", str(i),
                 *command], out / f"log{i}.txt", stdout=subprocess.DEVNULL,
                variables={"GLOO_SOCKET_IFNAME": host.interface}))
            for i, host in enumerate(hosts)]
        yield processes[0]
        processes[1].wait()


def theirs(kind: str, settings: Mapping[str, Any], out: Path) -> Any:
    if not THEIR_PYTHON.exists():
        sys.exit(f"there is no {THEIR_PYTHON}: run `make control-bench-setup` first")
    command = [str(THEIR_PYTHON), str(THEIRS), kind, json.dumps(settings)]
    return running(command, out / f"{kind}.txt", stdout=subprocess.PIPE)


def follow(path: Path, process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows that a run writes, as soon as they are there, until it has ended."""
    done = 0
    while True:
        ended = process.poll() is not None
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines[done:]:
            if line.endswith("\n"):
                done += 1
                yield json.loads(line)
        if ended:
            return
        time.sleep(_PAUSE_SECONDS)


def rate(points: Sequence[Point]) -> dict[str, float]:
    """Return frames per second and per CPU second between the first update and the last."""
    first, last = points[0], points[-1]
    frames = last.frames - first.frames
    return {
        "per_second": frames / (last.seconds - first.seconds),
        "per_cpu_second": frames / max(last.cpu_seconds - first.cpu_seconds, 1e-9)}


def seconds_to(target: float, points: Sequence[Point], *, window: int) -> float | None:
    """Return the seconds until the mean return over the last `window` frames is `target`, or None."""
    recent: list[Point] = []
    for point in points:
        if point.mean_return is not None:
            recent.append(point)
        recent = [one for one in recent if one.frames > point.frames - window]
        if recent and statistics.fmean(one.mean_return or 0.0 for one in recent) >= target:
            return point.seconds
    return None


def held_out(side: str, seed: int, options: Sides) -> float:
    """Return the mean return of the policy that a side has left, without noise, with seeds of its own."""
    out = options.out / side / f"seed{seed}"
    if side.startswith("ours"):
        write_policy(out)
    settings = {
        "policy": str(out / "policy.npz"), "task": options.task, "workers": options.workers,
        "num_envs": options.settings.num_envs, "seed": _HELD_OUT_SEED}
    with theirs("evaluate", settings, out) as process:
        assert process.stdout is not None
        (line,) = process.stdout
        return float(json.loads(line)["return"])


def write_policy(out: Path) -> None:
    """Write the policy of one of our runs as rivals do: what normalises observations, and the layers."""
    (export,) = (out / "run" / "hf").glob("step_*")
    weights = load_file(export / "model.safetensors")
    mean, square = weights["moments"]
    std = (square - mean.square()).clamp_min(1e-8).sqrt()
    layers = [weights[f"policy.{i}.{part}"] for i in (0, 2, 4) for part in ("weight", "bias")]
    np.savez(
        out / "policy.npz", mean=mean.numpy(), std=std.numpy(), clip=np.array(10.0),
        **{f"layer{i}": layer.numpy() for i, layer in enumerate(layers)})


def compare(options: Sides) -> int:
    """Train with all sides in turns; print a table; return the exit code."""
    rows = []
    for number, seed in enumerate(options.seeds):
        shift = number % len(options.sides)
        for side in options.sides[shift:] + options.sides[:shift]:
            points = train(side, seed, options)
            row = {
                "side": side, "seed": seed, "points": points, **rate(points),
                "seconds_to_return": seconds_to(options.target, points, window=options.window),
                "held_out": held_out(side, seed, options)}
            rows.append(row)
            speed = f"{row['per_second']:,.0f} frames/s, {row['per_cpu_second']:,.0f} per CPU second"
            progress(f"{side}, seed {seed}: {speed}, held-out return {row['held_out']:.0f}")
    table = side_table(rows, options)
    document = {
        "benchmark": "control sides", "machine": machine() | {"cores_used": len(os.sched_getaffinity(0))},
        "frames": options.frames, "settings": asdict(options.settings), "rows": rows}
    return report(document, tables=[table], goals=side_goals(rows), as_json=options.json)


def of_side(rows: Sequence[dict[str, Any]], side: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["side"] == side and row[key] is not None]


def side_table(rows: Sequence[dict[str, Any]], options: Sides) -> Table:
    """Return the table of medians over seeds."""
    table = Table(title=f"{options.task}, {options.frames:,} frames, {len(options.seeds)} seeds: medians")
    table.add_column("side")
    to_return = f"seconds to a return of {options.target:.0f} (seeds that reach it)"
    for title in ("frames/s", "frames/CPU s", to_return, "held-out return", "of each seed"):
        table.add_column(title, justify="right")
    for side in options.sides:
        rates = (
            f"{statistics.median(of_side(rows, side, key)):,.0f}" for key in ("per_second", "per_cpu_second"))
        reached = of_side(rows, side, "seconds_to_return")
        seconds = f"{statistics.median(reached):.0f} ({len(reached)})" if reached else "never"
        returns = of_side(rows, side, "held_out")
        each = " ".join(f"{value:.0f}" for value in returns)
        table.add_row(side, *rates, seconds, f"{statistics.median(returns):.0f}", each)
    return table


def side_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals: our better side is at least as fast as each rival, in the median over seeds.

    A time to a return counts as endless for a seed that does not reach it.
    """
    ours = [side for side in OURS if of_side(rows, side, "per_second")]
    rivals = [side for side in SIDES if side not in OURS and of_side(rows, side, "per_second")]
    goals = []

    def median(side: str, key: str) -> float:
        values = [row[key] for row in rows if row["side"] == side]
        return statistics.median(math.inf if value is None else value for value in values)

    for rival in rivals if ours else []:
        speed = max(median(side, "per_second") for side in ours) / median(rival, "per_second")
        goals.append(Goal(f"frames/s, ours / {rival}", speed, at_least=1.0))
        soonest = min(median(side, "seconds_to_return") for side in ours)
        theirs_takes = median(rival, "seconds_to_return")
        if soonest < math.inf or theirs_takes < math.inf:
            goals.append(Goal(f"seconds to the return, {rival} / ours", theirs_takes / soonest, at_least=1.0))
    return goals


# The ring


def sweep(options: Ring) -> int:
    """Play with rings of all sizes in turns; print a table; return the exit code."""
    speeds: dict[str, dict[int, list[float]]] = {
        place: {ring: [] for ring in options.rings if place != "spread" or ring % 2 == 0}
        for place in options.places}
    for repeat in range(options.repeats):
        for place in options.places:
            shift = repeat % len(options.rings)
            for ring in options.rings[shift:] + options.rings[:shift]:
                if place == "spread" and ring % 2:
                    continue
                speed = ring_speed(place, ring, options)
                speeds[place][ring].append(speed)
                progress(f"{place}, ring of {ring}: {speed:,.0f} frames/s")
    table = Table(title=f"An environment of 5 ms, {options.per_slice} of them in each slice: frames/s")
    for title in ("policy", *(f"ring of {ring}" for ring in options.rings), "best / ring of 1"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    goals = []
    for place, of_ring in speeds.items():
        medians = {ring: statistics.median(values) for ring, values in of_ring.items()}
        gain = max(medians.values()) / medians[min(medians)]
        cells = (f"{medians[ring]:,.0f}" if ring in medians else "" for ring in options.rings)
        table.add_row(place, *cells, f"{gain:.1f}")
        if min(medians) == 1:
            goals.append(Goal(f"{place}: best ring / ring of 1", gain, at_least=3.0))
    predicted = {place: predictions(place, options) for place in speeds}
    for place, of_ring in predicted.items():
        cells = (f"{of_ring[ring]:,.0f}" if ring in of_ring else "" for ring in options.rings)
        table.add_row(f"{place}, predicted", *cells, "")
    document = {
        "benchmark": "control ring", "machine": machine(), "frames_per_second": speeds,
        "predicted": predicted}
    return report(document, tables=[table], goals=goals, as_json=options.json)


def ring_speed(place: str, ring: int, options: Ring) -> float:
    """Return frames per second of playing alone, from the median step of a run, but for its first step."""
    out = options.out / f"{place}{ring}"
    remove(out)
    num_envs = options.num_envs or ring * options.per_slice
    words = {
        "task": SLOW, "ring": ring // 2 if place == "spread" else ring, "num_envs": num_envs,
        "horizon": options.horizon, "segment": 8, "epochs": 1, "minibatches": 1, "steps": options.steps,
        "out": out / "run"}
    with ours(words, out, place=place) as process:
        process.wait()
    rows = [row for _, row in read_json_lines(out / "run" / "metrics.jsonl")]
    seconds = statistics.median(row["timing_s/play"] for row in rows[1:])
    return num_envs * options.horizon / seconds


def predictions(place: str, options: Ring) -> dict[int, float]:
    """Return the frames per second that the planner predicts for each ring, by one of the runs of a place;
    nothing if its environments are spread over ranks."""
    if place == "spread":
        return {}
    sys.path.insert(0, str(EXAMPLE.parent))
    example = importlib.import_module(EXAMPLE.stem)
    run = options.out / f"{place}{options.planned_from or min(options.rings)}" / "run"
    plan = ExecutionPlan.load(str(run / "plan.yaml"))
    found = {}
    for ring in options.rings:
        made = example.PPO(
            task=SLOW, ring=ring, num_envs=options.num_envs or ring * options.per_slice,
            horizon=options.horizon, expected=Expected(seconds_from=str(run)))
        problem = problem_of(made, Cluster.load("cpu-laptop"))
        work = problem.workloads["play"]
        assert work.slices is not None
        slices = replace(work.slices, num=made.num_envs)
        problem = replace(problem, workloads={**problem.workloads, "play": replace(work, slices=slices)})
        of_ring = replace(plan["play"], ring=ring)
        plan = ExecutionPlan({**plan.calls, "play": of_ring})
        seconds = host_seconds(problem, Rates(problem.cluster), plan, problem.graph["play"])
        found[ring] = made.num_envs * options.horizon / seconds
    return found


# The curves


def averaged(rows: Sequence[Mapping[str, Any]], *, window: int) -> list[tuple[int, float]]:
    """Return frames of a run, each with the mean return of the steps in the `window` frames before it."""
    points = [(int(row["frames"]), row["return/mean"]) for row in rows if "return/mean" in row]
    means = []
    for frames, _ in points:
        recent = [value for at, value in points if frames - window < at <= frames]
        if frames >= window:
            means.append((frames, statistics.fmean(recent)))
    return means


def draw(options: Curves) -> int:
    """Draw the curves of runs, print a table of them, and return the exit code."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(options.runs), 3.2), layout="constrained")
    table = Table("task", "frames", "first return", "best", "last", "seconds")
    document: list[dict[str, Any]] = []
    for axes, run in zip(figure.subplots(1, len(options.runs), squeeze=False)[0], options.runs, strict=True):
        rows = [row for _, row in read_json_lines(run / "metrics.jsonl")]
        task = json.loads((run / "config.json").read_text())["task"]
        points = [(row["frames"], row["return/mean"]) for row in rows if "return/mean" in row]
        means = averaged(rows, window=options.window)
        axes.plot(*zip(*points, strict=True), alpha=0.35, linewidth=1)
        axes.plot(*zip(*means, strict=True), color="C0", linewidth=2)
        axes.set_title(f"{task}: return of the episodes that ended", fontsize=10)
        axes.set_xlabel("frames", fontsize=9)
        axes.grid(alpha=0.3)
        values = [value for _, value in means]
        document.append({
            "task": task, "frames": rows[-1]["frames"], "first": values[0], "best": max(values),
            "last": values[-1], "seconds": sum(row["timing_s/step"] for row in rows), "means": means})
        returns = (f"{value:.1f}" for value in (values[0], max(values), values[-1]))
        table.add_row(task, f"{rows[-1]['frames']:,.0f}", *returns, f"{document[-1]['seconds']:.0f}")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=110)
    return report(
        {"benchmark": "control curves", "machine": machine(), "runs": document}, tables=[table], goals=[],
        as_json=options.json)


def remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def main() -> int:
    commands = {"sides": Sides, "ring": Ring, "curves": Curves}
    options = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    if isinstance(options, Curves):
        return draw(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Its runs and hosts end with it.
    options.out = options.out.resolve()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    if isinstance(options, Ring):
        if options.quick:
            options.rings, options.places, options.repeats = (1, 4), ("inline",), 1
        return sweep(options)
    if options.quick:
        options.seeds, options.frames = options.seeds[:1], 16_384
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
