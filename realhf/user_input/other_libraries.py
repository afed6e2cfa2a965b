"""A table of options of TRL, verl and transformers, and of ours that do the same. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Ours(NamedTuple):
    """An answer to an option of another library: ours, or what to do instead."""

    options: tuple[str, ...] = ()
    """Ends of the names of our fields, such as `optimizer.lr`, and options of `realhf run`, such as `--out`;
    all of them together are the other library's option."""
    note: str = ""  # A remark on these options.
    instead: str = ""  # What to do if we have no such option.


_HOLDERS = {
    "optimizer": "Role(optimizer=OptimizerConfig({}=...))", "lora": "Role(lora=LoraConfig({}=...))",
    "actor": "Role({}=...)", "sampling": "sampling=SamplingConfig({}=...)",
    "loss": "loss=PolicyLossConfig({}=...)", "reward_kl": "reward_kl=RewardKL({}=...)",
    "dataset": "dataset=DatasetConfig({}=...)", "eval_dataset": "eval_dataset=Evaluation(..., {}=...)",
    "rollouts": "rollouts=RolloutLog({}=...)",
}
"""First part of an option's name -> how an experiment file sets the fields in it."""
_DEVICES = "it counts the prompts of a step on all devices; `micro_batch_tokens` of the plan bounds one pass"
_REWARDS = "write reward_function=[f, Reward(g, weight=...)] in the experiment file"
_EVALUATION = "write eval_dataset=Evaluation(DatasetConfig(...), samples=...) in the experiment file"
_ENVIRONMENT = (
    "write environment=Environment(partial(TRLEnvironment, C)) in the experiment file, for TRL's class C")
_ADAPTERS = "write Role(lora=LoraConfig(...)) in the experiment file, or give --actor.lora.rank"
_BFLOAT16 = 'write Role(dtype="bfloat16") in the experiment file, or give --actor.dtype bfloat16'
_RECOMPUTE = "it is the option `recompute: true` of a call in the plan, and --plan auto sets it where needed"
_RANKS = "a plan says which ranks each call has, and --nproc or torchrun how many there are"
_TRACKERS = "the names of trackers, such as --track wandb; TensorBoard files are always written"
_NOT_NEEDED = "not needed: realhf has its own generation engine, and a plan says on which ranks it runs"

OTHER_NAMES: Mapping[str, Ours] = {
    # Optimizer.
    **dict.fromkeys(("learning_rate", "optim.lr", "lr"), Ours(("optimizer.lr",))),
    **{name: Ours((f"optimizer.{name}",)) for name in (
        "weight_decay", "betas", "warmup_steps", "warmup_ratio", "schedule")},
    "actor.optim.lr": Ours(("actor.optimizer.lr",)),
    "critic.optim.lr": Ours(("critic.optimizer.lr",)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), Ours(("optimizer.schedule",))),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), Ours(("optimizer.max_grad_norm",))),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Ours(("optimizer.betas",), "both numbers together")),
    "adam_epsilon": Ours(("optimizer.eps",)),
    "lr_warmup_steps": Ours(("optimizer.warmup_steps",)),
    "lr_warmup_steps_ratio": Ours(("optimizer.warmup_ratio",)),
    "optim.total_training_steps": Ours(("optimizer.total_steps",), "0: those of the run"),
    # Batches and the length of the run.
    **dict.fromkeys(("num_generations", "rollout_n", "rollout.n"), Ours(("group_size",))),
    **dict.fromkeys(("train_batch_size", "gen_batch_size"), Ours(("batch_size",))),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"),
        Ours(("batch_size",), _DEVICES)),
    "steps_per_generation": Ours(("minibatches",)),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), Ours(("minibatch_size",))),
    **dict.fromkeys(("max_steps", "total_training_steps"), Ours(("steps",))),
    **dict.fromkeys(("num_train_epochs", "total_epochs"), Ours(
        ("dataset_epochs",), "in the place of `steps`; `realhf check` prints how many epochs these are")),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_ppo_epochs"), Ours(("epochs",))),
    **dict.fromkeys(
        ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu",
         "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "use_dynamic_bsz"),
        Ours(instead="it is the option `micro_batch_tokens` of a call in the plan")),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "enable_gradient_checkpointing"),
                    Ours(instead=_RECOMPUTE)),
    # Data and sampling.
    **dict.fromkeys(("max_completion_length", "max_response_length"), Ours(("sampling.max_new_tokens",))),
    "max_prompt_length": Ours(("dataset.max_prompt_tokens",)),
    "max_length": Ours(
        ("dataset.max_completion_tokens",), "in fine-tuning; answers have sampling.max_new_tokens"),
    "filter_overlong_prompts": Ours(("dataset.too_long",), "drop, the default, leaves long prompts out"),
    **dict.fromkeys(("truncation", "truncation_mode"), Ours(("dataset.too_long",))),
    "apply_chat_template_kwargs": Ours(("dataset.chat_template_kwargs",)),
    "assistant_only_loss": Ours(("dataset.assistant_only",), "True is the default"),
    "completion_only_loss": Ours(("dataset.assistant_only",), "prompts are never learned"),
    "shuffle_dataset": Ours(("dataset.shuffle",)),
    "train_max_samples": Ours(("dataset.max_rows",)),
    **dict.fromkeys(("train_files", "train_dataset"), Ours(("dataset.path",))),
    "val_files": Ours(("eval_dataset.path",)),
    "reward_fn_key": Ours(("dataset.map",), "a reward may return None for rows that it is not for"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), Ours(("sampling.stop",))),
    # The loss.
    "epsilon": Ours(("loss.clip_low", "loss.clip_high")),
    **dict.fromkeys(("clip_ratio", "cliprange"), Ours(("loss.clip_low", "loss.clip_high"))),
    "clip_ratio_low": Ours(("loss.clip_low",)),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), Ours(("loss.clip_high",))),
    **dict.fromkeys(("delta", "clip_ratio_c"), Ours(("loss.dual_clip",))),
    "loss_type": Ours(("loss.average",), "sequence is grpo, token is dapo and bnpo, constant is dr_grpo"),
    "loss_agg_mode": Ours(("loss.average",), "sequence is seq-mean-token-mean, token is token-mean"),
    "importance_sampling_level": Ours(("loss.ratio",), "sequence_mean is TRL's sequence"),
    **dict.fromkeys(("beta", "kl_loss_coef"), Ours(("loss.kl_coef",))),
    "kl_loss_type": Ours(("loss.kl_estimator",)),
    "use_bias_correction_kl": Ours(("loss.kl_weighted",)),
    "use_kl_loss": Ours(("loss.kl_coef",), "above 0, there is a reference"),
    "kl_ctrl.kl_coef": Ours(("reward_kl.kl_coef",)),
    "use_kl_in_reward": Ours(("reward_kl.kl_coef",), "above 0, the reward has the KL"),
    "entropy_coeff": Ours(("loss.entropy_coef",)),
    "scale_rewards": Ours(("normalize",)),
    "norm_adv_by_std_in_grpo": Ours(("normalize",), "none: not divided by the deviation"),
    "adv_estimator": Ours(instead="each algorithm is a class in the experiment file, such as GRPO or RLOO"),
    "mask_truncated_completions": Ours(("loss.mask_truncated",)),
    "top_entropy_quantile": Ours(("loss.top_entropy_quantile",)),
    "off_policy_mask_threshold": Ours(("loss.off_policy_mask_threshold",)),
    **{name: Ours((f"loss.{name}",)) for name in ("sapo_temperature_pos", "sapo_temperature_neg")},
    "vllm_importance_sampling_mode": Ours(
        ("loss.importance_mode", "loss.importance_ratio"), "with loss.proximal recomputed"),
    "vllm_importance_sampling_clip_max": Ours(
        ("loss.importance_cap",), "with loss.proximal recomputed"),
    "vllm_importance_sampling_clip_min": Ours(
        ("loss.importance_floor",), "with loss.proximal recomputed"),
    "precompute_ref_log_probs": Ours(("loss.precomputed_ref",), "`realhf reference` writes such rows"),
    "simpo_gamma": Ours(("loss.gamma",)),
    **{name: Ours((f"loss.{name}",)) for name in ("desirable_weight", "undesirable_weight")},
    **dict.fromkeys(("rpo_alpha", "loss_weights"), Ours(("loss.sft_coef",), "the weight of the SFT term")),
    "actor.shuffle": Ours(("shuffle_minibatches",)),
    # Roles.
    **dict.fromkeys(("torch_dtype", "model_dtype"), Ours(("actor.dtype",))),
    "bf16": Ours(instead=_BFLOAT16),
    "fp16": Ours(instead=f"not here, as float16 needs loss scaling; {_BFLOAT16}"),
    "model_name_or_path": Ours(("actor.model",)),
    "model.path": Ours(("model",)),
    "actor_rollout_ref.model.path": Ours(("actor.model",)),
    **dict.fromkeys(("peft_config", "use_peft"), Ours(instead=_ADAPTERS)),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), Ours(("lora.rank",))),
    "lora_alpha": Ours(("lora.alpha",)),
    "lora_target_modules": Ours(("lora.target_modules",)),
    "lora_dropout": Ours(instead="not here: adapters have no dropout"),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), Ours(
        instead='write ref=Role(model, follows="actor", follow_rate=...) in the experiment file')),
    # Rewards and evaluation.
    **dict.fromkeys(("reward_funcs", "reward_weights"), Ours(instead=_REWARDS)),
    **dict.fromkeys(
        ("custom_reward_function.path", "custom_reward_function.name"), Ours(instead=_REWARDS)),
    **dict.fromkeys(("reward_model.enable", "reward_model.model.path"), Ours(
        instead='write reward=Role(model, head="score") in the experiment file')),
    **dict.fromkeys(
        ("num_generations_eval", "val_kwargs.n"), Ours(("eval_dataset.samples",), instead=_EVALUATION)),
    "val_max_samples": Ours(("eval_dataset.max_rows",)),
    **dict.fromkeys(("eval_steps", "test_freq"), Ours(("eval_every",))),
    **dict.fromkeys(("eval_on_start", "val_before_train"), Ours(("eval_at_start",))),
    "environment_factory": Ours(instead=_ENVIRONMENT),
    # Runs, checkpoints and logs.
    **dict.fromkeys(("save_steps", "save_freq"), Ours(("checkpoint_every",))),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), Ours(("keep_checkpoints",))),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode", "resume_from_path"), Ours(("--resume",))),
    **dict.fromkeys(("output_dir", "default_local_dir"), Ours(("--out",))),
    **dict.fromkeys(("run_name", "experiment_name"), Ours(("--out",), "trackers show the directory's name")),
    **dict.fromkeys(("report_to", "logger"), Ours(("--track",), _TRACKERS)),
    "project_name": Ours(instead="the trackers' own variables are read, such as WANDB_PROJECT"),
    "logging_steps": Ours(("log_every",)),
    **dict.fromkeys(("log_completions", "rollout_data_dir", "log_val_generations"), Ours(
        instead="not needed: rollouts.jsonl is always written, and `realhf rollouts RUN` shows it")),
    "num_completions_to_print": Ours(instead="use `realhf rollouts RUN --limit N`"),
    "hub_model_id": Ours(("push_to_hub",)),
    # Processes.
    **dict.fromkeys(("n_gpus_per_node", "num_processes", "nproc_per_node"), Ours(("--nproc",))),
    "nnodes": Ours(instead="start torchrun on each host"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "tensor_model_parallel_size"), Ours(instead=_RANKS)),
    **dict.fromkeys(
        ("use_vllm", "gpu_memory_utilization", "rollout.name", "rollout.mode"), Ours(instead=_NOT_NEEDED)),
}
"""An option of another library, or the last parts of its name -> what we have for it."""


def ours(name: str) -> Ours | None:
    """Return what we have for another library's option, whose name has dots; `-` and `_` are the same."""
    parts = name.replace("-", "_").split(".")
    for start in range(len(parts)):
        if (answer := OTHER_NAMES.get(".".join(parts[start:]))) is not None:
            return answer
    return Ours(instead=_NOT_NEEDED) if parts[-1].startswith("vllm_") else None


def keyword_hint(name: str, legal: Collection[str]) -> str:
    """Return what to write for another library's keyword, for a class with the fields `legal`.

    The text is empty if the keyword is in no other library that we know.
    """
    answer = ours(name)
    if answer is None or not answer.options:
        return answer.instead if answer else ""
    names = [option.rpartition(".")[2] for option in answer.options]
    if all(name in legal for name in names):
        return " ".join(filter(None, (f"did you mean {' and '.join(names)}?", answer.note)))
    return ": ".join(filter(None, (f"here it is {_in_a_file(answer.options[0], names)}", answer.note)))


def _in_a_file(option: str, names: Sequence[str]) -> str:
    """Return how an experiment file sets the fields `names`, or that `realhf run` has the option."""
    if option.startswith("--"):
        return f"{option} of `realhf run`"
    holder = option.rpartition(".")[0]
    fields = "=..., ".join(names)
    return _HOLDERS[holder.split(".")[-1]].format(fields) if holder else f"the experiment's {fields}=..."
