"""`realhf scaling fit`: what it reads, prints and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from realhf.cli.main import main
from realhf.scaling.analysis import read_curve
from tests.cli_tools import REPO

POINTS = [(0.0, 0.2)] + [(float(c), 0.2 + 0.5 / (1 + (20 / c) ** 1.5)) for c in range(10, 210, 10)]


def write_csv(path: Path, points=POINTS, header: str = "compute,score") -> Path:
    path.write_text("\n".join([header, *(f"{c},{score}" for c, score in points)]) + "\n")
    return path


def write_run(directory: Path, points=POINTS) -> Path:
    """Write metrics as a run does: an evaluation before the first step, and one after every second."""
    directory.mkdir()
    lines = []
    for step, (compute, score) in enumerate(points):
        compute = {"compute/device_seconds": compute, "compute/flops": 1e9 * compute}
        lines.append({"step": 2 * step, **compute, "eval/score": score})
        lines.append({"step": 2 * step + 1, **compute, "reward/mean": 0.5})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.fixture
def call(capsys):
    """Run a command; return its exit code, standard output and standard error."""

    def run(*words) -> tuple[int, str, str]:
        code = main(["scaling", "fit", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_json_of_a_run(tmp_path, call):
    run = write_run(tmp_path / "my-run")
    code, out, err = call(run, "--json", "--at", 1000, "--fit-until", "50%", "--bootstrap", 20)
    assert (code, err) == (0, "")
    (curve,) = json.loads(out)["curves"]
    assert (curve["name"], curve["points"], curve["largest_compute"]) == ("my-run", 10, 100.0)
    sigmoid = curve["sigmoid"]
    assert [sigmoid[k] for k in ("R0", "A", "B", "C_mid")] == pytest.approx([0.2, 0.7, 1.5, 20], rel=1e-3)
    assert curve["at"][0]["sigmoid"] == pytest.approx(0.2 + 0.5 / (1 + 0.02**1.5), abs=1e-4)
    assert curve["later_points"]["points"] == 10
    assert curve["later_points"]["sigmoid"]["largest_absolute"] < 1e-4
    assert curve["later_points"]["power_law"]["mean"] > 0.005
    code, out, _ = call(run, "--json", "--x", "compute/flops", "--bootstrap", 0)
    (curve,) = json.loads(out)["curves"]
    assert curve["sigmoid"]["C_mid"] == pytest.approx(20e9, rel=1e-3)
    assert curve["sigmoid"]["intervals_95"] is None


def test_repeated_runs_are_pooled_and_others_compared(tmp_path, call):
    lower = [(c, score - 0.02) for c, score in POINTS]
    a, b = write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv", lower)
    c = write_csv(tmp_path / "c.csv", [(c, min(0.6, score)) for c, score in POINTS], "hours,pass rate")
    pooled = read_curve(f"both={a},{b}")
    assert (pooled.name, len(pooled.compute), pooled.files) == ("both", 40, (str(a), str(b)))
    assert pooled.start == pytest.approx(0.19) and (np.diff(pooled.compute) >= 0).all()
    assert call(f"both={a},{b}", c)[0] == 2  # The columns have other names there.
    c.write_text(c.read_text().replace("hours,pass rate", "compute,score"))
    code, out, _ = call(f"both={a},{b}", c, "--json", "--bootstrap", 0)
    assert code == 0
    (comparison,) = json.loads(out)["comparisons"]
    assert comparison["curves"] == ["both", "c"] and (comparison["winner"], comparison["by"]) == ("both", "A")


def test_the_table_is_for_a_terminal(tmp_path, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    a, b = write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv")
    code, out, err = call(a, b, "--skip", 20, "--fit-until", "60%", "--at", 500, "--bootstrap", 10)
    assert (code, err) == (0, "")
    for words in ("sigmoid", "power law", "97.5 %", "500", "largest |error|", "with the same asymptote, a"):
        assert words in out


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path, call):
    a, b = write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv")
    for name, files, beginning in (
        ("one.png", [a], b"\x89PNG"), ("two.svg", [a, b], b"<?xml"), ("one.pdf", [a], b"%PDF"),
    ):
        path = tmp_path / name
        options = ("--at", 1000, "--bootstrap", 10, "--fit-until", "50%", "--picture", path)
        assert call(*files, *options)[0] == 0
        assert path.read_bytes().startswith(beginning)
    drawn = (tmp_path / "two.svg").read_text()
    assert "a: A 0.700, B 1.50, C_mid 20" in drawn and "extrapolation" in drawn and "95 % band" in drawn


# What is wrong -> lines of the file, options, words of the sentence.
WRONG = {
    "too few points": (["compute,score", "0,.1", "1,.2", "2,.3"], [], "2 points besides the start are left"),
    "no column": (["hours,score", "1,.2"], [], "has no column compute: name one of hours, score with --x"),
    "no score": (["compute,pass", "1,.2"], [], "has no column score: name one of compute, pass with --y"),
    "only empty scores": (["compute,score", "1,"], [], "has no line with score"),
    "no number": (["compute,score", "0,.1", "1,high"], [], "line 3: score is 'high': it must be a finite"),
    "not finite": (["compute,score", "0,.1", "nan,.2"], [], "line 3: compute is 'nan': it must be a finite"),
    "compute below 0": (["compute,score", "-3,.1"], [], "line 2: compute is -3: it must be above 0"),
    "compute 0 twice": (["compute,score", "0,.1", "0,.2"], [], "line 3: compute is 0: it must be above 0"),
    "no rise": (["compute,score", *(f"{i},0.2" for i in range(9))], [], "there is no rise to fit"),
    "all skipped": (None, ["--skip", "100%"], "0 points besides the start are left"),
    "skip": (None, ["--skip", "some"], "--skip: 'some' must be a compute of at least 0, or a share"),
    "fit until": (None, ["--fit-until", "120%"], "--fit-until: '120%' must be a compute"),
    "at": (None, ["--at", "0"], "--at is 0: it must be above 0"),
    "ceiling": (None, ["--ceiling", "0.1"], "--ceiling is 0.1: it must be above R0, 0.2"),
    "r0": (None, ["--r0", "low"], "--r0 is low: it must be a number"),
    "margin": (None, ["--margin", "-1"], "--margin is -1: it must not be negative"),
    "bootstrap": (None, ["--bootstrap", "1.5"], "--bootstrap is 1.5: it must be a whole number"),
    "picture": (None, ["--picture", "a.gif"], "--picture a.gif: its name must end in .png, .pdf, .svg"),
    "directory": (None, ["--picture", "/nowhere/a.png"], "there is no directory /nowhere"),
    "option": (None, ["--colour", "red"], "realhf scaling has no option --colour: legal are --x, --y"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_in_one_sentence(tmp_path, call, case):
    lines, options, words = WRONG[case]
    path = tmp_path / "points.csv"
    if lines is None:
        write_csv(path)
    else:
        path.write_text("\n".join(lines) + "\n")
    code, out, err = call(path, *options)
    assert (code, out) == (2, "")
    assert err.startswith("realhf: ") and err.count("\n") == 1 and words in err


def test_wrong_files_are_refused(tmp_path, call):
    code, _, err = call(tmp_path / "nowhere.csv")
    assert code == 2 and "there is no file" in err
    (tmp_path / "points.txt").write_text("")
    assert "a file that ends in .jsonl or .csv" in call(tmp_path / "points.txt")[2]
    metrics = tmp_path / "metrics.jsonl"
    for text, words in {
        "{]\n": "line 1 is not JSON",
        "[1]\n": "line 1 is list: every line must be an object",
        '{"step": 0, "eval/score": 0.5}\n': "line 1 has no compute/device_seconds: name the compute with --x",
        '{"step": 0, "reward/mean": 0.5}\n': "has no line with eval/score: name the score with --y",
        '{"compute/device_seconds": 1, "eval/score": NaN}\n': "line 1: eval/score is nan: it must be",
    }.items():
        metrics.write_text(text)
        code, _, err = call(tmp_path)
        assert code == 2 and words in err, err


def test_a_run_in_progress_may_have_an_unfinished_line(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "eval/sc')
    assert len(read_curve(str(run)).compute) == len(POINTS) - 1


@pytest.mark.slow
def test_the_command_leaves_torch_alone(tmp_path):
    code = "import sys; from realhf.cli.main import main"
    code += "; sys.exit(main(sys.argv[1:]) or 7 * ('torch' in sys.modules))"
    words = ["scaling", "fit", str(write_csv(tmp_path / "a.csv")), "--bootstrap", "5"]
    command = [sys.executable, "-c", code, *words, "--picture", str(tmp_path / "a.png")]
    assert subprocess.run(command, cwd=REPO, capture_output=True).returncode == 0


def test_percent_beside_shares(tmp_path, call):
    """Scores in percent are told from shares, and have a margin of their own."""
    percent = [(compute, 100 * score) for compute, score in POINTS]
    shares, others = write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv", percent)
    noisy = [(c, score + 0.2 * (-1) ** i) for i, (c, score) in enumerate(percent)]
    says = f"realhf: warning: the scores of {others} go up to more than 10 and those of"
    assert says in call(f"{shares},{others}", "--bootstrap", "0")[2]
    says = "the scores of b go up to more than 10 and those of a"
    assert says in call(shares, others, "--bootstrap", "0")[2]
    code, out, err = call(write_csv(tmp_path / "c.csv", noisy), "--bootstrap", "20", "--json")
    (curve,) = json.loads(out)["curves"]
    assert (code, err) == (0, "") and not any("interval of A" in reason for reason in curve["warnings"])
