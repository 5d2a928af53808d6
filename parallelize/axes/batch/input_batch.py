"""What a model is called with, described once: inputs by name, rows, tokens, positions, padding, documents, targets.

Microbatches, sequences over `cp`, caches, and the comparison of ranks read this description, so that a batch means the
same on every axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.batch.media_rows import Bounds, MediaForm, MediaRows
from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_flex import is_block_mask
from parallelize.ops.attention.flex_masks import of_sequences
from parallelize.plan.models.nested_tensors import attributes_of
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
        self.media = MediaForm(module)

    def batch(self, args: tuple, kwargs: dict[str, Any], targets: Any = None) -> InputBatch:
        """The description of one call. Nothing is read but shapes."""
        return InputBatch(self, args, kwargs, targets)

    def step_batch(self, args: tuple, kwargs: dict[str, Any], targets: Any = None) -> InputBatch:
        """As `batch`, of a call of a step: without what would hide packed documents from the model.

        Beside a cache, even an empty one, and beside a padding mask, even one without padding, `transformers` does not
        look for packed documents. No step needs a cache, unless the caller asks for one. A mask of ones is read where
        positions are passed too, which the host waits for.
        """
        if self.no_cache and kwargs.get("use_cache") is None and "use_cache" not in self.names[: len(args)]:
            kwargs = {**kwargs, **self.no_cache}
        if self._hides_documents(kwargs.get(MASK), kwargs.get(self.positions)):
            kwargs = {**kwargs, MASK: None}
        return InputBatch(self, args, kwargs, targets)

    def _hides_documents(self, mask: Any, positions: Any) -> bool:
        """Whether a mask has no padding, beside positions of several documents, and the model runs without one.

        A document begins at 0. Positions that go on elsewhere, such as those that train longer contexts by gaps, are of
        one document, which the stock model would take for several without its mask.
        """
        given = all(isinstance(value, T) and value.ndim == 2 and not value.is_meta for value in (mask, positions))
        parameter = self.signature.parameters.get(MASK)
        if not given or parameter is None or parameter.default is not None:
            return False
        breaks, restarts = positions.diff(dim=-1) != 1, positions[:, 1:] == 0
        return bool(breaks.any() & (breaks <= restarts).all()) and bool(mask.bool().all())


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
        """The tensor or array whose dim 0 is the batch: ids or embeddings, else the first one. Raises: ShapeError
        `no-inputs`."""
        return first_with_rows(self.inputs, self.form.whole)

    @property
    def size(self) -> int:
        """The number of sequences. Raises: ShapeError `no-inputs`."""
        return self.first.shape[0]

    @cached_property
    def rows(self) -> RowInputs:
        """Which of the inputs and targets have an entry for each sequence. Raises: ShapeError `no-inputs`,
        `unclear-images`."""
        rows = row_inputs({**self.inputs, TARGETS: self.targets}, self.first, self.form.whole)
        leaves = {
            name: [Leaf(name, self.inputs[name], IMAGES, bounds)]
            for name, bounds in self.rows_of_media.bounds(self.inputs, self.form.whole).items()
        }
        positions = self.positions
        if isinstance(positions, T) and positions.ndim == 3 and positions.shape[1] == rows.size:
            leaves[self.form.positions] = [Leaf(self.form.positions, positions, AXES)]
        return rows.replaced(leaves)

    @cached_property
    def rows_of_media(self) -> MediaRows:
        """Which images, videos and sounds belong to which sequence."""
        return self.form.media.of_batch(self.inputs)

    @cached_property
    def length(self) -> int:
        """Tokens of the full sequences: dim 1 of the first input [batch, tokens, ..]. Raises: ShapeError
        `no-sequence`."""
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


# -- row inputs ------------------------------------------------------------------------------------------------------
# Which inputs of a step have an entry for each sequence, and their parts for some of the sequences. tensors, NumPy
# arrays [batch, ..], narrowed along dim 0 lists, tuples one entry a sequence, sliced; of tensors [batch, ..] they
# only hold them dicts and other nesting what they hold, by the same rules objects never split: those that hold
# tensors [batch, ..] are refused


FIRST = ("input_ids", "inputs_embeds")
"""Names of `transformers` for what a model is called with."""
ROWS, WHOLE, UNCLEAR, IMAGES, AXES, BLOCKS = "rows", "whole", "unclear", "images", "axes", "blocks"
TARGETS = "targets"


@dataclass(frozen=True)
class Leaf:
    """A value inside an input.

    Attributes:
        name: of the input, or "targets". kind: whether it has an entry for each sequence (`ROWS`), or is the same for
            all (`WHOLE`); `UNCLEAR` if either may be. It has rows of the images of each sequence (`IMAGES`), or the
            sequences are in dim 1 (`AXES`, of positions of several axes), or it is a block mask of `flex_attention`
            (`BLOCKS`).
        bounds: of `IMAGES`.
    """

    name: str
    value: Any
    kind: str
    bounds: Bounds | None = None

    def part(self, start: int, stop: int) -> Any:
        """What it has for the sequences from `start` to `stop`. None: they have no images."""
        if self.bounds is not None:
            return self.bounds.rows_between(self.value, start, stop)
        if self.kind == AXES:
            return self.value.narrow(1, start, stop - start)
        if self.kind == BLOCKS:
            return of_sequences(self.value, start, stop)
        if self.kind != ROWS:
            return self.value
        return self.value.narrow(0, start, stop - start) if isinstance(self.value, T) else self.value[start:stop]


@dataclass(frozen=True)
class RowInputs:
    """The inputs and targets of a step by rows.

    Attributes:
        size: number of sequences.
        inputs: by name, and the targets by "targets": leaves and structure.
    """

    size: int
    inputs: Mapping[str, tuple[list[Leaf], Any]]

    def replaced(self, leaves: Mapping[str, list[Leaf]]) -> RowInputs:
        """The same with other leaves of tensors."""
        return RowInputs(self.size, {name: (leaves.get(name, old), form) for name, (old, form) in self.inputs.items()})

    def part(self, start: int, stop: int) -> dict[str, Any]:
        """The inputs, and the "targets", for the sequences from `start` to `stop`."""
        return {
            name: private.tree_unflatten([leaf.part(start, stop) for leaf in leaves], structure)
            for name, (leaves, structure) in self.inputs.items()
        }

    def refuse_unclear(self) -> None:
        """Refuse what may have the size of the batch by chance, and what cannot be split. Raises: ShapeError
        `unclear-batch-dim`."""
        for leaves, _ in self.inputs.values():
            for leaf in leaves:
                if leaf.kind == UNCLEAR:
                    raise ShapeError(_unclear(leaf, self.size))


def row_inputs(named: Mapping[str, Any], first: Any, whole: Mapping[str, bool]) -> RowInputs:
    """Describe inputs and targets by rows.

    Args:
        named: the inputs by name, and the targets by "targets".
        first: the tensor or array whose dim 0 is the batch.
        whole: names to whether every microbatch gets them in full.
    """
    return RowInputs(first.shape[0], {name: _leaves(name, value, first, whole) for name, value in named.items()})


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, which is not imported for that."""
    return hasattr(value, "__array_interface__") and hasattr(value, "dtype")


def _has_rows(value: Any, size: int) -> bool:
    """Whether a value is [batch, ..]."""
    return (isinstance(value, T) or is_array(value)) and value.ndim > 0 and value.shape[0] == size


def first_with_rows(inputs: Mapping[str, Any], whole: Mapping[str, bool]) -> Any:
    """The tensor or array whose dim 0 is the batch: token ids or embeddings, of another model the first, or the first
    that an object has.

    Raises: ShapeError `no-inputs`.
    """
    ordered = sorted(
        (item for item in inputs.items() if not whole.get(item[0], False)), key=lambda i: i[0] not in FIRST
    )
    leaves = [
        leaf for _, value in ordered for leaf in ((value,) if isinstance(value, T) else private.tree_leaves(value))
    ]
    members = (member for leaf in leaves for member in _members(leaf))  # of objects, if that is all
    for value in chain(leaves, members):
        if (isinstance(value, T) or is_array(value)) and value.ndim:
            return value
    what = "no tensor with a batch was passed to the step"
    raise ShapeError(Problem("no-inputs", what, fix="step(input_ids=..., targets=...)"))


def _leaves(name: str, value: Any, first: Any, whole: Mapping[str, bool]) -> tuple[list[Leaf], Any]:
    is_listed = partial(_has_entry_for_each_row, size=first.shape[0])
    values, structure = private.tree_flatten(value, is_leaf=is_listed)
    clear = name == TARGETS and isinstance(value, T)
    return [Leaf(name, leaf, _kind(name, leaf, first, whole, clear)) for leaf in values], structure


def _has_entry_for_each_row(value: Any, size: int) -> bool:
    """Whether a list or tuple may have one entry for each sequence. One of tensors [batch, ..] holds these instead."""
    if not isinstance(value, (list, tuple)) or len(value) != size or isinstance(value, torch.Size):
        return False
    tensors = [leaf for leaf in private.tree_leaves(value) if isinstance(leaf, T) or is_array(leaf)]
    return not hasattr(value, "_fields") and not (tensors and all(_has_rows(leaf, size) for leaf in tensors))


def _kind(name: str, leaf: Any, first: Any, whole: Mapping[str, bool], is_clear: bool) -> str:
    size = first.shape[0]
    if whole.get(name, False):
        return WHOLE
    if isinstance(leaf, (list, tuple)) and _has_entry_for_each_row(leaf, size):
        return ROWS if name in whole else UNCLEAR
    if _has_rows(leaf, size):
        return ROWS if is_clear or name in whole or leaf is first or not _is_unclear(name, leaf, first) else UNCLEAR
    if is_block_mask(leaf):
        return BLOCKS
    return UNCLEAR if any(_has_rows(member, size) for member in _members(leaf)) else WHOLE


def _members(value: Any) -> Iterator[Any]:
    """What an object holds that is no container of PyTorch's."""
    if not isinstance(value, T) and not is_array(value):
        members = value if isinstance(value, Mapping) else attributes_of(value)
        yield from members.values()


def _is_unclear(name: str, leaf: Any, first: Any) -> bool:
    """Whether the dim 0 of a tensor or array may be another dim than that of the batch, which has the same size.

    A vector of numbers may be one of classes; where there are as many sequences as tokens, a vector may be one of
    positions, and a square a mask of tokens by tokens. Names of `transformers` for tensors [batch, tokens] are known.
    """
    batch = first.shape[0]
    if first.ndim == 1:
        return False
    is_square, holds_ids = first.shape[1] == batch, _kind_of_numbers(leaf) == "integer"
    if leaf.ndim == 1:
        return _kind_of_numbers(leaf) == "floating" or is_square
    return is_square and tuple(leaf.shape) == (batch, batch) and not holds_ids and name != "attention_mask"


def _kind_of_numbers(leaf: Any) -> str:
    if isinstance(leaf, T):
        is_floating, is_bool = leaf.is_floating_point() or leaf.is_complex(), leaf.dtype == torch.bool
    else:
        is_floating, is_bool = leaf.dtype.kind in "fc", leaf.dtype.kind == "b"
    return "floating" if is_floating else "bool" if is_bool else "integer"


def _unclear(leaf: Leaf, size: int) -> Problem:
    shown, value = leaf.name, leaf.value
    everyone = f'whole={{"{shown}": True}} if every microbatch needs all of it'
    splits = f'whole={{"{shown}": False}} if it has a value for each of the {size} sequences, which are split'
    if isinstance(value, T) or is_array(value):
        what = f"{shown} {list(value.shape)} has the size of the batch, {size}, and may be no batch"
    elif isinstance(value, (list, tuple)):
        what = (
            f"{shown}, a {type(value).__name__}, has as many entries as the batch has sequences, {size}, and may be no "
            "batch"
        )
    else:
        what = f"{shown}, a {type(value).__name__}, holds tensors of the size of the batch, {size}, and is not split"
        splits = "pass its tensors as inputs of their own, or in a dict, if they are split"
    return Problem(
        "unclear-batch-dim",
        f"{what}: it is not clear whether it is split into microbatches",
        fix=f"{splits}; {everyone}",
    )
