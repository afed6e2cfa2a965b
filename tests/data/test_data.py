"""Compares batches with plain lists, and the loader with the tokenizer; tests errors about broken files."""

import json
import math
import random
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from realhf.data.batch import Batch, Packed
from realhf.data.dataset import DatasetConfig, needed_columns
from realhf.data.loader import Loader, load_tokenizer
from realhf.data.order import SkippingOrder, row_order
from realhf.data.rows import extra_columns, load_rows, read_rows
from realhf.errors import UserError
from realhf.runtime.compile.program import with_steps
from tests.runtime.tiny import make_experiment, write_task


def _rows_of(batch):
    """Return (id, {key: plain Python value}) of each sample."""
    columns = {}
    for key, column in batch.fields.items():
        if isinstance(column, Packed):
            column = [part.tolist() for part in column.split()]
        columns[key] = column.tolist() if isinstance(column, torch.Tensor) else list(column)
    return [(i, {k: c[n] for k, c in columns.items()}) for n, i in enumerate(batch.ids)]


def _batch(rows):
    """Make a batch from rows of (id, {"tokens", "pairs", "score", "text"})."""
    tokens = [torch.tensor(row["tokens"], dtype=torch.long) for _, row in rows]
    pairs = [torch.tensor(row["pairs"], dtype=torch.float64).view(-1, 2) for _, row in rows]
    score = torch.tensor([row["score"] for _, row in rows], dtype=torch.float64)
    fields = {"tokens": Packed.of(tokens), "pairs": Packed.of(pairs), "score": score}
    return Batch([i for i, _ in rows], {**fields, "text": [row["text"] for _, row in rows]})


def _random_rows(rng, num_rows, first_id=0):
    rows = []
    for i in range(first_id, first_id + num_rows):
        tokens, num_pairs = [rng.randrange(99) for _ in range(rng.randrange(5))], rng.randrange(3)
        pairs = [[rng.random(), rng.random()] for _ in range(num_pairs)]
        rows.append((i, {"tokens": tokens, "pairs": pairs, "score": rng.random(), "text": str(i)}))
    return rows


def test_select_and_concat_do_what_lists_do():
    rng = random.Random(0)
    for _ in range(20):
        rows = _random_rows(rng, rng.randint(1, 8))
        batch = _batch(rows)
        assert _rows_of(batch) == rows
        chosen = [rng.randrange(len(rows)) for _ in range(rng.randint(0, 6))]
        assert _rows_of(batch.select(chosen)) == [rows[i] for i in chosen]
        cut = rng.randint(0, len(rows))
        parts = [batch.select(range(cut)), batch.select([]), batch.select(range(cut, len(rows)))]
        assert _rows_of(Batch.concat(parts)) == rows
    empty = batch.select([])
    assert len(empty) == 0 and empty["pairs"].values.shape == (0, 2) and empty["score"].dtype == torch.float64


def test_packed_bytes_hold_everything_and_pick_goes_by_key():
    rows = _random_rows(random.Random(1), 4)
    batch = _batch(rows)
    assert _rows_of(Batch.unpack(batch.pack())) == rows
    assert len(Batch.unpack(batch.select([]).pack())) == 0
    assert set(batch.pick(["text"]).fields) == {"text"}
    with pytest.raises(ValueError, match="'score' has 2 entries for 4 samples"):
        Batch(batch.ids, {"score": torch.zeros(2)})


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def tokenizer(task):
    return load_tokenizer(str(task))


def _loader(path, tokenizer, *, keys=("prompt_ids", "prompt"), group_size=1, seed=0, **config):
    return Loader(
        DatasetConfig(str(path), **config), keys=keys, tokenizer=tokenizer, group_size=group_size, seed=seed
    )


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_epoch_is_another_permutation_however_it_is_cut(task, tokenizer):
    written = [json.loads(line)["prompt"] for line in (task / "data.jsonl").read_text().splitlines()]
    loader = _loader(task / "data.jsonl", tokenizer)
    num = len(loader)
    prompts = loader.batch(range(3 * num))["prompt"]
    epochs = [prompts[e * num : (e + 1) * num] for e in range(3)]
    assert all(sorted(epoch) == sorted(written) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and written not in epochs
    pieces = [loader.batch(range(i, i + 7)) for i in range(0, 3 * num - 6, 7)]
    assert [p for piece in pieces for p in piece["prompt"]] == prompts[: 7 * len(pieces)]
    other = _loader(task / "data.jsonl", tokenizer, seed=1).batch(range(num))
    assert sorted(other["prompt"]) == sorted(written) and other["prompt"] != epochs[0]
    plain = _loader(task / "data.jsonl", tokenizer, shuffle=False).batch(range(num - 2, num + 3))
    assert plain["prompt"] == [*written[-2:], *written[:3]]


def test_the_orders_of_many_parts_are_kept(monkeypatch):
    """Every part's order is drawn once, though the parts of a mixture take turns."""
    drawn = []
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or draw(seed))
    for start in range(5):
        orders = [row_order(size, start=start, count=1, seed=4242, shuffle=True) for size in range(100, 130)]
    assert len(drawn) == 30
    assert orders[3] == [draw([4242, 0]).permutation(103)[4]]


def test_row_order_covers_more_than_an_epoch_at_once():
    order = row_order(5, start=3, count=14, seed=0, shuffle=True)
    assert len(order) == 14 and sorted(order[2:7]) == sorted(order[7:12]) == list(range(5))
    assert order[5:] == row_order(5, start=8, count=9, seed=0, shuffle=True)


def test_rows_are_drawn_with_replacement():
    """Of n rows, n draws meet a share of 1 - 1/e; each draw is a function of its number."""
    order = row_order(1000, start=0, count=3000, seed=0, shuffle=True, replacement=True)
    assert [len(set(order[i : i + 1000])) for i in (0, 1000, 2000)] == pytest.approx([632] * 3, abs=40)
    assert order[1500:1510] == row_order(1000, start=1500, count=10, seed=0, shuffle=True, replacement=True)
    kept = SkippingOrder(1000, lambda row: row == 3, seed=0, shuffle=True, replacement=True)
    assert {kept[prompt] for prompt in range(5)} == {3}
    with pytest.raises(ValueError, match="replacement is True: it must be false if shuffle is"):
        DatasetConfig("rows.jsonl", shuffle=False, replacement=True)


def test_epochs_are_steps_over_the_rows_that_a_map_function_keeps(task):
    def even(row):
        return {} if int(row["answer"]) % 2 == 0 else None

    rows = read_rows(DatasetConfig(str(task / "data.jsonl")))
    num_even = sum(int(row["answer"]) % 2 == 0 for row in rows)
    for config, count in ((DatasetConfig(rows), 40), (DatasetConfig(rows, map=even), num_even),
                          (DatasetConfig(rows, max_rows=7), 7)):
        settled = with_steps(make_experiment("sft", task, dataset=config, dataset_epochs=2.5, steps=100))
        assert settled.steps == math.ceil(2.5 * count / 6)
        assert with_steps(settled).steps == settled.steps
    with pytest.raises(ValueError, match="steps is 3 and dataset_epochs 2, which are 14 steps: set one of"):
        with_steps(make_experiment("sft", task, dataset_epochs=2))
    with pytest.raises(ValueError, match="dataset_epochs is 0: it must be above 0"):
        with_steps(make_experiment("sft", task, dataset_epochs=0))


def test_groups_share_a_prompt_and_ids_go_on_over_steps(task, tokenizer):
    loader = _loader(task / "data.jsonl", tokenizer, group_size=3, keys=("prompt_ids", "prompt", "answer"))
    first, second = (loader.batch(range(i, i + 4)) for i in (0, 4))
    assert first.ids == list(range(12)) and second.ids == list(range(12, 24))
    for start in range(0, 12, 3):
        assert len(set(first["prompt"][start : start + 3])) == 1
        a, b = first["prompt"][start].rstrip("=").split("+")
        assert int(first["answer"][start]) == int(a) + int(b)
    assert [tokenizer.decode(ids) for ids in first["prompt_ids"].split()] == first["prompt"]


def test_completions_are_masked_in_and_end_with_eos(task, tokenizer):
    keys = ("sequence_ids", "response_mask", "prompt", "completion")
    batch = _loader(task / "data.jsonl", tokenizer, keys=keys).batch(range(5))
    columns = (
        batch["sequence_ids"].split(),
        batch["response_mask"].split(),
        batch["prompt"],
        batch["completion"],
    )
    for ids, mask, prompt, completion in zip(*columns, strict=True):
        assert tokenizer.decode(ids[~mask.bool()]) == prompt
        assert tokenizer.decode(ids[mask.bool()]) == completion + "<eos>"
        assert mask.tolist() == sorted(mask.tolist())


def test_chat_messages_go_through_the_tokenizers_own_template(tmp_path, tokenizer):
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'b' if m.role == 'user' else 'c' }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = _write(tmp_path / "chat.jsonl", [{"prompt": messages}, {"prompt": messages[:1]}])
    batch = _loader(path, tokenizer, shuffle=False).batch(range(2))
    texts = [tokenizer.decode(ids) for ids in batch["prompt_ids"].split()]
    assert texts == ["b 1+1= c 2", "b 1+1= a"] and batch["prompt"] == [messages, messages[:1]]


def test_long_prompts_are_left_out_and_counted(tmp_path, tokenizer):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1" * n} for n in (1, 3, 4, 9)])
    loader = _loader(path, tokenizer, max_prompt_tokens=3, shuffle=False)
    assert (len(loader), loader.counts.long_prompts) == (2, 2)
    assert loader.batch(range(3))["prompt"] == ["1", "111", "1"]
    assert len(_loader(path, tokenizer, max_prompt_tokens=4)) == 3
    with pytest.raises(UserError, match="rows.jsonl: every prompt is longer than max_prompt_tokens 0"):
        _loader(path, tokenizer, max_prompt_tokens=0)


def test_an_empty_prompt_is_refused_with_its_row(tmp_path, tokenizer):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1+1="}, {"prompt": ""}])
    with pytest.raises(UserError, match=r"rows\.jsonl line 2: the prompt has no tokens"):
        _loader(path, tokenizer)


def test_parquet_has_the_rows_of_jsonl(tmp_path, task, tokenizer):
    rows = read_rows(DatasetConfig(str(task / "data.jsonl")))
    rows = [{**row, "number": i, "tags": ["x", "y"][: i % 3]} for i, row in enumerate(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert read_rows(DatasetConfig(str(tmp_path / "data.parquet"))) == rows
    assert read_rows(DatasetConfig(str(tmp_path / "data.parquet"), max_rows=3)) == rows[:3]
    ours = _loader(tmp_path / "data.parquet", tokenizer, keys=("prompt", "tags")).batch(range(9))
    theirs = _loader(task / "data.jsonl", tokenizer).batch(range(9))
    assert ours["prompt"] == theirs["prompt"] and all(isinstance(tags, list) for tags in ours["tags"])


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("none.jsonl", None, "none.jsonl'?: there is no such file"),
        ("rows.txt", "prompt\n", "ends in '.txt'"),
        ("rows.csv", "prompt,answer\n1,2\n3,4,5\n", "rows.csv cannot be read as CSV: .* 2 columns, got 3"),
        ("rows.csv", "prompt,prompt\n1,2\n", "rows.csv: its first line has the column 'prompt' twice"),
        ("rows.csv", "prompt,answer\n", "rows.csv has no rows"),
        ("rows.json", '[{"prompt": "1"}, ["1"]]', "rows.json row 1 is list: the document must be a list"),
        ("bad.jsonl", '{"prompt": "1"}\n\n{"prompt": \n', "bad.jsonl line 3 is not JSON"),
        ("list.jsonl", '{"prompt": "1"}\n["1"]\n', "list.jsonl line 2 is list: every line must be an object"),
        ("empty.jsonl", "\n\n", "empty.jsonl has no rows"),
        ("bad.parquet", "not parquet", "bad.parquet cannot be read as parquet"),
        ("bytes.jsonl", b'\n{"prompt": "1"}\n{"prompt": "\xe4"}\n',
         r"bytes.jsonl line 3 is not UTF-8 \(byte 12 of the line is 0xe4\): save the file as UTF-8"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, sentence):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=sentence):
        read_rows(DatasetConfig(str(tmp_path / name)))


def test_a_near_name_in_the_directory_of_a_missing_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    _write(tmp_path / "data" / "train.jsonl", [{"prompt": "1"}])
    (tmp_path / "data" / "trian.txt").write_text("")  # No file of rows.
    monkeypatch.chdir(tmp_path)
    near = r" \(did you mean data/train.jsonl\?\)"
    for path, says in [("data/trian.jsonl", near), ("data/x.jsonl", ""), ("dta/train.jsonl", near),
                       ("dta/x.jsonl", "")]:
        with pytest.raises(UserError, match=f"^dataset.path '{path}': there is no such file{says}$"):
            read_rows(DatasetConfig(path))


@pytest.mark.parametrize(
    ("row", "keys", "says"),
    [
        ({"messages": []}, ("prompt_ids",), "rows with messages are whole conversations: the prompt is what"),
        ({"text": "a"}, ("prompt_ids",), "rows with text are plain text, which SFT learns"),
        ({"instruction": "a", "input": "", "output": "b"}, ("sequence_ids",), "completion_key='output'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("sequence_ids",), "preference pairs: DPO and"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("answer",), "preference pairs: DPO"),
        ({"prompt": "a", "completion": "b"}, ("is_chosen", "sequence_ids"), "with completion are for SFT"),
        ({"prompt": "a", "completion": "b", "label": True}, ("is_chosen", "sequence_ids"), "labelled"),
        ({"prompt": "a", "answer": "b"}, ("sequence_ids",), "for reinforcement learning, such as GRPO"),
    ],
)
def test_rows_of_another_algorithm_are_recognised(tmp_path, row, keys, says):
    path = _write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match="line 1: there is no column") as error:
        load_rows(DatasetConfig(str(path)), keys)
    assert says in str(error.value)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_told_from_lines(tmp_path, indent):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([{"prompt": "a"}], indent=indent))
    with pytest.raises(UserError, match=r"rows.jsonl line 1 .*: every line must be an object of its own, "):
        read_rows(DatasetConfig(str(path)))


def test_missing_columns_are_named(tmp_path, tokenizer):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1", "answer": "2"}, {"prompt": "1", "level": 3}])
    config = DatasetConfig(str(path))
    assert set(needed_columns(config, ("prompt_ids", "prompt", "answer"))) == {"prompt", "answer"}
    assert set(needed_columns(config, ("sequence_ids", "response_mask"))) == {"prompt", "completion"}
    with pytest.raises(ValueError, match="line 2: there is no column 'answer'; its columns are prompt"):
        load_rows(config, ["prompt_ids", "answer"])
    with pytest.raises(ValueError, match="line 1: there is no column 'question'"):
        _loader(path, tokenizer, prompt_key="question")
    with pytest.raises(UserError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


CHAT = [{"role": "user", "content": "1+1="}]
TEMPLATE = (
    "{% for m in messages %}{{ 'b' if m.role == 'user' else 'c' }}{{ m.content }}"
    "{% if m.role != 'user' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}c{% endif %}"
)
OF_CHATS = "a list of chat messages such as"


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        (None, f"prompt is null: it must be text, or {OF_CHATS}"),
        (7, "prompt is 7: it must be text"),
        ([], "prompt is an empty list: it must be text"),
        (["1+1="], f"prompt has the message \"1\\+1=\": it must be {OF_CHATS}"),
        ([{"role": "user"}], "prompt has a message whose content is null: it must be text"),
        ([{"from": "human", "text": "1"}], ".* with from, text: it must .* .rename `from` to role"),
        ("\ud800", "prompt has half of a character at position 0"),
    ],
)
def test_prompts_that_are_none_are_refused_with_their_line(tmp_path, prompt, sentence):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1"}, {"prompt": prompt}])
    with pytest.raises(ValueError, match=f"rows.jsonl line 2: {sentence}"):
        load_rows(DatasetConfig(str(path)), ["prompt_ids"])


@pytest.mark.parametrize(
    "prompt, completion, sentence",
    [
        ("1", None, "completion is null: it must be text"),
        ("1", CHAT, "completion is a list of chat messages, but the prompt is text: both must be messages"),
        (CHAT, [{"role": "assistant"}], "completion has a message whose content is null"),
    ],
)
def test_completions_that_are_none_are_refused_with_their_line(tmp_path, prompt, completion, sentence):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": completion}])
    load_rows(DatasetConfig(str(path)), ["prompt_ids"])  # It is not read.
    with pytest.raises(ValueError, match=f"rows.jsonl line 1: {sentence}"):
        load_rows(DatasetConfig(str(path)), ["sequence_ids"])


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "1", "answer": "2"}\n')
    config = DatasetConfig(str(tmp_path / "rows.jsonl"))
    assert read_rows(config) == [{"prompt": "1", "answer": "2"}] and extra_columns(config) == ("answer",)


def test_parquet_columns_have_the_types_of_json(tmp_path):
    row = {
        "prompt": "1", "day": date(2024, 2, 3), "price": Decimal("1.50"), "image": b"x",
        "at": {"times": [datetime(2024, 2, 3, 4, 5, tzinfo=UTC)]},
    }
    table = pyarrow.Table.from_pylist([row])
    pairs = pyarrow.array([[("a", 1), ("b", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    pyarrow.parquet.write_table(table.append_column("pairs", pairs), tmp_path / "rows.parquet")
    config = DatasetConfig(str(tmp_path / "rows.parquet"))
    columns = extra_columns(config)
    assert columns == ("day", "price", "image", "at", "pairs")
    (read,) = load_rows(config, [column for column in columns if column != "image"])
    expected = {
        "day": "2024-02-03", "price": "1.50", "at": {"times": ["2024-02-03T04:05:00+00:00"]},
        "pairs": [["a", 1], ["b", 2]],
    }
    assert {key: read[key] for key in expected} == expected == json.loads(json.dumps(expected))
    with pytest.raises(ValueError, match="rows.parquet row 0: column 'image' has a value of type bytes;"):
        load_rows(config, columns)


def _with_template(tokenizer, template):
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = template
    return tokenizer


def test_chat_completions_go_through_the_template_and_are_masked_in(tmp_path, tokenizer):
    answer = [{"role": "assistant", "content": "2"}]
    rows = [{"prompt": CHAT, "completion": answer}, {"prompt": CHAT, "completion": "2"}]
    loader = _loader(
        _write(tmp_path / "chat.jsonl", rows), _with_template(tokenizer, TEMPLATE), shuffle=False,
        keys=("sequence_ids", "response_mask"))
    batch = loader.batch(range(2))
    for ids, mask in zip(batch["sequence_ids"].split(), batch["response_mask"].split(), strict=True):
        assert tokenizer.decode(ids[~mask.bool()]) == "b1+1=c"
        assert tokenizer.decode(ids[mask.bool()]) == "2<eos>"
    assert loader.oddities.num_unlike_prompt == 0


def test_a_template_whose_generation_prompt_is_no_beginning(tmp_path, tokenizer):
    """The loss begins at the first token that differs from the prompt with its generation prompt."""
    path = _write(
        tmp_path / "chat.jsonl", [{"prompt": CHAT, "completion": [{"role": "assistant", "content": "2"}]}])
    template = TEMPLATE.replace("%}c{%", "%}ca{%")
    loader = _loader(
        path, _with_template(tokenizer, template), keys=("sequence_ids", "response_mask"))
    batch = loader.batch(range(1))
    assert tokenizer.decode(batch["sequence_ids"].values[batch["response_mask"].values.bool()]) == "2<eos>"
    assert loader.oddities.num_unlike_prompt == 1


@pytest.mark.parametrize("template", [None, "{{ raise_exception('roles must alternate') }}"])
def test_chats_that_the_tokenizer_cannot_write(tmp_path, tokenizer, template):
    path = _write(tmp_path / "chat.jsonl", [{"prompt": "1"}, {"prompt": CHAT}])
    sentence = "line 2: the tokenizer refuses the chat: TemplateError: roles must alternate"
    with pytest.raises(UserError, match="has no chat template" if template is None else sentence):
        _loader(path, _with_template(tokenizer, template))


def test_text_completions_need_an_eos_token(tmp_path, tokenizer):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1", "completion": "2"}])
    tokenizer = _with_template(tokenizer, None)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="the tokenizer has no eos token, in which completions end"):
        _loader(path, tokenizer, keys=("sequence_ids",))


def test_columns_under_keys_that_the_graph_uses_otherwise(tmp_path, tokenizer):
    path = _write(tmp_path / "rows.jsonl", [{"prompt": "1", "prompt_ids": 5, "number": 3}])
    loader = _loader(path, tokenizer, keys=("prompt_ids", "column/prompt_ids", "number"))
    batch = loader.batch(range(1))
    assert batch["column/prompt_ids"] == [5] and batch["number"] == [3]
    assert batch["prompt_ids"].lengths == [1]
