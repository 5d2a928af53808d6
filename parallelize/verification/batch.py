"""The batches that a model is fed: rows enough to be dealt out, and in all but the first a padding mask."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, Problem
from parallelize.model_source import ModelSource
from parallelize.verification.users import blaming

IGNORED = -100
_MANY = 24  # rows of a whole batch


@dataclass(frozen=True)
class Batch:
    inputs: dict[str, Any]
    targets: Any
    rows: int
    length: int

    def _tensors(self) -> list[torch.Tensor]:
        return [one for one in (*self.inputs.values(), self.targets) if isinstance(one, torch.Tensor) and one.ndim]

    @property
    def can_cut(self) -> bool:
        """Whether what goes in, and the targets, have the rows as their first dim."""
        fed = [one for one in self.inputs.values() if isinstance(one, torch.Tensor) and one.ndim]
        targets = [self.targets] if isinstance(self.targets, torch.Tensor) and self.targets.ndim else []
        return any(one.shape[0] == self.rows for one in fed) and all(one.shape[0] == self.rows for one in targets)

    def shapes(self) -> str:
        return ", ".join(str(list(one.shape)) for one in self._tensors()) or "no tensors"


def longest_rows(parts: int, length: int) -> int:
    """Three rows for each part where they are not many, else two; and not as many as the sequence is long."""
    rows = 3 * parts if 3 * parts <= _MANY else 2 * parts
    return rows if rows != length else 2 * parts


def draw(source: ModelSource, model: nn.Module, seed: int, rows: int, length: int, padded: bool) -> Batch:
    """One batch. Raises: ModelError `inputs-failed`, `bad-inputs`."""
    with torch.random.fork_rng(devices=[]), blaming("inputs-failed", f"the inputs of {source.text} failed"):
        torch.manual_seed(seed + 2)
        made = source.inputs(model, rows, length)
    if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
        what = f"the inputs of {source.text} are a {type(made).__name__}"
        raise ModelError(Problem("bad-inputs", what, fix="return a dict of keyword arguments of the forward"))
    inputs = dict(made)
    targets = inputs.pop("targets", None)
    if source.loss is None:
        if not isinstance(targets, torch.Tensor):
            fix = "return `targets` among the inputs, or bring a `loss`"
            raise ModelError(Problem("bad-inputs", f"{source.text} has neither targets nor a loss", fix=fix))
        targets = _some_ignored(targets)
    if padded and "inputs" not in source.given:
        inputs, targets = _padded(model, inputs, targets, rows, length)
    return Batch(inputs, targets, rows, length)


def _some_ignored(targets: torch.Tensor) -> torch.Tensor:
    """Fewer targets count in the first rows, so that a mean of means is not the mean."""
    if targets.ndim == 2 and not targets.is_floating_point():
        targets = targets.clone()
        targets[0, : targets.shape[1] // 2] = IGNORED
        targets[-1, -1] = IGNORED
    return targets


def _padded(model: nn.Module, inputs: dict, targets: Any, rows: int, length: int) -> tuple[dict, Any]:
    """Ends of some rows are padding, for a model that takes a mask: nothing attends to it, and it counts for nothing.

    Every fourth row is padded in front, which moves the positions that some models count by the mask.
    """
    if "attention_mask" not in inspect.signature(type(model).forward).parameters:
        return inputs, targets
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(0, rows, 2):
        if row % 4 == 2:
            mask[row, : 1 + row % 3] = 0
        else:
            mask[row, length - 1 - row % 3 :] = 0
    if isinstance(targets, torch.Tensor) and targets.shape == mask.shape:
        targets = targets.masked_fill(mask == 0, IGNORED)
    return {**inputs, "attention_mask": mask}, targets
