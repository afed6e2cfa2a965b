"""Losses that users write: what they return is checked, and whether it adds up over parts of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from realhf.calls import LOSS_FIELDS, Loss, Output, given_loss
from realhf.data.batch import Batch
from realhf.data.order import groups_of
from realhf.errors import UserError, described, shown, user_line

_TOLERANCE = 1e-3
"""Largest relative difference between a whole and the sum of its parts that rounding may explain."""
_SMALL = 1e-5
"""A difference that is too small to matter, in a loss, a metric or a total."""

LossInputs = Mapping[str, torch.Tensor]


class OwnLoss(Loss):
    """A user's loss whose results are checked, and compared once with the sums of those of two halves.

    `key` is the column of the packed sequences. `warn` gets one sentence about each fault that does not end
    the run.
    """

    def __init__(self, loss: Loss, *, key: str, warn: Callable[[str], None]) -> None:
        for name in LOSS_FIELDS:
            vars(self)[name] = getattr(loss, name)
        self._loss = loss
        self.given = loss
        self._key = key
        self._warn = warn
        given = given_loss(loss)
        function = getattr(given, "function", None)
        self._name = getattr(function, "__name__", type(given if function is None else function).__name__)
        self._is_function = function is not None
        """Whether it is a function of tokens, samples or pairs within a shipped loss."""
        self._is_tried = False

    def totals(self, batch: Batch) -> dict[str, float]:
        """Return the totals as numbers. Raises UserError if they are not numbers."""
        totals = self._called("totals", self._loss.totals, batch)
        if not isinstance(totals, Mapping):
            raise UserError(
                f"{self._name}.totals() returned {type(totals).__name__}: it must return a dict of numbers, "
                "such as {'tokens': 12.0}")
        for name, value in totals.items():
            if isinstance(value, torch.Tensor):
                raise UserError(
                    f"{self._name}.totals() returned a tensor for {name!r}: totals are plain numbers, which "
                    "ranks exchange as JSON; write float(...) or .item()")
            if not isinstance(value, int | float):
                raise UserError(
                    f"{self._name}.totals() returned {shown(value)} for {name!r}: it must be a number")
        return {str(name): float(value) for name, value in totals.items()}

    def __call__(
        self, outputs: LossInputs, batch: Batch, totals: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its metrics as tensors. Raises UserError if they are something else."""
        if not self._is_tried and (parts := _halves(batch, self.group_size)) is not None:
            self._is_tried = True
            if (trial := self._copy()) is not None:
                for sentence in trial._differences(outputs, batch, totals, parts):
                    self._warn(sentence)
        return self._checked(outputs, batch, totals)

    def summarize(self, means: Mapping[str, float], first: Mapping[str, float]) -> Mapping[str, float]:
        return self._loss.summarize(means, first)

    def _copy(self) -> OwnLoss | None:
        """Return one to try, so that a loss that counts its calls does not count these; None if it is of a
        kind that cannot be copied."""
        try:
            return OwnLoss(deepcopy(self._loss), key=self._key, warn=self._warn)
        except Exception:  # Copying calls the user's code.
            return None

    def _called(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the user's loss. Raises UserError, which names it, if the user's code fails."""
        try:
            return function(*arguments)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if user_line(error) is None:
                raise
            raise UserError(f"{self._name}.{method}() raised {described(error)}") from error

    def _checked(
        self, outputs: LossInputs, batch: Batch, totals: Mapping[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        result = self._called("__call__", self._loss, outputs, batch, totals)
        what = f"{self._name}.__call__() returned"
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(f"{what} {_kind(result)}: it must return a loss and a dict of metrics")
        value, metrics = result
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise UserError(f"{what} {_kind(value)} as loss: it must be a tensor with one number, shape ()")
        if torch.is_grad_enabled() and not value.requires_grad and self._reads_gradient(outputs):
            raise UserError(
                f"{what} a loss without a gradient, so that nothing would be learned: compute it from "
                f"outputs[{self.output!r}] without detach(), item() or no_grad()")
        if not isinstance(metrics, Mapping):
            raise UserError(f"{what} {_kind(metrics)} as metrics: they must be a dict of tensors")
        for name, metric in metrics.items():
            if not isinstance(metric, torch.Tensor) or metric.numel() != 1:
                raise UserError(
                    f"{what} {_kind(metric)} as metric {name!r}: it must be a tensor with one number, "
                    "such as loss.detach()")
        return value, dict(metrics)

    def _reads_gradient(self, outputs: LossInputs) -> bool:
        return any(output.requires_grad for output in outputs.values())

    def _differences(
        self, outputs: LossInputs, batch: Batch, totals: Mapping[str, float], parts: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return what differs between the whole and the sum of its halves, one sentence for each method."""
        sentences = []
        halves = [batch.select(indices) for indices in parts]
        whole_totals = self.totals(batch)
        part_totals = [self.totals(half) for half in halves]
        for name, value in whole_totals.items():
            values = [of_part.get(name, 0.0) for of_part in part_totals]
            if not name.endswith("/max") and _differs(value, values):
                sentences.append(
                    f"{self._name}.totals(): {name!r} is {value:g} for a batch, and {values[0]:g} and "
                    f"{values[1]:g} for its halves: totals must add up (counts do, means do not), else the "
                    "loss depends on the plan")
        whole = self._with_gradient(outputs, batch, totals)
        entries = [_entries(Output(self.output), batch, indices, self._key) for indices in parts]
        of_halves = [
            self._with_gradient(_part(outputs, chosen), half, totals)
            for chosen, half in zip(entries, halves, strict=True)]
        loss, gradient, metrics = whole
        losses = [of_half[0] for of_half in of_halves]
        gradients = torch.cat([of_half[1] for of_half in of_halves])
        expected = gradient[torch.cat(entries).to(gradient.device)]
        limit = _TOLERANCE * float(expected.abs().amax() if len(expected) else 0.0) + 1e-12
        if _differs(loss, losses) or bool(((expected - gradients).abs() > limit).any()):
            who = self._name if self._is_function else f"{self._name}.__call__()"
            mend = "so divide by `totals` and not by what is in the part (mean, mask.sum())"
            if self._is_function:
                mend = "so each number that it returns must depend on its own entries alone (no mean, no sum)"
            sentences.append(
                f"{who}: the loss of a batch is {loss:g}, and those of its halves are {losses[0]:g} and "
                f"{losses[1]:g}, or their gradients are not those of the whole: parts must add up, {mend}, "
                "else loss and gradient depend on micro-batches and on the plan")
        for name, value in metrics.items():
            values = [of_half[2].get(name, 0.0) for of_half in of_halves]
            is_sum = not name.endswith("/max")
            if is_sum and not sentences and _differs(value, values):
                sentences.append(
                    f"{self._name}.__call__(): metric {name!r} is {value:g} for a batch, and {values[0]:g} "
                    f"and {values[1]:g} for its halves: parts must add up (divide by `totals`), or the name "
                    "must end in /max")
        return sentences

    def _with_gradient(
        self, outputs: LossInputs, batch: Batch, totals: Mapping[str, float]
    ) -> tuple[float, torch.Tensor, dict[str, float]]:
        """Return the loss, its gradient with respect to the main output, and the metrics."""
        with torch.enable_grad():
            leaves = {
                name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in outputs.items()}
            value, metrics = self._checked(leaves, batch, totals)
            main = leaves[self.output]
            gradient = torch.autograd.grad(value, main, allow_unused=True)[0] if value.requires_grad else None
        gradient = torch.zeros_like(main) if gradient is None else gradient
        numbers = {name: float(metric.detach()) for name, metric in metrics.items()}
        return float(value.detach()), gradient, numbers


def _kind(value: Any) -> str:
    """Return what a value is, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {shown(value)}"


def _differs(whole: float, parts: Sequence[float]) -> bool:
    scale = max(abs(whole), *map(abs, parts))
    return not abs(whole - sum(parts)) <= _TOLERANCE * scale + _SMALL


def _halves(batch: Batch, group_size: int) -> list[list[int]] | None:
    """Return the indices of two halves of a batch, whose groups stay whole; None if it has one group."""
    groups = groups_of(batch.ids, group_size)
    if len(groups) < 2:
        return None
    middle = (len(groups) + 1) // 2
    return [[i for group in half for i in group] for half in (groups[:middle], groups[middle:])]


def _entries(output: Output, batch: Batch, indices: Sequence[int], key: str) -> torch.Tensor:
    """Return the indices of an output's entries for some samples, in their order."""
    if output.per_sequence:
        return torch.tensor(list(indices))
    tokens = torch.arange(sum(batch[key].lengths)).split(list(batch[key].lengths))
    return torch.cat([tokens[i] for i in indices])


def _part(outputs: LossInputs, entries: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return some entries of each output."""
    return {name: values[entries.to(values.device)] for name, values in outputs.items()}
