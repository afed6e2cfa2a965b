"""Profiles: errors in files, look-ups in tables, fallback to the roofline, and a real measurement."""

import copy
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml

from realhf.calls import Output
from realhf.cluster import Cluster
from realhf.devices import chunk_sizes
from realhf.errors import UserError
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.planner import shard
from realhf.planner.call_cost import call_cost
from realhf.planner.efficiencies import Efficiencies
from realhf.planner.links import Span
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.profile import COLLECTIVES, Profile, Table
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates, SharedPrompts
from tests.cli_tools import REALHF, Command, write_experiment

CONFIG = ModelConfig.load("tiny")
ROLE = ModelRole(CONFIG, "float32", trainable=True)
ONE, TWO = Span(1, 1), Span(2, 2)
DOCUMENT = yaml.safe_load((Path(__file__).parent / "sample_profile.yaml").read_text())


def profile() -> Profile:
    return Profile.from_dict(copy.deepcopy(DOCUMENT))


def _inside(document):
    """Return the tables of links inside a host."""
    return document["links"][0]["tables"]


def rates() -> ProfiledRates:
    return ProfiledRates(profile())


def test_a_profile_survives_its_file(tmp_path: Path):
    profile().save(tmp_path / "profile.yaml")
    again = Profile.load(str(tmp_path / "profile.yaml"))
    assert again.to_dict() == profile().to_dict()
    assert again.cluster == Cluster.from_dict(DOCUMENT["cluster"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.pop("date"), "date is missing"),
        (lambda d: d.update(speed=3), "speed is not a field: legal are date, machine"),
        (lambda d: d["cluster"].update(num_hosts=0), "cluster: num_hosts is 0"),
        (lambda d: d["cluster"].pop("device_type"), "cluster.device_type is missing: measure again"),
        (lambda d: d.update(links={}), "links is of an older form: measure again with `realhf profile`"),
        (lambda d: d.update(links=3), "links must be a list, with tables in each entry"),
        (lambda d: d["links"][0].update(hosts=0), "links[0].hosts is 0: it must be a whole number"),
        (lambda d: d["links"][0].update(noise=[1]), "links[0].noise is [1]: it must map names to numbers"),
        (lambda d: _inside(d).update(tin=1), "links[0].tables.tin is not a field: legal are all_reduce"),
        (lambda d: _inside(d)["send"].update(seconds=[1]), "tables.send.seconds must be a list of 2"),
        (lambda d: _inside(d)["send"].update(bytes=[5, 5]), "tables.send.bytes is [5, 5]: it must hold"),
        (lambda d: _inside(d)["send"].pop("bytes"), "links[0].tables.send.bytes is missing"),
        (lambda d: d["memory"].update(stack=1), "memory.stack is not a field: legal are context_bytes"),
        (lambda d: d["models"][0].update(ep=0), "models[0].ep is 0"),
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
    assert r.head(ROLE, ONE, tokens=20, output=Output.LOGPROBS).seconds == 2
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


def roofline():
    """Return the rooflines of the profile's cluster, whose measured figures are reached as they are."""
    cluster = Cluster.from_dict(DOCUMENT["cluster"])
    return Rates(cluster, dataclasses.replace(Efficiencies.of(cluster), link=1.0, matmul=1.0, memory=1.0))


def test_what_was_not_measured_comes_from_the_roofline_and_is_said():
    r, roof = rates(), roofline()
    sizes = {"tokens": 300.0, "squared": 9000.0}
    others = [ModelRole(ModelConfig.load("qwen2.5-0.5b"), "float32"), ModelRole(CONFIG, "bfloat16")]
    for role in others:
        assert r.block(role, ONE, ONE, **sizes) == roof.block(role, ONE, ONE, **sizes)
        assert r.update(role, owned=5) == roof.update(role, owned=5)
    assert "not measured: block forward of qwen2 of width 896 in float32 with tp=1: its roofline" in r.notes
    head = {"tokens": 5.0, "output": Output.LOGPROBS, "backward": True}
    assert r.head(ROLE, ONE, **head) == roof.head(ROLE, ONE, **head)
    assert r.all_gather(1000, Span(4, 4)) == roof.all_gather(1000, Span(4, 4))
    assert "not measured: all-gather among 4 ranks of 1 host: the figures of the cluster's links" in r.notes
    assert r.call_seconds("generate", samples=3) == roof.call_seconds("generate", samples=3)


def test_links_between_hosts_have_tables_of_their_own():
    r = rates()
    assert r.all_gather(500, Span(2, 1)) == 20 and r.all_gather(500, Span(8, 4)) == 35
    assert r.all_gather(500, Span(4, 2)) == 20 + (35 - 20) / 3  # Between the measured two and eight.
    assert r.all_gather(500, Span(2, 2)) == 2 and r.all_to_all(500, Span(2, 2)) == 3
    assert (r.send(500, within_host=True), r.send(500, within_host=False)) == (1, 10)
    assert r.samples(500) == 11  # Its cluster has two hosts.
    one = ProfiledRates(profile(), dataclasses.replace(profile().cluster, num_hosts=1, inter_host=None))
    assert one.samples(500) == one.send(500, within_host=True)
    assert not r.notes


def test_a_split_that_was_not_measured_is_as_far_from_its_roofline_as_the_nearest():
    r, roof = rates(), roofline()
    sizes = {"tokens": 300.0, "squared": 9000.0}
    ratio = 4 / roof.block(ROLE, ONE, ONE, **sizes).seconds
    split = r.block(ROLE, TWO, ONE, **sizes)
    assert split.compute == pytest.approx(ratio * roof.block(ROLE, TWO, ONE, **sizes).compute)
    steps = {"rows": np.array([2.0]), "context": np.array([15.0])}
    (compute, _), (roof_compute, _) = (x.decode_block(ROLE, TWO, ONE, **steps) for x in (r, roof))
    ratio = 2.5 / sum(roof.decode_block(ROLE, ONE, ONE, **steps))
    assert compute == pytest.approx(ratio * roof_compute)
    name = "qwen2 of width 64 in float32 with tp=2: its roofline, scaled as measured with tp=1"
    assert {f"not measured: block forward of {name}", f"not measured: decode block of {name}"} <= set(r.notes)


def test_experts_have_tables_of_their_own():
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, expert_width=32)
    role = ModelRole(dataclasses.replace(CONFIG, family="qwen3_moe", moe=moe), "float32")
    r = rates()
    cost = r.block(role, ONE, TWO, tokens=300, squared=9000)
    # Twice an all-to-all of the rows' bytes, but at most half of the measured time.
    assert cost.seconds == 4 and cost.communication == 2
    compute, communication = r.decode_block(
        role, ONE, TWO, rows=np.array([3.0]), context=np.array([10.0]))
    assert (compute + communication).tolist() == [2]
    assert not any("block" in note for note in r.notes)
    for other in (dataclasses.replace(moe, num_experts=8), dataclasses.replace(moe, expert_width=16)):
        r = rates()
        unlike = dataclasses.replace(role, config=dataclasses.replace(role.config, moe=other))
        r.block(unlike, ONE, TWO, tokens=9, squared=9)
        assert any("block forward of qwen3_moe" in note for note in r.notes)


def test_beyond_its_reach_a_table_grows_as_the_roofline():
    r, roof = rates(), roofline()

    def compute(length, tokens):
        return roof.block(ROLE, ONE, ONE, tokens=tokens, squared=length * tokens).compute

    # Tables have sequences of up to 30 tokens, and passes of up to 900, which continue up to 3600.
    assert r.block(ROLE, ONE, ONE, tokens=3600, squared=30 * 3600).seconds == pytest.approx(12 * 4)
    assert not r.notes
    far = r.block(ROLE, ONE, ONE, tokens=7200, squared=3000 * 7200).seconds
    assert far == pytest.approx(48 * compute(3000, 7200) / compute(30, 3600))
    (note,) = r.notes
    assert "at 3000 sequence tokens (used up to 30) and 7200 tokens (used up to 3600): beyond that" in note


def test_a_profile_says_how_noisy_it_was():
    noise, sentence = profile().noise()
    assert noise == 0.06  # The median of 0.02, 0.04, 0.08 and 0.3.
    assert "by 6% (median" in sentence and "at most by 30%: send among ranks of 1 host" in sentence
    assert "quiet" not in sentence
    document = copy.deepcopy(DOCUMENT)
    document["links"][0]["noise"] = {"send": 0.9, "all_gather": 0.5}
    noise, sentence = Profile.from_dict(document).noise()
    assert noise == pytest.approx(0.29) and "the machine was not quiet (load 1.5): measure again" in sentence


def test_a_profile_of_other_processes_is_refused():
    document = copy.deepcopy(DOCUMENT) | {"machine": {"threads_per_process": 2}}
    given = Profile.from_dict(document)
    four = dataclasses.replace(given.cluster, cores_per_host=2)
    with pytest.raises(ValueError, match="of 2 threads, and 4 processes on 2 cores have 1: measure with --n"):
        ProfiledRates(given, four)
    ProfiledRates(given, dataclasses.replace(four, cores_per_host=8))
    with pytest.raises(ValueError, match="measured on cpu devices, the cluster has cuda devices"):
        ProfiledRates(given, dataclasses.replace(four, device_type="cuda"))


def test_messages_that_were_not_measured_are_said():
    document = copy.deepcopy(DOCUMENT)
    r = ProfiledRates(Profile.from_dict({**document, "links": []}))
    assert r.send(500, within_host=True) == roofline().send(500, within_host=True)
    assert r.notes == {"not measured: messages inside a host: the figures of the cluster's links": None}


def test_calls_with_a_core_for_each_rank_take_the_calm_share_of_their_seconds():
    given = Profile.from_dict({**copy.deepcopy(DOCUMENT), "calm": {"passes": 0.8}})
    r = ProfiledRates(given, dataclasses.replace(given.cluster, devices_per_host=4, cores_per_host=2))
    assert [r.crowding("train_step", busy) for busy in (1, 2, 3, 4)] == [0.8, 0.8, 1.5, 2.0]
    assert [r.crowding("generate", busy) for busy in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    assert ProfiledRates(given).crowding("train_step", 1) == 1.0


def test_stages_that_decode_take_the_measured_time_of_their_messages():
    document = copy.deepcopy(DOCUMENT)
    rows = np.array([1.0, 4.5])
    r = ProfiledRates(Profile.from_dict(document))
    assert r.decode_hop(ROLE, rows=rows).tolist() == [0, 0]
    assert any("messages between stages that decode" in note for note in r.notes)
    document["models"][0]["tables"]["decode_hop"] = {"rows": [1, 8], "seconds": [1, 3]}
    r = ProfiledRates(Profile.from_dict(document))
    assert r.decode_hop(ROLE, rows=rows).tolist() == [1, 2] and not r.notes


def test_a_generation_packs_its_weights_once(monkeypatch):
    """The seconds are those of the table for the planner's number of packed parameters, or of reading
    weights and writing copies in float32."""
    call = FunctionCall("generate", "generate", ("prompt_ids",), ("a",), role="actor")

    def cost(document, work):
        r = ProfiledRates(Profile.from_dict(document))
        return call_cost(r, call, ROLE, work, CallPlan(Layout.parse("d1@0")), per_host=2).seconds_by_cause

    document = copy.deepcopy(DOCUMENT)
    assert "packing" not in cost(document, Workload(4, 8, 8, 8))  # Its weights are small.
    monkeypatch.setattr(chunk_sizes, "LEAST_PACKED_NUMEL", 1)
    shard._multiplied_params.cache_clear()
    c = CONFIG
    params = c.num_layers * (
        c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size
    bandwidth = document["cluster"]["memory_bandwidth_bytes_per_second"]
    assert cost(document, Workload(4, 8, 8, 8))["packing"] == pytest.approx(params * 8 / bandwidth)
    document["models"][0]["tables"]["packing"] = {"parameters": [params / 2, params], "seconds": [1.0, 3.0]}
    for work in (Workload(4, 8, 8, 8), Workload(400, 8, 8, 8)):
        assert cost(document, work)["packing"] == pytest.approx(3.0)
    assert cost(document, Workload(4, 8, 8, 8, runs=2.0))["packing"] == pytest.approx(6.0)
    shard._multiplied_params.cache_clear()


def test_a_copy_in_int8_decodes_as_much_faster_as_its_roofline():
    """The table was measured with full weights; on a CPU only bfloat16 reads fewer bytes."""
    rows, context = np.array([1.0, 4.0]), np.array([20.0, 20.0])
    for dtype in ("float32", "bfloat16"):
        document = copy.deepcopy(DOCUMENT)
        document["models"][0]["dtype"] = dtype
        document["cluster"]["peak_flops"][dtype] = 1e11
        r = ProfiledRates(Profile.from_dict(document))
        role = dataclasses.replace(ROLE, dtype=dtype)
        int8 = dataclasses.replace(role, int8=True)
        options = {"rows": rows, "context": context}
        measured, copied = (sum(r.decode_block(each, ONE, ONE, **options)) for each in (role, int8))
        roofs = [sum(Rates.decode_block(r, each, ONE, ONE, **options)) for each in (role, int8)]
        assert copied == pytest.approx(measured * roofs[1] / roofs[0])
        assert any("in int8" in note for note in r.notes)


def test_a_copy_in_int8_takes_the_measured_difference_at_every_context():
    document = copy.deepcopy(DOCUMENT)
    tables = document["models"][0]["tables"]
    first = tables["decode_block"]
    tables["decode_int8"] = {"rows": first["rows"], "seconds": [1.5 * s for s in first["seconds"][0]]}
    r = ProfiledRates(Profile.from_dict(document))
    int8 = dataclasses.replace(ROLE, int8=True)
    for context in first["context_tokens"]:
        options = {"rows": np.array(first["rows"], float), "context": np.full(len(first["rows"]), context)}
        full, copied = (sum(r.decode_block(role, ONE, ONE, **options)) for role in (ROLE, int8))
        assert copied - full == pytest.approx(0.5 * np.array(first["seconds"][0]))
    assert not r.notes


def test_calls_take_the_measured_multiple_of_what_their_parts_add_up_to():
    """The multiple of the nearest split counts; calls of kinds that were not measured take what parts do."""
    call = FunctionCall("train", "train_step", (), role="actor")
    work = Workload(8, response_tokens=30)

    def cost(document, layout):
        r = ProfiledRates(Profile.from_dict(document))
        role = dataclasses.replace(ROLE, trainable=True)
        return call_cost(r, call, role, work, CallPlan(Layout.parse(layout)), per_host=2)

    document = copy.deepcopy(DOCUMENT)
    wide = {**copy.deepcopy(document["models"][0]), "tp": 4, "tables": {}}
    document["models"].append(wide)
    before = {layout: cost(document, layout) for layout in ("d1@0", "t2@0-1", "t4@0-3")}
    document["models"][0]["whole_calls"] = {"train_step": 1.25, "generate": 3.0}
    wide["whole_calls"] = {"train_step": 1.5}
    for layout, parts in before.items():
        whole = cost(document, layout)
        multiple = 1.5 if layout == "t4@0-3" else 1.25
        assert whole.seconds == pytest.approx(multiple * parts.seconds)
        parts_seconds = sum(parts.seconds_by_cause.values())
        assert sum(whole.seconds_by_cause.values()) == pytest.approx(multiple * parts_seconds)
    wide["whole_calls"] = {}
    document["models"][0]["whole_calls"] = {"forward": 1.25}
    assert cost(document, "d1@0").seconds == before["d1@0"].seconds


def test_a_disturbed_profile_says_so():
    document = copy.deepcopy(DOCUMENT)
    document["models"][0]["whole_calls"] = {"train_step": 1.25, "generate": 0.9}
    assert Profile.from_dict(document).disturbed() is None
    document["models"][0]["whole_calls"]["generate"] = 0.4
    sentence = Profile.from_dict(document).disturbed()
    assert sentence is not None and "took 0.40 times as long as its parts (generate in float32" in sentence
    document["models"][0]["whole_calls"] = {"train": 1.0}
    with pytest.raises(ValueError, match="whole_calls"):
        Profile.from_dict(document)


@pytest.mark.slow
def test_two_processes_measure_the_machine(tmp_path: Path):
    experiment, out = write_experiment(tmp_path, "ppo"), tmp_path / "profile.yaml"
    with Command(*REALHF, "profile", experiment, "--nproc", 2, "-o", out) as command:
        code, _, err = command.finish(timeout=400)
    assert code == 0, err
    measured = Profile.load(str(out))
    assert measured.cluster.devices_per_host == 2 and measured.machine["processes"] == 2
    assert measured.cluster.inter_host is None and [entry.hosts for entry in measured.links] == [1]
    assert {tables.tp for tables in measured.models} == {1, 2}
    assert "decode_hop" in measured.models[0].tables
    for tables in measured.models:
        assert {"block_forward", "block_backward", "decode_block", "decode_head"} <= tables.tables.keys()
        assert {"logprobs_backward", "values_backward", "update"} <= tables.tables.keys()
    assert measured.links[0].tables.keys() == {*COLLECTIVES, "send", "samples"}
    assert measured.links[0].noise.keys() == measured.links[0].tables.keys()
    assert measured.calls.keys() == {"generate", "forward", "train_step"}
    for entry in measured.models:
        assert entry.whole_calls.keys() == {"generate", "forward", "train_step"}
    role = measured.models[0]
    assert all(s > 0 for table in role.tables.values() for s in np.ravel(table.seconds))


@pytest.mark.slow
def test_a_profile_needs_neither_weights_nor_data(tmp_path: Path):
    """The command measures a model that has only a name, and its file has a price of each call."""
    path, out = tmp_path / "named.py", tmp_path / "profile.yaml"
    path.write_text(
        "from realhf import *\n"
        "experiment = SFT(actor=Role('tiny', dtype='float32', optimizer=OptimizerConfig()), batch_size=4,\n"
        "                 expected=Expected(prompt_tokens=8, response_tokens=8))\n")
    with Command(*REALHF, "profile", path, "--nproc", 1, "-o", out) as command:
        code, _, err = command.finish(timeout=400)
    assert code == 0 and "repeated timings vary by" in err, err
    measured = Profile.load(str(out))
    (tables,) = measured.models
    passes = {f"{name}_{way}" for name in ("block", "logprobs") for way in ("forward", "backward")}
    assert tables.tables.keys() == passes | {"update", "zero_gradients"}
    assert all(s > 0 for table in tables.tables.values() for s in np.ravel(table.seconds))
    assert tables.whole_calls.keys() == {"forward", "train_step"} and min(tables.whole_calls.values()) > 0
    call = FunctionCall("train", "train_step", (), role="role")
    rates = ProfiledRates(measured)
    plan = CallPlan(Layout.parse("d1@0"))
    assert call_cost(rates, call, ROLE, Workload(4, 8, 8, 8), plan, per_host=1).seconds > 0
    assert not rates.notes
    measured = Profile.load(str(out))
    assert measured.models[0].shape["hidden_size"] == CONFIG.hidden_size
    assert measured.links == [] and measured.cluster.intra_host.latency_seconds > 0
