"""What a signal does in each phase of a run, and when the user reads about it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from realhf.checkpoint.names import find_checkpoints
from realhf.distributed.world import World
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.signals import StopSignals
from tests.runtime.tiny import make_experiment, write_task


def _until_printed(capsys, *, seconds):
    """Return what is printed to standard error, as soon as there is something, and how long it took."""
    start = time.monotonic()
    text = ""
    while not text and time.monotonic() < start + seconds:
        time.sleep(0.01)
        text = capsys.readouterr().err
    return text, time.monotonic() - start


def test_the_answer_to_ctrl_c_comes_at_once_even_if_the_main_thread_is_busy(capsys, monkeypatch):
    monkeypatch.setattr("realhf.signals._DELAY_SECONDS", 3600.0)
    with StopSignals(signal.SIGINT, signal.SIGTERM) as stop:
        stop.begin(lambda: "the run ends after step 4")
        os.kill(os.getpid(), signal.SIGINT)
        text, _ = _until_printed(capsys, seconds=60)
        assert stop.requested == "SIGINT"
    assert text == "realhf: the run ends after step 4\n"


def test_sigterm_is_answered_later_under_torchrun_which_may_end_this_worker_by_it(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with StopSignals(signal.SIGINT, signal.SIGTERM) as stop:
        stop.begin(lambda: "the run ends")
        os.kill(os.getpid(), signal.SIGTERM)
        text, seconds = _until_printed(capsys, seconds=60)
        assert stop.requested == "SIGTERM"
    assert text == "realhf: the run ends\n" and seconds > 0.8
    with StopSignals(signal.SIGTERM) as stop:
        stop.begin(lambda: "the run ends")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert _until_printed(capsys, seconds=1.5)[0] == "", "the run was over before"


PHASES = """
import os, signal, sys, time
from realhf.signals import StopSignals, signals_end_the_process
both = signal.SIGINT, signal.SIGTERM
with signals_end_the_process(*both), StopSignals(*both) as stop:
    for number in map(int, sys.argv[2:]):
        if sys.argv[1] == "training" and stop.requested is None:
            stop.begin(lambda: "the run ends")
        os.kill(os.getpid(), number)
        time.sleep(0.3)
"""


@pytest.mark.parametrize(("phase", "numbers", "said"), [
    ("starting", [signal.SIGTERM], ["realhf: ended by SIGTERM"]),
    ("training", [signal.SIGINT, signal.SIGTERM], ["realhf: the run ends", "realhf: ended by SIGTERM"]),
])
def test_what_ends_the_process_at_once(phase, numbers, said):
    """Before the first step any signal does, because there is nothing to save; later a second one."""
    words = [sys.executable, "-c", PHASES, phase, *map(str, map(int, numbers))]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (1, said)


def test_a_rank_without_an_answer_stops_silently(capsys):
    with StopSignals(signal.SIGINT) as stop:
        stop.begin(None)
        os.kill(os.getpid(), signal.SIGINT)
        assert _until_printed(capsys, seconds=0.3)[0] == "" and stop.requested == "SIGINT"


def test_the_answer_names_the_step_after_which_the_run_ends(tmp_path, capsys):
    """The reward function of the second step sends the signal, and waits until it is answered."""
    calls = []
    printed = []

    def interrupting(completions):
        calls.append(len(completions))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            printed.append(_until_printed(capsys, seconds=5)[0])
        return [float(len(text)) for text in completions]

    changes = {"steps": 5, "eval_dataset": None, "checkpoint_every": 4}
    experiment = make_experiment("grpo", write_task(tmp_path), **changes)
    experiment.reward_function = interrupting
    program = compile_program(experiment, None, world_size=1)
    with StopSignals(signal.SIGINT) as stop:
        result = Trainer(program, World(), out=tmp_path / "run", stop=stop, quiet=True).run()
    assert result.stopped_after == 2 and len(calls) == 2
    assert list(find_checkpoints(tmp_path / "run" / "checkpoints")) == [2]
    (sentence,) = printed
    ends = "the run saves a checkpoint after step 2, and ends; a second signal ends it at once"
    assert sentence.startswith(f"realhf: {ends} (step 2/5: reward_forward, ")
