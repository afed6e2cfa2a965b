"""The examples with environments: each is sound, and learns in a short run."""

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realhf.cli.main import main
from realhf.user_input.files import execute_file
from tests.cli_tools import REPO

NAMES = ("guess_number", "frozen_lake", "calculator", "code_repair", "real_model_tries")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A directory of its own for what examples write, with a tiny model in the place of the real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(REPO / "examples"))
    from tiny_chat import write_model

    write_model(Path("runs/real_model/model"), "".join(map(chr, range(32, 127))) + "\n")
    config = Path("runs/real_model/model/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
    return tmp_path


def _example(name):
    return str(REPO / "examples" / f"{name}.py")


def _scores(out):
    rows = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [row["eval/score"] for row in rows if "eval/score" in row]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_sound(name, capsys):
    changes = ["--actor.random_init"] if name in ("calculator", "real_model_tries") else []
    if name == "calculator":
        changes += ["--actor.model", "runs/calculator/task/model"]
    assert main(["check", _example(name), *changes]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert "the chat template is append-only" in captured.out
    assert "no trained weights" in captured.err or "warning" not in captured.err
    assert len(Path(_example(name)).read_text().splitlines()) < 60


def test_the_tokenizer_of_the_tiny_models_has_the_characters_and_words_that_it_is_given():
    from tiny_chat import write_model

    write_model(Path("model"), "abc \n", words=("down", "a + b"))
    tokenizer = AutoTokenizer.from_pretrained("model")
    text = "down a + b\ncab"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == [
        "down", "\u0120", "a + b", "\u010a", "c", "a", "b"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert json.loads(Path("model/config.json").read_text())["vocab_size"] == len(tokenizer)


def test_the_calculators_teacher_is_right_when_it_calls():
    """Its calls and answers agree with the numbers of the question, and about a fifth of them are calls."""
    module = execute_file(Path(_example("calculator_sft")), name="calculator_sft_tried")
    tools = execute_file(Path(_example("calculator")), name="calculator_tried")
    functions = {tool.__name__: tool for tool in tools.experiment.environment.tools}
    rng = random.Random(5)
    calls = 0
    for _ in range(500):
        row = module.question(rng)
        assert row["answer"] == str(eval(row["prompt"]))
        said = module.conversation(row, rng)
        assert said[0] == {"role": "user", "content": row["prompt"]}
        if len(said) > 2:
            calls += 1
            (call,) = said[1]["tool_calls"]
            result = functions[call["function"]["name"]](**call["function"]["arguments"])
            assert str(result) == said[2]["content"] == said[3]["content"] == row["answer"]
    assert 70 < calls < 130
    completions = [f"=>{row['answer']}={row['answer']}", row["answer"], "12=", ""]
    assert tools.exact(completions, [row["answer"]] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_repairs_are_judged_by_the_tests():
    """A body passes if it gives the same values as the one from which the tests were made."""
    module = execute_file(Path(_example("code_repair")), name="code_repair_tried")
    row = json.loads(Path("runs/code_repair/task/prompts.jsonl").read_text().splitlines()[0])
    for body in (*module.BODIES, "a +", "7"):
        game = module.Repair()
        assert game.start(row, 0) is None and row["prompt"].endswith(f"\n{row['tests'][0]}\n")
        try:
            names = {}
            exec(f"{module.HEAD}{body}", names)
            wrong = []
            for test in row["tests"]:
                try:
                    exec(test, names)
                except AssertionError:
                    wrong.append(test)
        except SyntaxError:
            wrong = row["tests"]
        turn = game.step({"role": "assistant", "content": body})
        assert turn.done == (not wrong) and turn.total == (-0.1 if wrong else 1.0)
        assert not wrong or turn.messages == f"{wrong[0]}\n"


def test_the_real_model_has_another_try_after_a_wrong_answer():
    tries = execute_file(Path(_example("real_model_tries")), name="real_model_tries_tried").Tries()
    assert tries.start({"prompt": "What is 4 + 8?", "answer": "12"}, 0) is None
    turns = [tries.step({"role": "assistant", "content": said}) for said in (
        "4 + 8 = 13", "Let me think about it.\nNow, 4 + 8 = 13.", "4 + 8 = 12 cards.", "It is 12.\nYes, 12.")]
    assert [turn.rewards for turn in turns] == [
        {"right": 0.0, "long": 0.0}, {"right": 0.0, "long": -0.2}, {"right": 1.0, "long": 0.0},
        {"right": 1.0, "long": -0.2}]
    assert [turn.done for turn in turns] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("guess_number", 50), ("frozen_lake", 60), ("code_repair", 40)])
def test_each_learns_from_nothing_in_a_short_run(name, steps):
    changes = ["--steps", str(steps), "--eval_every", str(steps), "--nproc", "1"]
    assert main(["run", _example(name), "--out", "out", *changes]) == 0
    first, last = _scores("out")
    assert last - first > 0.3


@pytest.mark.slow
def test_the_calculator_is_called_after_a_short_run():
    """The supervised model guesses most answers; afterwards most rollouts call a tool and are right."""
    assert main(["run", _example("calculator_sft"), "--out", "runs/calculator_sft", "--nproc", "1"]) == 0
    assert main(["run", _example("calculator"), "--out", "out", "--steps", "15", "--nproc", "1"]) == 0
    steps = list(map(json.loads, Path("out/metrics.jsonl").read_text().splitlines()))
    trained = [step for step in steps if step["step"] > 0]
    assert trained[0]["reward/mean"] < 0.3 and trained[-1]["reward/mean"] > 0.6
    assert trained[0]["environment/turns"] < 1.5 < trained[-1]["environment/turns"]
    assert _scores("out")[-1] > 0.8
