"""The conversions of transformers between the tensors of a checkpoint and those of a model.

Its own conversions run here, on tensors without data (`traced.py`), so that any conversion of any version works. This
room imports transformers in this file only, and only for a model of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parallelize.base.boxes import Part
from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.checkpoint.hub.traced import Traced, named

Shape = tuple[int, ...]
_FIX = "load and save this model with transformers, or save the model's own names"
Compute = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the model, converted from tensors of a checkpoint.

    Attributes:
        shape: the shape of the tensor.
        sources: names of tensors of the checkpoint, in the order in which they are used.
        parts: boxes that cover it. None if it is not made of boxes; then only `compute` returns it.
        compute: returns the full tensor, from full tensors of the checkpoint by name.
    """

    shape: Shape
    sources: tuple[str, ...]
    parts: tuple[Part, ...] | None
    compute: Compute


@dataclass
class ConvertedCheckpoint:
    """A checkpoint after conversion to the names and shapes of a model.

    Attributes:
        tensors: the tensors by their name in the model.
        unused: tensors of the checkpoint that the model has no use for, and the names to which they would be converted.
        failed: problems of conversions that do not match the tensors of the checkpoint, with the names in the model
            that they would have made.
    """

    tensors: dict[str, ConvertedTensor] = field(default_factory=dict)
    unused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: list[tuple[Problem, tuple[str, ...]]] = field(default_factory=list)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is a PreTrainedModel. Does not import transformers."""
    classes = ((base.__module__, base.__name__) for base in type(module).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in classes


def _machinery() -> SimpleNamespace | None:
    """The functions of transformers that are used, which exist since 5.0. None if one of them is missing.

    Without them, names are not converted. Tensors that need a conversion are then reported as missing and unexpected.
    """
    try:
        from transformers import conversion_mapping as mapping
        from transformers import core_model_loading as core

        return SimpleNamespace(
            mapping_of=mapping.get_model_conversion_mapping,
            renaming=core.WeightRenaming,
            converter=core.WeightConverter,
            rename=core.rename_source_key,
            order=core.dot_natural_key,
            revert=core.revert_weight_conversion,
        )
    except (ImportError, AttributeError):
        return None


class FullShapeModel:
    """The model that is passed to conversions: parameters have their full shapes, other attributes are those of the
    module.

    In a pipeline, the module itself does not have the parameters of other stages.
    """

    def __init__(self, module: nn.Module, shapes: Mapping[str, Shape]):
        self._module, self._shapes = module, shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            raise AttributeError(f"{type(self._module).__name__} has no parameter {name}")
        return torch.empty(self._shapes[name], device="meta")

    get_parameter_or_buffer = get_buffer = get_parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass
class ConversionStep:
    """One conversion or renaming.

    Attributes:
        target: name in the model; for a conversion to several tensors, the first.
        converter: a WeightConverter of transformers; None for a renaming.
        inputs: (name in the checkpoint, pattern of the converter that it matched).
    """

    target: str
    converter: Any
    inputs: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.inputs)

    @property
    def title(self) -> str:
        operations = ", ".join(type(op).__name__ for op in getattr(self.converter, "operations", ()))
        return operations or "renaming"

    def add(self, name: str, pattern: str | None) -> bool:
        """Add an input. Returns False if the target has one already and no further ones are combined with it."""
        if self.inputs and (self.converter is None or pattern is None):
            return False
        self.inputs.append((name, pattern))
        return True

    def run(self, model: FullShapeModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the model, by name. Raises what the conversion raises."""
        if self.converter is None:
            return {self.target: tensors[self.inputs[0][0]]}
        converter = deepcopy(self.converter)
        for name, pattern in self.inputs:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        outputs = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in outputs.items()}

    def compute(self, model: FullShapeModel, target: str) -> Compute:
        return lambda tensors: self.run(model, tensors)[target].contiguous()


def convert(module: nn.Module, shapes: Mapping[str, Shape], checkpoint: Mapping[str, Shape]) -> ConvertedCheckpoint:
    """Find out which tensors of a checkpoint are converted to which tensors of a model.

    Args:
        module: the model, or one pipeline stage of it.
        shapes: full shapes of all tensors of the unsharded model that a checkpoint stores, by each of their names.
        checkpoint: shapes of the tensors of the checkpoint, by name.
    """
    result = ConvertedCheckpoint()
    model = FullShapeModel(module, shapes)
    for step in _steps(module, shapes, checkpoint, result.unused):
        try:
            outputs = _trace(step, model, checkpoint)
        except Exception as error:  # conversions check shapes in their own ways
            result.failed.append((_conversion_problem(step, checkpoint, error), _targets(step.target, step.converter)))
            continue
        for name, value in outputs.items():
            if name not in shapes or name in result.tensors:
                result.unused |= dict.fromkeys(step.sources, (name,))
                continue
            parts, sources = None, step.sources
            if isinstance(value, Traced) and value.parts is not None:
                parts, sources = value.parts, value.sources
            result.tensors[name] = ConvertedTensor(tuple(value.shape), sources, parts, step.compute(model, name))
    return result


def _trace(step: ConversionStep, model: FullShapeModel, checkpoint: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """The outputs of a step for traced tensors; or, if it fails on those, for plain tensors on the meta device."""
    try:
        return step.run(model, {name: named(name, checkpoint[name]) for name in step.sources})
    except Exception:
        return step.run(model, {name: torch.empty(checkpoint[name], device="meta") for name in step.sources})


def _conversion_problem(step: ConversionStep, checkpoint: Mapping[str, Shape], error: Exception) -> Problem:
    what = f"the conversion ({step.title}) does not match the {len(step.inputs)} tensors that the checkpoint has for it"
    inputs = [f"{name} {list(checkpoint[name])}" for name in step.sources]
    rows = (("checkpoint", short_list(inputs, 6)), ("why", str(error).partition("\n")[0] or type(error).__name__))
    return Problem("wrong-shape", what, step.target, rows, "complete the checkpoint, or check the model's config")


def _steps(
    module: nn.Module, shapes: Mapping[str, Shape], checkpoint: Mapping[str, Shape], unused: dict[str, tuple[str, ...]]
) -> Iterator[ConversionStep]:
    """The steps that `convert_and_load_state_dict_in_model` of transformers collects. Fills `unused`."""
    steps: dict[str, ConversionStep] = {}
    for name, target, pattern, converter in _renamed(module, shapes, checkpoint):
        if target not in shapes:
            unused[name] = _targets(target, converter)
        elif not steps.setdefault(target, ConversionStep(target, converter)).add(name, pattern):
            unused[name] = (target,)
    yield from steps.values()


def _targets(first: str, converter: Any) -> tuple[str, ...]:
    """The names in the model of all outputs of a conversion. `first`: of its first output."""
    patterns = getattr(converter, "target_patterns", [""])
    return tuple(first.replace(patterns[0], other) for other in patterns) if patterns[0] else (first,)


def _renamed(
    module: nn.Module, shapes: Mapping[str, Shape], checkpoint: Mapping[str, Shape]
) -> Iterator[tuple[str, str, str | None, Any]]:
    """(name in the checkpoint, first name in the model, matched pattern, its converter) of each tensor."""
    machinery = _machinery() if is_of_transformers(module) else None
    if machinery is None:
        yield from ((name, name, None, None) for name in checkpoint)
        return
    mapping = machinery.mapping_of(module)
    renamings = [entry for entry in mapping if isinstance(entry, machinery.renaming)]
    converters = [entry for entry in mapping if isinstance(entry, machinery.converter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix: Any = getattr(module, "base_model_prefix", None)
    for name in sorted(checkpoint, key=machinery.order):  # the order in which transformers merges a list of modules
        target, pattern = machinery.rename(name, renamings, converters, prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = machinery.rename(name, [], [], prefix, shapes)
        yield name, target, pattern, by_pattern.get(pattern)


def revert(module: nn.Module, state: Mapping[str, Traced]) -> dict[str, Traced]:
    """The tensors that `save_pretrained` would write for a state dict, by name in the checkpoint.

    Raises: CheckpointError `unwritable-conversion`, if a conversion cannot be reverted, or its result is not made of
        boxes.
    """
    machinery = _machinery() if is_of_transformers(module) else None
    if machinery is None:
        return dict(state)
    model = FullShapeModel(module, {name: tuple(value.shape) for name, value in state.items()})
    try:
        written = machinery.revert(model, dict(state))
    except Exception as error:  # an operation without an inverse, or one that writes in place
        why = str(error).partition("\n")[0] or type(error).__name__
        what = f"transformers' conversions cannot be reverted for {type(module).__name__}"
        raise CheckpointError(Problem("unwritable-conversion", what, "", (("why", why),), _FIX)) from error
    opaque = {name: value for name, value in written.items() if value.parts is None}
    if opaque:
        raise CheckpointError(*(_unwritable(name, value) for name, value in opaque.items()))
    return written


def _unwritable(name: str, value: Traced) -> Problem:
    what = f"{value.op} computes it, so ranks cannot write their parts of it separately"
    return Problem("unwritable-conversion", what, name, (("from", short_list(value.sources, 6)),), _FIX)
