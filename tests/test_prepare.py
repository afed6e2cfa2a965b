"""prepare_once: one of many processes makes the files, all find them whole."""

import multiprocessing
import time

import pytest

from realhf import prepare_once


def _make_slowly(path):
    path.mkdir()
    for i in range(5):
        (path / f"{i}.jsonl").write_text("x" * 1000)
        time.sleep(0.02)
    with (path.parent.parent / "made").open("a") as log:
        log.write("made\n")


def _use(path, results):
    found = prepare_once(path, _make_slowly)
    results.put([(found / f"{i}.jsonl").stat().st_size for i in range(5)])


def test_one_of_many_processes_makes_a_directory(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_use, args=(tmp_path / "data", results)) for _ in range(6)]
    for process in processes:
        process.start()
    assert [results.get(timeout=30) for _ in processes] == [[1000] * 5] * 6
    for process in processes:
        process.join()
    assert (tmp_path / "made").read_text() == "made\n"


def test_what_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(path):
        path.write_text("half")
        raise OSError("the wire broke")

    with pytest.raises(OSError, match="the wire broke"):
        prepare_once(tmp_path / "data.jsonl", fail)
    assert not (tmp_path / "data.jsonl").exists()
    assert prepare_once(tmp_path / "data.jsonl", lambda path: path.write_text("whole")).read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", ".data.jsonl.lock"}


def test_what_writes_elsewhere_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"prepare_once: .*forget wrote nothing at .*data\.jsonl"):
        prepare_once(tmp_path / "data.jsonl", _forget)


def _forget(path):
    pass
