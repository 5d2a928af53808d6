"""Rows of a run as batches. What no row of a data set can be is an error with a name, which another start would meet again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelize.base.errors import DataError, Problem, short_list
from parallelize.training.data.collate import collate_rows

_FIX = 'data.function: rows such as {"input_ids": [...], "labels": [...]}, of lists or tensors: docs/data.md'


def collate_or_error(rows: Sequence[Any]) -> dict[str, Any] | DataError:
    """The batch of rows, or what is wrong with them: as a value, because a worker process sends an error as text alone."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row or not all(isinstance(name, str) for name in row):
            what = f"row {number} of a batch is a {type(row).__name__}, and no mapping of names to values"
            return DataError(Problem("bad-row", what, fix=_FIX))
    try:
        return collate_rows(rows)
    except DataError as error:
        return error
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, for values that make no tensor
        what = f"rows make no batch: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return DataError(Problem("bad-row", what, rows=_types(rows[0]), fix=_FIX))


def known_values(batch: Mapping[str, Any] | DataError, names: set[str] | None) -> dict[str, Any]:
    """What the model takes of a batch. names: as `RunData` takes them.

    Raises: DataError `bad-row`, and the error of `collate_or_error`.
    """
    if isinstance(batch, DataError):
        raise batch
    known = {name: value for name, value in batch.items() if names is None or name in names}
    if not known:
        what = f"rows have {short_list(sorted(batch))}, and the model takes {short_list(sorted(names or ()))}"
        raise DataError(Problem("bad-row", what, fix="name the values of a row as the arguments of the model"))
    if names is not None and (others := [name for name, value in known.items() if not isinstance(value, torch.Tensor)]):
        what = f"{others[0]} of a row is no tensor and no number"
        raise DataError(Problem("bad-row", what, rows=_types(known), fix=_FIX))
    ids = known.get("input_ids")
    if isinstance(ids, torch.Tensor) and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise DataError(Problem("bad-row", f"input_ids are {ids.dtype}", fix="ids of tokens are integers"))
    return known


def _types(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, type(value).__name__) for name, value in list(row.items())[:12])
