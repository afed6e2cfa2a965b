"""Full disks: a run goes on without the checkpoint or ends with a sentence, and keeps what it has saved."""

import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.checkpoint.run_state import Manifest
from realhf.cli.main import main
from realhf.distributed.world import World
from realhf.runtime.checkpointer import newest_checkpoint
from tests.cli_tools import read_jsonl, untimed, write_experiment

SETTINGS = {"steps": 3, "checkpoint_every": 1, "eval_dataset": None, "batch_size": 2}
WEIGHTS = "rank_00000.safetensors"


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[None]:
    """Make `path` a file system of this size, in memory."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def enlarge(path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=1g", str(path)], check=True)


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("realhf: warning: there is no checkpoint")]


def test_a_full_disk_costs_checkpoints_and_nothing_else(tmp_path, capsys):
    experiment = write_experiment(tmp_path, **SETTINGS)
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert main(["run", str(experiment), "--out", str(whole)]) == 0
    size = sum(path.stat().st_size for path in (whole / "checkpoints/step_3").iterdir())
    with small_disk(out / "checkpoints", size * 3 // 2):
        capsys.readouterr()
        assert main(["run", str(experiment), "--out", str(out)]) == 0
        said = capsys.readouterr().err
        reason = "cannot be written: No space left on device; the run goes on"
        assert len(warnings(said)) == 2 and all(reason in line for line in warnings(said)), said
        assert all(f" of step {step}: " in line for step, line in enumerate(warnings(said), start=2))
        assert untimed(out / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_1"]
        assert newest_checkpoint(World(), [out / "checkpoints/step_1"]).manifest.step == 1
        (out / "summary.json").unlink()  # As if the run had been killed.
        enlarge(out / "checkpoints")
        assert main(["run", str(experiment), "--out", str(out), "--resume"]) == 0
        assert f"continues {out} after step 1" in capsys.readouterr().err
        assert untimed(out / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
        ends = [Manifest.load(path / "checkpoints/step_3").files[WEIGHTS] for path in (out, whole)]
        assert ends[0] == ends[1]


FILLS = """
calls = []

def filling_reward(prompts, completions, completion_ids, answer):
    calls.append(1)
    if len(calls) == 3 and not Path({done!r}).exists():
        Path({done!r}).touch()
        with open({filler!r}, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                pass
    return [float(len(ids)) for ids in completion_ids]

experiment.reward_function = filling_reward
"""


@pytest.mark.slow
def test_metrics_that_cannot_be_written_end_the_run_with_a_sentence(tmp_path, capsys):
    out, filler = tmp_path / "run", tmp_path / "run" / "filler"
    body = FILLS.format(done=str(tmp_path / "done"), filler=str(filler))
    experiment = write_experiment(tmp_path, body=body, **SETTINGS | {"steps": 5})
    with small_disk(out, 64 << 20):
        assert main(["run", str(experiment), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said, said
        sentence, way_on = said.splitlines()[-2:]
        assert way_on.startswith("realhf: the last checkpoint is that of step ")
        assert sentence.startswith("realhf: the metrics of step ") and "No space left on device" in sentence
        gc.collect()  # The lock of the run directory goes with the process, or with the last reference.
        assert main(["run", str(experiment), "--out", str(out), "--resume"]) == 2  # Still full.
        said = capsys.readouterr().err
        assert "Traceback" not in said and "No space left on device" in said, said
        filler.unlink()
        gc.collect()
        assert main(["run", str(experiment), "--out", str(out), "--resume"]) == 0
        assert f"continues {out} after step " in capsys.readouterr().err
        assert [step["step"] for step in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4, 5]
        (tmp_path / "whole").mkdir()
        assert main(["run", str(experiment), "--out", str(tmp_path / "whole/run")]) == 0
        assert untimed(out / "metrics.jsonl") == untimed(tmp_path / "whole/run/metrics.jsonl")
