"""`realhf plan`: its plans are legal, fit into memory and do not change results; it refuses wrong input."""

import io
import json
import random
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import yaml

from realhf import (
    GRPO,
    SFT,
    DatasetConfig,
    DatasetMixture,
    Evaluation,
    Expected,
    MathAnswer,
    OptimizerConfig,
    Role,
)
from realhf.cli import plan
from realhf.cli import plan as plan_command
from realhf.cli.experiment_file import load_experiment
from realhf.cli.main import main, make_parser
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster, Link, host_memory_bytes
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.layout import Layout
from realhf.planner.comparisons import SizedPlan, Sizing
from realhf.planner.make import make_plan
from realhf.planner.rates import Rates
from realhf.planner.report import format_gap, nearness
from realhf.planner.search import SearchResult
from realhf.planner.step_time import predict
from realhf.user_input.shipped import dump_yaml
from tests.cli_tools import REPO, ForkedCommand, read_jsonl, untimed, write_experiment
from tests.planner.problems import random_problem
from tests.samples import drawn

PPO_7B = str(REPO / "examples/ppo_7b.py")


def _plan(capsys, *words):
    """Return the JSON answer of `realhf plan`."""
    code = main(["plan", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return write_experiment(tmp_path_factory.mktemp("plan"), "ppo", steps=2)


WHAT_IF = ("--what-if", "response_tokens=500,num_hosts=1")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return the JSON answer for PPO of 7B models on 16 GPUs, a slower network as a change, and the plan's
    file."""
    path, out = tmp_path_factory.mktemp("planned") / "plan.yaml", io.StringIO()
    words = [PPO_7B, "--cluster", "h100-2x8", "-o", str(path), "--gap", "0.05", "--json"]
    words += ["--what-if", "inter_host.bandwidth=50Gbit/s"]
    with redirect_stdout(out):
        assert main(["plan", *words]) == 0
    return json.loads(out.getvalue()), path


def test_the_answer_is_consistent(planned):
    answer, path = planned
    # The gap that was asked for, and what reserves may cost.
    assert 0 <= 1 - answer["lower_bound_seconds"] / answer["fastest_found_seconds"] <= 0.05
    assert answer["gap"] <= 0.06
    assert answer["lower_bound_seconds"] == pytest.approx(answer["step_seconds"] * (1 - answer["gap"]))
    assert answer["heuristic_step_seconds"] > answer["step_seconds"]
    plan = ExecutionPlan.load(str(path))
    assert {name: str(how.layout) for name, how in plan.calls.items()} == {
        name: call["layout"] for name, call in answer["calls"].items()
    }
    assert plan.predicted["step_seconds"] == pytest.approx(answer["step_seconds"], rel=1e-5)
    model_calls = {name: call for name, call in answer["calls"].items() if "seconds" in call}
    assert set(model_calls) == {"actor_generate", "reward_forward", "ref_forward", "critic_forward",
                                "actor_train", "critic_train"}
    for call in model_calls.values():
        assert sum(call["parts"].values()) == pytest.approx(call["seconds"], rel=1e-6)
    memory = answer["memory"]
    assert set(memory["peaks"]) == {str(rank) for rank in range(16)}
    for peak in memory["peaks"].values():
        assert peak["bytes"] == pytest.approx(sum(peak["parts"].values()))
        assert peak["bytes"] <= memory["available_bytes"]
    activities = {a["name"]: a for a in answer["timeline"]["activities"] if a["kind"] != "realloc"}
    for name, call in model_calls.items():
        span = activities[name]["end"] - activities[name]["start"]
        assert span == pytest.approx(call["seconds"])
    busy = [0.0] * 16
    for activity in activities.values():
        for rank in range(activity["first_rank"], activity["first_rank"] + activity["num_ranks"]):
            busy[rank] += (activity["end"] - activity["start"]) / answer["step_seconds"]
    assert [1 - share for share in busy] == pytest.approx(answer["timeline"]["idle"], abs=1e-6)


@pytest.mark.slow
def test_the_table_names_every_call_and_draws_the_step(capsys):
    assert main(["plan", PPO_7B, "--cluster", "h100-2x8", "--time-limit", "6", *WHAT_IF]) == 0
    out = capsys.readouterr().out
    for call in ("actor_generate", "reward_forward", "critic_train"):
        assert out.count(call) >= 3  # in the table, under the timeline, with its reason
    assert "lower bound over the plans enumerated, found in" in out and "best possible" not in out
    assert "per step" in out and "idle" in out and "limited by" in out
    assert "would make the step" in " ".join(out.split())
    assert "what if" in out and "response_tokens=500, num_hosts=1: the layouts need 16 devices" in out


def test_with_expected_lengths_no_data_set_of_the_hub_is_asked_for(monkeypatch):
    monkeypatch.setattr("realhf.data.row_files.open_split", None)
    data = DatasetConfig("some-org/some-data", name="main")
    sets = {"a": data, "b": Evaluation(data, max_rows=64)}
    actor = Role("llama-7b", dtype="bfloat16", optimizer=OptimizerConfig())
    for held_out in (data, sets["b"], sets):
        experiment = GRPO(
            actor=actor, dataset=DatasetMixture(parts=(data, DatasetConfig("rows.jsonl"))),
            eval_dataset=held_out, reward_function=MathAnswer(), expected=Expected(prompt_tokens=100))
        problem = problem_of(experiment, Cluster.load("h100-1x8"))
        assert problem.workloads["actor_generate"].prompt_tokens == 100
        assert experiment.dataset.parts[0] is data  # The experiment itself stays as it is.
    with pytest.raises(TypeError):
        problem_of(replace(experiment, expected=Expected()), Cluster.load("h100-1x8"))
    tuned = SFT(
        actor=actor, dataset=data, eval_dataset=data, reward_function=MathAnswer(),
        expected=Expected(prompt_tokens=100, response_tokens=50))
    evaluations = problem_of(tuned, Cluster.load("h100-1x8")).evaluations
    assert {call.name for call in evaluations} == {"eval/actor_forward", "eval/actor_generate"}


def test_reasons_and_changes_are_in_the_answer(planned):
    answer, _ = planned
    for name, call in answer["calls"].items():
        if "reason" not in call:
            continue
        reason = call["reason"]
        assert call["parts"][reason["limit"]] == pytest.approx(reason["share"] * call["seconds"]), name
        if (other := reason["runner_up"]) is not None:
            more = other["step_seconds"] - answer["step_seconds"]
            assert other["layout"] != call["layout"] and sum(other["causes"].values()) == pytest.approx(more)
    (slower,) = answer["what_if"]
    assert slower["values"] == {"inter_host.bandwidth": "50Gbit/s"}
    # Each plan is at most 6 % above the best: the gap, and what reserves may cost.
    assert answer["step_seconds"] <= slower["best_step_seconds"] * 1.06
    assert slower["best_step_seconds"] <= slower["step_seconds"]


@pytest.mark.parametrize("cluster", ["cpu-laptop", pytest.param("h100-8x8", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_search_goes_on_to_one_percent_and_says_so(experiment, capsys, monkeypatch, cluster):
    """The gap ends the search, rather than the time; without a terminal progress is shown in lines."""
    monkeypatch.setattr(plan, "_REPORT_SECONDS", 0.0)
    of = str(experiment) if cluster == "cpu-laptop" else PPO_7B
    assert main(["plan", of, "--cluster", cluster, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert 1 - answer["lower_bound_seconds"] / answer["fastest_found_seconds"] <= 0.01
    assert answer["step_seconds"] <= answer["fastest_found_seconds"] * 1.01
    lines = err.splitlines()
    assert len(lines) > 3, err
    for line in lines:
        assert re.fullmatch(
            r"realhf: searching for \d+\.\d s: best .* m?s per step, lower bound .* m?s, gap \d+\.\d%", line
        ), line
    monkeypatch.undo()
    defaults = make_parser().parse_args(["plan"])
    assert (defaults.time_limit, defaults.gap, defaults.slack) == (60, 0.01, 0.01)


def test_a_profile_of_one_host_serves_a_cluster_with_links_of_its_own(capsys, tmp_path):
    words = [write_experiment(tmp_path, "sft"), "--profile", write_profile(tmp_path)]
    one = _plan(capsys, *words)
    assert len(one["timeline"]["idle"]) == 2  # The profile's own machine.
    several = _plan(capsys, *words, "--cluster", _cpu_cluster(tmp_path, num_hosts=2))
    assert len(several["timeline"]["idle"]) == 8


def test_what_a_profile_has_not_measured_is_listed(capsys, tmp_path):
    words = [write_experiment(tmp_path, "sft"), "--profile", write_profile(tmp_path)]
    answer = _plan(capsys, *words)
    assert any(note.startswith("not measured: block forward of qwen2") for note in answer["not_measured"])
    assert main(["plan", *map(str, words)]) == 0
    assert all(note in capsys.readouterr().out.split("\n") for note in answer["not_measured"][:1])
    without = _plan(capsys, words[0])
    assert without["not_measured"] == []


def test_a_profile_of_one_host_says_how_to_plan_for_several(capsys, tmp_path):
    words = [write_experiment(tmp_path, "sft"), "--profile", write_profile(tmp_path), "--devices", 4]
    assert main(["plan", *map(str, words)]) == 2
    assert "was measured on one host: for several, name a cluster file (--cluster)" in capsys.readouterr().err


# Fields of the profile's cluster, WORLD_SIZE and LOCAL_WORLD_SIZE -> words of the sentence.
MISFITS = {
    "several hosts": ({}, (4, 2), ["measured on one host", "no link between the 2 hosts", "--cluster"]),
    "several workers": ({"devices_per_host": 1}, (2, 2), ["one worker per host", "--nproc 2", "--cluster"]),
    "other devices": ({"device_type": "cuda"}, (2, 2), ["on cuda devices, this machine has cpu devices"]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_profile_that_lacks_a_link_is_refused(case, tmp_path, monkeypatch):
    fields, (size, per_host), parts = MISFITS[case]
    names = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(per_host)}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    profile = str(write_profile(tmp_path, **fields))
    with pytest.raises(UserError) as caught:
        plan_command.cluster_at_hand(nproc=None, cluster=None, profile=profile)
    assert str(caught.value).startswith(f"--profile {profile}: ") and "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    named = plan_command.cluster_at_hand(nproc=None, cluster="cpu-laptop", profile=profile)
    assert named == Cluster.load("cpu-laptop")


def test_a_profile_describes_this_machine(tmp_path):
    """The description has the profile's links and peaks, and the memory of this host."""
    profile = str(write_profile(tmp_path, num_hosts=2, inter_host=LINK))
    cluster = plan_command.cluster_at_hand(nproc=4, cluster=None, profile=profile)
    bare = plan_command.cluster_at_hand(nproc=4, cluster=None, profile=None)
    assert cluster.device_type == bare.device_type == "cpu"
    assert (cluster.num_hosts, cluster.devices_per_host) == (1, 4)
    assert cluster.device_memory_bytes == bare.device_memory_bytes == bare.host_memory_bytes / 4
    assert cluster.intra_host == Link(1e-4, 5e9) and cluster.host_memory is None


LINK = {"latency_seconds": 1e-4, "bandwidth_bytes_per_second": 5e9}


def write_profile(directory, **fields):
    """Write a profile of two CPU workers on one host without tables, with these fields of its cluster."""
    memory = host_memory_bytes()
    path, cluster = directory / "profile.yaml", {
        "num_hosts": 1, "devices_per_host": 2, "device_memory_bytes": memory / 2, "host_memory_bytes": memory,
        "memory_bandwidth_bytes_per_second": 1e10, "peak_flops": {"float32": 1e11, "float64": 5e10},
        "intra_host": LINK, "device_type": "cpu",
    }
    tables = {"date": "2026-11-22", "machine": {}, "links": [], "calls": {}, "models": []}
    path.write_text(dump_yaml(tables | {"cluster": cluster | fields}))
    return path


def _cpu_cluster(directory, **fields):
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(
        yaml.safe_load((REPO / "plans/clusters/cpu-laptop.yaml").read_text()) | fields))
    return path


def test_the_price_of_the_plan_that_was_found_is_what_the_search_says(planned, capsys):
    answer, path = planned
    priced = _plan(capsys, PPO_7B, "--cluster", "h100-2x8", "--price", path)
    assert priced["fits"] and priced["lacks"] is None
    assert priced["step_seconds"] == pytest.approx(answer["step_seconds"], rel=1e-9)
    assert priced["memory"] == answer["memory"]
    assert {n: c.get("seconds") for n, c in priced["calls"].items()} == pytest.approx(
        {n: c.get("seconds") for n, c in answer["calls"].items()})


def test_a_plan_by_hand_that_does_not_fit_is_priced_all_the_same(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    call_plans = dict.fromkeys(
        ("actor_generate", "reward_forward", "ref_forward", "critic_forward", "critic_train"), "d2t8@0-15")
    calls = {name: {"layout": layout} for name, layout in call_plans.items()}
    path.write_text(dump_yaml({"calls": {**calls, "actor_train": {"layout": "d16@0-15"}}}))
    words = ["plan", PPO_7B, "--cluster", "h100-2x8", "--price", str(path)]
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    plan = ExecutionPlan.load(str(path))
    problem = problem_of(load_experiment(PPO_7B), Cluster.load("h100-2x8"))
    seconds = predict(problem, Rates(problem.cluster), plan).step_seconds
    assert answer["step_seconds"] == pytest.approx(seconds)
    assert not answer["fits"] and not answer["memory"]["fits"]
    for part in ("calls.actor_train needs", "79.2 GB of a device's 84.9 GB are available", "it fits with"):
        assert part in answer["lacks"]
    assert main(words) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"it does not fit in memory: {answer['lacks']}" in out and "devices idle" in out


def test_pins_fix_options_and_any_number_of_rows(tmp_path, capsys):
    """The search that has to take them finds what the plan costs that has them."""
    path = tmp_path / "plan.yaml"
    pins = ["actor_generate=d2t4@0-7,max_rows=41", "actor_train=micro_batch_tokens=5000,recompute=true",
            "ref_forward=offload"]
    words = [PPO_7B, "--cluster", "h100-1x8", "--time-limit", "3"]
    answer = _plan(capsys, *words, "-o", path, *(word for pin in pins for word in ("--pin", pin)))
    calls = answer["calls"]
    assert (calls["actor_generate"]["layout"], calls["actor_generate"]["max_rows"]) == ("d2t4@0-7", 41)
    assert (calls["actor_train"]["micro_batch_tokens"], calls["actor_train"]["recompute"]) == (5000, True)
    assert calls["ref_forward"]["offload"]
    priced = _plan(capsys, *words[:3], "--price", path)
    assert priced["step_seconds"] == pytest.approx(answer["step_seconds"], rel=1e-9)


def test_several_numbers_of_devices_are_a_table(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    words = [PPO_7B, "--cluster", "h100-2x8", "--gap", "0.3", "--slack", "0", "--batch_size", "64"]
    words += ["--time-limit", "400"]
    answer = _plan(capsys, *words, "--devices", "2,4,...,16", "--cost-per-hour", "2", "-o", path)
    assert [size["num_devices"] for size in answer["sizes"]] == [2, 4, 8, 16]
    assert "no plan fits" in answer["sizes"][0]["obstacle"]
    alone = _plan(capsys, *words, "--devices", "8", "--cost-per-hour", "2")
    eight = answer["sizes"][2]
    assert eight["step_seconds"] == pytest.approx(alone["step_seconds"])
    assert eight["device_seconds"] == pytest.approx(8 * alone["step_seconds"])
    per_step = 2 * 8 * alone["step_seconds"] / 3600
    assert eight["cost"]["per_step"] == alone["cost"]["per_step"] == pytest.approx(per_step)
    assert alone["cost"]["per_1000_samples"] == pytest.approx(per_step / 64 * 1000)
    assert ExecutionPlan.load(str(path)).num_ranks <= answer["enough"]


def test_so_many_devices_are_enough_if_more_shorten_a_step_by_at_most_a_tenth():
    problem = random_problem(random.Random(3), num_calls=2)
    planned = make_plan(problem, Rates(problem.cluster), time_limit=5, max_iterations=1)

    def size(number, seconds):
        simulation = replace(planned.simulation, step_seconds=seconds)
        return SizedPlan(number, None if seconds is None else replace(planned, simulation=simulation))

    cases = {
        (None, 100, 50, 26, 24): (64, "64 devices are enough: with more, up to 128, a step becomes"),
        (100, 50, 25, 12.5): (64, "64 devices, the most tried, still make the step more than 10% shorter"),
        (100, 95, 60, 59, 53.9): (64, "64 devices are enough"),
        (100, 95, 91, 99): (8, "8 devices are enough"),
    }
    for seconds, (enough, sentence) in cases.items():
        sizes = Sizing([size(8 << i, value) for i, value in enumerate(seconds)])
        assert sizes.enough.num_devices == enough and sizes.sentences[0].startswith(sentence), seconds
    assert Sizing([size(8, None), size(16, None)]).enough is None


@pytest.mark.slow
def test_the_robust_plan_is_in_the_answer_and_in_the_file(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    words = [PPO_7B, "--cluster", "h100-1x8", "--batch_size", "64"]
    answer = _plan(capsys, *words, "--robust", "--time-limit", "26", "-o", path)
    robust = answer["robust"]
    assert len(robust["changes"]) == 13 and robust["changes"][0]["factor"] == 1
    assert robust["changes"][0]["step_seconds"] == pytest.approx(answer["step_seconds"])
    worst = max(change["step_seconds"] / change["best_found_seconds"] - 1 for change in robust["changes"])
    assert robust["largest_regret"] == pytest.approx(worst) and worst <= robust["first_largest_regret"] + 1e-4
    priced = _plan(capsys, *words, "--price", path)
    assert priced["step_seconds"] == pytest.approx(answer["step_seconds"]) and priced["fits"]
    assert main(["plan", *words, "--robust", "--time-limit", "13"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "response_tokens x 0.5" in out and "it stays within 1% of the best found" in out


@pytest.mark.slow
def test_a_lost_host_costs_what_a_plan_without_it_takes(planned, capsys):
    words = [PPO_7B, "--cluster", "h100-2x8", "--gap", "0.05"]
    answer = _plan(capsys, *words, "--lost-hosts", "1")
    (lost,) = answer["what_if"]
    fewer = _plan(capsys, *words, "--devices", "8")
    assert lost["values"] == {"lost_hosts": "1"} and lost["step_seconds"] is None
    assert lost["best_step_seconds"] == pytest.approx(fewer["step_seconds"], rel=0.05)


@pytest.mark.slow
def test_pins_ties_and_fewer_devices(planned, capsys):
    words = [PPO_7B, "--cluster", "h100-2x8", "--time-limit", 1]
    free, _ = planned
    ties = ["--pin", "actor_train=d2t2p4@0-15", "--together", "critic_train,critic_forward"]
    pinned = _plan(capsys, *words, *ties)
    assert pinned["calls"]["actor_train"]["layout"] == "d2t2p4@0-15"
    assert pinned["calls"]["critic_train"]["layout"] == pinned["calls"]["critic_forward"]["layout"]
    assert pinned["step_seconds"] >= free["lower_bound_seconds"]
    fewer = _plan(capsys, *words, "--devices", 8)
    assert fewer["step_seconds"] > free["step_seconds"]
    assert set(fewer["memory"]["peaks"]) == set(map(str, range(8)))


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft"])
def test_plans_are_for_any_graph_and_pass_the_check(capsys, tmp_path, kind):
    experiment, path = write_experiment(tmp_path, kind), tmp_path / "plan.yaml"
    answer = _plan(capsys, experiment, "--cluster", "cpu-laptop", "-o", path)
    assert answer["gap"] <= 0.02  # The fastest one's is at most 0.01, and the slack as much.
    assert main(["check", str(experiment), "--plan", str(path), "--cluster", "cpu-laptop"]) == 0
    assert "it fits" in capsys.readouterr().out
    calls = yaml.safe_load(path.read_text())["calls"]
    if kind == "ppo":  # Plain Python runs where its data is.
        heads = ExecutionPlan.load(str(path))["actor_generate"].layout.result_ranks
        assert calls["advantages"]["layout"].startswith("d1@") and heads


@pytest.mark.slow
def test_a_planned_run_gives_what_one_process_gives(experiment, tmp_path):
    """Run with --plan auto, for which every rank computes the same plan."""
    runs = {}
    for nproc, words in ((1, []), (3, ["--plan", "auto"])):
        out = tmp_path / f"run{nproc}"
        with ForkedCommand("run", experiment, "--nproc", nproc, "--out", out, *words) as command:
            code, _, err = command.finish()
        assert code == 0, err
        steps = untimed(out / "metrics.jsonl")
        runs[nproc] = [{k: v for k, v in step.items() if "realloc" not in k} for step in steps]
    plan = yaml.safe_load((tmp_path / "run3/plan.yaml").read_text())
    assert plan["predicted"]["step_seconds"] > 0 and plan["calls"]["actor_train"]["predicted"]["seconds"] > 0
    assert read_jsonl(tmp_path / "run3/timeline.jsonl")
    for one, three in zip(runs[1], runs[3], strict=True):
        assert one == pytest.approx(three, rel=1e-7, abs=1e-9)


# Words after `realhf plan EXP.py` -> words of the sentence.
REFUSED = {
    "--cluster h100-1x8 --actor.model llama-70b --critic.model llama-70b": [
        "call actor_train does not fit", "8 devices with 79.2 GB available", "need at least"],
    "--cluster h100-2x8 --minibatches 700": ["call 'actor_train' has 700 minibatches: at most batch_size"],
    "--cluster h100-2x8 --pin actor_tain=d8@0-7": ["--pin actor_tain", "there is no such call"],
    "--cluster h100-2x8 --pin actor_train": ["--pin actor_train", "CALL=LAYOUT", "actor_train=d8t8@0-63"],
    "--cluster h100-2x8 --pin actor_train=d2@0-7": ["--pin actor_train=d2@0-7", "d2 needs 2 ranks"],
    "--cluster h100-2x8 --pin actor_train=t8@12-19": ["rank 19 does not exist", "16 devices"],
    "--cluster h100-2x8 --pin actor_train=t8@0,2-8": ["contiguous"],
    "--cluster h100-2x8 --pin actor_generate=d8@0-7 --batch_size 6": [
        "the 6 samples of call actor_generate cannot be split over dp=8"],
    "--cluster h100-2x8 --pin actor_train=d1@0": ["does not fit there", "pin it to more ranks"],
    "--cluster h100-2x8 --pin advantages=d1@0": ["--pin advantages: it is plain Python"],
    "--cluster h100-2x8 --pin actor_train=d8@0-7,max_row=4": ["option 'max_row'", "mean max_rows"],
    "--cluster h100-2x8 --pin actor_train=max_rows=4": ["--pin actor_train", "a generate call has rows"],
    "--cluster h100-2x8 --pin actor_generate=max_rows=0": ["max_rows is 0", "at least 1"],
    "--cluster h100-2x8 --pin critic_train=offload": ["--pin critic_train", "only a frozen role"],
    "--cluster h100-2x8 --pin actor_train=t8@0-7,recompute=yes": ["recompute is 'yes'", "true or false"],
    "--cluster h100-2x8 --price ppo-4 --pin actor_train=t8@0-7": ["--pin: --price searches no plan"],
    "--cluster h100-2x8 --price grpo-4": ["--price grpo-4: calls.critic_forward is missing"],
    "--cluster h100-1x8 --devices 2 --price ppo-4": ["--price ppo-4", "there are 2 ranks"],
    "--cluster h100-2x8 --together actor_train": ["--together actor_train: name two calls or more"],
    "--cluster h100-2x8 --pin actor_train=d8@0-7 --pin actor_train=d8@8-15": ["actor_train is given twice"],
    "--cluster h100-2x8 --together actor_train,critic": ["--together critic", "there is no such call"],
    "--cluster h100-2x8 --devices 8,...": ["--devices 8,...", "several such as 8,16,...,256"],
    "--cluster h100-2x8 --devices 16,8": ["--devices 16,8: the numbers must rise"],
    "--cluster h100-2x8 --devices 8,12": ["--devices 12", "whole hosts of 8 up to 16"],
    "--cluster h100-2x8 --devices 8,16 --lost-hosts 1": ["--lost-hosts: --devices with several numbers"],
    "--cluster h100-2x8 --lost-hosts 2": ["--lost-hosts 2: the cluster has 2, and one must be left"],
    "--cluster h100-2x8 --cost-per-hour 0": ["--cost-per-hour 0: it must be above 0"],
    "--cluster h100-2x8 --devices 12": ["--devices 12", "whole hosts of 8 up to 16"],
    "--cluster h100-2x8 --time-limit 0": ["--time-limit 0", "above 0"],
    "--cluster h100-2x8 --what-if respons_tokens=9": ["--what-if respons_tokens=9", "did you mean response_"],
    "--cluster h100-2x8 --what-if num_hosts": ["--what-if num_hosts", "KEY=VALUE"],
    "--cluster h100-2x8 --gap 2": ["--gap 2", "below 1"],
    "--cluster h100-2x8 --slack 1": ["--slack 1", "below 1"],
    "--cluster h100-2x8 --robust --what-if num_hosts=1": ["--what-if: --robust has changes of its own"],
    "--cluster h100-2x8 -o /nowhere/plan.yaml": ["--output /nowhere/plan.yaml", "no directory /nowhere"],
    "--cluster h100": ["'h100' is neither a path nor a shipped name", "h100-8x8"],
    "--cluster cpu-laptop --actor.dtype float16": ["peak_flops has no entry for dtype float16", "bfloat16"],
    "--cluster h100-2x8 --expected.prompt-tokens 0": ["expected.prompt_tokens is 0", "at least 1"],
    "--cluster h100-2x8 --expected.response-tokens 2000": ["expected.response_tokens is 2000", "allows 1024"],
    "--cluster h100-2x8 --expected.prompt-tokens None": ["dataset.path", "set expected.prompt_tokens"],
    "--cluster h100-2x8 --fast": ["unknown override '--fast'"],
}


@pytest.mark.parametrize("words", drawn(REFUSED, 12))
def test_refusals(words, capsys, tmp_path):
    assert main(["plan", PPO_7B, *shlex.split(words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err, err
    for part in REFUSED[words]:
        assert part in err, err


def test_a_graph_without_calls_on_models_is_refused(capsys, tmp_path):
    body = """
def nothing(batch, context):
    return {}
host = FunctionCall("only", "host", ("prompt",), (), work=HostFunction(nothing))
experiment.graph = lambda: DataflowGraph((host,), ("prompt",))
experiment.roles = lambda: {}
"""
    assert main(["plan", str(write_experiment(tmp_path, body=body)), "--cluster", "cpu-laptop"]) == 2
    assert "no calls on models" in capsys.readouterr().err


def test_check_refuses_a_plan_that_does_not_fit_and_names_the_remedy(capsys, tmp_path):
    small = yaml.safe_load((REPO / "plans/clusters/cpu-laptop.yaml").read_text())
    experiment = write_experiment(tmp_path, "ppo", batch_size=400)
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"calls": {
        "actor_generate": {"layout": "d1@0"}, "reward_forward": {"layout": "d1@1"},
        "ref_forward": {"layout": "d1@1"}, "critic_forward": {"layout": "d1@1"},
        "critic_train": {"layout": "d1@1", "micro_batch_tokens": 256},
        "actor_train": {"layout": "d1@0", "micro_batch_tokens": 1 << 20},
    }}))
    cluster = tmp_path / "cluster.yaml"
    for memory, code in (("4 GB", 0), ("1.45 GB", 2)):
        cluster.write_text(yaml.safe_dump(small | {"device_memory_bytes": memory}))
        assert main(["check", str(experiment), "--plan", str(plan), "--cluster", str(cluster)]) == code
    err = capsys.readouterr().err
    for part in ("calls.actor_train needs", "on rank 0", "it fits with calls.actor_train."):
        assert part in err


def test_a_fault_of_the_experiment_is_not_said_to_be_one_of_a_plan(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"calls": {
        name: {"layout": "d1@0"} for name in ("actor_generate", "ref_forward", "actor_train")}}))
    faults = {
        "experiment.reward_function = None": "give either reward_function or a reward role",
        "from realhf import Expected\nexperiment.expected = Expected(turns=3.0)": "expected.turns is 3",
    }
    for body, says in faults.items():
        path = write_experiment(tmp_path, body=body)
        for words in (
            ["plan", "--price"], ["check", "--plan"], ["plan", "--pin", "actor_train=d1@0"], ["plan"],
        ):
            words += [str(plan)] * (words[-1] in ("--price", "--plan"))
            assert main([words[0], str(path), "--cluster", "cpu-laptop", *words[1:]]) == 2
            sentence = capsys.readouterr().err.splitlines()[-1]  # Warnings may come before.
            assert sentence.startswith(f"realhf: {path}: ") and says in sentence, (words, sentence)


def test_how_near_a_step_is_to_the_bound_is_said_in_one_way():
    """The gap is the share of the step by which the bound is below it, as in --gap and --json."""
    found = SearchResult((0,), 90.2, 73.6, 0)
    said = r"a gap of ([\d.]+)% to 73.6 s, the lower bound over the plans enumerated"
    gap = re.fullmatch(said, nearness(found))
    assert 90.2 * (1 - float(gap[1]) / 100) == pytest.approx(73.6, rel=1e-4)
    assert format_gap(90.2, 73.6) == "18.4%" and found.gap == pytest.approx((90.2 - 73.6) / 90.2)
    assert nearness(replace(found, lower_bound_seconds=0.0)) == "no lower bound was found in the time"
    assert format_gap(90.2, 0.0) == "no bound"
    assert nearness(replace(found, lower_bound_seconds=90.2)).startswith("equal to the lower bound")


def test_prompts_that_cannot_be_measured_are_named(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": null, "answer": "2"}\n')
    body = f"experiment.dataset = replace(experiment.dataset, path={str(tmp_path / 'rows.jsonl')!r})"
    path = write_experiment(tmp_path, body=body)
    assert main(["plan", str(path), "--cluster", "h100-2x8"]) == 2
    assert "rows.jsonl line 2: prompt is null: it must be text" in capsys.readouterr().err


def test_commands_on_two_kinds_of_hosts(tmp_path, capsys):
    """The second kind is too small for any call, so that the plan is on the first."""
    cluster, path = tmp_path / "kinds.yaml", tmp_path / "plan.yaml"
    cluster.write_text("""
hosts:
  - {count: 1, like: cpu-laptop}
  - {count: 1, like: cpu-laptop, device_memory_bytes: 100 MB}
inter_host: {latency_seconds: 300 us, bandwidth_bytes_per_second: 1 GB/s}
""")
    experiment = write_experiment(tmp_path, "sft")
    words = [str(experiment), "--cluster", str(cluster)]
    answer = _plan(capsys, *words, "-o", path, "--what-if", "hosts.1.device_memory=4GB")
    first = Cluster.load("cpu-laptop").num_devices
    layouts = [Layout.parse(call["layout"]) for call in answer["calls"].values()]
    assert all(max(layout.ranks) < first for layout in layouts)
    assert answer["what_if"][0]["best_step_seconds"] <= answer["step_seconds"]
    assert main(["check", words[0], "--plan", str(path), *words[1:]]) == 0
    name = next(iter(answer["calls"]))
    refusals = {
        ("--pin", f"{name}=d2@{first - 1}-{first}"): "a layout is planned on hosts of one kind",
        ("--profile", str(write_profile(tmp_path))): "leave --profile out",
    }
    for options, says in refusals.items():
        capsys.readouterr()
        assert main(["plan", *words, *options]) == 2
        assert says in capsys.readouterr().err
