"""Files that strangers wrote: nothing hangs, takes memory without end, or ends in a traceback.

`make_fifo` replaces a file by a FIFO that nobody writes to: a reader that opens it waits for ever.
"""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from realhf.checkpoint.run_state import FORMAT, Manifest, SavedTensors, check_file
from realhf.checkpoint.tensor_files import find_tensors, pack_header, read_header
from realhf.cli.main import main
from realhf.cluster import Cluster
from realhf.data.dataset import DatasetConfig
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import load_tokenizer
from realhf.data.rows import load_rows
from realhf.data.sequence_tokens import end_of_turn
from realhf.data.tokenized import TokenizedRows
from realhf.data.tokenizer_process import _renderer, render_chat
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.job_process import JobEnded, JobProcess
from realhf.models.model_config import ModelConfig
from realhf.planner.profile import Profile
from realhf.user_input.files import (
    MAX_ROW_BYTES,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
    require_regular_files,
)
from tests.cli_tools import REPO, write_experiment
from tests.samples import marked

CHAT = [{"role": "user", "content": "1+1="}]


def make_fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.fixture
def task(tmp_path) -> Path:
    """Return the directory of an experiment, whose files a test may damage."""
    write_experiment(tmp_path, steps=1, eval_dataset=None, batch_size=2, model={})
    return tmp_path


# Files at which every reader of the package ends.


@pytest.mark.parametrize(
    "kind, what", [("fifo", "a FIFO"), ("device", "a device"), ("directory", "Is a directory"),
                   ("loop", "symbolic links"), ("gone", "No such file")])
def test_only_regular_files_are_opened(kind, what, tmp_path):
    path = tmp_path / "file"
    make = {
        "fifo": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir, "loop": lambda: path.symlink_to(path), "gone": lambda: None}
    make[kind]()
    with pytest.raises(OSError, match=what):
        open_regular(path)


def test_links_are_followed_unless_they_may_not_be(tmp_path):
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert read_bytes(tmp_path / "link", most=1) == b"x"
    with pytest.raises(OSError, match="a symbolic link"):
        read_bytes(tmp_path / "link", most=1, follow=False)
    with pytest.raises(OSError, match="it has 1 B, and at most 0 B are read"):
        read_bytes(tmp_path / "there", most=0)


@pytest.mark.parametrize(
    "text, what",
    [
        ("[" * 100_000, "is nested too deeply"), ("1" * 5000, "a whole number of 5000 digits"),
        ("-" + "1" * 400, "a whole number of 401 digits"), ("{", "is not JSON"),
        ("\xff", "is not UTF-8 text"),
    ])
def test_json_that_no_reader_survives(text, what, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=what):
        read_json(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_fifo_in_a_model_directory(name, task, capsys):
    path = make_fifo(task / name)
    assert main(["check", str(task / "tiny_experiment.py")]) == 2
    said = capsys.readouterr().err
    assert f"{path} cannot be read: it is a FIFO" in said and said.count("\n") == 1
    if name != "config.json":
        with pytest.raises(UserError, match=f"{path} cannot be read: it is a FIFO"):
            load_tokenizer(str(task))


def test_fifos_that_the_command_line_names(task, capsys):
    fifo = str(make_fifo(task / "fifo.yaml"))
    experiment = str(task / "tiny_experiment.py")
    for words in (
        ["check", experiment, "--plan", fifo], ["check", experiment, "--cluster", fifo],
        ["plan", experiment, "--profile", fifo], ["check", fifo],
        ["check", experiment, "--dataset.path", fifo], ["check", experiment, "--actor.model", fifo],
        ["plan", experiment, "--cluster", "cpu-laptop", "-o", fifo],
    ):
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert said.startswith("realhf: ") and said.count("\n") == 1 and "fifo.yaml" in said, said


def test_fifos_among_the_weights(tmp_path):
    make_fifo(tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with pytest.raises(ValueError, match="part.safetensors cannot be read: it is a FIFO"):
        find_tensors(tmp_path)
    make_fifo(index)
    with pytest.raises(ValueError, match="index.json cannot be read: it is a FIFO"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "config.json", "eval.jsonl"])
def test_fifos_in_a_run_directory(name, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    make_fifo(run / name)
    for words in (["rollouts", str(run)], ["scaling", "fit", str(run)], ["rollouts", str(run), "--eval"]):
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


# YAML.

LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    "text, what",
    [
        (LAUGHS, r"anchors \(&\) and aliases \(\*\) are not read"),
        ("calls: *a", r"anchors \(&\) and aliases \(\*\) are not read"),
        ("calls: {<<: {a: 1}}", r"merge keys \(<<\) are not read"),
        ("calls: !!int ''", r"tags \(!\) are not read"),
        ("calls: !!python/object/apply:os.system [ls]", r"tags \(!\) are not read"),
        (f"calls: {'9' * 5000}", "a number of 5000 characters is not read"),
        (f"calls: 0x{'f' * 5000}", "a number of 5002 characters is not read"),
        ("# \n" * 400_000, "at most 262 kB are read"),
    ])
@pytest.mark.parametrize("load", [ExecutionPlan.load, Cluster.load, Profile.load])
def test_yaml_that_grows_or_runs(load, text, what, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=f"{path}.*{what}"):
        load(str(path))
    assert time.process_time() - began < 2.0


@pytest.mark.slow
def test_values_in_messages_are_cut(tmp_path, capsys):
    cluster = yaml.safe_load((REPO / "plans/clusters/cpu-laptop.yaml").read_text())
    path = tmp_path / "cluster.yaml"
    for value in ("y" * 100_000, ["y"] * 50_000, {"y": "z" * 100_000}):
        path.write_text(yaml.safe_dump(cluster | {"device_type": value}))
        with pytest.raises(UserError) as caught:
            Cluster.load(str(path))
        assert len(str(caught.value)) < 600 and "device_type is " in str(caught.value)


# Tokenizers and chat templates.


@pytest.mark.parametrize(
    "template, what",
    [
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1.07 GB of memory"),
        ("{{ 'a' * 3 * 10 ** 7 }}", "writes more than 4 MB"),
        pytest.param("{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                     "it took more than 5 s of processor time", marks=pytest.mark.slow),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ])
def test_chat_templates_have_limits(template, what, task):
    (task / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=what):
        render_chat(LightTokenizer(str(task)), CHAT)
    (task / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert render_chat(LightTokenizer(str(task)), CHAT) == ("1+1=", [])  # The next one is served.


def test_the_last_good_chat_is_named(task, tmp_path):
    """The third row's chat takes too much memory."""
    (task / "chat_template.jinja").write_text("{{ '1' * 10 ** (messages | length) }}")
    rows = [{"prompt": CHAT * number} for number in (1, 2, 11)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for tokenizer in (LightTokenizer(str(task)), load_tokenizer(str(task))):
        with pytest.raises(UserError, match="line 3: .* needs more than .* the last good one .* of line 2"):
            TokenizedRows(DatasetConfig(str(path)), keys=("prompt_ids",), tokenizer=tokenizer)


def tokenizer_json(task: Path, **fields) -> Path:
    path = task / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


PANICS = {
    "when it allocates": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}},
    "when it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "when it tokenises": {"post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [],
        "special_tokens": {}}},
}


@pytest.mark.parametrize("when", PANICS)
def test_a_tokenizer_that_panics_is_a_sentence(when, task, capfd):
    path = tokenizer_json(task, **PANICS[when])
    for load in (LightTokenizer, load_tokenizer):
        with pytest.raises(UserError, match=f"{path} cannot be read: .*(PanicException: |SIGABRT)"):
            load(str(task))
    assert main(["check", str(task / "tiny_experiment.py")]) == 2
    said = capfd.readouterr().err  # The library's own words about the panic are not shown.
    assert said.startswith("realhf: ") and said.count("\n") == 1


def test_a_tokenizer_that_pads_is_not_obeyed(task):
    """Padding to a billion tokens would end the process; transformers does not pad, either."""
    plain = LightTokenizer(str(task)).encode("1+1=")
    tokenizer_json(task, padding={
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "a"})
    assert LightTokenizer(str(task)).encode("1+1=") == plain == load_tokenizer(str(task)).encode("1+1=")


@pytest.mark.parametrize(
    "fields", [{"eos_token": 3}, {"eos_token": {"x": 1}}, {"chat_template": 5},
               {"chat_template": [{"name": "default", "template": 7}]}])
def test_junk_in_tokenizer_config(fields, task):
    path = task / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match="is no token|must be text"):
        LightTokenizer(str(task))


# Rows.


@pytest.mark.slow
def test_a_row_of_60_mb_is_refused(tmp_path):
    long = "x" * (60 << 20)
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"prompt": long}) + "\n")
    with pytest.raises(UserError, match=f"{jsonl} line 3 has more than 4 MB"):
        load_rows(DatasetConfig(str(jsonl)), ("prompt_ids",))
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", long]}), parquet)
    with pytest.raises(UserError, match=f"{parquet} row 1 has more than 4 MB|mean row has more than"):
        load_rows(DatasetConfig(str(parquet)), ("prompt_ids",))
    long = "x" * MAX_ROW_BYTES
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", long, "b"]}), parquet)
    with pytest.raises(UserError, match=f"{parquet} row 1 has more than 4 MB"):
        load_rows(DatasetConfig(str(parquet)), ("prompt_ids",))


@pytest.mark.slow
def test_a_small_parquet_file_that_is_large_in_memory(tmp_path, monkeypatch):
    """One text of a megabyte stands in 100,000 rows: the file has 1 MB and its rows 100 GB."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("realhf.data.row_files._MAX_EXPANSION", 20)
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000), ["y" * (1 << 20)])
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), path, store_schema=False)
    assert path.stat().st_size < 2 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="cannot be read as parquet: its rows have more than"):
        load_rows(DatasetConfig(str(path)), ("prompt_ids",))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000


def test_blank_lines_cost_no_time_of_their_own(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" * 200_000 + '{"prompt": "a"}\n' + "\n" * 200_000)
    began = time.process_time()
    assert [row["prompt"] for row in load_rows(DatasetConfig(str(path)), ("prompt_ids",))] == ["a"]
    assert time.process_time() - began < 2.0


# Checkpoints whose checksums are right.


def write_checkpoint(directory: Path, change) -> Path:
    """Write a checkpoint of one tensor, with the fields that `change` has changed and right checksums."""
    name = "rank_00000.safetensors"
    header, _ = pack_header([("actor/master/w[0:4,0:2]", "F32", (4, 2))])
    files = {"metrics.jsonl": b'{"step": 3}\n', name: header + bytes(32)}
    actor = {
        "kinds": ["master"], "pieces": {"w": [[name, [[0, 4], [0, 2]]]]}, "num_steps": 3, "num_skipped": 0,
        "model": {}}
    fields = {
        "step": 3, "num_ranks": 1, "experiment": {}, "plan": {}, "versions": {}, "run": {}, "ranks": [{}],
        "format": FORMAT, "sets": {"actor": actor}, "files": {key: {} for key in files}}
    change(fields, files)
    for key, data in files.items():
        (directory / key).write_bytes(data)
        if fields["files"] and isinstance(fields["files"], dict):
            fields["files"][key] = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(fields).encode()
    (directory / "manifest.json").write_bytes(text)
    (directory / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")
    return directory


def check_whole(directory: Path) -> None:
    manifest = Manifest.load(directory)
    for name in manifest.files:
        check_file(directory, name, manifest)


def piece(fields) -> list:
    return fields["sets"]["actor"]["pieces"]["w"][0]


JUNK = {
    "ranks without end": lambda f, d: f.update(num_ranks=10**9),
    "fewer ranks than stated": lambda f, d: f.update(num_ranks=2),
    "a negative step": lambda f, d: f.update(step=-5),
    "a step of 200 digits": lambda f, d: f.update(step=10**200),
    "a step that is no number": lambda f, d: f.update(step=float("nan")),
    "a piece elsewhere": lambda f, d: piece(f).__setitem__(0, "/etc/passwd"),
    "a piece above": lambda f, d: piece(f).__setitem__(0, "../x"),
    "a piece without a checksum": lambda f, d: piece(f).__setitem__(0, "rank_00001.safetensors"),
    "a piece of the metrics": lambda f, d: piece(f).__setitem__(0, "metrics.jsonl"),
    "a piece that is a number": lambda f, d: piece(f).__setitem__(0, 5),
    "a region of text": lambda f, d: piece(f).__setitem__(1, [["0", "4"], [0, 2]]),
    "an empty region": lambda f, d: piece(f).__setitem__(1, [[4, 4], [0, 2]]),
    "a region from below 0": lambda f, d: piece(f).__setitem__(1, [[-4, 4], [0, 2]]),
    "a region of other dims": lambda f, d: f["sets"]["actor"]["pieces"]["w"].append([piece(f)[0], [[0, 4]]]),
    "a region that the file lacks": lambda f, d: piece(f).__setitem__(1, [[0, 8], [0, 2]]),
    "no pieces": lambda f, d: f["sets"]["actor"]["pieces"].update(w=[]),
    "other kinds": lambda f, d: f["sets"]["actor"].update(kinds=["weights"]),
    "kinds that are numbers": lambda f, d: f["sets"]["actor"].update(kinds=[1]),
    "steps below 0": lambda f, d: f["sets"]["actor"].update(num_steps=-7),
    "sets as a list": lambda f, d: f.update(sets=[]),
    "files as a list": lambda f, d: f.update(files=[]),
    "no files": lambda f, d: f.update(files={}),
    "a file elsewhere": lambda f, d: f["files"].update({"/dev/zero": {"num_bytes": 0, "sha256": "x"}}),
    "ranks as numbers": lambda f, d: f.update(ranks=[5]),
    "another format": lambda f, d: f.update(format=[]),
    "a huge count": lambda f, d: f.update(run={"number": 10**30}),
    "metrics that are no JSON": lambda f, d: d.update({"metrics.jsonl": b"{\n"}),
    "metrics without steps": lambda f, d: d.update({"metrics.jsonl": b"{}\n"}),
    "metrics that are a list": lambda f, d: d.update({"metrics.jsonl": b"[1]\n"}),
    "tensors that are no tensors": lambda f, d: d.update({"rank_00000.safetensors": b"\xff" * 40}),
    "an empty file of tensors": lambda f, d: d.update({"rank_00000.safetensors": b""}),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_with_right_checksums_is_a_sentence(name, tmp_path):
    write_checkpoint(tmp_path, JUNK[name])
    began = time.process_time()
    with pytest.raises(ValueError, match=f"{tmp_path}/(manifest.json|metrics.jsonl|rank_00000.safetensors)"):
        check_whole(tmp_path)
    assert time.process_time() - began < 2.0


def test_the_checkpoint_without_junk_is_accepted(tmp_path):
    check_whole(write_checkpoint(tmp_path, lambda fields, files: None))


FILES = ("manifest.json", "manifest.sha256", "metrics.jsonl", "rank_00000.safetensors")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "link", "device"])
def test_files_of_a_checkpoint_are_regular_and_lie_in_it(name, kind, tmp_path):
    checkpoint = tmp_path / "step_3"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, lambda fields, files: None)
    shutil.move(checkpoint / name, tmp_path / "outside")
    if kind == "fifo":
        os.mkfifo(checkpoint / name)
    else:
        (checkpoint / name).symlink_to("/dev/zero" if kind == "device" else tmp_path / "outside")
    what = {"fifo": "a FIFO", "link": "a symbolic link", "device": "a symbolic link"}[kind]
    with pytest.raises(ValueError, match=f"{checkpoint / name} cannot be read: it is {what}"):
        check_whole(checkpoint)


def test_a_fifo_as_config_does_not_hang_a_process(tmp_path):
    """The whole command, in a process that would otherwise wait for ever."""
    make_fifo(tmp_path / "config.json")
    words = ["realloc", "--model", str(tmp_path / "config.json"), "--src", "d1@0", "--dst", "d2@0-1"]
    done = subprocess.run(
        [sys.executable, "-m", "realhf", *words], capture_output=True, text=True, timeout=60, cwd=REPO)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    with pytest.raises(ValueError, match="config.json cannot be read: it is a FIFO"):
        ModelConfig.load(str(tmp_path))


@pytest.mark.parametrize("text", marked(["[]", "{}", '{"a":[]}', "1", '"ab"'], quick=[0, 1, 3]))
def test_json_that_grows_in_memory_is_refused_before_it_is_read(text):
    """Nine MB of `[],` took 250 MB."""
    began = time.process_time()
    for many in ("[" + f"{text}," * (21_000_000) + "0]", b"[" + f"{text},".encode() * 21_000_000 + b"0]"):
        with pytest.raises(UserError, match="the file has too many parts: at most 8,000,000 lists"):
            parse_json(many, "the file")
    assert time.process_time() - began < 3.0


def test_an_index_has_at_most_32_mb(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(b" " * (33 << 20))
    with pytest.raises(ValueError, match="index.json cannot be read: it has .*, and at most 32 MB"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("shape", [
    [1] * 17, [2**63], [10**299] * 6000, [True], [-1], [0, 10**299]], ids=range(6))
def test_shapes_that_no_tensor_has(shape, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.process_time()
    with pytest.raises(ValueError, match="its header does not say what tensor w is"):
        find_tensors(tmp_path)
    assert time.process_time() - began < 1.0


def test_a_directory_that_may_not_be_listed_is_a_sentence(tmp_path):
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # Below tmp_path, other users see nothing.
    directory.chmod(0o311)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(UserError, match=f"{directory} cannot be read: Permission denied"):
            require_regular_files(directory)
    finally:
        os.seteuid(user)
        directory.rmdir()


def test_links_in_a_checkpoint_are_refused_by_every_reader(tmp_path):
    directory = write_checkpoint(tmp_path, lambda fields, files: None)
    manifest = Manifest.load(directory)
    name = "rank_00000.safetensors"
    (directory / name).rename(directory / "outside")
    (directory / name).symlink_to(directory / "outside")
    for read in (
        lambda: read_header(directory / name, follow=False),
        lambda: list(read_json_lines(directory / name, follow=False)),
        lambda: SavedTensors(directory, "actor", manifest.sets["actor"]).read(
            "master", "w", ((0, 4), (0, 2)), torch.zeros(4, 2)),
    ):
        with pytest.raises((ValueError, OSError), match="a symbolic link"):
            read()


def test_a_process_that_does_not_start_is_no_fault_of_the_file(task, monkeypatch):
    (task / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = LightTokenizer(str(task))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    path = tokenizer_json(task, version="1.0 ")
    _renderer().close()
    with pytest.raises(ValueError, match="^the chat template cannot be tried: .* does not start"):
        render_chat(tokenizer, CHAT)
    with pytest.raises(UserError, match=f"^{path} cannot be tried: the process of .* does not start"):
        LightTokenizer(str(task))
    monkeypatch.undo()
    assert render_chat(tokenizer, CHAT)[0]


def close_output():
    """Answer no job, and go on."""
    print("ready", flush=True)
    os.close(1)
    time.sleep(30)


@pytest.mark.slow
def test_a_process_that_closes_its_output_is_named():
    process = JobProcess(__name__, main="close_output", seconds=1.0, memory_bytes=1 << 30)
    with pytest.raises(JobEnded, match="^its process closed its output; it may have 1"):
        process.answer({})


def test_a_chat_template_that_is_a_link_to_itself_is_none(tmp_path):
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "chat_template.jinja")
    assert end_of_turn(str(tmp_path)) is None
