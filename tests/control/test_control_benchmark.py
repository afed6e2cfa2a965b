"""benchmarks/compare/control.py: its arguments, what it derives from the sides' lines, and its tables."""

import dataclasses
import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.compare import control
from benchmarks.compare.control import Point, Settings, Sides
from realhf.user_input.files import execute_file

POINTS = [
    Point(frames=100, mean_return=None, seconds=10.0, cpu_seconds=12.0),
    Point(frames=200, mean_return=50.0, seconds=11.0, cpu_seconds=13.0),
    Point(frames=300, mean_return=150.0, seconds=12.5, cpu_seconds=15.0),
    Point(frames=400, mean_return=None, seconds=13.0, cpu_seconds=16.0),
    Point(frames=500, mean_return=90.0, seconds=14.0, cpu_seconds=17.0)]


def test_rates_are_those_between_the_first_update_and_the_last():
    assert control.rate(POINTS) == {"per_second": 400 / 4.0, "per_cpu_second": 400 / 5.0}


@pytest.mark.parametrize("target, window, seconds", [
    (50, 200, 11.0), (100, 200, 12.5), (101, 200, 13.0), (150, 100, 12.5), (151, 100, None)])
def test_a_return_is_reached_when_the_mean_over_the_last_frames_is_as_high(target, window, seconds):
    assert control.seconds_to(target, POINTS, window=window) == seconds


def test_cpu_seconds_are_those_of_all_descendants_and_of_those_that_have_ended():
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    code = f"{child}\n{burn}\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        measured = control.cpu_seconds(process.pid)
        process.stdin.close()
    assert 0.55 < measured < 2


def test_rows_of_a_run_are_followed_until_it_ends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = """if True:
        import json, sys, time
        for step in range(3):
            with open(sys.argv[1], "a") as file:
                print(json.dumps({"step": step}), file=file)
            time.sleep(0.1)"""
    with subprocess.Popen([sys.executable, "-c", code, str(path)], text=True) as process:
        times = [(row["step"], time.perf_counter()) for row in control.follow(path, process)]
    assert [step for step, _ in times] == [0, 1, 2]
    assert times[2][1] - times[0][1] > 0.1, "rows come when they are written"


def test_what_sides_share_are_fields_of_the_example_with_its_defaults():
    ppo = execute_file(control.EXAMPLE, name="srl_ppo_of_the_benchmark").PPO()
    shared = dataclasses.asdict(Settings())
    assert shared == {name: getattr(ppo, name) for name in shared}
    for name in ("task", "ring", "envpool", "segment"):
        assert hasattr(ppo, name)
    assert ppo.roles()["agent"].optimizer.max_grad_norm == control.THEIR_SETTINGS["max_grad_norm"]


def test_our_policy_is_written_as_rivals_write_theirs(tmp_path):
    """The layers and the normalisation give what the module gives."""
    agent = execute_file(control.EXAMPLE, name="srl_ppo_of_the_benchmark").Agent([17], 6, False)
    rng = np.random.default_rng(0)
    for _ in range(3):
        agent.observed(torch.from_numpy(rng.normal(2, 0.5, (50, 17))).float())
    now = rng.normal(2, 0.5, (5, 17))
    export = tmp_path / "run" / "hf" / "step_3"
    export.mkdir(parents=True)
    save_file(dict(agent.state_dict()), export / "model.safetensors")

    control.write_policy(tmp_path)

    policy = np.load(tmp_path / "policy.npz")
    x = ((now - policy["mean"]) / policy["std"]).clip(-policy["clip"], policy["clip"])
    x = np.tanh(x @ policy["layer0"].T + policy["layer1"])
    x = np.tanh(x @ policy["layer2"].T + policy["layer3"]) @ policy["layer4"].T + policy["layer5"]
    wanted = agent(torch.from_numpy(now).float())[0].detach().numpy()
    np.testing.assert_allclose(x, wanted, atol=1e-5)


def test_the_table_and_the_goals_have_medians_over_seeds():
    rows = [
        {"side": side, "seed": seed, "per_second": speed * (seed + 1), "per_cpu_second": 10.0 * speed,
         "seconds_to_return": seconds, "held_out": 100.0 * seed}
        for side, speed, seconds in (
            ("ours", 1000.0, 20.0), ("envpool", 500.0, 50.0), ("sample_factory", 2000.0, None))
        for seed in range(3)]
    options = Sides(sides=("ours", "envpool", "sample_factory"))
    text = io.StringIO()
    Console(file=text, width=200).print(control.side_table(rows, options))
    lines = {line.split("│")[1].strip(): line for line in text.getvalue().splitlines() if "│" in line}
    for words in (
        ("ours", "2,000", "10,000", "20 (3)", "100", "0 100 200"), ("sample_factory", "4,000", "never")
    ):
        assert all(word in lines[words[0]] for word in words)
    goals = {goal.what: goal for goal in control.side_goals(rows)}
    assert goals["frames/s, ours / envpool"].value == 2 and goals["frames/s, ours / envpool"].met
    assert goals["frames/s, ours / sample_factory"].value == 0.5
    assert not goals["frames/s, ours / sample_factory"].met
    assert goals["seconds to the return, envpool / ours"].value == 2.5
    assert goals["seconds to the return, sample_factory / ours"].value == math.inf


def test_the_slow_environment_takes_as_long_as_it_should():
    env = gymnasium.make(control.SLOW, seconds=0.01)
    env.reset(seed=0)
    start = time.perf_counter()
    ends = [env.step(env.action_space.sample())[3] for _ in range(100)]
    assert time.perf_counter() - start > 1.0
    assert ends == 99 * [False] + [True]


def test_curves_are_means_over_frames(tmp_path, monkeypatch, capsys):
    """Every second step of 10 frames has a return, 1, 2, ...: means over 40 frames are of two of them."""
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"frames": 10 * step, "timing_s/step": 0.5} for step in range(1, 13)]
    for i, row in enumerate(rows[1::2], start=1):
        row["return/mean"] = i
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "config.json").write_text(json.dumps({"task": "Pong"}))
    picture = tmp_path / "curve.png"
    words = ["curves", "--runs", str(run), "--picture", str(picture), "--window", "40", "--json"]
    monkeypatch.setattr(sys, "argv", ["control.py", *words])
    assert control.main() == 0 and picture.read_bytes().startswith(b"\x89PNG")
    (made,) = json.loads(capsys.readouterr().out)["runs"]
    means = [[frames, frames / 20 - 0.5] for frames in (40, 60, 80, 100, 120)]
    assert made == {
        "task": "Pong", "frames": 120, "first": 1.5, "best": 5.5, "last": 5.5, "seconds": 6.0, "means": means}


@pytest.mark.parametrize("command", ["sides", "ring"])
def test_arguments(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["control.py", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        control.main()
    assert ended.value.code == 0 and "--quick" in capsys.readouterr().out


def test_without_the_rivals_environment_the_command_that_makes_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(control, "THEIR_PYTHON", Path("/no/such/python"))
    with pytest.raises(SystemExit, match="make control-bench-setup"):
        control.train("envpool", 0, Sides(out=tmp_path))
