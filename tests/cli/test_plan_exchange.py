"""One rank makes the plan and all get it; ranks that would run other things are told before they hang."""

import os
import re
import socket
import time
from contextlib import ExitStack

import pytest
import yaml

from tests.cli_tools import (
    GRPO_LAYOUTS,
    REALHF,
    Command,
    ForkedCommand,
    read_jsonl,
    wait_until,
    write_experiment,
    write_plan,
)

RANK = "import os\nRANK = os.environ.get('RANK')\n"
SLOW_GRAPH = RANK + """
import time
graph = experiment.graph
def slowly():
    if RANK == "0":
        open({began!r}, "w").close()
        time.sleep({seconds})
    return graph()
experiment.graph = slowly
"""


def hosts(*words, size=2):
    """Return commands as torchrun on `size` hosts would start them, one worker on each."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 1}
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        yield Command(*REALHF, *words, **{name: str(value) for name, value in (place | shared).items()})


@pytest.mark.slow
def test_the_plan_of_rank_0_goes_to_the_other_hosts(tmp_path):
    """The other host has another machine in view, for which it would make another plan."""
    began = tmp_path / "began"
    body = SLOW_GRAPH.format(began=str(began), seconds=6)
    experiment = write_experiment(tmp_path, "sft", steps=1, body=body)
    out = tmp_path / "out"
    with ExitStack() as stack:
        words = ["run", experiment, "--plan", "auto", "--out", out, "--cluster", "cpu-laptop"]
        commands = [stack.enter_context(c) for c in hosts(*words)]
        (code, _, err), (other_code, _, other_err) = (command.finish() for command in commands)
    assert (code, other_code) == (0, 0), err + other_err
    assert "planned in" in err and "planned in" not in other_err and "searching" not in other_err
    assert "realhf: rank 1 waits for the plan, for which rank 0 searches at most 60 s" in other_err
    assert yaml.safe_load((out / "plan.yaml").read_text())["predicted"]["step_seconds"] > 0
    assert read_jsonl(out / "metrics.jsonl")


@pytest.mark.slow
def test_ranks_end_if_rank_0_dies_or_finds_no_plan(tmp_path):
    began = tmp_path / "began"
    experiment = write_experiment(tmp_path, "sft", body=SLOW_GRAPH.format(began=str(began), seconds=60))
    with ExitStack() as stack:
        words = ["run", experiment, "--plan", "auto", "--cluster", "cpu-laptop"]
        first, other = (stack.enter_context(c) for c in hosts(*words))
        assert wait_until(began.exists, seconds=60)
        time.sleep(2)
        os.kill(first.worker(0), 9)
        code, _, err = other.finish()
    assert code == 1 and re.search("rank 1 has lost rank 0, which was making the plan", err), err
    (tmp_path / "b").mkdir()
    small = tmp_path / "small.yaml"
    small.write_text("""{
        num_hosts: 1, devices_per_host: 2, device_memory_bytes: 1 MB, host_memory_bytes: 8 GB,
        device_type: cpu, memory_bandwidth_bytes_per_second: 1 GB/s, peak_flops: {float64: 1 TFLOP/s},
        intra_host: {latency_seconds: 1 us, bandwidth_bytes_per_second: 1 GB/s},
        inter_host: {latency_seconds: 1 us, bandwidth_bytes_per_second: 1 GB/s}}""")
    with ExitStack() as stack:
        slow = SLOW_GRAPH.format(began=str(began), seconds=10)  # The other rank is there by then.
        experiment = write_experiment(tmp_path / "b", "sft", body=slow)
        words = ["run", experiment, "--plan", "auto", "--cluster", small]
        commands = [stack.enter_context(c) for c in hosts(*words)]
        answers = [command.finish() for command in commands]
    for code, _, err in answers:
        assert code == 2 and "available" in err and "Traceback" not in err, err


@pytest.mark.slow
def test_ranks_with_other_experiments_are_told_before_the_first_step(tmp_path):
    experiment = write_experiment(tmp_path, body=RANK + "experiment.seed = 7 if RANK == '1' else 0")
    plan = write_plan(tmp_path, GRPO_LAYOUTS)
    with ForkedCommand("run", experiment, "--plan", plan, "--out", tmp_path / "out") as command:
        code, _, err = command.finish(timeout=120)
    assert code == 2, err
    what = "rank 1 has another experiment than rank 0: seed is 0 on rank 0 and 7 on rank 1"
    assert err == f"realhf: {what}; give all ranks the same experiment file, options and models\n"


@pytest.mark.slow
def test_ranks_with_other_plans_are_told_before_the_first_step(tmp_path):
    """Every rank reads plan.yaml in the directory to which the experiment file goes."""
    for rank, layout in enumerate(("d2@0-1", "t2@0-1")):
        (tmp_path / str(rank)).mkdir()
        write_plan(tmp_path / str(rank), {"actor_train": layout})
    body = RANK + f"os.chdir({str(tmp_path)!r} + '/' + (RANK or '0'))"
    experiment = write_experiment(tmp_path, "sft", body=body)
    with ForkedCommand("run", experiment, "--plan", "plan.yaml", "--out", tmp_path / "out") as command:
        code, _, err = command.finish(timeout=120)
    both = "calls.actor_train.layout is 'd2@0-1' on rank 0 and 't2@0-1' on rank 1"
    assert code == 2 and f"rank 1 has another plan than rank 0: {both}" in err, err
