"""What each rank stores of a model, as one short message: tensors that are laid out alike share the text of their
boxes.

names    of this rank's tensors, in the order of the model
layouts  different [dtype, boxes that the rank owns], and layout_of: for each tensor, the number of its own
shapes   on the first rank of a pipeline stage: different full shapes, and shape_of; several names of a tensor; which are buffers
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallelize.base.boxes import Box
from parallelize.checkpoint.hub.names import ModelTensor
from parallelize.checkpoint.hub.pretrained import all_names
from parallelize.checkpoint.run.local_tensors import BoxToWrite, LocalTensor, ModelOnMesh
from parallelize.plan.model_facts import named_once

Owned = Mapping[str, tuple[str, tuple[Box, ...]]]
"""Name in the model -> (dtype, boxes) of what one rank owns."""


def describe_tensors(
    on_mesh: ModelOnMesh, local: Mapping[str, LocalTensor], owned: Mapping[str, Sequence[BoxToWrite]]
) -> dict[str, Any]:
    """The message of this rank, as plain values of JSON.

    Args:
        local: name in the model -> tensor. owned: likewise, the boxes that this rank owns.

    Raises: CheckpointError `unsavable-dtype`.
    """
    layouts = _Table()
    message: dict[str, Any] = {"names": list(local)}
    message["layout_of"] = [
        layouts.number((tensor.about.get("compute") or tensor.dtype, tuple(item.box for item in owned[name])))
        for name, tensor in local.items()
    ]
    message["layouts"] = layouts.values
    if on_mesh.is_first:
        shapes, parameters = _Table(), {on_mesh.canonical(names[0]) for names, _ in named_once(on_mesh.module)}
        message["shape_of"] = [shapes.number(tuple(tensor.stored.shape)) for tensor in local.values()]
        message["shapes"] = shapes.values
        names = {name: all_names(on_mesh, tensor) for name, tensor in local.items()}
        message["aliases"] = {name: fqns for name, fqns in names.items() if fqns != [name]}
        message["buffers"] = [name for name in local if name not in parameters]
    return message


class _Table:
    """Different values by their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        return list(self._numbers)


def owned_by_rank(messages: Iterable[Mapping[str, Any]]) -> list[Owned]:
    """What each rank owns, from the messages of all ranks."""
    return [_owned(message) for message in messages]


def _owned(message: Mapping[str, Any]) -> Owned:
    layouts = [
        (dtype, tuple(tuple((start, stop) for start, stop in box) for box in boxes))
        for dtype, boxes in message["layouts"]
    ]
    return {name: layouts[number] for name, number in zip(message["names"], message["layout_of"], strict=True)}


def tensors_of_model(messages: Iterable[Mapping[str, Any]]) -> list[ModelTensor]:
    """Every tensor of the unsharded model, including those of other pipeline stages."""
    by_name: dict[str, ModelTensor] = {}
    for message in messages:
        if "shapes" not in message:
            continue
        shapes, buffers = [tuple(shape) for shape in message["shapes"]], set(message["buffers"])
        for name, number in zip(message["names"], message["shape_of"], strict=True):
            names = tuple(message["aliases"].get(name, (name,)))
            by_name.setdefault(name, ModelTensor(name, names, shapes[number], name in buffers))
    return list(by_name.values())
