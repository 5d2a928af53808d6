"""The batches of a verification: enough rows to be split over data ranks and microbatches, all but the first with
padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.models.miniature.rules import undivided
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.wrapped_models import forward_signature
from parallelize.tools.verification.user_errors import blaming

IGNORED = -100  # the target that cross entropy ignores
_LENGTHS, _EVEN = (11, 13, 17), 12  # tokens of a sequence
_MANY = 24  # rows of the full batch above which each part gets two rows instead of three


@dataclass(frozen=True)
class Batch:
    """One batch. `rows` sequences of `length` tokens were requested; the tensors may have another shape."""

    inputs: dict[str, Any]
    targets: Any
    rows: int
    length: int

    @property
    def can_split(self) -> bool:
        """Whether some input, and the targets if they are a tensor, have the rows as their first dim."""
        inputs, targets = _tensors(self.inputs.values()), _tensors([self.targets])
        return any(tensor.shape[0] == self.rows for tensor in inputs) and all(
            tensor.shape[0] == self.rows for tensor in targets
        )

    def shapes(self) -> str:
        tensors = _tensors([*self.inputs.values(), self.targets])
        return ", ".join(str(list(tensor.shape)) for tensor in tensors) or "not those of tensors"


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim]


def batch_rows(parts: int, length: int) -> int:
    """Three rows for each part, or two where there are many parts. The result never equals the sequence length."""
    rows = 3 * parts if 3 * parts <= _MANY else 2 * parts
    return rows if rows != length else 2 * parts


def sequence_length(tp: int) -> int:
    """A length that tp does not divide: odd, longer than the windows, and not the number of rows."""
    return undivided(_LENGTHS, tp)


def even_length(tp: int) -> int:
    """A length that tp divides, longer than the windows."""
    return -(-_EVEN // tp) * tp


def draw_batch(source: ModelSource, model: nn.Module, seed: int, *, rows: int, length: int, padded: bool) -> Batch:
    """One batch of the model's inputs. Raises: ModelError `inputs-failed`, `bad-inputs`."""
    with torch.random.fork_rng(devices=[]), blaming("inputs-failed", f"the inputs of {source.text} failed"):
        torch.manual_seed(seed + 2)
        values = source.inputs(model, rows, length)
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        what = f"the inputs of {source.text} are a {type(values).__name__}"
        raise ModelError(Problem("bad-inputs", what, fix="return a dict of keyword arguments of the forward"))
    inputs = dict(values)
    targets = inputs.pop("targets", None)
    if source.loss is None:
        if not isinstance(targets, torch.Tensor):
            fix = "return `targets` among the inputs, or a `loss` with the model"
            raise ModelError(Problem("bad-inputs", f"{source.text} has neither targets nor a loss", fix=fix))
        targets = _ignore_some(targets)
    if padded and "inputs" not in source.extras:
        inputs, targets = _pad(model, inputs, targets, rows, length)
    return Batch(inputs, targets, rows, length)


def _ignore_some(targets: torch.Tensor) -> torch.Tensor:
    """Ignore more targets in the first and last rows, so that the mean of the rows' means is not the batch's mean."""
    if targets.ndim == 2 and not targets.is_floating_point():
        targets = targets.clone()
        targets[0, : targets.shape[1] // 2] = IGNORED
        targets[-1, -1] = IGNORED
    return targets


def _pad(model: nn.Module, inputs: dict, targets: Any, rows: int, length: int) -> tuple[dict, Any]:
    """Add a padding mask for every other row, if the model takes a mask. Targets at padding are ignored.

    Every fourth row is padded on the left, which shifts the positions that some models count from the mask.
    """
    of_ids = any(isinstance(value, torch.Tensor) and value.shape == (rows, length) for value in inputs.values())
    if not of_ids or getattr(model, "main_input_name", "input_ids") not in ("input_ids", ""):  # images, sound
        return inputs, targets
    if "attention_mask" not in forward_signature(model).parameters:
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
