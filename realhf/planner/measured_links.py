"""Links of a cluster as measured: reads the tables that nccl-tests prints, and fits latency and bandwidth.

A table is about one collective on some ranks (github.com/NVIDIA/nccl-tests, its whole output with the lines
`# Rank 0 ... on HOST device 0`). A fitted link predicts the time of its smallest and of its largest message;
what it predicts in between is compared with the table.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from realhf.cluster import Cluster, Link
from realhf.errors import UserError, shown
from realhf.planner.efficiencies import Efficiencies
from realhf.planner.links import LinkRates, Span
from realhf.user_input.files import read_text
from realhf.user_input.units import format_bytes, format_seconds

_TESTS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "send"}
"""Name of a test -> the method of LinkRates."""
_RANK = re.compile(r"#\s*Rank\s+\d+\b.*?\bon\s+(\S+)\s+device")
_LEAST_LATENCY = 1e-9
_WIDEST = 100.0  # A fitted bandwidth is at most so many times the cluster file's.
_NO_MATTER = 1.001  # A longer time of this factor counts as equal.
_LARGE = 1 << 20  # Bytes from which predictions are compared with a table.


@dataclass(frozen=True)
class MeasuredCollective:
    """The seconds of one collective on some ranks, by rising bytes; `source` names the file."""

    source: str
    method: str
    num_ranks: int
    num_hosts: int
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def where(self) -> str:
        hosts = f"{self.num_hosts} host{'s' * (self.num_hosts > 1)}"
        return f"{self.method} of {self.num_ranks} ranks on {hosts}"

    def predicted(self, rates: LinkRates, num_bytes: float) -> float:
        """Return the seconds that some rates give for the same."""
        if self.method == "send":
            return rates.send(num_bytes, within_host=self.num_hosts == 1)
        span = Span(self.num_ranks, self.num_ranks // self.num_hosts)
        return float(getattr(rates, self.method)(num_bytes, span))


@dataclass(frozen=True)
class FittedLinks:
    """A cluster whose links reach what was measured, as they are; `notes` say how well they fit."""

    cluster: Cluster
    notes: tuple[str, ...]

    @property
    def efficiencies(self) -> Efficiencies:
        return replace(Efficiencies.of(self.cluster), link=1.0)


def fitted_links(cluster: Cluster, files: Sequence[str]) -> FittedLinks:
    """Return the cluster with links that are fitted to tables of nccl-tests.

    A link that no table is about has the share of its bandwidth that is usually reached. Raises UserErrors
    that name the file.
    """
    if len(cluster.kinds) > 1:
        raise UserError(
            f"--links {files[0]}: the cluster has several kinds of hosts, and tables are about one")
    measured = [read_nccl_tests(name) for name in files]
    share = Efficiencies.of(cluster).link
    near = _reached(cluster.intra_host, share)
    far = None if cluster.inter_host is None else _reached(cluster.inter_host, share)
    cluster = replace(cluster, intra_host=near, inter_host=far)
    inside = [table for table in measured if table.num_hosts == 1]
    between = [table for table in measured if table.num_hosts > 1]
    if inside:
        link = _fit(inside, near, lambda link: replace(cluster, intra_host=link))
        cluster = replace(cluster, intra_host=link)
    if between:
        if far is None:
            raise UserError(f"--links {between[0].source}: the cluster has no inter_host link")
        cluster = replace(cluster, host_bandwidth_bytes_per_second=None)  # Devices were measured together.
        link = _fit(between, far, lambda link: replace(cluster, inter_host=link))
        cluster = replace(cluster, inter_host=link)
    fitted = FittedLinks(cluster, ())
    rates = LinkRates(cluster, fitted.efficiencies)
    return replace(fitted, notes=tuple(_note(table, rates) for table in measured))


def _reached(link: Link, share: float) -> Link:
    return replace(link, bandwidth_bytes_per_second=share * link.bandwidth_bytes_per_second)


def _fit(tables: Sequence[MeasuredCollective], link: Link, placed: Callable[[Link], Cluster]) -> Link:
    """Return the link with the geometric means of what fits each table; `placed` puts it into the cluster."""
    latencies = []
    bandwidths = []
    for table in tables:
        fits = _fit_one(table, link, placed)
        latencies.append(fits.latency_seconds)
        bandwidths.append(fits.bandwidth_bytes_per_second)
    means = (math.exp(sum(map(math.log, values)) / len(values)) for values in (latencies, bandwidths))
    return Link(*means)


def _fit_one(table: MeasuredCollective, link: Link, placed: Callable[[Link], Cluster]) -> Link:
    """Return the link with the latency of the smallest message and the bandwidth of the largest."""
    efficiencies = replace(Efficiencies.of(placed(link)), link=1.0)

    def seconds(latency: float, bandwidth: float, num_bytes: float) -> float:
        return table.predicted(LinkRates(placed(Link(latency, bandwidth)), efficiencies), num_bytes)

    widest = _WIDEST * link.bandwidth_bytes_per_second
    smallest = table.sizes[0]
    without = seconds(_LEAST_LATENCY, widest, smallest)
    per_second = seconds(1.0, widest, smallest) - without
    latency = max(_LEAST_LATENCY, (table.seconds[0] - without) / per_second)
    # Where another link is slower, no table can tell how fast this one is: it gets what makes no difference.
    target = max(table.seconds[-1], _NO_MATTER * seconds(latency, widest, table.sizes[-1]))
    low, high = widest / _WIDEST**3, widest
    for _ in range(60):
        middle = math.sqrt(low * high)
        if seconds(latency, middle, table.sizes[-1]) > target:
            low = middle
        else:
            high = middle
    return Link(latency, high)


def _note(table: MeasuredCollective, rates: LinkRates) -> str:
    """Return which link was fitted to a table, and how far its predictions are from large messages."""
    name = "intra_host" if table.num_hosts == 1 else "inter_host"
    link = rates.cluster.link(within_host=table.num_hosts == 1)
    figures = f"{format_bytes(link.bandwidth_bytes_per_second)}/s, {format_seconds(link.latency_seconds)}"
    pairs = zip(table.sizes, table.seconds, strict=True)
    ratios = [table.predicted(rates, size) / seconds for size, seconds in pairs if size >= _LARGE]
    fit = "no message is as large as 1 MiB"
    if ratios:
        fit = f"{min(ratios):.2f} to {max(ratios):.2f} times the measured seconds from 1 MiB on"
    return f"{name} {figures}: {fit} ({table.where}, {table.source})"


# Tables of nccl-tests


def read_nccl_tests(name: str) -> MeasuredCollective:
    """Read the output of one test, which holds the columns `size` and `time` (us) or `busbw` (GB/s).

    Raises UserErrors that name the file and what it lacks.
    """
    lines = read_text(Path(name), what="table of links").splitlines()
    try:
        return _parse(name, lines)
    except ValueError as error:
        raise UserError(f"--links {name}: {error}") from error


def _parse(name: str, lines: Sequence[str]) -> MeasuredCollective:
    method = _method(name, lines)
    hosts = Counter(match[1] for match in map(_RANK.match, lines) if match)
    if not hosts:
        raise ValueError(
            "it has no line `# Rank 0 ... on HOST device 0`: keep the whole output of the test, which says "
            "how many ranks and hosts there were")
    num_ranks = sum(hosts.values())
    if num_ranks < 2:
        raise ValueError("it was measured on one rank: a link needs two or more")
    if len(set(hosts.values())) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        raise ValueError(f"its hosts have different numbers of ranks ({counts}): measure with equally many")
    seconds = _seconds_by_size(lines, method, num_ranks)
    if len(seconds) < 2:
        need = "latency and bandwidth need a small and a large one (-b 8 -e 1G -f 2)"
        raise ValueError(f"it has {len(seconds)} size{'s' * (len(seconds) != 1)}: {need}")
    sizes = sorted(seconds)
    return MeasuredCollective(
        name, method, num_ranks, len(hosts), tuple(sizes), tuple(seconds[size] for size in sizes))


def _method(name: str, lines: Sequence[str]) -> str:
    """Return the method of LinkRates for the collective that the output names, or else the file's name."""
    texts = [line for line in lines if "starting" in line or "_perf" in line]
    for text in [*texts, Path(name).name]:
        for test, method in _TESTS.items():
            if test in text or method in text:
                return method
    tests = ", ".join(_TESTS)
    raise ValueError(f"which collective it is about stands nowhere: name the file after it ({tests})")


def _seconds_by_size(lines: Sequence[str], method: str, num_ranks: int) -> dict[float, float]:
    columns: list[str] = []
    found: dict[float, float] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if line.lstrip().startswith("#"):
            header = line.lstrip("# \t").split()
            if "size" in header and ("time" in header or "busbw" in header):
                columns = header
            continue
        if not words or not words[0].isdecimal():
            continue
        if not columns:
            raise ValueError(f"line {number} comes before a header with the columns size and time or busbw")
        if len(words) < len(columns):
            raise ValueError(f"line {number} has {len(words)} columns, its header {len(columns)}")
        row: dict[str, Any] = {}
        for column, word in zip(columns, words, strict=False):
            row.setdefault(column, word)  # The first are out of place.
        size = float(row["size"])
        if "time" in row:
            seconds = 1e-6 * _positive(row["time"], "time", number)
        else:
            moved = 1.0 if method == "send" else (num_ranks - 1) / num_ranks
            moved *= 2 if method == "all_reduce" else 1
            seconds = moved * size / (1e9 * _positive(row["busbw"], "busbw", number))
        if size > 0:
            found.setdefault(size, seconds)
    if not columns:
        raise ValueError("it has no header with the columns size and time or busbw, as nccl-tests prints it")
    return found


def _positive(word: str, column: str, line: int) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"line {line}: {column} is {shown(word)}, it must be a number above 0")
    return value
