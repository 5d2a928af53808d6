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

from parallelize import _torch_private as private
from parallelize.context.rows import SequenceRows
from parallelize.context.state import Context
from parallelize.errors import ModelError, Problem, ShapeError
from parallelize.loss import valid_tokens
from parallelize.plan.schema import Plan

T = torch.Tensor
_FIRST = ("input_ids", "inputs_embeds")
_MASK, _CACHES = "attention_mask", ("past_key_values", "past_key_value", "cache_params")
IGNORED = -100


class Inputs:
    """The call of one model.

    Args:
        plan: names the argument for positions, and whether packed documents are told by it.
    """

    def __init__(self, root: nn.Module, plan: Plan):
        self.name, self.signature = type(root).__name__, inspect.signature(type(root).forward)
        parameters = self.signature.parameters
        self.takes_cache = "use_cache" in parameters
        self.positions = "" if plan.positions == "none" else plan.positions
        self.counted = plan.positions_from
        self.has_masks = is_registered(root)  # others are called without masks, so documents would be no news to them
        self.packs = plan.packing == "positions" and self.has_masks
        self.shifts = getattr(root, "loss_type", None) == "ForCausalLM"
        if self.positions and self.positions not in parameters:
            what = f"{self.name}.forward takes no {self.positions!r}, so it cannot be told where its rows stand"
            fix = "name the argument under `positions:` in the plan; `positions: none` where positions do not matter"
            raise ModelError(Problem("no-positions", what, fix=fix))

    def bound(self, args: tuple, kwargs: dict) -> inspect.BoundArguments:
        """The call by name. Raises: TypeError as the model's own forward would."""
        return self.signature.bind(None, *args, **kwargs)

    def own_rows(self, context: Context, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call with this rank's rows; tells the context of the sequences.

        Raises: ShapeError `no-sequence`, `short-sequence`, `bad-position-ids`; ModelError `given-mask`, `cache-over-cp`,
            `labels-over-cp`, `one-row`.
        """
        bound = self.bound(args, kwargs)
        call = bound.arguments
        more = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        extra = call.get(more, {})
        full = length_in(call)
        rows = context.rows(full)
        self._refuse({**call, **extra}, full)
        _refuse_short(rows)
        self._place(context, call, full)
        if call.get("labels") is not None:
            if not (self.shifts and more and context.is_causal):
                raise _labels(self.name)
            extra = {**extra, **self._labels(context, call["labels"], extra, full)}
        if self.takes_cache:
            call["use_cache"] = False
        for name, value in call.items():
            call[name] = own(value, rows, context.group.rank, full)
        if extra:
            call[more] = {name: own(value, rows, context.group.rank, full) for name, value in extra.items()}
        return bound.args[1:], bound.kwargs

    def _place(self, context: Context, call: dict[str, Any], full: int) -> None:
        """Positions in the whole, and the documents that they and a padding mask tell of; the mask has done its work."""
        mask, given = call.get(_MASK), call.get(self.positions)
        context.begin(full, documents_of(given if self.packs and mask is None else None, mask))
        if self.positions and given is None:
            counted = call.get(self.counted) if self.counted else None
            call[self.positions] = _counted(counted, full, _device(call))
        if _MASK in call:
            call[_MASK] = None

    def _refuse(self, call: dict[str, Any], full: int) -> None:
        mask = call.get(_MASK)
        if mask is not None and not (isinstance(mask, T) and mask.ndim == 2 and self.has_masks):
            fix = "a padding mask [batch, rows] of a model of transformers, or none"
            raise ModelError(Problem("given-mask", "a mask was given that nobody here can read", fix=fix))
        if any(call.get(name) is not None for name in _CACHES) or call.get("use_cache"):
            what = "a key/value cache over cp is not known: decoding has one row at a time to share out"
            raise ModelError(Problem("cache-over-cp", what, fix="use_cache=False; generate on a mesh without cp"))
        keep = call.get("logits_to_keep")
        if isinstance(keep, T) or keep:
            what = "logits_to_keep counts from the end of the sequence, which lies on one rank"
            raise ModelError(Problem("one-row", what, fix="gather_sequence(model, logits) and take them there"))
        positions = call.get(self.positions)
        if positions is not None and (positions.ndim != 2 or positions.shape[1] != full):
            what = f"{self.positions} {list(positions.shape)} for sequences of {full} rows"
            raise ShapeError(Problem("bad-position-ids", what, fix=f"[1 or batch, {full}], positions in the whole"))

    def _labels(self, context: Context, labels: T, extra: dict[str, Any], full: int) -> dict[str, Any]:
        """What the stock loss of causal models needs to give this rank's part of the mean over all data ranks."""
        targets = extra.get("shift_labels")
        targets = next_tokens(labels) if targets is None else targets
        count = extra.get("num_items_in_batch")
        if count is None:
            count = valid_tokens(own(targets, context.rows(full), context.group.rank, full), context.mesh)
        return {"shift_labels": targets, "num_items_in_batch": count}


def is_registered(root: nn.Module) -> bool:
    """Whether a model takes its attention, and its masks, from the registry of `transformers`."""
    return hasattr(getattr(root, "config", None), "_attn_implementation")


def length_of(root: nn.Module, args: tuple, kwargs: dict) -> int:
    """Rows of the whole sequences that a model on cp is called with. Raises: ShapeError `no-sequence`."""
    return length_in(root.__dict__["_context_call"].inputs.bound(args, kwargs).arguments)


def length_in(call: dict[str, Any]) -> int:
    found = next((call[n] for n in (*_FIRST, *call) if isinstance(call.get(n), T) and call[n].ndim >= 2), None)
    if found is None:
        what = f"the model is called without a tensor [batch, rows, ..]: {sorted(call)}"
        raise ShapeError(Problem("no-sequence", what, fix="model(input_ids=...)"))
    return found.shape[1]


def _counted(mask: T | None, full: int, device: torch.device) -> T:
    """Positions where none are given: one after another; of a model that counts them by its mask, that count."""
    if mask is None:
        return torch.arange(full, device=device).unsqueeze(0)
    return mask.cumsum(1) * mask - 1


def _labels(name: str) -> ModelError:
    what = f"the loss of {name} is not the sum over next tokens, which alone is known to be a sum over ranks"
    fix = "ParallelModel.step(..., targets=...), or parallelize.cross_entropy(logits, targets, mesh=mesh)"
    return ModelError(Problem("labels-over-cp", what, fix=fix))


def _refuse_short(rows: SequenceRows) -> None:
    """Stock forwards do not run on nothing."""
    empty = [rank for rank in range(rows.size) if not rows.of_rank(rank)]
    if empty:
        what = f"a sequence of {rows.full} rows leaves ranks {empty} of cp (size {rows.size}) without any"
        raise ShapeError(Problem("short-sequence", what, fix="longer sequences (pad them), or a smaller cp"))


def own(value: Any, rows: SequenceRows, rank: int, full: int) -> Any:
    """Own rows of tensors [batch, full, ..], in whatever they are nested; anything else as it is."""

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, T) and leaf.ndim >= 2 and leaf.shape[1] == full
        return take(leaf, rows, rank, 1) if whole else leaf

    return private.tree_map(cut, value)


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
