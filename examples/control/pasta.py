"""PASTA (Boige et al. 2023): a transformer of states and actions is pretrained by prediction, then asked.

A token is one component of a state or an action, or a whole state or action ("modality"). C-GPT predicts the
next token, C-BERT hidden ones. Without further training both predict actions, next states, and the actions
between states. With adapters of under 10,000 parameters they imitate the best trajectories.

    realhf run examples/control/pasta.py --task hopper --tokens component --objective bert
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from networks import mlp, num_parameters, widest
from offline_rows import STEPS, window_rows
from token_model import Adapter, Pasta, asked_of, drawn_mask, masked_error, predict, squared
from torch import Tensor, nn

import realhf as r

QUESTIONS = ("action", "forward", "inverse")
PROBED = tuple(question + against for question in QUESTIONS for against in ("", "_copy", "_mean"))
FAILING = {"sound": 0, "fourth": 4, "half": 2}
"""Names of the failures, and every how many sensors there is one that fails; 0: none."""
FAILURES = tuple(f"{who}_{name}" for name in FAILING for who in ("adapter", "perceptron"))
ACTIONS = {"pendulum": 1, "reacher": 2, "hopper": 3, "swimmer": 2, "hopper_small": 3}
"""Components of the actions of each task."""


def pretrain_loss(model: Pasta, batch: r.Batch) -> Tensor:
    values = batch["window"]
    if model.causal:
        none = torch.zeros_like(values, dtype=torch.bool)
        return masked_error(model(values, none), values, ~none)
    hidden = drawn_mask(batch["noise"], values, model.states)
    return masked_error(model(values, hidden), values, hidden)


def imitation_loss(adapter: Adapter, batch: r.Batch, model: Pasta) -> Tensor:
    values = batch["best_window"]
    asked = asked_of("action", values, model.states)
    return masked_error(adapter(model)(values, asked), values, asked)


def inputs_of(values: Tensor, states: int) -> Tensor:
    """Return all that a multi-layer perceptron sees: the window but for its last action."""
    return values.flatten(1)[:, : (values.shape[1] - 1) * values.shape[2] + states]


def clone_loss(perceptron: nn.Module, batch: r.Batch, *, states: int) -> Tensor:
    values = batch["best_window"]
    return ((perceptron(inputs_of(values, states)) - values[:, -1, states:]) ** 2).mean(dim=1)


def broken(values: Tensor, states: int, share: int) -> Tensor:
    """Return which components fail: every `share`-th of the states'; 0: none."""
    component = torch.arange(values.shape[2], device=values.device)
    return ((component % max(1, share) == 0) & (component < states) & (share > 0)).expand_as(values)


def probe(model: Pasta, batch: r.Batch) -> dict[str, Tensor]:
    """Return the errors of the model's answers, and those of the step before and of the mean, 0."""
    values = batch["window"]
    errors = {}
    for question in QUESTIONS:
        asked = asked_of(question, values, model.states)
        errors[question] = squared(values, predict(model, model, values, question), asked)
        errors[f"{question}_copy"] = squared(values, values.roll(1, dims=1), asked)
        errors[f"{question}_mean"] = squared(values, torch.zeros_like(values), asked)
    return errors


def probe_failures(
    adapter: Adapter, batch: r.Batch, model: Pasta, perceptron: nn.Module
) -> dict[str, Tensor]:
    """Return errors of imitated actions where no, every fourth, or every second sensor fails."""
    values = batch["window"]
    asked = asked_of("action", values, model.states)
    errors = {}
    for name, share in FAILING.items():
        failed = broken(values, model.states, share)
        predicted = predict(model, adapter(model), values, "action", failed=failed)
        errors[f"adapter_{name}"] = squared(values, predicted, asked)
        action = perceptron(inputs_of(values.masked_fill(failed, 0.0), model.states))
        errors[f"perceptron_{name}"] = ((action - values[:, -1, model.states:]) ** 2).mean(dim=1)
    return errors


def means(batch, context):
    """Return the means of errors as metrics; those of imitated actions are over the best trajectories."""
    best = batch["best"] > 0
    over = {key: batch[key] for key in PROBED} | {key: batch[key][best] for key in FAILURES}
    return {}, {key: float(column.mean()) for key, column in over.items()}


def keep_best(batch, context):
    """Drop the windows that are not from the best tenth of the trajectories."""
    return {"best_window": batch["window"], "keep": batch["best"] > 0}


@dataclass
class PASTA(r.Experiment):
    """First pretraining. Then adapters, and a perceptron of the model's size, imitate the best."""

    task: Literal["pendulum", "reacher", "hopper", "swimmer", "hopper_small"] = "hopper"
    tokens: Literal["component", "modality"] = "component"
    objective: Literal["bert", "gpt"] = "bert"
    updates: int = 20  # Optimizer steps of a step.
    adapt_steps: int = 4  # Steps at the end in which the model no longer changes.
    width: int = 96
    layers: int = 3
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dataset = r.ArrayDataset(f"runs/control/pasta-{self.task}-train.safetensors")
        self.eval_dataset = r.ArrayDataset(f"runs/control/pasta-{self.task}-test.safetensors")

    def sizes(self) -> tuple[int, int]:
        """Return the numbers of components of a state and of an action."""
        if not Path(self.dataset.path).exists():
            window_rows(self.task, "train")
            window_rows(self.task, "test")
        actions = ACTIONS[self.task]
        return self.dataset.columns()["window"][-1] - actions, actions

    def roles(self) -> dict[str, r.ModuleRole]:
        """Return roles of equal sizes: the width of feed-forward layers is chosen for that."""
        states, actions = self.sizes()
        size = {"states": states, "actions": actions, "width": self.width, "layers": self.layers}
        whole = {**size, "objective": self.objective, "tokens": "component", "hidden": 4 * self.width}
        most = num_parameters(lambda: Pasta(**whole))
        if self.tokens == "modality":
            whole["tokens"] = "modality"
            whole["hidden"] = widest(lambda hidden: Pasta(**{**whole, "hidden": hidden}), most)
        ends = {"inputs": (STEPS - 1) * (states + actions) + states, "outputs": actions}
        ends["width"] = widest(lambda width: mlp(**{**ends, "width": width}), most)
        of = partial(r.ModuleRole, dtype=self.dtype)
        rate = r.OptimizerConfig(lr=2e-3, warmup_steps=20)
        return {
            "model": of(module=Pasta, arguments=whole, optimizer=replace(
                rate, schedule="cosine", total_steps=(self.steps - self.adapt_steps) * self.updates)),
            "adapter": of(
                module=Adapter, arguments={"width": self.width, "layers": self.layers}, optimizer=rate),
            "perceptron": of(module=mlp, arguments=ends, optimizer=rate)}

    def graph(self) -> r.DataflowGraph:
        states, actions = self.sizes()
        noise = {"noise": (2 + STEPS * (states + actions),)}
        return r.DataflowGraph((
            r.FunctionCall("pretrain", role="model", inputs=("window",),
                           work=r.TrainFunction(pretrain_loss, minibatches=self.updates, noise=noise)),
            r.FunctionCall("keep_best", inputs=("window", "best"), outputs=("best_window",),
                           work=r.HostFunction(keep_best, filters=True)),
            r.FunctionCall("imitate", role="adapter", reads=("model",), inputs=("best_window",),
                           work=r.TrainFunction(imitation_loss, minibatches=self.updates)),
            r.FunctionCall("clone", role="perceptron", inputs=("best_window",), work=r.TrainFunction(
                partial(clone_loss, states=states), minibatches=self.updates)),
        ), inputs=("window", "best"))

    def eval_graph(self) -> r.DataflowGraph:
        return r.DataflowGraph((
            r.FunctionCall("probe", role="model", inputs=("window",), outputs=PROBED,
                           work=r.ForwardFunction(probe)),
            r.FunctionCall("probe_failures", role="adapter", reads=("model", "perceptron"),
                           inputs=("window",), outputs=FAILURES, work=r.ForwardFunction(probe_failures)),
            r.FunctionCall("means", inputs=("best", *PROBED, *FAILURES), work=r.HostFunction(means)),
        ), inputs=("window", "best"))

    def parts(self, graph: r.DataflowGraph) -> dict[str, tuple[str, ...]]:
        return {"pretrain": ("pretrain",), "adapt": ("keep_best", "imitate", "clone")}

    def step(self, run) -> None:
        if run.number < self.steps - self.adapt_steps:
            run("pretrain", run.prompts(self.batch_size))
        else:
            run("adapt", run.prompts(10 * self.batch_size))


experiment = PASTA(batch_size=20 * 16, steps=23)
