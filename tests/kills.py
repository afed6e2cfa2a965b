"""Kills runs, damages their checkpoints, and resumes them.

The processes start quickly, as a fork server has imported what they need.
"""

import faulthandler
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from realhf.cli.launch import LOCAL_LAUNCHER
from realhf.cli.main import main
from tests.cli_tools import read_jsonl, untimed, write_experiment, write_plan
from tests.pool import FORK_SERVER

STEPS = 6
LAYOUTS = {
    "grpo": {"actor_generate": "d2@0-1", "ref_forward": "d1@1", "actor_train": "t2@0-1"},
    "async": {"actor_generate": "d1@0", "ref_forward": "d1@1", "actor_train": "d1@1"},
    "ppo": {
        "actor_generate": "d2@0-1", "reward_forward": "d1@0", "ref_forward": "d1@1",
        "critic_forward": "d2@0-1", "actor_train": "t2@0-1", "critic_train": "p2@0-1",
    },
}
_SETTINGS = {
    "batch_size": 4, "checkpoint_every": 1, "eval_every": 3, "export_every": 4, "work_stealing": False,
}
_PHASES = {
    ("checkpointer", "_remove_old"): "removal of an old checkpoint",
    ("checkpointer", "_complete"): "manifest and rename",
    ("checkpointer", "_write"): "checkpoint write",
    ("checkpointer", "finish"): "wait for the checkpoint before",
    ("checkpointer", "save"): "copy to host memory",
    ("checkpointer", "restore"): "restore",
    ("checkpointer", "newest_checkpoint"): "restore",
    ("model_store", "export"): "export",
    ("reallocations", "task"): "reallocation",
    ("trainer", "_finish"): "end",
    ("evaluations", "run"): "evaluation",
    ("native", "generate"): "generation",
    ("base", "train"): "update",
    ("trainer", "_run_step"): "other calls",
    ("trainer", "__init__"): "start",
    ("trainer", "run"): "between steps",
}
"""Module and function -> the phase of a thread that runs it; the first that is on its stack counts."""
_FRAME = re.compile(r'File ".*?(\w+)\.py", line \d+ in (\w+)')
_END_SECONDS = 300.0
"""Time in which a worker must end."""
_PATIENCE_SECONDS = 20.0
"""Time in which the other ranks should end by themselves after one has been killed."""


def _work(words: Sequence[str], variables: dict[str, str], log: Path, stacks: Path) -> None:
    """Be a worker: run the command in this process, with its output in a file."""
    os.environ.update(variables)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, stacks.open("w"), all_threads=True)
    sys.exit(main(words))


class Workers:
    """The workers of one start of a run, as torchrun or `realhf run --nproc N` would start them."""

    def __init__(self, words: Sequence[Any], num_ranks: int, directory: Path) -> None:
        """Start the ranks, which execute the command `words`; their output goes to `directory`."""
        self.log = directory / "log"
        self.log.unlink(missing_ok=True)
        self._stacks = [directory / f"stacks_{rank}" for rank in range(num_ranks)]
        arguments = [str(word) for word in words]
        self._processes: list[Any] = []
        self.had_to_be_ended = False
        """Whether other ranks than those killed have not ended by themselves."""
        for stacks, variables in zip(self._stacks, worker_environments(num_ranks), strict=True):
            stacks.unlink(missing_ok=True)
            start = (arguments, variables, self.log, stacks)
            self._processes.append(FORK_SERVER.start(_work, *start, daemon=False))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def ended(self) -> bool:
        """Return whether a worker has ended."""
        return any(process.exitcode is not None for process in self._processes)

    def join(self) -> list[int]:
        """Wait until all workers have ended; return their exit codes. Raises TimeoutError."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"a worker is alive after {_END_SECONDS:g} s:\n{self.log.read_text()}")
        return [process.exitcode for process in self._processes]

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until one worker has ended, and return whether it has in this time."""
        return bool(wait([process.sentinel for process in self._processes], seconds))

    def kill(self, ranks: Sequence[int], *, ends_others: bool) -> set[str]:
        """Kill ranks and wait until all have ended; return the phases that the killed ones were in.

        `ends_others`: the other ranks are terminated, as our launcher does; else they must end by themselves.
        """
        for rank in ranks:
            if self._stacks[rank].exists():  # Else the worker would not survive the signal.
                self._signal(rank, signal.SIGUSR1)
        time.sleep(0.002)
        for rank in ranks:
            self._signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + (0.05 if ends_others else _PATIENCE_SECONDS)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.had_to_be_ended = not ends_others and any(p.exitcode is None for p in self._processes)
        for rank in range(len(self._processes)):
            self._signal(rank, signal.SIGTERM)
        self.join()
        texts = [self._stacks[rank].read_text() for rank in ranks if self._stacks[rank].exists()]
        return {phase for text in texts for phase in phases(text)} or {"start"}

    def _signal(self, rank: int, number: signal.Signals) -> None:
        process = self._processes[rank]
        if process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def worker_environments(num_ranks: int) -> Iterator[dict[str, str]]:
    """Yield the variables by which torchrun tells each worker its place; none for a single one."""
    if num_ranks == 1:
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0", LOCAL_LAUNCHER: "1",
    }
    for rank in range(num_ranks):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def phases(text: str) -> set[str]:
    """Return the phases of all threads in what faulthandler has written of a process."""
    found = set()
    for thread in re.split(r"^(?:Current t|T)hread ", text, flags=re.MULTILINE):
        frames = set(_FRAME.findall(thread))
        phase = next((phase for frame, phase in _PHASES.items() if frame in frames), None)
        if phase is not None:
            found.add(phase)
    calls = {"generation", "update", "evaluation", "export"}
    return found - {"other calls", "between steps"} if found & calls else found


@dataclass(frozen=True)
class Case:
    """A short run that is killed: its algorithm, its number of ranks, and its command."""

    kind: str
    num_ranks: int
    words: tuple[str, ...]


def make_case(kind: str, num_ranks: int, directory: Path, **settings: Any) -> Case:
    """Write the experiment and the plan of a case; `settings` are fields of the experiment."""
    directory.mkdir(parents=True)
    if kind == "async":
        settings = {"max_lag": 2, "work_stealing": False, **settings}
    algorithm = "grpo" if kind == "async" else kind
    experiment = write_experiment(directory, algorithm, **{"steps": STEPS, **_SETTINGS, **settings})
    words: list[Any] = ["run", experiment]
    if num_ranks > 1:
        words += ["--plan", write_plan(directory, LAYOUTS[kind])]
    return Case(kind, num_ranks, tuple(map(str, words)))


def result(out: Path) -> dict[str, Any]:
    """Return what must not depend on kills: metrics, weights, optimizer, exports, evaluation, events."""
    events = (out / "timeline.jsonl").read_text().splitlines()
    names = [[json.loads(event).get(key) for key in ("step", "rank", "kind", "name")] for event in events]
    last = max((out / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    manifest = json.loads((last / "manifest.json").read_text())
    found = {key: manifest[key] for key in ("step", "sets", "versions", "run")}
    # The limits of caches are measured anew by a run that was killed before its first checkpoint.
    found["ranks"] = [{**rank, "cache_limits": None} for rank in manifest["ranks"]]
    found |= {"metrics": untimed(out / "metrics.jsonl"), "eval": read_jsonl(out / "eval.jsonl")}
    found["events"] = sorted(map(str, names))
    for path in [*last.glob("rank_*"), *last.glob("samples_*"), *out.glob("hf/step_*/**/*.safetensors")]:
        found[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    summary = json.loads((out / "summary.json").read_text())
    return found | {key: summary[key] for key in ("eval_first", "eval_last", "steps")}


def newest(out: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    steps = [int(path.name[5:]) for path in out.glob("checkpoints/step_*") if path.name[5:].isdecimal()]
    return max(steps, default=0)


def completed(out: Path) -> int:
    """Return the last step in metrics.jsonl; a last line that is incomplete does not count."""
    if not (out / "metrics.jsonl").exists():
        return 0
    return max((json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().split("\n")[:-1]),
               default=0)


@dataclass
class Tally:
    """Counts of killed runs, for the report."""

    kills: int = 0
    resumes: int = 0
    runs: int = 0
    repeated: Counter[int] = field(default_factory=Counter)
    """Completed steps that were done again after a kill -> number of kills."""
    phases: Counter[str] = field(default_factory=Counter)
    on_disk: Counter[str] = field(default_factory=Counter)
    """What a kill has left -> number of kills."""
    had_to_be_ended: Counter[str] = field(default_factory=Counter)
    """Phases in which a killed rank was whose peers did not end by themselves."""
    killed: Counter[str] = field(default_factory=Counter)
    """"one rank" or "all ranks" -> number of kills."""
    flips: Counter[str] = field(default_factory=Counter)
    """Names of files of checkpoints -> number of bits that were flipped in them."""
    differences: list[str] = field(default_factory=list)


MOMENTS = ("time", "time", "time", "part", "manifest", "renamed", "removed", "export")
"""How the moment of a kill is chosen: after a random time, or shortly after something is on the disk."""


def _is_there(moment: str, checkpoints: Path, before: set[str]) -> bool:
    """Return whether the moment of a kill has come."""
    if moment == "export":
        exports = (checkpoints.parent / "hf").glob("step_*")
        return any(not (path / "config.json").exists() for path in exports)  # It is written last.
    try:
        new = set(os.listdir(checkpoints)) - before
    except FileNotFoundError:
        return False
    if moment == "manifest":
        parts = (checkpoints / name / "manifest.json" for name in new if name.endswith(".part"))
        return any(path.exists() for path in parts)
    if moment == "renamed":
        return any(name[5:].isdecimal() for name in new)
    return any(name.endswith(f".{moment}") for name in new)


def wait_for_moment(workers: Workers, moment: str, out: Path, rng: random.Random, seconds: float) -> bool:
    """Wait for the moment of a kill; return False if the run ends first. A run takes `seconds`."""
    if moment == "time":
        return not workers.wait_for_end(rng.uniform(0.02, 0.95) * seconds)
    checkpoints = out / "checkpoints"
    before = set(os.listdir(checkpoints)) if checkpoints.exists() else set()
    before = {name for name in before if name[5:].isdecimal()}
    for _ in range(rng.randint(1, 3)):  # The first, second or third such moment.
        while not _is_there(moment, checkpoints, before):
            if workers.ended:
                return False
            time.sleep(0.0005)
        delay = rng.uniform(0, 0.004)
        until = time.monotonic() + rng.uniform(0.02, 0.3)
        if rng.random() < 0.6:
            time.sleep(delay)
            return True
        while time.monotonic() < until:
            if workers.ended:
                return False
            time.sleep(0.005)
        before |= set(os.listdir(checkpoints))
    return True


def torture(
    case: Case, expected: dict[str, Any], directory: Path, rng: random.Random, tally: Tally,
    *, max_kills: int, seconds: float, moments: Sequence[str] = MOMENTS, patient_share: float = 0.05,
) -> None:
    """Kill and resume one run until it ends, up to `max_kills` times; compare it with what is expected.

    After `patient_share` of the kills of one rank, the others must end by themselves.
    """
    directory.mkdir(parents=True)
    out = directory / "run"
    kills = 0
    while True:
        words = [*case.words, "--out", out, *(["--resume"] if out.exists() else [])]
        start = newest(out)
        resumes = out.exists()
        with Workers(words, case.num_ranks, directory) as workers:
            hit = kills < max_kills and wait_for_moment(workers, rng.choice(moments), out, rng, seconds)
            if not hit:
                codes = workers.join()
                text = workers.log.read_text()
                if any(codes):
                    tally.differences.append(f"{case.kind} in {directory}: exit codes {codes}: {text}")
                    return
            else:
                several = case.num_ranks > 1
                ranks = range(case.num_ranks) if rng.random() < 0.4 else [rng.randrange(case.num_ranks)]
                found = workers.kill(ranks, ends_others=rng.random() >= patient_share)
                text = workers.log.read_text() if workers.log.exists() else ""
                _count_kill(tally, found, out)
                tally.killed["one of two ranks" if several and len(ranks) == 1 else "all ranks"] += 1
                if workers.had_to_be_ended:
                    tally.had_to_be_ended.update(found)
                kills += 1
        tally.resumes += resumes
        if "Traceback" in text or (start and text.count("continues") and f"after step {start}" not in text):
            tally.differences.append(f"{case.kind} in {directory}, from {start}: {text}")
        if not hit:
            break
    tally.runs += 1
    compare(f"{case.kind} on {case.num_ranks} in {directory}", result(out), expected, tally.differences)


def _count_kill(tally: Tally, found: set[str], out: Path) -> None:
    tally.kills += 1
    tally.phases.update(found)
    tally.repeated[max(0, completed(out) - newest(out))] += 1
    names = os.listdir(out / "checkpoints") if (out / "checkpoints").exists() else []
    if parts := [name for name in names if name.endswith(".part")]:
        whole = any((out / "checkpoints" / name / "manifest.sha256").exists() for name in parts)
        tally.on_disk["a checkpoint without its name" if whole else "a part of a checkpoint"] += 1
    if any(name.endswith(".removed") for name in names):
        tally.on_disk["a checkpoint half removed"] += 1


def compare(name: str, found: dict[str, Any], expected: dict[str, Any], differences: list[str]) -> None:
    """Add what differs between two results to `differences`."""
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            both = f"{found.get(key)!r:.2000} instead of {expected.get(key)!r:.2000}"
            differences.append(f"{name}: {key} is {both}")


def uninterrupted(case: Case, directory: Path) -> tuple[dict[str, Any], float]:
    """Run a case without kills; return its result and the seconds that it took."""
    directory.mkdir(parents=True)
    began = time.monotonic()
    with Workers([*case.words, "--out", directory / "run"], case.num_ranks, directory) as workers:
        codes = workers.join()
        assert not any(codes), workers.log.read_text()
    return result(directory / "run"), time.monotonic() - began


def flip_and_resume(
    case: Case, finished: Path, expected: dict[str, Any], directory: Path, rng: random.Random, tally: Tally,
) -> None:
    """Flip a bit in each of the newest checkpoints of a copy of a run, and let the copy end again.

    Each damaged checkpoint must be named, with the file, and the result must be that of the run.
    """
    out = directory / "run"
    shutil.copytree(finished, out)
    steps = newest(out)
    damaged = []
    for step in range(steps, steps - rng.randint(1, 3), -1):
        path = rng.choice(sorted((out / f"checkpoints/step_{step}").iterdir()))
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        damaged.append(path)
        tally.flips[path.name] += 1
    with Workers([*case.words, "--out", out, "--resume"], case.num_ranks, directory) as workers:
        codes = workers.join()
        text = workers.log.read_text()
    tally.resumes += 1
    name = f"{case.kind} on {case.num_ranks} in {directory}"
    for path in damaged:
        said = [line for line in text.splitlines() if f"checkpoint {path.parent} is not used: " in line]
        manifest = path.name.startswith("manifest")
        if len(said) != 1 or not (path.name in said[0] or (manifest and "manifest" in said[0])):
            tally.differences.append(f"{name}: the damage of {path} is not named: {text}")
    if any(codes) or "Traceback" in text or f"after step {steps - len(damaged)}" not in text:
        tally.differences.append(f"{name}: exit codes {codes}: {text}")
        return
    before = len(tally.differences)
    compare(name, result(out), expected, tally.differences)
    if len(tally.differences) == before:
        shutil.rmtree(directory)
