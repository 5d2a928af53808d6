"""The six things that are compared, each by its worst relative error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from parallelize.verification.relate import error_of

T = torch.Tensor
ORDER = ("loss", "outputs", "input gradients", "gradients", "gradient norm", "weights")
FLOOR = 1e-3  # of the largest tensor of a kind: one that is nearly zero has no relative error of its own


@dataclass
class Numbers:
    """What the unsharded model gives. Parameters by every name they have."""

    loss: T
    outputs: list[T]  # every tensor of numbers that the model gives
    inputs: T | None
    embedding: str  # the module whose output's gradient `inputs` is, or empty
    gradients: dict[str, T]
    norm: T
    weights: dict[str, T]
    _known: dict[str, float] = field(default_factory=dict)

    def floor(self, kind: str, name: str) -> float:
        """What a tensor's error is measured by, at least.

        A bias's gradient is the sum of what its weight's gradient is made of, and may cancel to nothing (a key's bias does
        not change a softmax): it is measured by that weight's.
        """
        held = {"gradients": self.gradients, "weights": self.weights}[kind]
        weight = held.get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
        own = _largest(weight) if weight is not None and kind == "gradients" else 0.0
        return max(own, FLOOR * self._largest_of(kind))

    def _largest_of(self, kind: str) -> float:
        if kind not in self._known:
            held = {"gradients": self.gradients, "weights": self.weights}[kind]
            self._known[kind] = max((_largest(one) for one in held.values()), default=0.0)
        return self._known[kind]


def _largest(tensor: T) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass
class Errors:
    """Worst error and its name, by what was compared.

    Attributes:
        wrong: parameters whose gradients are beyond the bound. failed: the error that ended the step, or empty.
    """

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def add(self, what: str, error: float, name: str = "") -> None:
        if what not in self.worst or error > self.worst[what][0]:
            self.worst[what] = error, name

    def merge(self, other: Errors) -> None:
        for what, (error, name) in other.worst.items():
            self.add(what, error, name)
        for name, error in other.wrong.items():
            self.wrong[name] = max(error, self.wrong.get(name, 0.0))
        self.failed = self.failed or other.failed

    def equal(self, bound: float) -> bool:
        return not self.failed and all(error <= bound for error, _ in self.worst.values())


def compare_named(
    errors: Errors, kind: str, got: Mapping[str, T], want: Numbers, names: set[str], bound: float
) -> None:
    """Gradients or weights of the parameters `names` that a rank has."""
    wanted = want.gradients if kind == "gradients" else want.weights
    errors.add(kind, 0.0)
    for name in sorted(names):
        if name not in wanted and name not in got:
            continue  # frozen, or not used
        missing = name not in wanted or name not in got
        error = (
            float("inf") if missing else error_of(got[name], wanted[name].to(got[name].device), want.floor(kind, name))
        )
        errors.add(kind, error, name)
        if kind == "gradients" and error > bound:
            errors.wrong[name] = error
