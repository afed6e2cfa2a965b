"""Rows of prompt, chosen and rejected completion."""

import json

import pytest

from realhf.data.dataset import DatasetConfig, needed_columns
from realhf.data.loader import Loader, load_tokenizer
from realhf.data.rows import load_rows
from realhf.runtime.doubts.data import equal_pairs
from tests.runtime.tiny import write_task

KEYS = ("sequence_ids", "response_mask", "is_chosen", "prompt", "level")
ROWS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "13", "level": 5},
    {"prompt": "2+2=", "chosen": "4", "rejected": "4", "level": 6},
    {"prompt": "10+2=", "chosen": "12", "rejected": "", "level": 7},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(write_task(tmp_path_factory.mktemp("task"))))


def _write(tmp_path, rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _loader(path, tokenizer, **config):
    return Loader(
        DatasetConfig(path, shuffle=False, **config), keys=KEYS, tokenizer=tokenizer, group_size=2, seed=0)


def test_a_prompt_becomes_a_chosen_and_a_rejected_sample(tmp_path, tokenizer):
    loader = _loader(_write(tmp_path, ROWS), tokenizer)
    batch = loader.batch([2, 3, 4])  # The last row, and the first two of the next epoch.
    assert batch.ids == [4, 5, 6, 7, 8, 9] and batch["is_chosen"] == [True, False] * 3
    assert batch["level"] == [7, 7, 5, 5, 6, 6]
    pairs = zip(batch["sequence_ids"].split(), batch["response_mask"].split(), strict=True)
    texts = [(tokenizer.decode(ids[mask == 0]), tokenizer.decode(ids[mask == 1])) for ids, mask in pairs]
    assert texts == [
        ("10+2=", "12<eos>"), ("10+2=", "<eos>"), ("1+1=", "2<eos>"), ("1+1=", "13<eos>"),
        ("2+2=", "4<eos>"), ("2+2=", "4<eos>"),
    ]
    assert loader.longest == len("10+2=12") + 1 and loader.place_of(1) == "line 2"
    (warning,) = equal_pairs("dataset", loader)
    assert warning == "dataset: rejected is the same as chosen in 1 of 3 rows, first in line 2"


def test_messages_go_through_the_template_with_both_completions(tmp_path, tokenizer):
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role != 'user' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    said = [[{"role": "assistant", "content": text}] for text in ("=2", "=13")]
    row = {"prompt": [{"role": "user", "content": "1+1"}], "level": 1, "good": said[0], "bad": said[1]}
    loader = _loader(_write(tmp_path, [row]), tokenizer, chosen_key="good", rejected_key="bad")
    batch = loader.batch([0])
    pairs = zip(batch["sequence_ids"].split(), batch["response_mask"].split(), strict=True)
    assert [tokenizer.decode(ids[mask == 1]) for ids, mask in pairs] == ["2<eos>", "13<eos>"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rejected": None}, "line 2: rejected is null: it must be text"),
        ({"prompt": [{"role": "user", "content": "1"}], "chosen": []}, "line 2: chosen is an empty list: it"),
        ({"rejected": [{"role": "assistant", "content": "1"}]},
         "line 2: rejected is a list of chat messages, but the prompt is text: both must be messages"),
        ({"chosen": "\ud800"}, "line 2: chosen has half of a character at position 0"),
    ],
)
def test_unusable_completions_are_named(tmp_path, changes, sentence):
    path = _write(tmp_path, [ROWS[0], ROWS[1] | changes])
    with pytest.raises(ValueError, match=f"pairs.jsonl {sentence}"):
        load_rows(DatasetConfig(path), KEYS)


def test_missing_columns_are_named(tmp_path):
    path = _write(tmp_path, [{"prompt": "1", "chosen": "2", "level": 1}])
    with pytest.raises(ValueError, match="line 1: there is no column 'rejected'; its columns are prom"):
        load_rows(DatasetConfig(path), KEYS)
    config = DatasetConfig(path, completion_key="x")
    assert needed_columns(config, KEYS) == ["prompt", "chosen", "rejected", "level"]
