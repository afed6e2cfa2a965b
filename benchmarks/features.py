# ruff: noqa: E501
"""The features of peers beside those of realhf: each of ours with the test that holds it.

    python benchmarks/features.py                      # the table, and every test that it names exists
    python benchmarks/features.py --clones DIR         # every name of a peer is in its repository (DIR/OWNER+NAME)

A cell of a peer has the name by which its repository knows the feature (a setting, a class, a page), and is
empty if we have not found it there. The commits that were read are in PEERS.
"""

import argparse
import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).parent.parent


@dataclass(frozen=True)
class Peer:
    """A library that trains language models by reinforcement learning, at the commit that was read."""

    title: str
    repository: str
    commit: str
    pages: tuple[str, ...]
    """Documentation from which the names are."""

    @property
    def clone(self) -> str:
        return self.repository.replace("/", "+")

    @property
    def url(self) -> str:
        return f"https://github.com/{self.repository}/tree/{self.commit}"


PEERS = {
    "trl": Peer("TRL 1.16", "huggingface/trl", "f2cd57710", (
        "https://huggingface.co/docs/trl/grpo_trainer", "https://huggingface.co/docs/trl/dpo_trainer",
        "https://huggingface.co/docs/trl/sft_trainer")),
    "verl": Peer("verl", "volcengine/verl", "b178a3cd5", (
        "https://verl.readthedocs.io/en/latest/examples/config.html",
        "https://github.com/volcengine/verl/blob/b178a3cd5/verl/trainer/config/_generated_ppo_trainer.yaml")),
    "openrlhf": Peer("OpenRLHF 0.10", "OpenRLHF/OpenRLHF", "3c3be623", (
        "https://github.com/OpenRLHF/OpenRLHF/blob/3c3be623/README.md",
        "https://github.com/OpenRLHF/OpenRLHF/blob/3c3be623/openrlhf/cli/train_ppo_ray.py")),
    "areal": Peer("AReaL", "inclusionAI/AReaL", "4aef98d8d", (
        "https://inclusionai.github.io/AReaL/algorithms/grpo_series.html",
        "https://github.com/inclusionAI/AReaL/blob/4aef98d8d/areal/api/cli_args.py")),
    "skyrl": Peer("SkyRL", "NovaSky-AI/SkyRL", "a9564572e", (
        "https://docs.skyrl.ai/docs/getting-started/overview",
        "https://github.com/NovaSky-AI/SkyRL/blob/a9564572e/skyrl/train/config/config.py")),
    "prime": Peer("prime-rl", "PrimeIntellect-ai/prime-rl", "559b44772", (
        "https://docs.primeintellect.ai/prime-rl/algorithms", "https://docs.primeintellect.ai/prime-rl/training")),
    "tinker": Peer("tinker-cookbook", "thinking-machines-lab/tinker-cookbook", "9dfcc3a2", (
        "https://tinker-docs.thinkingmachines.ai",
        "https://github.com/thinking-machines-lab/tinker-cookbook/blob/9dfcc3a2/README.md")),
}


@dataclass(frozen=True)
class Row:
    """A feature: the test that holds ours, or why we lack it, and the names that peers have for it."""

    feature: str
    test: str = ""
    no: str = ""
    """What we lack, and what to do instead; empty if we have the feature."""
    trl: str = ""
    verl: str = ""
    openrlhf: str = ""
    areal: str = ""
    skyrl: str = ""
    prime: str = ""
    tinker: str = ""


ROWS: dict[str, list[Row]] = {
    "Data": [
        Row("files of rows: JSONL, parquet, several, patterns",
            "data/test_rows.py::test_patterns_and_lists_of_files_are_read_in_order", trl="dataset_name",
            verl="train_files", openrlhf="data.prompt_dataset", areal="train_dataset", skyrl="train_data",
            prime="data.name", tinker="FromConversationFileBuilder"),
        Row("CSV and JSON", "data/test_memory_rows.py::test_csv_has_numbers_where_all_values_are_numbers",
            trl="load_dataset"),
        Row("data sets of the hub", "user_input/test_hub.py::test_an_experiment_that_names_model_and_data",
            trl="dataset_name", openrlhf="data.prompt_dataset", areal="train_dataset", skyrl="load_dataset",
            prime="data.name", tinker="load_dataset"),
        Row("rows in memory: lists, generators, frames, Dataset",
            "data/test_memory_rows.py::test_tables_have_their_rows_and_nulls", trl="train_dataset",
            areal="train_dataset", tinker="SupervisedDataset"),
        Row("a function over rows, which may leave some out",
            "data/test_rows.py::test_a_map_function_makes_columns_and_leaves_out_rows", trl="load_dataset",
            verl="custom_cls", tinker="map_fn"),
        Row("mixtures with shares", "data/test_mixture.py::test_parts_have_their_shares_and_their_own_orders",
            trl="DatasetMixtureConfig", openrlhf="prompt_probs", skyrl="multi_dataset", prime="ratio"),
        Row("chat templates, tools, template arguments",
            "data/test_chats.py::test_prompts_are_what_the_template_writes", trl="chat_template_kwargs",
            verl="apply_chat_template_kwargs", openrlhf="apply_chat_template", areal="apply_chat_template",
            skyrl="chat_template_kwargs", prime="renderer", tinker="renderers"),
        Row("learning the assistant's messages alone",
            "data/test_conversations.py::test_learned_tokens_are_those_of_trl", trl="assistant_only_loss",
            verl="multiturn", openrlhf="multiturn", skyrl="train_on_what", prime="loss_mask",
            tinker="TrainOnWhat"),
        Row("weights of messages", "data/test_conversations.py::test_messages_have_weights",
            tinker="trainable"),
        Row("preference pairs, also as conversations", "data/test_conversations.py::test_pairs_are_those_of_trl",
            trl="DPOTrainer", openrlhf="train_dpo", areal="hhrlhf", tinker="preference_datasets"),
        Row("limits of lengths: leave out, cut, refuse",
            "data/test_chats.py::test_prompts_beyond_their_limit", trl="truncation_mode",
            verl="filter_overlong_prompts", openrlhf="data.max_len", areal="max_length",
            skyrl="max_prompt_length", prime="seq_len", tinker="max_length"),
        Row("large files, row by row",
            "data/test_rows.py::test_rows_that_are_read_when_they_come_up_are_those_of_the_file",
            trl="streaming", tinker="StreamingSupervisedDatasetFromHFDataset"),
        Row("epochs or steps", "data/test_data.py::test_epochs_are_steps_over_the_rows_that_a_map_function_keeps",
            trl="num_train_epochs", verl="total_epochs", openrlhf="train.num_episodes",
            areal="total_train_epochs", skyrl="epochs", prime="max_steps", tinker="num_epochs"),
        Row("a curriculum by measured pass rates",
            "runtime/test_pass_rates.py::test_prompts_that_teach_most_come_first", verl="sampler",
            skyrl="urricul", prime="urricula"),
        Row("drawing rows with replacement", "data/test_data.py::test_rows_are_drawn_with_replacement"),
        Row("a resumed run goes on with the next row",
            "runtime/test_resume.py::test_rows_of_a_large_file_go_on_where_the_checkpoint_was",
            trl="resume_from_checkpoint", verl="data.pt", areal="RecoverConfig", skyrl="dataloader", prime="resume"),
        Row("images, video, audio", no="text alone", trl="log_multimodal", verl="image_key",
            openrlhf="data.image_key", areal="vlm", skyrl="vision_language_generator", prime="vlm",
            tinker="vlm_classifier"),
    ],
    "Rewards": [
        Row("Python functions over lists of samples",
            "rewards/test_scoring.py::test_arguments_are_what_trl_passes", trl="reward_funcs",
            verl="custom_reward_function", openrlhf="reward.remote_url", areal="reward_fn",
            skyrl="BaseTextEnv", prime="verifiers", tinker="ProblemEnv"),
        Row("several with weights, each logged",
            "rewards/test_several.py::test_the_score_is_the_weighted_sum_of_the_rewards_that_apply",
            trl="reward_weights", prime="verifiers"),
        Row("async functions, calls at the same time",
            "rewards/test_pool.py::test_calls_wait_at_the_same_time", trl="reward_funcs",
            verl="launch_reward_fn_async", areal="AsyncRewardWrapper", prime="verifiers", tinker="async def"),
        Row("time limits, retries, samples that fail are left out",
            "rewards/test_limits.py::test_failed_samples_are_dropped", areal="timeout", prime="errored",
            tinker="rollout_limits"),
        Row("reward models as roles of the graph",
            "algorithms/test_reward_models.py::test_weighted_sums_of_functions_and_models",
            trl="reward_model_name_or_path", verl="reward_model", openrlhf="reward.model_name_or_path",
            tinker="preference_envs"),
        Row("several reward models, beside functions", "algorithms/test_reward_models.py::test_a_run_with_all_kinds",
            trl="reward_funcs"),
        Row("process reward models", "algorithms/test_reward_models.py::test_steps_end_with_their_text_and_with_the_response",
            verl="prime"),
        Row("generative reward models", "algorithms/test_reward_models.py::test_questions_and_replies_of_a_judge",
            verl="genrm", skyrl="llm_as_a_judge", prime="rubric", tinker="rubric"),
        Row("judges over HTTP", "rewards/test_remote_judge.py::test_samples_are_posted_and_scores_are_read",
            openrlhf="reward.remote_url", skyrl="llm_as_a_judge", tinker="rubric"),
        Row("mathematical answers", "rewards/test_math_answer.py::test_scores_are_those_of_the_library",
            trl="accuracy_reward", verl="math_verify", openrlhf="math_reward_func", areal="math_verify",
            skyrl="gsm8k", prime="verifiers", tinker="math_grading"),
        Row("code in a sandbox of its own",
            "rewards/test_sandbox.py::test_hostile_code_gets_no_reward_and_has_a_reason",
            verl="sandbox_fusion", areal="sandbox", skyrl="sandbox", prime="sandbox", tinker="sandbox"),
        Row("length: overlong penalty, cosine", "rewards/test_shaping.py::test_the_soft_overlong_penalty_is_that_of_trl",
            trl="get_soft_overlong_punishment", verl="overlong_buffer", openrlhf="overlong_penalty_factor",
            areal="overlong_penalty_factor", skyrl="overlong", prime="length_penalty"),
        Row("rewards of single tokens", "rewards/test_shaping.py::test_returns_of_several_token_rewards_are_the_double_sum",
            verl="token_level_rewards", openrlhf="token_level", skyrl="token_level_rewards"),
        Row("rewards per turn, and their credit", "environments/test_credit.py::test_the_expected_gradient_is_the_exact_one",
            areal="turn_discount", skyrl="step_wise_trajectories", tinker="Transition"),
    ],
    "Losses": [
        Row("PPO with a critic", "algorithms/test_advantages.py::test_generalized_advantages_are_the_sum_of_their_definition",
            trl="ppo_trainer", verl="gae", openrlhf="critic.value_clip", areal="PPOCriticConfig",
            skyrl="CriticConfig"),
        Row("GRPO, Dr. GRPO", "algorithms/test_policy_against_trl.py::test_losses_of_grpo_equal_trl",
            trl="dr_grpo", verl="norm_adv_by_std_in_grpo", openrlhf="dr_grpo", areal="drgrpo",
            skyrl="grpo_norm_by_std", prime="grpo", tinker="remove_constant_reward_groups"),
        Row("RLOO", "algorithms/test_policy_against_trl.py::test_the_loss_of_rloo_equals_trl", trl="RLOOTrainer",
            verl="rloo", openrlhf="rloo", areal="rloo", skyrl="rloo"),
        Row("REINFORCE++ and its baseline",
            "algorithms/test_critic_free.py::test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch",
            verl="reinforce_plus_plus", openrlhf="reinforce_baseline", areal="reinforce", skyrl="reinforce"),
        Row("ReMax", "algorithms/test_critic_free.py::test_remax_compares_with_the_greedy_answer", verl="remax"),
        Row("DAPO: dynamic sampling, clip-higher",
            "algorithms/test_critic_free.py::test_groups_are_filtered_by_scores_before_shaping",
            trl="epsilon_high", verl="filter_groups", openrlhf="dynamic_filtering", areal="dynamic_filter_fn",
            skyrl="dynamic_sampling"),
        Row("GSPO", "algorithms/test_policy_against_trl.py::test_losses_of_grpo_equal_trl",
            trl="importance_sampling_level", verl="gspo", openrlhf="gspo", areal="importance_sampling_level",
            skyrl="gspo"),
        Row("CISPO", "algorithms/test_critic_free.py::test_cispo_is_the_papers_sum_by_prompts", trl="cispo",
            verl="cispo", skyrl="cispo", tinker="cispo"),
        Row("SAPO", "algorithms/test_policy_against_trl.py::test_losses_of_grpo_equal_trl",
            trl="sapo_temperature_pos", verl="tau_pos", areal="sapo_tau_pos", skyrl="SAPOConfig"),
        Row("dual clip", "algorithms/test_losses.py::test_policy_loss_is_the_papers_sum", trl="delta",
            verl="clip_ratio_c", openrlhf="dual_clip", areal="c_clip", skyrl="clip_ratio_c"),
        Row("KL in the loss: k1, k2, k3", "algorithms/test_critic_free.py::test_gradients_of_the_estimates_are_what_the_docstring_says",
            trl="beta", verl="kl_loss_type", openrlhf="algo.kl.estimator", skyrl="kl_estimator_type",
            prime="kl_tau"),
        Row("KL weighted by the ratio (an unbiased gradient)",
            "algorithms/test_policy_against_trl.py::test_losses_of_grpo_equal_trl", trl="use_bias_correction_kl"),
        Row("KL in the reward, with a target",
            "algorithms/test_critic_free.py::test_an_adaptive_coefficient_follows_its_target",
            verl="target_kl", openrlhf="algo.kl.target", areal="kl_ctl", skyrl="kl_target",
            tinker="kl_penalty_coef"),
        Row("entropy bonus; top-entropy tokens",
            "algorithms/test_policy_against_trl.py::test_tokens_of_top_entropy_are_those_of_trl",
            trl="top_entropy_quantile", verl="entropy_coeff", openrlhf="entropy_coef", skyrl="use_entropy_loss"),
        Row("responses that were cut do not train",
            "algorithms/test_policy_against_trl.py::test_cut_responses_are_masked_as_in_trl",
            trl="mask_truncated_completions", areal="mask_no_eos_with_zero", skyrl="apply_overlong_filtering"),
        Row("weights and masks for mismatch of generator and trainer",
            "algorithms/test_policy_against_trl.py::test_weights_for_the_mismatch_of_generator_and_trainer_are_those_of_trl",
            trl="vllm_importance_sampling_mode", verl="rollout_correction", openrlhf="is_correction",
            areal="rejection_sampling", skyrl="off_policy_correction", prime="dppo_mask_high",
            tinker="importance_sampling"),
        Row("decoupled PPO for older weights", "algorithms/test_off_policy.py::test_the_decoupled_loss_is_the_papers_sum",
            verl="bypass_mode", areal="use_decoupled_loss"),
        Row("a loss of one's own for any algorithm (LUSPO, VESPO, M2PO, Clip-Cov)",
            "algorithms/test_own_functions.py::test_every_algorithm_takes_a_function", verl="register_policy_loss",
            skyrl="register_policy_loss", prime="LossInputs", tinker="forward_backward_custom"),
        Row("advantages of one's own", "algorithms/test_own_functions.py::test_the_hook_keeps_filters_kl_and_shaping",
            verl="register_adv_est", skyrl="register_advantage_estimator", prime="score_group"),
        Row("DPO, IPO, label smoothing, SFT term", "algorithms/test_against_trl.py::test_dpo_with_an_sft_term",
            trl="loss_weights", openrlhf="train_dpo", areal="DPOConfig", tinker="train_dpo"),
        Row("SimPO", "algorithms/test_against_trl.py::test_simpo", trl="simpo"),
        Row("ORPO", "algorithms/test_against_trl.py::test_orpo", trl="ORPOTrainer"),
        Row("KTO", "algorithms/test_against_trl.py::test_kto", trl="KTOTrainer"),
        Row("reward models, pairs and labels", "algorithms/test_against_trl.py::test_pairwise_reward_model",
            trl="RewardTrainer", openrlhf="train_rm", areal="RWConfig", tinker="preference"),
        Row("SFT", "algorithms/test_losses.py::test_sft_loss_is_the_cross_entropy_of_transformers",
            trl="SFTTrainer", verl="sft_trainer", openrlhf="train_sft", areal="SFTConfig", skyrl="sft_config",
            prime="sft", tinker="supervised"),
        Row("distillation from one or several teachers",
            "algorithms/test_distillation.py::test_a_column_names_the_teacher_of_each_row",
            trl="distillation_trainer", verl="distill", areal="TeacherConfig", skyrl="distill", prime="opd",
            tinker="train_on_policy"),
        Row("log-probs of the reference, computed once",
            "cli/test_reference.py::test_training_on_the_rows_is_training_with_the_reference",
            trl="precompute_ref_log_probs"),
        Row("a reference that follows the actor",
            "runtime/test_actions.py::test_a_follower_is_the_moving_average_of_its_leader",
            trl="sync_ref_model", skyrl="update_ref_every_epoch", openrlhf="enable_ema"),
        Row("load balancing of experts", "nn/test_moe.py::test_balance_loss_is_that_of_transformers_on_one_sequence_and_layer",
            trl="router_aux_loss_coef", verl="aux_loss", openrlhf="aux_loss_coef", skyrl="moe_aux_loss_coeff",
            prime="max_vio"),
        Row("LoRA", "nn/test_lora.py::test_logits_and_gradients_are_those_of_peft", trl="lora_r",
            verl="lora_rank", openrlhf="lora.rank", areal="lora_rank", skyrl="SkyRLLoraConfig", prime="lora",
            tinker="lora_rank"),
    ],
    "Evaluation": [
        Row("several sets by name", "runtime/test_evaluations.py::test_every_answer_of_every_evaluation_is_kept",
            trl="eval_dataset", verl="val_files", openrlhf="eval.dataset", areal="valid_dataset",
            skyrl="val_data", prime="eval.source", tinker="evaluators"),
        Row("pass@k, majority@k, best@k",
            "evaluation/test_metrics.py::test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample",
            verl="maj@", openrlhf="pass@", skyrl="pass@", prime="pass@", areal="pass@", tinker="pass@"),
        Row("sampling of its own", "evaluation/test_sets.py::test_how_answers_are_drawn",
            trl="num_generations_eval", verl="val_kwargs", openrlhf="eval.temperature", areal="eval_gconfig",
            skyrl="eval_sampling_params", prime="sampling", tinker="temperature"),
        Row("every answer is kept", "runtime/test_evaluations.py::test_metrics_are_those_of_the_answers",
            trl="log_completions", verl="validation_data_dir", areal="dump_to_file", skyrl="dump_eval_results",
            tinker="rollout_logging"),
        Row("beside training, on ranks of its own",
            "runtime/test_evaluations.py::test_an_evaluation_runs_beside_training_on_ranks_of_its_own",
            openrlhf="async_enable", prime="orchestrator.eval"),
        Row("the best model by a metric", "runtime/test_hooks.py::test_the_best_model_is_uploaded",
            trl="callbacks", openrlhf="best_metric_key"),
        Row("early stopping", "runtime/test_hooks.py::test_early_stopping_counts_evaluations", trl="callbacks"),
        Row("loss and perplexity of held-out rows",
            "runtime/test_evaluations.py::test_held_out_losses_of_several_sets", trl="eval_strategy",
            verl="test_freq", openrlhf="eval.dataset", areal="eval_before_train", skyrl="eval_interval",
            prime="val.interval", tinker="NLLEvaluator"),
        Row("a command for any model", "cli/test_eval.py::test_two_processes_give_the_same_answers",
            verl="val_only", areal="eval.md", tinker="run_inspect_evals"),
    ],
    "Python": [
        Row("train from a script or a notebook, with progress in place",
            "test_notebook.py::test_the_notebook_is_interrupted_and_continued", trl="GRPOTrainer",
            areal="PPOTrainer", tinker="TrainingClient"),
        Row("the same run goes on from the command line",
            "test_python.py::test_a_run_is_started_interrupted_and_continued"),
        Row("hooks on steps, evaluations, checkpoints",
            "runtime/test_hooks.py::test_what_a_hook_sets_holds_from_the_next_step_on", trl="callbacks",
            skyrl="callback"),
        Row("metrics and samples as frames, curves",
            "test_python.py::test_a_run_is_started_interrupted_and_continued", tinker="metrics.jsonl"),
        Row("a model of transformers comes out", "test_export.py::test_transformers_generates_the_same",
            trl="save_model", verl="model_merger", openrlhf="ckpt.save_hf", areal="save_hf",
            skyrl="hf_save_interval", prime="weights", tinker="build_hf_model"),
        Row("a step of one's own in Python", "test_step_program.py::test_the_trial_returns_the_operations_of_a_run",
            skyrl="BasePPOExp", tinker="rl_loop"),
        Row("wandb, mlflow, trackio, TensorBoard", "runtime/test_trackers.py::test_wandb_has_every_metric_under_its_name",
            trl="report_to", verl="logger", openrlhf="logger.wandb", areal="stats_logger", skyrl="logger",
            prime="wandb", tinker="wandb"),
        Row("uploads to the hub", "runtime/test_hooks.py::test_the_best_model_is_uploaded", trl="push_to_hub"),
        Row("merging adapters and averaging models", "cli/test_merge.py::test_models_are_averaged",
            trl="merge_model_callback", verl="model_merger", openrlhf="lora_combiner", tinker="merge"),
        Row("a check of data, rewards and settings before the run",
            "cli/test_dry_run.py::test_a_reward_function_that_fails_is_found", prime="dry-run"),
        Row("import of TRL's and verl's settings", "cli/test_import.py::test_settings_of_verl"),
    ],
    "Distributed": [
        Row("data, tensor, pipeline, context and expert parallelism, in any mix",
            "nn/test_layouts.py::test_logits_and_gradients_are_those_of_one_process", trl="parallelism_config",
            verl="megatron", openrlhf="ring_attn_size", areal="allocation_mode",
            skyrl="expert_model_parallel_size", prime="expert"),
        Row("a layout for each call, weights move between them",
            "realloc/test_execute.py::test_every_rank_gets_its_regions", verl="placement", areal="allocation_mode",
            skyrl="placement"),
        Row("a planner of layouts with a proven gap",
            "planner/test_search.py::test_search_finds_the_best_of_all_plans"),
        Row("results do not depend on the plan",
            "runtime/test_invariance.py::test_plan_does_not_change_results"),
        Row("generation ahead of training, with a bound on the lag",
            "runtime/test_lag.py::test_every_prompt_is_trained_once_at_the_ages_of_the_lag",
            trl="async_grpo_trainer", verl="fully_async", openrlhf="async_queue_size",
            areal="max_head_offpolicyness", skyrl="max_staleness_steps", prime="max_off_policy_steps",
            tinker="StreamMinibatchConfig"),
        Row("weights change in the middle of a response",
            "inference/test_rounds.py::test_weights_change_on_every_layout", verl="partial_rollout",
            areal="pause_grace_period", skyrl="in-flight", prime="in-flight"),
        Row("a killed run goes on bit for bit", "runtime/test_resume.py::test_every_checkpoint_continues_bit_for_bit",
            trl="resume_from_checkpoint", verl="resume_mode", openrlhf="ckpt.load_enable",
            areal="RecoverConfig", skyrl="resume_mode", prime="resume", tinker="load_state"),
        Row("fewer hosts after a loss", "test_elastic.py::test_a_lost_host"),
        Row("several hosts", "test_torchrun.py::test_two_hosts_give_the_metrics_of_four_local_processes",
            trl="accelerate", verl="nnodes", openrlhf="actor.num_nodes", areal="n_nodes", skyrl="num_nodes",
            prime="multi_node"),
        Row("Megatron-Core trains", "megatron/test_curves.py::test_curve_is_that_of_the_native_engine",
            verl="megatron", areal="MegatronEngineConfig", skyrl="MegatronConfig"),
        Row("vLLM or SGLang generate", no="an engine of its own, under every layout", trl="use_vllm",
            verl="vllm", openrlhf="vllm.num_engines", areal="SGLangConfig", skyrl="vllm", prime="vllm"),
        Row("FP8 or quantized generation", "runtime/test_int8.py::test_a_plan_does_not_change_results", verl="fp8",
            areal="fp8", skyrl="quantized_rollouts", prime="fp8"),
        Row("optimizers beside AdamW", no="AdamW", trl="deepspeed", openrlhf="muon", areal="sgd",
            prime="muon"),
    ],
    "Environments": [
        Row("classes that answer in turns", "environments/test_training.py::test_an_experiment_trains_and_evaluates_with_its_environment",
            trl="environment_factory", verl="interaction_config_path", openrlhf="agent_func_path",
            areal="RolloutWorkflow", skyrl="BaseTextEnv", prime="verifiers", tinker="MessageEnv"),
        Row("tools as functions", "environments/test_training.py::test_an_experiment_may_have_tools_alone",
            trl="max_tool_calling_iterations", verl="tool_config_path", areal="tir", skyrl="tools_guide",
            prime="tool", tinker="tool_use"),
        Row("tokens are those that were sampled, never written again",
            "environments/test_generation.py::test_turns_are_those_of_each_transcript_alone",
            verl="tokenization_sanity_check_mode", openrlhf="Token-in-Token-out", areal="check_trajectory_format",
            skyrl="use_conversation_multi_turn", prime="Extension Property", tinker="has_extension_property"),
        Row("an environment that fails or hangs ends its own rollout",
            "environments/test_workers.py::test_every_failure_ends_its_rollout_with_its_reason_and_no_other",
            prime="errored", tinker="rollout_limits"),
        Row("Gymnasium, TextArena, OpenEnv, reasoning-gym, SkyRL-Gym",
            "environments/test_adapters.py::test_textarena_says_what_is_new_and_gives_its_reward", trl="openenv",
            skyrl="openenv", prime="verifiers", tinker="extarena"),
        Row("a rollout goes on after a kill",
            "environments/test_training.py::test_a_lag_of_two_goes_on_after_a_kill_in_the_middle_of_rollouts"),
        Row("a sandboxed Python tool", "environments/test_tool_calls.py::test_python_runs_in_the_sandbox_and_its_errors_are_read",
            verl="sandbox_fusion", areal="tir", skyrl="sandbox", prime="sandbox", tinker="sandbox"),
        Row("agents that speak to an OpenAI endpoint", no="environments are Python classes or functions",
            verl="agent_loop", openrlhf="openai_server", areal="openai", skyrl="agent-integration",
            prime="verifiers"),
        Row("several agents, self-play", no="one model answers", prime="self-play", tinker="multiplayer_rl"),
    ],
}
"""Group -> its features."""
COMPLETE = ("Data", "Rewards", "Losses", "Evaluation", "Python")
"""Groups in which we lack nothing that a peer has but what is in ACCEPTED."""
ACCEPTED = ("images, video, audio",)


@cache
def tests_of(path: Path) -> frozenset[str]:
    """Return the names of the test functions of a file."""
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def faults() -> list[str]:
    """Return a sentence for each test that does not exist, and for each gap in a complete group."""
    found = []
    for group, rows in ROWS.items():
        for row in rows:
            file, _, name = row.test.partition("::")
            path = REPO / "tests" / file
            if bool(row.test) == bool(row.no):
                found.append(f"{group}, {row.feature}: give a test, or say what we lack")
            elif row.test and (not path.is_file() or name not in tests_of(path)):
                found.append(f"{group}, {row.feature}: there is no test {row.test}")
            if row.no and group in COMPLETE and row.feature not in ACCEPTED:
                found.append(f"{group}, {row.feature}: {row.no}")
    return found


def missing_names(clones: Path) -> list[str]:
    """Return the names of peers that are not in the clones of their repositories."""
    missing = []
    for key, peer in PEERS.items():
        words = {getattr(row, key) for rows in ROWS.values() for row in rows} - {""}
        git = ["git", "-C", str(next(clones.glob(f"{peer.clone}*/repo"), clones / peer.clone))]
        files = subprocess.run([*git, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True).stdout
        for word in sorted(words):
            grep = subprocess.run([*git, "grep", "-qIF", word, "HEAD"], capture_output=True)
            if grep.returncode and word not in files:
                missing.append(f"{peer.title}: {word}")
    return missing


def table() -> str:
    """Return the table in Markdown."""
    lines = []
    for group, rows in ROWS.items():
        lines += ["", f"### {group}", "", f"| | realhf | {' | '.join(p.title for p in PEERS.values())} |"]
        lines.append(f"|---|---|{'---|' * len(PEERS)}")
        for row in rows:
            ours = f"[yes](../tests/{row.test.partition('::')[0]})" if row.test else f"no: {row.no}"
            cells = [f"`{word}`" if (word := getattr(row, key)) else "" for key in PEERS]
            lines.append(f"| {row.feature} | {ours} | {' | '.join(cells)} |")
    lines += ["", "Read at: " + ", ".join(
        f"[{peer.title}]({peer.url}) ({', '.join(f'[{i}]({page})' for i, page in enumerate(peer.pages, start=1))})"
        for peer in PEERS.values()) + "."]
    return "\n".join(lines).strip()


def main() -> int:
    """Print the table, or what is wrong with it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clones", type=Path, help="folder with clones of the peers' repositories")
    options = parser.parse_args()
    wrong = faults() + (missing_names(options.clones) if options.clones else [])
    print(table())
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
