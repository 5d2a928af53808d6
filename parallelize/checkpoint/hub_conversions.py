"""How transformers turns the tensors of a checkpoint into those of a model, and back: its own conversions, run on names.

The one file of checkpoints that imports transformers, and only for a model that is made of it. Its conversions run on
tensors without data (`checkpoint/traced.py`), so they may be of any kind and any version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.boxes import Part
from parallelize.checkpoint.traced import Traced, named
from parallelize.errors import CheckpointError, Problem, short_list

Shape = tuple[int, ...]
Compute = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Made:
    """A tensor of the model, made of a checkpoint's.

    Attributes:
        sources: names of tensors of the checkpoint, in the order in which they are used.
        parts: which boxes of them. None where only `compute` makes it: from whole tensors by name, the whole tensor.
    """

    shape: Shape
    sources: tuple[str, ...]
    parts: tuple[Part, ...] | None
    compute: Compute


@dataclass
class Converted:
    """A checkpoint seen by a model.

    Attributes:
        made: by name of the model. strange: names of the checkpoint that lead nowhere, and where they would lead.
        failed: conversions that do not fit what the checkpoint holds, and the names of the model they were for.
    """

    made: dict[str, Made] = field(default_factory=dict)
    strange: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: list[tuple[Problem, tuple[str, ...]]] = field(default_factory=list)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is a PreTrainedModel; asks without importing transformers."""
    found = ((base.__module__, base.__name__) for base in type(module).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in found


def _machinery() -> SimpleNamespace | None:
    """What is used of transformers (all there since 5.0); None where a version has other names.

    Without it names are taken as they are, and those that need a conversion show as missing and unexpected.
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


class WholeModel:
    """A model as conversions see it: parameters in the shapes of the whole model, all else as the module says.

    With pipeline stages most parameters are absent from the module itself.
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
class Step:
    """One conversion, or renaming, and what it takes of the checkpoint: (name, the pattern that the name matched)."""

    target: str
    converter: Any
    taken: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.taken)

    @property
    def title(self) -> str:
        operations = ", ".join(type(op).__name__ for op in getattr(self.converter, "operations", ()))
        return operations or "renaming"

    def takes(self, name: str, pattern: str | None) -> bool:
        """Add a tensor, unless what it leads to is there already."""
        if self.taken and (self.converter is None or pattern is None):
            return False
        self.taken.append((name, pattern))
        return True

    def run(self, model: WholeModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the model, by name. Raises what the conversion raises."""
        if self.converter is None:
            return {self.target: tensors[self.taken[0][0]]}
        converter = deepcopy(self.converter)
        for name, pattern in self.taken:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def compute(self, model: WholeModel, target: str) -> Compute:
        return lambda tensors: self.run(model, tensors)[target].contiguous()


def convert(module: nn.Module, shapes: Mapping[str, Shape], held: Mapping[str, Shape]) -> Converted:
    """Which tensors of a checkpoint make which of the model.

    Args:
        shapes: of all tensors of the whole model that a checkpoint stores, by each of their names.
        held: shapes of the tensors of the checkpoint, by name.
    """
    found = Converted()
    model = WholeModel(module, shapes)
    for step in _steps(module, shapes, held, found.strange):
        try:
            made = _trace(step, model, held)
        except Exception as error:  # conversions check shapes by whatever they run into
            found.failed.append((_unfit(step, held, error), _targets(step.target, step.converter)))
            continue
        for name, value in made.items():
            if name not in shapes or name in found.made:
                found.strange |= dict.fromkeys(step.sources, (name,))
                continue
            parts = value.parts if isinstance(value, Traced) else None
            sources = value.sources if parts is not None else step.sources
            found.made[name] = Made(tuple(value.shape), sources, parts, step.compute(model, name))
    return found


def _trace(step: Step, model: WholeModel, held: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """What a step makes: from tensors that know their boxes, or where it cannot work on those, from shapes alone."""
    try:
        return step.run(model, {name: named(name, held[name]) for name in step.sources})
    except Exception:
        return step.run(model, {name: torch.empty(held[name], device="meta") for name in step.sources})


def _unfit(step: Step, held: Mapping[str, Shape], error: Exception) -> Problem:
    what = f"the conversion ({step.title}) does not fit the {len(step.taken)} tensors that the checkpoint holds for it"
    shown = [f"{name} {list(held[name])}" for name in step.sources]
    rows = (("checkpoint", short_list(shown, 6)), ("why", str(error).partition("\n")[0] or type(error).__name__))
    return Problem("wrong-shape", what, step.target, rows, "complete the checkpoint, or check the model's config")


def _steps(
    module: nn.Module, shapes: Mapping[str, Shape], held: Mapping[str, Shape], strange: dict[str, tuple[str, ...]]
) -> Iterator[Step]:
    """What transformers' `convert_and_load_state_dict_in_model` collects; what leads nowhere goes to `strange`."""
    steps: dict[str, Step] = {}
    for name, target, pattern, converter in _renamed(module, shapes, held):
        if target not in shapes:
            strange[name] = _targets(target, converter)
        elif not steps.setdefault(target, Step(target, converter)).takes(name, pattern):
            strange[name] = (target,)
    yield from steps.values()


def _targets(first: str, converter: Any) -> tuple[str, ...]:
    """All names of the model that a conversion makes, by the first."""
    patterns = getattr(converter, "target_patterns", [""])
    return tuple(first.replace(patterns[0], other) for other in patterns) if patterns[0] else (first,)


def _renamed(
    module: nn.Module, shapes: Mapping[str, Shape], held: Mapping[str, Shape]
) -> Iterator[tuple[str, str, str | None, Any]]:
    """(name in the checkpoint, first name in the model it leads to, pattern and converter that it matched) of each."""
    machinery = _machinery() if is_of_transformers(module) else None
    if machinery is None:
        yield from ((name, name, None, None) for name in held)
        return
    mapping = machinery.mapping_of(module)
    renamings = [one for one in mapping if isinstance(one, machinery.renaming)]
    converters = [one for one in mapping if isinstance(one, machinery.converter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix: Any = getattr(module, "base_model_prefix", None)
    for name in sorted(held, key=machinery.order):  # the order in which a list of modules is merged
        target, pattern = machinery.rename(name, renamings, converters, prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = machinery.rename(name, [], [], prefix, shapes)
        yield name, target, pattern, by_pattern.get(pattern)


def revert(module: nn.Module, state: Mapping[str, Traced]) -> dict[str, Traced]:
    """What `save_pretrained` would write for a state dict, by name of the checkpoint.

    Raises: CheckpointError `unwritable-conversion`, where a conversion cannot be reverted or moves more than boxes.
    """
    machinery = _machinery() if is_of_transformers(module) else None
    if machinery is None:
        return dict(state)
    model = WholeModel(module, {name: tuple(value.shape) for name, value in state.items()})
    try:
        written = machinery.revert(model, dict(state))
    except Exception as error:  # an operation without a reverse, or one that writes in place
        why = str(error).partition("\n")[0] or type(error).__name__
        what = f"transformers' conversions cannot be reverted for {type(module).__name__}"
        raise CheckpointError(Problem("unwritable-conversion", what, "", (("why", why),), FIX)) from error
    opaque = {name: value for name, value in written.items() if value.parts is None}
    if opaque:
        raise CheckpointError(*(_unwritable(name, value) for name, value in opaque.items()))
    return written


FIX = "load and save this model with transformers, or save the model's own names"


def _unwritable(name: str, value: Traced) -> Problem:
    what = f"{value.op} computes it, so no rank can write its own part"
    return Problem("unwritable-conversion", what, name, (("from", short_list(value.sources, 6)),), FIX)
