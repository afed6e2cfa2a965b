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
from realhf.cli.rollouts import excerpt, printable
from tests.cli_tools import REPO

NASTY = "red \x1b[31malert\x07\r\u202e [bold]x[/bold]\nsecond line"


def make_rows() -> list[dict]:
    """Return samples of 6 steps to two prompts each, one of which comes up in every second step (row 17)."""
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
                })
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
    (("--where", "step == 3"), lambda row: row["step"] == 3),
    (("--where", "2 <= step <= 4"), lambda row: 2 <= row["step"] <= 4),
    (("--where", "score >= 0.1 and length > 20", "--where", "step != 2"),
     lambda row: row["score"] >= 0.1 and row["length"] > 20 and row["step"] != 2),
    (("--where", "exact == 1 or step == 1"), lambda row: row["rewards"]["exact"] == 1 or row["step"] == 1),
    (("--where", "rewards.length <= 0.5"), lambda row: row["rewards"]["length"] is not None),
    (("--where", "length > 20"), lambda row: row["length"] > 20),  # The field, not the reward of this name.
    (("--where", "advantage > -1e-3 and dataset_row == 17"), lambda row: row["dataset_row"] == 17),
    (("--where", "followed"), lambda row: row["followed"]),
    (("--where", "not finished"), lambda row: not row["finished"]),
    (("--where", "score < 2 and dataset != 'hard'"), lambda row: row["sample"] % 2 == 1),
    (("--where", "columns['dataset'] == 'a, b' and step in [2]"),
     lambda row: row["sample"] % 2 == 1 and row["step"] == 2),
    (("--where", "answer == '17'"), lambda row: row["dataset_row"] == 17),
    (("--where", "'says sample 1' in completion"), lambda row: "says sample 1" in row["completion"]),
    (("--where", "completion.endswith('line') or '17 plus' in prompt[-1].content"),
     lambda row: row["dataset_row"] in (17, 117) or row["sample"] == 9),
]


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
    (("--sort", "length % 7"), lambda row: row["length"] % 7, False),
    ((), lambda row: row["step"], True),
])
def test_order_and_limit(call, run, words, key, falls):
    code, out, _ = call(run, *words, "--json", "--limit", 7)
    assert code == 0
    assert ids(json.loads(out)["rollouts"]) == ids(sorted(ROWS, key=key, reverse=falls)[:7])


def test_answers_without_the_field_come_last(call, run):
    _, out, _ = call(run, "--sort", "-rewards.length", "--json")
    values = [row["rewards"]["length"] for row in json.loads(out)["rollouts"]]
    assert values == [0.5] * 12 + [None] * 12


@pytest.mark.parametrize("width", [24, 40, 80, 160])
def test_answers_fit_any_terminal_and_let_no_control_character_through(call, run, width):
    """Each prompt is shown once, as whole as its width allows, with its samples and their facts below it."""
    code, out, _ = call(run, "--limit", 0, "--sort", "step", width=width)
    assert code == 0
    lines = out.splitlines()
    assert all(len(line) <= width for line in lines[:-1])
    assert all(character.isprintable() for line in lines for character in line)
    prompts = list(dict.fromkeys((row["step"], row["dataset_row"]) for row in ROWS))
    heads = [line for line in lines if line.startswith("step ")]
    assert heads == [f"step {step} · row {row}" for step, row in prompts]
    questions = [line.strip() for line in lines if line.startswith("  How")]
    assert questions == [excerpt(f"How much is {row} plus {row}?", width - 2) for _, row in prompts]
    samples = [line.strip() for line in lines if line.startswith("    ") and line[4] != " "]
    assert samples == [excerpt(row["completion"], width - 4) for row in ROWS]
    facts = " ".join(line.strip() for line in lines if line.startswith("      "))
    assert facts.count("score ") == facts.count("exact ") == len(ROWS)
    assert facts.count("cut") == sum(not row["finished"] for row in ROWS)
    assert lines[-1].startswith("24 of 24 matching samples; ")
    assert width < 80 or "red \\x1b[31malert\\x07\\r\\u202e [bold]x[/bold]⏎second line" in out


def test_a_pipe_shows_whole_lines_without_colours(run):
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    words = [sys.executable, "-m", "realhf", "rollouts", str(run), "--limit", "3"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=REPO, env=variables, check=True)
    newest = sorted(ROWS, key=lambda row: row["step"], reverse=True)[:3]
    for row in newest:
        assert f"\n  How much is {row['dataset_row']} plus {row['dataset_row']}?\n" in shown.stdout
        assert f"\n    {row['completion']}\n" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_full_answers(call, run):
    code, out, _ = call(run, "--full", "--where", "sample == 9", width=80)
    assert code == 0
    assert not set(out) & {"\x07", "\r", "\x1b", "\u202e"}
    for text in ("system: Be careful.", "user: How much is 17 plus 17?", "second line", "answer: 17",
                 "step 2 · row 17 · sample 9", "score 1.1", "exact 1", "length -", "weights 2 to 2",
                 "advantage 0.25", "27 tokens", "1 of 1 matching"):
        assert text in out
    assert "red \\x1b[31malert\\x07\\r\\u202e [bold]x[/bold]" in out


def test_groups_of_one_prompt_by_step(call, run):
    words = ("--where", "dataset_row == 17", "--by", "step")
    of_row = [row for row in ROWS if row["dataset_row"] == 17]
    scores = {step: [row["score"] for row in of_row if row["step"] == step] for step in (2, 4, 6)}
    code, out, _ = call(run, *words, "--json")
    document = json.loads(out)
    assert code == 0 and [group["by"] for group in document["groups"]] == [2, 4, 6]
    for group in document["groups"]:
        rows = [row for row in of_row if row["step"] == group["by"]]
        assert group.pop("rollouts") == rows
        assert group == {
            "by": rows[0]["step"], "samples": 2, "mean_score": pytest.approx(mean(scores[rows[0]["step"]])),
            "worst": min(scores[rows[0]["step"]]), "best": max(scores[rows[0]["step"]]),
            "mean_length": mean(row["length"] for row in rows),
            "cut": sum(not row["finished"] for row in rows)}
    for width in (60, 100):
        code, out, _ = call(run, *words, width=width)
        table = [line.split()[:3] for line in out.splitlines() if line.strip()[:1] in ("2", "4", "6")]
        assert table == [[str(step), "2", f"{mean(scores[step]):.4g}"] for step in scores]
        assert code == 0 and all(len(line) <= width for line in out.splitlines()[:-1])
        assert "3 of 3 groups" in out
    assert "It is 34, says sample " in out


def test_groups_of_evaluated_rows(call, run, tmp_path):
    for step, score in ((0, -0.0), (8, 1.0)):
        texts = {"completion": "a\x07", "score": score}
        rows = [{"dataset_row": i, "prompt": f"p{i}"} | texts for i in range(3)]
        write(tmp_path / f"evals/step_{step}.jsonl", [*rows, {"prompt": "no row", "completion": "c"}])
    code, out, _ = call(tmp_path, "--eval", "--by", "dataset_row")
    lines = [line.split() for line in out.splitlines()[3:7]]
    assert lines == [[str(i), "2", "0.5", "0", "1", "-", "0", "a\\x07"] for i in range(3)] + [
        ["-", "2", "-", "-", "-", "-", "0", "c"]]
    assert "4 of 4 groups; " in out
    assert call(tmp_path, "--eval", "--by", "step", "--limit", 1)[1].count("1 of 2 groups") == 1


REFUSALS = [
    (("--where", "score<"), "--where 'score<' is no Python expression (invalid syntax): write for example"),
    (("--where", "score=0"), "(invalid syntax): write for example 'score < 0.5 and step == 10'"),
    (("--where", "score<1,exact==0"), "is a tuple: join conditions by `and` or `or`"),
    (("--where", "score<'a'"), "fails for every sample: '<' not supported between instances of 'float' and"),
    (("--where", "__import__('os')"), "Function '__import__' not defined"),
    (("--where", "completion.__class__"), "Sorry, access to __attributes"),
    (("--where", "[x for x in ().__class__.__bases__]"), "Sorry, access to __attributes"),
    (("--where", "9**9**9**9"), "fails for every sample: "),
    (("--where", "scroe<1"), "there is no field 'scroe' (did you mean score?): legal are advantage, answer"),
    (("--sort", "reward"), "there is no field 'reward' (did you mean rewards?)"),
    (("--sort", "-nothing"), "there is no field 'nothing'"),
    (("--sort", "prompt[0]"), "its values have no order"),
    (("--by", "nothing"), "there is no field 'nothing'"),
    (("--limit", "-1"), "must not be negative"),
    (("--eval",), "has neither evals/ nor eval.jsonl"),
    (("--steps", "3-5"), "legal are --where, --sort"),
    (("more",), "realhf rollouts has no use for 'more'"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSALS)
def test_refusals(call, run, options, sentence):
    code, out, err = call(run, *options)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1, err


def test_a_choice_of_nothing_tells_the_steps_that_there_are(call, run):
    code, out, err = call(run, "--where", "step == 77", "--json")
    steps = sorted({row["step"] for row in ROWS})
    assert code == 0 and json.loads(out)["rollouts"] == []
    assert err.endswith(f" matches: it has those of steps {steps[0]} to {steps[-1]}\n")


def test_missing_files(call, run, tmp_path):
    assert "there is no such run directory" in call(tmp_path / "none")[2]
    assert "has no rollouts.jsonl: its experiment" in call(tmp_path)[2]
    write(tmp_path / "rollouts.jsonl", [], torn="{]\n")
    code, _, err = call(tmp_path)
    assert code == 2 and "rollouts.jsonl line 1 is not JSON" in err
    write(tmp_path / "rollouts.jsonl", [])
    code, out, _ = call(tmp_path / "rollouts.jsonl", "--where", "score<1", "--sort", "score")
    assert code == 0 and "0 of 0 matching samples" in out


def test_values_that_no_run_writes_do_no_harm(call, tmp_path):
    strange = {"score": "high", "rewards": 3, "versions": 1, "prompt": [1, {"content": {"a": 1}}],
               "completion": 5, "length": [], "step": "x", "columns": None, "dataset_row": {}}
    write(tmp_path / "rollouts.jsonl", [strange, {"step": 1, "length": 3, "score": None}])
    for words in ((), ("--full",), ("--by", "dataset_row"), ("--json",), ("--where", "score is None")):
        code, out, err = call(tmp_path, *words, "--sort", "length")
        assert code == 0 and out, err
    code, _, err = call(tmp_path, "--sort", "step")
    assert code == 2 and "--sort step: its values have no order" in err


def test_answers_of_evaluations(call, tmp_path):
    answer = {"prompt": "1+1=", "answer": "2", "completion": "two", "score": 0.0}
    write(tmp_path / "eval.jsonl", [answer, {**answer, "completion": "2", "score": 1.0}])
    _, out, _ = call(tmp_path, "--eval", "--json", "--sort", "-score")
    assert [row["completion"] for row in json.loads(out)["rollouts"]] == ["2", "two"]
    assert "2 of 2 matching samples" in call(tmp_path, "--eval")[1]
    for name in ("math", "code"):
        for step in (0, 20, 100):
            row = {**answer, "dataset_row": 3, "scores": {"exact": step / 100}, "score": step / 100}
            write(tmp_path / "evals" / name / f"step_{step}.jsonl", [row])
    _, out, _ = call(tmp_path, "--eval", "math", "--json", "--where", "exact > 0")
    assert [(row["set"], row["step"]) for row in json.loads(out)["rollouts"]] == [("math", 100), ("math", 20)]
    assert "set code · step 100 · row 3" in call(tmp_path, "--eval")[1]
    code, _, err = call(tmp_path, "--eval", "maths")
    assert code == 2 and "there is no such set (did you mean math?): legal are code, math" in err
    assert "--eval shows the samples of evaluations" in call(tmp_path)[2]


def test_excerpts_have_beginning_and_end_and_the_right_width():
    text = "beginning " + "x" * 50 + " end"
    for width in (12, 20, 40):
        short = excerpt(text, width)
        assert len(short) == width and short.startswith("begin"[:width // 3]) and short.endswith("end")
    assert excerpt("日本語のテキスト", 9) == "日本 … ト" and excerpt("short", 9) == "short"
    assert printable("a\tb\nc\x00") == "a    b\nc\\x00" and printable("\ud800") == "\\ud800"


def test_colours_on_a_terminal_and_no_torch(run):
    """In a pseudo-terminal: the colours are Rich's own, and nothing of the samples' escapes is left."""
    master, slave = pty.openpty()
    code = ("import sys; from realhf.cli.main import main\n"
            f"code = main(['rollouts', {str(run)!r}, '--limit', '0'])\n"
            "sys.exit(code or int('torch' in sys.modules))")
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
    code, _, err = call(tmp_path, "--tokens", "--where", f"sample == {ROWS[1]['sample']}")
    assert code == 2 and "has token ids: set rollouts.tokens in the run" in err


def test_other_commands_work_without_the_package_for_expressions():
    """On machines where not all is installed, as long as no expression is read."""
    hide = "import sys; sys.modules['simpleeval'] = None\n"
    hide += "from realhf.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", hide, "run", "--help"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--plan" in done.stdout, done.stderr
