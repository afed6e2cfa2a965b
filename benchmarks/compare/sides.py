"""The protocol between a benchmark and the sides that it compares.

A side is a process that loads once and makes one repetition per line of JSON on its standard input. It
answers with a line of JSON. While it waits it blocks in `read`, so that only one side computes at a time.
This module needs only the standard library, because one end runs in a rival's environment.
"""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

REPO = Path(__file__).parents[2]
OURS, THEIRS, OPENVINO = (
    Path(__file__).with_name(f"{side}.py") for side in ("ours", "theirs", "openvino_side"))
BENCH_PYTHON = REPO / ".venv-bench" / "bin" / "python"
"""The environment that `make bench-setup` makes."""
OPENVINO_PYTHON = REPO / ".venv-openvino-bench" / "bin" / "python"
"""The environment that `make openvino-bench-setup` makes."""
_PYTHONS = {OURS: sys.executable, THEIRS: str(BENCH_PYTHON), OPENVINO: str(OPENVINO_PYTHON)}
_MUCH_SLOWER = 1.15
_NEARLY = 1.03
_TRIES = 2
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_OUR_SETTINGS = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
                 "GOMP_SPINCOUNT": "2000"}
_ENVIRONMENT = {OURS: _OUR_SETTINGS, THEIRS: {}, OPENVINO: {}}
"""Our side has the variables that `realhf run` sets for itself; a rival runs as its user starts it."""


class SideError(RuntimeError):
    """An error: a side failed or ended. The message is the side's own traceback, if there is one."""


class Side:
    """A side from the benchmark's view: a process that runs `script` with these settings (JSON)."""

    def __init__(self, script: Path, settings: Mapping[str, Any], *, threads: int = 2) -> None:
        python = _PYTHONS[script]
        if shutil.which(python) is None:
            setup = "openvino-bench-setup" if script == OPENVINO else "bench-setup"
            raise SideError(f"there is no {python}: run `make {setup}` first")
        more = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPO)}
        environment = os.environ | _OFFLINE | _ENVIRONMENT[script] | more
        self._process = subprocess.Popen(
            [python, str(script), json.dumps({**settings, "threads": threads})], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._loaded: dict[str, Any] | None = None

    @property
    def loaded(self) -> dict[str, Any]:
        """Wait until the side has loaded, and return its first message."""
        if self._loaded is None:
            self._loaded = self.answer()
        return self._loaded

    def ask(self, do: str = "run", **request: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        self.tell(do, **request)
        return self.answer()

    def tell(self, do: str = "run", **request: Any) -> None:
        """Send a request; a call of `answer` must follow."""
        assert self.loaded is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self._process.args} ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"])
        return answer

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


class Replicas:
    """A side of several processes that compute at the same time, each with a part of the data and threads.

    It serves for work in which the processes need not communicate.
    """

    def __init__(self, script: Path, settings: Mapping[str, Any], *, count: int, threads: int = 2) -> None:
        parts = [{**settings, "part": [index, count]} for index in range(count)]
        self._sides = [Side(script, part, threads=threads // count) for part in parts]

    @property
    def loaded(self) -> dict[str, Any]:
        return {"base_bytes": sum(side.loaded["base_bytes"] for side in self._sides)}

    def ask(self, do: str = "run", **request: Any) -> dict[str, Any]:
        """Return the sums of all answers; the seconds are those from the request to the last answer."""
        start = time.perf_counter()
        for side in self._sides:
            side.tell(do, **request)
        answers = [side.answer() for side in self._sides]
        seconds = time.perf_counter() - start
        sums = {key: sum(answer[key] for answer in answers) for key in answers[0]}
        return {**sums, "seconds": seconds}

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *error: Any) -> None:
        for side in self._sides:
            side.__exit__(*error)


def alternate(
    sides: Mapping[str, Callable[[], dict[str, Any]]], *, repeats: int, warmups: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Return answers by side and repetition. Every repetition runs all sides, starting with another one."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(-warmups, repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            answer = sides[name]()
            if repeat >= 0:
                answers[name].append(answer)
    return answers


class Trial(NamedTuple):
    """The cost of a side with a micro-batch; our side may have several ranks."""

    micro_batch: int
    seconds: float
    peak_bytes: float
    ranks: int = 1


def try_micro_batches(
    script: Path, settings: Mapping[str, Any], sizes: Sequence[int], *, ranks: int = 1
) -> list[Trial]:
    """Try rising sizes, until one is much slower."""
    trials: list[Trial] = []
    for size in sizes:
        with Side(script, {**settings, "micro_batch": size, "ranks": ranks}) as side:
            side.ask()
            answers = [side.ask() for _ in range(_TRIES)]
            seconds = min(answer["seconds"] for answer in answers)
            peak = max(answer["peak_bytes"] for answer in answers) - side.loaded["base_bytes"]
        trials.append(Trial(size, seconds, peak, ranks))
        if seconds > _MUCH_SLOWER * min(trial.seconds for trial in trials):
            break
    return trials


def best(trials: Sequence[Trial], *, at_most_bytes: float = math.inf) -> Trial:
    """Return the trial with the least memory among those nearly as fast as the fastest.

    Trials above `at_most_bytes` count only if there are no others.
    """
    trials = [trial for trial in trials if trial.peak_bytes <= at_most_bytes] or list(trials)
    limit = _NEARLY * min(trial.seconds for trial in trials)
    return min((t for t in trials if t.seconds <= limit), key=lambda trial: trial.peak_bytes)


# The side's own end


class Desk:
    """The side's end of the connection. Once it exists, libraries print to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.settings: dict[str, Any] = json.loads(sys.argv[1])

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the requests, each of which must be answered before the next."""
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, **document: Any) -> None:
        self._out.write(json.dumps(document) + "\n")
        self._out.flush()

    def serve(self, work: Callable[["Desk"], None]) -> None:
        """Run `work`, which answers; its exception becomes the last answer."""
        try:
            work(self)
        except Exception:
            self.answer(error=traceback.format_exc())


class Measured:
    """A context manager that measures its block: `cost` has wall and CPU seconds, and peak bytes."""

    def __enter__(self) -> "Measured":
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
        self._cpu, self._start = time.process_time(), time.perf_counter()
        self.cost: dict[str, float] = {}
        return self

    def __exit__(self, *_: object) -> None:
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        self.cost = {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": memory_bytes("VmHWM")}


def memory_bytes(key: str) -> int:
    """Return VmRSS (memory now) or VmHWM (its peak) of this process."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the rewards for GRPO on both sides: cheap, and different for the samples of a prompt."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def rewards_of(settings: Mapping[str, Any]) -> list[tuple[Callable[..., list[float]], float]]:
    """Return the reward functions of a GRPO step with their weights.

    They are those of the example's task that the settings name under `task`, else `reward`.
    """
    if "task" not in settings:
        return [(reward, 1.0)]
    sys.path.insert(0, str(REPO / "examples"))
    return list(importlib.import_module(settings["task"]).REWARDS.items())
