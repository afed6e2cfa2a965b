"""A short run of benchmarks/fuzz/inputs.py, the same cases every time, and faults that longer ones found."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from benchmarks.fuzz.cases import KINDS, Case, write_task
from benchmarks.fuzz.documents import CLUSTERS, EXPERIMENT, MANIFEST, METRICS, PLANS
from benchmarks.fuzz.run_case import run_case
from realhf.checkpoint.run_state import Manifest
from realhf.cli.main import main
from realhf.errors import UserError, one_line
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.planner.profile import Profile
from tests.planner.test_profile import DOCUMENT as PROFILE

NUM_CASES = {
    "override": 10, "model config": 30, "profile file": 25, "tokenizer": 12, "special file": 30,
    "long row": 2,
}
SECONDS = 60.0
MOVE = ["realloc", "--model", "tiny", "--src", "t2@0-1", "--dst", "d2@0-1"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    write_task(directory)
    return directory


@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_get_one_sentence(kind, share, task, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    num_cases = max(1, round(share * NUM_CASES.get(kind, 40)))

    @settings(
        max_examples=num_cases, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind]())
    def try_one(case: Case) -> None:
        _, fault = run_case(case, task, seconds=SECONDS)
        assert fault is None, fault

    try_one()


def test_the_undamaged_inputs_are_accepted(task, capsys):
    files = {"plan.yaml": PLANS[0], "cluster.yaml": CLUSTERS[0]}
    for name, document in files.items():
        (task / name).write_text(yaml.safe_dump(document))
    assert main(["check", str(task / "exp.py"), "--plan", str(task / "plan.yaml")]) == 0
    assert main([*MOVE, "--cluster", str(task / "cluster.yaml")]) == 0
    assert EXPERIMENT["()"] == "GRPO"


def refused(words, capsys) -> str:
    """Return the sentence with which a command is refused."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("realhf: ") and err.count("\n") == 1
    return err


def test_a_message_is_one_printable_line_of_bounded_length():
    assert one_line("a\n  b\x1b[2J\ufeffc") == "a b\\x1b[2J\\ufeffc"
    assert one_line("a" * 100) == "a" * 100
    long = one_line(f"first {'x' * 10**6} last")
    assert long.startswith("first") and long.endswith("last") and len(long) < 1500


@pytest.mark.parametrize(
    "layout, what",
    [
        ("d10000000000@0-9999999999", "rank 9999999999 in '0-9999999999' is too high: legal are 0 to 4095"),
        (f"d1@{','.join(['0-4095'] * 1000)}", "a mesh has more than 4096 ranks"),
    ],
)
def test_huge_meshes_are_refused_at_once(layout, what, capsys):
    assert what in refused([*MOVE[:-1], layout], capsys)


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"intra_host": None}, "intra_host is None: it must give latency_seconds"),
        ({"device_memory_bytes": {}}, "device_memory_bytes is {}: it must be a number above 0"),
        ({"device_memory_bytes": None}, "device_memory_bytes is None: it must be a number above 0"),
        ({"host_memory_bytes": 10**400}, "a number of 401 characters is not read"),
        ({"device_memory_bytes": float("inf")}, "device_memory_bytes is inf: it must be a number above 0"),
        ({"devices_per_host": 5000}, "devices_per_host is 5000: it must be at most 1024"),
        ({"num_hosts": 10**9}, "devices: there can be at most 4096"),
    ],
)
def test_fields_of_clusters(fields, what, tmp_path, capsys):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTERS[1] | fields))
    sentence = refused([*MOVE, "--cluster", str(path)], capsys)
    assert str(path) in sentence and what in sentence


@pytest.mark.parametrize("name, option", [("plan.yaml", "--plan"), ("cluster.yaml", "--cluster")])
def test_deeply_nested_yaml(name, option, task, tmp_path, capsys):
    path = tmp_path / name
    path.write_text("[" * 3000)
    sentence = refused(["check", str(task / "exp.py"), option, str(path)], capsys)
    assert f"{path} is nested too deeply" in sentence


def test_deeply_nested_json(task, tmp_path, capsys):
    (task / "rows.jsonl").write_text("[" * 100_000 + "\n")
    assert "rows.jsonl line 1 is nested too deeply" in refused(["check", str(task / "rows.py")], capsys)
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"model config {path} is nested too deeply"):
        ModelConfig.load(str(path))


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: it must be at most 1024"),
        ({"hidden_size": 10**30}, "it must be at most 16777216"),
        ({"rope_theta": 10**400}, "it has a whole number of 401 digits"),
    ],
)
def test_huge_models_are_refused(fields, what, tmp_path):
    hf = json.loads((Path(__file__).parent.parent / "models/tiny.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf | fields))
    with pytest.raises(ValueError, match=what):
        ModelConfig.load(str(path))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "n_layers", "vocab_size"])
def test_huge_models_of_transformers_are_refused(name):
    """Its classes make lists with an entry for each layer."""
    hf = json.loads((Path(__file__).parent.parent / "models/gemma-2-2b.json").read_text())
    with pytest.raises(ValueError, match=f"{name} is 4000000000000: it must be at most"):
        TransformersConfig.from_hf(hf | {name: 4 * 10**12})


@pytest.mark.parametrize("fields", [{"dtype": {}}, {"dtype": "float3"}])
def test_tables_of_a_profile_have_a_known_dtype(fields, tmp_path):
    path = tmp_path / "profile.yaml"
    models = [{**PROFILE["models"][0], **fields}]
    path.write_text(yaml.safe_dump({**PROFILE, "models": models}))
    with pytest.raises(UserError, match=r"profile.yaml: models\[0\].dtype is .*: legal are"):
        Profile.load(str(path))


def test_the_machine_of_a_profile_is_a_mapping(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({**PROFILE, "machine": [1]}))
    with pytest.raises(UserError, match=r"profile.yaml: machine is \[1\]: it must map names to values"):
        Profile.load(str(path))


def test_shapes_of_a_profile_are_plain_values(tmp_path):
    path = tmp_path / "profile.yaml"
    shape = {**PROFILE["models"][0]["shape"], "family": {}}
    path.write_text(yaml.safe_dump({**PROFILE, "models": [{**PROFILE["models"][0], "shape": shape}]}))
    with pytest.raises(UserError, match=r"models\[0\].shape.family is {}"):
        Profile.load(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"step": None}, {"files": {"../x": MANIFEST["files"]["metrics.jsonl"]}}, {"sets": {"actor": {}}},
        {"files": {"x": []}}, {"more": 1}, {"ranks": 3},
    ],
)
def test_manifests_of_another_form_are_refused(change, tmp_path):
    text = json.dumps(MANIFEST | change).encode()
    (tmp_path / "metrics.jsonl").write_bytes(METRICS)
    (tmp_path / "manifest.json").write_bytes(text)
    (tmp_path / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")
    with pytest.raises(ValueError, match=f"{tmp_path}/manifest.json is no manifest of a checkpoint"):
        Manifest.load(tmp_path)
