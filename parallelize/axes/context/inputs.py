"""The inputs of a model on `cp`: full sequences, of which each rank keeps its tokens, with their positions in the full
sequence.

[B, S, ..] tensors    local tokens of dim 1
position ids          local tokens; where they restart, another document begins (packed sequences). Of several axes
                      [3 or 4, B, S] the first of four says where documents begin
rows of marked tokens those of local tokens: [marked, ..], beside the mask [B, S] that marks them
padding mask [B, S]   becomes documents too: no token attends to padding
labels [B, S]         shifted first, under causal attention: the target of a token may be on another rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.batch.input_batch import MASK, BatchForm, InputBatch, documents_of, is_array
from parallelize.axes.context.cache_shards import cache_refused
from parallelize.axes.context.cached_calls import KEEP, CachedCall, cached_call, check_mask
from parallelize.axes.context.forward_state import Context
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.axes.vocabulary.loss.losses import valid_tokens
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.label_loss import label_loss
from parallelize.plan.models.wrapped_models import stock_model
from parallelize.plan.schema import Plan
from parallelize.state.local_config import LocalConfig, full_config

T = torch.Tensor
_OTHER_CACHES = ("past_key_value", "cache_params")
CACHES = ("past_key_values", *_OTHER_CACHES)
IGNORED = -100
_MARKED = {"deepstack_visual_embeds": "visual_pos_masks"}
"""Arguments that have a row for each token that another one marks."""


class ContextInputs:
    """Splits the inputs of one model.

    Args:
        root: the model, or the part of it at whose call sequences are sharded.
        plan: names the argument for positions, and whether it marks packed documents.
        checks_positions: whether positions must be an argument. has_cache: whether a call may have a cache.
    """

    def __init__(self, root: nn.Module, plan: Plan, *, checks_positions: bool = True, has_cache: bool = True):
        self.positions = "" if plan.positions == "none" else plan.positions
        self.name, self.form = type(root).__name__, BatchForm(root, positions=self.positions)
        parameters = self.form.signature.parameters
        self.takes_cache = bool(self.form.no_cache) or "use_cache" in parameters
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.takes_mask = MASK in parameters
        self.positions_from = plan.positions_from
        # other models are called without masks, so packed documents mean nothing there
        self.has_masks = is_registered(stock_model(root))
        self.packs = plan.packing == "positions" and self.has_masks
        self.may_cache = has_cache and self.has_masks and self.takes_cache and "past_key_values" in parameters
        self.slices_logits = KEEP in parameters
        if checks_positions and self.positions and self.positions not in parameters:
            what = (
                f"{self.name}.forward takes no {self.positions!r}, so it would not know the positions of local tokens"
            )
            fix = "name the argument under `positions:` in the plan; `positions: none` if positions do not matter"
            raise ModelError(Problem("no-positions", what, fix=fix))

    def local_call(
        self, context: Context, root: nn.Module, batch: InputBatch
    ) -> tuple[tuple, dict[str, Any], CachedCall | None]:
        """The arguments of a call with this rank's tokens. The context learns the length and documents of the
        sequences.

        Returns: (args, kwargs, how the call uses a cache or None).
        Raises: ShapeError `no-sequence`, `short-sequence`, `bad-position-ids`, `bad-mask`, `cache-full`; ModelError
            `given-mask`, `cache-over-cp`, `labels-over-cp`, `one-row`, `hidden-states-over-cp`; TypeError, as the
            model's own forward would.
        """
        self.form.signature.bind(None, *batch.args, **batch.kwargs)
        call, new = dict(batch.inputs), batch.length
        cached = cached_call(context, root, call, new) if self.may_cache else None
        layout = context.layout_of(new) if cached is None else cached.layout
        self._refuse(context, batch, cached)
        if cached is None:
            refuse_short(layout)
        self._begin(context, batch, call, layout.full, cached)
        if call.get("labels") is not None:
            call |= self.labels_of_call(context, root, batch, new)
        if cached is None or cached.splits:
            full = dict(call)
            self._shard(call, layout, context.group.rank)
            context.current().cut += _cut_inputs(full, call)
        if context.has_gathered and self.takes_mask and not isinstance(batch.mask, dict):
            call[MASK] = mask_of_model(context, call, layout.full)
        self._set_cache(call, cached, context, _device(batch))
        return *batch.call(call), cached

    def _shard(self, call: dict[str, Any], layout: SequenceLayout, rank: int) -> None:
        """Replace full sequences by the local tokens."""
        for name, marks in _MARKED.items():
            mask = call.get(marks)
            if mask is not None and call.get(name) is not None:
                call[name] = _rows_of_local_tokens(call[name], mask, layout, rank)
        for name, value in call.items():
            if name == self.positions and isinstance(value, T) and value.ndim == 3:
                call[name] = select_tokens(value, layout, rank, 2)
            elif name not in CACHES and name not in _MARKED:
                call[name] = local_tokens(value, layout, rank)

    def labels_of_call(self, context: Context, root: nn.Module, batch: InputBatch, full: int) -> dict[str, Any]:
        """What the stock loss of causal models needs to compute this rank's part of the mean over all data ranks, in
        full sequences. Raises: ModelError `labels-over-cp`."""
        call = batch.inputs
        kind = label_loss(root, call["labels"])
        if not (kind.takes_shifted and kind.divides and self.takes_more and context.is_causal):
            raise _labels_refused(self.name)
        return {**self._labels(context, kind.targets(call["labels"], batch.mask), call, full), "labels": call["labels"]}

    def _set_cache(
        self, call: dict[str, Any], cached: CachedCall | None, context: Context, device: torch.device
    ) -> None:
        """The arguments for the cache, and for the tokens whose logits are needed."""
        if self.takes_cache and (cached is None or cached.cache is None):
            call["use_cache"] = False
        if cached is not None and cached.cache is not None:
            call["past_key_values"] = cached.stock_cache
        if cached is not None and cached.keep and self.slices_logits:
            indices = cached.local_indices(context.group.rank)
            call[KEEP] = torch.tensor(indices, device=device)

    def _begin(
        self, context: Context, batch: InputBatch, call: dict[str, Any], full: int, cached: CachedCall | None
    ) -> None:
        """Set positions in the full sequence, and turn positions and padding mask into documents, which replace the
        mask."""
        mask, positions = batch.mask if isinstance(batch.mask, T) else None, _of_documents(batch.positions)
        packed = (
            positions
            if self._may_pack(batch.positions) and mask is None and (cached is None or cached.cache is None)
            else None
        )
        documents = documents_of(packed, mask)
        if cached is None:
            marked = documents is not None
            context.begin(full, documents, padding=mask if marked else None, positions=packed if marked else None)
        else:
            check_mask(mask, full)
            context.begin(full, documents, cached.cache, cached.splits)
        if self.positions and batch.positions is None:
            counted = call.get(self.positions_from) if self.positions_from else None
            call[self.positions] = _default_positions(counted, full, _device(batch))[:, full - batch.length :]
        if MASK in call and not isinstance(call[MASK], dict):
            call[MASK] = None

    def _may_pack(self, positions: T | None) -> bool:
        """Whether the model looks for documents in positions: those of four axes say where they begin, of three not."""
        return self.has_masks and (self.packs if positions is None or positions.ndim == 2 else len(positions) == 4)

    def _refuse(self, context: Context, batch: InputBatch, cached: CachedCall | None) -> None:
        call, mask, new = batch.inputs, batch.mask, batch.length
        is_made = isinstance(mask, dict) and context.makes_masks  # of all tokens, by the model around a part
        if mask is not None and not is_made and not (isinstance(mask, T) and mask.ndim == 2 and self.has_masks):
            fix = "a padding mask [batch, tokens] of a model of transformers, or none"
            raise ModelError(Problem("given-mask", "this kind of attention mask is not supported over cp", fix=fix))
        names = CACHES if cached is None else _OTHER_CACHES
        if any(call.get(name) is not None for name in names) or (cached is None and call.get("use_cache")):
            raise cache_refused(f"this key/value cache of {self.name}")
        keep = call.get(KEEP)
        if cached is None and (isinstance(keep, T) or keep):
            raise one_row()
        positions = batch.positions
        if positions is not None and not (positions.shape[-1] == new and _has_axes(positions)):
            what = f"{self.positions} {list(positions.shape)} for sequences of {new} tokens"
            raise ShapeError(Problem("bad-position-ids", what, fix=f"[1 or batch, {new}], for the full sequence"))

    def _labels(self, context: Context, labels: T, call: dict[str, Any], full: int) -> dict[str, Any]:
        """What the stock loss of causal models needs to compute this rank's part of the mean over all data ranks."""
        targets, count = call.get("shift_labels"), call.get("num_items_in_batch")
        targets = next_tokens(labels) if targets is None else targets
        if count is None:
            count = valid_tokens(local_tokens(targets, context.layout_of(full), context.group.rank), context.mesh)
        return {"shift_labels": targets, "num_items_in_batch": count}


def is_registered(root: nn.Module) -> bool:
    """Whether a model takes its attention and its masks from the registry of `transformers`."""
    return hasattr(getattr(root, "config", None), "_attn_implementation")


def _cut_inputs(full: Mapping[str, Any], local: Mapping[str, Any]) -> list[tuple[T, T]]:
    """(local, full) of each tensor of which a rank has some tokens."""
    pairs = [(local.get(name), value) for name, value in full.items()]
    return [(a, b) for a, b in pairs if isinstance(a, T) and isinstance(b, T) and a.shape != b.shape]


def _default_positions(mask: T | None, full: int, device: torch.device) -> T:
    """Consecutive positions; for a model that counts positions by its mask, that count."""
    if mask is None:
        return torch.arange(full, device=device).unsqueeze(0)
    return mask.cumsum(1) * mask - 1


def _has_axes(positions: T) -> bool:
    """Whether positions are [1 or batch, S], or those of several axes [3 or 4, batch, S]."""
    return positions.ndim == 2 or (positions.ndim == 3 and len(positions) in (3, 4))


def _of_documents(positions: T | None) -> T | None:
    """The positions that say where documents begin: of several axes the first."""
    return positions[0] if positions is not None and positions.ndim == 3 else positions


def _rows_of_local_tokens(rows: Any, mask: T, layout: SequenceLayout, rank: int) -> Any:
    """Those of the local tokens, of every tensor [marked tokens, ..]. mask: [B, S], which tokens are marked."""
    numbers = mask.flatten().cumsum(0).view(mask.shape) - 1
    local = select_tokens(numbers, layout, rank, 1)[select_tokens(mask, layout, rank, 1).bool()]
    return private.tree_map(lambda leaf: leaf[local] if isinstance(leaf, T) else leaf, rows)


def one_row() -> ModelError:
    """The error of a call that asks for the logits of the last tokens."""
    what = "logits_to_keep counts from the end of the sequence, which is on one rank"
    return ModelError(Problem("one-row", what, fix="use_cache=True, or slice gather_sequence(model, logits)"))


def _labels_refused(name: str) -> ModelError:
    what = f"the loss of {name} is not the sum over next tokens, the only loss that is known to be a sum over ranks"
    fix = "ParallelModel.step(..., targets=...), or parallelize.cross_entropy(logits, targets, mesh=mesh)"
    return ModelError(Problem("labels-over-cp", what, fix=fix))


def refuse_short(layout: SequenceLayout) -> None:
    """Refuse sequences that would leave a rank without a token: stock forwards do not run on empty inputs."""
    empty = [rank for rank in range(layout.size) if not layout.of_rank(rank)]
    if empty:
        what = f"a sequence of {layout.full} tokens leaves ranks {empty} of cp (size {layout.size}) without any"
        raise ShapeError(Problem("short-sequence", what, fix="longer sequences (pad them), or a smaller cp"))


def local_tokens(value: Any, layout: SequenceLayout, rank: int) -> Any:
    """The local tokens of all tensors and arrays [batch, full, ..] in a nested value; anything else is unchanged."""

    def split(leaf: Any) -> Any:
        if not (isinstance(leaf, T) or is_array(leaf)) or leaf.ndim < 2 or leaf.shape[1] != layout.full:
            return leaf
        if isinstance(leaf, T):
            return select_tokens(leaf, layout, rank, 1)
        return leaf.take([token for run in layout.of_rank(rank) for token in range(*run)], 1)

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


def _device(batch: InputBatch) -> torch.device:
    return next(value.device for value in batch.inputs.values() if isinstance(value, T))


# -- full masks ------------------------------------------------------------------------------------------------------
# Attention masks of the full sequence, for attention modules that are gathered over `cp`. A model of `transformers`
# makes masks for the tokens that it sees, which are those of one rank. Its config names another maker of masks, which
# calls the model's own one for the full sequence, with the padding and the packed documents of the call. Where any
# attention runs over the ranks, no mask is made: that one needs none, and a model makes all masks in one place.


NAME = "parallelize_gathered"
"""of the maker of masks in the registry of `transformers`"""
_CONTEXT = "context_parallel"  # the field of a config that tells the maker the sequences


def register_masks() -> None:
    """Register the maker of masks with `transformers`."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, _full_mask)


def config_with_masks(config: Any, context: Context) -> LocalConfig:
    """The config of a module that makes masks."""
    return LocalConfig(config, {"_attn_implementation": NAME, _CONTEXT: context})


def mask_of_model(context: Context, call: dict[str, Any], full: int) -> T | None:
    """The padding mask that a model is called with, [B, S] although it gets local tokens; None for none.

    Where masks are made it is never None, so that the model does not take the jumps in local positions for packed
    documents.
    """
    padding = context.current().padding
    if padding is not None or not context.makes_masks:
        return padding
    tokens = next(value for value in call.values() if isinstance(value, T) and value.ndim >= 2)
    return torch.ones(tokens.shape[0], full, dtype=torch.int64, device=tokens.device)


def _full_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, config: Any = None, **options: Any
) -> T | None:
    """The mask of all tokens, as `transformers` makes it without `cp`; its arguments are of the local ones."""
    from transformers import masking_utils

    context: Context = getattr(config, _CONTEXT)
    sequences, name = context.current(), full_config(config)._attn_implementation
    if name not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        what = f"masks of attn_implementation={name!r} are not known for the full sequence of a gathered module"
        raise ModelError(Problem("given-mask", what, fix='attn_implementation="sdpa" or "eager"'))
    full, padding = sequences.layout.full, sequences.padding
    options |= {"q_offset": 0, "kv_offset": 0, "attention_mask": None if padding is None else padding.bool()}
    if sequences.positions is not None:
        positions = sequences.positions.expand(batch_size, -1)
        packed: Any = masking_utils.find_packed_sequence_indices(positions)  # not None: the call has several documents
        mask_function = masking_utils.packed_sequence_compatibility_function(mask_function, positions, packed)
        options["allow_is_causal_skip"] = False
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name]
    return make(
        batch_size=batch_size, q_length=full, kv_length=full, mask_function=mask_function, config=config, **options
    )
