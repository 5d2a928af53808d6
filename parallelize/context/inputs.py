"""The inputs of a model on `cp`: full sequences, of which each rank keeps its tokens, with their positions in the full sequence.

[B, S, ..] tensors    local tokens of dim 1
position ids          local tokens; where they restart, another document begins (packed sequences)
padding mask [B, S]   becomes documents too: no token attends to padding
labels [B, S]         shifted first, under causal attention: the target of a token may be on another rank
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.context.cache_shards import cache_refused
from parallelize.context.cached_calls import KEEP, CachedCall, cached_call, check_mask
from parallelize.context.forward_state import Context
from parallelize.context.full_masks import mask_of_model
from parallelize.context.sequence_shards import SequenceLayout
from parallelize.errors import ModelError, Problem, ShapeError
from parallelize.models.wrapped_models import forward_signature, stock_model
from parallelize.plan.schema import Plan
from parallelize.torch_private import torch_tensors as private
from parallelize.vocabulary.loss.losses import valid_tokens

T = torch.Tensor
FIRST = ("input_ids", "inputs_embeds")
"""Names of `transformers` for what a model is called with."""
_MASK, _OTHER_CACHES = "attention_mask", ("past_key_value", "cache_params")
_CACHES = ("past_key_values", *_OTHER_CACHES)
IGNORED = -100


class ContextInputs:
    """Splits the inputs of one model.

    Args:
        root: the model.
        plan: names the argument for positions, and whether it marks packed documents.
    """

    def __init__(self, root: nn.Module, plan: Plan):
        self.name, self.signature = type(root).__name__, forward_signature(root)
        parameters = self.signature.parameters
        self.takes_cache = "use_cache" in parameters
        self.positions = "" if plan.positions == "none" else plan.positions
        self.positions_from = plan.positions_from
        # other models are called without masks, so packed documents mean nothing there
        self.has_masks = is_registered(stock_model(root))
        self.packs = plan.packing == "positions" and self.has_masks
        self.may_cache = self.has_masks and self.takes_cache and "past_key_values" in parameters
        self.slices_logits = KEEP in parameters
        self.shifts = getattr(root, "loss_type", None) == "ForCausalLM"
        if self.positions and self.positions not in parameters:
            what = (
                f"{self.name}.forward takes no {self.positions!r}, so it would not know the positions of local tokens"
            )
            fix = "name the argument under `positions:` in the plan; `positions: none` if positions do not matter"
            raise ModelError(Problem("no-positions", what, fix=fix))

    def bound(self, args: tuple, kwargs: dict) -> inspect.BoundArguments:
        """The arguments by name. Raises: TypeError, as the model's own forward would."""
        return self.signature.bind(None, *args, **kwargs)

    def local_call(
        self, context: Context, root: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict, CachedCall | None]:
        """The arguments of a call with this rank's tokens. The context learns the length and documents of the sequences.

        Returns: (args, kwargs, how the call uses a cache or None).
        Raises: ShapeError `no-sequence`, `short-sequence`, `bad-position-ids`, `bad-mask`, `cache-full`; ModelError
            `given-mask`, `cache-over-cp`, `labels-over-cp`, `one-row`, `hidden-states-over-cp`.
        """
        bound = self.bound(args, kwargs)
        call = bound.arguments
        var_keyword = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        extra, new = call.get(var_keyword, {}), length_in(call)
        cached = cached_call(context, root, {**call, **extra}, new) if self.may_cache else None
        layout = context.layout_of(new) if cached is None else cached.layout
        self._refuse({**call, **extra}, new, cached)
        if cached is None:
            _refuse_short(layout)
        self._begin(context, call, layout.full, new, cached)
        if call.get("labels") is not None:
            if not (self.shifts and var_keyword and context.is_causal):
                raise _labels_refused(self.name)
            extra = {**extra, **self._labels(context, call["labels"], extra, new)}
        if cached is None or cached.splits:
            rank = context.group.rank
            for name, value in call.items():
                call[name] = value if name in _CACHES else local_tokens(value, layout, rank)
            extra = {name: local_tokens(value, layout, rank) for name, value in extra.items()}
        if context.has_gathered and _MASK in self.signature.parameters:
            call[_MASK] = mask_of_model(context, call, layout.full)
        if extra:
            call[var_keyword] = extra
        self._set_cache(call, cached, context)
        return bound.args[1:], bound.kwargs, cached

    def _set_cache(self, call: dict[str, Any], cached: CachedCall | None, context: Context) -> None:
        """The arguments for the cache, and for the tokens whose logits are needed."""
        if self.takes_cache and (cached is None or cached.cache is None):
            call["use_cache"] = False
        if cached is not None and cached.cache is not None:
            call["past_key_values"] = cached.stock_cache
        if cached is not None and cached.keep and self.slices_logits:
            indices = cached.local_indices(context.group.rank)
            call[KEEP] = torch.tensor(indices, device=_device(call))

    def _begin(self, context: Context, call: dict[str, Any], full: int, new: int, cached: CachedCall | None) -> None:
        """Set positions in the full sequence, and turn positions and padding mask into documents, which replace the mask."""
        mask, positions = call.get(_MASK), call.get(self.positions)
        packed = positions if self.packs and mask is None and (cached is None or cached.cache is None) else None
        if cached is None:
            documents = documents_of(packed, mask)
            padding, packed = (mask, None) if mask is not None else (None, packed)
            marked = documents is not None
            context.begin(full, documents, padding=padding if marked else None, positions=packed if marked else None)
        else:
            check_mask(mask, full)
            context.begin(full, documents_of(packed, mask), cached.cache, cached.splits)
        if self.positions and positions is None:
            counted = call.get(self.positions_from) if self.positions_from else None
            call[self.positions] = _default_positions(counted, full, _device(call))[:, full - new :]
        if _MASK in call:
            call[_MASK] = None

    def _refuse(self, call: dict[str, Any], new: int, cached: CachedCall | None) -> None:
        mask = call.get(_MASK)
        if mask is not None and not (isinstance(mask, T) and mask.ndim == 2 and self.has_masks):
            fix = "a padding mask [batch, tokens] of a model of transformers, or none"
            raise ModelError(Problem("given-mask", "this kind of attention mask is not supported over cp", fix=fix))
        names = _CACHES if cached is None else _OTHER_CACHES
        if any(call.get(name) is not None for name in names) or (cached is None and call.get("use_cache")):
            raise cache_refused(f"this key/value cache of {self.name}")
        keep = call.get(KEEP)
        if cached is None and (isinstance(keep, T) or keep):
            what = "logits_to_keep counts from the end of the sequence, which is on one rank"
            raise ModelError(Problem("one-row", what, fix="use_cache=True, or slice gather_sequence(model, logits)"))
        positions = call.get(self.positions)
        if positions is not None and (positions.ndim != 2 or positions.shape[1] != new):
            what = f"{self.positions} {list(positions.shape)} for sequences of {new} tokens"
            raise ShapeError(Problem("bad-position-ids", what, fix=f"[1 or batch, {new}], for the full sequence"))

    def _labels(self, context: Context, labels: T, extra: dict[str, Any], full: int) -> dict[str, Any]:
        """What the stock loss of causal models needs to compute this rank's part of the mean over all data ranks."""
        targets = extra.get("shift_labels")
        targets = next_tokens(labels) if targets is None else targets
        count = extra.get("num_items_in_batch")
        if count is None:
            count = valid_tokens(local_tokens(targets, context.layout_of(full), context.group.rank), context.mesh)
        return {"shift_labels": targets, "num_items_in_batch": count}


def is_registered(root: nn.Module) -> bool:
    """Whether a model takes its attention and its masks from the registry of `transformers`."""
    return hasattr(getattr(root, "config", None), "_attn_implementation")


def length_of(root: Any, args: tuple, kwargs: dict) -> int:
    """Tokens of the full sequences in a call of a model on cp. Raises: ShapeError `no-sequence`."""
    return length_in(root._applied.context_call.inputs.bound(args, kwargs).arguments)


def length_in(call: dict[str, Any]) -> int:
    """The length of the first input [batch, tokens, ..]. Raises: ShapeError `no-sequence`."""
    values = (call.get(name) for name in (*FIRST, *call))
    sequence = next((value for value in values if isinstance(value, T) and value.ndim >= 2), None)
    if sequence is None:
        what = f"the model is called without a tensor [batch, tokens, ..]: {sorted(call)}"
        raise ShapeError(Problem("no-sequence", what, fix="model(input_ids=...)"))
    return sequence.shape[1]


def _default_positions(mask: T | None, full: int, device: torch.device) -> T:
    """Consecutive positions; for a model that counts positions by its mask, that count."""
    if mask is None:
        return torch.arange(full, device=device).unsqueeze(0)
    return mask.cumsum(1) * mask - 1


def _labels_refused(name: str) -> ModelError:
    what = f"the loss of {name} is not the sum over next tokens, the only loss that is known to be a sum over ranks"
    fix = "ParallelModel.step(..., targets=...), or parallelize.cross_entropy(logits, targets, mesh=mesh)"
    return ModelError(Problem("labels-over-cp", what, fix=fix))


def _refuse_short(layout: SequenceLayout) -> None:
    """Refuse sequences of which a rank would have no token: stock forwards do not run on empty inputs."""
    empty = [rank for rank in range(layout.size) if not layout.of_rank(rank)]
    if empty:
        what = f"a sequence of {layout.full} tokens leaves ranks {empty} of cp (size {layout.size}) without any"
        raise ShapeError(Problem("short-sequence", what, fix="longer sequences (pad them), or a smaller cp"))


def local_tokens(value: Any, layout: SequenceLayout, rank: int) -> Any:
    """The local tokens of all tensors [batch, full, ..] in a nested value; anything else is unchanged."""

    def split(leaf: Any) -> Any:
        is_sequence = isinstance(leaf, T) and leaf.ndim >= 2 and leaf.shape[1] == layout.full
        return select_tokens(leaf, layout, rank, 1) if is_sequence else leaf

    return private.tree_map(split, value)


def select_tokens(x: T, layout: SequenceLayout, rank: int, dim: int) -> T:
    """The tokens of a rank along a dim of full sequences."""
    runs = [x.narrow(dim, start, stop - start) for start, stop in layout.of_rank(rank)]
    return torch.cat(runs, dim) if runs else x.narrow(dim, 0, 0)


def next_tokens(ids: T, ignore_index: int = IGNORED) -> T:
    """The target of each token: the id of the next token.

    Args:
        ids: full sequences [batch, tokens].
        ignore_index: target of the last token, which the loss ignores.

    Returns: [batch, tokens], for `targets=` of a loss or of `ParallelModel.step`, which take this rank's part of it.
    Cost: no communication.
    """
    return F.pad(ids[:, 1:], (0, 1), value=ignore_index)


def documents_of(positions: T | None, mask: T | None) -> T | None:
    """The document of each token, -1 - d for padding; None for one document without padding.

    A document ends where positions do not increase by one, as in `transformers`.
    """
    documents = None
    if positions is not None:
        starts = positions.diff(dim=1) != 1
        if bool(starts.any()):
            documents = F.pad(starts.cumsum(1), (1, 0))
    if mask is not None and not bool((mask != 0).all()):
        unmasked = torch.zeros_like(mask, dtype=torch.int64) if documents is None else documents.expand(mask.shape)
        documents = torch.where(mask != 0, unmasked, -1 - unmasked)
    return documents


def _device(call: dict[str, Any]) -> torch.device:
    return next(value.device for value in call.values() if isinstance(value, T))
