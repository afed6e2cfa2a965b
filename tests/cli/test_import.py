"""`realhf import`: what is written loads, is sound, and has the values that TRL's own objects have."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml

from realhf.calls import learning_rate
from realhf.cli.experiment_file import load_experiment
from realhf.cli.import_trl import KINDS, defaults_of
from realhf.cli.main import main
from realhf.experiment import resolved_roles
from tests.runtime.tiny import write_task

CONFIGS = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig, "dpo": trl.DPOConfig, "sft": trl.SFTConfig,
           "kto": trl.KTOConfig, "reward": trl.RewardConfig}
SCRIPT = '''
import re
from datasets import load_dataset
from trl import {kind}Config, {kind}Trainer
{more}
BATCH = 4
DIGITS = re.compile(r"[0-9]")

def digits(text):
    return len(DIGITS.findall(text))

def many(completions, **columns):
    return [float(digits(text)) for text in completions]

def brief(completion_ids, **columns):
    return [1 / (1 + len(ids)) for ids in completion_ids]

def with_number(row):
    return {{"number": 1}}

def main():
    rows = load_dataset("json", data_files={data!r}, split="train").map(with_number)
    args = {kind}Config({settings})
    trainer = {kind}Trainer({model!r}, args=args, train_dataset=rows, {arguments})
    trainer.train()

main()
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def imported(words: list[Any], out: Path) -> Any:
    """Import settings and return the experiment that was written, which `realhf check` has found sound."""
    out.unlink(missing_ok=True)
    assert main(["import", *map(str, words), "-o", str(out)]) == 0
    return load_experiment(str(out))


def script(task: Path, kind: str, settings: dict[str, Any], *, arguments: str = "", more: str = "") -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return SCRIPT.format(
        kind=kind, data=str(task / "data.jsonl"), model=str(task), settings=given, arguments=arguments,
        more=more)


def schedule_of(config: Any, num_steps: int) -> list[float]:
    """The learning rates of the scheduler that the Trainer of transformers would make."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, num_warmup_steps=config.get_warmup_steps(num_steps),
        num_training_steps=num_steps, scheduler_specific_kwargs=config.lr_scheduler_kwargs)
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


GRPO_SETTINGS: list[dict[str, Any]] = [
    {"max_steps": 3},
    {"learning_rate": 3e-6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
     "num_generations": 4, "max_steps": 12, "lr_scheduler_type": "cosine", "beta": 0.04, "epsilon": 0.1,
     "epsilon_high": 0.3, "delta": 2.0, "max_completion_length": 8, "temperature": 0.7, "top_p": 0.9,
     "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "weight_decay": 0.1, "adam_beta2": 0.95,
     "max_grad_norm": 0.2, "loss_type": "grpo", "scale_rewards": "none", "bf16": False},
    {"per_device_train_batch_size": 16, "generation_batch_size": 32, "num_generations": 8,
     "num_iterations": 2,
     "max_steps": 64, "loss_type": "dr_grpo", "importance_sampling_level": "sequence", "bf16": False,
     "mask_truncated_completions": True, "lr_scheduler_type": "constant", "top_entropy_quantile": 0.5},
]


@pytest.mark.parametrize("settings", GRPO_SETTINGS)
def test_a_script_of_grpo_has_the_values_of_trls_config(task, tmp_path, settings, capsys):
    path = tmp_path / "train.py"
    arguments = "reward_funcs=[many, brief]"
    path.write_text(script(task, "GRPO", settings | {"reward_weights": [1.0, 0.5]}, arguments=arguments))
    ours = imported([path], tmp_path / "mine.py")
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **settings)
    accumulated = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert ours.batch_size * ours.group_size == theirs.generation_batch_size
    assert ours.batch_size * ours.group_size == ours.minibatches * accumulated
    assert ours.group_size == theirs.num_generations and ours.epochs == theirs.num_iterations
    assert ours.steps * ours.minibatches * ours.epochs == theirs.max_steps
    assert ours.seed == theirs.seed and ours.log_every == max(
        1, round(theirs.logging_steps / ours.minibatches / ours.epochs))
    sampling = ours.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        theirs.max_completion_length, theirs.temperature, theirs.top_p, theirs.top_k)
    assert (sampling.min_p, sampling.repetition_penalty) == (theirs.min_p or 0.0, theirs.repetition_penalty)
    loss = ours.loss
    high = theirs.epsilon if theirs.epsilon_high is None else theirs.epsilon_high
    assert (loss.kl_coef, loss.clip_low, loss.clip_high) == (theirs.beta, theirs.epsilon, high)
    assert loss.kl_weighted == (theirs.use_bias_correction_kl and theirs.beta > 0)
    assert (loss.dual_clip, loss.mask_truncated) == (theirs.delta, theirs.mask_truncated_completions)
    averages = {"dapo": "token", "grpo": "sequence", "dr_grpo": "constant"}
    assert loss.average == averages[theirs.loss_type] and ours.normalize == theirs.scale_rewards
    assert loss.top_entropy_quantile == theirs.top_entropy_quantile
    assert loss.ratio == {"token": "token", "sequence": "sequence_mean"}[theirs.importance_sampling_level]
    assert [(reward.weight, reward.function) for reward in ours.reward_function[1:]][0][0] == 0.5
    assert ours.reward_function[0](completions=["1a2", "b"]) == [2.0, 0.0]
    runs = dict.fromkeys((call.name for call in ours.graph().calls), ours.steps)
    optimizer = resolved_roles(ours.roles(), ours.graph(), runs)["actor"].optimizer
    assert (optimizer.betas, optimizer.eps) == ((theirs.adam_beta1, theirs.adam_beta2), theirs.adam_epsilon)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (theirs.weight_decay, theirs.max_grad_norm)
    rates = [learning_rate(optimizer, step) for step in range(theirs.max_steps)]
    assert rates == pytest.approx(schedule_of(theirs, theirs.max_steps))
    assert ours.actor.dtype == ("bfloat16" if theirs.bf16 else "float32")
    words = ["--actor.dtype", "float32", "--actor.random-init", "--sampling.max-new-tokens", "8"]
    assert main(["check", str(tmp_path / "mine.py"), *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("kind", "settings", "fields_of_ours"), [
    ("SFT", {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
             "max_length": 48, "warmup_steps": 2}, {"batch_size": 6, "dataset.max_completion_tokens": 48}),
    ("RLOO", {"max_steps": 4, "num_generations": 4}, {
        "batch_size": 2, "group_size": 4, "reward_kl.kl_coef": 0.05, "loss.ratio": "sequence"}),
    ("DPO", {"beta": 0.3, "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.2], "num_train_epochs": 2}, {
        "loss.variant": "ipo", "loss.beta": 0.3, "loss.sft_coef": 0.2, "dataset_epochs": 2.0}),
    ("KTO", {"desirable_weight": 1.5, "learning_rate": 5e-7}, {
        "loss.desirable_weight": 1.5, "actor.optimizer.lr": 5e-7, "actor.optimizer.schedule": "linear"}),
    ("Reward", {"center_rewards_coefficient": 0.01}, {
        "loss.center_coef": 0.01, "reward.head": "score", "reward.optimizer.lr": 1e-4, "batch_size": 8}),
])
def test_scripts_of_other_trainers(task, tmp_path, kind, settings, fields_of_ours):
    (tmp_path / "train.py").write_text(script(
        task, kind, settings, arguments="reward_funcs=many" if kind == "RLOO" else ""))
    ours = imported([tmp_path / "train.py"], tmp_path / "mine.py")
    assert type(ours).__name__ == KINDS[kind.lower()].__name__
    for name, value in fields_of_ours.items():
        found = ours
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name
    assert ours.graph().calls


@pytest.mark.parametrize("settings", [
    {}, {"beta": 0.02, "epsilon": 0.3, "epsilon_high": 0.4, "normalize_advantages": True,
         "mask_truncated_completions": True}])
def test_a_script_of_rloo_has_the_loss_of_trls_config(task, tmp_path, settings):
    settings = {"max_steps": 4, "num_generations": 4} | settings
    (tmp_path / "train.py").write_text(script(task, "RLOO", settings, arguments="reward_funcs=many"))
    ours = imported([tmp_path / "train.py"], tmp_path / "mine.py")
    theirs = trl.RLOOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **settings)
    high = theirs.epsilon if theirs.epsilon_high is None else theirs.epsilon_high
    assert (ours.reward_kl.kl_coef, ours.loss.clip_low, ours.loss.clip_high) == (
        theirs.beta, theirs.epsilon, high)
    assert (ours.normalize == "batch") == theirs.normalize_advantages
    assert ours.loss.mask_truncated == theirs.mask_truncated_completions
    assert ours.loss.ratio == "sequence"  # TRL's RLOO has one ratio for all of an answer.


@pytest.mark.parametrize("trainer", sorted(KINDS))
def test_defaults_are_those_of_trl(tmp_path, trainer):
    theirs = CONFIGS[trainer](output_dir=str(tmp_path), report_to="none", use_cpu=True)
    names = {field.name for field in fields(CONFIGS[trainer])}
    model = {field.name: field.default for field in fields(trl.ModelConfig)}
    for name, value in defaults_of(trainer).items():
        if name == "fp16" or name not in names:
            assert name in model or name == "fp16" or name == "max_length", name
            assert name != "dtype" or model[name] == value
            continue
        found = getattr(theirs, name)
        assert getattr(found, "value", found) == value, name


def test_every_setting_is_named_at_the_top(task, tmp_path):
    """Each field of TRL's config is named, whether we know it or not, and so is one that nobody knows."""
    skipped = {"max_steps", "num_train_epochs", "generation_batch_size"}
    settings = {field.name: field.default for field in fields(trl.GRPOConfig)
                if isinstance(field.default, int | float | str | bool) and field.name not in skipped}
    settings |= {"nobody_knows": 3, "output_dir": "out", "vllm_importance_sampling_mode": "token_truncate"}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(settings | {
        "model_name_or_path": str(task), "dataset_name": str(task / "data.jsonl"), "loss_type": "dapo"}))
    imported(["trl", "grpo", "--config", tmp_path / "grpo.yaml", "--run_name", "x"], tmp_path / "mine.py")
    header = [line for line in (tmp_path / "mine.py").read_text().splitlines() if line.startswith("#")]
    text = " ".join(line.removeprefix("#").strip() for line in header)
    assert len(settings) > 100
    assert [name for name in (*settings, "run_name") if f"{name}=" not in text] == []
    left = text.partition("Not carried over:")[2]
    assert "nobody_knows=3: no counterpart is known" in left and 'run_name="x"' in left


def test_a_command_line_of_trl_and_a_shell_script(task, tmp_path, capsys):
    words = ["--model_name_or_path", task, "--dataset_name", task / "data.jsonl", "--learning_rate", "1e-5",
             "--reward_funcs", "rewards47.score", "think_format_reward", "--reward_weights", "1.0", "0.25",
             "--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear", "--no_bf16",
             "--report_to", "wandb", "--max_steps=7", "--output_dir", "runs/mine"]
    assert main(["import", "trl", "grpo", *map(str, words)]) == 0
    by_words = capsys.readouterr().out
    assert "from rewards47 import score\nfrom trl.rewards import think_format_reward\n" in by_words
    assert "reward_function=[score, Reward(think_format_reward, weight=0.25)]" in by_words
    assert "lora=LoraConfig(rank=8, target_modules=\"all-linear\")" in by_words and "steps=7" in by_words
    assert "#     realhf run EXP.py --out runs/mine --track wandb\n" in by_words
    shell = tmp_path / "train.sh"
    lines = " \\\n    ".join(map(str, words[:4]))
    shell.write_text(
        "#!/bin/bash\nexport LR=1e-5\nN=${N:-4}\n"
        "accelerate launch --num_processes 4 trl/scripts/grpo.py \\\n"
        f"    {lines} \\\n    --learning_rate $LR --per_device_train_batch_size ${{N}}\n")
    assert main(["import", str(shell)]) == 0
    by_shell = capsys.readouterr().out
    assert "lr=1e-05" in by_shell and "batch_size=2," in by_shell and "on 4 devices" in by_shell


VERL = {
    "data": {"train_batch_size": 8, "max_prompt_length": 32, "max_response_length": 8, "truncation": "left"},
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 4, "use_kl_loss": True, "kl_loss_coef": 0.002,
                  "optim": {"lr": "3e-6", "lr_warmup_steps_ratio": 0.1}, "strange": 1},
        "rollout": {"n": 4, "temperature": 0.9, "name": "vllm", "val_kwargs": {"n": 2, "do_sample": True}}},
    "algorithm": {"adv_estimator": "grpo"},
    "trainer": {"total_training_steps": 5, "save_freq": 2, "logger": ["console", "wandb"]}}


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus", "remax"])
def test_settings_of_verl(task, tmp_path, estimator, capsys):
    rows = [{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "data_source": "x"} for _ in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(VERL))
    (tmp_path / "scores47.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str) / 9 + (data_source == 'x') * (ground_truth == '2')}\n")
    group = [] if estimator != "remax" else ["actor_rollout_ref.rollout.n=1"]
    words = [f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.model.path={task}",
             f"data.train_files={data}", f"data.val_files=[{data}]", f"critic.model.path={task}",
             f"custom_reward_function.path={tmp_path}/scores47.py",
             "actor_rollout_ref.actor.clip_ratio_high=0.28", "+data.unheard_of=yes", *group]
    ours = imported([tmp_path / "ppo.yaml", *words], tmp_path / "mine.py")
    assert (ours.batch_size, ours.minibatch_size, ours.steps) == (8, 4, 5)
    assert ours.group_size == (1 if estimator == "remax" else 4)
    assert (ours.loss.kl_coef, ours.loss.clip_low, ours.loss.clip_high, ours.loss.dual_clip) == (
        0.002, 0.2, 0.28, 3.0)
    assert ours.loss.average == "token" and ours.sampling.temperature == 0.9
    assert (ours.dataset.max_prompt_tokens, ours.dataset.too_long) == (32, "keep_end")
    assert ours.eval_dataset.samples == 2 and ours.eval_dataset.sampling is None or ours.eval_every == 0
    assert (ours.actor.optimizer.lr, ours.actor.optimizer.warmup_ratio) == (3e-6, 0.1)
    assert (estimator == "gae") == hasattr(ours, "critic")
    scores = ours.reward_function(
        completions=["abc", [{"role": "assistant", "content": ""}]],
        reward_model=[row["reward_model"] for row in rows[:2]], data_source=["x", "y"])
    assert scores == pytest.approx([3 / 9 + 1, 0.0])
    text = re.sub(r"\n# +", " ", (tmp_path / "mine.py").read_text())
    for name in ("actor_rollout_ref.actor.strange=1", "data.unheard_of=", "actor_rollout_ref.rollout.name="):
        assert name in text
    changes = ["--actor.dtype", "float32", "--actor.random-init", "--no-eval-dataset.dataset.chat"][:3]
    changes += ["--critic.dtype", "float32", "--critic.random-init"] if estimator == "gae" else []
    assert main(["check", str(tmp_path / "mine.py"), *changes]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(("words", "sentence"), [
    ([], "realhf import needs settings to read"),
    (["trl", "gpro"], "there is no trainer 'gpro' (did you mean grpo?): legal are grpo, rloo"),
    (["nothing.yaml"], "nothing.yaml: there is no such file"),
    (["odd.txt"], "odd.txt: it must be a YAML file, a Python script or a shell script"),
    (["plain.py"], "plain.py calls no trainer of TRL: legal are GRPOTrainer"),
    (["parsed.py"], "parsed.py line 4: the model is model_args.model_name_or_path, which is known only when"),
    (["flat.yaml"], "flat.yaml: which trainer of TRL is it? --trainer names it"),
    (["trl", "grpo", "--learning_rate", "1e-6"], "model_name_or_path is missing"),
    (["verl", "algorithm.adv_estimator=gpg"], "algorithm.adv_estimator 'gpg' has no counterpart here: "),
    (["trl", "dpo", "--model_name_or_path", "m", "--dataset_name", "d", "--loss_type", "bco_pair"],
     "loss_type bco_pair has no counterpart here: legal are sigmoid, hinge or ipo"),
    (["trl", "grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--num_generations", "3"],
     "TRL generates 8 samples at once on 1 device, and trains on 8: the first must be a multiple"),
])
def test_mistakes_are_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.txt").write_text("x")
    (tmp_path / "plain.py").write_text("print(1)\n")
    (tmp_path / "parsed.py").write_text(
        "from trl import *\nparser = TrlParser((GRPOConfig,))\nargs, model_args = parser.parse()\n"
        "GRPOTrainer(model=model_args.model_name_or_path, args=args, reward_funcs=[])\n")
    (tmp_path / "flat.yaml").write_text("learning_rate: 1e-6\n")
    assert main(["import", *words]) == 2
    err = capsys.readouterr().err
    assert f"realhf: {sentence}" in err and err.count("\n") == 1
