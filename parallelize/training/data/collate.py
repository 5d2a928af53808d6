"""Batches of rows of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import default_collate

from parallelize.axes.context.inputs import IGNORED
from parallelize.base.errors import DataError, Problem

_PADDED_WITH = {"labels": IGNORED, "targets": IGNORED, "attention_mask": 0, "token_type_ids": 0}


def collate_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    pad_id: int = 0,
    multiple_of: int = 1,
    padded_with: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """A batch of rows: sequences are padded at the end to the longest one. For a DataLoader's `collate_fn`.

    Rows of different lengths get an `attention_mask`, unless they have one, or a row has several documents by its
    `position_ids`: a mask turns the detection of packed documents off, and padding is a document of its own by its
    positions. Rows of equal lengths that need no padding get none.

    Args:
        rows: mappings of one set of names. Lists and one-dimensional tensors are sequences of tokens, of one length in
            a row; everything else is collated as `default_collate` does.
        pad_id: the id that pads `input_ids`.
        multiple_of: the length is padded to a multiple of it: of `tp` with sequence parallelism, of 2 * `cp`.
        padded_with: name to the number that pads it, for names other than `labels` and `targets` (-100),
            `attention_mask` and `token_type_ids` (0). `position_ids` continue with 0, 1, 2, ...

    Returns: name to tensor [rows, tokens], or what `default_collate` gives.
    Raises: DataError `unequal-rows` if rows have other names, sequences of one row other lengths, or a name no padding.
    """
    names = set(rows[0]) if rows else set()
    sequences = {name for name in names if _is_sequence(rows[0][name])}
    fills = {"input_ids": pad_id, **_PADDED_WITH, **(padded_with or {})}
    lengths = [_length(number, row, names, sequences) for number, row in enumerate(rows)]
    longest = -(-max(lengths, default=0) // multiple_of) * multiple_of
    batch: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if name not in sequences:
            batch[name] = default_collate(values)
            continue
        batch[name] = torch.stack([_padded(name, value, longest, fills) for value in _tensors(values)])
    is_packed = "position_ids" in sequences and any(_restarts(row["position_ids"]) for row in rows)
    if sequences and "attention_mask" not in names and not is_packed and set(lengths) != {longest}:
        batch["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return batch


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim() == 1)


def _restarts(positions: Any) -> bool:
    """Whether positions do not count on from token to token: another document begins."""
    return bool((torch.as_tensor(positions).diff() != 1).any())


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """The sequences as tensors. An empty list has no dtype of its own: it gets that of the others, or of ids."""
    tensors = [torch.as_tensor(value) for value in values]
    dtype = next((x.dtype for x, value in zip(tensors, values, strict=True) if len(value)), torch.long)
    return [x if len(value) else x.to(dtype) for x, value in zip(tensors, values, strict=True)]


def _length(number: int, row: Mapping[str, Any], names: set[str], sequences: set[str]) -> int:
    """The number of tokens of a row; 0 if it has no sequences."""
    if set(row) != names:
        what = f"row {number} has {sorted(row)}, the first one {sorted(names)}"
        raise DataError(Problem("unequal-rows", what, fix="give all rows the same names"))
    lengths = {name: len(row[name]) for name in sequences}
    if len(set(lengths.values())) > 1:
        what = f"the sequences of row {number} have different lengths: {lengths}"
        raise DataError(
            Problem("unequal-rows", what, fix="give each token one element of each; or collate it yourself")
        )
    return next(iter(lengths.values()), 0)


def _padded(name: str, value: torch.Tensor, length: int, fills: Mapping[str, int]) -> torch.Tensor:
    missing = length - len(value)
    if not missing:
        return value
    if name == "position_ids":
        return torch.cat([value, torch.arange(missing, dtype=value.dtype)])
    if name not in fills:
        what = f"{name} has {len(value)} elements of {length}, and no number to pad it with"
        raise DataError(Problem("unequal-rows", what, fix=f"pass padded_with={{{name!r}: ...}}"))
    return pad(value, (0, missing), value=fills[name])
