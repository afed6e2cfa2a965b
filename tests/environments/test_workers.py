"""Environments in processes of their own: what they answer, and each way in which they fail."""

import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.environments.protocol import Environment
from realhf.environments.workers import EnvironmentSource, EnvironmentWorkers
from realhf.errors import UserError
from tests.cli_tools import REPO
from tests.environments import players

PROMPT = {"prompt": "Hello"}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


@contextmanager
def started(make, **settings):
    workers = EnvironmentWorkers(Environment(make, **settings), EnvironmentSource.of(make))
    try:
        yield workers
    finally:
        workers.shutdown()


def replies(workers, count=1, seconds=300.0):
    """Return the next replies, by key."""
    found = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += workers.poll(0.5)
    assert len(found) == count, found
    return {reply.key: reply for reply in found}


def reply(workers):
    (found,) = replies(workers).values()
    return found


@pytest.mark.parametrize("make", [players.Guess, players.AsyncGuess])
def test_a_game_in_a_worker_is_the_game(make):
    with started(make) as workers:
        for sample, seed in enumerate([5, 5, 6]):
            workers.start(sample, {"most": 100}, seed)
        begun = replies(workers, 3)
        assert {r.start.messages[0]["content"] for r in begun.values()} == {"Guess a number from 1 to 100."}
        numbers = [random.Random(seed).randint(1, 100) for seed in (5, 5, 6)]
        for sample in range(3):
            workers.step(sample, says("0"))
        for found in replies(workers, 3).values():
            assert found.turn.messages == [{"role": "user", "content": "Higher."}]
            assert found.turn.reward == {"near": -0.1, "far": 0.0} and found.turn.total == -0.1
        for sample, number in enumerate(numbers):
            workers.step(sample, says(str(number)))
        ended = replies(workers, 3)
        assert all(r.turn.done and r.turn.total == 1.0 for r in ended.values())
        assert [ended[i].turn.metrics for i in range(3)] == [{"guess": number} for number in numbers]
        workers.start(1, {"most": 1}, 0)  # A key may be used anew.
        assert reply(workers).start.messages[0]["content"] == "Guess a number from 1 to 1."


def test_sleeping_steps_overlap_in_one_worker():
    """64 steps of 0.3 s take little more than one, in threads and in an event loop."""
    for make in (players.Sleeps, players.AsyncSleeps):
        with started(make, workers=1) as workers:
            for sample in range(64):
                workers.start(sample, PROMPT, 0)
            replies(workers, 64)
            begun = time.monotonic()
            for sample in range(64):
                workers.step(sample, says("", seconds=0.3))
            found = replies(workers, 64)
            assert 0.3 <= time.monotonic() - begun < 2.5
            assert len({r.turn.messages[0]["content"] for r in found.values()}) == 1
            assert all(0.29 < r.seconds < 2.0 for r in found.values())


@pytest.mark.parametrize("make", [players.Global, players.AsyncGlobal])
def test_isolated_environments_have_processes_and_random_numbers_of_their_own(make):
    with started(make, isolated=True) as workers:
        for sample, seed in enumerate([3, 4, 3]):
            workers.start(sample, PROMPT, seed)
        begun = replies(workers, 3)
        first = [begun[i].start.messages[0]["content"] for i in range(3)]
        for sample in (2, 0, 1):
            workers.step(sample, says("x"))
        found = replies(workers, 3)
        steps = [found[i].turn.messages[0]["content"].split() for i in range(3)]
        workers.state(1)
        assert reply(workers).state is None
    draws = [random.Random(seed) for seed in (3, 4, 3)]
    assert first == [str(draw.random()) for draw in draws]
    assert [step[0] for step in steps] == [str(draw.random()) for draw in draws]
    assert len({step[1] for step in steps}) == 3


def test_with_few_processes_isolated_rollouts_wait_their_turn():
    with started(players.Sleeps, isolated=True, workers=1, start_seconds=2.0) as workers:
        workers.start(0, PROMPT, 0)
        workers.start(1, PROMPT, 0)
        assert reply(workers).key == 0
        assert workers.poll(2.5) == []  # Waiting does not count.
        workers.close(0)
        assert reply(workers).key == 1


SENTENCES = {
    "raises": ("step_error", r"Fails\.step raised KeyError: 'door' \(.*players\.py:\d+\)"),
    "leaves": ("step_error", r"Fails\.step raised SystemExit: 3"),
    "is_killed": ("worker_lost", r"ended by SIGKILL.*printed last: last words"),
    "exits": ("worker_lost", r"ended with code 7"),
    "is_nonsense": ("step_error", r"Fails\.step returned str 'nonsense': it must be Turn\("),
    "is_nan": ("step_error", r"Fails\.step returned Turn\.reward nan: it must be a finite number"),
    "answers_itself": ("step_error", r"message of the assistant: only the model writes these"),
    "is_no_json": ("step_error", r"what is not JSON \(a value of type set\)"),
    "floods": ("step_error", r"Fails\.step returned 1\.05 MB of JSON: it must be at most 1\.05 MB"),
    "hangs": ("step_timeout", r"step has taken more than 0\.5 s \(environment\.step_seconds\)"),
    "is_stuck": ("step_timeout", r"step has taken more than 0\.5 s"),
}


def test_every_failure_ends_its_rollout_with_its_reason_and_no_other():
    """Another environment in the same worker goes on, unless the worker itself is lost."""
    with started(players.Fails, workers=1, step_seconds=0.5) as workers:
        for name, (stops, sentence) in SENTENCES.items():
            workers.start(0, PROMPT, 0)
            workers.start(1, PROMPT, 0)
            assert replies(workers, 2)[0].start.messages == [{"role": "user", "content": "Hello"}]
            workers.step(0, says(name))
            found = {}
            while 0 not in found:
                found |= {one.key: one for one in workers.poll(1.0)}
            end = found[0]
            assert end.kind == "end" and end.stop in stops, (name, end)
            assert re.search(sentence, end.sentence), (name, end)
            if end.stop == "worker_lost":
                assert (found.get(1) or reply(workers)).stop == "worker_lost"
                continue
            workers.step(1, says("works"))
            assert reply(workers).turn.messages == [{"role": "user", "content": "On."}]
            workers.close(1)


def test_an_isolated_environment_that_hangs_or_dies_is_replaced():
    with started(players.Fails, isolated=True, workers=1, step_seconds=0.5) as workers:
        for name, stop in (("is_stuck", "step_timeout"), ("exits", "worker_lost"), ("raises", "step_error")):
            workers.start(0, PROMPT, 0)
            workers.start(1, PROMPT, 0)  # It waits for the only process.
            assert reply(workers).key == 0
            workers.step(0, says(name))
            found = replies(workers, 2)
            assert (found[0].stop, found[1].kind) == (stop, "start")
            workers.close(1)


@pytest.mark.parametrize("name", ["leaks", "maps"])
def test_memory_has_a_limit_and_a_worker_without_any_is_replaced(name):
    with started(players.Fails, workers=1, memory_gib=0.3) as workers:
        workers.start(0, PROMPT, 0)
        replies(workers)
        workers.step(0, says(name))
        end = reply(workers)
        assert end.stop == "step_error" and "322 MB of memory (environment.memory_gib)" in end.sentence, end
        workers.start(0, PROMPT, 0)
        replies(workers)
        workers.step(0, says("has_nothing"))
        assert reply(workers).turn.messages[0]["content"] == "0"


def test_nothing_waits_longer_than_its_limit():
    """A step that holds the interpreter's event loop is ended with its worker."""
    with started(players.AsyncSleeps, workers=1, step_seconds=0.5) as workers:
        workers.start(0, PROMPT, 0)
        replies(workers)
        begun = time.monotonic()
        workers.step(0, says("", seconds=30.0, blocks=True))
        assert reply(workers).stop == "step_timeout" and time.monotonic() - begun < 10.0
        workers.start(0, PROMPT, 0)  # In a new worker.
        assert reply(workers).kind == "start"
        workers.step(0, says("", seconds=30.0))
        assert reply(workers).stop == "step_timeout"


def test_starts_fail_with_a_reason_too():
    with started(players.Fails) as workers:
        workers.start(0, {**PROMPT, "start": "no map"}, 0)
        found = reply(workers)
        assert found.stop == "step_error"
        assert found.sentence.startswith("Fails.start raised ValueError: no map")
        workers.start(1, {}, 0)
        assert "the row has no 'prompt'" in reply(workers).sentence
    with started(players.AsyncSleeps, start_seconds=0.3) as workers:
        workers.start(0, {**PROMPT, "seconds": 30.0}, 0)
        assert reply(workers).stop == "step_timeout"
    with started(players.NoStep) as workers:
        workers.start(0, PROMPT, 0)
        with pytest.raises(UserError, match=r"NoStep has no method step\(message\), which an"):
            reply(workers)
    with started(players.BadTool) as workers:  # check finds it in the same way.
        workers.start(0, PROMPT, 0)
        with pytest.raises(UserError, match=r"BadTool.start returned Start.tools with one .*: tool vague: "):
            reply(workers)


def test_much_printing_changes_nothing_and_close_may_fail():
    with started(players.Fails, workers=1) as workers:
        workers.start(0, PROMPT, 0)
        replies(workers)
        workers.step(0, says("prints"))
        assert reply(workers).turn.messages[0]["content"] == "On."
        workers.step(0, says("closes_badly"))
        found = {}
        while "closed" not in found:
            found |= {one.kind: one for one in workers.poll(1.0)}
        assert found["turn"].turn.done
        assert found["closed"].sentence.startswith("Fails.close raised OSError: no such door")
        workers.close(0)  # It has none.
        assert workers.poll(0.2) == []


def test_a_stopped_rollout_has_a_last_reward_and_a_kept_one_goes_on():
    with started(players.Keeps) as workers:
        row = {**PROMPT, "by": 3}
        workers.start(0, row, 0)
        replies(workers)
        workers.step(0, says("x"))
        assert reply(workers).turn.messages[0]["content"] == "3"
        workers.state(0)
        kept = reply(workers).state
        assert kept == {"count": 3}
        workers.finish(0, "max_turns")
        last = reply(workers).turn
        assert last.done and last.reward == {"max_turns": 3.0}
        workers.start(1, row, 0, state=kept)
        assert reply(workers).start.messages == [{"role": "user", "content": "Hello"}]
        workers.step(1, says("x"))
        with pytest.raises(AssertionError, match="environment 1 has not answered yet"):
            workers.step(1, says("x"))
        assert reply(workers).turn.messages[0]["content"] == "6"
    with started(players.Guess) as workers:  # It has neither.
        workers.start(0, {"most": 3}, 0)
        replies(workers)
        workers.state(0)
        assert reply(workers).state is None
        workers.finish(0, "max_tokens")
        assert reply(workers).turn.done


def test_functions_alone_are_an_environment():
    workers = EnvironmentWorkers(players.TOOLS, EnvironmentSource("TOOLS", module=players.__name__))
    workers.start(0, PROMPT, 0)
    (schema,) = reply(workers).start.tools
    assert schema["function"]["name"] == "tool_add"
    function = {"name": "tool_add", "arguments": {"a": 2, "b": 3}}
    workers.step(0, says("", tool_calls=[{"id": "call00000", "type": "function", "function": function}]))
    assert reply(workers).turn.messages[0]["content"] == "5"
    workers.step(0, says("It is 5."))
    assert reply(workers).turn.done
    workers.shutdown()


KILLED = """
import os, signal, sys
from realhf.environments.workers import Environment, EnvironmentSource, EnvironmentWorkers
from tests.environments.players import Sleeps
workers = EnvironmentWorkers(Environment(Sleeps), EnvironmentSource.of(Sleeps))
workers.start(0, {"prompt": "x"}, 0)
workers.poll(300.0)
workers.step(0, {"role": "assistant", "content": "", "seconds": 0.0})
(reply,) = workers.poll(60.0)
workers.step(0, {"role": "assistant", "content": "", "seconds": 600.0})
print(workers._process.pid, reply.turn.messages[0]["content"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _runs(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_that_is_killed_leaves_no_process():
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    processes = [int(word) for word in done.stdout.split()]
    assert done.returncode == -9 and len(set(processes)) == 2, done.stderr
    deadline = time.monotonic() + 30.0
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, processes))


def test_what_cannot_be_started_is_the_users_error(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import nowhere\n")
    workers = EnvironmentWorkers(Environment(players.Guess), EnvironmentSource(file=str(path)))
    with pytest.raises(UserError, match=r"mine\.py: ModuleNotFoundError: No module named 'nowhere'"):
        workers.poll(300.0)
    with pytest.raises(UserError, match="must be a class or a function that a module has by name"):
        EnvironmentSource.of(lambda: None)


def test_an_experiment_file_has_environments_that_no_other_process_could_import(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\nfrom types import SimpleNamespace\n"
        "from realhf.environments.protocol import Environment, Turn\n"
        "class Mine:\n    def step(self, message):\n        return Turn(str('torch' in sys.modules))\n"
        "experiment = SimpleNamespace(environment=Environment(lambda: Mine()))\n")
    workers = EnvironmentWorkers(Environment(players.Guess), EnvironmentSource(file=str(path)))
    workers.start(7, PROMPT, 0)
    assert reply(workers).key == 7
    workers.step(7, says("x"))
    assert reply(workers).turn.messages[0]["content"] == "False"
    workers.shutdown()
