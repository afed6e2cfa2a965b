"""What a signal does in each phase of a run, and when the user reads about it."""

import os
import signal
import time

import pytest

from realhf.runtime.stop_signals import StopSignals


def _until_printed(capsys, *, seconds):
    """Return what is printed to standard error, as soon as there is something, and how long it took."""
    start = time.monotonic()
    text = ""
    while not text and time.monotonic() < start + seconds:
        time.sleep(0.01)
        text = capsys.readouterr().err
    return text, time.monotonic() - start


def test_the_answer_to_ctrl_c_comes_at_once_even_if_the_main_thread_is_busy(capsys):
    with StopSignals(signal.SIGINT, signal.SIGTERM) as stop:
        stop.begin(lambda: "the run ends after step 4")
        os.kill(os.getpid(), signal.SIGINT)
        text, seconds = _until_printed(capsys, seconds=5)
        assert stop.requested == "SIGINT"
    assert text == "realhf: the run ends after step 4\n" and seconds < 0.5


def test_sigterm_is_answered_later_as_a_launcher_may_end_this_worker_by_it(capsys):
    with StopSignals(signal.SIGINT, signal.SIGTERM) as stop:
        stop.begin(lambda: "the run ends")
        os.kill(os.getpid(), signal.SIGTERM)
        text, seconds = _until_printed(capsys, seconds=5)
        assert stop.requested == "SIGTERM"
    assert text == "realhf: the run ends\n" and 0.8 < seconds < 3
    with StopSignals(signal.SIGTERM) as stop:
        stop.begin(lambda: "the run ends")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert _until_printed(capsys, seconds=1.5)[0] == "", "the run was over before"


def test_before_the_first_step_a_signal_ends_the_run(capsys):
    with (
        pytest.raises(KeyboardInterrupt, match="ended by SIGTERM before the first step"),
        StopSignals(signal.SIGTERM),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert capsys.readouterr().err == ""


def test_a_rank_without_an_answer_stops_silently(capsys):
    with StopSignals(signal.SIGINT) as stop:
        stop.begin(None)
        os.kill(os.getpid(), signal.SIGINT)
        assert _until_printed(capsys, seconds=0.3)[0] == "" and stop.requested == "SIGINT"
