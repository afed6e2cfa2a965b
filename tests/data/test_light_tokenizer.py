"""Compares LightTokenizer with transformers' tokenizer, which runs use, and tokenizers with one another."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.data.light_tokenizer import LightTokenizer, first_differing_token
from realhf.data.loader import load_tokenizer
from realhf.data.tokenizer_process import render_chat
from tests.data.test_data import TEMPLATE
from tests.runtime.tiny import write_task
from tests.tokenizers import byte_tokenizer

CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


@pytest.fixture(params=["chat_template.jinja", "tokenizer_config.json", "by name"])
def directory(request, tmp_path):
    """Write a tokenizer whose chat template is in one of the files that may have it."""
    task = write_task(tmp_path)
    if request.param == "chat_template.jinja":
        (task / request.param).write_text(TEMPLATE)
        return task
    template = TEMPLATE if request.param != "by name" else [{"name": "default", "template": TEMPLATE}]
    path = task / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return task


def test_it_agrees_with_transformers(directory):
    ours, theirs = LightTokenizer(str(directory)), load_tokenizer(str(directory))
    assert ours.eos_token_id == theirs.eos_token_id == 1
    assert ours.encode("1+1= a") == theirs.encode("1+1= a")
    assert ours.decode(ours.encode("1+1= a")) == "1+1= a"
    for more in (False, True):
        text, _ = render_chat(ours, CHAT, add_generation_prompt=more)
        theirs_ids = theirs.apply_chat_template(CHAT, add_generation_prompt=more, return_dict=False)
        assert ours.encode(text, add_special_tokens=False) == theirs_ids


@pytest.mark.slow
def test_chats_leave_torch_alone(tmp_path):
    (write_task(tmp_path) / "chat_template.jinja").write_text(TEMPLATE)
    code = (
        "import sys; from realhf.data.light_tokenizer import LightTokenizer\n"
        "from transformers.utils.chat_template_utils import render_jinja_template\n"
        f"LightTokenizer({str(tmp_path)!r}); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_tokens_that_only_the_settings_have(tmp_path):
    """transformers adds them to those of tokenizer.json."""
    task = write_task(tmp_path)
    path = task / "tokenizer_config.json"
    shape = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    settings = json.loads(path.read_text()) | {
        "bos_token": "<s>", "added_tokens_decoder": {
            "18": shape | {"content": "<s>", "special": True},
            "19": shape | {"content": "<turn>", "special": False}}}
    path.write_text(json.dumps(settings))
    ours, theirs = LightTokenizer(str(task)), load_tokenizer(str(task))
    for text in ("<s>1+1=<turn>2", "1<turn>", "1+1="):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("<turn>") == [19] and ours.largest_id == 19


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


def test_a_class_of_transformers_that_does_not_follow_the_file_is_told(tmp_path, capsys):
    """Qwen2's class has a normalizer of its own; the general one takes the file's."""
    whole = json.loads((Path(byte_tokenizer(("<eos>", "<bos>"), None)) / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"normalizer": {"type": "Lowercase"}}))
    for kind, is_told in (("Qwen2Tokenizer", True), ("PreTrainedTokenizerFast", False)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        tokenizer = load_tokenizer(str(tmp_path))
        light = LightTokenizer(str(tmp_path))
        assert (tokenizer.encode("Aa", add_special_tokens=False) == light.encode("Aa")) != is_told
        says = f"transformers reads it as {kind}, which does not follow"
        assert (says in capsys.readouterr().err) == is_told
