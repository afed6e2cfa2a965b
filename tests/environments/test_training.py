"""Experiments with environments: what is trained on, checked, refused, and shown."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf import (
    GRPO,
    DatasetConfig,
    Environment,
    Evaluation,
    Interruption,
    RepetitionPenalty,
    Role,
    SamplingConfig,
)
from realhf.algorithms.advantages import AdvantageInputs, SampleAdvantages
from realhf.algorithms.responses import _reward_logs
from realhf.calls import TurnSettings
from realhf.cli.main import main
from realhf.data.batch import Batch, Packed
from realhf.environments.protocol import FAILURES, STOP_REASONS, rollout_seed
from realhf.environments.rollout_rewards import RolloutRewards
from realhf.environments.rollouts import EnvironmentTurnSourceFactory, play
from realhf.environments.tool_calls import call_tools
from realhf.environments.workers import source_of
from realhf.errors import UserError
from realhf.user_input.files import execute_file
from tests.docs_pages import fences
from tests.environments import players
from tests.environments.test_turn_tokens import OWN, STRIPS
from tests.tokenizers import byte_tokenizer

REPO = Path(__file__).parent.parent.parent
PAGE = REPO / "docs/environments.md"
SMALL = ["--steps", "2", "--batch_size", "2", "--group_size", "4", "--eval_every", "2", "--nproc", "1"]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A copy of the example in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "guess_number.py"
    path.write_text((REPO / "examples/guess_number.py").read_text())
    monkeypatch.syspath_prepend(str(REPO / "examples"))
    return path


def _objects(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_experiment_trains_and_evaluates_with_its_environment(example, capsys):
    """Rewards are those of the environment's class, replayed with the messages that the model has said."""
    assert main(["run", str(example), "--out", "out", *SMALL, "--rollouts.tokens"]) == 0
    steps = [row for row in _objects(Path("out/metrics.jsonl")) if row["step"] > 0]
    assert all(step["mismatch/max"] < 3e-6 and step["environment/turns"] > 1 for step in steps)
    assert all("response_length/interrupted" not in step for step in steps)
    rows = _objects(Path("out/rollouts.jsonl"))
    assert len(rows) == 16
    game_class = execute_file(example, name="guess_number_again").GuessNumber
    for row in rows:
        game = game_class()
        seed = rollout_seed(0, step=0, prompt=row["sample"] // 4, sample=row["sample"] % 4)
        game.start({}, seed)
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        turns = [game.step(message) for message in said]
        assert row["score"] == pytest.approx(sum(turn.reward for turn in turns))
        assert (row["stop"] == "done") == turns[-1].done and len(turns) == len(row["turns"])
        sampled = [i for turn in row["turns"] for i in range(turn["start"], turn["stop"])]
        assert [i for i, is_sampled in enumerate(row["response_mask"]) if is_sampled] == sampled
    held_out = _objects(Path("out/eval.jsonl"))
    assert len(held_out) == 64 and {row["score"] for row in held_out} != {0.0}
    capsys.readouterr()
    assert main(["rollouts", "out", "--full", "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    newest = next(row for row in rows if row["step"] == max(row["step"] for row in rows))
    assert "assistant (turn 1, " in shown and f"stopped by {newest['stop']}" in " ".join(shown.split())


LAG = ["--max_lag", "2", "--steps", "4", "--batch_size", "2", "--group_size", "4", "--eval_every", "2",
       "--checkpoint_every", "1", "--keep_checkpoints", "9", "--nproc", "1", "--rollouts.tokens",
       "--deterministic", "--no-work_stealing", "--kv_cache_gib", "0.1"]


@pytest.mark.parametrize("rounds", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_a_lag_of_two_goes_on_after_a_kill_in_the_middle_of_rollouts(example, rounds):
    """Tokens, masks, log-probs and versions are those of the whole run, in turns of several rounds."""
    assert main(["run", str(example), "--out", "out", "--rounds", rounds, *LAG]) == 0
    whole = _without_seconds(Path("out/rollouts.jsonl"))
    ages = [row["versions"][1] - row["versions"][0] for row in whole]
    assert len(whole) == 32 and max(ages) > 0, "some rollouts are of several versions"
    for step in ("3", "4"):
        shutil.rmtree(f"out/checkpoints/step_{step}")
    assert main(["run", str(example), "--out", "out", "--rounds", rounds, *LAG, "--resume"]) == 0
    assert _without_seconds(Path("out/rollouts.jsonl")) == whole


def _without_seconds(path):
    return [
        {name: value for name, value in row.items() if "seconds" not in name}
        | {"turns": [{k: v for k, v in turn.items() if k != "seconds"} for turn in row["turns"]]}
        for row in _objects(path)]


def test_a_reward_that_few_rollouts_get_is_0_in_the_others(example):
    """Its means are over all rollouts, and their sum tells right answers from wrong ones."""
    text = example.read_text().replace("Turn(reward=1.0, done=True)", 'Turn(reward={"won": 1.0}, done=True)')
    text = text.replace("reward=-0.1)", 'reward={"form": -0.1})')
    text = text.replace("    GRPO,", "    GRPO,\n    Evaluation,")
    held_out = 'DatasetConfig(str(task / "held_out.jsonl"))'
    example.write_text(text.replace(held_out, f"Evaluation({held_out}, samples=2)"))
    assert main(["run", str(example), "--out", "out", *SMALL]) == 0
    rows = [row for row in _objects(Path("out/rollouts.jsonl")) if row["step"] == 2]
    (step,) = (row for row in _objects(Path("out/metrics.jsonl")) if row["step"] == 2)
    won = sum(row["score"] > 0.5 for row in rows) / len(rows)
    form = sum(row["score"] for row in rows) / len(rows) - won
    for name, mean in {"won": won, "form": form}.items():
        assert step.get(f"reward/{name}/mean", 0.0) == pytest.approx(mean)
    assert 0 < step["eval/won"] == pytest.approx(step["eval/pass@1"])
    assert step["eval/score"] == pytest.approx(step["eval/won"] + step["eval/form"])


def test_check_plays_a_rollout_and_proves_the_template(example, capsys):
    assert main(["check", str(example), "--nproc", "2"]) == 0
    assert "actor_generate has an environment, and expected.turns is None" in capsys.readouterr().err
    assert main(["check", str(example)]) == 0
    out, err = capsys.readouterr()
    assert "expected.turns" not in err, "one rank needs no plan"
    assert "the chat template is append-only; a rollout that always says '1' had" in out
    assert "\nthe first prompt has 1 token: ?\n" in out
    assert "at most 3 turns of 3 new tokens, 40 tokens with those of the environment" in out
    assert main(["check", str(example), "--nproc", "2", "--expected.turns", "2"]) == 0
    assert "expected.turns" not in capsys.readouterr().err
    settings = Path("runs/guess_number/task/model")
    (settings / "chat_template.jinja").write_text(STRIPS)
    assert main(["check", str(example)]) == 2
    assert "the chat template is not append-only" in capsys.readouterr().err


FAILING = """
from realhf import GRPO, DatasetConfig, Environment, OptimizerConfig, Role, SamplingConfig, Turn

class Mine:
    def step({parameters}):
        {body}

experiment = GRPO(
    actor=Role("runs/guess_number/task/model", random_init=True, optimizer=OptimizerConfig(lr=1e-3)),
    dataset=DatasetConfig("runs/guess_number/task/prompts.jsonl"), steps=1, batch_size=2, group_size=2,
    sampling=SamplingConfig(max_new_tokens=3),
    environment=Environment(Mine, max_turns=2, max_tokens=40, step_seconds=1.0))
"""


@pytest.mark.parametrize(("body", "code", "says"), [
    ("raise KeyError('door')", 2, "step_error"), ("return None", 2, "step_error"),
    ("return {'reward': 1.0}", 2, "step_error"), ("import time; time.sleep(60)", 2, "step_timeout"),
    ("import os; os._exit(3)", 2, "worker_lost"),
    ("return Turn(done=True) if message['content'] != '1' else 1 / 0", 0, "check always answered '1'")])
def test_an_environment_that_always_fails_is_refused(example, capsys, body, code, says):
    """One that fails with one answer alone is warned of, as a model may never give it."""
    execute_file(example, name="guess_number_once")
    Path("mine.py").write_text(FAILING.format(parameters="self, message", body=body))
    assert main(["check", "mine.py"]) == code
    assert says in capsys.readouterr().err


LOOKS = 'return "coin" if box == self.coin else "empty"'


@pytest.mark.parametrize(("changes", "says"), [
    ({}, ""),
    ({LOOKS: "raise KeyError(box)"}, "FindCoin.step raised KeyError: 1 ("),
    ({"return Turn(results, metrics": "return Turn(results, reward=[1.0], metrics"}, "; check called look"),
    ({'"content": self.look(': '"content": 7, "box": self.look('}, "; check called look with made-up "),
    ({"def look": "def peek", "self.look": "self.peek", '"look"': '"peek"'}, "a call of the tool peek has "),
    ({"random.Random(seed)": "random.Random()", "coin is in": "coin of {random.random()} is in"},
     "the messages of a rollout were others when check played it again"),
    ({"max_turns=3": "max_turns=1"}, "environment.max_turns is 1: the model never reads what a tool "),
])
def test_check_calls_each_tool_and_plays_again(tmp_path, monkeypatch, capsys, changes, says):
    """A call that the model cannot make, and what fails or differs when a tool is called, are warnings."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--template", "environment", "game"]) == 0
    text = {name: Path("game", name).read_text() for name in ("environment.py", "experiment.py")}
    for name, before in text.items():
        after = before
        for old, new in changes.items():
            after = after.replace(old, new)
        Path("game", name).write_text(after)
    # A process of its own: modules named `environment` differ.
    assert all(old in "".join(text.values()) for old in changes)
    command = [sys.executable, "-m", "realhf", "check", "game/experiment.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "rollout" in line or "tool" in line]
    assert says in done.stderr and len(warnings) == bool(says), done.stderr
    assert ("others called look once" in done.stdout) == ("peek" not in str(changes))


@pytest.mark.parametrize("most", ["400", "None"])
def test_rollouts_longer_than_the_model_was_made_for(example, capsys, most):
    """The limit of whole rollouts is named; without one, they may fill the model's context."""
    assert main(["check", str(example), "--environment.max_tokens", most]) == 0
    err = capsys.readouterr().err
    named = (
        "actor.model was made for 256 positions (max_position_embeddings), but a sequence may have 401: 1 "
        "from dataset and environment.max_tokens 400; its rollouts end with context_full before")
    assert (named in err) == ("positions" in err) == (most == "400")


def test_a_step_of_another_arity_is_refused(example, capsys):
    execute_file(example, name="guess_number_once")
    Path("mine.py").write_text(FAILING.format(parameters="self", body="return Turn(done=True)"))
    assert main(["check", "mine.py"]) == 2
    assert "step_error" in capsys.readouterr().err


def test_a_run_in_which_everything_failed_has_failed(example, capsys):
    execute_file(example, name="guess_number_once")
    Path("mine.py").write_text(FAILING.format(parameters="self, message", body="raise KeyError('door')"))
    assert main(["run", "mine.py", "--out", "out", "--nproc", "1"]) == 2
    assert "all samples have failed in every step (1): nothing has been trained" in capsys.readouterr().err


def test_a_run_says_at_its_end_how_many_failed(example, capsys):
    execute_file(example, name="guess_number_once")
    body = "return Turn(done=True) if ord(message['content'][:1] or '0') % 4 else 1 / 0"
    Path("mine.py").write_text(FAILING.format(parameters="self, message", body=body))
    size = ["--steps", "2", "--batch_size", "8", "--group_size", "4"]
    assert main(["run", "mine.py", "--out", "out", "--nproc", "1", *size]) == 0
    shares = [step["reward/failed"] for step in _objects(Path("out/metrics.jsonl")) if step["step"] > 0]
    failed = json.loads(Path("out/summary.json").read_text())["failed"]
    assert 0 < failed < 1 and failed == pytest.approx(sum(shares) / 2)
    assert f"rewards or environments of {failed:.1%} of all samples failed" in capsys.readouterr().err


def test_a_run_does_not_start_with_tools_that_nobody_can_call(example, capsys):
    execute_file(example, name="guess_number_once")
    text = FAILING.format(parameters="self, message", body="pass").replace("Mine, ", "tools=(tool_add,), ")
    Path("mine.py").write_text("from tests.environments.players import tool_add\n" + text)
    for command in (["check", "mine.py"], ["run", "mine.py", "--out", "out", "--nproc", "2"]):
        assert main(command) == 2
        assert "how the model writes tool calls is not known" in capsys.readouterr().err
    assert not Path("out").exists()


def test_the_guide_says_what_holds(example, capsys):
    """Its snippet is a sound experiment, and its table has all stop reasons."""
    execute_file(example, name="guess_number_once")
    text, _, _ = (text for language, text in fences(PAGE) if language == "python")
    Path("guess.py").write_text(text)
    Path("guess.jsonl").write_text('{"prompt": "?", "most": 6}\n' * 4)
    assert main(["check", "guess.py"]) == 0, capsys.readouterr().err
    reasons = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", PAGE.read_text(), re.M)
    assert tuple(reasons) == STOP_REASONS and reasons[-4:] == list(FAILURES)


def test_the_class_with_a_tool_of_the_guide_answers_calls(tmp_path):
    """It answers calls as an environment of the same function does."""
    _, text, _ = (text for language, text in fences(PAGE) if language == "python")
    (tmp_path / "sums.py").write_text(text)
    page = execute_file(tmp_path / "sums.py", name="sums_of_the_guide")
    sums = page.Sums()
    assert sums.start({"prompt": "2+3"}, 1).tools == [page.add]
    call = {"type": "function", "id": "call_0", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert sums.step(message).messages == call_tools(message, {"add": page.add}).messages
    assert sums.step({"role": "assistant", "content": "It is 5."}).reward == 1.0


def test_the_class_of_trls_form_of_the_guide_is_played(tmp_path):
    """The reward is that of the door which the last call has opened."""
    *_, text = (text for language, text in fences(PAGE) if language == "python")
    (tmp_path / "trls.py").write_text(text)
    page = execute_file(tmp_path / "trls.py", name="trls_of_the_guide")
    rewards = []
    for door in (1, 2):
        played = page.environment.make()
        (tool,) = played.start({"behind": 2}, 0).tools
        call = {"type": "function", "id": "a", "function": {"name": "open", "arguments": {"door": door}}}
        (said,) = played.step({"role": "assistant", "content": "", "tool_calls": [call]}).messages
        assert tool.__name__ == "open" and said["content"] == {1: "nothing", 2: "a goat"}[door]
        rewards.append(played.step({"role": "assistant", "content": "It is there."}).reward)
    assert rewards == [0.0, 1.0]


def _experiment(**changes):
    arguments = {
        "actor": Role("runs/guess_number/task/model", random_init=True),
        "dataset": DatasetConfig("runs/guess_number/task/prompts.jsonl"),
        "environment": Environment(players.Talks)}
    return GRPO(**arguments | changes)


@pytest.mark.parametrize(("changes", "named"), [
    ({"environment": Environment(players.Talks, credit="to_go")}, "baseline"),
    ({"tools": (players.tool_add,)}, "give either environment or tools"),
    ({"max_lag": 2, "cache_on_update": "keep"}, "cache_on_update"),
    ({"max_new_tokens_key": "number"}, "max_new_tokens_key"),
    ({"dataset": DatasetConfig("runs/guess_number/task/prompts.jsonl", system_prompt="+")},
     "dataset.system_prompt"),
    ({"reward": Role("x")}, "reward is set"),
    ({"baseline": "greedy", "group_size": 1, "normalize": "none"}, "baseline"),
    ({"token_rewards": (RepetitionPenalty(),)}, "token_rewards"),
    ({"actor": Role("x", random_init=True, engine="transformers")}, "actor.engine"),
])  # What is named stands in the guide, too.
def test_what_is_not_supported_is_refused(example, changes, named):
    execute_file(example, name="guess_number_once")
    experiment = _experiment(**changes)
    with pytest.raises(ValueError, match=re.escape(named)):
        experiment.roles()
        experiment.graph()


@pytest.mark.parametrize("changes", [
    {"max_lag": 1, "rounds": 2}, {"max_lag": 2}, {"sampling": SamplingConfig(stop="+", presence_penalty=0.5)},
    {"interruption": Interruption(2, "+", "-")},
    {"deterministic": True, "work_stealing": False, "kv_cache_gib": 1.0}])
def test_what_was_refused_once_is_legal(example, changes):
    execute_file(example, name="guess_number_once")
    experiment = _experiment(**changes)
    experiment.roles()
    assert experiment.graph().of_kind("generate")


@pytest.mark.parametrize(("name", "end"), [("hermes", "</tool_call>"), ("mistral", None)])
def test_turns_may_end_at_calls(example, name, end):
    """The end of calls counts in training and in evaluations; a template that writes none is refused."""
    execute_file(example, name="guess_number_once")
    directory = str(byte_tokenizer(("<|im_end|>", "<|im_start|>"), OWN[name]))
    environment = Environment(tools=(players.tool_add,), ends_at_call=True)
    experiment = _experiment(
        environment=environment, tokenizer=directory,
        eval_dataset=Evaluation(
            DatasetConfig("runs/guess_number/task/prompts.jsonl"), sampling=SamplingConfig(max_new_tokens=4)))
    for graph in (experiment.graph(), experiment.eval_graph()):
        (call,) = graph.of_kind("generate")
        assert call.work.sampling.stop == (() if end is None else (end,))
    calls = EnvironmentTurnSourceFactory(replace(players.TOOLS, ends_at_call=True), directory)
    settings = TurnSettings(1, 400, 4000, [0])
    if end is not None:
        assert play(calls, {"prompt": "Add."}, "It is 5.", settings)["stop"] == "done"
    else:
        with pytest.raises(UserError, match="must write a tag such as </tool_call> after each call"):
            play(calls, {"prompt": "Add."}, "It is 5.", settings)


def _rollout(rewards, **changes):
    turns = [{"start": 1, "stop": 2, "rewards": reward, "seconds": 0.0} for reward in rewards]
    return {"turns": turns, "stop": "done", "messages": [], "metrics": {"guess": 3.0}, "seconds": 0.5,
            "dropped": False, "sentence": ""} | changes


class Context:
    class tokenizer:
        @staticmethod
        def decode(ids, skip_special_tokens):
            return "x" * len(ids)

    step = 1


def length(completions):
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("function", [None, length])
def test_rewards_of_turns_and_of_functions_add_up(function):
    tokens = [torch.tensor([5, 6, 7])] * 3
    packed = Packed.of(tokens, empty=torch.zeros(0, dtype=torch.long))
    mask = packed.like(torch.tensor([0.0, 1.0, 1.0] * 3))
    rollouts = [
        _rollout([{"near": 0.25}, {"near": 0.5, "won": 1.0}]), _rollout([{}]),
        _rollout([{"won": 1.0}], dropped=True, stop="step_error")]
    batch = Batch([0, 1, 2], {
        "prompt": ["?"] * 3, "sequence_ids": packed, "response_mask": mask, "rollout": rollouts})
    call = RolloutRewards(function, ())
    made = call(batch, Context)
    more = 0.0 if function is None else 2.0
    assert made["score"].tolist()[:2] == [1.75 + more, more] and made["score"].isnan().tolist()[2]
    named = {} if function is None else {"length": 2.0}
    assert made["reward_scores"] == [
        {"near": 0.75, "won": 1.0} | named, named, {"near": None, "won": None} | named]
    named_means = _reward_logs(Batch([0, 1, 2], made))
    assert named_means["reward/won/mean"] == 0.5 and named_means["reward/near/mean"] == 0.375
    assert made["reward_metrics"][0]["environment/guess"] == 3.0
    assert made["reward_metrics"][2]["environment/stop/step_error"] == 1.0
    assert set(made) == set(call.outputs) and "rollout" in call.inputs


@pytest.mark.parametrize("normalize", ["none", "group"])
@pytest.mark.parametrize(("credit", "discount"), [("to_go", 1.0), ("to_go", 0.5), ("per_turn", 0.5)])
def test_each_turn_gets_its_own_credit(credit, discount, normalize):
    """The others' means are added up here turn by turn."""
    rewards = [[1.0, 0.5], [0.0], [2.0, -1.0, 3.0], [0.0, 0.0], [1.0], [1.0, 1.0]]
    spans = [[(1 + 3 * k, 3 + 3 * k) for k in range(len(row))] for row in rewards]
    masks = [torch.zeros(3 * len(row) + 1) for row in rewards]
    for mask, pairs in zip(masks, spans, strict=True):
        for start, stop in pairs:
            mask[start:stop] = 1
    rollouts = [
        {"turns": [{"start": a, "stop": b, "rewards": {"x": r}} for (a, b), r in zip(p, row, strict=True)]}
        for p, row in zip(spans, rewards, strict=True)]
    scores = torch.tensor([sum(row) for row in rewards]) + torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    rewards[1][-1] += 1.0  # What a reward function has given to the second one.
    batch = Batch(list(range(6)), {
        "score": scores, "response_mask": Packed.of(masks, empty=torch.zeros(0)),
        "finished": torch.ones(6), "rollout": rollouts})
    environment = Environment(players.Talks, credit=credit, discount=discount)
    function = SampleAdvantages(
        3, "leave_one_out", normalize, inputs=AdvantageInputs(turn_credit=environment))
    columns, _ = function(batch, Context)
    for i, advantages in enumerate(columns["advantages"].split()):
        group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
        deviation = torch.tensor([sum(row) for row in group]).double().std(correction=0).item() + 1e-6
        for k, (start, stop) in enumerate(spans[i]):
            def to_go(row, k):
                return sum(r * discount**n for n, r in enumerate(row[k:]))

            others = [row for j, row in enumerate(group) if j != i % 3]
            at = k if credit == "per_turn" else 0
            long = [row for row in others if len(row) > at] or others
            baseline = sum(to_go(row, min(at, len(row) - 1)) for row in long) / len(long)
            expected = to_go(rewards[i], k) - baseline
            expected /= deviation if normalize == "group" else 1.0
            assert advantages[start:stop].tolist() == pytest.approx([expected] * (stop - start), abs=1e-6)


def test_tools_are_called_by_what_the_model_says():
    """Functions of a module are found by workers; their results come back until the turns are over."""
    directory = byte_tokenizer(("<|im_end|>", "<|im_start|>"), OWN["hermes"])
    calls = EnvironmentTurnSourceFactory(replace(players.TOOLS, max_turns=3), str(directory))
    said = '<tool_call>\n{"name": "tool_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    settings = TurnSettings(1, 400, 4000, [])
    rollout = play(calls, {"prompt": "Add."}, said, settings)
    assert rollout["stop"] == "max_turns" and len(rollout["turns"]) == 3
    assert [m["content"] for m in rollout["messages"] if m["role"] == "tool"] == ["5", "5"]
    rollout = play(calls, {"prompt": "Add."}, "It is 5.", settings)
    assert rollout["stop"] == "done" and len(rollout["turns"]) == 1


def test_an_experiment_may_have_tools_alone(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("realhf_experiment_")]:
        monkeypatch.delitem(sys.modules, name)  # Those of other tests may have the same tool.
    experiment = _experiment(environment=None, tools=(players.tool_add,))
    (source,) = {source_of(experiment.used_environment())}
    assert (source.module, source.attribute) == (players.__name__, "TOOLS")
