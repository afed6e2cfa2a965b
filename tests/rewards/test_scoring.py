"""RewardCall: what reaches a reward function, what may come back, and what is said about anything else."""

import asyncio
import json
import re
import subprocess
import sys
import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from realhf import RegexMatch, Reward
from realhf.data.batch import Batch, Packed
from realhf.data.loader import load_tokenizer
from realhf.errors import UserError
from realhf.rewards.reward import reward_columns
from realhf.rewards.scoring import RewardCall
from tests.runtime.tiny import CHARACTERS, write_task


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return SimpleNamespace(tokenizer=load_tokenizer(str(write_task(tmp_path_factory.mktemp("task")))), step=1)


def _batch(texts=(("1+1=", "2"), ("2+2=", "44"), ("9+0=", "9")), **columns):
    """Samples 10, 11, ... of (prompt, response), each response closed by <eos> (token 1)."""
    ids = {c: i for i, c in enumerate(CHARACTERS, start=2)}
    sequences = [torch.tensor([ids[c] for c in prompt + answer] + [1]) for prompt, answer in texts]
    masks = [torch.tensor([0.0] * len(p) + [1.0] * (len(a) + 1)) for p, a in texts]
    fields = {"sequence_ids": Packed.of(sequences), "response_mask": Packed.of(masks)}
    fields |= {"prompt": [prompt for prompt, _ in texts], **columns}
    return Batch([10 + i for i in range(len(texts))], fields)


def _call(function, batch, context):
    return RewardCall(function, reward_columns(function))(batch, context)


def test_arguments_are_what_trl_passes(context):
    seen = {}

    def reward(completions, answer, *, level, prompts, completion_ids, bonus=1.0, **kwargs):
        seen.update(locals())
        return [0.5, 1, 0]

    assert set(reward_columns(reward)) == {"answer", "level"}
    columns = _call(reward, _batch(answer=["2", "4", "9"], level=[1, 2, 3]), context)
    assert seen["prompts"] == ["1+1=", "2+2=", "9+0="] and seen["completions"] == ["2", "44", "9"]
    assert seen["answer"] == ["2", "4", "9"] and seen["level"] == [1, 2, 3] and seen["bonus"] == 1.0
    digit = {d: CHARACTERS.index(d) + 2 for d in "249"}
    assert seen["completion_ids"] == [[digit["2"], 1], [digit["4"], digit["4"], 1], [digit["9"], 1]]
    assert columns["score"].tolist() == [0.5, 1.0, 0.0] and columns["completion"] == ["2", "44", "9"]


class _Scorer:
    """A callable object, as some users write them."""

    def __call__(self, prompts, completions, completion_ids, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def test_a_callable_object_is_a_reward_function(context):
    assert reward_columns(_Scorer()) == ("answer",)
    assert _call(_Scorer(), _batch(answer=["2", "4", "9"]), context)["score"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "scores",
    [
        [True, False, True],
        [np.float32(1), np.int64(0), np.bool_(True)],
        np.array([1.0, 0.0, 1.0]),
        torch.tensor([1.0, 0.0, 1.0]),
        (1, 0, 1),
    ],
)
def test_any_kind_of_number_is_accepted(scores, context):
    result = _call(lambda prompts, completions, completion_ids: scores, _batch(), context)
    assert result["score"].tolist() == [1.0, 0.0, 1.0] and result["score"].is_floating_point()


def test_no_samples_do_not_reach_the_function(context):
    def reward(prompts, completions, completion_ids):
        raise AssertionError("called without samples")

    empty = _batch().select([])
    result = _call(reward, empty, context)
    assert result["completion"] == [] and len(result["score"]) == 0


@pytest.mark.parametrize(
    "scores, part",
    [
        ([1.0, float("nan"), 0.0], "nan for sample 11 with the prompt '2+2='"),
        ([1.0, 0.0, float("inf")], "inf for sample 12"),
        (["1.0", 1.0, 1.0], "'1.0' for sample 10"),
        ("101", "str for 3 samples"),
        ({10: 1.0, 11: 1.0, 12: 0.0}, "dict for 3 samples"),
        ([1.0, "good", 1.0], "'good' for sample 11"),
        ([1.0, [1.0, 2.0], 1.0], "[1.0, 2.0] for sample 11"),
        ([1.0, 2.0], "2 values for 3 samples (10 to 12)"),
        (None, "NoneType for 3 samples"),
        (1.0, "float for 3 samples"),
    ],
)
def test_wrong_answers_name_function_and_sample(scores, part, context):
    def my_reward(prompts, completions, completion_ids):
        return scores

    with pytest.raises(UserError) as error:
        _call(my_reward, _batch(), context)
    text = str(error.value)
    assert text.startswith("reward function ") and f"my_reward returned {part}" in text and "\n" not in text
    assert text.endswith(("list with one number per completion", "must be a finite number"))


@pytest.mark.parametrize("on_failure", ["stop", "drop", "skip"])
def test_coroutines_that_nothing_has_awaited(context, on_failure):
    async def judged(text):
        return 1.0

    def my_reward(completions):
        return [judged(text) for text in completions]

    reward = Reward(my_reward, on_failure=on_failure)
    with pytest.raises(UserError, match="my_reward returned coroutines, which nothing has awaited: make it"):
        _call(reward, _batch(), context)


def test_a_raising_function_is_named_with_its_sample_and_line(context):
    def my_reward(prompts, completions, completion_ids):
        return [1.0 / (len(c) - 2) for c in completions]

    with pytest.raises(UserError) as error:
        _call(my_reward, _batch(), context)
    line = my_reward.__code__.co_firstlineno + 1
    for part in ("my_reward", "ZeroDivisionError", "sample 11 with the prompt '2+2='", f"{__file__}:{line}"):
        assert part in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_function_that_fails_on_several_samples_only_names_their_range(context):
    def my_reward(prompts, completions, completion_ids):
        if len(prompts) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(UserError, match="my_reward raised RuntimeError: too many .* on samples 10 to 12"):
        _call(my_reward, _batch(), context)


def test_a_function_takes_of_the_standard_arguments_what_it_names(context):
    def my_reward(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert _call(my_reward, _batch(answer=["2", "4", "9"]), context)["score"].tolist() == [1.0, 0.0, 1.0]


def _positional(completions, /):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    "function, sentence",
    [
        (lambda prompt, answer: [0.0], "has no parameter `completions` or `completion_ids`: its form"),
        (_positional, "_positional: completions is positional only"),
        (3, "reward_function is 3: it must be a function, a Reward or a list of them"),
        ({"a": len}, "reward_function is {'a': .*}: it must be a function, a Reward or a list of them"),
        (_Scorer, r"reward function _Scorer is a class: give an object of it, _Scorer\(...\)"),
        ([_Scorer(), _Scorer], "reward function _Scorer is a class"),
    ],
)
def test_what_is_no_reward_function(function, sentence):
    with pytest.raises(UserError, match=sentence):
        reward_columns(function, ["prompt", "answer"])


def _of_levels(completions, levl=1, answers=None, bonus=0.5, **columns):
    return [0.0 for _ in completions]


def _gets(completions, **columns):
    solution = columns.get("solution") or columns.get("answer")
    return [float(columns.get("anwser", [text])[0] == solution) for text in completions]


def _gets_nothing(completions, **rest):
    return [float(text == rest.pop("gold", "")) for text in completions]


def _gets_what_is_there(completions, **columns):
    return [float(text == columns.get("level", {}).get("gold")) for text in columns.get("prompts")]


def _of_truth(completions, ground_truth=None, scale=None, **columns):
    return [float(text == ground_truth) for text in completions]


@pytest.mark.parametrize(("function", "expected"), [
    (_of_truth, [
        "dataset has no column 'ground_truth' (it has answer, level): this parameter of _of_truth always has "
        "its default, None"]),
    (_of_levels, [
        "dataset has no column 'levl' (did you mean level?): this parameter of _of_levels always has its "
        "default, 1",
        "dataset has no column 'answers' (did you mean answer?): this parameter of _of_levels always has its "
        "default, None"]),
    (_gets, ["dataset has no column 'anwser' (did you mean answer?): where _gets looks it up by `get`, it "
             "finds nothing"]),
    (partial(_gets_nothing), [
        "dataset has no column 'gold': where partial looks it up by `get`, it finds nothing"]),
    (_gets_what_is_there, []),
    (_Scorer(), []),
])
def test_columns_that_a_function_asks_for_in_vain(function, expected):
    columns = ["answer", "level"]
    assert list(RewardCall(function, reward_columns(function, columns)).misspelt(columns)) == expected


def _by_pattern(completions):
    return [float(re.search("\boxed{.*}", text) is not None) for text in completions]


def test_patterns_that_are_no_raw_texts():
    for function, character in ((RegexMatch("\\d"), None), (RegexMatch("\frac"), "f"),
                                (_by_pattern, "b"), (_gets, None)):
        said = list(RewardCall(Reward(function, name="r"), ()).unescaped())
        assert len(said) == (character is not None)
        assert all(f"a control character: \\{character} in a Python text" in sentence for sentence in said)


def test_names_of_the_runs_own_metrics_are_refused():
    """A row of metrics.jsonl has `step`, by which a run is continued."""
    for name, on_failure in (("step", "stop"), ("step", "drop"), ("reward/mean", "stop"), ("perf/x", "skip"),
                             ("eval/score", "stop"), ("", "stop")):
        def logs(completions, log_metric, name=name):
            log_metric(name, 1.0)
            return [0.0] * len(completions)

        call = RewardCall(Reward(logs, on_failure=on_failure), ())
        with pytest.raises(UserError, match=r"reward function .*logs.* logs (the|a) metric"):
            call.scores([0], ["a"], ["b"], [[1]], {})


def _by_hash(completions):
    return [float(hash(text) % 2) for text in completions]


def _by_helper(completions):
    return _by_hash(completions)


def _hashed_elsewhere(completions):
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def test_rewards_that_differ_between_processes(monkeypatch):
    """Python's hash of a text does, as the first two processes show; that of zlib does not."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code = "import zlib; print(hash('a'), zlib.crc32(b'a'))"
    printed = [subprocess.check_output([sys.executable, "-S", "-c", code]).split() for _ in range(2)]
    assert printed[0][0] != printed[1][0] and printed[0][1] == printed[1][1]
    for function, is_stable in ((_by_hash, False), (_by_helper, False), (_hashed_elsewhere, True),
                                (_Scorer(), True)):
        said = list(RewardCall(Reward(function, name="r"), ()).unstable())
        assert [line[:22] for line in said] == ["reward r calls hash(),"] * (not is_stable)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert list(RewardCall(_by_hash, ()).unstable()) == []


def test_any_columns_are_those_of_the_dataset_whatever_the_graph_calls_its_keys(context):
    """As in TRL, they are without the prompt and a completion that the dataset may have."""
    seen = {}

    def my_reward(completions, **columns):
        seen.update(columns)
        return [0.0 for _ in completions]

    names = ["prompt", "completion", "score", "prompt_ids", "level"]
    assert reward_columns(my_reward, names) == ("score", "prompt_ids", "level")
    given = {"column/score": [7, 8, 9], "column/prompt_ids": ["x", "y", "z"], "level": [1, 2, 3]}
    result = RewardCall(my_reward, reward_columns(my_reward, names))(_batch(**given), context)
    assert result["score"].tolist() == [0.0, 0.0, 0.0]
    assert seen.keys() == {"prompts", "completion_ids", "score", "prompt_ids", "level"}
    assert seen["score"] == [7, 8, 9] and seen["prompt_ids"] == ["x", "y", "z"]


def test_completions_of_chats_are_messages(context):
    seen = []

    def my_reward(prompts, completions):
        seen.extend(completions)
        return [1.0 for _ in prompts]

    batch = _batch()
    chats = [[{"role": "user", "content": text}] for text in ("1+1=", "9+0=")]
    batch.fields["prompt"] = [chats[0], "2+2=", chats[1]]
    result = _call(my_reward, batch, context)
    assert seen == [
        [{"role": "assistant", "content": "2"}], "44", [{"role": "assistant", "content": "9"}]]
    assert result["completion"] == ["2", "44", "9"]


def test_async_functions_are_awaited_in_one_event_loop(context):
    loops = []

    async def my_reward(completions, **columns):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    call = RewardCall(my_reward, reward_columns(my_reward))
    assert [call(_batch(), context)["score"].tolist() for _ in range(2)] == [[1.0, 2.0, 1.0]] * 2
    assert loops[0] is loops[1]


def test_an_async_function_that_raises_is_located(context):
    async def my_reward(completions):
        return [1.0 / (len(c) - 2) for c in completions]

    with pytest.raises(UserError, match=f"ZeroDivisionError.*{__file__}.*sample 11 with the prompt '2.2='"):
        _call(my_reward, _batch(), context)


def test_none_counts_as_0_and_is_said_once(context, capsys):
    """TRL sums the rewards that apply: without any, a sample has 0."""
    call = RewardCall(lambda completions: [None if len(c) > 1 else 1.0 for c in completions], ())
    for _ in range(2):
        assert call(_batch(), context)["score"].tolist() == [1.0, 0.0, 1.0]
    err = capsys.readouterr().err
    assert err.count("warning") == 1
    assert "returned None for 1 of 3 samples (sample 11 first): None counts as 0" in err


def test_a_function_that_exits_is_an_error(context):
    def my_reward(completions):
        sys.exit(0)

    with pytest.raises(UserError, match=rf"my_reward raised SystemExit: 0 \({__file__}:\d+\) on sample 10"):
        _call(my_reward, _batch(), context)


def test_an_interrupt_stays_one(context):
    def my_reward(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _call(my_reward, _batch(), context)


def test_an_error_in_a_library_is_located_at_the_users_line(context):
    def parse(text):
        return json.loads(text)["score"]

    def my_reward(completions):
        return [parse("{" + c) for c in completions]

    with pytest.raises(UserError) as error:
        _call(my_reward, _batch(), context)
    line = parse.__code__.co_firstlineno + 1
    assert f"({__file__}:{line})" in str(error.value)
    assert isinstance(error.value.__cause__, json.JSONDecodeError)
