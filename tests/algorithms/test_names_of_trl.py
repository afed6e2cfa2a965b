"""The options of TRL that docs/coming-from-trl.md names are TRL's."""

import inspect
import re
import statistics
from dataclasses import fields
from functools import reduce
from typing import Any

import pytest
import torch
import trl  # Its classes are imported on their first use, as that takes seconds.

from realhf import GRPO, Evaluation
from realhf.algorithms.advantages import SampleAdvantages
from realhf.calls import LEARNING_RATES
from tests.cli_tools import REPO
from tests.docs_pages import fences

PAGE = REPO / "docs/coming-from-trl.md"
SETTING = re.compile(r"`([\w.]+)=([^`]+)`")
SAME = {
    "num_generations": "group_size", "max_grad_norm": "actor.optimizer.max_grad_norm",
    "warmup_steps": "actor.optimizer.warmup_steps", "adam_epsilon": "actor.optimizer.eps",
    "beta": "loss.kl_coef", "epsilon": "loss.clip_low", "num_iterations": "epochs",
    "steps_per_generation": "minibatches", "temperature": "sampling.temperature",
    "top_p": "sampling.top_p", "top_k": "sampling.top_k",
    "repetition_penalty": "sampling.repetition_penalty",
}
"""What is equal in both -> our name."""
ELSEWHERE = {"model", "revision", "model_init_kwargs", "reward_funcs", "eval_dataset", "log_metric",
             "log_extra", "trainer_state", "dtype", "environment_factory", "tools", "callbacks",
             "peft_config", "KTOTrainer", "ORPOTrainer", "CPOTrainer",
             "maybe_convert_to_chatml", "text", "conversations", "from", "value"}
"""Arguments of GRPOTrainer, `from_pretrained` and reward functions, columns of rows, and their reader."""


def test_options_exist():
    from trl import rewards

    page = PAGE.read_text()
    first_cells = "\n".join(re.findall(r"^\| (.+?) \|", page, re.M))
    named = {word for code in re.findall(r"`([^`]+)`", first_cells)
             for word in re.findall(r"^([a-z_]+)(?==|$)", code)}
    configs = (trl.GRPOConfig, trl.SFTConfig, trl.DPOConfig, trl.KTOConfig)
    known = {field.name for config in configs for field in fields(config)}
    known |= set(rewards.__all__ if hasattr(rewards, "__all__") else dir(rewards)) | ELSEWHERE
    assert len(named) >= 30
    assert named <= known, named - known


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Any:
    return trl.GRPOConfig(output_dir=str(tmp_path_factory.mktemp("trl")), bf16=False, report_to="none")


def _ours(experiment: GRPO, name: str) -> Any:
    """Return a field by its dotted name."""
    name = f"actor.{name}" if name.startswith("optimizer.") else name
    return reduce(getattr, name.split("."), experiment)


def _section() -> tuple[list[list[str]], str, str]:
    """Return the rows of the table of defaults, the text below it, and the settings that equal TRL's."""
    (section,) = re.findall(r"^## Defaults that differ\n(.+?)^## ", PAGE.read_text(), re.M | re.S)
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\| `.+", section, re.M)]
    (snippet,) = (text for _, text in fences(PAGE) if "as_in_trl = GRPO(" in text)
    return rows, section.rpartition("|")[2], snippet


def test_defaults_are_as_the_table_says(theirs):
    rows, text, _ = _section()
    assert len(rows) >= 10
    for their_cell, our_cell in rows:
        for name, value in SETTING.findall(their_cell):
            assert getattr(theirs, name) == eval(value), name
        for name, value in SETTING.findall(our_cell):
            assert _ours(GRPO(), name) == eval(value), name
        assert SETTING.search(their_cell) and SETTING.search(our_cell)
    equal = dict(SETTING.findall(text))
    assert float(equal.pop("learning_rate")) == theirs.learning_rate == LEARNING_RATES["policy"].full
    assert equal.keys() == SAME.keys()
    for name, value in equal.items():
        assert getattr(theirs, name) == eval(value) == _ours(GRPO(), SAME[name]), name
    assert GRPO().loss.clip_high == theirs.epsilon and theirs.epsilon_high is None


@pytest.mark.slow
def test_what_the_page_says_about_deviations_and_evaluations(theirs):
    from trl.trainer.utils import nanstd

    scores = [1.0, 0.0, 0.5, 0.25]
    assert nanstd(torch.tensor(scores)).item() == pytest.approx(statistics.stdev(scores))
    assert "advantages / (std_rewards + 1e-4)" in inspect.getsource(trl.GRPOTrainer)
    assert SampleAdvantages(group_size=2).eps == 1e-6
    assert theirs.num_generations_eval is None and Evaluation().samples == 1
    assert Evaluation().sampling_for(GRPO().sampling).temperature == 0


def test_the_experiment_with_defaults_of_trl_has_them(theirs):
    exec(_section()[2], found := {})
    ours = found["as_in_trl"]
    optimizer = ours.actor.optimizer
    assert (optimizer.schedule, optimizer.betas) == (
        theirs.lr_scheduler_type, (theirs.adam_beta1, theirs.adam_beta2))
    assert theirs.lr_scheduler_type.value == "linear" and optimizer.weight_decay == theirs.weight_decay
    assert ours.sampling.max_new_tokens == theirs.max_completion_length
    assert ours.batch_size * ours.group_size == theirs.per_device_train_batch_size
    assert ours.batch_size * ours.steps == theirs.num_train_epochs * 100
    assert (ours.checkpoint_every, ours.log_every) == (theirs.save_steps, theirs.logging_steps)
    assert (ours.loss.average, ours.deviation, theirs.loss_type) == ("token", "sample", "dapo")
    for name, field in SAME.items():
        assert getattr(theirs, name) == _ours(ours, field), name
