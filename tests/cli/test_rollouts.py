"""`realhf rollouts`: what it filters, sorts, draws and refuses."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from realhf.cli.main import main
from realhf.cli.rollouts import excerpt, parse_steps, printable
from tests.cli_tools import REPO

NASTY = "red \x1b[31malert\x07\r\u202e [bold]x[/bold]\nsecond line"


def make_rows() -> list[dict]:
    """Return answers of 6 steps to two prompts each, one of which comes up in every second step (row 17)."""
    rows = []
    for step in range(1, 7):
        for prompt in range(2):
            row = 17 if prompt == 0 and step % 2 == 0 else 100 + 2 * step + prompt
            for k in range(2):
                sample = 2 * (2 * step + prompt) + k
                right = float((sample * 7) % 3 == 0)
                rows.append({
                    "step": step, "followed": row == 17, "sample": sample, "prompt_number": sample // 2,
                    "dataset_row": row, "score": round(right + 0.1 * k, 6),
                    "rewards": {"exact": right, "length": None if k else 0.5},
                    "length": 10 + (sample * 13) % 50, "finished": sample % 5 != 0, "versions": [step, step],
                    "advantage": 0.25 * k, "columns": {"answer": str(row), "dataset": ["hard", "a, b"][k]},
                    "prompt": [{"role": "system", "content": "Be careful."},
                               {"role": "user", "content": f"How much is {row} plus {row}?"}],
                    "completion": NASTY if sample == 9 else f"It is {2 * row}, says sample {sample}.",
                })  # fmt: skip
    return rows


ROWS = make_rows()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "my-run"
    directory.mkdir()
    write(directory / "rollouts.jsonl", ROWS, torn='{"step": 7, "foll')
    return directory


def write(path: Path, rows: list[dict], torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command on a terminal of some width; return its exit code, standard output and standard error."""

    def run_command(*words, width: int = 100) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(width))
        code = main(["rollouts", *map(str, words)])
        return code, *capsys.readouterr()

    return run_command


def ids(rows) -> list[int]:
    return [row["sample"] for row in rows]


CHOICES = [
    ((), lambda row: True),
    (("--step", 3), lambda row: row["step"] == 3),
    (("--steps", "2-4"), lambda row: 2 <= row["step"] <= 4),
    (("--where", "score<0.5"), lambda row: row["score"] < 0.5),
    (("--where", "score >= 0.1 and length>20", "--where", "step!=2"),
     lambda row: row["score"] >= 0.1 and row["length"] > 20 and row["step"] != 2),
    (("--where", "exact=1"), lambda row: row["rewards"]["exact"] == 1),
    (("--where", "rewards.length<=0.5"), lambda row: row["rewards"]["length"] is not None),
    (("--where", "advantage>-1e-3,dataset_row==17"), lambda row: row["dataset_row"] == 17),
    (("--where", "followed=1"), lambda row: row["followed"]),
    (("--where", "finished=0"), lambda row: not row["finished"]),
    (("--where", "dataset=hard"), lambda row: row["sample"] % 2 == 0),
    (("--where", "score<2 and dataset!='hard'"), lambda row: row["sample"] % 2 == 1),
    (("--where", "columns.dataset='a, b',step=2"), lambda row: row["sample"] % 2 == 1 and row["step"] == 2),
    (("--where", "answer=17"), lambda row: row["dataset_row"] == 17),
    (("--contains", "says sample 1"), lambda row: "says sample 1" in row["completion"]),
    (("--contains", "17 plus"), lambda row: row["dataset_row"] in (17, 117)),
    (("--cut",), lambda row: not row["finished"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "is_chosen"), CHOICES)
def test_filters(call, run, options, is_chosen):
    code, out, err = call(run, "--json", "--sort", "step", *options)
    assert (code, err) == (0, "")
    document = json.loads(out)
    expected = [row for row in ROWS if is_chosen(row)]
    assert document["rollouts"] == expected and document["matching"] == len(expected)
    assert document["answers"] == len(ROWS) and (0 < len(expected) < len(ROWS) or not options)


@pytest.mark.parametrize(("words", "key", "falls"), [
    (("--sort", "score"), lambda row: row["score"], False),
    (("--sort", "-length"), lambda row: row["length"], True),
    (("--sort=-score",), lambda row: row["score"], True),
    ((), lambda row: row["step"], True),
])  # fmt: skip
def test_order_and_limit(call, run, words, key, falls):
    code, out, _ = call(run, *words, "--json", "--limit", 7)
    assert code == 0
    assert ids(json.loads(out)["rollouts"]) == ids(sorted(ROWS, key=key, reverse=falls)[:7])


def test_answers_without_the_field_come_last(call, run):
    _, out, _ = call(run, "--sort", "-rewards.length", "--json")
    values = [row["rewards"]["length"] for row in json.loads(out)["rollouts"]]
    assert values == [0.5] * 12 + [None] * 12


def test_the_table_fits_any_terminal_and_lets_no_control_character_through(call, run):
    for width in (110, 160):
        code, out, _ = call(run, "--limit", 0, "--sort", "step", width=width)
        assert code == 0
        lines = out.splitlines()
        body = lines[3 : 3 + len(ROWS)]
        assert [line.split()[:2] for line in body] == [[str(r["step"]), str(r["dataset_row"])] for r in ROWS]
        assert all(len(line) <= width for line in lines[:-1])
        assert all(character.isprintable() for line in lines for character in line)
    assert "red \\x1b[31malert\\x07\\r\\u202e [bold]x[/bold]⏎second line" in out
    assert "How much is 17 plus 17?" in out and lines[-1].startswith("24 of 24 matching answers; ")
    cut = [line.rstrip().endswith("cut") for line in body]
    assert cut == [not row["finished"] for row in ROWS]


@pytest.mark.parametrize("width", [24, 40, 60, 80])
def test_a_narrow_terminal_shows_prompts_too(call, run, width):
    """Each prompt is shown once, as whole as its width allows, with its answers and their facts below it."""
    code, out, _ = call(run, "--limit", 0, "--sort", "step", width=width)
    assert code == 0
    lines = out.splitlines()
    assert all(len(line) <= width for line in lines[:-1])
    prompts = list(dict.fromkeys((row["step"], row["dataset_row"]) for row in ROWS))
    heads = [line for line in lines if line.startswith("step ")]
    assert heads == [f"step {step} · row {row}" for step, row in prompts]
    questions = [line.strip() for line in lines if line.startswith("  How")]
    assert questions == [excerpt(f"How much is {row} plus {row}?", width - 2) for _, row in prompts]
    answers = [line.strip() for line in lines if line.startswith("    ") and line[4] != " "]
    assert answers == [excerpt(row["completion"], width - 4) for row in ROWS]
    facts = " ".join(line.strip() for line in lines if line.startswith("      "))
    assert facts.count("score ") == facts.count("exact ") == len(ROWS)
    assert facts.count("cut") == sum(not row["finished"] for row in ROWS)


def test_a_pipe_shows_prompts_in_a_table(run):
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    words = [sys.executable, "-m", "realhf", "rollouts", str(run), "--limit", "3"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=REPO, env=variables, check=True)
    newest = sorted(ROWS, key=lambda row: row["step"], reverse=True)[:3]
    lines = shown.stdout.splitlines()[3:6]
    for line, row in zip(lines, newest, strict=True):
        assert f"How much is {row['dataset_row']} plus {row['dataset_row']}?" in line
        assert row["completion"] in line
    assert "\x1b" not in shown.stdout


def test_full_answers(call, run):
    code, out, _ = call(run, "--full", "--where", "sample=9", width=70)
    assert code == 0
    assert not set(out) & {"\x07", "\r", "\x1b", "\u202e"}
    for text in ("system: Be careful.", "user: How much is 17 plus 17?", "second line", "answer: 17",
                 "step 2 · row 17 · sample 9", "score 1.1", "exact 1", "length -", "weights 2 to 2",
                 "advantage 0.25", "27 tokens", "1 of 1 matching"):  # fmt: skip
        assert text in out
    assert "red \\x1b[31malert\\x07\\r\\u202e [bold]x[/bold]" in out


def test_story_of_a_prompt(call, run):
    of_row = [row for row in ROWS if row["dataset_row"] == 17]
    for wanted in ("17", "much is 17 plus"):
        code, out, _ = call(run, "--story", wanted, "--json")
        document = json.loads(out)
        assert code == 0 and (document["dataset_row"], document["prompt"]) == (17, of_row[0]["prompt"])
        assert [step["step"] for step in document["steps"]] == [2, 4, 6]
        for step in document["steps"]:
            rows = [row for row in of_row if row["step"] == step["step"]]
            assert step["rollouts"] == rows
            assert step["mean_score"] == pytest.approx(mean(row["score"] for row in rows))
    _, out, _ = call(run, "--story", 17)
    means = [mean(row["score"] for row in of_row if row["step"] == step) for step in (2, 4, 6)]
    table = [line.split()[:3] for line in out.splitlines() if line.strip()[:1] in ("2", "4", "6")]
    assert table == [[str(step), "2", f"{m:.4g}"] for step, m in zip((2, 4, 6), means, strict=True)]
    assert f"mean score {means[0]:.4g} at first, {means[-1]:.4g} at last" in out


def test_list_of_stories(call, run, tmp_path):
    of_row = [row for row in ROWS if row["dataset_row"] == 17]
    first, last = (mean(row["score"] for row in of_row if row["step"] == step) for step in (2, 6))
    _, out, _ = call(run, "--story", "--json")
    (story,) = json.loads(out)["stories"]
    assert story == {"set": "", "dataset_row": 17, "num_steps": 3, "first_score": pytest.approx(first),
                     "last_score": pytest.approx(last), "prompt": of_row[0]["prompt"]}  # fmt: skip
    code, out, _ = call(run, "--story")
    line = next(line for line in out.splitlines() if "17 plus 17" in line)
    assert code == 0 and line.split()[:4] == ["17", "3", f"{first:.4g}", f"{last:.4g}"]
    assert "1 of 1 prompts; --story ROW shows" in out
    write(tmp_path / "rollouts.jsonl", [row for row in ROWS if not row["followed"]])
    code, _, err = call(tmp_path, "--story")
    assert code == 2 and "has no such answers to rows that are followed (follow_rows)" in err
    for step, score in ((0, -0.0), (8, 1.0)):
        rows = [{"dataset_row": i, "prompt": f"p{i}", "completion": "", "score": score} for i in range(3)]
        write(tmp_path / f"evals/step_{step}.jsonl", rows)
    _, out, _ = call(tmp_path, "--eval", "--story")
    lines = [line.split() for line in out.splitlines() if " p" in line and "prompts" not in line]
    assert [line for line in lines if "p" in line[-1] and line[0].isdigit()] == [
        [str(i), "2", "0", "1", f"p{i}"] for i in range(3)]


REFUSALS = [
    (("--where", "score"), "'score' is no condition: legal are a field"),
    (("--where", "score<a"), "'score<a' is no condition"),
    (("--where", "score=a"), "score is a number, and 'a' is none"),
    (("--where", "dataset<1"), "dataset is a text, which has only = and !="),
    (("--where", "score<1,"), "'' is no condition"),
    (("--where", "__import__('os')<1"), "there is no field"),
    (("--where", "scroe<1"), "there is no field 'scroe' (did you mean score?): legal are step, sample"),
    (("--sort", "reward"), "there is no field 'reward'"),
    (("--sort", "-nothing"), "there is no field 'nothing'"),
    (("--steps", "9-3"), "its first step must not be above its last one"),
    (("--steps", "a"), "must be a range such as 5-20"),
    (("--step", "2", "--steps", "3"), "give one of them"),
    (("--limit", "-1"), "must not be negative"),
    (("--story", "no such text"), "no answer is to a prompt of this row, or with this text: rows with"),
    (("--story", "How much"), "10 prompts have it: name one by its row: 102 ("),
    (("--eval",), "has neither evals/ nor eval.jsonl"),
    (("--frob",), "has no option --frob: legal are --step"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSALS)
def test_refusals(call, run, options, sentence):
    code, out, err = call(run, *options)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1, err


def test_missing_files(call, run, tmp_path):
    assert "there is no such run directory" in call(tmp_path / "none")[2]
    assert "has no rollouts.jsonl: its experiment" in call(tmp_path)[2]
    write(tmp_path / "rollouts.jsonl", [], torn="{]\n")
    code, _, err = call(tmp_path)
    assert code == 2 and "rollouts.jsonl line 1 is not JSON" in err
    write(tmp_path / "rollouts.jsonl", [])
    code, out, _ = call(tmp_path / "rollouts.jsonl", "--where", "score<1")
    assert code == 0 and "0 of 0 matching answers" in out


def test_answers_of_evaluations(call, tmp_path):
    answer = {"prompt": "1+1=", "answer": "2", "completion": "two", "score": 0.0}
    write(tmp_path / "eval.jsonl", [answer, {**answer, "completion": "2", "score": 1.0}])
    _, out, _ = call(tmp_path, "--eval", "--json", "--sort", "-score")
    assert [row["completion"] for row in json.loads(out)["rollouts"]] == ["2", "two"]
    assert "2 of 2 matching answers" in call(tmp_path, "--eval")[1]
    for name in ("math", "code"):
        for step in (0, 20, 100):
            row = {**answer, "dataset_row": 3, "scores": {"exact": step / 100}, "score": step / 100}
            write(tmp_path / "evals" / name / f"step_{step}.jsonl", [row])
    _, out, _ = call(tmp_path, "--eval", "math", "--json", "--where", "exact>0")
    assert [(row["set"], row["step"]) for row in json.loads(out)["rollouts"]] == [("math", 100), ("math", 20)]
    code, out, _ = call(tmp_path, "--eval", "code", "--story", 3)
    assert code == 0 and "mean score 0 at first, 1 at last" in out
    assert " set " in call(tmp_path, "--eval")[1]
    code, _, err = call(tmp_path, "--eval", "maths")
    assert code == 2 and "there is no such set (did you mean math?): legal are code, math" in err
    assert "--eval shows the answers of evaluations" in call(tmp_path)[2]


def test_steps():
    texts = {"5-20": (5, 20), "5-": (5, float("inf")), "-20": (0, 20), "7": (7, 7)}
    assert {text: parse_steps(text) for text in texts} == texts


def test_excerpts_have_beginning_and_end_and_the_right_width():
    text = "beginning " + "x" * 50 + " end"
    for width in (12, 20, 40):
        short = excerpt(text, width)
        assert len(short) == width and short.startswith("begin"[:width // 3]) and short.endswith("end")
    assert excerpt("日本語のテキスト", 9) == "日本…ト" and excerpt("short", 9) == "short"
    assert printable("a\tb\nc\x00") == "a    b\nc\\x00" and printable("\ud800") == "\\ud800"


def test_colours_on_a_terminal_and_no_torch(run):
    """In a pseudo-terminal: the colours are Rich's own, and nothing of the answers' escapes is left."""
    master, slave = pty.openpty()
    code = ("import sys; from realhf.cli.main import main\n"
            f"code = main(['rollouts', {str(run)!r}, '--limit', '0'])\n"
            "sys.exit(code or int('torch' in sys.modules))")  # fmt: skip
    variables = os.environ | {"COLUMNS": "120", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPO, stdout=slave, stderr=subprocess.PIPE, env=variables)
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 4096):
            shown += data
    except OSError:  # The other end is closed.
        pass
    assert process.wait() == 0, process.stderr.read()
    assert b"\x1b[31m" in shown and b"\x1b[31malert" not in shown and b"\x07" not in shown


def test_tokens_are_shown_with_the_log_probs_of_those_that_were_sampled(call, tmp_path):
    tokens = {"token_ids": [5, 6, 7], "response_mask": [0, 1, 0], "logprobs": [0.0, -0.25, 0.0]}
    with_tokens = ROWS[0] | tokens
    write(tmp_path / "rollouts.jsonl", [with_tokens, ROWS[1]])
    code, out, _ = call(tmp_path, "--tokens", "--sort", "sample")
    assert code == 0 and "token ids: 5 6:-0.25 7" in out and out.count("token ids") == 1
    _, out, _ = call(tmp_path, "--full")
    assert "token ids" not in out
    _, out, _ = call(tmp_path, "--json", "--sort", "sample")
    assert json.loads(out)["rollouts"][0]["logprobs"] == [0.0, -0.25, 0.0]
    code, _, err = call(tmp_path, "--tokens", "--where", f"sample={ROWS[1]['sample']}")
    assert code == 2 and "has token ids: set rollouts.tokens in the run" in err
