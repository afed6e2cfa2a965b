"""Writes the outputs of its commands into docs/planner.md: `python docs/planner_outputs.py`.

With `--check` it writes nothing, and its exit code is 1 if an output is another one. Searches have time to
come to their gap, so that outputs do not depend on the speed of the machine; how long they took may differ.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from realhf.cli.main import main as realhf  # noqa: E402

PAGE = ROOT / "docs" / "planner.md"
_COLUMNS = "100"
_SECONDS = 3600.0
_FENCE = re.compile(r"(?m)^```\n(.*?)^```$", re.S)


class Part(NamedTuple):
    """The lines of an output from the first that matches up to one that matches `until`, left out."""

    first: str
    until: str = r"^$"


_TABLE = Part(r"^call ")
_CALLS = Part(r"^ *0-\d+ [A-Za-z.]", r"^\(A: ")
_CHANGES = "--what-if batch_size=256 --what-if num_hosts=1"
OUTPUTS: dict[str, Sequence[Part]] = {
    "realhf plan examples/ppo_70b.py --cluster h100-8x8 -o plan.yaml": (
        _TABLE, Part(r" per step: "), _CALLS, Part(r"^actor_generate: ", r"^reward_forward: ")),
    f"realhf plan examples/ppo_7b.py --cluster h100-2x8 {_CHANGES}": (
        Part(r"^actor_generate: ", r"^reward_forward: "), Part(r"^actor_train: ", r"^critic_train: "),
        Part(r"^what if ", r"^written")),
    "realhf plan examples/grpo_32b.py --cluster h100-8x8 --max-lag 2": (Part(r"^steps "),),
    "realhf plan examples/grpo_32b.py --cluster h100-8x8 --price by-hand.yaml": (
        _TABLE, Part(r" per step; ", r"^fullest"), _CALLS),
    "realhf plan examples/grpo_32b.py --cluster h100-8x8 --devices 8,16,...,64 --cost-per-hour 2.5": (
        Part(r"^devices ", r"^written"),),
    "realhf plan examples/grpo_32b.py --cluster h100-8x8 --lost-hosts 1": (
        Part(r"^what if ", r"^written"),),
    "realhf plan examples/grpo_32b.py --cluster h100-8x8 --robust --gap 0.02": (
        Part(r"^range ", r"^written"),),
}
"""Command of the page -> the parts of its output that the page shows."""


def output_of(command: str) -> str:
    """Return what a command prints, run in a directory with the files of the page."""
    words = [*shlex.split(command)[1:], "--time-limit", f"{_SECONDS:g}"]
    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        Path("examples").symlink_to(ROOT / "examples")
        Path("by-hand.yaml").write_text(_file("by-hand.yaml"))
        os.environ["COLUMNS"] = _COLUMNS
        try:
            with contextlib.redirect_stdout(printed):
                code = realhf(words)
        finally:
            os.environ["COLUMNS"] = columns or _COLUMNS
    if code:
        raise RuntimeError(f"{command}: exit code {code}")
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _file(name: str) -> str:
    """Return the file that the page shows under its name."""
    match = re.search(rf"(?m)^```yaml\n(# {re.escape(name)}\n.*?)^```$", PAGE.read_text(), re.S)
    assert match is not None, name
    return match[1]


def shown(printed: str, parts: Sequence[Part]) -> str:
    """Return the parts of an output, with dots where something is left out."""
    lines = printed.splitlines()
    kept: list[str] = []
    last = 0
    for part in parts:
        first = next(i for i, line in enumerate(lines) if i >= last and re.search(part.first, line))
        stop = next(
            (i for i, line in enumerate(lines) if i > first and re.search(part.until, line)), len(lines))
        while stop > first and not lines[stop - 1].strip():
            stop -= 1
        kept += ["..."] * (bool(kept) and first > last) + lines[first:stop]
        last = stop
    return "\n".join(kept) + "\n"


def updated(page: str, only: str | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield each command with the output on the page and the one that it has now."""
    for command, parts in OUTPUTS.items():
        if only is None or only in command:
            fence = _output_fence(page, command)
            yield command, fence[1], shown(output_of(command), parts)


def _output_fence(page: str, command: str) -> re.Match[str]:
    assert command in page, f"the page has no command {command}"
    fence = _FENCE.search(page, page.index("\n```\n", page.index(command)) + 4)
    assert fence is not None, command
    return fence


def masked(text: str) -> str:
    """Return an output without the seconds of the search."""
    return re.sub(r"found in [\d.]+ m?s", "found in ? s", text)


def main() -> int:
    """Write the outputs, or compare them, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", metavar="TEXT", help="commands with this text")
    options = parser.parse_args()
    code = 0
    for command, before, now in updated(PAGE.read_text(), options.only):
        if masked(before) != masked(now):
            code = int(options.check)
            print(f"{command}\n" + "".join(difflib.unified_diff(
                before.splitlines(True), now.splitlines(True), "page", "now")))
            if not options.check:
                page = PAGE.read_text()
                fence = _output_fence(page, command)
                PAGE.write_text(page[: fence.start(1)] + now + page[fence.end(1) :])
    return code


if __name__ == "__main__":
    sys.exit(main())
