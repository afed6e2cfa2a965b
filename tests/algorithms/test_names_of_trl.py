"""The options of TRL that docs/coming-from-trl.md names are TRL's."""

import re
from dataclasses import fields

import trl.rewards
from trl import DPOConfig, GRPOConfig, SFTConfig

from tests.cli_tools import REPO

ELSEWHERE = {"model", "revision", "model_init_kwargs", "reward_funcs", "eval_dataset", "log_metric",
             "log_extra", "trainer_state", "dtype"}  # fmt: skip
"""Arguments of GRPOTrainer, of `from_pretrained` and of reward functions."""


def test_options_exist():
    page = (REPO / "docs/coming-from-trl.md").read_text()
    first_cells = "\n".join(re.findall(r"^\| (.+?) \|", page, re.M))
    named = {word for code in re.findall(r"`([^`]+)`", first_cells)
             for word in re.findall(r"^([a-z_]+)(?==|$)", code)}  # fmt: skip
    known = {field.name for config in (GRPOConfig, SFTConfig, DPOConfig) for field in fields(config)}
    known |= set(trl.rewards.__all__ if hasattr(trl.rewards, "__all__") else dir(trl.rewards)) | ELSEWHERE
    assert len(named) >= 30
    assert named <= known, named - known
