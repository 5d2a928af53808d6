"""What the load-balancing loss reads of the routers' logits: sums over layers and rows, which ranks and pipeline stages add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

T = torch.Tensor
RECORDED = "_can_record_outputs"
"""Attribute by which classes of `transformers` say which output of which module is recorded under a name."""


@dataclass(frozen=True)
class RouterSums:
    """Sums over layers and rows, in float32.

    Attributes:
        counts: [experts], the number of choices of each.
        probabilities: [experts], with a graph.
        rows: the number of rows, each counted once a layer.
        divided: whether ranks of the sequence-parallel region have other rows.
    """

    counts: T
    probabilities: T
    rows: T
    divided: bool

    def parts(self) -> tuple[T, T, T, bool]:
        """The attributes in order, for the constructor of another rank."""
        return self.counts, self.probabilities, self.rows, self.divided

    def __add__(self, other: RouterSums | None) -> RouterSums:
        if other is None:
            return self
        probabilities = self.probabilities + other.probabilities
        return RouterSums(
            self.counts + other.counts, probabilities, self.rows + other.rows, self.divided or other.divided
        )


def sums_of(logits: T, top_k: int, weights: T | None, divided: bool) -> RouterSums:
    """The sums of one layer.

    Args:
        logits: [rows, experts].
        top_k: the number of choices of a row.
        weights: [rows], 0 for padding; None: 1.
    """
    weights = torch.ones(len(logits), device=logits.device).float() if weights is None else weights
    routing = logits.softmax(-1)
    with torch.no_grad():
        choices = routing.topk(top_k, -1).indices
        counts = weights.new_zeros(logits.shape[-1])
        counts.scatter_add_(0, choices.reshape(-1), weights.repeat_interleave(top_k))
    return RouterSums(counts, (routing.float() * weights[:, None]).sum(0), weights.sum(), divided)


def recorded_routers(root: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) of each router whose logits `transformers` records."""
    specs: list[Any] = []
    for inner in root.modules():
        recorded = getattr(type(inner), RECORDED, None)
        spec = recorded.get("router_logits", []) if isinstance(recorded, dict) else []
        specs.extend(spec if isinstance(spec, list) else [spec])
    for name, inner in root.named_modules():
        for spec in specs:
            target, layer = getattr(spec, "target_class", None), getattr(spec, "layer_name", None)
            if target is not None and isinstance(inner, target) and (layer is None or f".{layer}." in f".{name}."):
                yield inner, spec.index
                break
