"""The long-chain examples: the task is sound, and its experiments run one after the other."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from realhf.cli.main import main
from realhf.data.loader import load_tokenizer
from tests.cli_tools import REPO


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Make little data in a directory of its own; return the module of the task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("long_chain"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(REPO / "examples"))
        import pair_search

        patch.setattr(pair_search, "NUM_SFT", 300)
        patch.setattr(pair_search, "NUM_PROMPTS", 40)
        pair_search.prepare()
        yield pair_search
    for name in ("pair_search", "long_chain"):
        sys.modules.pop(name, None)


def _rows(task, name):
    return [json.loads(line) for line in (task.DIRECTORY / f"{name}.jsonl").read_text().splitlines()]


def _problem(row):
    listed, wanted = row["prompt"].removesuffix("=").split(":")
    return [int(term) for term in listed.split(",")], int(wanted)


def test_each_problem_has_one_solution_and_appears_once(task):
    rows = _rows(task, "sft") + _rows(task, "prompts")
    for row in rows:
        terms, wanted = _problem(row)
        right = [pair for pair in itertools.combinations(terms, 2) if sum(pair) == wanted]
        assert [f"{a:02d}+{b:02d}" for a, b in right] == [row["answer"]]
    problems = {(frozenset(terms), wanted) for terms, wanted in map(_problem, rows)}
    assert len(rows) == len(problems) == 340


def test_the_teacher_compares_each_sum_and_ends_when_it_is_right(task):
    rows = _rows(task, "sft")
    tokenizer = load_tokenizer(str(task.DIRECTORY / "model"))
    num_trials = []
    for row in rows:
        _, wanted = _problem(row)
        trials = re.findall(r"(\d\d)\+(\d\d)=(\d\d)(.)", row["completion"])
        for a, b, total, verdict in trials:
            assert int(a) + int(b) == int(total)
            assert verdict == ("<" if int(total) < wanted else ">" if int(total) > wanted else "!")
        assert "!" not in [verdict for *_, verdict in trials[:-1]]
        last = "+".join(trials[-1][:2])
        reward = task.right_pair([], [row["completion"]], [], [row["answer"]])
        assert row["completion"].endswith(f"<answer>{last}</answer>")
        assert reward == [float(trials[-1][3] == "!")] == [float(last == row["answer"])]
        num_trials.append(len(trials))
        assert len(tokenizer.encode(row["completion"])) + 1 == 6 * len(trials) + 6  # With eos.
    assert max(num_trials) > 6 and task.LIMIT == 6 * 6 + 6
    answers = ["", "<answer>01+02", "<answer>01+02</answer>"]
    assert task.right_pair([], answers, [], ["01+02"] * 3) == [0.0, 0.0, 1.0]


@pytest.mark.slow
def test_both_runs_start_from_the_same_answers_and_only_one_shapes_their_scores(task):
    few = ["--steps", "1", "--batch-size", "4"]
    assert main(["run", str(REPO / "examples/long_chain_sft.py"), "--out", "runs/sft", *few]) == 0
    Path("runs/long_chain_sft/hf").mkdir(parents=True)
    Path("runs/sft/hf/step_1").rename("runs/long_chain_sft/hf/step_700")
    metrics = {}
    for name in ("long_chain", "long_chain_plain"):
        assert main(["run", str(REPO / f"examples/{name}.py"), "--out", f"runs/{name}", *few]) == 0
        metrics[name] = json.loads(Path(f"runs/{name}/metrics.jsonl").read_text())
    shaped, plain = metrics.values()
    for name in ("reward/mean", "response_length/mean", "response_length/clip_ratio"):
        assert shaped[name] == plain[name]
    assert -10 <= shaped["reward/shaped_mean"] < -1 and "reward/shaped_mean" not in plain
