"""`realhf scaling fit`: fits compute-performance curves of runs. Free of torch."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from realhf.cli.overrides import refuse_words
from realhf.errors import UserError, naming, warn

if TYPE_CHECKING:
    from realhf.scaling.analysis import Comparison, FitSettings

HELP = "fit curves of score against compute, extrapolate and compare them"
EXAMPLES = (
    "realhf scaling fit runs/grpo --at 1e6 --picture fit.png",
    "realhf scaling fit ours=a.csv,b.csv theirs=c.csv --skip 2% --fit-until 50% --json",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf scaling`."""
    add = parser.add_argument
    add("action", choices=["fit"], help="what to do: fit the sigmoid law and, beside it, a power law")
    text = "run directory, metrics.jsonl or CSV file; files joined by commas are pooled into one curve"
    add("files", nargs="+", metavar="[NAME=]FILE[,FILE...]", help=text)
    add("--x", metavar="COLUMN", help="compute; default: compute/device_seconds, in CSV files `compute`")
    add("--y", metavar="COLUMN", help="score; default: eval/score, in CSV files `score`")
    text = "leave out the points up to this compute, or up to this share (2%%) of the largest one"
    add("--skip", metavar="C", default="0", help=text)
    text = "fit up to this compute or share (50%%) only, and show the errors on later points"
    add("--fit-until", metavar="C", help=text)
    add("--at", metavar="C", action="append", default=[], help="extrapolate to this compute; repeatable")
    text = "score without training; default: that of the first evaluation, which then is no point of the fit"
    add("--r0", metavar="SCORE", help=text)
    text = "highest asymptote to consider; default: 1 for scores from 0 to 1, else four times the rise so far"
    add("--ceiling", metavar="SCORE", help=text)
    text = "asymptotes that differ by at most this are compared as equal; default: 0.02, or 2 for percent"
    add("--margin", metavar="SCORE", help=text)
    text = "resampled fits behind the 95%% intervals; 0: no intervals; default: 400"
    add("--bootstrap", metavar="N", default="400", help=text)
    add("--picture", metavar="FILE", help="draw points, fits and extrapolations (.png, .pdf or .svg)")
    add("--json", action="store_true", help="print one JSON document")


def main(options: Namespace, words: list[str]) -> int:
    """Print the fits and return the exit code."""
    refuse_words(options.parser, [word for word in words if word.startswith("-")])
    from realhf.scaling import analysis  # It loads scipy, which takes a second, so only this command does.

    budgets = [_number(text, "--at", "be above 0", lambda x: x > 0) for text in options.at]
    picture = _picture_path(options)
    curves = [analysis.read_curve(text, x=options.x, y=options.y) for text in (*options.files, *words)]
    names = analysis.common_names(curves)
    if (sentence := analysis.other_scales(names, [curve.score for curve in curves])) is not None:
        warn(sentence)
    if options.margin is None:  # The error between repeated runs that the paper found.
        options.margin = "2" if all(analysis.is_percent(curve.score) for curve in curves) else "0.02"
    settings = _settings(options)
    fits = [analysis.fit_curve(curve, settings) for curve in curves]
    comparisons = analysis.compare(fits, names, margin=settings.margin)
    documents = [analysis.document(f, n, budgets, settings) for f, n in zip(fits, names, strict=True)]
    if picture is not None:
        default_x, default_y = analysis.DEFAULT_COLUMNS[Path(curves[0].files[0]).suffix]
        furthest = max(*budgets, 0.0, *(float(curve.compute.max()) for curve in curves), 0.0)
        from realhf.scaling.picture import draw_fits

        draw_fits(
            fits, names, picture, until=furthest, x=options.x or default_x, y=options.y or default_y)
    if options.json:
        compared = [_comparison(comparison) for comparison in comparisons]
        print(json.dumps({"curves": documents, "comparisons": compared}, allow_nan=False))
    else:
        _print(documents, comparisons)
    return 0


def _settings(options: Namespace) -> "FitSettings":
    from realhf.scaling.analysis import Amount, FitSettings

    with naming("--skip"):
        skip = Amount.parse(options.skip)
    with naming("--fit-until"):
        fit_until = None if options.fit_until is None else Amount.parse(options.fit_until)
    scores = {}
    for name in ("r0", "ceiling"):
        text = getattr(options, name)
        scores[name] = None if text is None else _number(text, f"--{name}", "be a number", lambda x: True)
    bootstrap = _number(
        options.bootstrap, "--bootstrap", "be a whole number from 0 to 100000",
        lambda x: 0 <= x <= 1e5 and x == int(x))
    return FitSettings(
        skip=skip, fit_until=fit_until, start=scores["r0"], ceiling=scores["ceiling"],
        num_bootstrap=int(bootstrap),
        margin=_number(options.margin, "--margin", "not be negative", lambda x: x >= 0))


def _number(text: str, option: str, rule: str, is_legal: Callable[[float], bool]) -> float:
    """Return an option's value. Raises UserError if it is no finite number, or not legal."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf") or not is_legal(value):
        raise UserError(f"{option} is {text}: it must {rule}")
    return value


def _picture_path(options: Namespace) -> Path | None:
    if options.picture is None:
        return None
    path = Path(options.picture)
    legal = (".png", ".pdf", ".svg")
    if path.suffix not in legal:
        raise UserError(f"--picture {path}: its name must end in {', '.join(legal)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--picture {path}: there is no directory {path.parent}")
    return path


def _comparison(comparison: "Comparison") -> dict[str, Any]:
    return {
        "curves": list(comparison.names), "A": list(comparison.asymptotes), "B": list(comparison.exponents),
        "common_A": comparison.common_asymptote, "winner": comparison.names[comparison.winner],
        "by": comparison.by}


def _print(documents: Sequence[dict[str, Any]], comparisons: Sequence["Comparison"]) -> None:
    """Print the tables of fits, of extrapolations and of errors, then warnings and comparisons."""
    console = Console(highlight=False)
    console.print(_table_of_laws(documents))
    if any(document["at"] for document in documents):
        table = Table("curve", "at compute", "sigmoid", "power law")
        for document in documents:
            for at in document["at"]:
                low_high = at["interval_95"]
                interval = f" ({low_high[0]:.4g} to {low_high[1]:.4g})" if low_high else ""
                sigmoid = f"{at['sigmoid']:.4g}{interval}"
                table.add_row(document["name"], f"{at['compute']:g}", sigmoid, f"{at['power_law']:.4g}")
        console.print(table)
    if any(document["later_points"] for document in documents):
        console.print(_table_of_errors(documents))
    for document in documents:
        for warning in document["warnings"]:
            console.print(f"{document['name']}: {warning}", soft_wrap=True)
    for comparison in comparisons:
        console.print(f"{' and '.join(comparison.names)}: {comparison.verdict}", soft_wrap=True)


def _table_of_laws(documents: Sequence[dict[str, Any]]) -> Table:
    table = Table("curve", "points", "law", "R0", "A", "B", "C_mid or D", "RMSE")
    for document in documents:
        sigmoid = document["sigmoid"]
        power = document["power_law"]
        names = ("A", "B", "C_mid")
        values = [f"{sigmoid[name]:.4g}" for name in names]
        table.add_row(
            document["name"], str(document["points"]), "sigmoid", f"{sigmoid['R0']:.4g}", *values,
            f"{sigmoid['rmse']:.2g}")
        if intervals := sigmoid["intervals_95"]:
            for i, end in enumerate(("2.5 %", "97.5 %")):
                table.add_row("", "", f"  {end}", "", *(f"{intervals[name][i]:.4g}" for name in names), "")
        values = [f"{power[name]:.4g}" for name in ("A", "B", "D")]
        table.add_row("", "", "power law", "", *values, f"{power['rmse']:.2g}", end_section=True)
    return table


def _table_of_errors(documents: Sequence[dict[str, Any]]) -> Table:
    """Return the errors of the fitted laws on later points; a law with a positive mean error is too high."""
    table = Table("curve", "later points", "law", "mean error", "mean |error|", "largest |error|")
    for document in documents:
        if (later := document["later_points"]) is None:
            continue
        for law in ("sigmoid", "power_law"):
            errors = [f"{later[law][name]:.4f}" for name in ("mean", "mean_absolute", "largest_absolute")]
            table.add_row(document["name"], str(later["points"]), law.replace("_", " "), *errors)
    return table
