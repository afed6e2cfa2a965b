"""Trackers without network: what W&B, MLflow and trackio have kept of real runs."""

import json
import string
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from realhf.cli.main import main
from realhf.errors import UserError
from realhf.runtime.records.trackers import Trackers, _Sender, mlflow_name, tracker_names
from tests.cli_tools import ForkedCommand, read_jsonl, wait_until, write_experiment

SETTINGS = {"steps": 2, "checkpoint_every": 1, "batch_size": 2, "group_size": 2, "eval_every": 2}
_BLOCK = 32768


def offline_files(directory: Path) -> dict[str, str]:
    """Return the environment in which every tracker writes below a directory."""
    return {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_PROJECT": "own project",
        "MLFLOW_TRACKING_URI": (directory / "ml").as_uri(), "MLFLOW_EXPERIMENT_NAME": "own experiment",
        "TRACKIO_PROJECT": "own", "HF_HUB_OFFLINE": "1",
    }


def store_trackio(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let trackio write below a directory. It has read TRACKIO_DIR when it was imported."""
    from trackio import bucket_storage, sqlite_storage, utils

    for module in (utils, sqlite_storage, bucket_storage):
        patch.setattr(module, "TRACKIO_DIR", directory / "trackio")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A run that three trackers follow, and which was killed after step 2 and resumed from step 1."""
    directory = tmp_path_factory.mktemp("tracked")
    experiment = write_experiment(directory, **SETTINGS)
    out = directory / "my-run"
    words = ["run", str(experiment), "--out", str(out), "--track", "wandb,mlflow", "--track", "trackio"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in offline_files(directory).items():
            patch.setenv(name, value)
        store_trackio(patch, directory)
        patch.chdir(directory)
        assert main(words) == 0
        ids = json.loads((out / "trackers.json").read_text())
        (out / "summary.json").unlink()
        for path in (out / "checkpoints/step_2").iterdir():
            path.unlink()
        assert main([*words, "--resume", "--steps", "3"]) == 0
        assert json.loads((out / "trackers.json").read_text()) == ids
        metrics = {record.pop("step"): record for record in read_jsonl(out / "metrics.jsonl")}
        config = json.loads((out / "config.json").read_text())
        yield SimpleNamespace(directory=directory, out=out, ids=ids, metrics=metrics, config=config)


def wandb_records(path: Path) -> Iterator:
    """Yield the records of W&B's file, which has the form of LevelDB's logs: blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    position = 7  # The file's own header.
    whole = b""
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:
            position += _BLOCK - position % _BLOCK
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]  # 1: whole, 2: first, 3: middle, 4: last part of a record.
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.slow
def test_wandb_has_every_metric_under_its_name(tracked):
    files = sorted((tracked.out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{tracked.ids['wandb']}.wandb"] * 2
    found = {}
    for path in files:
        records = list(wandb_records(path))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.display_name, run.project) == ("my-run", "own project")
        sent = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert sent["actor"] == tracked.config["actor"]
        for record in records:
            if record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json)
                       for item in record.history.item}
                step = row.pop("step")
                found[step] = {name: value for name, value in row.items() if not name.startswith("_")}
    assert found == tracked.metrics and sorted(found) == [0, 1, 2, 3]


@pytest.mark.slow
def test_mlflow_has_every_metric_and_setting(tracked):
    from mlflow import MlflowClient

    client = MlflowClient((tracked.directory / "ml").as_uri())
    experiment = client.get_experiment_by_name("own experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (
        tracked.ids["mlflow"], "my-run", "FINISHED")
    assert run.data.params["actor.optimizer.lr"] == str(tracked.config["actor"]["optimizer"]["lr"])
    for name in {name for metrics in tracked.metrics.values() for name in metrics}:
        history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, mlflow_name(name))}
        assert history == {step: m[name] for step, m in tracked.metrics.items() if name in m}, name


@pytest.mark.slow
def test_trackio_has_every_metric(tracked):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("own")
    assert run.name == "my-run" == tracked.ids["trackio"]
    assert run.config["actor"] == tracked.config["actor"]
    found = {}
    for row in SQLiteStorage.get_logs("own", "my-run", run_id=run.id):
        del row["timestamp"]
        found[row.pop("step")] = row
    assert found == tracked.metrics


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    for name, value in offline_files(tmp_path).items():
        monkeypatch.setenv(name, value)
    body = f"""
import shutil
def breaking_reward(completions, answer):
    shutil.rmtree({str(tmp_path / "ml")!r}, ignore_errors=True)
    return [0.0 for _ in completions]
experiment = replace(experiment, reward_function=breaking_reward)
"""
    experiment = write_experiment(tmp_path, body=body, **SETTINGS | {"eval_dataset": None, "steps": 3})
    out = tmp_path / "run"
    assert main(["run", str(experiment), "--out", str(out), "--track", "mlflow"]) == 0
    assert [record["step"] for record in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3]
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("realhf: warning: mlflow has failed, and the run "
                                                         "goes on without it: ")]) == 1, said


def test_a_tracker_that_cannot_begin_is_a_sentence(tmp_path, monkeypatch, capsys):
    experiment = write_experiment(tmp_path, **SETTINGS)
    (tmp_path / "ml").write_text("a file")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "ml").as_uri())
    assert main(["run", str(experiment), "--out", str(tmp_path / "run"), "--track", "mlflow"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("realhf: --track mlflow: ")
    assert not (tmp_path / "run/checkpoints").exists() or not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.parametrize("name", ["mlflow", "trackio", pytest.param("wandb", marks=pytest.mark.slow)])
def test_a_tracker_that_is_new_to_a_resumed_run_gets_the_earlier_steps(tmp_path, monkeypatch, name):
    for variable, value in offline_files(tmp_path).items():
        monkeypatch.setenv(variable, value)
    store_trackio(monkeypatch, tmp_path)
    history = [{"step": step, "reward/mean": 0.5 * step, "eval/pass@4": 0.25} for step in range(1, 4)]
    out = tmp_path / "run"
    out.mkdir()
    times = {1: 1.7e9, 2: 1.7e9 + 60, 3: 1.7e9 + 120}
    for known in (history, history[:2]):  # The second one continues the first after step 2.
        trackers = Trackers((name,), out, {"a": {"b": 1}}, history=known, times=times)
        trackers.log({"step": 3, "reward/mean": 1.5, "eval/pass@4": 0.25})
        trackers.finish("finished")
        trackers.finish("failed")  # It has ended.
    run_id = json.loads((out / "trackers.json").read_text())[name]
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient((tmp_path / "ml").as_uri())
        found = client.get_metric_history(run_id, "eval/pass_at_4")
        assert [metric.step for metric in found] == [1, 2, 3, 3, 3]
        assert [metric.timestamp for metric in found[:3]] == [int(1000 * times[step]) for step in (1, 2, 3)]
        assert client.get_run(run_id).info.status == "FINISHED"
    elif name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        assert [row["step"] for row in SQLiteStorage.get_logs("own", run_id)] == [1, 2, 3, 3, 3]
        other = tmp_path / "other" / "run"
        other.mkdir(parents=True)
        Trackers((name,), other, {}).finish("finished")
        assert json.loads((other / "trackers.json").read_text()) == {"trackio": "run-2"}
    else:
        steps = [
            json.loads(item.value_json) for path in sorted(out.glob("wandb/offline-run-*/run-*.wandb"))
            for record in wandb_records(path) if record.WhichOneof("record_type") == "history"
            for item in record.history.item if (item.key or item.nested_key[0]) == "step"]
        assert steps == [1, 2, 3, 3, 3]


class Sleepy:
    """A tracker that takes its time."""

    id = "1"

    def __init__(self):
        self.steps = []
        self.wakes = threading.Event()

    def log(self, step, metrics, seconds):
        self.wakes.wait(60)
        self.steps.append(step)

    def finish(self, ending):
        self.steps.append(ending)


def test_a_slow_tracker_delays_nothing(capsys):
    sleepy = Sleepy()
    sender = _Sender("sleepy", sleepy)
    for step in range(5):
        sender.send(step, {}, None)
    sender.end("stopped")
    assert sleepy.steps == []
    sender.wait(0.05)
    assert "sleepy has not taken the last metrics in time" in capsys.readouterr().err
    sleepy.wakes.set()
    sender.wait(60)
    assert sleepy.steps == [0, 1, 2, 3, 4, "stopped"]


def test_unknown_and_missing_trackers_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    experiment = write_experiment(tmp_path, **SETTINGS)
    words = ["run", str(experiment), "--out", str(tmp_path / "run"), "--track"]
    assert main([*words, "wandb,tensorbord"]) == 2
    assert capsys.readouterr().err == (
        "realhf: --track tensorbord: legal are mlflow, trackio, wandb, and several joined by commas\n")
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # As if it were not installed.
        assert main([*words, name]) == 2
        assert capsys.readouterr().err == (
            f"realhf: --track {name}: {name} is not installed: pip install 'realhf[{name}]'\n")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="--track : legal are"):
        tracker_names([""])


def test_mlflow_names_are_legal():
    from mlflow.utils.validation import _validate_metric_name

    assert mlflow_name("eval/pass@4") == "eval/pass_at_4" and mlflow_name("reward/mean") == "reward/mean"
    for character in {*string.printable, "é", "日"}:
        _validate_metric_name(mlflow_name(f"eval/a{character}b"))


@pytest.mark.slow
def test_a_failed_run_leaves_no_process_behind(tmp_path):
    body = """
def failing_reward(completions, answer):
    raise RuntimeError("no more")
experiment = replace(experiment, reward_function=failing_reward)
"""
    experiment = write_experiment(tmp_path, body=body, **SETTINGS | {"eval_dataset": None})
    variables = offline_files(tmp_path) | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    with ForkedCommand("run", experiment, "--nproc", 2, "--out", tmp_path / "run",
                 "--track", "wandb,mlflow,trackio", **variables) as command:
        code, _, err = command.finish()
        assert code == 2 and "no more" in err
        assert wait_until(lambda: not command.processes(), seconds=10)
    ids = json.loads((tmp_path / "run/trackers.json").read_text())
    (path,) = (tmp_path / "run/wandb").glob(f"offline-run-*/run-{ids['wandb']}.wandb")
    ends = [r.exit.exit_code for r in wandb_records(path) if r.WhichOneof("record_type") == "exit"]
    assert ends == [1]
