"""From verl's settings to an experiment. Names and defaults are those of its ppo_trainer.yaml of 2026."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.algorithms.critic_free import GRPO, RLOO, ReinforcePlusPlus, ReMax
from realhf.algorithms.ppo import PPO
from realhf.cli.imported import Code, Imported
from realhf.errors import UserError
from realhf.experiment import Experiment

_KINDS: dict[str, type[Experiment]] = {
    "gae": PPO, "grpo": GRPO, "rloo": RLOO, "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlus, "remax": ReMax}
"""`algorithm.adv_estimator` -> our algorithm."""
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000, "algorithm.kl_ctrl.target_kl": 0.1,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet", "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_max_samples": -1, "data.val_max_samples": -1, "data.prompt_key": "prompt",
    "data.max_prompt_length": 512, "data.max_response_length": 512, "data.train_batch_size": 1024,
    "data.shuffle": True, "data.filter_overlong_prompts": False, "data.truncation": "error",
    f"{_MODEL}.path": "~/models/deepseek-llm-7b-chat", f"{_MODEL}.lora_rank": 0, f"{_MODEL}.lora_alpha": 16,
    f"{_MODEL}.target_modules": "all-linear",
    f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{_ACTOR}.optim.lr_warmup_steps": -1, f"{_ACTOR}.optim.total_training_steps": -1,
    f"{_ACTOR}.optim.weight_decay": 0.01, f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.optim.clip_grad": 1.0, f"{_ACTOR}.optim.min_lr_ratio": 0.0,
    f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.ppo_epochs": 1, f"{_ACTOR}.shuffle": False,
    f"{_ACTOR}.clip_ratio": 0.2, f"{_ACTOR}.clip_ratio_low": 0.2, f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.tau_pos": 1.0, f"{_ACTOR}.tau_neg": 1.05,
    f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.use_kl_loss": False, f"{_ACTOR}.kl_loss_coef": 0.001, f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ROLLOUT}.dtype": "bfloat16", f"{_ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.temperature": 1.0, f"{_ROLLOUT}.top_k": -1, f"{_ROLLOUT}.top_p": 1.0,
    f"{_ROLLOUT}.ignore_eos": False, f"{_ROLLOUT}.val_kwargs.n": 1, f"{_ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{_ROLLOUT}.val_kwargs.top_p": 1.0, f"{_ROLLOUT}.val_kwargs.top_k": -1,
    f"{_ROLLOUT}.val_kwargs.do_sample": False,
    "critic.optim.lr": 1e-5, "critic.optim.weight_decay": 0.01, "critic.optim.betas": [0.9, 0.999],
    "critic.optim.clip_grad": 1.0, "critic.optim.lr_scheduler_type": "constant",
    "critic.optim.min_lr_ratio": 0.0, "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.lr_warmup_steps": -1, "critic.optim.total_training_steps": -1,
    "critic.cliprange_value": 0.5,
    "reward_model.enable": False, "reward_model.model.path": "~/models/FsfairX-LLaMA3-RM-v0.1",
    "custom_reward_function.name": "compute_score",
    "trainer.total_epochs": 30, "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.val_before_train": True, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
"""The settings that are read here, and verl's defaults."""
_AVERAGES = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant",
             "seq-mean-token-sum": "constant"}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_TRUNCATIONS = {"error": "error", "left": "keep_end", "right": "keep_start"}
_SCORES = '''def reward(completions, reward_model, data_source=None, extra_info=None):
    """Call verl's function for each sample; a dict that it returns has the score under `score`."""
    scores = []
    for i, completion in enumerate(completions):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        score = {function}(
            data_source=data_source and data_source[i], solution_str=text,
            ground_truth=reward_model[i]["ground_truth"], extra_info=extra_info and extra_info[i])
        scores.append(float(score["score"] if isinstance(score, dict) else score))
    return scores'''
_ANSWERS = '''def with_answer(row):
    """Return the right answer, which verl's rows have in `reward_model`, as a column of its own."""
    return {"answer": row["reward_model"]["ground_truth"]}'''


def flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of verl's tree by dotted name, without `defaults` and values that refer to others."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if not prefix and key in ("defaults", "hydra"):
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in _LEAVES:
            flat |= flattened(value, f"{name}.")
        elif not (isinstance(value, str) and value.startswith(("${", "???"))):
            flat[name] = value
    return flat


_LEAVES = ("data.apply_chat_template_kwargs",)


def imported_from_verl(given: Mapping[str, Any]) -> Imported:
    """Return the experiment that trains as verl does with these settings, by dotted name.

    Raises UserError if an algorithm has no counterpart.
    """
    run = Imported({name.lstrip("+"): value for name, value in given.items()}, DEFAULTS)
    estimator = run["algorithm.adv_estimator"]
    if estimator not in _KINDS:
        raise UserError(
            f"algorithm.adv_estimator {estimator!r} has no counterpart here: legal are {', '.join(_KINDS)}; "
            "advantages=f of your own can do others")
    run.kind = _KINDS[estimator]
    run.explain(f"the class {run.kind.__name__}", "algorithm.adv_estimator")
    _model(run, "actor", run[f"{_MODEL}.path"], f"{_MODEL}.path", f"{_ACTOR}.optim")
    _adapters(run)
    _batches(run)
    _data(run)
    _sampling(run)
    _loss(run)
    _advantages(run, estimator)
    _reward(run)
    _schedule(run)
    _rest(run)
    return run


def _path(name: str) -> str:
    return os.path.expanduser(name) if name.startswith("~") else name


def _model(run: Imported, role: str, path: str, name: str, optimizer: str) -> None:
    run.carry(f"{role}.model", _path(path), name)
    run.carry(f"{role}.dtype", "bfloat16", f"{_ROLLOUT}.dtype", f"{_ACTOR}.fsdp_config.dtype", note=(
        "weights in bfloat16 and a float32 copy in the optimizer, where verl has autocast"))
    prefix = f"{role}.optimizer"
    run.carry(f"{prefix}.lr", float(run[f"{optimizer}.lr"]), f"{optimizer}.lr")
    run.carry(f"{prefix}.betas", tuple(run[f"{optimizer}.betas"]), f"{optimizer}.betas")
    for theirs, ours in (("weight_decay", "weight_decay"), ("clip_grad", "max_grad_norm")):
        names = [f"{optimizer}.{theirs}", *([f"{_ACTOR}.grad_clip"] if theirs == "clip_grad" else [])]
        given = next((name for name in names if run.has(name)), names[0])
        run.carry(f"{prefix}.{ours}", float(run[given]), *names)
    schedule = run[f"{optimizer}.lr_scheduler_type"]
    if run.has(f"{optimizer}.warmup_style") and run[f"{optimizer}.warmup_style"] is not None:
        schedule = run[f"{optimizer}.warmup_style"]
    run.carry(f"{prefix}.schedule", schedule, f"{optimizer}.lr_scheduler_type", f"{optimizer}.warmup_style")
    if schedule == "cosine":
        ratio = run[f"{optimizer}.min_lr_ratio"]
        run.carry(f"{prefix}.min_lr_ratio", float(ratio or 0.0), f"{optimizer}.min_lr_ratio")
    run.explain("read with the schedule cosine alone", f"{optimizer}.min_lr_ratio")
    steps = run[f"{optimizer}.lr_warmup_steps"]
    if steps is not None and steps > 0:
        run.carry(f"{prefix}.warmup_steps", steps, f"{optimizer}.lr_warmup_steps")
        run.explain("lr_warmup_steps decides", f"{optimizer}.lr_warmup_steps_ratio")
    else:
        ratio = float(run[f"{optimizer}.lr_warmup_steps_ratio"])
        run.carry(f"{prefix}.warmup_ratio", ratio, f"{optimizer}.lr_warmup_steps_ratio")
        run.explain("below 0, the ratio counts", f"{optimizer}.lr_warmup_steps")
    total = run[f"{optimizer}.total_training_steps"]
    if total is not None and total > 0:
        run.carry(f"{prefix}.total_steps", total, f"{optimizer}.total_training_steps")


def _adapters(run: Imported) -> None:
    if not run[f"{_MODEL}.lora_rank"]:
        return
    run.carry("actor.lora.rank", run[f"{_MODEL}.lora_rank"], f"{_MODEL}.lora_rank")
    run.carry("actor.lora.alpha", float(run[f"{_MODEL}.lora_alpha"]), f"{_MODEL}.lora_alpha")
    targets = run[f"{_MODEL}.target_modules"]
    targets = targets if isinstance(targets, str) else tuple(targets)
    run.carry("actor.lora.target_modules", targets, f"{_MODEL}.target_modules")


def _batches(run: Imported) -> None:
    run.carry("batch_size", run["data.train_batch_size"], "data.train_batch_size")
    run.carry("group_size", run[f"{_ROLLOUT}.n"], f"{_ROLLOUT}.n")
    smaller = run[f"{_ACTOR}.ppo_mini_batch_size"]
    if run["data.train_batch_size"] % smaller:
        raise UserError(
            f"{_ACTOR}.ppo_mini_batch_size {smaller} does not divide data.train_batch_size "
            f"{run['data.train_batch_size']}, which it must here")
    run.carry("minibatch_size", smaller, f"{_ACTOR}.ppo_mini_batch_size")
    run.values.pop("minibatches", None)
    run.carry("epochs", run[f"{_ACTOR}.ppo_epochs"], f"{_ACTOR}.ppo_epochs")
    run.carry("shuffle_minibatches", bool(run[f"{_ACTOR}.shuffle"]), f"{_ACTOR}.shuffle")


def _data(run: Imported) -> None:
    for theirs, ours in (("data.train_files", "dataset"), ("data.val_files", "eval_dataset.dataset")):
        files = run[theirs] if ours == "dataset" or run.has(theirs) else None  # Not a file that verl expects.
        paths = [_path(files)] if isinstance(files, str) else [_path(file) for file in files or ()]
        if paths:
            run.carry(f"{ours}.path", paths[0] if len(paths) == 1 else tuple(paths), theirs)
            run.carry(f"{ours}.prompt_key", run["data.prompt_key"], "data.prompt_key")
            run.carry(f"{ours}.max_prompt_tokens", run["data.max_prompt_length"], "data.max_prompt_length")
            drops = run["data.filter_overlong_prompts"]
            too_long = "drop" if drops else _TRUNCATIONS.get(run["data.truncation"])
            if too_long is None:
                run.leave("here are error, left and right", "data.truncation")
            run.carry(f"{ours}.too_long", too_long, "data.filter_overlong_prompts", "data.truncation")
            kwargs = run["data.apply_chat_template_kwargs"]
            if kwargs:
                run.carry(f"{ours}.chat_template_kwargs", dict(kwargs), "data.apply_chat_template_kwargs")
    run.carry("dataset.shuffle", bool(run["data.shuffle"]), "data.shuffle")
    if run["data.train_max_samples"] > 0:
        run.carry("dataset.max_rows", run["data.train_max_samples"], "data.train_max_samples",
                  note="the first rows, where verl draws them at random")
    if run["data.val_max_samples"] > 0:
        run.carry("eval_dataset.max_rows", run["data.val_max_samples"], "data.val_max_samples")
    seed = run["data.seed"]
    if seed is not None:
        run.carry("seed", seed, "data.seed")
    run.explain("a reward reads the columns that it names", "data.reward_fn_key")


def _sampling(run: Imported) -> None:
    run.carry("sampling.max_new_tokens", run["data.max_response_length"], "data.max_response_length")
    run.carry("sampling.temperature", float(run[f"{_ROLLOUT}.temperature"]), f"{_ROLLOUT}.temperature")
    run.carry("sampling.top_p", float(run[f"{_ROLLOUT}.top_p"]), f"{_ROLLOUT}.top_p")
    run.carry("sampling.top_k", max(0, run[f"{_ROLLOUT}.top_k"]), f"{_ROLLOUT}.top_k")
    run.carry("sampling.ignore_eos", bool(run[f"{_ROLLOUT}.ignore_eos"]), f"{_ROLLOUT}.ignore_eos")
    validation = f"{_ROLLOUT}.val_kwargs"
    names = [f"{validation}.{name}" for name in ("n", "do_sample", "temperature", "top_p", "top_k")]
    if "eval_dataset.dataset.path" not in run.values:
        run.leave("there are no val_files", *names)
        return
    run.carry("eval_dataset.samples", run[f"{validation}.n"], f"{validation}.n")
    if run[f"{validation}.do_sample"] and run[f"{validation}.temperature"] > 0:
        drawn = {"max_new_tokens": run["data.max_response_length"],
                 "temperature": float(run[f"{validation}.temperature"]),
                 "top_p": float(run[f"{validation}.top_p"]), "top_k": max(0, run[f"{validation}.top_k"])}
        text = f"SamplingConfig({', '.join(f'{name}={value}' for name, value in drawn.items())})"
        run.carry("eval_dataset.sampling", Code(text, ("SamplingConfig",)), *names[1:])
    run.explain("one greedy answer", *names[1:])


def _loss(run: Imported) -> None:
    mode = run[f"{_ACTOR}.policy_loss.loss_mode"]
    objectives = {"vanilla": "ppo", "gspo": "ppo", "sapo": "sapo", "cispo": "cispo"}
    if mode not in objectives:
        raise UserError(
            f"{_ACTOR}.policy_loss.loss_mode {mode!r} has no counterpart here: legal are "
            f"{', '.join(objectives)}; loss=f of your own can do others")
    run.carry("loss.objective", objectives[mode], f"{_ACTOR}.policy_loss.loss_mode")
    if mode == "gspo":
        run.values["loss.ratio"] = "sequence_mean"
    elif run.kind is RLOO:
        run.values["loss.ratio"] = "token"
    both = run[f"{_ACTOR}.clip_ratio"]
    for side in ("low", "high"):
        name = f"{_ACTOR}.clip_ratio_{side}"
        value = run[name] if run.has(name) else both
        if objectives[mode] == "ppo":
            run.carry(f"loss.clip_{side}", float(value), name, f"{_ACTOR}.clip_ratio")
        elif mode == "cispo" and side == "high":
            run.carry("loss.ratio_cap", 1 + float(value), name, f"{_ACTOR}.clip_ratio")
    if mode == "sapo":
        run.carry("loss.sapo_temperature_pos", float(run[f"{_ACTOR}.tau_pos"]), f"{_ACTOR}.tau_pos")
        run.carry("loss.sapo_temperature_neg", float(run[f"{_ACTOR}.tau_neg"]), f"{_ACTOR}.tau_neg")
    if mode == "vanilla":
        run.carry("loss.dual_clip", float(run[f"{_ACTOR}.clip_ratio_c"]), f"{_ACTOR}.clip_ratio_c")
    run.explain(f"not read by the loss {mode}", *(
        f"{_ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
                                        "tau_pos", "tau_neg")))
    how = run[f"{_ACTOR}.loss_agg_mode"]
    if how not in _AVERAGES:
        raise UserError(f"{_ACTOR}.loss_agg_mode {how!r}: legal are {', '.join(_AVERAGES)}")
    run.carry("loss.average", _AVERAGES[how], f"{_ACTOR}.loss_agg_mode")
    if how == "seq-mean-token-sum":
        run.values["loss.constant_length"] = 1
    elif _AVERAGES[how] == "constant" and run[f"{_ACTOR}.loss_scale_factor"] is not None:
        run.carry("loss.constant_length", run[f"{_ACTOR}.loss_scale_factor"], f"{_ACTOR}.loss_scale_factor")
    run.carry("loss.entropy_coef", float(run[f"{_ACTOR}.entropy_coeff"]), f"{_ACTOR}.entropy_coeff")
    names = [f"{_ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")]
    if run[names[0]]:
        run.carry("loss.kl_coef", float(run[names[1]]), names[1], names[0])
        run.carry("loss.kl_estimator", _estimator(run, names[2]), names[2])
    run.explain("there is no KL in the loss", *names)


def _estimator(run: Imported, name: str) -> str:
    """Return our name of an estimator of the KL; a `+` behind verl's tells of its gradient alone."""
    if (found := _ESTIMATORS.get(str(run[name]).removesuffix("+"))) is None:
        raise UserError(f"{name} {run[name]!r} has no counterpart here: legal are {', '.join(_ESTIMATORS)}")
    return found


def _advantages(run: Imported, estimator: str) -> None:
    holder = "advantage" if run.kind is PPO else "reward_kl"
    control = [f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "type", "target_kl", "horizon")]
    names = ["algorithm.use_kl_in_reward", "algorithm.kl_penalty", *control]
    coefficient = float(run[control[0]]) if run[names[0]] else 0.0
    run.carry(f"{holder}.kl_coef", coefficient, *([control[0]] if coefficient else []), names[0])
    if coefficient:
        run.carry(f"{holder}.kl_estimator", _estimator(run, names[1]), names[1])
        if run[control[1]] == "adaptive":
            run.carry(f"{holder}.kl_target", float(run[control[2]]), control[2], control[1])
            run.carry(f"{holder}.kl_horizon", run[control[3]], control[3])
    run.explain("the coefficient is fixed" if coefficient else "there is no KL in the reward", *names)
    if run.kind is PPO:
        run.carry("advantage.gamma", float(run["algorithm.gamma"]), "algorithm.gamma")
        run.carry("advantage.lam", float(run["algorithm.lam"]), "algorithm.lam")
        _critic(run)
    else:
        run.explain(f"not read by {run.kind.__name__}", "algorithm.gamma", "algorithm.lam")
        run.leave(f"{run.kind.__name__} has no critic", *(n for n in run.names if n.startswith("critic.")))
    by_std = run["algorithm.norm_adv_by_std_in_grpo"]
    if run.kind is GRPO:
        run.carry("normalize", "group" if by_std else "none", "algorithm.norm_adv_by_std_in_grpo")
        if by_std:
            run.values["deviation"] = "sample"
    run.explain("read by grpo alone", "algorithm.norm_adv_by_std_in_grpo")
    if estimator == "reinforce_plus_plus_baseline":
        run.values["baseline"] = "group_mean"


def _critic(run: Imported) -> None:
    path = run["critic.model.path"] if run.has("critic.model.path") else run[f"{_MODEL}.path"]
    _model(run, "critic", path, "critic.model.path", "critic.optim")
    run.values["critic.head"] = "score"
    run.carry("value_loss.clip", float(run["critic.cliprange_value"]), "critic.cliprange_value")
    run.explain("minibatches and epochs of actor and critic are the same", "critic.ppo_mini_batch_size",
                "critic.ppo_epochs", "critic.shuffle", "critic.loss_agg_mode")


def _reward(run: Imported) -> None:
    names = ("reward_model.enable", "reward_model.model.path")
    if run[names[0]]:
        run.carry("reward.model", _path(run[names[1]]), names[1], names[0])
        run.values["reward.head"] = "score"
        return
    run.explain("there is no reward model", *names)
    file = run["custom_reward_function.path"]
    name = run["custom_reward_function.name"]
    if file is not None:
        path = Path(_path(file)).absolute()
        run.prelude += [
            f"sys.path.insert(0, {str(path.parent)!r})\n"
            f"{name} = importlib.import_module({path.stem!r}).{name}", "import importlib", "import sys",
            _SCORES.replace("{function}", name)]
        run.carry(
            "reward_function", Code("reward"), "custom_reward_function.path", "custom_reward_function.name",
            note="it is called for each sample, with verl's arguments")
        return
    run.prelude.append(_ANSWERS)
    run.values["dataset.map"] = Code("with_answer")
    if "eval_dataset.dataset.path" in run.values:
        run.values["eval_dataset.dataset.map"] = Code("with_answer")
    run.values["reward_function"] = Code("MathAnswer()", ("MathAnswer",))
    run.note("no custom_reward_function: verl chooses one by data_source; MathAnswer() stands here")


def _schedule(run: Imported) -> None:
    steps = run["trainer.total_training_steps"]
    if steps is not None and steps > 0:
        run.carry("steps", steps, "trainer.total_training_steps")
        run.explain("total_training_steps decides", "trainer.total_epochs")
    else:
        run.carry("dataset_epochs", float(run["trainer.total_epochs"]), "trainer.total_epochs")
    if run["trainer.save_freq"] > 0:
        run.carry("checkpoint_every", run["trainer.save_freq"], "trainer.save_freq")
    run.explain("checkpoint_every stays 15m", "trainer.save_freq")
    if "eval_dataset.dataset.path" in run.values:
        run.carry("eval_every", max(0, run["trainer.test_freq"]), "trainer.test_freq")
        run.carry("eval_at_start", bool(run["trainer.val_before_train"]), "trainer.val_before_train")
    else:
        run.explain("there are no held-out rows", "trainer.test_freq", "trainer.val_before_train")
    if run.has("trainer.max_actor_ckpt_to_keep") and run["trainer.max_actor_ckpt_to_keep"]:
        run.carry("keep_checkpoints", run["trainer.max_actor_ckpt_to_keep"], "trainer.max_actor_ckpt_to_keep")
    if run.has("trainer.default_local_dir"):
        run.command += ["--out", _path(str(run["trainer.default_local_dir"]))]
        run.explain("--out of `realhf run`", "trainer.default_local_dir")
    elif run.has("trainer.experiment_name"):
        run.command += ["--out", f"runs/{run['trainer.experiment_name']}"]
    run.explain("the name of the run directory, --out", "trainer.experiment_name")
    loggers = run["trainer.logger"]
    for name in [loggers] if isinstance(loggers, str) else loggers or []:
        if name in ("wandb", "mlflow", "trackio"):
            run.command += ["--track", name]
    run.explain("--track of `realhf run`; console and TensorBoard always", "trainer.logger")


def _rest(run: Imported) -> None:
    devices = run["trainer.nnodes"] * run["trainer.n_gpus_per_node"]
    if run["trainer.nnodes"] == 1 and devices > 1:
        run.command += ["--nproc", str(devices)]
    run.explain(
        f"{devices} devices: --nproc on one host, torchrun on several", "trainer.nnodes",
        "trainer.n_gpus_per_node")
    ranks = "a plan says which ranks each call has, and how its model is split"
    sizes = ("_parallel_size", "fsdp_size", ".strategy", "offload", ".gpu_memory_utilization", ".mode",
             "enforce_eager", "free_cache_engine", f"{_ROLLOUT}.name", "use_remove_padding")
    run.explain(ranks, *(name for name in run.names if name.endswith(sizes)))
    micro = ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu", "use_dynamic_bsz",
             "max_num_batched_tokens", "max_num_seqs")
    run.explain(
        "`micro_batch_tokens` of a call in the plan", *(name for name in run.names if name.endswith(micro)))
    run.explain(
        "the option `recompute: true` of a call in the plan, which --plan auto sets where it is needed",
        *(name for name in run.names if name.endswith("gradient_checkpointing")))
