"""Mixtures: shares, orders and columns of their parts, compared with loaders of the parts alone."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from realhf import DatasetConfig, DatasetMixture
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import make_loader
from realhf.data.order import block_counts
from realhf.data.rows import extra_columns, load_rows
from realhf.errors import UserError
from tests.runtime.tiny import write_task

KEYS = ("prompt_ids", "prompt", "level", "hint", "dataset", "dataset_row")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return LightTokenizer(str(write_task(tmp_path_factory.mktemp("task"))))


@pytest.fixture
def parts(tmp_path):
    """Two files with other columns; prompts of the second begin with a minus."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "level": i}) + "\n" for i in range(30)))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"question": f"={i}", "hint": "="}) + "\n" for i in range(7)))
    first = DatasetConfig(str(tmp_path / "a.jsonl"))
    return first, DatasetConfig(str(tmp_path / "b.jsonl"), prompt_key="question")


def _loader(config, tokenizer, keys=KEYS, seed=0):
    return make_loader(config, keys=keys, tokenizer=tokenizer, group_size=1, seed=seed)


def test_parts_have_their_shares_and_their_own_orders(parts, tokenizer):
    mixture = DatasetMixture(parts=parts, weights=(0.7, 0.3))
    loader = _loader(mixture, tokenizer)
    assert len(loader) == 37
    batch = loader.batch(range(3000))
    sources = [0 if source.endswith("a.jsonl") else 1 for source in batch["dataset"]]
    for start in (0, 1000, 2000):
        assert Counter(sources[start : start + 1000]) == {0: 700, 1: 300}
    assert 60 < sum(source == 0 for source in sources[:100]) < 80
    for number, part in enumerate(parts):
        ours = [prompt for prompt, source in zip(batch["prompt"], sources, strict=True) if source == number]
        alone = _loader(part, tokenizer, ("prompt_ids", "prompt")).batch(range(len(ours)))
        assert ours == alone["prompt"]


def test_a_prompt_depends_on_its_number_and_the_seed_alone(parts, tokenizer):
    mixture = DatasetMixture(parts=parts, weights=(3, 1))
    loader = _loader(mixture, tokenizer)
    everything = loader.batch(range(1100))["prompt"]
    pieces = [loader.batch(range(start, start + 11))["prompt"] for start in range(1089, -1, -11)]
    assert [prompt for piece in reversed(pieces) for prompt in piece] == everything
    assert _loader(mixture, tokenizer, seed=1).batch(range(1100))["prompt"] != everything


def test_columns_that_only_other_parts_have_are_none(parts, tokenizer):
    mixture = DatasetMixture(parts=parts)
    assert mixture.weights == (1.0, 1.0)
    assert set(extra_columns(mixture)) == {"level", "hint", "dataset"}
    batch = _loader(mixture, tokenizer).batch(range(80))
    for prompt, level, hint, row in zip(
        batch["prompt"], batch["level"], batch["hint"], batch["dataset_row"], strict=True
    ):
        if prompt.startswith("="):
            assert (level, hint, row) == (None, "=", 30 + int(prompt[1:]))
        else:
            assert (level, hint, row) == (int(prompt), None, int(prompt))
    with pytest.raises(ValueError, match="there is no column 'answer'"):
        load_rows(mixture, ["prompt_ids", "answer"])


@pytest.mark.parametrize(
    "weights, counts",
    [((1, 1), (500, 500)), ((1, 1, 1), (334, 333, 333)), ((0.7, 0.3), (700, 300)), ((2, 0.002), (999, 1))],
)
def test_weights_become_whole_prompts_of_a_thousand(weights, counts):
    assert block_counts(weights) == counts


def test_mixtures_that_cannot_be(parts):
    with pytest.raises(ValueError, match="there are 1 weights for 2 parts"):
        DatasetMixture(parts=parts, weights=(1,))
    with pytest.raises(ValueError, match=r"weights are \(1, 0\): they must be positive numbers"):
        DatasetMixture(parts=parts, weights=(1, 0))
    with pytest.raises(ValueError, match="each must be at least a thousandth of their sum"):
        DatasetMixture(parts=parts, weights=(1, 0.0001))
    with pytest.raises(ValueError, match="a mixture has parts with paths, and none of its own"):
        DatasetMixture("data.jsonl", parts=parts)
    with pytest.raises(ValueError, match="parts is empty: it must have at least one DatasetConfig"):
        DatasetMixture()
    with pytest.raises(UserError, match=r"a.jsonl line 1: there is no column 'nothing'"):
        wrong = DatasetConfig(parts[0].path, prompt_key="nothing")
        load_rows(DatasetMixture(parts=(parts[1], wrong)), ["prompt_ids"])


def test_parts_that_leave_out_rows_keep_their_shares_and_go_on_after_a_resume(parts, tokenizer):
    def odd(row):
        return row if row["level"] % 3 == 1 else None

    lazy = [replace(parts[0], map=odd, preload=False), replace(parts[1], preload=False)]
    mixture = DatasetMixture(parts=lazy, weights=(0.7, 0.3))
    eager = DatasetMixture(parts=[replace(part, preload=True) for part in lazy], weights=(0.7, 0.3))
    ours, theirs = _loader(mixture, tokenizer), _loader(eager, tokenizer)
    batch = ours.batch(range(2100))
    assert batch["dataset"] == theirs.batch(range(2100))["dataset"]
    levels = [level for level in batch["level"] if level is not None]
    for start in range(0, len(levels) - 9, 10):  # Ten rows of the first part are kept.
        assert sorted(levels[start : start + 10]) == list(range(1, 30, 3))
    after = _loader(mixture, tokenizer)
    after.restore(json.loads(json.dumps(ours.state([1400, 1650], next_prompt=1700))))
    prompts = [1700, 1400, 2099, 1650]
    assert after.batch(prompts)["dataset_row"] == [batch["dataset_row"][i] for i in prompts]
