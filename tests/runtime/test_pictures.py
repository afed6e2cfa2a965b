"""What the timeline of a run shows, on timelines written by hand."""

from typing import Any

from realhf.runtime.records.pictures import held_out_curves, steps_to_draw, without_waits


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


def test_scores_of_all_sets_are_drawn_and_the_pass_rate_of_most_samples():
    names = ["step", "reward/mean", "eval/score", "eval/pass@1", "eval/pass@4", "eval/pass@16",
             "eval/majority@16", "eval/hard/score", "eval/hard/pass@2", "eval/response_length/mean"]
    assert dict(held_out_curves(names)) == {
        "eval/score": "held-out score", "eval/hard/score": "held-out score (hard)",
        "eval/pass@16": "held-out pass@16", "eval/hard/pass@2": "held-out pass@2 (hard)"}
