"""Values of configs against the types that their classes declare."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import realhf
from realhf import (
    DPO,
    GRPO,
    DatasetConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
)
from realhf.user_input.field_types import check_types, explain_keyword


class Guess:
    def step(self, message):
        return None


SOUND = GRPO(actor=Role(model="m", optimizer=OptimizerConfig()), dataset=DatasetConfig("d.jsonl"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group_size": "4"}, "group_size is '4': it must be a whole number"),
        ({"steps": 2.5}, "steps is 2.5: it must be a whole number"),
        ({"steps": True}, "steps is True: it must be a whole number"),
        ({"actor": "models/m"}, "actor is 'models/m': it must be a Role (did you mean Role('models/m')?)"),
        ({"actor": Role}, "actor is the class Role: it must be a Role (did you mean Role(...)?)"),
        ({"sampling": SamplingConfig},
         "sampling is the class SamplingConfig: it must be a SamplingConfig (did you mean "
         "SamplingConfig(...)?)"),
        ({"environment": Guess},
         "environment is the class Guess: it must be an Environment or None (did you mean "
         "Environment(Guess)?)"),
        ({"environment": Guess()},
         "environment is an object of the class Guess: it must be an Environment or None (did you mean "
         "Environment(Guess)?)"),
        ({"loss": {"kl_coef": 0.1}}, "loss is {'kl_coef': 0.1}: it must be a PolicyLossConfig"),
        ({"kv_cache_gib": "8"}, "kv_cache_gib is '8': it must be a number or None"),
        ({"filter_groups": 1}, "filter_groups is 1: it must be true or false"),
    ],
)
def test_wrong_types_are_named(changes, sentence):
    with pytest.raises(ValueError) as error:
        check_types(replace(SOUND, **changes))
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: OptimizerConfig(lr="1e-3"), "optimizer.lr is '1e-3': it must be a number or None"),
        (
            lambda: OptimizerConfig(betas=0.9),
            "optimizer.betas is 0.9: it must be a tuple of 2: a number, a number",
        ),
        (lambda: SamplingConfig(top_k="8"), "sampling.top_k is '8': it must be a whole number"),
        (
            lambda: PolicyLossConfig(average="x"),
            "loss.average is 'x': it must be 'sequence' or 'token' or 'prompt' or 'constant'",
        ),
        (lambda: Role("m", optimizer=1e-3),
         "optimizer is 0.001: it must be an OptimizerConfig or None (did you mean OptimizerConfig(0.001)?)"),
        (lambda: Role("m", lora=True), "lora is True: it must be a LoraConfig or None"),
        (lambda: Role(None), "model is None: it must be text"),
        (
            lambda: DatasetConfig(3),
            "path is of type int: it must be a file, a pattern, a hub name, several of these, or rows: dicts "
            "in a list or a generator, a function that returns them, a frame of pandas or polars, a table of "
            "pyarrow or a datasets.Dataset",
        ),
        (lambda: DatasetConfig("d", max_rows="3"), "max_rows is '3': it must be a whole number"),
    ],
)
def test_configs_refuse_wrong_types_where_they_are_made(make, sentence):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == sentence


def test_what_is_as_good_is_legal():
    role = Role(Path("m"), optimizer=OptimizerConfig(lr=1, betas=[0.9, np.float32(0.95)]))
    check_types(replace(SOUND, actor=role, steps=np.int64(3), dataset=DatasetConfig(Path("d.jsonl"))))
    LoraConfig(target_modules="q_proj")
    LoraConfig(target_modules=["q_proj", "v_proj"])


def test_every_shipped_experiment_class_is_sound():
    for name in ("SFT", "GRPO", "PPO", "RewardModel"):
        check_types(getattr(realhf, name)())


def test_misspelt_keywords_are_explained():
    with pytest.raises(TypeError) as error:
        GRPO(group_sizes=4)
    assert explain_keyword(error.value, realhf) == " (did you mean group_size?)"
    assert explain_keyword(TypeError("f() got an unexpected keyword argument 'x'"), realhf) == ""


@pytest.mark.parametrize(
    ("kind", "keyword", "hint"),
    [
        (OptimizerConfig, "learning_rate", "did you mean lr?"),
        (SamplingConfig, "max_completion_length", "did you mean max_new_tokens?"),
        (PolicyLossConfig, "epsilon", "did you mean clip_low and clip_high?"),
        (Role, "torch_dtype", "did you mean dtype?"),
        (GRPO, "num_generations", "did you mean group_size?"),
        (GRPO, "learning_rate", "here it is Role(optimizer=OptimizerConfig(lr=...))"),
        (GRPO, "epsilon", "here it is loss=PolicyLossConfig(clip_low=..., clip_high=...)"),
        (GRPO, "output_dir", "here it is --out of `realhf run`"),
        (GRPO, "top_p", "did you mean sampling=SamplingConfig(top_p=...)?"),
        (DPO, "beta", "did you mean loss=DPOLoss(beta=...)?"),
        (SamplingConfig, "num_generations", "here it is the experiment's group_size=..."),
        (GRPO, "peft_config",
         "write Role(lora=LoraConfig(...)) in the experiment file, or give --actor.lora.rank"),
    ],
)
def test_keywords_of_other_libraries_are_explained(kind, keyword, hint):
    with pytest.raises(TypeError) as error:
        kind(**{keyword: 3})
    assert explain_keyword(error.value, realhf) == f" ({hint})"
