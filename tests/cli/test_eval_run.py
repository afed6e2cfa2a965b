"""`realhf eval RUN` asks as the run was trained; what rewards log of answers reaches files and `rollouts`.

One run is made by the trainer, with a system prompt, a stop text and two held-out sets.
"""

import json

import pytest

from realhf import GRPO, DatasetConfig, Evaluation, OptimizerConfig, Role, SamplingConfig
from realhf.cli.eval import find_run, read_settings
from realhf.cli.main import main
from realhf.distributed.world import World
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.hub import model_repository

REWARDS = """
def told(completions, log_extra):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    log_extra("size", [float(len(text)) for text in texts])
    log_extra("kind", ["even" if len(text) % 2 == 0 else "odd" for text in texts])
    log_extra("share", [float("nan") for text in texts])
    return [-0.0 for text in texts]

def length(completion_ids):
    return [len(ids) / 100 for ids in completion_ids]
"""


def unchanged(row):
    return row


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with the model `model`, the rows data.jsonl, rewards.py and the run `run`."""
    directory = tmp_path_factory.mktemp("chats")
    (directory / "model").mkdir()
    for name, content in model_repository().files.items():
        (directory / "model" / name).write_bytes(content)
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(6)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(REWARDS)
    rewards: dict = {}
    exec(REWARDS, rewards)
    data = DatasetConfig(str(directory / "data.jsonl"), prompt_key="question", system_prompt="sort:",
                         chat_template_kwargs={"enable_thinking": False})  # fmt: skip
    mapped = DatasetConfig(data.path, prompt_key="question", chat=True, map=unchanged)
    own = SamplingConfig(max_new_tokens=9, temperature=0.7, top_k=50)
    experiment = GRPO(
        actor=Role(str(directory / "model"), dtype="float64", optimizer=OptimizerConfig(lr=1e-3)),
        dataset=data, eval_dataset={"plain": data, "mapped": Evaluation(mapped, samples=2, sampling=own)},
        reward_function=rewards["told"], steps=1, batch_size=4, group_size=2, checkpoint_every=0,
        sampling=SamplingConfig(max_new_tokens=12, stop=("\n", "0"), repetition_penalty=1.5))
    program = compile_program(experiment, None, world_size=1)
    Trainer(program, World(), out=directory / "run", quiet=True).run()
    return directory


def evaluate(place, capsys, *words, target="run"):
    """Return the printed document, standard error and the answers by set."""
    out = place / f"out-{len(list(place.iterdir()))}"
    words = ("eval", place / target, "--dtype", "float64", "--json", "--out", out, *words)
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    answers = {path.parent.name: read_jsonl(path) for path in out.rglob("step_0.jsonl")}
    return json.loads(printed.out), printed.err, answers


def completions(rows):
    return [row["completion"] for row in rows]


def test_a_run_is_asked_as_in_training(place, capsys):
    data, reward = place / "data.jsonl", f"{place}/rewards.py:told"
    _, err, answers = evaluate(place, capsys, "--data", f"plain={data}", "--reward", reward)
    expected = read_jsonl(place / "run/evals/plain/step_1.jsonl")
    assert completions(answers["plain"]) == completions(expected)
    assert {row["length"] for row in answers["plain"]} == {row["length"] for row in expected}
    assert err == (
        f"realhf: prompts and limits as in {place}/run: prompts of column 'question', system prompt 'sort:', "
        "enable_thinking=False, 12 new tokens, greedy, stop '\\n' '0', repetition penalty 1.5; this does not "
        f"apply its own reward (told): `realhf eval EXP.py --model {place}/run` does\n")
    _, err, answers = evaluate(
        place, capsys, "--data", f"mapped={data}", "--reward", reward, "--samples", 2, target="run/hf/step_1")
    assert completions(answers["mapped"]) == completions(read_jsonl(place / "run/evals/mapped/step_1.jsonl"))
    assert "prompts as chats, 9 new tokens, temperature 0.7, top k 50; this does not apply its map" in err
    assert "its map function unchanged and its own reward (told): `realhf eval EXP.py" in err


def test_options_come_before_the_run(place, capsys):
    """Without chats, with another limit and its own stop text, it is the answer to raw text."""
    data = place / "data.jsonl"
    words = ("--data", data, "--max-new-tokens", 5, "--stop", "zz", "--reward", f"{place}/rewards.py:length")
    _, err, of_run = evaluate(place, capsys, *words, "--no-chat")
    assert "12 new" not in err and "sort:" not in err and "stop" not in err and "prompts of column" in err
    _, err, of_model = evaluate(
        place, capsys, *words, "--prompt-key", "question", "--no-chat", target="model")
    assert err == ""
    (rows,), (others,) = of_run.values(), of_model.values()
    assert {row["length"] for row in rows + others} <= set(range(1, 6))
    assert completions(rows) != completions(others)  # The run has a penalty.
    _, err, _ = evaluate(place, capsys, *words, "--system-prompt", "")
    assert "sort:" not in err and "enable_thinking=False" in err
    assert main(["eval", str(place / "run"), "--data", str(data), "--system-prompt", "a", "--no-chat"]) == 2
    assert "--system-prompt is for chats: leave out --no-chat" in capsys.readouterr().err


def test_a_plain_model_with_a_chat_template_is_warned_about_once(place, capsys):
    words = ("--data", f"a={place}/data.jsonl", "--data", f"b={place}/data.jsonl", "--prompt-key", "question",
             "--max-new-tokens", 4, "--max-rows", 2)  # fmt: skip
    _, err, raw = evaluate(place, capsys, *words, target="model")
    assert "eval_dataset.a and eval_dataset.b: prompts are text, and the tokenizer has a chat template" in err
    assert err.count("warning") == 1 and "--chat or --no-chat" in err
    _, err, chats = evaluate(place, capsys, *words, "--chat", target="model")
    assert err == ""
    _, _, told = evaluate(place, capsys, *words, "--system-prompt", "sort:", target="model")
    texts = {str(completions(answers["a"])) for answers in (raw, chats, told)}
    assert len(texts) == 3


def test_several_rewards_are_logged_by_name(place, capsys):
    words = ("--data", place / "data.jsonl", "--reward", f"{place}/rewards.py:length", "--reward",
             f"quiet={place}/rewards.py:told", "--samples", 2, "--top-k", 40, "--min-p", 0.01)  # fmt: skip
    document, _, answers = evaluate(place, capsys, *words)
    (rows,) = answers.values()
    lengths = [row["scores"]["length"] for row in rows]
    assert lengths == [row["length"] / 100 for row in rows]
    assert document["metrics"]["eval/length"] == pytest.approx(sum(lengths) / 12)
    assert document["metrics"]["eval/quiet"] == 0 and [row["score"] for row in rows] == lengths


def test_a_training_set_stands_in_for_a_held_out_one(tmp_path):
    """Also a mixture, of which the first part counts; several sets are told apart by name and file."""
    (tmp_path / "hf").mkdir()
    assert find_run(str(tmp_path)) is None
    first = {"path": "a.jsonl", "prompt_key": "q", "map": "m.keep"}
    config = {"dataset": {"parts": [first, {"prompt_key": "r"}]}, "eval_dataset": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_run(str(tmp_path)) == find_run(str(tmp_path / "hf/step_2")) == tmp_path
    found = read_settings(tmp_path, name="", path="x")
    assert (found.prompts, found.sampling) == ({"prompt_key": "q"}, {})
    assert found.unused == ("its map function keep",)
    assert (found.temperature(1), found.temperature(4)) == (0.0, 1.0)
    sets = {"one": {"path": "1", "prompt_key": "p1"}, "two": {
        "dataset": {"path": "2", "prompt_key": "p2"}, "correct_above": 0.5, "sampling": {"temperature": 0.0}}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eval_dataset": sets}))
    keys = {(name, path): read_settings(tmp_path, name=name, path=path).prompts["prompt_key"]
            for name, path in [("two", "1"), ("", "2"), ("", "3")]}  # fmt: skip
    assert keys == {("two", "1"): "p2", ("", "2"): "p2", ("", "3"): "p1"}
    assert read_settings(tmp_path, name="two", path="").temperature(4) == 1.0


def test_what_rewards_log_of_an_answer_is_kept_and_shown(place, capsys):
    trained = read_jsonl(place / "run/rollouts.jsonl")
    held_out = read_jsonl(place / "run/evals/plain/step_1.jsonl")
    for row in trained + held_out:
        size = len(row["completion"])
        assert row["extra"] == {"size": size, "kind": "odd" if size % 2 else "even", "share": None}
    assert {str(row["score"]) for row in trained} == {"0.0"}
    for source, rows in (((), trained), (("--eval", "plain"), held_out)):
        words = ["rollouts", str(place / "run"), *source]
        assert main([*words, "--where", "kind=odd", "--sort", "-size", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["rollouts"]
        sizes = [row["extra"]["size"] for row in shown]
        lengths = [len(row["completion"]) for row in rows]
        assert sizes == sorted((length for length in lengths if length % 2), reverse=True)
        assert main([*words, "--where", "extra.size>=0", "--full", "--limit", "1"]) == 0
        out = capsys.readouterr().out
        assert "kind: " in out and "size: " in out and "score 0" in out and " -0" not in out


def test_a_reward_that_fails_is_called_again(place, capsys):
    marks = place / "calls"
    (place / "flaky.py").write_text(
        "from pathlib import Path\n\n\n"
        "def flaky(completions):\n"
        f"    marks = Path({str(marks)!r})\n"
        "    marks.write_text((marks.read_text() if marks.exists() else '') + '.')\n"
        "    if len(marks.read_text()) < 2:\n"
        "        raise ConnectionError('away')\n"
        "    return [1.0] * len(completions)\n")
    words = ("--data", place / "data.jsonl", "--reward", f"{place / 'flaky.py'}:flaky", "--max-rows", 2)
    document, _, _ = evaluate(place, capsys, *words, "--retries", 1)
    assert document["metrics"]["eval/score"] == 1.0
    assert marks.read_text() == ".."
