"""Compares LightTokenizer with transformers' tokenizer, which runs use."""

import json
import subprocess
import sys

import pytest

from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import load_tokenizer
from realhf.data.tokenizer_process import render_chat
from tests.data.test_data import TEMPLATE
from tests.runtime.tiny import write_task

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
