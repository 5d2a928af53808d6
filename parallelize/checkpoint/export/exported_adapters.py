"""Weights with their LoRA in them, for an export of a model whose adapters are beside its weights.

The model stays as it is. `merge_adapter` before an export and `unmerge_adapter` after it would round 16-bit weights
twice, and a run that exports after each step would drift. Here sums are made in a copy of what a bucket sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.base.boxes import Box
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.hub.adapter_folder import unmerged_layers
from parallelize.checkpoint.hub.tensor_messages import StridedRegion
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.plan.adapters import BASE
from parallelize.plan.model_facts import named_once
from parallelize.state.stage_values import unsharded

T = torch.Tensor
Regions = Mapping[str, Sequence[tuple[Box, StridedRegion]]]
"""Name -> the boxes that this rank owns, and where they are in its local tensor."""


@dataclass(frozen=True)
class LowRankUpdate:
    """scale * left @ right, which is added to a weight [rows, columns]. left: [rows, r]. right: [r, columns]."""

    left: T
    right: T
    scale: float

    def of(self, box: Box) -> T:
        """Its part for a box of the weight, in at least float32."""
        (top, bottom), (first, stop) = box
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return (self.left[top:bottom].to(dtype) @ self.right[:, first:stop].to(dtype)) * self.scale


class MergedValues(Mapping[str, T]):
    """Local tensors, with the adapters added to what this rank owns of their weights. A sum is made where it is asked
    for, and kept until the next one is."""

    def __init__(self, values: Mapping[str, T], updates: Mapping[str, list[LowRankUpdate]], regions: Regions):
        self._values, self._updates, self._regions = values, updates, regions
        self._last: tuple[str, T] | None = None

    def __getitem__(self, name: str) -> T:
        updates = self._updates.get(name)
        if not updates:
            return self._values[name]
        if self._last is None or self._last[0] != name:
            self._last = name, self._merged(name, updates)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @torch.no_grad()
    def _merged(self, name: str, updates: list[LowRankUpdate]) -> T:
        local = self._values[name]
        merged = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device=local.device)
        merged.copy_(local)
        for box, region in self._regions[name]:
            owned = region.of(merged, 0)
            total = owned.to(torch.promote_types(owned.dtype, torch.float32))
            for update in updates:
                total = total + update.of(box)
            owned.copy_(total)  # rounded once
        return merged


def lora_updates(on_mesh: ModelOnMesh) -> dict[str, list[LowRankUpdate]]:
    """Name of a weight in the full model -> what its active LoRA adds to it. A collective over the axes that shard the
    adapters, whose full tensors each rank of a stage has then.

    Raises: CheckpointError `unmerged-adapters` for adapters of other kinds.
    """
    modules, tied = dict(on_mesh.module.named_modules()), _tied(on_mesh)
    updates = {}
    for name in unmerged_layers(on_mesh.module):
        layer: Any = modules[name]
        if getattr(layer._modules[BASE], "weight", None) is None:  # on another stage
            continue
        what = _unlike_lora(layer, on_mesh.canonical(f"{name}.{BASE}.weight") in tied)
        if what:
            fix = "merge_adapter before and unmerge_adapter after; or names='peft', the adapters alone"
            text = f"{name} has {what}, which an export does not add to a weight"
            raise CheckpointError(Problem("unmerged-adapters", text, fix=fix))
        weight = on_mesh.canonical(f"{name}.{BASE}.weight")
        updates[weight] = [_update(layer, adapter) for adapter in _active(layer)]
    return updates


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


def _tied(on_mesh: ModelOnMesh) -> set[str]:
    """The first names of parameters that have several in the full model: a stage may have one of them alone."""
    if on_mesh.cut is not None:
        return {name for name, fact in on_mesh.cut.facts.parameters.items() if len(fact.names) > 1}
    return {names[0] for names, _ in named_once(on_mesh.module) if len(names) > 1}


def _unlike_lora(layer: Any, is_tied: bool) -> str:
    """What makes the adapters of a layer more than a product that is added to its weight; empty where nothing does."""
    if not hasattr(layer, "lora_embedding_A") or hasattr(layer, "parameter_name"):
        return f"adapters of a {type(layer).__name__}"
    base = layer._modules[BASE]
    active = _active(layer)
    if not active or not isinstance(getattr(base, "weight", None), T) or base.weight.ndim != 2:
        return f"adapters of a {type(base).__name__}"
    if variants := [name for name in active if layer.lora_variant.get(name) is not None]:
        return f"a variant of LoRA ({type(layer.lora_variant[variants[0]]).__name__})"
    if any(layer.lora_bias.get(name) for name in active):
        return "a LoRA with a bias"
    if is_tied:
        return "a weight that is tied, so that the other layer would get them too"
    return ""


def _update(layer: Any, adapter: str) -> LowRankUpdate:
    """With the operands in the order of the weight's dims: linears have [out, in], tables and Conv1D the other."""
    scale = float(layer.scaling[adapter])
    if adapter in layer.lora_A:
        first, second = (unsharded(part[adapter].weight).detach() for part in (layer.lora_A, layer.lora_B))
    else:
        first, second = (unsharded(part[adapter]).detach() for part in (layer.lora_embedding_A, layer.lora_embedding_B))
    is_transposed = adapter not in layer.lora_A or getattr(layer, "fan_in_fan_out", False)
    return LowRankUpdate(first.T, second.T, scale) if is_transposed else LowRankUpdate(second, first, scale)
