"""What a model is called with, described once: inputs by name, rows, tokens, positions, padding, documents, targets.

Microbatches, sequences over `cp`, caches, and the comparison of ranks read this description, so that a batch means the same on every
axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.batch.row_inputs import FIRST, TARGETS, RowInputs, first_with_rows, is_array, row_inputs
from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.signature_inputs import cache_off
from parallelize.plan.models.wrapped_models import forward_signature

T = torch.Tensor
POSITIONS, MASK = "position_ids", "attention_mask"


class BatchForm:
    """How a model takes a batch. Made once for a model.

    Args:
        module: the root of the model.
        whole: names of inputs, or "targets", to whether every microbatch gets them in full; a name alone means True.
        positions: its argument for the positions of tokens; empty for none.

    Attributes:
        signature: of its forward, with `self`. names: of its positional arguments, in order, without `self`.
        no_cache: the argument with which it makes no key/value cache; empty for models that take none.
    """

    def __init__(self, module: nn.Module, whole: Collection[str] | Mapping[str, bool] = (), positions: str = POSITIONS):
        self.signature = forward_signature(module)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [name for name, p in self.signature.parameters.items() if p.kind in kinds][1:]
        self.whole = _named_whole(whole)
        self.positions, self.no_cache = positions, cache_off(module)

    def batch(self, args: tuple, kwargs: dict[str, Any], targets: Any = None) -> InputBatch:
        """The description of one call. Nothing is read but shapes."""
        return InputBatch(self, args, kwargs, targets)

    def step_batch(self, args: tuple, kwargs: dict[str, Any], targets: Any = None) -> InputBatch:
        """As `batch`, of a call of a step: without a cache, unless the caller asks for one.

        Beside a cache, even an empty one, `transformers` does not look for packed documents. No step needs one.
        """
        if self.no_cache and kwargs.get("use_cache") is None and "use_cache" not in self.names[: len(args)]:
            kwargs = {**kwargs, **self.no_cache}
        return InputBatch(self, args, kwargs, targets)


@dataclass(frozen=True)
class InputBatch:
    """One call of a model, of a step or of a loop's own.

    Attributes:
        form: how the model takes it.
        args, kwargs: the arguments of the model.
        targets: of the loss; None where there is none.
    """

    form: BatchForm
    args: tuple
    kwargs: dict[str, Any]
    targets: Any = None

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name, however they were passed, in their order; those without a name by their index."""
        names = self.form.names
        passed = {names[i] if i < len(names) else f"input {i}": value for i, value in enumerate(self.args)}
        return {**passed, **self.kwargs}

    def call(self, inputs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the same call with other inputs: those of this batch by name, and any more."""
        values = dict(inputs)
        args = tuple(values.pop(name) for name in [*self.inputs][: len(self.args)])
        return args, values

    @cached_property
    def first(self) -> Any:
        """The tensor or array whose dim 0 is the batch: ids or embeddings, else the first one. Raises: ShapeError `no-inputs`."""
        return first_with_rows(self.inputs, self.form.whole)

    @property
    def size(self) -> int:
        """The number of sequences. Raises: ShapeError `no-inputs`."""
        return self.first.shape[0]

    @cached_property
    def rows(self) -> RowInputs:
        """Which of the inputs and targets have an entry for each sequence. Raises: ShapeError `no-inputs`."""
        return row_inputs({**self.inputs, TARGETS: self.targets}, self.first, self.form.whole)

    @cached_property
    def length(self) -> int:
        """Tokens of the full sequences: dim 1 of the first input [batch, tokens, ..]. Raises: ShapeError `no-sequence`."""
        values = (self.inputs.get(name) for name in (*FIRST, *self.inputs))
        sequence = next((value for value in values if isinstance(value, T) and value.ndim >= 2), None)
        if sequence is None:
            what = f"the model is called without a tensor [batch, tokens, ..]: {sorted(self.inputs)}"
            raise ShapeError(Problem("no-sequence", what, fix="model(input_ids=...)"))
        return sequence.shape[1]

    @property
    def positions(self) -> T | None:
        """The positions of the tokens that the caller passes, or None."""
        return self.inputs.get(self.form.positions)

    @property
    def mask(self) -> Any:
        """The padding mask [batch, tokens] that the caller passes, or None; or what it passes in its place."""
        return self.inputs.get(MASK)

    def compared(self) -> dict[str, Any]:
        """Inputs and targets by name for a comparison of ranks, with arrays as tensors."""
        named = {**self.inputs, TARGETS: self.targets}
        return {n: v if isinstance(v, T) else private.tree_map(_as_tensor, v) for n, v in named.items()}


def documents_of(positions: T | None, mask: T | None) -> T | None:
    """The document of each token, -1 - d for padding; None for one document without padding.

    A document ends where positions do not increase by one, as in `transformers`.

    Args:
        positions: [1 or batch, tokens], of a model that looks for documents; None for one document.
        mask: [batch, tokens], 0 for padding; None for no padding.

    Cost: on an accelerator it waits for the comparison.
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


def _named_whole(whole: Collection[str] | Mapping[str, bool]) -> dict[str, bool]:
    if isinstance(whole, Mapping):
        return dict(whole)
    return dict.fromkeys((whole,) if isinstance(whole, str) else whole, True)


def _as_tensor(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if is_array(leaf) and leaf.dtype.kind in "biuf" else leaf
