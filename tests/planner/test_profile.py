"""Profiles: errors in files, look-ups in tables, fallback to the roofline, and a real measurement."""

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml

from realhf.cluster import Cluster
from realhf.errors import UserError
from realhf.model_config import ModelConfig
from realhf.planner.problem import ModelRole
from realhf.planner.profile import Profile, ProfiledRates, Table
from realhf.planner.rates import Rates, SharedPrompts, Span
from tests.cli_tools import REALHF, Command, write_experiment

CONFIG = ModelConfig.load("tiny")
ROLE = ModelRole(CONFIG, "float32", trainable=True)
ONE, TWO = Span(1, 1), Span(2, 2)
DOCUMENT = yaml.safe_load((Path(__file__).parent / "sample_profile.yaml").read_text())


def profile() -> Profile:
    return Profile.from_dict(copy.deepcopy(DOCUMENT))


def rates() -> ProfiledRates:
    return ProfiledRates(profile())


def test_a_profile_survives_its_file(tmp_path: Path):
    profile().save(tmp_path / "profile.yaml")
    again = Profile.load(str(tmp_path / "profile.yaml"))
    assert again.to_dict() == profile().to_dict()
    assert again.cluster == Cluster.from_dict(DOCUMENT["cluster"])


def test_an_older_profile_calls_the_links_wires():
    document = copy.deepcopy(DOCUMENT)
    document["wires"] = document.pop("links")
    assert Profile.from_dict(document).to_dict() == profile().to_dict()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.pop("date"), "date is missing"),
        (lambda d: d.update(speed=3), "speed is not a field: legal are date, machine"),
        (lambda d: d["cluster"].update(num_hosts=0), "cluster: num_hosts is 0"),
        (lambda d: d["cluster"].pop("device_type"), "cluster.device_type is missing: measure again"),
        (lambda d: d["links"].update(tin=1), "links.tin is not a field: legal are all_reduce"),
        (lambda d: d["links"]["send"].update(seconds=[1]), "links.send.seconds must be a list of 2"),
        (lambda d: d["links"]["send"].update(bytes=[5, 5]), "links.send.bytes is [5, 5]: it must hold"),
        (lambda d: d["links"]["send"].pop("bytes"), "links.send.bytes is missing"),
        (lambda d: d["calls"]["forward"].update(seconds=[1, "x"]), "calls.forward.seconds[1] is 'x'"),
        (lambda d: d["calls"]["forward"].update(seconds=[1, -1]), "calls.forward.seconds[1] is -1"),
        (lambda d: d["models"][0].update(dtype="int8"), "models[0].dtype is 'int8': legal are float64"),
        (lambda d: d["models"][0].update(tp=0), "models[0].tp is 0"),
        (lambda d: d["models"][0]["shape"].pop("head_dim"), "models[0].shape.head_dim is missing"),
        (lambda d: d["models"][0]["tables"].update(block_forward=[]), "models[0].tables.block_forward is []"),
        (lambda d: d.update(models={}), "models must be a list"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, change, complaint: str):
    document, path = copy.deepcopy(DOCUMENT), tmp_path / "bad.yaml"
    change(document)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(UserError) as error:
        Profile.load(str(path))
    assert str(error.value).startswith(f"profile {path}: ") and complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_profile_is_refused():
    with pytest.raises(UserError, match="no-such-profile"):
        Profile.load("no-such-profile")


def test_interpolation_hits_what_was_measured_and_is_linear_between():
    table = Table({"rows": (1.0, 3.0, 7.0), "tokens": (10.0, 20.0)}, [[1, 2], [3, 5], [4, 8]])
    for (i, row), (j, tokens) in itertools.product(enumerate((1, 3, 7)), enumerate((10, 20))):
        assert table.at(row, tokens) == table.seconds[i][j]
    assert table.at(2, 15) == pytest.approx((1.5 + 4) / 2)
    assert table.at(100, 10) == 4  # The first axis stays at its end.
    assert table.at(1, 40) == pytest.approx(4)  # The last axis continues.
    assert table.at(1, -1000) == 0.25  # Times never reach zero.


def test_arrays_get_what_numbers_get():
    rng = np.random.default_rng(0)
    table = Table({"a": (1.0, 2.0, 5.0), "b": (1.0, 4.0, 6.0)}, rng.random((3, 3)).tolist())
    a, b = rng.uniform(0, 7, 50), rng.uniform(0, 9, 50)
    assert table.at(a, b) == pytest.approx([table.at(x, y) for x, y in zip(a, b, strict=True)])
    line = Table({"a": (1.0, 2.0, 5.0)}, [1.0, 3.0, 4.0])
    assert line.at(a) == pytest.approx([line.at(x) for x in a])


def test_rates_answer_from_the_tables():
    r = rates()
    assert r.block(ROLE, ONE, ONE, tokens=300, squared=300 * 30).seconds == 4
    assert r.block(ROLE, ONE, ONE, tokens=300, squared=300 * 20, backward=True).seconds == 3
    assert r.head(ROLE, ONE, tokens=20, output="logprobs").seconds == 2
    rows, context = np.array([1.0, 2.0]), np.array([10.0, 15.0])
    compute, communication = r.decode_block(ROLE, ONE, ONE, rows=rows, context=context)
    assert compute.tolist() == [1, 2.5] and communication.tolist() == [0, 0]
    three, twenty = np.array([3.0] * 3), np.array([20.0] * 3)
    # All rows have their own prompt, two rows share one, and all three do.
    shared = SharedPrompts(np.array([3.0, 2.0, 1.0]), 20)
    compute, _ = r.decode_block(ROLE, ONE, ONE, rows=three, context=twenty, shared=shared)
    assert compute.tolist() == [4, 3.5, 3]
    assert r.decode_head(ROLE, ONE, rows=np.array([3.0])).tolist() == [6]
    assert r.accumulate(ROLE, 1e6) == 0
    assert r.update(ROLE, owned=100) == 10 - 1
    assert r.all_gather(500, TWO) == 2
    assert r.send(500, within_host=True) == 1
    assert r.call_seconds("forward", samples=6) == 1.5


def test_what_was_not_measured_comes_from_the_roofline():
    r, roof = rates(), Rates(Cluster.from_dict(DOCUMENT["cluster"]))
    sizes = {"tokens": 300.0, "squared": 9000.0}
    others = [ModelRole(ModelConfig.load("qwen2.5-0.5b"), "float32"), ModelRole(CONFIG, "bfloat16")]
    for role in others:
        assert r.block(role, ONE, ONE, **sizes) == roof.block(role, ONE, ONE, **sizes)
        assert r.update(role, owned=5) == roof.update(role, owned=5)
    assert r.block(ROLE, TWO, ONE, **sizes).compute == roof.block(ROLE, TWO, ONE, **sizes).compute
    head = {"tokens": 5.0, "output": "logprobs", "backward": True}
    assert r.head(ROLE, ONE, **head) == roof.head(ROLE, ONE, **head)
    for span in (Span(4, 4), Span(2, 1)):
        assert r.all_gather(1000, span) == roof.all_gather(1000, span)
    assert r.send(10, within_host=False) == roof.send(10, within_host=False)
    assert r.samples(10) == roof.samples(10)
    assert r.call_seconds("generate", samples=3) == roof.call_seconds("generate", samples=3)


@pytest.mark.slow
def test_two_processes_measure_the_machine(tmp_path: Path):
    experiment, out = write_experiment(tmp_path, "ppo"), tmp_path / "profile.yaml"
    with Command(*REALHF, "profile", experiment, "--nproc", 2, "-o", out) as command:
        code, _, err = command.finish(timeout=400)
    assert code == 0, err
    measured = Profile.load(str(out))
    assert measured.cluster.devices_per_host == 2 and measured.machine["processes"] == 2
    assert {tables.tp for tables in measured.models} == {1, 2}
    for tables in measured.models:
        assert {"block_forward", "block_backward", "decode_block", "decode_head"} <= tables.tables.keys()
        assert {"logprobs_backward", "values_backward", "update"} <= tables.tables.keys()
    assert measured.links.keys() == {"all_reduce", "all_gather", "reduce_scatter", "send", "samples"}
    assert measured.calls.keys() == {"generate", "forward", "train_step"}
    role = measured.models[0]
    assert all(s > 0 for table in role.tables.values() for s in np.ravel(table.seconds))
