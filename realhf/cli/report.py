"""`realhf report`: writes the page of a run, or of several beside each other. Free of torch."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realhf.cli.overrides import refuse_words, step_numbers
from realhf.errors import UserError, described
from realhf.report.run_data import RunFiles
from realhf.report.trace import write_trace
from realhf.user_input.files import require_output

HELP = "write one page about a run, or about where several runs part"
EXAMPLES = (
    "realhf report runs/grpo -o report.html",
    "realhf report runs/grpo --watch",
    "realhf report runs/first runs/second",
)
_WATCH_SECONDS = 10.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf report`."""
    add = parser.add_argument
    text = "run directory; with several, the page says where the others part from the first"
    add("runs", nargs="+", metavar="RUN", help=text)
    add("-o", "--output", default="report.html", metavar="FILE", help="the page; default: report.html")
    text = "write the page again and again while the run goes on; in a browser it loads itself again"
    add("--watch", action="store_true", help=text)
    text = f"seconds between two pages of --watch; default: {_WATCH_SECONDS:g}"
    add("--every", type=float, default=_WATCH_SECONDS, metavar="S", help=text)
    text = "also write the events of all ranks for Perfetto (ui.perfetto.dev); compressed if it ends with .gz"
    add("--trace", metavar="FILE", help=text)
    add("--steps", metavar="STEPS", help="the steps of --trace, such as 5-7; default: all")
    add("--json", action="store_true", help="print the headline and the sentences as one JSON document")


def main(options: Namespace, words: list[str]) -> int:
    """Write the page and return the exit code."""
    refuse_words(options.parser, words)
    if not options.every > 0:
        raise UserError(f"--every {options.every:g}: it must be above 0 seconds")
    steps = step_numbers(options.steps, option="--steps")
    if steps and options.trace is None:
        raise UserError("--steps: it chooses the steps of --trace, which is missing")
    output = Path(options.output)
    require_output(output, "--output", first="<!doctype html>", what="page")
    paths = [Path(run) for run in options.runs]
    if len(paths) > 1:
        if alone := [name for name in ("watch", "trace") if getattr(options, name)]:
            raise UserError(f"--{alone[0]}: it shows one run, and several are given")
        return _compare(options, paths, output)
    with _understanding(paths[0]):
        if options.trace is not None:
            _write_trace(paths[0], Path(options.trace), steps)
        return _write(options, paths[0], output)


@contextmanager
def _understanding(*paths: Path) -> Iterator[None]:
    """Raise UserError about files of a run that have other fields or values than a run writes."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        names = " or ".join(map(str, paths))
        raise UserError(f"a file in {names} is damaged ({described(error)})") from error


def _write(options: Namespace, path: Path, output: Path) -> int:
    """Write the page of a run; with --watch again and again, until the run has ended."""
    from realhf.report.run_page import run_document, run_page  # As plotly is slow.

    run = RunFiles(path)
    shown = -1
    while options.watch and run.is_running:
        if len(run.records) != shown:  # Else the page is as it was.
            shown = len(run.records)
            run_page(run, refresh_seconds=options.every).save(output)
        time.sleep(options.every)
        run = RunFiles(path)
    run_page(run).save(output)
    _say_written(output)
    if options.json:
        print(json.dumps(run_document(run)))
    return 0


def _write_trace(path: Path, output: Path, steps: frozenset[int]) -> None:
    require_output(output, "--trace", first='{"traceEvents"', what="trace")
    count = write_trace(RunFiles(path), output, steps=steps or None)
    _say_written(output, f": {count:,} events")


def _compare(options: Namespace, paths: list[Path], output: Path) -> int:
    """Write the page of several runs, and print where they part."""
    from realhf.report.compare import compare
    from realhf.report.run_page import runs_document, runs_page

    with _understanding(*paths):
        runs = [RunFiles(path) for path in paths]
        comparisons = [compare(runs[0], other) for other in runs[1:]]
        runs_page(runs, comparisons).save(output)
    _say_written(output)
    if options.json:
        print(json.dumps(runs_document(runs, comparisons)))
        return 0
    for other, found in zip(runs[1:], comparisons, strict=True):
        print(f"{runs[0].name} and {other.name}: {found.cause.sentence}")
        for title, parting in (("first difference", found.parting), ("first differing token", found.token)):
            if parting is not None:
                print(f"  {title}: {parting.sentence}")
    return 0


def _say_written(output: Path, more: str = "") -> None:
    print(f"realhf: written to {output}{more}", file=sys.stderr)
