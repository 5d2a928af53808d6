"""What a model on `cp` is called with: the whole sequences, of which this rank keeps its rows, with their positions in the whole.

[B, S, ..] tensors    own rows of dim 1
position ids          own rows; where they start again, another document begins (packed sequences)
padding mask [B, S]   becomes documents too: nobody sees padding
labels [B, S]         moved by one first, under causal attention: a row's target may lie on another rank
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.context.rows import SequenceRows
from parallelize.context.state import Context
from parallelize.errors import ModelError, Problem, ShapeError
from parallelize.loss import valid_tokens

T = torch.Tensor
_FIRST = ("input_ids", "inputs_embeds")
_MASK, _CACHES = "attention_mask", ("past_key_values", "past_key_value", "cache_params")
IGNORED = -100


class Inputs:
    """The call of one model.

    Args:
        positions: the argument that takes positions in the whole sequence; "none" for a model that has no use for them.
    """

    def __init__(self, root: nn.Module, positions: str):
        parameters = inspect.signature(type(root).forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
        self.names += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.positions = "" if positions == "none" else positions
        if self.positions and self.positions not in self.names:
            what = f"{type(root).__name__}.forward takes no {positions!r}, so it cannot be told where its rows stand"
            fix = "name the argument under `positions:` in the plan; `positions: none` where positions do not matter"
            raise ModelError(Problem("no-positions", what, fix=fix))

    def own_rows(self, context: Context, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call with this rank's rows; tells the context of the sequences.

        Raises: ShapeError `no-sequence`, `short-sequence`, `bad-position-ids`; ModelError `given-mask`, `cache-over-cp`, `labels-over-cp`.
        """
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        full = self._length(call)
        rows, device = context.rows(full), _device(call)
        self._refuse(call, full)
        _refuse_short(rows)
        context.begin(full, documents_of(call.get(self.positions), call.get(_MASK)))
        if _MASK in call:
            call[_MASK] = None
        if self.positions:
            given = call.get(self.positions)
            call[self.positions] = torch.arange(full, device=device).unsqueeze(0) if given is None else given
        if call.get("labels") is not None:
            call |= self._labels(context, call["labels"], full)
        if "use_cache" in self.names:
            call["use_cache"] = False
        out = {name: own(value, rows, context.group.rank, full) for name, value in call.items()}
        return tuple(out[name] for name in self.names[: len(args)]), {
            name: value for name, value in out.items() if name not in self.names[: len(args)]
        }

    def _length(self, call: dict[str, Any]) -> int:
        order = [*_FIRST, *call]
        found = next((call[n] for n in order if isinstance(call.get(n), T) and call[n].ndim >= 2), None)
        if found is None:
            what = f"the model is called without a tensor [batch, rows, ..]: {sorted(call)}"
            raise ShapeError(Problem("no-sequence", what, fix="model(input_ids=...)"))
        return found.shape[1]

    def _refuse(self, call: dict[str, Any], full: int) -> None:
        mask = call.get(_MASK)
        if mask is not None and not (isinstance(mask, T) and mask.ndim == 2):
            raise ModelError(
                Problem("given-mask", "a mask that is not [batch, rows] was given", fix="a padding mask, or none")
            )
        if any(call.get(name) is not None for name in _CACHES) or call.get("use_cache"):
            what = "a key/value cache over cp is not known: decoding has one row at a time to share out"
            raise ModelError(Problem("cache-over-cp", what, fix="use_cache=False; generate on a mesh without cp"))
        positions = call.get(self.positions)
        if positions is not None and (positions.ndim != 2 or positions.shape[1] != full):
            what = f"{self.positions} {list(positions.shape)} for sequences of {full} rows"
            raise ShapeError(Problem("bad-position-ids", what, fix=f"[1 or batch, {full}], positions in the whole"))

    def _labels(self, context: Context, labels: T, full: int) -> dict[str, Any]:
        """Labels for a loss that the model computes itself: its part of the mean over all data ranks."""
        if not (self.takes_more and context.is_causal):
            what = "this model's own loss is a mean over the rows of one rank, not of all"
            fix = "ParallelModel.step(..., targets=...), or parallelize.cross_entropy(logits, targets, mesh=mesh)"
            raise ModelError(Problem("labels-over-cp", what, fix=fix))
        targets = next_tokens(labels)
        mine = own(targets, context.rows(full), context.group.rank, full)
        return {"labels": labels, "shift_labels": targets, "num_items_in_batch": valid_tokens(mine, context.mesh)}


def _refuse_short(rows: SequenceRows) -> None:
    """Stock forwards do not run on nothing."""
    empty = [rank for rank in range(rows.size) if not rows.of_rank(rank)]
    if empty:
        what = f"a sequence of {rows.full} rows leaves ranks {empty} of cp (size {rows.size}) without any"
        raise ShapeError(Problem("short-sequence", what, fix="longer sequences (pad them), or a smaller cp"))


def own(value: Any, rows: SequenceRows, rank: int, full: int) -> Any:
    """Own rows of a tensor [batch, full, ..]; anything else as it is."""
    if not isinstance(value, T) or value.ndim < 2 or value.shape[1] != full:
        return value
    return take(value, rows, rank, 1)


def take(x: T, rows: SequenceRows, rank: int, dim: int) -> T:
    parts = [x.narrow(dim, start, stop - start) for start, stop in rows.of_rank(rank)]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def next_tokens(ids: T, ignore_index: int = IGNORED) -> T:
    """The target of each row of [batch, rows]: the id in the next one; `ignore_index` for the last."""
    return F.pad(ids[:, 1:], (0, 1), value=ignore_index)


def documents_of(positions: T | None, mask: T | None) -> T | None:
    """Which document each row belongs to, -1 - d for padding; None where that says nothing.

    A document ends where positions do not go on by one, as in `transformers`.
    """
    documents = None
    if positions is not None:
        jumps = positions.diff(dim=1) != 1
        if bool(jumps.any()):
            documents = F.pad(jumps.cumsum(1), (1, 0))
    if mask is not None and not bool((mask != 0).all()):
        base = torch.zeros_like(mask, dtype=torch.int64) if documents is None else documents.expand(mask.shape)
        documents = torch.where(mask != 0, base, -1 - base)
    return documents


def _device(call: dict[str, Any]) -> torch.device:
    return next(value.device for value in call.values() if isinstance(value, T))
