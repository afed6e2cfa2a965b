"""From the settings of TRL's trainers to an experiment. Defaults are those of TRL 1.16."""

from collections.abc import Mapping
from typing import Any

from realhf.algorithms.critic_free import GRPO, RLOO
from realhf.algorithms.preferences import DPO, KTO, PairwiseRewardModel
from realhf.algorithms.sft import SFT
from realhf.cli.imported import Code, Imported
from realhf.errors import UserError
from realhf.experiment import Experiment

KINDS: dict[str, type[Experiment]] = {
    "grpo": GRPO, "rloo": RLOO, "dpo": DPO, "sft": SFT, "kto": KTO, "reward": PairwiseRewardModel}
"""TRL's trainer, as on its command line -> our algorithm."""
_LEARNING_RATES = {
    "grpo": 1e-6, "rloo": 1e-6, "dpo": 1e-6, "sft": 2e-5, "kto": 1e-6, "reward": 1e-4}
_SHARED = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
    "max_steps": -1, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "seed": 42,
    "logging_steps": 10, "save_strategy": "steps", "save_steps": 500, "eval_strategy": "no",
    "eval_on_start": False, "fp16": False, "dtype": "float32", "max_length": 1024}
"""Defaults of the settings that are read here, for all trainers."""
_ON_POLICY = {
    "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "repetition_penalty": 1.0, "num_iterations": 1, "epsilon": 0.2, "beta": 0.0,
    "mask_truncated_completions": False}
_OF_TRAINER: dict[str, dict[str, Any]] = {
    "grpo": _ON_POLICY | {
        "loss_type": "dapo", "scale_rewards": "group", "importance_sampling_level": "token",
        "use_bias_correction_kl": True},
    "rloo": _ON_POLICY | {"num_generations": 2, "beta": 0.05, "normalize_advantages": False},
    "dpo": {"beta": 0.1, "loss_type": ["sigmoid"], "label_smoothing": 0.0},
    "sft": {"assistant_only_loss": False},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, "reward": {}}
_OF_ADAPTERS = {"lora_r": 16, "lora_alpha": 32}
_AVERAGES = {
    "grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant", "luspo": "constant"}
_NO_VLLM = "realhf has its own generation engine, and a plan says on which ranks it runs"
_SHIPPED = {
    name: name for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")} | {
    "get_soft_overlong_punishment":
        "get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)"}
"""Names of rewards on TRL's command line -> expressions with what trl.rewards has."""
_FILES = ("json", "csv", "parquet", "arrow", "text")
"""Builders of the library `datasets` that read files."""


def defaults_of(trainer: str) -> dict[str, Any]:
    """Return TRL's defaults of the settings that are read here."""
    return {**_SHARED, "learning_rate": _LEARNING_RATES[trainer], **_OF_TRAINER[trainer]}


def imported_from_trl(trainer: str, given: Mapping[str, Any], *, devices: int = 1) -> Imported:
    """Return the experiment that trains as TRL's trainer does with these settings on so many devices.

    The settings are those of TRL's command line: fields of the trainer's config, the model and the data.
    Raises UserError if they cannot be combined.
    """
    if trainer not in KINDS:
        raise UserError(f"TRL's trainer {trainer!r} has no counterpart here: legal are {', '.join(KINDS)}")
    run = Imported(given, defaults_of(trainer))
    run.kind = KINDS[trainer]
    actor = "reward" if trainer == "reward" else "actor"
    _model(run, actor)
    per_step = _batches(run, trainer, devices)
    _optimizer(run, actor)
    _schedule(run, per_step)
    _data(run, trainer)
    if trainer in ("grpo", "rloo"):
        _sampling(run)
        _rewards(run)
        (_grpo_loss if trainer == "grpo" else _rloo_loss)(run)
    elif trainer == "dpo":
        _dpo_loss(run)
    elif trainer == "kto":
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            run.carry(f"loss.{name}", float(run[name]), name)
        if run.has("loss_type") and run["loss_type"] != "kto":
            run.leave("KTO here has the loss of its paper alone", "loss_type")
    elif trainer == "reward" and run.has("center_rewards_coefficient"):
        run.carry("loss.center_coef", run["center_rewards_coefficient"], "center_rewards_coefficient")
    _rest(run)
    return run


def _model(run: Imported, actor: str) -> None:
    model = run["model_name_or_path"]
    if model is None:
        raise UserError("model_name_or_path is missing: TRL's settings must name the model")
    revision = run["model_revision"] if run.has("model_revision") else None
    named = model if revision in (None, "main") else f"{model}@{revision}"
    run.carry(f"{actor}.model", named, "model_name_or_path", "model_revision")
    if actor == "reward":
        run.values["reward.head"] = "score"
    run.values[f"{actor}.optimizer.max_grad_norm"] = run["max_grad_norm"]
    is_half = not run["fp16"] if run["bf16"] is None else bool(run["bf16"])
    dtype = "bfloat16" if is_half else None if run["dtype"] == "auto" else run["dtype"]
    note = "weights in bfloat16 and a float32 copy in the optimizer, where TRL has autocast"
    run.carry(f"{actor}.dtype", dtype, "dtype", "bf16", note=note if is_half else "")
    run.leave("float16 needs loss scaling, which is not here", "fp16")
    uses_adapters = run["use_peft"] or run.has("lora_r")
    if not uses_adapters:
        return
    for theirs, ours in (("lora_r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        value: Any = run[theirs] if run.has(theirs) else _OF_ADAPTERS.get(theirs)
        value = float(value) if ours == "alpha" else value
        run.carry(f"{actor}.lora.{ours}", value, theirs)
    run.values[f"{actor}.lora.rank"] = int(run.values[f"{actor}.lora.rank"])
    targets = run["lora_target_modules"]
    if targets is None:
        run.values[f"{actor}.lora.target_modules"] = ("q_proj", "v_proj")
        run.explain(
            "adapters of q_proj and v_proj, which peft chooses for Llama and Qwen", "use_peft", "lora_r")
    else:
        listed = [targets] if isinstance(targets, str) else targets
        modules = "all-linear" if list(listed) == ["all-linear"] else tuple(listed)
        run.carry(f"{actor}.lora.target_modules", modules, "lora_target_modules")
    run.explain("Role(lora=LoraConfig(...))", "use_peft")
    if run.has("lora_dropout"):
        run.leave("adapters have no dropout here", "lora_dropout")
    else:
        run.note("lora_dropout: adapters have no dropout here, where TRL's default is 0.05")


def _batches(run: Imported, trainer: str, devices: int) -> int:
    """Carry over batch sizes; return the optimizer steps in one step of ours."""
    per_update = run["per_device_train_batch_size"] * devices * run["gradient_accumulation_steps"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    on = f"on {devices} device{'s' * (devices != 1)}"
    if trainer not in ("grpo", "rloo"):
        rows = "pairs" if trainer in ("dpo", "reward") else "rows"
        run.carry("batch_size", per_update, *names, note=f"{rows} of a step {on}, whatever the devices here")
        return 1
    group = run["num_generations"]
    micro = run["per_device_train_batch_size"] * devices
    samples = run["generation_batch_size"]
    if samples is None:
        samples = micro * (run["steps_per_generation"] or run["gradient_accumulation_steps"])
    if samples % group or samples % per_update:
        raise UserError(
            f"TRL generates {samples} samples at once {on}, and trains on {per_update}: the first must be a "
            f"multiple of the second and of num_generations, {group}")
    run.carry("group_size", group, "num_generations")
    run.carry(
        "batch_size", samples // group, *names, "generation_batch_size",
        note=f"prompts of a step: {samples} samples are generated at once {on}, {group} of each prompt")
    num_updates = samples // per_update
    note = f"{samples} samples, of which {per_update} make an optimizer step"
    if num_updates > samples // group:
        note += f" in TRL; here it has whole prompts, {group} samples at least"
        num_updates = samples // group
    run.carry("minibatches", num_updates, "steps_per_generation", *names, note=note)
    run.carry("epochs", run["num_iterations"], "num_iterations")
    return (samples // per_update) * run["num_iterations"]


def _optimizer(run: Imported, actor: str) -> None:
    prefix = f"{actor}.optimizer"
    run.carry(f"{prefix}.lr", float(run["learning_rate"]), "learning_rate")
    run.carry(f"{prefix}.betas", (run["adam_beta1"], run["adam_beta2"]), "adam_beta1", "adam_beta2")
    run.carry(f"{prefix}.eps", run["adam_epsilon"], "adam_epsilon")
    run.carry(f"{prefix}.weight_decay", float(run["weight_decay"]), "weight_decay")
    run.carry(f"{prefix}.max_grad_norm", float(run["max_grad_norm"]), "max_grad_norm")
    schedule = str(run["lr_scheduler_type"])
    ours = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(schedule, schedule)
    if ours not in ("constant", "linear", "cosine"):
        run.leave("here are constant, linear and cosine; the rate stays constant", "lr_scheduler_type")
        ours = "constant"
    run.carry(f"{prefix}.schedule", ours, "lr_scheduler_type")
    kwargs = run["lr_scheduler_kwargs"]
    if isinstance(kwargs, Mapping) and kwargs.keys() == {"min_lr_rate"} and schedule == "cosine_with_min_lr":
        run.carry(f"{prefix}.min_lr_ratio", kwargs["min_lr_rate"], "lr_scheduler_kwargs")
    elif kwargs:
        run.leave("of these, min_lr_rate of cosine_with_min_lr has a counterpart", "lr_scheduler_kwargs")
    warmup = run["warmup_ratio"] if run.has("warmup_ratio") else run["warmup_steps"]
    names = ("warmup_ratio",) if run.has("warmup_ratio") else ("warmup_steps",)
    if schedule == "constant":
        run.explain("the schedule `constant` of transformers has no warm-up", *names)
    elif 0 < warmup < 1:
        run.carry(f"{prefix}.warmup_ratio", warmup, *names)
    elif warmup:
        note = "its first optimizer step has 1/N of the rate, and in TRL none"
        run.carry(f"{prefix}.warmup_steps", int(warmup), *names, note=note)
    elif run.has(*names):
        run.carry(f"{prefix}.warmup_steps", 0, *names)
    if run.has("optim") and not str(run["optim"]).startswith("adamw_torch"):
        run.leave("the optimizer here is AdamW", "optim")
    run.explain("AdamW", "optim")


def _schedule(run: Imported, per_step: int) -> None:
    """Carry over the length of the run and what happens between steps; TRL counts optimizer steps."""
    note = "" if per_step == 1 else f"a step of ours has {per_step} optimizer steps, which TRL counts"

    def ours(count: int) -> int:
        return max(1, round(count / per_step))

    if run["max_steps"] > 0:
        run.carry("steps", -(-run["max_steps"] // per_step), "max_steps", note=note)
        run.explain("max_steps decides", "num_train_epochs")
    else:
        run.carry("dataset_epochs", float(run["num_train_epochs"]), "num_train_epochs")
        run.explain("num_train_epochs decides", "max_steps")
    run.carry("seed", run["seed"], "seed")
    run.carry("log_every", ours(run["logging_steps"]), "logging_steps", note=note)
    if run["save_strategy"] == "steps":
        run.carry("checkpoint_every", ours(run["save_steps"]), "save_steps", note=note)
        run.explain("checkpoint_every counts steps", "save_strategy")
    elif run["save_strategy"] == "no":
        run.carry("checkpoint_every", 0, "save_strategy")
    run.leave("checkpoint_every counts steps or minutes, and stays 15m", "save_strategy")
    if run.has("save_total_limit"):
        run.carry("keep_checkpoints", run["save_total_limit"], "save_total_limit")
    evaluates = str(run["eval_strategy"]) != "no"
    if str(run["eval_strategy"]) == "steps":
        every = run["eval_steps"] or run["logging_steps"]
        every = round(every * 100) if every < 1 else every
        run.carry("eval_every", ours(every), "eval_strategy", "eval_steps", note=note)
    run.explain("there is an evaluation after the last step; eval_every counts steps", "eval_strategy")
    if evaluates or run.has("eval_on_start"):
        run.carry("eval_at_start", bool(run["eval_on_start"]), "eval_on_start")
    if run["push_to_hub"] and run.has("hub_model_id"):
        run.carry("push_to_hub", run["hub_model_id"], "hub_model_id", "push_to_hub")
    if run.has("output_dir"):
        run.command += ["--out", str(run["output_dir"])]
        run.explain("--out of `realhf run`", "output_dir")
    trackers = run["report_to"]
    for name in [trackers] if isinstance(trackers, str) else trackers or []:
        if name in ("wandb", "mlflow", "trackio"):
            run.command += ["--track", name]
    run.explain("--track of `realhf run` (TensorBoard files are always written)", "report_to")
    if run["resume_from_checkpoint"]:
        run.command.append("--resume")
        run.explain("--resume of `realhf run`", "resume_from_checkpoint")


def _data(run: Imported, trainer: str) -> None:
    evaluates = str(run["eval_strategy"]) != "no"
    parts = run["datasets"] or []
    listed = [part if isinstance(part, Mapping) else {"path": part} for part in parts]
    if run.has("train_dataset"):
        for theirs, ours in (("train_dataset", "dataset"), ("eval_dataset", "eval_dataset.dataset")):
            for field, value in (run[theirs] or {}).items():
                run.carry(f"{ours}.{field}", value, theirs)
    elif len(listed) > 1:
        text = f"DatasetMixture(parts=({', '.join(map(_config, listed))}))"
        run.carry(
            "dataset", Code(text, ("DatasetMixture", "DatasetConfig")), "datasets",
            note="parts with equal shares, where TRL joins them")
        run.leave("`datasets` counts", "dataset_name", "dataset_config", "dataset_train_split")
        return
    else:
        (first,) = listed or [{}]
        path = first.get("data_files") if first.get("path") in _FILES else first.get("path")
        path = path or run["dataset_name"]
        if path is None:
            raise UserError("dataset_name is missing: TRL's settings must name the data set")
        names = ("datasets",) if listed else ("dataset_name",)
        run.carry("dataset.path", path if isinstance(path, str) else tuple(path), *names)
        name = first.get("name") or run["dataset_config"]
        run.carry("dataset.name", name, *(names if listed else ("dataset_config",)))
        run.carry("dataset.split", first.get("split") or run["dataset_train_split"], "dataset_train_split")
        if evaluates:
            test = run["dataset_test_split"] or "test"
            run.carry("eval_dataset.dataset.path", path)
            run.carry("eval_dataset.dataset.name", name)
            run.carry("eval_dataset.dataset.split", test, "dataset_test_split")
        run.leave("there is no evaluation without eval_strategy", "dataset_test_split")
    if "eval_dataset.dataset.path" in run.values and trainer in ("grpo", "rloo"):
        samples = run["num_generations_eval"] or run["num_generations"]
        run.carry("eval_dataset.samples", samples, "num_generations_eval")
    if run.has("chat_template_kwargs"):
        run.carry("dataset.chat_template_kwargs", dict(run["chat_template_kwargs"]), "chat_template_kwargs")
    if trainer == "sft":
        run.carry("dataset.text_key", run["dataset_text_field"], "dataset_text_field")
        run.carry(
            "dataset.assistant_only", bool(run["assistant_only_loss"]), "assistant_only_loss",
            note="whole conversations are learned" if not run["assistant_only_loss"] else "")
        if run["completion_only_loss"] is False:
            run.leave("prompts are never learned here", "completion_only_loss")
        run.explain("prompts are never learned here", "completion_only_loss")
        if run["packing"]:
            run.note(
                "packing=True: TRL joins rows into sequences of max_length tokens, and its batches count "
                "these; here batch_size counts rows, so a step has fewer tokens and an epoch more steps")
        run.explain("rows of a step are one batch without padding", "packing", "padding_free")
    if trainer not in ("grpo", "rloo") and run["max_length"] is not None:
        run.carry(
            "dataset.max_completion_tokens", run["max_length"], "max_length",
            note="it limits completions, where TRL limits prompt and completion together")
        run.values["dataset.completion_too_long"] = "keep_start"
    if run.has("shuffle_dataset"):
        run.carry("dataset.shuffle", bool(run["shuffle_dataset"]), "shuffle_dataset")


def _config(part: Mapping[str, Any]) -> str:
    """Return the code of one part of a mixture."""
    path = part.get("data_files") if part.get("path") in _FILES else part.get("path")
    settings = [repr(path), *(f"{key}={part[key]!r}" for key in ("name", "split") if part.get(key))]
    return f"DatasetConfig({', '.join(settings)})"


def _sampling(run: Imported) -> None:
    run.carry("sampling.max_new_tokens", run["max_completion_length"], "max_completion_length")
    for name in ("temperature", "top_p", "repetition_penalty"):
        run.carry(f"sampling.{name}", float(run[name]), name)
    run.carry("sampling.top_k", int(run["top_k"] or 0), "top_k")
    if run.has("min_p"):
        run.carry("sampling.min_p", float(run["min_p"] or 0.0), "min_p")
    more = run["generation_kwargs"]
    known = {"stop": "stop", "stop_strings": "stop", "stop_token_ids": "stop_token_ids",
             "min_new_tokens": "min_new_tokens", "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos",
             "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"}
    if isinstance(more, Mapping):
        lost = [name for name in more if name not in known]
        for name in (name for name in more if name in known):
            value = more[name]
            run.values[f"sampling.{known[name]}"] = tuple(value) if isinstance(value, list) else value
        if lost:
            run.leave(f"all but {', '.join(lost)} became fields of sampling", "generation_kwargs")
        run.explain("fields of sampling", "generation_kwargs")


def _rewards(run: Imported) -> None:
    functions = run["reward_funcs"] or []
    functions = [functions] if isinstance(functions, str | Code) else list(functions)
    weights = run["reward_weights"] or [1.0] * len(functions)
    if isinstance(weights, int | float):
        weights = [weights]
    model = run["reward_model_name_or_path"]
    if model is not None:
        functions.insert(0, model)
        weights = [1.0] * (len(functions) - len(weights)) + list(weights)
    parts: list[Code] = []
    models: list[Code] = []
    for function, weight in zip(functions, weights, strict=False):
        if isinstance(function, Code):
            code = function
        elif function in _SHIPPED:
            code = Code(_SHIPPED[function], (), (f"from trl.rewards import {function}",))
        elif "/" not in function and "." in function:
            module, _, name = function.rpartition(".")
            code = Code(name, (), (f"from {module} import {name}",))
        else:
            of_role = f"Role({function!r}, head='score')"
            text = f"ModelReward({of_role}, weight={float(weight)}, name='model{len(models)}')"
            models.append(Code(text, ("ModelReward", "Role")))
            continue
        if weight != 1:
            text = f"Reward({code.text}, weight={float(weight)})"
            code = Code(text, (*code.names, "Reward"), code.statements)
        parts.append(code)
    names = ("reward_funcs", "reward_weights", "reward_model_name_or_path")
    if parts:
        text = parts[0].text if len(parts) == 1 else f"[{', '.join(part.text for part in parts)}]"
        used = tuple(name for part in parts for name in part.names)
        statements = tuple(each for part in parts for each in part.statements)
        note = "functions of TRL's form work unchanged"
        run.carry("reward_function", Code(text, used, statements), *names, note=note)
    if models:
        text = f"({', '.join(part.text for part in models)},)"
        run.carry("reward_models", Code(text, models[0].names), *names)
    if not parts and not models:
        run.prelude.append(
            "def reward(completions, **columns):  # TRL's settings named none: write your own\n"
            "    return [0.0 for completion in completions]")
        run.values["reward_function"] = Code("reward")
        run.note("no reward_funcs: write the function `reward` below")


def _grpo_loss(run: Imported) -> None:
    beta = float(run["beta"])
    run.carry("loss.kl_coef", beta, "beta")
    if beta:
        run.carry("loss.kl_weighted", bool(run["use_bias_correction_kl"]), "use_bias_correction_kl")
    run.explain("there is no KL in the loss", "use_bias_correction_kl")
    kind = run["loss_type"]
    high = run["epsilon"] if run["epsilon_high"] is None else run["epsilon_high"]
    if kind in ("cispo", "sapo"):
        run.carry("loss.objective", kind, "loss_type")
        if kind == "cispo":
            run.values["loss.average"] = "token"
            if high < 1:
                raise UserError(f"epsilon_high is {high}: with loss_type cispo it is a cap, such as 5")
            run.carry("loss.ratio_cap", float(high), "epsilon_high")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            if run.has(name):
                run.carry(f"loss.{name}", float(run[name]), name)
        run.explain(f"not read by the objective {kind}", "epsilon", "epsilon_high")
    else:
        if kind not in _AVERAGES:
            raise UserError(
                f"loss_type {kind!r} has no counterpart here: legal are {', '.join(_AVERAGES)}, cispo and "
                "sapo; loss=f of your own can do it")
        run.carry("loss.average", _AVERAGES[kind], "loss_type")
        if kind == "luspo":
            run.values["loss.constant_length"] = 1
        run.carry("loss.clip_low", float(run["epsilon"]), "epsilon")
        run.carry("loss.clip_high", float(high), "epsilon_high", "epsilon")
        run.explain("loss.clip_low and loss.clip_high", "epsilon")
        if run.has("delta"):
            run.carry("loss.dual_clip", run["delta"], "delta")
    level = {"token": "token", "sequence": "sequence_mean"}.get(run["importance_sampling_level"])
    if level is None:
        run.leave("here are token and sequence", "importance_sampling_level")
    run.carry("loss.ratio", level, "importance_sampling_level")
    scale = {True: "group", False: "none"}.get(run["scale_rewards"], run["scale_rewards"])
    run.carry(
        "normalize", scale, "scale_rewards",
        note="the deviation of all differences, where TRL has that of all scores" if scale == "batch" else "")
    if scale != "none":
        run.values["deviation"] = "sample"
    run.carry("loss.mask_truncated", bool(run["mask_truncated_completions"]), "mask_truncated_completions")
    for name in ("entropy_coef", "top_entropy_quantile", "off_policy_mask_threshold"):
        if run.has(name):
            run.carry(f"loss.{name}", run[name], name)
    if run.has("multi_objective_aggregation") and run["multi_objective_aggregation"] == "sum_then_normalize":
        run.explain("rewards are summed first", "multi_objective_aggregation")
    run.leave("rewards are summed first here", "multi_objective_aggregation")
    _mismatch(run)


def _mismatch(run: Imported) -> None:
    """Carry over the weights by which TRL corrects what vLLM computes otherwise, if they are given."""
    mode = run["vllm_importance_sampling_mode"]
    if mode is None or run["vllm_importance_sampling_correction"] is False:
        run.explain("generation and training compute alike here", "vllm_importance_sampling_correction")
        return
    level, _, form = str(mode).partition("_")
    run.values["loss.proximal"] = "recomputed"
    run.carry("loss.importance_mode", form, "vllm_importance_sampling_mode")
    run.values["loss.importance_ratio"] = level
    cap = run["vllm_importance_sampling_clip_max"]
    run.carry("loss.importance_cap", 3.0 if cap is None else cap, "vllm_importance_sampling_clip_max")
    floor = "vllm_importance_sampling_clip_min"
    run.carry("loss.importance_floor", run[floor], floor)
    run.explain("loss.proximal and loss.importance_...", "vllm_importance_sampling_correction")


def _rloo_loss(run: Imported) -> None:
    run.values["loss.ratio"] = "sequence"
    run.carry("reward_kl.kl_coef", float(run["beta"]), "beta")
    run.carry("loss.clip_low", float(run["epsilon"]), "epsilon")
    high = run["epsilon"] if run["epsilon_high"] is None else run["epsilon_high"]
    run.carry("loss.clip_high", float(high), "epsilon_high", "epsilon")
    run.carry("normalize", "batch" if run["normalize_advantages"] else "none", "normalize_advantages")
    run.carry("loss.mask_truncated", bool(run["mask_truncated_completions"]), "mask_truncated_completions")


def _dpo_loss(run: Imported) -> None:
    run.carry("loss.beta", float(run["beta"]), "beta")
    kinds = [run["loss_type"]] if isinstance(run["loss_type"], str) else list(run["loss_type"])
    weights = run["loss_weights"] or [1.0] * len(kinds)
    main = [kind for kind in kinds if kind != "sft"]
    if len(main) != 1 or main[0] not in ("sigmoid", "hinge", "ipo"):
        raise UserError(
            f"loss_type {' + '.join(kinds)} has no counterpart here: legal are sigmoid, hinge or ipo, alone "
            "or with sft; loss=f of your own can do others")
    run.carry("loss.variant", main[0], "loss_type")
    if "sft" in kinds:
        share = weights[kinds.index("sft")] / weights[kinds.index(main[0])]
        run.carry("loss.sft_coef", float(share), "loss_weights", "loss_type")
    if main[0] == "sigmoid" or run.has("label_smoothing"):
        run.carry("loss.label_smoothing", float(run["label_smoothing"]), "label_smoothing")
    run.explain(
        "`realhf reference EXP.py -o ROWS` writes rows with them, for DPOLoss(precomputed_ref=True)",
        "precompute_ref_log_probs")


def _rest(run: Imported) -> None:
    """Say what there is in the place of settings about devices, memory and speed."""
    run.explain(
        "the option `recompute: true` of a call in the plan, which --plan auto sets where it is needed",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing")
    run.explain(_NO_VLLM, *(name for name in run.names if name.startswith("vllm_") or name == "use_vllm"))
    run.explain("rollouts.jsonl is always written; `realhf rollouts` shows it", "log_completions",
                "num_completions_to_print")
    run.explain("a plan says which ranks each call has", "deepspeed", "fsdp", "fsdp_config")
    run.explain("no code of a model's repository is run", "trust_remote_code")
    run.explain("the attention of the engine", "attn_implementation")
    run.explain("columns that nothing reads are left out", "remove_unused_columns")
