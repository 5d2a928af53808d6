"""What a stage's forward reads of the parameters of modules on other stages, outside of their calls.

Some forwards ask
for the device or dtype of the embedding's weight on every stage. They get NaN of its shape, which takes the memory
of one element. A forward that reads values computes NaN, which is an error of the step. Outside of the forward of a
stage the parameters are None, as initializers and state dicts expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.adapters import BASE, prompt_encoders
from parallelize.state.records import Cut, applied, mark_applied

T = torch.Tensor


class AbsentParameters:
    """Those of the units of other stages; of layers not those of modules inside, which are many and which nothing
    outside reads.

    Args:
        module: the root, after `cut_pipeline`.
        cut: its record.
    """

    def __init__(self, module: nn.Module, cut: Cut):
        self.parameters: list[tuple[nn.Module, str, tuple[int, ...], torch.dtype]] = []
        self.names: list[str] = []
        self.dtypes: dict[nn.Module, torch.dtype] = {}  # of units
        facts = cut.facts
        embeddings = (f"{name}.embedding" for name in prompt_encoders(facts))  # their wrapper asks for its device
        units = [
            unit for unit in (*cut.stages.units, *embeddings) if unit in facts.module_fqns and not cut.present(unit)
        ]
        layers = cut.stages.cuts.layers
        inside = [f"{unit}." for unit in units if unit and not (layers and unit.rpartition(".")[0] == layers)]
        # as ViT's `patch_embeddings.projection`
        inner = (name for name in facts.module_fqns if name.startswith(tuple(inside)))
        for name in dict.fromkeys((*units, *inner)):
            for key, shape in facts.modules[facts.module_fqns[name]].shapes.items():
                dtype = getattr(torch, facts.parameters[facts.parameter_fqns[f"{name}.{key}"]].dtype)
                if dtype.is_floating_point:
                    self.parameters.append((module.get_submodule(name), key, shape, dtype))
                    self.names.append(f"{name}.{key}")
                    unit = next((unit for unit in units if f"{name}.".startswith(f"{unit}.")), name)
                    self.dtypes.setdefault(module.get_submodule(unit), dtype)

    @contextmanager
    def shown(self, device: torch.device, is_watched: bool) -> Iterator[list[str]]:
        """Within it, attributes of the modules are these tensors, on `device`.

        is_watched: note the names of those that the forward computes with, in the list that is yielded.
        """
        names: list[str] = []
        for (owner, key, shape, dtype), name in zip(self.parameters, self.names, strict=True):
            nan = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
            owner.__dict__[key] = _AbsentParameter.of(nan, name, names) if is_watched else nan
        for unit, dtype in self.dtypes.items():  # where a tower that is asked for its dtype looks
            unit.__dict__["parameters"] = partial(_only, torch.full((), torch.nan, dtype=dtype, device=device))
        try:
            yield names
        finally:
            for owner, key, _, _ in self.parameters:
                owner.__dict__.pop(key, None)
            for unit in self.dtypes:
                unit.__dict__.pop("parameters", None)


class _AbsentParameter(T):
    """A parameter of another stage, which says so where a forward does more than ask for its dtype, device or shape.
    What is computed from it is a plain tensor."""

    fqn: str
    names: list[str]

    @classmethod
    def of(cls, value: T, fqn: str, names: list[str]) -> _AbsentParameter:
        watched = value.as_subclass(cls)
        watched.fqn, watched.names = fqn, names
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.plain_functions():
            out = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, T) for leaf in private.tree_leaves(out)):
            for leaf in private.tree_leaves((args, kwargs)):
                if isinstance(leaf, cls) and leaf.fqn not in leaf.names:
                    leaf.names.append(leaf.fqn)
        return out


def _only(parameter: torch.Tensor, recurse: bool = True) -> Iterator[torch.Tensor]:
    """In the place of a module's `parameters`."""
    yield parameter


def drop_parameters(module: nn.Module) -> None:
    """Set all parameters and buffers of a module to None. Their shapes stay in its record."""
    for inner in module.modules():
        new = {key: (tuple(p.shape), p.dtype) for key, p in inner._parameters.items() if p is not None}
        if new:
            mark_applied(inner, absent={**applied(inner).absent, **new})
            # some modules print the shape of their weight
            inner.__dict__["extra_repr"] = partial(str, "on another stage")
        if BASE in inner._modules:
            inner.__dict__ |= {"merge": MethodType(_mark_merged, inner), "unmerge": MethodType(_mark_unmerged, inner)}
        for name in inner._parameters:
            inner._parameters[name] = None
        for name in inner._buffers:
            inner._buffers[name] = None


def _mark_merged(layer: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """What a merge leaves of an adapted layer that another stage has."""
    layer.merged_adapters = list(adapter_names or layer.active_adapters)


def _mark_unmerged(layer: Any) -> None:
    layer.merged_adapters = []
