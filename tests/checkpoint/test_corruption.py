"""Damaged checkpoints: none is ever accepted, the one before it is used, and a sentence names the file."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from realhf.checkpoint.names import find_checkpoints
from realhf.checkpoint.run_state import Manifest
from realhf.cli.main import main
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.runtime.checkpointer import newest_checkpoint
from tests.cli_tools import untimed, write_experiment
from tests.samples import drawn

STEPS = 3
SAMPLES = 12
"""Places in each file at which a bit is flipped, or the rest is cut off."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    """Return the experiment file and the directory of a run that has a checkpoint after each step."""
    directory = tmp_path_factory.mktemp("corruption")
    settings = {"checkpoint_every": 1, "keep_checkpoints": STEPS, "eval_dataset": None, "batch_size": 2}
    experiment = write_experiment(directory, steps=STEPS, **settings)
    assert main(["run", str(experiment), "--out", str(directory / "run")]) == 0
    return experiment, directory / "run"


def files(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir())


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << random.Random(place).randrange(8)
    path.write_bytes(data)


def cut(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes()[:place])


def append(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * (place + 1))


def exchange(path: Path, place: int) -> None:
    """Put the file of the checkpoint before in its place."""
    before = path.parent.parent / f"step_{STEPS - 1}" / path.name
    path.write_bytes(before.read_bytes())


def delete(path: Path, place: int) -> None:
    path.unlink()


def use_directory(path: Path, place: int) -> None:
    path.unlink()
    path.mkdir()


def places(size: int, damage) -> list[int]:
    """Return where to damage a file: both ends of it, and samples in between."""
    if damage not in (flip, cut):
        return [0]
    return sorted({0, 1, size - 1, *random.Random(size).choices(range(size), k=SAMPLES)})


@pytest.mark.parametrize("damage", [flip, cut, append, exchange, delete, use_directory])
def test_a_damaged_checkpoint_is_never_used(finished, tmp_path, capsys, damage):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(finished[1] / "checkpoints", checkpoints)
    last = checkpoints / f"step_{STEPS}"
    candidates = list(find_checkpoints(checkpoints).values())
    assert files(last) == ["manifest.json", "manifest.sha256", "metrics.jsonl", "rank_00000.safetensors"]
    for name in files(last):
        whole = (last / name).read_bytes()
        for place in places(len(whole), damage):
            damage(last / name, place)
            found = newest_checkpoint(World(), candidates)
            said = capsys.readouterr().err
            assert found is not None and found.path == checkpoints / f"step_{STEPS - 1}", (name, place)
            assert said.count("\n") == 1 and f"realhf: warning: checkpoint {last} is not used: " in said
            names = ("manifest.json", "manifest.sha256") if name.startswith("manifest") else (name,)
            assert any(str(last / one) in said for one in names), said
            if damage is use_directory:
                (last / name).rmdir()
            (last / name).write_bytes(whole)
    assert newest_checkpoint(World(), candidates).path == last
    assert capsys.readouterr().err == ""


def test_every_tensor_of_a_checkpoint_is_in_a_file_that_is_checked(finished):
    last = finished[1] / "checkpoints" / f"step_{STEPS}"
    manifest = Manifest.load(last)
    assert {*manifest.files, "manifest.json", "manifest.sha256"} == set(files(last))
    used = {file for saved in manifest.sets.values() for parts in saved.pieces.values() for file, _ in parts}
    assert used <= manifest.files.keys()


def test_a_run_goes_on_from_the_last_undamaged_checkpoint(finished, tmp_path, capsys):
    experiment, run = finished
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    flip(out / f"checkpoints/step_{STEPS}/rank_00000.safetensors", 2000)
    assert main(["run", str(experiment), "--out", str(out), "--resume"]) == 0
    said = capsys.readouterr().err
    assert f"step_{STEPS} is not used: " in said and f"continues {out} after step {STEPS - 1}" in said
    assert untimed(out / "metrics.jsonl") == untimed(run / "metrics.jsonl")
    ends = [Manifest.load(path / f"checkpoints/step_{STEPS}") for path in (out, run)]
    weights = [end.files["rank_00000.safetensors"] for end in ends]
    assert weights[0] == weights[1]


STATES = {
    "no ledger": lambda m: m["run"].pop("ledger"),
    "a ledger of text": lambda m: m["run"].update(ledger="x"),
    "no program": lambda m: m["run"].pop("program"),
    "pools that are a list": lambda m: m["run"].update(pools=[3]),
    "batches of numbers": lambda m: m["run"].update(batches=[7]),
    "unfinished batches of text": lambda m: m["run"].update(unfinished=["x"]),
    "a state that is a number": lambda m: m["run"].update(state=4),
    "no versions": lambda m: m.update(versions={}),
    "copies that are no copies": lambda m: m["versions"].update(copies=[[1]]),
    "ranks without a state": lambda m: m["ranks"][0].pop("host_states"),
    "host states that are a list": lambda m: m["ranks"][0].update(host_states=[1]),
    "a host state that is a list": lambda m: m["ranks"][0]["host_states"].update(advantages=[1]),
    "cache limits of text": lambda m: m["ranks"][0].update(cache_limits="x"),
    "copies in flight that are numbers": lambda m: m["ranks"][0].update(in_flight=[5]),
    "other sets": lambda m: m["sets"].update(other=m["sets"].pop("actor")),
    "another shape": lambda m: next(iter(m["sets"]["actor"]["pieces"].values()))[0][1][0].__setitem__(1, 1),
    "no steps": lambda m: m["run"].pop("steps"),
}


@pytest.mark.parametrize("junk", drawn(STATES, 9))
def test_a_state_with_right_checksums_that_no_run_has_is_a_sentence(finished, tmp_path, capsys, junk):
    experiment, run = finished
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    for step in range(1, STEPS + 1):
        checkpoint = out / f"checkpoints/step_{step}"
        fields = json.loads((checkpoint / "manifest.json").read_text())
        STATES[junk](fields)
        text = json.dumps(fields).encode()
        (checkpoint / "manifest.json").write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        (checkpoint / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    shutil.rmtree(out / f"checkpoints/step_{STEPS}")
    assert main(["run", str(experiment), "--out", str(out), "--resume"]) == 2, capsys.readouterr().err
    err = capsys.readouterr().err
    assert "Traceback" not in err and "realhf: " in err.splitlines()[-1] and "checkpoint" in err


def test_a_damaged_checkpoint_does_not_displace_a_good_one(finished, tmp_path):
    """One checkpoint is kept, and a later one is damaged: it must not be counted as the one to keep."""
    experiment, run = finished
    out = tmp_path / "run"
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints/step_2")
    shutil.copytree(out / "checkpoints/step_3", out / "checkpoints/step_9")
    for name in ("step_3", "step_9"):
        flip(out / f"checkpoints/{name}/manifest.json", 100)
    (out / "summary.json").unlink()
    words = ["--keep-checkpoints", "1", "--steps", "2"]
    assert main(["run", str(experiment), "--out", str(out), "--resume", *words]) == 0
    assert Manifest.load(out / "checkpoints/step_2").step == 2


def test_a_run_without_an_undamaged_checkpoint_is_not_overwritten(finished, tmp_path, capsys):
    experiment, run = finished
    out = tmp_path / "run"
    shutil.copytree(run, out)
    for checkpoint in (out / "checkpoints").iterdir():
        (checkpoint / "manifest.sha256").unlink()
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="has no undamaged checkpoint"):
        newest_checkpoint(World(), list(find_checkpoints(out / "checkpoints").values()))
    assert main(["run", str(experiment), "--out", str(out), "--resume"]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith(f"realhf: {out}/checkpoints has no undamaged checkpoint: restore the files")
    assert (out / "metrics.jsonl").read_bytes() == before
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS
