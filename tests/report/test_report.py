"""The page of a run: its sentences about a run whose figures are known, what it holds and leaves out."""

import json
import re
import shutil
import time

import pytest

from realhf.cli.main import main
from realhf.report import figures
from realhf.report.findings import missed, reallocations, reward_names, summary, trend, waiting
from realhf.report.run_data import RunFiles, thinned
from realhf.report.run_page import run_page
from realhf.report.samples import _chosen, rollouts_to_show
from tests.report import synthetic
from tests.report.synthetic import LATE_RANK, make_run


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "known")


@pytest.fixture(scope="module")
def run(path):
    return RunFiles(path)


def test_the_rank_that_waits_longest_is_named_with_its_cause(run):
    first = waiting(run)[0]
    assert first.rank == LATE_RANK
    assert first.share == pytest.approx(1 - synthetic.TRAIN / synthetic.STEP)
    cause, share = next(iter(first.causes.items()))
    assert cause == "for the inputs of actor_train (from actor_generate on 0-3, reward_forward on 1)"
    assert share == pytest.approx(2.5 / synthetic.STEP)
    others = {waits.rank: waits for waits in waiting(run)[1:]}
    assert others[1].share == pytest.approx(0.25 / synthetic.STEP)
    assert others[1].causes == {"for the weights of actor_generate": pytest.approx(0.25 / synthetic.STEP)}
    assert others[0].causes["for the weights of actor_generate"] == pytest.approx(0.25 / synthetic.STEP)


def test_rewards_are_told_apart_and_what_fell_comes_first(run):
    assert set(reward_names(run).values()) == {"exact", "format"}
    assert trend(run, "reward/format/mean", "format").verb == "fell"
    (line,) = (line for line in summary(run) if line.startswith("Rewards"))
    assert line == "Rewards by name: format (weight 0.25) fell from 0.9 to 0.3; exact rose from 0.1 to 0.9."
    assert any(line.startswith(f"Rank {LATE_RANK} waits longest, 71% of its time: 71% for the inputs")
               for line in summary(run))


def test_what_the_prediction_missed_is_ranked(run):
    head, *lines = missed(run)
    assert head.startswith("A step took 3.5 s, 1.57 times the predicted 2.23 s.")
    assert lines[0] == (
        "actor_generate took 2 s, 2.00 times the predicted 1 s: 1 s of a step longer, 29% of it.")
    assert lines[1].startswith("reward_forward took 250 ms")
    assert not any("actor_train" in line for line in lines[:-1])  # It was predicted within 2 %.
    assert lines[-1] == "Rank 3 held 12.3 GB in actor_train, 300 MB more than the predicted 12 GB."


def test_reallocations_have_the_bound_beside_the_measurement(run):
    assert reallocations(run) == [("actor", "1 GB", "250 ms", "4 GB/s", "5 GB/s", "1.05")]


def test_the_step_is_drawn_rank_by_rank_with_the_prediction_below(run):
    timeline = run.timeline
    figure = figures.step_timeline(
        timeline.steps[2], timeline.ranks, figures.call_colors(timeline.kinds), run.predicted)
    bars = {(bar.name, bar.yaxis): bar for bar in figure.data}
    generate = bars["actor_generate", "y"]
    assert list(generate.y) == ["0", "1", "2"] and list(generate.x) == [2.0] * 3
    assert list(bars["actor_generate", "y2"].y) == ["0", "1", "2", "3"]
    moves = bars["reallocates actor", "y2"]  # Goes on over the end of the step, at its beginning.
    assert sorted(zip(moves.base, moves.x, strict=True))[:1] == [(0, pytest.approx(0.1))]
    assert sum(moves.x) == pytest.approx(4 * 0.23)
    assert figure.layout.yaxis.categoryarray == ("0", "1", "2", "3")


def test_a_page_holds_everything_and_asks_for_nothing(run, path, tmp_path, capsys):
    output = tmp_path / "report.html"
    assert main(["report", str(path), "-o", str(output), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["waiting"][0]["rank"] == LATE_RANK and document["finished"]
    text = output.read_text()
    ours = text[: text.index("</style>")] + text[text.index("<body") : text.index("plotly.js v")]
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", ours) and "default-src 'none'" in text
    for title in ("In short", "Curves", "One step, by rank", "What the prediction missed",
                  "Memory of each rank", "Weights on their way", "Rollouts",
                  "Plan, settings, versions, commands"):
        assert f"<h2>{title}</h2>" in text
    assert "realhf run grpo.py --plan plan.yaml" in text
    figures_of_page = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    assert len(figures_of_page) > 20 and all(json.loads(one) is not None for one in figures_of_page)


def test_texts_of_rollouts_cannot_become_code(tmp_path):
    path = make_run(tmp_path / "run", steps=2, tokens=False, text="</script><script>alert(1)</script><!--")
    text = run_page(RunFiles(path)).html()
    assert "<script>alert(1)" not in text and "\\u003c/script>" in text


def test_rollouts_are_thinned_by_whole_groups_evenly_over_the_steps(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run", steps=50)
    monkeypatch.setattr("realhf.report.samples._MOST_BYTES", 60_000)
    shown, note = rollouts_to_show(RunFiles(path))
    groups = {}
    for one in shown:
        groups.setdefault((one["step"], one["sample"] // 4), []).append(one["sample"])
    assert all(len(samples) == 4 for samples in groups.values())
    steps = sorted({step for step, _ in groups})
    assert steps[0] == 1 and len(steps) > 20
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 3
    assert note.startswith(f"{len(shown)} of 400 logged rollouts are in this page, whole groups evenly")
    assert all(one["advantages"][7] == -1.0 and one["ending"] in ("end of text", "cut off") for one in shown)


def test_chosen_groups_fit_and_the_first_of_each_step_come_first():
    sizes = {(step, prompt): 10 for step in range(5) for prompt in range(3)}
    assert _chosen(sizes, 1000) == set(sizes)
    assert _chosen(sizes, 50) == {(step, 0) for step in range(5)}
    assert _chosen(sizes, 30) == {(0, 0), (1, 0), (3, 0)}
    assert len(_chosen(sizes, 3)) == 1


def test_long_curves_are_means_of_equally_many_steps():
    steps, values = list(range(1, 101)), [float(i) for i in range(100)]
    x, y, width = thinned(steps, values, 30)
    assert width == 4 and len(x) == 25 and x[-1] == 100
    assert y == [sum(values[i : i + 4]) / 4 for i in range(0, 100, 4)]
    assert thinned(steps, values, 100) == (steps, values, 1)


def test_many_steps_are_thinned_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("realhf.report.run_data._MOST_BARS", 100)
    path = make_run(tmp_path / "run", steps=60)
    found = RunFiles(path)
    assert {1, 60} <= set(found.timeline.steps) and 4 <= len(found.timeline.steps) <= 10
    assert found.timeline.times[0].calls["actor_train"] == pytest.approx(60 * synthetic.TRAIN)
    assert f"Of 60 steps, {len(found.timeline.steps)} are in this page" in run_page(found).html()


def test_panels_have_every_metric_once_and_pass_at_the_largest_k(run):
    learning, speed, others = figures.panels([*run.metric_names, "eval/pass@1", "my/own", "plain"])
    by_title = {panel.title: panel for panel in (*learning, *speed, *others)}
    assert set(by_title["Held-out score"].metrics) == {"eval/score", "eval/pass@4"}
    assert by_title["my"].metrics == {"my/own": "own"} and by_title["other"].metrics == {"plain": "plain"}
    assert by_title["Mean reward"].band == ("reward/mean", "reward/group_std")
    shown = [metric for panel in by_title.values() for metric in panel.metrics]
    assert set(run.metric_names) <= set(shown)


def test_a_run_without_predictions_or_with_old_files_has_a_page_too(tmp_path):
    """Runs of earlier versions have no about.json; a run may have recorded no step but an evaluation."""
    path = make_run(tmp_path / "run", steps=3, finished=False)
    for name in ("about.json", "rollouts.jsonl", "plan.yaml", "config.json"):
        (path / name).unlink()
    found = RunFiles(path)
    assert missed(found) == ["There is no prediction: the run has recorded no prediction."]
    assert "Ended early" in run_page(found).html()
    (path / "metrics.jsonl").write_text('{"step": 0, "eval/score": 0.5}\n')
    (path / "timeline.jsonl").unlink()
    assert "0.5" in run_page(RunFiles(path)).html()


@pytest.mark.parametrize("words, says", [
    (["nowhere"], "nowhere: there is no such run directory"),
    (["."], "has no metrics.jsonl"),
    (["{run}", "--every", "0"], "--every 0: it must be above 0 seconds"),
    (["{run}", "-o", "gone/report.html"], "there is no directory gone"),
    (["{run}", "-o", "{run}/config.json"], "exists and is no page"),
    (["{run}", "{run}", "--watch"], "--watch: it shows one run, and several are given"),
    (["{run}", "--trace", "t.json", "--steps", "7-5"], "--steps 7-5: write steps from 1 on"),
    (["{run}", "--trace", "t.json", "--steps", "700"], "has no events of these steps"),
])
def test_what_a_user_gets_wrong_is_a_sentence(words, says, path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(word.format(run=path) for word in words)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name, line", [
    ("timeline.jsonl", '{"step": 1, "rank": 0}'), ("timeline.jsonl", "[]"), ("timeline.jsonl", "{"),
    ("rollouts.jsonl", '{"step": 1, "followed": true, "prompt_number": 3, "turns": nope}'),
    ("metrics.jsonl", '{"step": 3, "timing_s/step": "long"}'), ("about.json", '{"calls": 7}'),
    ("about.json", '{"predicted": {"step_seconds": 0, "calls": {}}}'), ("plan.yaml", "calls: 3"),
    ("config.json", "[1]"),
])
def test_damaged_files_are_a_sentence(name, line, path, tmp_path, capsys):
    damaged = shutil.copytree(path, tmp_path / "run")
    if name.endswith("jsonl"):
        with (damaged / name).open("a") as file:
            file.write(line + "\n")
    else:
        (damaged / name).write_text(line)
    assert main(["report", str(damaged), "-o", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(damaged) in err


def test_a_trace_has_all_ranks_on_one_clock(path, tmp_path):
    """Rank 2 is on a host whose clock is 5 s ahead; the trace shows its events where they took place."""
    ahead = shutil.copytree(path, tmp_path / "ahead")
    about = json.loads((ahead / "about.json").read_text())
    (ahead / "about.json").write_text(json.dumps(about | {"clocks": {"2": 5.0}}))
    lines = [json.loads(line) for line in (ahead / "timeline.jsonl").read_text().splitlines()]
    shifted = [line | {key: line[key] + 5.0 for key in ("start", "end")} if line["rank"] == 2 else line
               for line in lines]
    synthetic.write_lines(ahead / "timeline.jsonl", shifted)
    found = []
    for directory in (path, ahead):
        words = ["report", str(directory), "-o", str(tmp_path / "page.html"), "--steps", "2"]
        assert main([*words, "--trace", str(tmp_path / "trace.json")]) == 0
        found.append(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert found[0] == found[1]
    slices = [event for event in found[0] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1, 2, 3} and min(event["ts"] for event in slices) == 0
    (generate,) = (e for e in slices if e["pid"] == 2 and e["name"] == "actor_generate")
    assert generate["dur"] == pytest.approx(2e6) and generate["ts"] == pytest.approx(0.25e6, abs=10)
    names = {event["args"]["name"] for event in found[0] if event["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in range(4)}


@pytest.mark.slow
def test_a_large_run_has_a_small_page(tmp_path):
    """1,000 steps, 64 ranks and 100,000 rollouts; tests/report/test_browser.py opens it."""
    path = make_run(tmp_path / "large", steps=1000, ranks=64, rollouts_per_step=100, tokens=False)
    begin = time.monotonic()
    text = run_page(RunFiles(path)).html()
    assert len(text.encode()) < 30e6 and time.monotonic() - begin < 120
    assert "of 100,000 logged rollouts are in this page" in text and "Of 1,000 steps, " in text
