"""`realhf reference`: training on the rows that it writes is training with the reference."""

import json
from pathlib import Path

import pytest

from realhf.cli.main import main
from realhf.user_input.units import format_bytes
from tests.cli_tools import read_jsonl, untimed
from tests.runtime.tiny import write_task

EXPERIMENT = """
from realhf import DPO, DatasetConfig, DPOLoss
from tests.runtime.tiny import role
experiment = DPO(
    actor=role({task!r}), loss=DPOLoss(beta=0.5, precomputed_ref={precomputed}), steps=2, batch_size=4,
    dataset=DatasetConfig({rows!r}{more}))
"""


def _experiment(path: Path, task: Path, rows: Path, *, precomputed: bool, more: str = "") -> Path:
    path.write_text(EXPERIMENT.format(task=str(task), rows=str(rows), precomputed=precomputed, more=more))
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "9" * (1 + i % 3), "level": i}
             for i in range(12)]
    pairs[5]["prompt"] = "1" * 40  # It is too long, and left out.
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return directory


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_on_the_rows_is_training_with_the_reference(task, tmp_path, nproc, capsys):
    more = ", max_prompt_tokens=20"
    pairs = task / "pairs.jsonl"
    with_reference = _experiment(tmp_path / "with.py", task, pairs, precomputed=False, more=more)
    rows = tmp_path / "rows.jsonl"
    assert main(["reference", str(with_reference), "-o", str(rows), "--nproc", str(nproc)]) == 0
    said = capsys.readouterr().err
    written = read_jsonl(rows)
    assert f"wrote 11 pairs to {rows} (1 rows without a sum are left out)" in said
    old = [json.dumps({k: v for k, v in row.items() if not k.startswith("ref_")}) for row in written]
    assert old == [line for line in pairs.read_text().splitlines() if "1111" not in line]
    added = rows.stat().st_size - sum(len(line) + 1 for line in old)
    assert f"the sums take {format_bytes(added)}; with" in said
    assert {path.name for path in tmp_path.iterdir()} == {"with.py", "rows.jsonl"}
    without = _experiment(tmp_path / "without.py", task, rows, precomputed=True)
    metrics = []
    for path, name in ((with_reference, "a"), (without, "b")):
        assert main(["run", str(path), "--out", str(tmp_path / name)]) == 0
        metrics.append(untimed(tmp_path / name / "metrics.jsonl"))
    for theirs, ours in zip(*metrics, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "rewards/margins"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-12), key
    assert metrics[0][-1]["rewards/margins"] != 0
    capsys.readouterr()


def test_mistakes_are_one_sentence(task, tmp_path, capsys):
    path = _experiment(tmp_path / "mine.py", task, task / "pairs.jsonl", precomputed=True)
    assert main(["reference", str(path), "-o", str(tmp_path / "rows.jsonl")]) == 2
    assert "loss is DPOLoss: it must be a DPOLoss with a reference, and without" in capsys.readouterr().err
    (tmp_path / "sft.py").write_text("from realhf import SFT, Role\nexperiment = SFT(actor=Role('m'))\n")
    assert main(["reference", str(tmp_path / "sft.py"), "-o", str(tmp_path / "rows.jsonl")]) == 2
    assert "SFT does not learn from pairs, as DPO does" in capsys.readouterr().err
    (tmp_path / "there.jsonl").write_text("")
    assert main(["reference", str(path), "-o", str(tmp_path / "there.jsonl")]) == 2
    assert "there.jsonl exists: name a new file" in capsys.readouterr().err
