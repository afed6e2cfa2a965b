"""Where the tests of this directory run: on CUDA, or with REALHF_GPU_DEVICE=cpu on the CPU, to try the tests
themselves; with REALHF_GPU_DEVICE=pretended on a device that is not there (pretended.py)."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.gpu.models import VARIABLE
from tests.gpu.pretended import pretended_device

NO_CUDA = "there is no CUDA device (torch.cuda.is_available() is false): the gpu tests were skipped"


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where our side runs."""
    name = os.environ.get(VARIABLE, "cuda")
    if name not in ("cuda", "cpu", "pretended"):
        pytest.fail(f"{VARIABLE} is {name!r}: legal are cuda, cpu and pretended")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_CUDA)
    with ExitStack() as stack:
        pretended = name == "pretended"
        yield stack.enter_context(pretended_device()) if pretended else torch.device(name, 0)


@pytest.fixture
def real_device(device: torch.device) -> torch.device:
    """The same, or the CPU in the place of a device that is not there."""
    return device if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def process_device(device: torch.device) -> torch.device:
    """Of tests that start processes, which know nothing of a device that is not there."""
    if os.environ.get(VARIABLE) == "pretended":
        pytest.skip("other processes do not see the pretended device")
    return device


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any(NO_CUDA in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(NO_CUDA)
