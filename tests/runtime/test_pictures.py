"""What the timeline of a run shows, on timelines written by hand."""

import json
import struct
from typing import Any

from realhf.runtime.records.pictures import (
    Panel,
    draw_pictures,
    draw_steps,
    held_out_curves,
    panels_of,
    steps_to_draw,
    without_waits,
)
from realhf.runtime.records.step_record import StepRecord, merge_metrics


def event(step: int, rank: int, kind: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "rank": rank, "kind": kind, "name": kind, "start": start, "end": end, **more}


def test_a_synchronous_run_shows_one_step_and_a_lagged_run_its_neighbours_too():
    synchronous, lagged = [], []
    for step in range(1, 6):
        start = 10.0 * step
        synchronous += [
            event(step, 0, "generate", start, start + 4), event(step, 1, "train_step", start + 4, start + 9)]
        lagged += [
            event(step, 0, "generate", start, start + 8), event(step, 1, "train_step", start + 1, start + 9)]
    synchronous[5]["end"] += 0.5  # Step 3 is then the longest.
    assert steps_to_draw(synchronous) == [4]
    assert steps_to_draw(lagged) == [2, 3, 4]


def test_a_reallocation_is_drawn_from_when_the_others_have_begun():
    about = {"transfer": "d1@1->d1@0"}
    receiver = event(2, 0, "realloc", 1.0, 6.0, senders=[1], **about)
    sender = event(2, 1, "realloc", 5.0, 6.0, senders=[], **about)
    late_receiver = event(4, 0, "realloc", 3.0, 4.0, senders=[1], **about)
    early_sender = event(4, 1, "realloc", 1.0, 3.5, senders=[], **about)
    sender_to_none = event(5, 1, "realloc", 1.0, 2.0, senders=[], **about)
    call = event(2, 0, "generate", 6.0, 9.0)
    events = [receiver, sender, late_receiver, early_sender, sender_to_none, call]
    assert [e["start"] for e in without_waits(events)] == [5.0, 5.0, 3.0, 3.0, 1.0, 6.0]
    assert receiver["start"] == 1.0  # The given events stay as they are.


def test_waits_for_environments_are_drawn_beside_the_call():
    from matplotlib.figure import Figure

    waits = [[1.0, 2.5], [3.0, 3.5]]
    call = event(1, 0, "generate", 0.0, 4.0, environment_waits=waits, environment_seconds=9.0)
    axes = Figure().subplots()
    legend = draw_steps([call, event(1, 1, "generate", 0.0, 3.0)], axes)
    assert [patch.get_label() for patch in legend] == ["generate", "wait for environments"]
    bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert bars == [(0.0, 3.0), (0.0, 4.0), (1.0, 1.5), (3.0, 0.5)]
    record = StepRecord([], [call | {"num_tokens": 8}])
    assert merge_metrics([record])["environment_wait_s/generate"] == 2.0


def test_scores_of_all_sets_are_drawn_and_the_pass_rate_of_most_samples():
    names = ["step", "reward/mean", "eval/score", "eval/pass@1", "eval/pass@4", "eval/pass@16",
             "eval/majority@16", "eval/hard/score", "eval/hard/pass@2", "eval/response_length/mean"]
    assert dict(held_out_curves(names)) == {
        "eval/score": "held-out score", "eval/hard/score": "held-out score (hard)",
        "eval/pass@16": "held-out pass@16", "eval/hard/pass@2": "held-out pass@2 (hard)"}


def test_each_of_several_rewards_has_a_panel_of_its_own():
    """Rewards may have very different scales, so they do not share an axis."""
    rewards = ["reward/mean", "reward/right/mean", "reward/right/std", "reward/length/mean", "actor/loss"]
    held_out = ["eval/score", "eval/right", "eval/length", "eval/response_length/mean"]
    assert panels_of([*rewards, "actor/pg_loss", *held_out]) == [
        Panel("mean reward", {"reward/mean": "training"}, {"eval/score": "held-out score"}),
        Panel("right", {"reward/right/mean": "training"}, {"eval/right": "held out"}),
        Panel("length", {"reward/length/mean": "training"}, {"eval/length": "held out"})]
    single = panels_of(["reward/mean", "reward/right/mean", "actor/loss", "actor/pg_loss"])
    assert [panel.title for panel in single] == ["mean reward"]
    of_sets = [f"eval/{name}/{metric}" for name in ("easy", "hard") for metric in ("score", "right")]
    sets = panels_of([*rewards[:4], *of_sets])
    assert sets[1].held_out == {"eval/easy/right": "held out (easy)", "eval/hard/right": "held out (hard)"}


def test_other_algorithms_have_panels_of_what_they_learn():
    pairs = panels_of(["actor/loss", "rewards/accuracies", "rewards/margins", "eval/loss", "eval/score",
                       "eval/rewards/accuracies"])
    assert pairs == [
        Panel("loss", {"actor/loss": "training"}, {"eval/loss": "held out"}),
        Panel("accuracy", {"rewards/accuracies": "training"}, {"eval/rewards/accuracies": "held out"}),
        Panel("held-out score", {}, {"eval/score": "held-out score"})]
    model = panels_of(["reward/loss", "reward/accuracy", "eval/accuracy", "eval/loss"])
    assert [panel.title for panel in model] == ["loss", "accuracy"] and model[1].held_out == {
        "eval/accuracy": "held out"}
    teachers = panels_of(["actor/loss", "actor/reverse_kl", "actor/reverse_kl/teacher_1",
                          "actor/reverse_kl/teacher_2"])
    assert teachers == [Panel("reverse KL to the teacher", {
        "actor/reverse_kl": "training", "actor/reverse_kl/teacher_1": "teacher_1",
        "actor/reverse_kl/teacher_2": "teacher_2"}, {})]


def test_the_picture_grows_by_a_panel_for_each_reward(tmp_path):
    """A PNG has its width and height after the signature and the name of its first chunk."""
    values = {"reward/mean": 0.1, "reward/a/mean": 1.0, "reward/b/mean": -100.0}
    steps = [{"step": i} | {name: i * value for name, value in values.items()} for i in range(4)]
    heights = []
    for names in (["reward/mean"], list(values)):
        rows = [{name: step[name] for name in ("step", *names)} for step in steps]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "timeline.jsonl").write_text("")
        draw_pictures(tmp_path)
        width, height = struct.unpack(">II", (tmp_path / "reward.png").read_bytes()[16:24])
        heights.append(height)
    assert width == 8 * 120 and heights == [round(4.5 * 120), round((4.5 + 2 * 2.2) * 120)]
