"""Runs that part: the first differing step, call, sample and token, and the cause, of planted differences."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from realhf import RolloutLog
from realhf.cli.main import main
from realhf.data.batch import Batch, Packed
from realhf.data.order import row_order
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.report.compare import compare, first_token
from realhf.report.run_data import RunFiles
from realhf.report.run_page import runs_page
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.records.digest_file import DIGESTS, DigestFile, digest_of, encoded, read_digests
from realhf.runtime.samples.digests import DigestTaker
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.test_invariance import ROLE_CALLS
from tests.runtime.tiny import make_experiment, role, some_reward, write_task

SPLIT = ("d2@0-1", "t2@2-3", "p2@1-2")
LOG = RolloutLog(prompts_per_step=99, tokens=True)


def other_reward(prompts, completions, completion_ids, answer):
    """Return the usual rewards, but for one sample of every step."""
    scores = some_reward(prompts, completions, completion_ids, answer)
    return [scores[0] + 1.0, *scores[1:]]


def train(world, directory: Path, out: Path, *, layouts=None, dtype=None, start=None, **changes) -> None:
    settings = {"eval_dataset": None, "checkpoint_every": 0, "rollouts": LOG, "steps": 3} | changes
    if dtype is not None:
        settings["actor"] = replace(role(directory), dtype=dtype)
    experiment = make_experiment("grpo", directory, **settings)
    plan = None
    if layouts is not None:
        chosen = dict(zip(ROLE_CALLS["grpo"], layouts, strict=True))
        chosen |= {"reward_forward": "d2@2-3", "advantages": "d1@1"}
        plan = ExecutionPlan.from_dict({"calls": {c: {"layout": layout} for c, layout in chosen.items()}})
    program = compile_program(experiment, plan, world_size=world.size)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


def train_split(world, directory: Path, out: Path, layouts, dtype) -> None:
    train(world, directory, out, layouts=layouts, dtype=dtype)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def base(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "base"
    train(World(), task, out)
    return out


def tokens_of(out: Path, *, step: int) -> dict[int, list[int]]:
    """Sample -> its tokens, as rollouts.jsonl has them."""
    lines = read_jsonl(out / "rollouts.jsonl")
    return {line["sample"]: line["token_ids"] for line in lines if line["step"] == step}


def taker_of(directory: Path, *, max_bytes: int = 1 << 20) -> DigestTaker:
    program = compile_program(make_experiment("grpo", directory), None, world_size=1)
    return DigestTaker(program, max_bytes=max_bytes)


def first_by_rollouts(a: Path, b: Path) -> tuple[int, int, int] | None:
    """Return the first differing step, sample and token of two runs, by all tokens of rollouts.jsonl."""
    for step in range(1, 4):
        both = [tokens_of(out, step=step) for out in (a, b)]
        for sample in sorted(both[0]):
            ours, theirs = both[0][sample], both[1][sample]
            if ours != theirs:
                pairs = [*zip(ours, theirs, strict=False), (None, 0)]
                return step, sample, next(i for i, (x, y) in enumerate(pairs) if x != y)
    return None


def test_equal_runs_do_not_part(base, task, tmp_path):
    train(World(), task, tmp_path / "again")
    found = compare(RunFiles(base), RunFiles(tmp_path / "again"))
    assert found.parting is None and found.token is None and found.cause.kind == "none"
    assert found.compared_steps == 3


def test_a_changed_reward_is_found_in_the_sample_that_it_scores(base, task, tmp_path):
    out = tmp_path / "run"
    train(World(), task, out, reward_function=other_reward)
    found = compare(RunFiles(base), RunFiles(out))
    parting = found.parting
    assert (parting.step, parting.call, parting.column, parting.sample) == (1, "reward_forward", "score", 0)
    assert parting.other - parting.first == pytest.approx(1.0) and parting.num_samples == 1
    assert found.cause.kind == "reward" and "other_reward" in found.cause.sentence
    token = found.token
    assert token.call == "actor_generate"
    assert (token.step, token.sample, token.token.index) == first_by_rollouts(base, out)
    page = runs_page([RunFiles(base), RunFiles(out)], [found]).html()
    assert "reward_forward" in page and "token differs" in page


def test_a_seed_is_found_in_the_first_row(base, task, tmp_path):
    out = tmp_path / "run"
    train(World(), task, out, seed=5)
    found = compare(RunFiles(base), RunFiles(out))
    rows = [row_order(40, start=0, count=6, seed=seed, shuffle=True) for seed in (0, 5)]
    at = next(i for i in range(6) if rows[0][i] != rows[1][i])
    parting = found.parting
    assert (parting.step, parting.call, parting.column) == (1, "dataset", "dataset_row")
    assert (parting.sample, parting.first, parting.other) == (4 * at, rows[0][at], rows[1][at])
    assert found.cause.kind == "seed" and "0 and 5" in found.cause.sentence
    assert (found.token.step, found.token.call, found.token.column) == (1, "dataset", "prompt_ids")


@pytest.mark.parametrize("field, column", [("prompt", "prompt"), ("answer", "answer")])
def test_a_row_is_found_by_its_number(base, task, tmp_path, field, column):
    directory = tmp_path / "task"
    shutil.copytree(task, directory)
    rows = read_jsonl(directory / "data.jsonl")
    changed = row_order(40, start=0, count=6, seed=0, shuffle=True)[2]
    rows[changed][field] = "9" + rows[changed][field]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    train(World(), directory, out)
    found = compare(RunFiles(base), RunFiles(out))
    parting = found.parting
    assert (parting.step, parting.call, parting.row, parting.sample) == (1, "dataset", changed, 8)
    assert found.cause.kind == "data" and f"Row {changed} is the first" in found.cause.sentence
    if field == "prompt":
        assert found.token.call == "dataset" and found.token.token.index == 0
    else:
        assert parting.column == column


def test_a_plan_in_bfloat16_is_told_from_a_fault(pool, task, tmp_path):
    paths = [tmp_path / name for name in ("one", "split")]
    train(World(), task, paths[0], dtype="bfloat16")
    pool.run(train_split, task, paths[1], SPLIT, "bfloat16")
    found = compare(RunFiles(paths[0]), RunFiles(paths[1]))
    expected = first_by_rollouts(*paths)
    assert expected is not None, "in bfloat16 some token flips"
    assert found.token.call == "actor_generate"
    assert (found.token.step, found.token.sample, found.token.token.index) == expected
    assert found.cause.kind == "plan" and "bfloat16" in found.cause.sentence


@pytest.mark.slow
def test_a_plan_in_float64_parts_from_nothing(pool, base, task, tmp_path):
    """Digests do not depend on which rank has which samples."""
    pool.run(train_split, task, tmp_path / "split", SPLIT, None)
    found = compare(RunFiles(base), RunFiles(tmp_path / "split"))
    assert found.token is None and found.parting is None
    assert {one.name for one in found.differences.plan} >= {"actor_generate.layout", "actor_train.layout"}


def test_a_version_is_named_if_nothing_else_differs(base, task, tmp_path):
    out = shutil.copytree(base, tmp_path / "run")
    about = json.loads((out / "about.json").read_text())
    about["versions"]["torch"] = "9.9"
    (out / "about.json").write_text(json.dumps(about))
    lines = read_jsonl(out / DIGESTS)
    for line in lines:
        if line["step"] == 2 and line["call"] == "actor_generate":
            found = digest_of([line])
            tokens = [values.copy() for values in found.tokens["sequence_ids"]]
            tokens[3][-1] += 1
            column = Packed(torch.from_numpy(np.concatenate(tokens)).long(), [len(t) for t in tokens])
            batch = Batch(list(found.ids), {"sequence_ids": column})
            (made,) = taker_of(task).of_call("actor_generate", batch)
            line["columns"] |= made["columns"]
    (out / DIGESTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare(RunFiles(base), RunFiles(out))
    assert found.cause.kind == "version" and "9.9" in found.cause.sentence
    assert (found.token.step, found.token.call) == (2, "actor_generate")


def test_settings_of_training_are_named_when_tokens_part_after_an_update(base, task, tmp_path):
    actor = role(task)
    actor = replace(actor, optimizer=replace(actor.optimizer, lr=3e-2))
    train(World(), task, tmp_path / "run", actor=actor)
    found = compare(RunFiles(base), RunFiles(tmp_path / "run"))
    assert found.cause.kind == "settings" and "actor.optimizer.lr" in found.cause.sentence
    assert found.token.step == 2 and found.token.call == "actor_generate"


def test_a_resumed_run_continues_its_digests(base, task, tmp_path):
    out = tmp_path / "run"
    changes = {"checkpoint_every": 1, "keep_checkpoints": 3}
    train(World(), task, out, **changes)
    whole = (out / DIGESTS).read_text()
    with (out / DIGESTS).open("a") as file:
        file.write('{"step": 3, "call"')
    train(World(), task, out, start=out / "checkpoints/step_2", **changes)
    assert (out / DIGESTS).read_text() == whole
    assert len(json.loads((out / "about.json").read_text())["commands"]) == 2
    branch = tmp_path / "branch"
    train(World(), task, branch, start=out / "checkpoints/step_1", **changes)
    assert compare(RunFiles(base), RunFiles(branch)).parting is None


def test_a_full_file_keeps_totals_and_the_step_is_still_found(base, task, tmp_path, capsys):
    paths = [tmp_path / name for name in ("one", "other")]
    for path, seed in zip(paths, (0, 5), strict=True):
        lines = read_jsonl(base / DIGESTS)
        if seed:
            train(World(), task, tmp_path / "seed", seed=seed)
            lines = [*lines[: len(lines) // 3], *read_jsonl(tmp_path / "seed" / DIGESTS)[len(lines) // 3 :]]
        shutil.copytree(base, path)
        file = DigestFile(path / DIGESTS, max_bytes=0, last_step=0)
        for step in (1, 2, 3):
            file.add(step, [{k: v for k, v in line.items() if k != "step"} for line in lines
                            if line["step"] == step])
        file.close()
    assert main(["report", *map(str, paths), "-o", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "step 2, the rows of the dataset: column" in out and "is not recorded there" in out
    assert (paths[0] / DIGESTS).stat().st_size < 0.3 * (base / DIGESTS).stat().st_size


def test_without_digests_the_first_differing_metric_is_named(base, task, tmp_path):
    off = replace(LOG, digest_megabytes=0)
    train(World(), task, tmp_path / "run", reward_function=other_reward, rollouts=off)
    assert not (tmp_path / "run" / DIGESTS).exists()
    found = compare(RunFiles(base), RunFiles(tmp_path / "run"))
    assert (found.parting.step, found.parting.call) == (1, "the metrics")
    assert "reward" in found.parting.column and "no digests.jsonl" in found.missing


def test_totals_do_not_depend_on_how_samples_are_spread(task):
    taker = taker_of(task)
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.long)]
    batch = Batch([7, 3, 5], {
        "sequence_ids": Packed.of(tokens), "score": torch.tensor([0.5, float("nan"), 2.0]),
        "text": ["a", "b", {"c": 1}], "values": Packed(torch.tensor([1.0, 3.0, 5.0]), [2, 1, 0])})
    whole = digest_of(taker.of_call("actor_generate", batch))
    parts = digest_of([piece for indices in ([2], [1, 0]) for piece in taker.of_call(
        "actor_generate", batch.select(indices))])
    assert whole.ids == parts.ids == (3, 5, 7) and whole.totals == parts.totals
    assert {key: values.tolist() for key, values in whole.values.items()} == {
        key: values.tolist() for key, values in parts.values.items()}
    assert whole.values["score"].tolist() == [0.0, 2.0, 0.5]
    assert whole.values["values"].tolist() == [5.0, 0.0, 2.0]
    assert [one.tolist() for one in whole.tokens["sequence_ids"]] == [[4], [], [1, 2, 3]]
    other = Batch(batch.ids, batch.fields | {"text": ["a", "b", {"c": 2}]})
    changed = digest_of(taker.of_call("actor_generate", other))
    assert changed.totals["text"] != whole.totals["text"]
    assert np.flatnonzero(changed.values["text"] != whole.values["text"]).tolist() == [1]


def test_a_rank_sends_no_more_than_its_share(task):
    taker = taker_of(task, max_bytes=4000)
    batch = Batch(list(range(50)), {"sequence_ids": Packed(torch.arange(500), [10] * 50)})
    pieces = [taker.of_call("actor_generate", batch)[0] for _ in range(20)]
    sizes = [len(json.dumps(piece)) for piece in pieces]
    assert sum(size for size in sizes if size > 200) < 6000 and "ids" not in pieces[-1]
    assert pieces[-1]["columns"]["sequence_ids"]["total"] == pieces[0]["columns"]["sequence_ids"]["total"]
    assert "values" in pieces[0]["columns"]["sequence_ids"]


def test_the_first_differing_token():
    def of(*tokens):
        return np.array(tokens, np.int32)

    assert first_token(of(1, 2, 3), of(1, 2, 3)) is None
    found = first_token(of(*range(20)), of(*range(15), 99))
    assert (found.index, found.first, found.other, found.start) == (15, 15, 99, 7)
    assert found.around == (tuple(range(7, 20)), (*range(7, 15), 99))
    assert (first_token(of(1, 2), of(1)).first, first_token(of(1, 2), of(1)).other) == (2, None)


@pytest.mark.parametrize("text", ["*", "AAAA", encoded(np.zeros(1 << 26), np.float64)])
def test_arrays_that_no_run_writes_are_refused(text, base, tmp_path, capsys):
    other = shutil.copytree(base, tmp_path / "run")
    lines = read_jsonl(other / DIGESTS)
    lines[0]["ids"] = text
    (other / DIGESTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(base), str(other), "-o", str(tmp_path / "page.html")]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_the_file_is_read_by_step_and_call(base):
    found = read_digests(base / DIGESTS)
    assert sorted(found) == [1, 2, 3]
    assert {"dataset", "actor_generate", "reward_forward", "ref_forward", "advantages"} <= found[1].keys()
    assert [one.tolist() for one in digest_of(found[2]["actor_generate"]).tokens["sequence_ids"]] == list(
        tokens_of(base, step=2).values())
