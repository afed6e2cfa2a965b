"""The side of transformers and TRL, in their own environment; sides.py describes the protocol.

bfloat16 has the meaning that it has for their users: bfloat16 weights in generation, and float32 weights
under autocast in training.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.compare.libraries import touch_libraries
from benchmarks.compare.sides import Desk, Measured, memory_bytes, rewards_of

_PAGE_SIZE = 32
_SPARE_BLOCKS = 16
_BATCH_TOKENS = 512


def load(settings: dict[str, Any], dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, dtype))


def generate(desk: Desk) -> None:
    """Run `model.generate` on batches of left-padded prompts; or, with `continuous`, `generate_batch`.

    Each prompt is continued `group` times, with `rows` samples at once.
    """
    settings = desk.settings
    base = memory_bytes("VmRSS")
    model = load(settings, settings["dtype"]).eval()
    prompts = json.loads(Path(settings["data"]).read_text())
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=settings["group"],
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id,
    )
    if not settings.get("ends", True):
        model.generation_config.eos_token_id = config.eos_token_id = model.config.vocab_size
    share = settings["rows"] // settings["group"]
    batches = [prompts[start : start + share] for start in range(0, len(prompts), share)]
    run = padded
    if settings["continuous"]:
        run = partial(_continuous, rows=settings["rows"])
        batches = [prompts]
    desk.answer(base_bytes=base)
    for number, request in enumerate(desk.requests()):
        config.max_new_tokens = request["max_new_tokens"]
        torch.manual_seed(number)
        with Measured() as measured, torch.no_grad():
            tokens = sum(run(model, batch, config) for batch in batches)
        desk.answer(tokens=tokens, **measured.cost)


def padded(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig) -> int:
    """Generate, and return the number of response tokens, with end tokens and without padding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[config.pad_token_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    ids, mask = ids.to(model.device), mask.to(model.device)
    generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, longest:]
    ended = (generated == config.eos_token_id).long()
    return int((ended.cumsum(1) - ended == 0).sum())


def _continuous(
    model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig, *, rows: int
) -> int:
    # By default the cache takes most of the machine's memory, and the attention mask grows with it.
    longest = max(map(len, prompts)) + config.max_new_tokens
    num_blocks = rows * -(-longest // _PAGE_SIZE) + _SPARE_BLOCKS
    batching = ContinuousBatchingConfig(
        page_size=_PAGE_SIZE, num_blocks=num_blocks, max_batch_tokens=_BATCH_TOKENS)
    outputs = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching)
    assert len(outputs) == len(prompts) * config.num_return_sequences, "not every prompt was answered"
    return sum(len(output.generated_tokens) for output in outputs.values())


class Pace(TrainerCallback):
    """A callback that lets the trainer make a step on each request, and answers with its cost and `more`."""

    def __init__(self, desk: Desk, more: Callable[[], dict[str, Any]] = dict) -> None:
        self._desk = desk
        self._requests = desk.requests()
        self._more = more
        self._log: dict[str, float] = {}
        self._open = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._asked()
        self._measured = Measured().__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._measured.__exit__(None, None, None)
        self._open = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if self._open:  # The step's log line, which the trainer writes after it.
            self._open = False
            told = {name: logs[name] for name in ("loss", "grad_norm")}
            self._desk.answer(**told, **self._more(), **self._measured.cost)

    def _asked(self) -> None:
        if next(self._requests, None) is None:
            raise SystemExit  # The benchmark has ended.


def train(desk: Desk) -> None:
    """Run Trainer's loop over padded micro-batches; every step has the same sequences."""
    settings = desk.settings
    base = memory_bytes("VmRSS")
    rows = json.loads(Path(settings["data"]).read_text())
    model = load(settings, "float32")
    with tempfile.TemporaryDirectory() as out:
        more = {"train_sampling_strategy": "sequential"}
        trainer = Trainer(
            model=model, train_dataset=rows * settings["steps"], data_collator=padded_rows,
            args=_arguments(TrainingArguments, settings, len(rows), out, **more), callbacks=[Pace(desk)],
        )
        desk.answer(base_bytes=base)
        trainer.train()


def padded_rows(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    batch = {
        "input_ids": [row + [0] * (longest - len(row)) for row in rows],
        "attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in rows],
        "labels": [row + [-100] * (longest - len(row)) for row in rows],
    }
    return {name: torch.tensor(values) for name, values in batch.items()}


def _arguments(kind: Any, settings: dict[str, Any], num_rows: int, out: str, **more: Any) -> Any:
    """Return arguments for an optimizer step over `num_rows` sequences in the settings' micro-batches."""
    optimizer = settings["optimizer"]
    micro_batch = settings["micro_batch"]
    assert num_rows % micro_batch == 0, f"{num_rows} rows are no multiple of {micro_batch}"
    return kind(
        output_dir=out, use_cpu=True, bf16=settings["dtype"] == "bfloat16", max_steps=settings["steps"],
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=num_rows // micro_batch,
        optim="adamw_torch_fused", learning_rate=optimizer["lr"], weight_decay=optimizer["weight_decay"],
        adam_beta1=optimizer["betas"][0], adam_beta2=optimizer["betas"][1], max_grad_norm=1.0,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, seed=0, **more,
    )


def grpo(desk: Desk) -> None:
    """Make steps of TRL's GRPOTrainer; or, if the settings name a batch, compute the loss on it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = desk.settings
    base = memory_bytes("VmRSS")
    model = load(settings, "float32")
    lines = Path(settings["data"]).read_text().splitlines()
    functions, weights = zip(*rewards_of(settings), strict=True)
    lengths: list[float] = []

    class Told(GRPOTrainer):
        """A GRPOTrainer that also counts the tokens of the answers."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            lengths.append(float(outputs["completion_mask"].sum(1).float().mean()))
            return outputs

    with tempfile.TemporaryDirectory() as out:
        arguments = _arguments(
            GRPOConfig, settings, settings["prompts"] * settings["group"], out, reward_weights=list(weights),
            num_generations=settings["group"], max_completion_length=settings["max_new_tokens"],
            temperature=1.0, top_k=0, top_p=1.0, beta=0.0, num_iterations=1, loss_type="grpo",
            gradient_checkpointing=False, shuffle_dataset=False,
            use_transformers_continuous_batching=settings["continuous"],
        )
        trainer = Told(
            model=model, reward_funcs=list(functions), args=arguments,
            train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            callbacks=[] if "batch" in settings else [Pace(desk, lambda: {"response_length": lengths[-1]})],
        )
        desk.answer(base_bytes=base)
        if "batch" in settings:
            return _policy_loss(desk, trainer)
        trainer.train()


def _policy_loss(desk: Desk, trainer: Any) -> None:
    """Compute TRL's loss and its gradient norm on given samples."""
    rows = json.loads(Path(desk.settings["batch"]).read_text())
    before, after = (max(len(row[key]) for row in rows) for key in ("prompt", "completion"))
    inputs: dict[str, Any] = {
        "prompt_ids": [[0] * (before - len(r["prompt"])) + r["prompt"] for r in rows],
        "prompt_mask": [[0] * (before - len(r["prompt"])) + [1] * len(r["prompt"]) for r in rows],
        "completion_ids": [r["completion"] + [0] * (after - len(r["completion"])) for r in rows],
        "completion_mask": [[1] * len(r["completion"]) + [0] * (after - len(r["completion"])) for r in rows],
        "old_per_token_logps": [r["logprobs"] + [0.0] * (after - len(r["completion"])) for r in rows],
        "advantages": [r["advantage"] for r in rows],
    }
    inputs = {name: torch.tensor(values) for name, values in inputs.items()}
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    for _ in desk.requests():
        trainer.model.zero_grad()
        with trainer.compute_loss_context_manager():
            loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        desk.answer(loss=loss.item(), grad_norm=norm.item())


KINDS = {"generate": generate, "train": train, "grpo": grpo}

if __name__ == "__main__":
    at_desk = Desk()
    torch.set_num_threads(at_desk.settings["threads"])
    touch_libraries()
    at_desk.serve(KINDS[at_desk.settings["kind"]])
