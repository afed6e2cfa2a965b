"""Step programs without models: lag and rounds, pools, misuse, checkpoints and the trial without data."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from realhf.calls import HostFunction
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.graph import DataflowGraph, FunctionCall
from realhf.runtime.compile import step_trial
from realhf.runtime.compile.step_trial import checked_parts, growing_pools, try_step_program
from realhf.steps.sample_pool import Samples
from realhf.steps.step_runner import StepRunner

GRAPH = DataflowGraph(
    (
        FunctionCall("generate", "generate", ("prompt",), ("ids",), "actor"),
        FunctionCall(
            "judge", "host", ("ids", "answer"), ("score",),
            work=HostFunction(print, filters=True, decides=True, example=1)),
        FunctionCall("logprobs", "forward", ("ids",), ("logp",), "ref"),
        FunctionCall("prepare", "host", ("score", "logp"), ("advantages",), work=HostFunction(print)),
        FunctionCall("train", "train_step", ("ids", "advantages"), (), "actor"),
    ),
    ("prompt", "answer"),
)
PARTS = {"rollout": ("generate",), "score": ("judge", "logprobs"), "train": ("prepare", "train")}


@dataclass
class Toy(Experiment):
    """An experiment without models, whose step is `program` if there is one."""

    program: Any = None
    given_graph: DataflowGraph = GRAPH
    given_parts: Any = field(default_factory=lambda: PARTS)

    def graph(self) -> DataflowGraph:
        return self.given_graph

    def parts(self, graph: DataflowGraph) -> Any:
        return self.given_parts

    def step(self, run: StepRunner) -> None:
        (self.program or super().step)(run)


class Recorder:
    """A PartExecutor that only writes down what it is told to do."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.notes: list[tuple[int, str, str]] = []
        self.metrics: list[tuple[str, float]] = []
        self.prompts: dict[int, list[int]] = {}

    def run(self, part, prompts, *, operation, sent, updates, state):
        self.prompts[operation] = list(prompts)
        self.events.append(("run", part, tuple(prompts), frozenset(sent), dict(updates)))

    def send(self, part, prompts, producers):
        self.events.append(("send", part, tuple(prompts), frozenset(producers)))

    def passed(self, call, operation):
        return [prompt for prompt in self.prompts[operation] if prompt % 3]

    def decision(self, call, operation):
        return {"odd": operation % 2 == 1, "sum": sum(self.prompts[operation])}

    def forget(self, prompts):
        self.events.append(("forget", tuple(prompts)))

    def note(self, number, text, digest):
        self.notes.append((number, text, digest))

    def log(self, metric, value):
        self.metrics.append((metric, value))

    def runs(self, part: str) -> list[tuple]:
        return [event for event in self.events if event[:2] == ("run", part)]


def make(program=None, **changes: Any) -> tuple[Toy, Recorder, StepRunner]:
    experiment = Toy(program=program, **changes)
    recorder = Recorder()
    return experiment, recorder, experiment.step_runner(experiment.graph(), recorder)


def run_all(program=None, **changes: Any) -> tuple[Recorder, StepRunner]:
    """Run all steps of a program, with those that fill and drain the pipeline."""
    experiment, recorder, runner = make(program, **changes)
    for _ in range(experiment.steps + experiment.max_lag):
        with runner.one_step():
            experiment.step(runner)
    return recorder, runner


LAGS = [(lag, rounds) for lag in range(9) for rounds in sorted({max(1, lag), lag + 1})]


@pytest.mark.parametrize(("lag", "rounds"), LAGS)
def test_every_prompt_is_trained_once_at_the_ages_of_the_lag(lag, rounds):
    rng = random.Random(lag)
    parts = PARTS if lag else {"step": [call.name for call in GRAPH.order]}
    for steps in {1, 2, lag + 1, rng.randint(1, 3 * lag + 4)}:
        size = rng.randint(1, 3)
        recorder, runner = run_all(
            steps=steps, batch_size=size, max_lag=lag, rounds=rounds, given_parts=parts)
        trained = _replay(recorder.events, rounds=rounds)
        assert [prompts for prompts, *_ in trained] == [
            tuple(range(i * size, i * size + size)) for i in range(steps)]
        for number, (prompts, versions, updates) in enumerate(trained):
            assert updates == number
            # Batch i has its rounds in calls i, i + 1, ..., each after the updates of all calls before it.
            expected = [max(0, number + age - lag) for age in range(rounds)]
            assert [versions[prompt] for prompt in prompts] == [expected] * size
            least = min(lag - rounds + 1, number)
            ages = [number - version for version in expected]
            assert least <= min(ages) and max(ages) == min(number, lag)
        assert runner.updates("actor") == steps and runner.updates("ref") == 0
        assert runner.number == steps + lag
        forgotten = [prompt for event in recorder.events if event[0] == "forget" for prompt in event[1]]
        assert sorted(forgotten) == list(range(steps * size))
        handed_out = [text for _, text, _ in recorder.notes if text.startswith("take ")]
        assert len(handed_out) == steps


def _replay(events, *, rounds):
    """Return prompts, versions by round and number of updates of each training, from the events alone."""
    versions, scored, gone, trained, updates = {}, set(), set(), [], 0
    for kind, *what in events:
        if kind == "forget":
            gone |= set(what[0])
            continue
        if kind == "send":
            continue
        part, prompts, _, told = what
        assert told["actor"] == updates
        assert not gone & set(prompts)
        if part in ("rollout", "step"):
            assert not versions.keys() & set(prompts)
            versions |= {prompt: [] for prompt in prompts}
            for rows in versions.values():
                if len(rows) < rounds:
                    rows.append(updates)
        if part in ("score", "step"):
            assert all(len(versions[prompt]) == rounds for prompt in prompts)
            scored |= set(prompts)
        if part in ("train", "step"):
            assert scored.issuperset(prompts)
            trained.append((prompts, {prompt: list(versions[prompt]) for prompt in prompts}, updates))
            updates += 1
    return trained


@pytest.mark.parametrize(("lag", "rounds"), LAGS)
def test_a_rollout_returns_the_batch_that_is_complete(lag, rounds):
    returned = []

    def program(run):
        batch = run.prompts(2)
        if not lag:
            assert run("rollout", batch) == batch
            return
        returned.append(run("rollout", batch))
        assert run("score", None) is None

    run_all(program, steps=5, max_lag=lag, rounds=rounds)
    if lag:
        batches = [Samples((2 * i, 2 * i + 1)) for i in range(5)]
        assert returned == ([None] * (rounds - 1) + batches + [None] * (lag - rounds + 1))


def test_what_was_sent_ahead_is_what_existed():
    def program(run):
        batch = run.prompts(2)
        run.send("rollout", batch)
        run("rollout", batch)
        run.send("train", batch)  # Before the scores exist.
        run("score", batch)
        run("train", batch)
        run.send("train", batch)
        run("train", batch)  # A second pass over the same samples.

    recorder, _ = run_all(program, steps=1)
    sends = [event for event in recorder.events if event[0] == "send"]
    assert sends == [
        ("send", "rollout", (0, 1), {None}),
        ("send", "train", (0, 1), {"generate"}),
        ("send", "train", (0, 1), {"generate", "judge", "logprobs"}),  # `prepare` is in the part itself.
    ]
    assert [event[3] for event in recorder.runs("train")] == [event[3] for event in sends[1:]]
    assert recorder.runs("rollout")[0][3] == {None} and recorder.runs("score")[0][3] == set()


def run_scored(run, n: int = 2) -> Samples:
    """Hand out prompts and run all but the training on them."""
    batch = run.prompts(n)
    run("rollout", batch)
    run("score", batch)
    return batch


def _keep_old(run):
    if run.number == 0:
        _KEPT.append(run_scored(run))
    else:
        run("train", _KEPT.pop())


def _keep_old_prompts(run):
    if run.number == 0:
        _KEPT.append(run.prompts(2))
    else:
        run("rollout", _KEPT.pop())


def _pool_old(run):
    if run.number == 0:
        _KEPT.append(run_scored(run))
    else:
        run.pool("p").add(_KEPT.pop())


def _agree_late(run):
    if run.number == 0:
        run_scored(run)
    else:
        run.agree("judge")


def _score_anew_after_send(run):
    batch = run_scored(run)
    run.send("train", batch)
    run("score", batch)
    run("train", batch)


def _add_others(run):
    first = run_scored(run)
    run_scored(run)
    run.pool("p").add(first, where="judge")


def _circle(run):
    run.state["x"] = run.state


_KEPT: list[Samples] = []
MISUSE = {
    "unknown part": (lambda run: run("reward", run.prompts(1)), "part 'reward': there are rollout, score"),
    "unknown part of send": (lambda run: run.send("reward", None), "part 'reward': there are rollout, score"),
    "train before rollout": (
        lambda run: run("train", run.prompts(1)),
        "needs the key 'score' of part 'score', which has not run on prompt 0"),
    "score before rollout": (
        lambda run: run("score", run.prompts(2)), "call 'judge' needs the key 'ids' of part 'rollout'"),
    "send without run": (
        lambda run: run.send("rollout", run.prompts(1)), r"run.send\('rollout'\) and then not run"),
    "send twice": (
        lambda run: [run.send("rollout", run.prompts(1)) for _ in "ab"],
        "what was sent before has to be run"),
    "run on others": (
        lambda run: [run.send("rollout", run.prompts(1)), run("rollout", run.prompts(1))],
        "'rollout' on other samples than"),
    "run on none": (
        lambda run: [run.send("rollout", run.prompts(1)), run("rollout", None)],
        "'rollout' on other samples than"),
    "inputs made anew after send": (
        _score_anew_after_send, r"runs part 'score' after run.send\('train'\) has sent what it made"),
    "state of objects": (lambda run: run.state.update(x=object()), "run.state must hold JSON values only"),
    "state with numbers as keys": (
        lambda run: run.state.update(x={1: 2}), "run.state must hold JSON values only: 'x' has a dict"),
    "circular state": (_circle, "run.state must hold JSON values only"),
    "state that is no dict": (lambda run: setattr(run, "state", [1]), "run.state must be a dict"),
    "unknown role": (lambda run: run.updates("critic"), r"updates\('critic'\): the roles are actor, ref"),
    "unknown call": (lambda run: run.agree("nobody"), "'nobody' is not the name of a HostFunction"),
    "call that decides nothing": (lambda run: run.agree("prepare"), "HostFunction with decides=True"),
    "call that filters nothing": (
        lambda run: run.pool("p").add(run.prompts(1), where="prepare"), "HostFunction with filters=True"),
    "agree before run": (lambda run: run.agree("judge"), "'score' of call 'judge' has not run in this step"),
    "agree in a later step": (_agree_late, "'score' of call 'judge' has not run in this step"),
    "add others than were filtered": (_add_others, "'judge' has not run on prompt 0"),
    "no prompts": (lambda run: run.prompts(0), r"run.prompts\(0\): it must be a whole number of at least 1"),
    "batch of the future": (lambda run: run.batch(3), r"run.batch\(3\): run.prompts\(\) has been called 0"),
    "batch too old": (
        lambda run: (run.prompts(1), run.batch(run.number - 1)),
        r"run.batch\(0\): its samples were forgotten"),
    "samples of an earlier step": (_keep_old, "prompt 0.*forgotten"),
    "prompts of an earlier step": (_keep_old_prompts, "prompt 0.*forgotten"),
    "pool of samples of an earlier step": (_pool_old, "prompt 0.*forgotten"),
    "invented samples": (lambda run: run("rollout", Samples((5,))), "prompt 5"),
    "double samples": (lambda run: run("rollout", Samples((*run.prompts(1).prompts, 0))), "prompt 0 twice"),
    "pool that keeps": (
        lambda run: [run.pool("p"), run.pool("p", keeps=True)], r"pool\('p'\): `keeps` must always be"),
    "take of none": (lambda run: run.pool("p").take(0), "take.0.*at least 1"),
    "take of fewer than none": (lambda run: run.pool("p").take(-1), "take.-1.*at least 1"),
    "take in unknown order": (
        lambda run: run.pool("p").take(1, order="newest"), "'newest'; legal are 'oldest' and 'random'"),
    "no number": (lambda run: run.prompts("many"), r"run.prompts\('many'\): it must be a whole number"),
    "error": (lambda run: run.pool("p").take("many"), r"step\(\) raised TypeError.*test_step_program.py"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_clear_sentence(case):
    program, sentence = MISUSE[case]
    _KEPT.clear()
    with pytest.raises(UserError, match=sentence) as raised:
        run_all(program, steps=3)
    assert "\n" not in str(raised.value)


def test_a_batch_is_kept_while_all_of_its_prompts_are():
    def program(run):
        batch = run_scored(run, 3)
        pool = run.pool("last")
        pool.add(Samples(batch.prompts[-1:]))
        if run.number:
            with pytest.raises(UserError, match="forgotten"):
                run.batch(run.number - 1)
        assert run.batch(run.number) == batch

    recorder, runner = run_all(program, steps=3)
    forgotten = [event[1] for event in recorder.events if event[0] == "forget"]
    assert forgotten == [(0, 1), (3, 4), (6, 7)]
    assert len(runner.pool("last")) == 3


def test_unfinished_samples_cannot_be_begun_again():
    def again(run):
        run("rollout", run.prompts(1) if run.number == 0 else run.batch(0))

    with pytest.raises(UserError, match="prompt 0.*unfinished"):
        run_all(again, steps=3, max_lag=2)

    def anew(run):
        if run.number == 0:
            run("rollout", run.prompts(1))
        if run.number == 1:
            assert run("rollout", None) == run.batch(0)
            run("rollout", run.batch(0))  # It has no complete answer for the time being.
            run("score", run.batch(0))

    with pytest.raises(UserError, match="needs the key 'ids' of part 'rollout', which has not run on prompt"):
        run_all(anew, steps=3, max_lag=2)


def test_rows_that_begin_late_are_kept_until_they_have_been_used():
    """The samples of a batch are kept for two steps, and those of unfinished rows for as long as it takes."""

    def program(run):
        if run.number == 0:
            run.prompts(2)
        done = run("rollout", run.batch(0) if run.number == 2 else None)
        assert (done is not None) == (run.number == 4)
        run("score", done)
        run("train", done)

    recorder, _ = run_all(program, steps=4, max_lag=2, rounds=3)
    assert [event[0] + str(event[1]) for event in recorder.events if event[1]] == [
        *["runrollout"] * 3, "runscore", "runtrain", "forget(0, 1)"]


def test_state_is_the_same_with_and_without_a_restart():
    """JSON has no tuples: a run that goes on sees what a restarted one would."""
    seen = []

    def program(run):
        seen.append(dict(run.state))
        run.state |= {"pair": (1, 2), "three": [run.number]}

    recorder, runner = run_all(program, steps=2)
    assert seen == [{}, {"pair": [1, 2], "three": [0]}]
    saved = runner.to_json()
    copy = json.dumps(saved)
    with runner.one_step():
        runner.state["pair"].append(3)
        run_scored(runner)
    assert json.loads(copy)["state"]["pair"] == [1, 2]


class NaivePool:
    """The prompts of a pool, each with the updates before its generation, as a plain list."""

    def __init__(self, keeps: bool) -> None:
        self.rows: list[tuple[int, int]] = []
        self.keeps = keeps

    def remove(self, prompts) -> None:
        if not self.keeps:
            self.rows = [row for row in self.rows if row[0] not in prompts]


@pytest.mark.parametrize("seed", range(15))
def test_pools_are_lists(seed):
    rng = random.Random(seed)
    naive = {name: NaivePool(keeps=name == "replay") for name in ("waiting", "replay")}
    began: dict[int, int] = {}
    gone: set[int] = set()

    def program(run):
        pools = {name: run.pool(name, keeps=pool.keeps) for name, pool in naive.items()}
        began.update(dict.fromkeys(run_scored(run, rng.randint(1, 5)).prompts, run.updates("actor")))
        handed_out = run.batch(run.number).prompts
        for _ in range(rng.randint(1, 6)):
            name = rng.choice(list(naive))
            pool, plain = pools[name], naive[name]
            operation = rng.choice(["add", "add where", "take", "random", "drop", "shrink", "train"])
            before = [prompt for prompt, _ in plain.rows]
            n = rng.randint(1, 6)
            if operation.startswith("add"):
                chosen = Samples(tuple(rng.sample(handed_out, rng.randint(0, len(handed_out)))))
                where = "judge" if operation == "add where" else None
                pool.add(chosen if chosen or rng.random() < 0.5 else None, where=where)
                new = [p for p in chosen.prompts if p not in before and (where is None or p % 3)]
                plain.rows += [(prompt, began[prompt]) for prompt in new]
            elif operation == "take":
                taken = pool.take(n)
                assert (taken.prompts if taken else ()) == tuple(sorted(before[:n]))
                plain.remove(before[:n])
            elif operation == "random":
                taken = pool.take(n, order="random")
                taken = taken.prompts if taken else ()
                assert len(taken) == min(n, len(before)) and set(taken) <= set(before)
                assert list(taken) == sorted(set(taken))
                plain.remove(taken)
            elif operation == "drop":
                now, age = run.updates("actor"), rng.randint(0, 3)
                old = [row for row in plain.rows if now - row[1] > age]
                assert pool.drop(max_age=age) == len(old)
                plain.rows = [row for row in plain.rows if row not in old]
            elif operation == "shrink":
                most = rng.randint(1, 12)
                assert pool.drop(max_size=most) == max(0, len(before) - most)
                plain.rows = plain.rows[-most:]
            elif before:
                run("train", Samples(tuple(rng.sample(before, rng.randint(1, len(before))))))
            assert len(pool) == len(plain.rows)

    recorder, runner = run_all(program, steps=12)
    for event in recorder.events:
        if event[0] == "forget":
            assert not gone & set(event[1])
            gone |= set(event[1])
        else:
            assert not gone & set(event[2])
    pooled = {prompt for plain in naive.values() for prompt, _ in plain.rows}
    assert gone == began.keys() - pooled
    missing = [value for metric, value in recorder.metrics if metric.endswith("/missing")]
    assert all(value >= 0 for value in missing)


def test_random_choices_depend_on_the_seed_and_the_operation():
    def program(run):
        pool = run.pool("p", keeps=True)
        pool.add(run_scored(run, 30))
        chosen.append([pool.take(10, order="random").prompts for _ in range(2)])

    results = []
    for seed in (0, 0, 1):
        chosen: list = []
        run_all(program, steps=1, seed=seed)
        results.append(chosen[0])
    assert results[0] == results[1] != results[2]
    assert results[0][0] != results[0][1]


def test_the_metric_of_a_short_batch():
    def program(run):
        pool = run.pool("p")
        pool.add(run_scored(run, 3))
        assert pool.take(5) == Samples((0, 1, 2))
        assert pool.take(2) is None

    recorder, _ = run_all(program, steps=1)
    assert recorder.metrics == [("pool/p/missing", 2.0), ("pool/p/missing", 2.0)]


def test_ages_are_those_of_the_first_generating_role():
    second = FunctionCall("draft", "generate", ("prompt",), ("drafts",), "ref")
    parts = PARTS | {"draft": ("draft",)}

    def program(run):
        batch = run_scored(run, 1)
        run("draft", batch)  # The role of this call is never trained.
        pool = run.pool("p", keeps=True)
        pool.add(batch)
        run("train", batch)
        if run.number == 3:
            assert pool.drop(max_age=2) == 2  # Prompts 0 and 1 have ages 4 and 3.

    run_all(program, steps=4, given_graph=GRAPH.add(second), given_parts=parts)


def random_step(seed: int):
    """Return a step program that draws what it does from `seed`, the number of the step and the state."""

    def step(run):
        rng = random.Random(f"{seed}/{run.number}/{run.state.get('sum')}")
        waiting, replay = run.pool("waiting"), run.pool("replay", keeps=True)
        done = run("rollout", run.prompts(rng.randint(1, 4)) if rng.random() < 0.8 else None)
        if done:
            if rng.random() < 0.5:
                run.send("score", done)
            run("score", done)
            decision = run.agree("judge")
            run.state["sum"] = decision["sum"] + run.state.get("sum", 0)
            run.state.setdefault("history", []).append([run.number, decision["odd"]])
            waiting.add(done, where=rng.choice([None, "judge"]))
            replay.add(done)
        while len(waiting) >= 3 or (len(waiting) and rng.random() < 0.2):
            batch = waiting.take(3, order=rng.choice(["oldest", "random"]))
            for _ in range(rng.randint(1, 2)):
                if rng.random() < 0.5:
                    run.send("train", batch)
                run("train", batch)
        if rng.random() < 0.5:
            run("train", replay.take(2, order="random"))
        for pool in (waiting, replay):
            if rng.random() < 0.3:
                pool.drop(max_age=rng.randint(0, 4))

    return step


@pytest.mark.parametrize("seed", range(12))
def test_a_restored_run_continues_with_the_same_operations(seed):
    lag = seed % 4
    settings = {"steps": 12, "max_lag": lag, "rounds": max(1, lag) + (seed % 2 if lag else 0), "seed": seed}
    experiment, recorder, runner = make(random_step(seed), **settings)
    saved, starts = [], []
    for _ in range(experiment.steps + lag):
        saved.append(json.dumps(runner.to_json()))
        starts.append((len(recorder.notes), len(recorder.events), len(recorder.metrics)))
        with runner.one_step():
            experiment.step(runner)
    assert len({digest for *_, digest in recorder.notes}) == len(recorder.notes)
    assert Counter(kind for kind, *_ in recorder.events)["run"] > 20
    for document, (note, event, metric) in zip(saved, starts, strict=True):
        experiment, again, runner = make(random_step(seed), **settings)
        runner.restore(json.loads(document))
        assert json.dumps(runner.to_json()) == document
        while runner.number < experiment.steps + lag:
            with runner.one_step():
                experiment.step(runner)
        assert again.notes == recorder.notes[note:]
        assert again.events == recorder.events[event:]
        assert again.metrics == recorder.metrics[metric:]


def test_the_digest_tells_runs_apart():
    """Two ranks that branch differently have different digests from then on, also if they agree later."""

    def program(run):
        batch = run_scored(run)
        if run.number == 1:
            run.state["rank"] = next(ranks)
        else:
            run.state.pop("rank", None)
        run("train", batch)

    ranks = iter((0, 1))
    digests = []
    for _ in range(2):
        recorder, _ = run_all(program, steps=4)
        digests.append([digest for *_, digest in recorder.notes])
    same = [a == b for a, b in zip(*digests, strict=True)]
    assert same == sorted(same, reverse=True) and same.count(True) == 9 and not all(same)


def test_the_trial_reaches_the_steps_in_which_nothing_begins():
    def program(run):
        run("rollout", run.prompts(1))
        assert run.prompts(1).prompts

    with pytest.raises(UserError, match=r"step\(\) raised AttributeError.*test_step_program.py"):
        try_step_program(Toy(program=program, steps=100, max_lag=2), GRAPH)

    seen = []

    def careful(run):
        seen.append(run.prompts(1))

    try_step_program(Toy(program=careful, steps=100), GRAPH)
    assert None not in seen


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_trial_returns_the_operations_of_a_run(lag):
    parts = PARTS if lag else {"step": [call.name for call in GRAPH.order]}
    settings = {"steps": lag + 3, "max_lag": lag, "given_parts": parts, "batch_size": 2}
    recorder, _ = run_all(**settings)
    assert try_step_program(Toy(**settings), GRAPH) == [text for _, text, _ in recorder.notes]


def _until_full(run):
    pool = run.pool("p")
    while len(pool) < 4:
        pool.add(run_scored(run), where="judge")


def _until_complete(run):
    run.prompts(1)
    while run("rollout", None) is None:
        pass


def _until_agreed(run):
    run_scored(run)
    while run.agree("judge") != 2:
        pass


@pytest.mark.parametrize(("program", "lag"), [(_until_full, 0), (_until_complete, 2), (_until_agreed, 0)])
def test_the_trial_finds_endless_loops(program, lag):
    with pytest.raises(UserError, match=r"step\(\) has not ended after 10000 operations, the last: "):
        try_step_program(Toy(program=program, max_lag=lag, steps=3), GRAPH)


def test_the_trial_finds_loops_in_which_nothing_runs(monkeypatch):
    def program(run):
        while True:
            pass

    monkeypatch.setattr(step_trial, "_MAX_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"step\(\) has not ended after 0.2 s in a trial"):
        try_step_program(Toy(program=program), GRAPH)


def test_the_trial_refuses_state_that_no_checkpoint_holds():
    class Counts(Toy):
        def step(self, run):
            self.count = getattr(self, "count", 0) + 1

    with pytest.raises(UserError, match=r"changes count of the experiment.*run.state\['count'\]"):
        try_step_program(Counts(), GRAPH)


def test_the_trial_finds_what_fails_when_everything_is_filtered():
    def program(run):
        pool = run.pool("p")
        pool.add(run_scored(run), where="judge")
        run("train", Samples(pool.take(2).prompts))

    with pytest.raises(UserError, match=r"step\(\) raised AttributeError.*test_step_program.py:\d+\)"):
        try_step_program(Toy(program=program), GRAPH)


PARTS_REFUSED = {
    "incomplete": ({"rollout": ("generate",)}, "leaves out the call 'judge': each belongs to one part"),
    "text": ({"rollout": "generate"}, "must return a dict: part name -> a list"),
    "duplicate": (PARTS | {"more": ("train",)}, "lists the call 'train' 2 times"),
    "duplicate in one part": (PARTS | {"train": ("prepare", "train", "train")}, "'train' 2 times"),
    "unknown": (PARTS | {"more": ("critic",)}, "lists the call 'critic': there are generate, judge, "),
    "cyclic": (
        {"a": ("generate", "train"), "b": ("judge", "logprobs", "prepare")},
        "need one another: (a -> b -> a|b -> a -> b)"),
}


@pytest.mark.parametrize("case", PARTS_REFUSED)
def test_parts_that_are_refused(case):
    parts, sentence = PARTS_REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        checked_parts(Toy(given_parts=parts), GRAPH)
    assert checked_parts(Toy(), GRAPH) == PARTS


def test_rounds_need_one_generating_call_whose_answers_go_to_other_parts():
    second = FunctionCall("draft", "generate", ("prompt",), ("drafts",), "ref")
    graph = GRAPH.add(second)
    parts = PARTS | {"draft": ("draft",)}
    checked_parts(Toy(given_parts=parts), graph)
    with pytest.raises(ValueError, match="rounds is 2: .* single generating call.*generate and draft"):
        checked_parts(Toy(given_parts=parts, max_lag=2), graph)
    parts = {"rollout": ("generate", "judge"), "score": ("logprobs",), "train": ("prepare", "train")}
    checked_parts(Toy(given_parts=parts, max_lag=1), GRAPH)
    with pytest.raises(ValueError, match="rounds is 2: call 'judge' .*unfinished samples of 'generate'"):
        checked_parts(Toy(given_parts=parts, max_lag=2), GRAPH)


def test_a_part_that_runs_again_makes_later_ones_incomplete():
    def program(run):
        samples = run_scored(run)
        run("rollout", samples)
        run("train", samples)

    with pytest.raises(UserError, match="of part 'score', which has not run on prompt 0"):
        run_all(program, steps=1)


def test_a_drained_run_goes_on_from_an_earlier_step_only():
    """With lag, the last steps begin no answers that further steps could train on."""
    settings = {"max_lag": 1, "given_parts": PARTS, "batch_size": 2}
    experiment, _, runner = make(steps=4, **settings)
    for number in range(1, 6):
        with runner.one_step():
            experiment.step(runner)
        longer = make(steps=6, **settings)[2]
        if number <= 4:
            longer.require_continuable(runner.to_json())
            continue
        with pytest.raises(UserError, match="steps is 6 now, and the checkpoint is of the end of a run of 4"):
            longer.require_continuable(runner.to_json())


def test_a_decision_needs_all_samples():
    with pytest.raises(ValueError, match="decides.*splittable"):
        HostFunction(print, decides=True, splittable=True)


@pytest.mark.parametrize(("taken", "told"), [(1, "puts 1 prompts more"), (2, None), (3, None)])
def test_pools_that_grow_for_ever_are_told(taken, told):
    """A pool that gives less than it gets grows; one that waits for enough does not."""

    def program(run):
        pool = run.pool("ready")
        samples = run("rollout", run.prompts(2))
        run("score", samples)
        pool.add(samples)
        if taken < 3:
            run("train", pool.take(taken))
        elif len(pool) >= 2 * taken:
            run("train", pool.take(2 * taken))

    sentences = list(growing_pools(Toy(program=program), GRAPH))
    assert [told in sentence for sentence in sentences] == [True] * (told is not None)
