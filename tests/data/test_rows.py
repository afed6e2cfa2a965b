"""Rows of several files, of large ones and through map functions, compared with what the files hold.

Also compares json_form with encoding to JSON and back.
"""

import enum
import json
import random
from collections import Counter
from dataclasses import replace
from datetime import datetime

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from realhf.data import row_files
from realhf.data.dataset import DatasetConfig
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import Loader
from realhf.data.memory_rows import json_form
from realhf.data.order import row_order
from realhf.data.row_files import JsonlFile
from realhf.data.rows import DatasetRows, extra_columns, load_rows, read_rows, spread
from realhf.errors import UserError
from tests.runtime.tiny import write_task


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return LightTokenizer(str(write_task(tmp_path_factory.mktemp("task"))))


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _loader(config, tokenizer, keys=("prompt_ids", "prompt"), **more):
    return Loader(config, keys=keys, tokenizer=tokenizer, group_size=1, seed=0, **more)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_single_lines_of_a_file_with_blank_ones(tmp_path, monkeypatch, chunk):
    """Every way to cut the file into chunks finds the lines that Python's own reader finds."""
    monkeypatch.setattr(row_files, "_CHUNK_BYTES", chunk)
    rng = random.Random(chunk)
    ends = ("\n", "\r\n", "\n\n", "\n \t\n", "\n\r\n\n")
    lines = [json.dumps({"prompt": "é" * rng.randrange(9)}) + rng.choice(ends) for _ in range(60)]
    text = "\n" + "".join(lines)
    for last in ("", '  {"prompt": "no end of line"}'):
        path = tmp_path / f"rows{len(last)}.jsonl"
        path.write_bytes((text + last).encode())
        expected = [(i, line) for i, line in enumerate(path.open("rb"), start=1) if line.strip()]
        file = JsonlFile(path)
        assert len(file) == len(expected)
        order = rng.sample(range(len(expected)), len(expected))
        assert [file[i] for i in order] == [json.loads(expected[i][1]) for i in order]
        assert [file.place(i) for i in order] == [f"line {expected[i][0]}" for i in order]
        assert list(file.first(5)) == [file[i] for i in range(5)]


def test_patterns_and_lists_of_files_are_read_in_order(tmp_path, tokenizer):
    parts = [[{"prompt": f"{i}"} for i in range(start, start + 4)] for start in (0, 4, 8)]
    for name, rows in zip("abc", parts, strict=True):
        _write(tmp_path / f"{name}.jsonl", rows)
    table = pyarrow.Table.from_pylist([{"prompt": "12"}])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    everything = [row for rows in parts for row in rows]
    assert read_rows(DatasetConfig(f"{tmp_path}/*.jsonl")) == everything
    several = DatasetConfig([f"{tmp_path}/c.jsonl", tmp_path / "d.parquet", f"{tmp_path}/[ab].jsonl"])
    assert read_rows(several) == [*parts[2], {"prompt": "12"}, *parts[0], *parts[1]]
    assert read_rows(DatasetConfig(f"{tmp_path}/*.jsonl", max_rows=6)) == everything[:6]
    batch = _loader(DatasetConfig(f"{tmp_path}/*.jsonl", shuffle=False), tokenizer).batch(range(12))
    assert batch["prompt"] == [row["prompt"] for row in everything]
    _write(tmp_path / "b.jsonl", [{"prompt": "1"}, {"prompt": 2}])
    with pytest.raises(UserError, match=r"b.jsonl line 2: prompt is 2: it must be text"):
        load_rows(DatasetConfig(f"{tmp_path}/*.jsonl"), ["prompt_ids"])
    with pytest.raises(UserError, match=r"dataset.path '.*/\*.csv': no file matches"):
        read_rows(DatasetConfig(f"{tmp_path}/*.csv"))
    with pytest.raises(ValueError, match="path is an empty list: it must have at least one row"):
        DatasetConfig([])


def test_a_split_is_a_part_of_local_files_as_in_the_library_datasets(tmp_path):
    for name, first in (("a", 0), ("b", 7)):
        _write(tmp_path / f"{name}.jsonl", [{"prompt": str(i)} for i in range(first, first + 7)])
    pattern = f"{tmp_path}/*.jsonl"
    for split in ("train", "train[:5]", "train[5:9]", "train[-3:]", "train[75%:]", "train[:2]+train[6:8]"):
        theirs = datasets.load_dataset(
            "json", data_files=pattern, split=split, cache_dir=str(tmp_path / "cache"))
        assert read_rows(DatasetConfig(pattern, split=split)) == list(theirs), split
    both = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert read_rows(DatasetConfig(both, split="train[5:9]")) == [{"prompt": str(i)} for i in range(5, 9)]
    rows = DatasetRows(DatasetConfig(pattern, split="train[5:9]"))
    assert rows.place(3) == f"dataset {tmp_path}/b.jsonl line 2"


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"split": "test"}, r"dataset.path '.*rows.jsonl': split is 'test': it must be train, or a part "),
    ({"split": "train[2:]"}, r"dataset.path '.*rows.jsonl': split 'train\[2:\]' has no rows"),
    ({"name": "main"}, "dataset.name is 'main': it must be left out, as .*rows.jsonl' is not on the hub"),
    ({"revision": "v2"}, "dataset.revision is 'v2': it must be left out, as "),
])
def test_what_local_files_do_not_have_is_refused(tmp_path, settings, sentence):
    _write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(UserError, match=sentence):
        read_rows(DatasetConfig(str(tmp_path / "rows.jsonl"), **settings))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_that_are_read_when_they_come_up_are_those_of_the_file(tmp_path, tokenizer, monkeypatch, kind):
    """Without long prompts, both ways give the same batches; parquet is copied in pieces of a few rows."""
    monkeypatch.setattr(row_files, "LARGE_BYTES", 0)
    monkeypatch.setattr(row_files, "_ROWS_OF_BATCH", 7)
    monkeypatch.setattr("realhf.data.rows.LARGE_BYTES", 0)
    monkeypatch.setattr("realhf.data.row_files.datasets_cache", lambda: tmp_path)
    rows = [{"prompt": f"{i}+{i}=", "level": i, "tags": [str(i)] * (i % 3)} for i in range(50)]
    path = _write(tmp_path / "rows.jsonl", rows)
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=20)
    keys = ("prompt_ids", "prompt", "level", "tags", "dataset_row")
    lazy = _loader(DatasetConfig(str(path)), tokenizer, keys)
    eager = _loader(DatasetConfig(str(path), preload=True), tokenizer, keys)
    assert (lazy.is_lazy, eager.is_lazy) == (True, False)
    ours, theirs = lazy.batch(range(120)), eager.batch(range(120))
    assert ours["prompt_ids"].values.tolist() == theirs["prompt_ids"].values.tolist()
    assert all(ours[key] == theirs[key] for key in keys[1:])
    assert sorted(ours["level"][:50]) == list(range(50))
    assert list((tmp_path / "realhf").glob("*")) == [] if kind == "jsonl" else True


def test_only_a_sample_of_a_large_file_is_checked_at_the_start(tmp_path, tokenizer):
    """A mistake in a row that is not tried ends the run when the row comes up, with the same sentence."""
    rows: list[dict] = [{"prompt": str(i)} for i in range(5000)]
    tried = set(spread(5000, 1000))
    assert set(range(100)) < tried and len(tried) <= 1001 and max(tried) > 4990
    wrong = next(i for i in range(2000, 5000) if i not in tried)
    rows[wrong] = {"prompt": None}
    path = _write(tmp_path / "rows.jsonl", rows)
    config = DatasetConfig(str(path), preload=False, shuffle=False)
    assert len(load_rows(config, ["prompt_ids"])) == len(tried)
    loader = _loader(config, tokenizer)
    assert len(loader) == 5000 and loader.batch([wrong - 1])["prompt"] == [str(wrong - 1)]
    sentence = f"rows.jsonl line {wrong + 1}: prompt is null: it must be text"
    with pytest.raises(UserError, match=sentence):
        loader.batch([wrong])
    with pytest.raises(UserError, match=sentence):
        load_rows(DatasetConfig(str(path), preload=True), ["prompt_ids"])
    refuse = DatasetConfig(str(_write(tmp_path / "few.jsonl", rows[:10])), preload=False)
    with pytest.raises(UserError, match="few.jsonl line 8: seven is unlucky"):
        load_rows(refuse, ["prompt_ids"],
                  row_faults=[lambda row: "seven is unlucky" if row["prompt"] == "7" else None])


def _kept_order(lengths, limit, *, epochs, shuffle):
    """Return the rows of some epochs: the order of each without the prompts that are too long."""
    num_rows = len(lengths)
    order = row_order(num_rows, start=0, count=epochs * num_rows, seed=0, shuffle=shuffle)
    return [row for row in order if lengths[row] <= limit]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_kept_row_of_a_large_file_comes_up_once_in_every_epoch(tmp_path, tokenizer, shuffle):
    lengths = [1] * 5 + [9] * 60 + [2, 9, 3] * 9 + [9] * 8  # Most rows are left out, in long stretches.
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1" * length} for length in lengths])
    config = DatasetConfig(str(path), preload=False, max_prompt_tokens=4, shuffle=shuffle)
    keys = ("prompt_ids", "dataset_row")
    loader = _loader(config, tokenizer, keys)
    kept = {row for row, length in enumerate(lengths) if length <= 4}
    expected = _kept_order(lengths, 4, epochs=3, shuffle=shuffle)
    assert loader.batch(range(3 * len(kept)))["dataset_row"] == expected
    assert Counter(expected) == dict.fromkeys(kept, 3)
    later = _loader(config, tokenizer, keys)
    assert later.batch([50, 7, 31])["dataset_row"] == [expected[i] for i in (50, 7, 31)]  # In any order.
    with pytest.raises(UserError, match="longer than max_prompt_tokens 0 .the shortest has 1 tokens"):
        _loader(replace(config, max_prompt_tokens=0), tokenizer)


def test_a_resumed_run_finds_the_rows_of_a_large_file_without_reading_the_earlier_ones(tmp_path, tokenizer):
    rng = random.Random(1)
    lengths = [rng.choice([1, 3, 9, 9, 9]) for _ in range(200)]
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1" * length} for length in lengths])
    config = DatasetConfig(str(path), preload=False, max_prompt_tokens=4)
    expected = _kept_order(lengths, 4, epochs=6, shuffle=True)
    before = _loader(config, tokenizer, ("prompt_ids", "dataset_row"))
    before.batch(range(90))
    state = json.loads(json.dumps(before.state([70, 84, 87], next_prompt=100)))
    after = _loader(config, tokenizer, ("prompt_ids", "dataset_row"))
    after.restore(state)
    read: list[int] = []
    row = after._file.__class__.__getitem__
    after._file.__class__ = type("Counted", (DatasetRows,), {
        "__getitem__": lambda self, number: (read.append(number), row(self, number))[1]})
    prompts = [84, 100, 70, 101, 150, 87]
    assert after.batch(prompts)["dataset_row"] == [expected[i] for i in prompts]
    assert len(read) < 200  # Those of 51 new prompts and of three earlier ones.


def test_a_large_file_whose_tried_rows_are_all_left_out_has_others(tmp_path, tokenizer):
    wanted = next(i for i in range(3000, 5000) if i not in spread(5000, 1000))
    rows = [{"prompt": "1" if i == wanted else "1" * 9} for i in range(5000)]
    config = DatasetConfig(str(_write(tmp_path / "rows.jsonl", rows)), preload=False, max_prompt_tokens=4)
    assert _loader(config, tokenizer, ("prompt_ids", "dataset_row")).batch([3])["dataset_row"] == [wanted]
    mapped = replace(config, map=lambda row: row if row["prompt"] == "1" else None)
    assert load_rows(mapped, ["prompt_ids"]) == [{"prompt": "1"}]


def _question(row):
    if row["n"] % 3 == 2:
        return None
    return {"prompt": f"{row['n']}=", "answer": (row["n"],)}


@pytest.mark.parametrize("preload", [True, False])
def test_a_map_function_makes_columns_and_leaves_out_rows(tmp_path, tokenizer, preload):
    path = _write(tmp_path / "rows.jsonl", [{"n": n} for n in range(2, 11)])
    config = DatasetConfig(str(path), map=_question, shuffle=False, preload=preload)
    assert extra_columns(config) == ("n", "answer")  # The first row is left out.
    loader = _loader(config, tokenizer, ("prompt_ids", "prompt", "answer", "n", "dataset_row"))
    if preload:
        kept = [n for n in range(2, 11) if n % 3 != 2]
        assert len(loader) == len(kept) == 6 and loader.counts.unmapped == 3
        assert loader.batch(range(6))["n"] == kept
    else:
        assert loader.batch(range(4))["n"] == [3, 4, 6, 7]
    batch = loader.batch(range(2))
    assert all(answer == [n] for answer, n in zip(batch["answer"], batch["n"], strict=True))
    assert all(row == n - 2 for row, n in zip(batch["dataset_row"], batch["n"], strict=True))


@pytest.mark.parametrize(
    "function, sentence",
    [
        (lambda row: {"prompt": row["question"]},
         r"line 1: map function .*<lambda> failed with KeyError: 'question' \(.*test_rows.py:\d+\)"),
        (lambda row: [row["prompt"]], "line 1: .* returned list: it must return a dict of columns"),
        (lambda row: {"prompt": {1}}, "rows.jsonl line 1: column 'prompt' has a value of type set"),
        (lambda row: {"prompt": str(random.random())},
         "line 1: the map function, called twice, made different rows of it: it must be a pure function"),
        (lambda row: None, "rows.jsonl: the map function leaves out every row"),
    ],
)
def test_faults_of_map_functions_name_them_and_the_line(tmp_path, function, sentence):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1"}])
    with pytest.raises(ValueError, match=sentence):
        load_rows(DatasetConfig(str(path), map=function), ["prompt_ids"])


def test_sequences_beyond_learned_positions_are_refused_when_they_come_up(tmp_path, tokenizer):
    keys = ("prompt_ids", "sequence_ids", "response_mask")
    number = next(i for i in range(1500, 1600) if i not in spread(3001, 1000))
    rows = [{"prompt": "1", "completion": "1" * (30 if i == number else 3)} for i in range(3001)]
    path = _write(tmp_path / "rows.jsonl", rows)
    loader = _loader(DatasetConfig(str(path), preload=False, shuffle=False), tokenizer, keys)
    loader.require_at_most(20, "the model has 20")
    loader.batch([number - 1])
    with pytest.raises(UserError, match=f"line {number + 1}: prompt and completion have 32 tokens, and"):
        loader.batch([number])


def test_places_are_found_without_tokens(tmp_path):
    paths = [str(_write(tmp_path / f"{name}.jsonl", [{"prompt": "1"}])) for name in "ab"]
    rows = DatasetRows(DatasetConfig(paths))
    assert rows.place(1) == f"dataset {tmp_path}/b.jsonl line 1"
    assert rows.short_place(1) == f"line 1 of {tmp_path}/b.jsonl"


def test_a_number_of_thousands_of_digits_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a", "n": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match=r"a.jsonl line 2 is not JSON: Exceeds the limit"):
        read_rows(DatasetConfig(str(path)))
    with pytest.raises(UserError, match=r"is a directory: name its files"):
        read_rows(DatasetConfig(str(tmp_path)))


class Level(enum.IntEnum):
    HARD = 2


class Name(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 1.5, "text", [1, [2, (3, "x")]], (1, 2)),
        *({"a": (1, {"b": None})}, Level.HARD, Name.A, [Name.A]),
    ],
)
def test_it_is_what_comes_back_from_json(value):
    form = json_form(value)
    assert form == json.loads(json.dumps(value)) and type(form) is type(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    "value, form",
    [
        (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (np.arange(3), [0, 1, 2]),
        ([torch.tensor(2), torch.tensor([1.5])], [2, [1.5]]), (np.str_("x"), "x"), (np.float64(2.5), 2.5),
    ],
)
def test_numbers_of_libraries_become_pythons(value, form):
    made = json_form(value)
    assert made == form and type(made) is type(form)


def test_it_is_a_copy():
    value = {"a": [1]}
    json_form(value)["a"].append(2)
    assert value == {"a": [1]}


@pytest.mark.parametrize(
    "value, what",
    [
        (datetime(2024, 1, 1), "a value of type datetime"),
        ([{"a": b"x"}], "a value of type bytes"),
        ({1: "a"}, "a dict with the key 1: keys must be text"),
        ([{1, 2}], "a value of type set"),
        (np.datetime64("2024-01-01"), "a value of type date"),
    ],
)
def test_what_json_cannot_hold_is_named(value, what):
    with pytest.raises(TypeError, match=what):
        json_form(value)
