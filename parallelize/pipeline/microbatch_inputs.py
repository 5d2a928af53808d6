"""The inputs of a step, split into microbatches, on every stage."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from parallelize.comm.groups import Group
from parallelize.context.inputs import FIRST
from parallelize.errors import Problem, ShapeError
from parallelize.pipeline.payload import Meta, Nested, unpickled
from parallelize.torch_private import torch_tensors as private

T = torch.Tensor


@dataclass(frozen=True)
class MicrobatchInputs:
    """The call of the model for one microbatch.

    Attributes:
        args, kwargs: the arguments of the model.
        targets: the targets of the loss.
        batch_offset: index of its first sequence in this rank's batch.
        size: number of its sequences.
        batch_size: number of sequences in this rank's batch.
    """

    args: tuple
    kwargs: dict[str, Any]
    targets: Any
    batch_offset: int = 0
    size: int = 0
    batch_size: int = 0

    def signature(self, mode: object) -> tuple:
        """Equal for microbatches from which stages compute tensors of the same shapes."""
        leaves, structure = private.tree_flatten((self.args, self.kwargs))
        form = tuple(Meta.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        return (form, repr(structure), mode)


def named_whole(whole: Collection[str] | Mapping[str, bool]) -> dict[str, bool]:
    """Names of inputs to whether every microbatch gets them in full; False: they are split."""
    if isinstance(whole, Mapping):
        return dict(whole)
    return dict.fromkeys((whole,) if isinstance(whole, str) else whole, True)


def positional_names(signature: inspect.Signature) -> list[str]:
    """The names of a method's positional arguments, without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds][1:]


def split_batch(
    args: tuple,
    kwargs: dict[str, Any],
    targets: Any,
    count: int,
    whole: Mapping[str, bool],
    names: Sequence[str] = (),
) -> list[MicrobatchInputs]:
    """Split a batch along dim 0 into `count` equal microbatches.

    The size of the batch is dim 0 of the token ids or embeddings, of another model that of the first tensor. Passed to every
    microbatch unchanged are: tensors with another dim 0 (position ids [1, S], a mask [S, S]), inputs that `whole` names, and
    values that are not tensors.

    Args:
        args, kwargs, targets: of the step.
        count: number of microbatches.
        whole: names of inputs, or "targets", to whether every microbatch gets them in full.
        names: of `args`, in order, as far as they have any.

    Raises: ShapeError `no-inputs`, `indivisible-batch`, `unclear-batch-dim`.
    """
    call = [*zip_longest(names[: len(args)], args, fillvalue=""), *kwargs.items()]
    first = _first_tensor(call, whole)
    batch = first.shape[0]
    if batch % count or not batch:
        divisors = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        what = f"a batch of {batch} sequences cannot be split into {count} microbatches"
        fix = f"with this batch: {', '.join(divisors) or 'none'} microbatches; or a batch of a multiple of {count} sequences"
        raise ShapeError(Problem("indivisible-batch", what, fix=fix))
    if count > 1:
        _refuse_unclear([*call, ("targets", targets if not isinstance(targets, T) else None)], first, whole)
    size = batch // count

    def part(name: str, value: Any, index: int) -> Any:
        def narrowed(leaf: Any) -> Any:
            is_batched = isinstance(leaf, T) and leaf.ndim and leaf.shape[0] == batch
            return leaf.narrow(0, index * size, size) if is_batched else leaf

        return value if whole.get(name, False) else private.tree_map(narrowed, value)

    return [
        MicrobatchInputs(
            tuple(part(name, value, index) for name, value in call[: len(args)]),
            {name: part(name, value, index) for name, value in kwargs.items()},
            part("targets", targets, index),
            index * size,
            size,
            batch,
        )
        for index in range(count)
    ]


def _first_tensor(call: Sequence[tuple[str, Any]], whole: Mapping[str, bool]) -> T:
    """The tensor whose dim 0 is the batch."""
    inputs = sorted((item for item in call if not whole.get(item[0], False)), key=lambda item: item[0] not in FIRST)
    leaves = private.tree_leaves([value for _, value in inputs])
    first = next((leaf for leaf in leaves if isinstance(leaf, T) and leaf.ndim), None)
    if first is None:
        what = "no tensor with a batch was passed to the step"
        raise ShapeError(Problem("no-inputs", what, fix="step(input_ids=..., targets=...)"))
    return first


def _refuse_unclear(call: Sequence[tuple[str, Any]], first: T, whole: Mapping[str, bool]) -> None:
    """Refuse tensors that may have the batch's size by chance."""
    for name, value in call:
        if name in whole:
            continue
        for leaf in private.tree_leaves(value):
            if isinstance(leaf, T) and leaf is not first and _is_unclear(name, leaf, first):
                batch, shown = first.shape[0], name or "a name"
                what = (
                    f"{name or 'an input'} {list(leaf.shape)} has the size of the batch, {batch}, and may be no batch: "
                    f"it is not clear whether it is split into microbatches"
                )
                fix = (
                    f'whole={{"{shown}": False}} if it has a value for each of the {batch} sequences, which are split; '
                )
                fix += f'whole={{"{shown}": True}} if every microbatch needs all of it'
                raise ShapeError(Problem("unclear-batch-dim", what, fix=fix))


def _is_unclear(name: str, leaf: T, first: T) -> bool:
    """Whether a tensor's dim 0 may be another dim than that of the batch, which has the same size.

    A vector of numbers may be one of classes; where there are as many sequences as tokens, a vector may be one of positions,
    and a square a mask of tokens by tokens. Names of `transformers` for tensors [batch, tokens] are known.
    """
    batch = first.shape[0]
    if not leaf.ndim or leaf.shape[0] != batch or first.ndim == 1:
        return False
    is_square = first.shape[1] == batch
    if leaf.ndim == 1:
        return leaf.is_floating_point() or leaf.is_complex() or is_square
    holds_ids = not leaf.is_floating_point() and leaf.dtype != torch.bool
    return is_square and tuple(leaf.shape) == (batch, batch) and not holds_ids and name != "attention_mask"


def broadcast_nested(value: Any, group: Group, device: torch.device, source: int = 0) -> Any:
    """The nested value of the group's rank `source`, on every rank. Two broadcasts, and one for each tensor."""
    if group.size == 1:
        return value
    form: Nested | None = None
    tensors: list[T] = []
    raw = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        form, tensors = Nested.of(value)
        raw = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
    size = torch.tensor([raw.numel()], device=device)
    group.broadcast(size, source)
    raw = raw.to(device) if group.rank == source else torch.empty(int(size), dtype=torch.uint8, device=device)
    group.broadcast(raw, source)
    if form is None:
        form = unpickled(raw)
        tensors = [meta.empty(device) for meta in form.metas]
    for index, tensor in enumerate(tensors):
        tensors[index] = tensor = tensor.to(device).contiguous()
        group.broadcast(tensor, source)
    received = iter(tensors)
    return form.fill(lambda _: next(received))
