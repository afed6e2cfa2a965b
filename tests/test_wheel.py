"""The wheel: it holds all shipped files, and an installed one works from any directory."""

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli_tools import REPO

SHIPPED = ("plans", "models", "examples", "templates")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", directory, REPO)
    subprocess.run([*build, "--no-index", "-q"], check=True)
    (path,) = directory.glob("realhf-*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_the_package_and_every_shipped_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for part in ("realhf", *SHIPPED) for path in (REPO / part).rglob("*") if path.is_file()]
    found = [path.relative_to(REPO).as_posix() for path in files if "__pycache__" not in path.parts]
    assert len(found) > 250
    expected = {name if name.startswith("realhf/") else f"realhf/shipped/{name}" for name in found}
    assert expected <= names
    others = {name for name in names - expected if ".dist-info/" not in name}
    assert not others


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment in which the wheel is installed, beside the libraries of this one."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    subprocess.run([*pip, wheel], check=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    return home


@pytest.mark.slow
def test_installed_wheel_works_from_any_directory(installed, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words, cwd=tmp_path):
        command = [installed / "bin" / "realhf", *words]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import realhf; print(realhf.__file__)"
    found = subprocess.run([installed / "bin" / "python", "-c", where], cwd=tmp_path, env=env,
                           capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(installed)
    assert "sound on 1 rank" in run("check", "sft")  # It imports another example, and writes runs/arithmetic.
    assert (tmp_path / "runs" / "arithmetic" / "sft.jsonl").is_file()
    planned = json.loads(run("plan", "examples/ppo_7b.py", "--cluster", "h100-2x8", "--json"))
    assert planned
    run("init", "first")
    first = tmp_path / "first"
    assert "sound on 2 ranks" in run("check", "experiment.py", "--nproc", "2", cwd=first)
    run("run", "experiment.py", "--nproc", "2", "--steps", "2", "--out", "runs/two", cwd=first)
    lines = (first / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert (first / "runs" / "two" / "hf" / "step_2" / "model.safetensors").is_file()
