"""Rows in memory, CSV and lists of JSON are read as the same rows in a file."""

import json
from datetime import date
from pathlib import Path

import datasets
import pandas
import pyarrow
import pytest

from realhf import GRPO, DatasetConfig, DatasetMixture, Evaluation
from realhf.data.rows import read_rows

ROWS = [
    {"prompt": "1+1=", "answer": 2, "level": 0.1 + 0.2, "tags": ["a"], "more": None},
    {"prompt": [{"role": "user", "content": "é?"}], "answer": -1, "level": 1e-300, "tags": [],
     "more": {"x": 1}},
]
FLAT = [{"prompt": "1+1=", "answer": 2, "level": 0.5}, {"prompt": "2+2=", "answer": 4, "level": None}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/realhf"


def written(rows, path: Path) -> list[dict]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(DatasetConfig(str(path)))


def test_rows_of_python_are_those_of_a_file(tmp_path, cache):
    of_file = written(ROWS, tmp_path / "rows.jsonl")
    forms = [ROWS, tuple(ROWS), iter(ROWS), lambda: (row for row in ROWS)]
    configs = [DatasetConfig(rows) for rows in forms]
    assert [read_rows(config) for config in configs] == [of_file] * 4
    assert len({config.path for config in configs}) == len(list(cache.iterdir())) == 1
    assert DatasetConfig(ROWS[:1]).path != configs[0].path
    assert read_rows(DatasetConfig(({"prompt": str(i)} for i in iter(int, 1)), max_rows=3)) == [
        {"prompt": "0"}] * 3  # Of a generator without end.
    assert read_rows(DatasetConfig([{"prompt": "a", "day": date(2026, 1, 2)}]))[0]["day"] == "2026-01-02"


def test_tables_have_their_rows_and_nulls():
    frame = pandas.DataFrame(FLAT)
    for table in (frame, pyarrow.Table.from_pylist(FLAT), datasets.Dataset.from_list(FLAT)):
        assert read_rows(DatasetConfig(table)) == FLAT
    chosen = datasets.Dataset.from_list(FLAT).select([1])
    assert read_rows(DatasetConfig(chosen)) == FLAT[1:]


def test_an_experiment_takes_rows_where_it_takes_a_data_set():
    splits = datasets.DatasetDict({"easy": datasets.Dataset.from_list(FLAT[:1])})
    experiment = GRPO(dataset=iter(FLAT), eval_dataset=splits)
    assert read_rows(experiment.dataset) == FLAT
    assert read_rows(experiment.eval_dataset["easy"]) == FLAT[:1]
    experiment.eval_dataset = FLAT
    assert read_rows(experiment.eval_dataset) == read_rows(Evaluation(FLAT).dataset) == FLAT
    mixture = DatasetMixture(parts=(FLAT, DatasetConfig(FLAT[1:])))
    assert [read_rows(part) for part in mixture.parts] == [FLAT, FLAT[1:]]
    assert GRPO(dataset="rows.jsonl").dataset == DatasetConfig("rows.jsonl")


@pytest.mark.parametrize("rows, sentence", [
    (5, "path is of type int: it must be a file"),
    ([], "path is an empty list: it must have at least one row"),
    (iter(()), "path is an empty tuple_iterator: it must"),
    (pandas.DataFrame({"prompt": []}), "path is an empty DataFrame: it must"),
    (datasets.Dataset.from_list(FLAT).select([]), "path is an empty Dataset: it must"),
    ([{"prompt": "1"}, "2"], "path: row 1 is of type str: it must be a dict"),
    ([{"prompt": object()}], "path: row 0 has a value of type object; store it as text"),
    (datasets.DatasetDict({"train": datasets.Dataset.from_list(FLAT)}),
     "path is a DatasetDict: take one of its splits, train"),
])
def test_other_values_are_refused(rows, sentence, cache):
    with pytest.raises(ValueError, match=sentence):
        DatasetConfig(rows)
    assert not cache.exists() or not list(cache.iterdir())


def test_csv_has_numbers_where_all_values_are_numbers(tmp_path):
    path = tmp_path / "rows.csv"
    text = '\ufeffprompt,answer,code,level\n"1 + 1,\n""well""",2,007,1.5\nb,,8,-2e3\n'
    path.write_text(text)
    rows = [{"prompt": '1 + 1,\n"well"', "answer": 2, "code": "007", "level": 1.5},
            {"prompt": "b", "answer": None, "code": "8", "level": -2000.0}]
    assert read_rows(DatasetConfig(str(path))) == rows
    (tmp_path / "rows.tsv").write_text("prompt\tanswer\na,b\t3\n")
    assert read_rows(DatasetConfig(str(tmp_path / "rows.tsv"))) == [{"prompt": "a,b", "answer": 3}]


def test_a_list_of_json_is_a_file_of_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=1))
    assert read_rows(DatasetConfig(str(path))) == ROWS
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_rows(DatasetConfig(str(path))) == ROWS
