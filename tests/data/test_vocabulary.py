"""Tests first_differing_token on tokenizer.json files of both forms."""

import json

import pytest

from realhf.data.light_tokenizer import first_differing_token


def _write(path, vocabulary, added=()):
    tokens = [{"id": number, "content": content} for number, content in added]
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return path


PLAIN = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "theirs, added, difference",
    [
        (PLAIN, (), None),
        ({"a": 0, "b": 1}, (), None),  # It is only shorter.
        ({"a": 0, "b": 1, "c": 2, "<pad>": 3}, [(3, "<pad>")], None),
        ({"a": 0, "b": 1, "<pad>": 2}, [(2, "<pad>")], None),  # An added token stands for an unused one.
        ({"a": 0, "c": 1, "b": 2}, (), (1, "b", "c")),
        ([["a", 0.0], ["b", -1.0], ["x", -2.0]], (), (2, "c", "x")),
    ],
)
def test_the_first_token_that_differs(tmp_path, theirs, added, difference):
    ours = _write(tmp_path / "ours.json", PLAIN)
    assert first_differing_token(ours, ours) is None
    assert first_differing_token(ours, _write(tmp_path / "theirs.json", theirs, added)) == difference


def test_a_malformed_file_is_named(tmp_path):
    (tmp_path / "theirs.json").write_text("{}")
    with pytest.raises(ValueError, match="theirs.json is no tokenizer.json"):
        first_differing_token(_write(tmp_path / "ours.json", PLAIN), tmp_path / "theirs.json")


CHATS = [(3, "<s>"), (4, "<turn>"), (5, "<end>"), (6, "<pad>"), (7, "<free>")]


@pytest.mark.parametrize(
    "theirs, difference",
    [
        (CHATS, None),
        ([(3, "<s>"), (5, "<turn>"), (4, "<end>"), (6, "<pad>")], (4, "<turn>", "<end>")),  # Exchanged.
        ([(3, "<s>"), (4, "<turn>"), (5, "<stop>"), (6, "<pad>")], (5, "<end>", "<stop>")),  # In our chats.
        ([(3, "<s>"), (4, "<turn>"), (9, "<end>")], (5, "<end>", None)),  # It is at another place.
        ([(3, "<s>"), (4, "<turn>"), (5, "<end>"), (7, "<pad>"), (8, "<free>")], (7, "<free>", "<pad>")),
        ([(3, "<s>"), (4, "<turn>"), (5, "<end>"), (6, "[PAD]"), (7, "<other>")], None),  # In no text.
        ([(3, "<s>"), (4, "<turn>"), (5, "<end>"), (9, "<pad>")], None),
        ([(3, "<bos>"), (4, "<turn>"), (5, "<end>")], (3, "<s>", "<bos>")),
    ],
)
def test_added_tokens_that_texts_have(tmp_path, theirs, difference):
    for name, added in (("ours", CHATS), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        _write(tmp_path / name / "tokenizer.json", PLAIN, added)
    settings = {"bos_token": "<s>", "pad_token": "<pad>", "chat_template": "<turn>{{ messages }}<end>"}
    (tmp_path / "ours" / "tokenizer_config.json").write_text(json.dumps(settings))
    files = (tmp_path / name / "tokenizer.json" for name in ("ours", "theirs"))
    assert first_differing_token(*files) == difference
