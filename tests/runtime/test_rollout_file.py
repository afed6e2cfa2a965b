"""RolloutFile: its bound, how it thins out, and what it makes of torn lines."""

import json
from pathlib import Path

import pytest

from realhf.runtime.records.rollout_file import RolloutFile


def rollout(prompt: int, *, followed: bool = False, size: int = 200) -> dict:
    return {"followed": followed, "sample": prompt, "prompt_number": prompt, "completion": "x" * size}


def read(path: Path) -> list[dict]:
    data = path.read_text()
    assert data == "" or data.endswith("\n")
    return [json.loads(line) for line in data.splitlines()]


def test_the_bound_holds_and_old_steps_thin_out(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = RolloutFile(path, max_bytes=20_000)
    for step in range(1, 301):
        file.add(step, [rollout(2 * step), rollout(2 * step + 1)])
        assert path.stat().st_size <= 20_000
    lines = read(path)
    steps = sorted({line["step"] for line in lines})
    assert len(lines) == 2 * len(steps) and len(steps) >= 15
    assert (steps[0], steps[-1]) == (1, 300)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] >= 8 * gaps[-1]


def test_followed_rows_stay_longer(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = RolloutFile(path, max_bytes=20_000)
    for step in range(1, 61):
        file.add(step, [rollout(9 * step + i, followed=i == 0) for i in range(4)])
    lines = read(path)
    followed = [line["step"] for line in lines if line["followed"]]
    others = {line["step"] for line in lines if not line["followed"]}
    assert len(set(followed)) > 2 * len(others) > 0 and path.stat().st_size <= 20_000


def test_a_step_that_is_too_large_loses_whole_prompts(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = RolloutFile(path, max_bytes=3000)
    file.add(1, [rollout(1)])
    file.add(2, [rollout(prompt, size=400) for prompt in (5, 5, 6, 6, 7, 7, 8, 8)])
    assert [(line["step"], line["prompt_number"]) for line in read(path)] == [
        (2, 5), (2, 5), (2, 6), (2, 6), (2, 7), (2, 7)][: len(read(path))]
    assert len(read(path)) in (4, 6)
    file.add(3, [rollout(9, size=5000)])
    assert path.stat().st_size <= 3000


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_it_continues_after_a_step_and_drops_a_torn_line(tmp_path, cut):
    path = tmp_path / "rollouts.jsonl"
    file = RolloutFile(path, max_bytes=10**6)
    for step in (1, 2, 3, 4):
        file.add(step, [rollout(step), rollout(10 + step)])
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = RolloutFile(path, max_bytes=10**6, last_step=2)
    assert [line["step"] for line in read(path)] == [1, 1, 2, 2]
    for step in (3, 4):
        again.add(step, [rollout(step), rollout(10 + step)])
    assert path.read_bytes() == whole


def test_text_of_any_kind_is_one_readable_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = RolloutFile(path, max_bytes=10**6)
    texts = ["a\nb", "\x1b[31m", "日本", "half \ud800 pair", "\u2028"]
    file.add(1, [rollout(i) | {"completion": text} for i, text in enumerate(texts)])
    lines = path.read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["completion"] for line in lines] == texts
    assert "日本".encode() in lines[2]
