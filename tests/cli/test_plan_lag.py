"""`realhf plan` for experiments with lag, with parts of their own, or with parts that run several times."""

import copy
import json
import shlex
from dataclasses import replace

import pytest

from realhf import GRPO, PPO, Expected, OptimizerConfig, Role, SamplingConfig
from realhf.cli.main import main
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.layout import Layout
from realhf.planner.comparisons import LagComparison
from realhf.planner.make import make_plan
from realhf.planner.rates import Rates
from realhf.planner.search import SearchResult
from realhf.planner.step_time import predict
from tests.cli_tools import REPO, write_experiment
from tests.samples import marked

GRPO_32B = str(REPO / "examples/grpo_32b.py")
CLUSTER = ("--cluster", "h100-8x8", "--gap", "0.03")
SIZES = {
    "sampling": SamplingConfig(max_new_tokens=90), "batch_size": 64,
    "expected": Expected(prompt_tokens=100, host_seconds=2.0),
}


def trained(head="lm"):
    return Role("llama-7b", head=head, dtype="bfloat16", optimizer=OptimizerConfig())


def reward(prompts, completions, completion_ids):
    raise NotImplementedError


def ppo(**settings):
    frozen = Role("llama-7b", head="score", dtype="bfloat16")
    return PPO(actor=trained(), critic=trained("score"), reward=frozen, **SIZES | settings)


def printed(capsys, *words):
    code = main(["plan", GRPO_32B, *CLUSTER, *map(str, words)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


CASES = [
    (16, "--max-lag 1", "neither"), (64, "--max-lag 1", "lagged"), (64, "--max-lag 2 --rounds 3", "lagged"),
]


@pytest.mark.parametrize(("num_devices", "words", "faster"), marked(CASES, quick=[]))
def test_both_steps_and_the_faster_one(num_devices, words, faster, capsys):
    devices = ("--devices", num_devices)
    answer = json.loads(printed(capsys, *devices, *shlex.split(words), "--json"))
    without = json.loads(printed(capsys, *devices, "--json"))
    assert answer["lag"] == int(words.split()[1]) and answer["rounds"] == int(words.split()[-1])
    assert answer["lagged_seconds"] == answer["step_seconds"]
    assert answer["synchronous_seconds"] == without["step_seconds"]
    assert answer["synchronous_lower_bound_seconds"] == without["lower_bound_seconds"]
    assert answer["faster"] == faster
    assert faster == "neither" or answer["lagged_seconds"] < answer["synchronous_seconds"]
    assert "lag" not in without and "faster" not in without
    shown = printed(capsys, *devices, *shlex.split(words))
    times = answer["synchronous_seconds"] / answer["lagged_seconds"]
    said = "the lag makes steps neither faster nor slower" if faster == "neither" else (
        f"lagged steps are {times:.2f} x as fast")
    assert f"\n{said} on this cluster" in shown
    assert shown.count("\nsynchronous ") == shown.count("\nlagged  ") == 1
    assert "synchronous" not in printed(capsys, *devices)


@pytest.mark.parametrize(
    ("lagged", "synchronous", "faster", "sentence"),
    [
        (8.0, 10.0, "lagged", "lagged steps are 1.25 x as fast on this cluster: 8 s per step with max_lag 2, "
                              "10 s without"),
        (12.0, 10.0, "synchronous", "synchronous steps are 1.20 x as fast on this cluster: 12 s per step "
                                    "with max_lag 2, 10 s without"),
        (10.0, 10.001, "neither", "the lag makes steps neither faster nor slower on this cluster: 10 s per "
                                  "step with max_lag 2, 10 s without"),
    ],
)
def test_the_sentence_says_what_is_faster(lagged, synchronous, faster, sentence):
    results = [SearchResult((), seconds, seconds, 1) for seconds in (lagged, synchronous)]
    comparison = LagComparison(2, 2, *results)
    assert (comparison.faster, comparison.sentence) == (faster, sentence)


def test_calls_run_in_the_order_of_the_parts():
    cluster = Cluster.load("h100-2x8")
    names = [call.name for call in ppo().graph().order]
    synchronous = problem_of(ppo(), cluster)
    assert [call.name for call in synchronous.calls] == names and not synchronous.ahead
    overlapping = problem_of(ppo(max_lag=2), cluster)
    scoring = [name for name in names if name not in ("actor_generate", "actor_train", "critic_train")]
    training = [name for name in names if name.endswith("_train")]
    assert [call.name for call in overlapping.calls] == [*scoring, "actor_generate", *training]
    assert overlapping.ahead == {"actor_generate"}
    in_order = problem_of(ppo(max_lag=2, rounds=3), cluster)
    assert [call.name for call in in_order.calls] == ["actor_generate", *scoring, *training]
    assert not in_order.ahead
    rounds = {problem.workloads["actor_generate"].rounds for problem in (synchronous, overlapping, in_order)}
    assert rounds == {1, 2, 3}
    assert overlapping.workloads["actor_train"] == synchronous.workloads["actor_train"]


def test_host_calls_stay_off_the_ranks_that_run_ahead():
    experiment = GRPO(actor=trained(), reward_function=reward, group_size=8, max_lag=1, **SIZES)
    cluster = Cluster.load("h100-2x8")
    pins = {"actor_generate": Layout.parse("d8@0-7"), "actor_train": Layout.parse("d4t2@8-15")}
    problem = problem_of(experiment, cluster, pins=pins)
    plan = make_plan(problem, Rates(cluster), time_limit=5.0).plan
    for call in problem.graph.of_kind("host"):
        assert set(plan[call.name].layout.ranks) <= set(range(8, 16)), call.name
    splittable = [call.name for call in problem.graph.of_kind("host") if call.work.splittable]
    assert splittable and all(plan[name].layout.dp == 4 for name in splittable)


def test_a_step_program_of_ones_own_is_one_pass_over_its_parts():
    class TwoPasses(PPO):
        def step(self, run):
            run("rollout", run.prompts(self.batch_size))

    own = TwoPasses(**vars(ppo(max_lag=1)))
    assert own.has_own_program and not ppo(max_lag=1).has_own_program
    problem = problem_of(own, Cluster.load("h100-2x8"))
    assert not problem.ahead and problem.run_order[0] == "actor_generate"
    named = copy.copy(ppo())
    named.parts = lambda graph: {
        "train": [call.name for call in graph.of_kind("train_step")],
        "make": [call.name for call in graph.order if call.kind != "train_step"],
    }
    assert named.has_own_program
    calls = [call.name for call in problem_of(named, Cluster.load("h100-2x8")).calls]
    assert calls == [call.name for call in ppo().graph().order]


@pytest.mark.slow
def test_parts_that_run_several_times_take_as_much_longer():
    cluster = Cluster.load("h100-2x8")
    once = problem_of(ppo(max_lag=1), cluster)
    runs = replace(ppo().expected, part_runs={"rollout": 2.5, "score": 1.5})
    often = problem_of(ppo(max_lag=1, expected=runs), cluster)
    factors = {"actor_generate": 2.5, "ref_forward": 1.5, "advantages": 1.5, "actor_train": 1.0}
    plan = make_plan(once, Rates(cluster), time_limit=5.0, gap=0.05).plan
    seconds = [predict(problem, Rates(cluster), plan).calls for problem in (once, often)]
    for name, factor in factors.items():
        if name == "advantages":
            assert often.workloads[name].seconds == factor * once.workloads[name].seconds == 3.0
        else:
            assert seconds[1][name].seconds == pytest.approx(factor * seconds[0][name].seconds)
            assert sum(seconds[1][name].seconds_by_cause.values()) == pytest.approx(seconds[1][name].seconds)


# Words after `realhf plan EXP.py` -> words of the sentence.
REFUSED = {
    "--max-lag 2 --rounds 5": ["rounds is 5", "must be 2 or 3 with max_lag 2"],
    "--max-lag -1": ["max_lag is -1", "not be negative"],
    "--expected.part-runs rollout 2": ["expected.part_runs has 'rollout'", "the parts are step"],
    "--max-lag 1 --expected.part-runs rollout 0": ["expected.part_runs['rollout'] is 0", "above 0"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words, capsys):
    assert main(["plan", GRPO_32B, *CLUSTER, *shlex.split(words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    for part in REFUSED[words]:
        assert part in err, err


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 3])
def test_lagged_plans_pass_the_check(rounds, capsys, tmp_path):
    experiment = str(write_experiment(tmp_path, "ppo", max_lag=2, rounds=rounds))
    path = str(tmp_path / "plan.yaml")
    assert main(["plan", experiment, "--cluster", "cpu-laptop", "-o", path]) == 0
    assert "on this cluster" in capsys.readouterr().out
    assert main(["check", experiment, "--plan", path, "--cluster", "cpu-laptop"]) == 0
    assert "it fits" in capsys.readouterr().out
