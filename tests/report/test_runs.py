"""Real runs and their pages: what a run records, stacks, profiled steps, pages while it goes on."""

import gzip
import json
import signal
import time

import pytest

from realhf.cli.main import main
from realhf.distributed import tags
from realhf.report.findings import missed, waiting
from realhf.report.run_data import RunFiles
from realhf.report.run_page import run_page
from realhf.runtime.records.about import clocks_ahead
from tests.cli_tools import ForkedCommand, read_jsonl, wait_until, write_experiment, write_plan

TWO_RANKS = {"actor_generate": "d2@0-1", "ref_forward": "d1@1", "actor_train": "t2@0-1"}


def test_a_run_records_what_its_page_needs(grpo_run, tmp_path):
    experiment, plan, out = grpo_run
    about = json.loads((out / "about.json").read_text())
    (command,) = (one["command"] for one in about["commands"])
    assert str(experiment) in command and "--cluster cpu-laptop" in command
    assert {"python", "realhf", "realhf code", "torch"} <= about["versions"].keys()
    calls = {call["name"]: call for call in about["calls"]}
    assert calls["actor_generate"]["layout"] == "d2@0-1" and calls["reward_forward"]["kind"] == "host"
    run = RunFiles(out)
    assert set(run.producers("actor_train")) >= {"actor_generate", "advantages"}
    predicted = about["predicted"]
    assert set(predicted["calls"]) == {"actor_generate", "ref_forward", "actor_train"}
    assert predicted["step_seconds"] >= max(call["seconds"] for call in predicted["calls"].values())
    assert set(predicted["memory"]["actor_train"]) == {"0", "1"}
    assert missed(run)[0].startswith("A step took ") and "cpu-laptop and no measurement" in missed(run)[0]
    for waits in waiting(run):
        assert 0 < waits.share < 1
    moved = [event for event in read_jsonl(out / "timeline.jsonl") if event["kind"] == "realloc"]
    assert all(event["bound_seconds"] > 0 for event in moved if event["received_bytes"])
    assert "Which ranks run which call" in run_page(run).html()


def test_times_of_a_rank_add_up_to_the_steps(grpo_run):
    """What a rank does and waits for, counted from events one by one, covers its steps and not more."""
    _, _, out = grpo_run
    run = RunFiles(out)
    total = sum(record["timing_s/step"] for record in run.steps)
    for rank, known in run.timeline.times.items():
        events = [event for event in read_jsonl(out / "timeline.jsonl")
                  if event["rank"] == rank and not event["name"].startswith("eval/")]
        calls = sum(event["end"] - event["start"] for event in events
                    if event["kind"] in ("generate", "forward", "train_step", "host"))
        assert sum(known.calls.values()) == pytest.approx(calls)
        assert calls <= known.known <= 1.05 * total


def test_a_signal_makes_every_rank_write_its_stacks_and_steps_are_profiled(tmp_path):
    """The experiment's reward sleeps in its third step, until the stacks are there."""
    experiment = write_experiment(
        tmp_path, steps=3, eval_dataset=None, checkpoint_every=0, model={}, body=f"""
def slow(completions, **columns):
    import time
    slow.count = getattr(slow, "count", 0) + 1
    run = Path({str(tmp_path)!r}) / "run"
    if slow.count == 3:
        (run / "waits").touch()
    while slow.count == 3 and len(list(run.glob("stacks/*"))) < 2:
        time.sleep(0.05)
    return [float(len(text)) for text in completions]

experiment.reward_function = slow
""")
    plan = write_plan(tmp_path, TWO_RANKS | {"reward_forward": "d1@0"})
    words = ("run", experiment, "--plan", plan, "--out", tmp_path / "run", "--timeout", 60)
    with ForkedCommand(*words, "--profile-steps", "2") as command:
        assert wait_until((tmp_path / "run/waits").exists, seconds=60)
        command.interrupt(signal.SIGUSR1)
        code, _, err = command.finish()
    assert code == 0, err
    texts = [(tmp_path / f"run/stacks/rank_{rank}.txt").read_text() for rank in range(2)]
    assert "rank 0 goes on\nlast action: reward_forward (step 3/3)" in texts[0]
    assert "in slow" in texts[0] and "most recent call first" in texts[1]
    assert "rank 1 goes on\nlast action: " in texts[1]
    trace = tmp_path / "trace.json.gz"
    words = ("report", tmp_path / "run", "-o", tmp_path / "page.html", "--trace", trace)
    assert main([str(word) for word in words]) == 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    for rank in range(2):
        ours = [event for event in slices if event["pid"] == rank and event["args"].get("step") == 2]
        begin = min(event["ts"] for event in ours)
        end = max(event["ts"] + event["dur"] for event in ours)
        kernels = [event for event in slices if event["pid"] == rank and event["name"].startswith("aten::")]
        assert len(kernels) > 100
        assert all(begin - 5e4 <= event["ts"] <= end + 5e4 for event in kernels)


def test_a_watched_run_gets_pages_until_it_ends(tmp_path):
    experiment = write_experiment(tmp_path, steps=80, eval_dataset=None, checkpoint_every=0, model={})
    out, page = tmp_path / "run", tmp_path / "report.html"
    with ForkedCommand("run", experiment, "--out", out) as command:
        assert wait_until(lambda: (out / "metrics.jsonl").is_file() and (
            (out / "metrics.jsonl").stat().st_size > 0), seconds=60)
        with ForkedCommand("report", out, "-o", page, "--watch", "--every", "0.3") as watcher:
            assert wait_until(page.is_file, seconds=60)
            text = page.read_text()
            assert 'data-refresh="0.3"' in text and "Goes on" in text and "left</div>" in text
            command.finish()
            code, _, err = watcher.finish()
    assert code == 0, err
    text = page.read_text()
    assert "data-refresh" not in text[: text.index("<main>")] and "80 steps" in text


def clocks(world) -> dict[int, float]:
    """Return what rank 0 finds of clocks that are 0, 0, 100 and 100 s ahead, on two pretended hosts."""
    per_host = world.ranks_per_host
    world.ranks_per_host = 2
    try:
        return clocks_ahead(world, now=lambda: time.time() + 100.0 * (world.rank // 2))
    finally:
        world.ranks_per_host = per_host


def test_clocks_of_hosts_are_compared(pool):
    found = pool.run(clocks)
    assert found[0].keys() == {2, 3} and found[0][2] == pytest.approx(100.0, abs=0.05)
    assert tags.CLOCK < tags.FIRST_INPUT


@pytest.mark.parametrize("words, says", [
    (["--profile-steps", "0"], "--profile-steps 0: write steps from 1 on"),
    (["--profile-steps", "a"], "--profile-steps a: write steps from 1 on"),
])
def test_steps_to_profile_that_are_none_are_refused(words, says, tmp_path, capsys):
    assert main(["run", str(write_experiment(tmp_path)), *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--price", "grpo-4"], ["--gap", "0.3", "--what-if", "batch_size=12"]])
def test_the_page_of_a_plan(options, tmp_path, capsys):
    page = tmp_path / "plan.html"
    words = ["plan", str(write_experiment(tmp_path, model={})), "--cluster", "cpu-laptop", *options]
    assert main([*words, "--html", str(page)]) == 0, capsys.readouterr().err
    text = page.read_text()
    for title in ("Calls", "One step of the steady state", "Memory of each rank"):
        assert f"<h2>{title}</h2>" in text
    if options[0] != "--price":
        assert "<h2>Other layouts, and what they would cost</h2>" in text and "Lower bound" in text
        assert "The best other layout of each call" in text and "batch_size=12" in text
    assert main([*words, "--html", str(tmp_path / "gone" / "x.html")]) == 2
    assert "there is no directory" in capsys.readouterr().err
