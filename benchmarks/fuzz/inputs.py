"""Gives damaged and random inputs to the command line, which must answer each with one sentence.

    python benchmarks/fuzz/inputs.py                         # 20,000 cases
    python benchmarks/fuzz/inputs.py --cases 500 --only "plan file" --seed 3

Hypothesis draws the cases: valid documents with fields dropped, doubled, renamed or of another type,
numbers that are huge, negative or NaN, broken text, YAML that grows, tokenizers that panic, chat templates
without end, FIFOs, devices and other things in the place of files, checkpoints whose junk has right
checksums, rows of 60 MB, and noise. Each goes through `realhf.cli.main.main` in
this process (checkpoints and weights go through their readers). A case is faulty unless

- the exit code is 0 or 2, without traceback, within the time and the memory allowed;
- with 2, standard error has one printable line that begins with "realhf: " and names the file or the field;
- with 0, standard error has nothing but warnings, and `--json` prints strict JSON.

Faults with the same cause are reported once, with the smallest case found. The exit code is 1 if there is
one.
"""

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import harness  # noqa: E402 - after the number of threads is set
from benchmarks.fuzz.cases import KINDS, Case, write_task  # noqa: E402
from benchmarks.fuzz.run_case import Fault, run_case  # noqa: E402

_SECONDS = 10.0
_MEMORY_BYTES = 2 << 30
_SHARES = {
    "weights": 40, "checkpoint manifest": 35, "checkpoint file": 35, "dataset lines": 19, "layout text": 18,
    "parquet": 12, "plan file": 10, "cluster file": 8, "experiment field": 8, "profile file": 5,
    "special file": 3, "model config": 3, "override": 1.2, "tokenizer": 0.8, "long row": 0.06,
}
"""Share of the cases that a kind gets: more if its cases are quick."""
_BATCH = 500
"""Number of cases that Hypothesis draws in one go."""


def main() -> int:
    """Run the benchmark and return the exit code."""
    args = _arguments()
    sys.dont_write_bytecode = True  # An experiment file may change within the resolution of its time stamp.
    machine = harness.machine()
    _limit_memory()
    scratch = "/dev/shm" if os.path.isdir("/dev/shm") else None
    kinds = [kind for kind in KINDS if args.only in (None, kind)]
    results = []
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=scratch) as path:
        directory = Path(path)
        write_task(directory)
        for kind in kinds:
            shares = sum(_SHARES[other] for other in kinds)
            cases = math.ceil(args.cases * _SHARES[kind] / shares)
            results.append(_fuzz(kind, directory, cases=cases, first_seed=args.seed))
            harness.progress(f"{kind}: {results[-1]['cases']} cases, {len(results[-1]['faults'])} faults")
            for fault in results[-1]["faults"]:
                harness.progress(f"  {fault['times']} x {fault['cause']}: {fault['detail']}")
    num_cases = sum(result["cases"] for result in results)
    num_faults = sum(len(result["faults"]) for result in results)
    table = Table("kind", "cases", "accepted", "refused", "seconds", "slowest (s)", "peak memory (GB)",
                  "faults", title="Cases")
    for result in results:
        cells = [value for key, value in result.items() if key != "faults"]
        table.add_row(*map(str, cells), str(len(result["faults"])))
    faults = Table("kind", "times", "cause", "what it said", "case", title="Faults")
    for result in results:
        for fault in result["faults"]:
            cells = [str(fault[name]) for name in ("times", "cause", "detail", "case")]
            faults.add_row(result["kind"], *cells)
    return harness.report(
        {"machine": machine, "cases": num_cases, "kinds": results},
        tables=[table, faults] if num_faults else [table],
        goals=[
            harness.Goal("faults", num_faults, at_most=0),
            harness.Goal("cases", num_cases, at_least=args.cases),
        ],
        as_json=args.json,
    )


def _arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--only", choices=KINDS, help="one kind of input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _limit_memory() -> None:
    """Let this process allocate a few GB more: a case that needs more must fail, not the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _fuzz(kind: str, directory: Path, *, cases: int, first_seed: int) -> dict[str, Any]:
    """Run at least this many cases of a kind; return counts, times and the distinct faults."""
    times: list[float] = []
    codes = Counter[str]()
    counts = Counter[str]()
    smallest: dict[str, Fault] = {}

    def try_one(case: Case) -> None:
        start = time.perf_counter()
        code, fault = run_case(case, directory, seconds=_SECONDS)
        times.append(time.perf_counter() - start)
        codes[str(code)] += 1
        if fault is not None:
            counts[fault.cause] += 1
            so_far = smallest.get(fault.cause)
            if so_far is None or _size(fault.case) < _size(so_far.case):
                smallest[fault.cause] = fault

    for number in range(first_seed, first_seed + 1000):
        if len(times) >= cases:
            break
        quiet = settings(
            max_examples=min(_BATCH, cases - len(times)), database=None, deadline=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )
        seed(number)(quiet(given(KINDS[kind]())(try_one)))()
    return {
        "kind": kind, "cases": len(times), "accepted": codes["0"], "refused": codes["2"],
        "seconds": round(sum(times), 1), "slowest": round(max(times), 2), "peak_gb": _peak_gb(),
        "faults": [
            {"cause": cause, "times": counts[cause], "detail": fault.detail, "case": _shown(fault.case)}
            for cause, fault in smallest.items()
        ],
    }


def _peak_gb() -> float:
    """Return the most memory that this process, or one that it has started, has had so far."""
    usages = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(max(usages) * 1024 / 1e9, 2)


def _size(case: Case) -> int:
    return sum(map(len, case.words)) + sum(map(len, case.files.values()))


def _shown(case: Case) -> str:
    files = {name: content.decode(errors="backslashreplace")[:600] for name, content in case.files.items()}
    return f"{' '.join(case.words)} {json.dumps(files)}"


if __name__ == "__main__":
    sys.exit(main())
