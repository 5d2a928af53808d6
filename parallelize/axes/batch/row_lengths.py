"""Rows of different lengths in one batch: each microbatch is cut to its longest row, so that no padding is computed.

A step takes them as a padded batch [rows, S] with `row_lengths`, the tokens of each row. What is behind them may be
anything that counts nothing in the loss: in causal models no token before it depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelize.axes.batch.input_batch import AXES, IMAGES, MASK, ROWS, TARGETS, RowInputs
from parallelize.base.errors import Problem, ShapeError

T = torch.Tensor
ROW_LENGTHS = "row_lengths"


def checked_lengths(values: Any, rows: int, full: int) -> tuple[int, ...]:
    """The lengths of rows as integers.

    Args:
        values: [rows], a tensor or a sequence.
        rows, full: of the batch [rows, full].

    Raises: ShapeError `bad-row-lengths`.
    """
    whole = not isinstance(values, T) or not (values.is_floating_point() or values.dtype == torch.bool)
    listed = values.tolist() if isinstance(values, T) else list(values)
    if not whole or len(listed) != rows or not all(type(n) is int and 0 < n <= full for n in listed):
        what = f"row_lengths are {str(listed)[:80]}, for a batch of {rows} rows of {full} tokens"
        raise ShapeError(Problem("bad-row-lengths", what, fix=f"one integer for each row, from 1 to {full}"))
    return tuple(listed)


def refuse_targets_behind(targets: Any, lengths: Sequence[int], full: int, ignored: int) -> None:
    """Refuse targets that would be cut off.

    Raises: ShapeError `bad-row-lengths`. Cost: a comparison of token ids; on an accelerator it waits for it.
    """
    if not isinstance(targets, T) or targets.ndim != 2 or targets.shape[1] < full or targets.is_floating_point():
        return
    ends = torch.tensor(lengths, device=targets.device)[:, None] + targets.shape[1] - full  # prompts come before tokens
    behind = torch.arange(targets.shape[1], device=targets.device) >= ends
    lost = (behind & (targets != ignored)).sum(1).tolist()
    if any(lost):
        row = next(n for n, count in enumerate(lost) if count)
        what = f"row {row} has {lengths[row]} tokens by row_lengths, and {lost[row]} targets behind them"
        raise ShapeError(Problem("bad-row-lengths", what, fix=f"targets or labels of {ignored} where a row has ended"))


def cut_rows(inputs: Mapping[str, Any], rows: RowInputs, full: int, length: int) -> dict[str, Any]:
    """Inputs and targets of some rows [n, full, ..], with their first `length` tokens.

    Args:
        inputs: of these rows, by name, and the "targets". rows: how the inputs of the full batch are described.
    """
    if length == full:
        return dict(inputs)
    return {name: _cut(name, value, rows, full, length) for name, value in inputs.items()}


def _cut(name: str, value: Any, rows: RowInputs, full: int, length: int) -> Any:
    leaves, _ = rows.inputs[name]
    if not isinstance(value, T) or value.ndim < 2 or len(leaves) != 1 or leaves[0].kind == IMAGES:
        return value
    if leaves[0].kind == AXES:
        return value[..., :length] if value.shape[-1] == full else value
    if name == TARGETS and value.shape[1] > full:  # learned prompts stand before the tokens
        return value[:, : value.shape[1] - full + length]
    dims = range(1 if leaves[0].kind == ROWS else 0, value.ndim if name == MASK else 2)
    for dim in dims:
        value = value.narrow(dim, 0, length) if value.shape[dim] == full else value
    return value
