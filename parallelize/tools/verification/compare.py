"""The six quantities that are compared, each by its largest relative error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from parallelize.tools.verification.relations import error_of

T = torch.Tensor
ORDER = ("loss", "outputs", "input gradients", "gradients", "gradient norm", "weights")
FLOOR = 1e-3  # of the largest tensor of a kind: a tensor that is nearly zero has no meaningful relative error


@dataclass
class ReferenceValues:
    """What the unsharded model computes. Parameters are listed under every name that they have."""

    loss: T
    outputs: list[T]  # every floating-point tensor of the model's output
    inputs: T | None
    embedding: str  # the module at whose output the gradient `inputs` was taken, or empty
    gradients: dict[str, T]
    norm: T
    weights: dict[str, T]
    _largest_of_kind: dict[str, float] = field(default_factory=dict)

    def tensors(self, kind: str) -> dict[str, T]:
        return {"gradients": self.gradients, "weights": self.weights}[kind]

    def floor(self, kind: str, name: str) -> float:
        """The smallest magnitude that the error of a tensor is divided by.

        A bias's gradient sums the same terms as its weight's gradient and may cancel to zero (a key's bias does not change
        a softmax). So its error is relative to the weight's gradient.
        """
        weight = self.tensors(kind).get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
        largest = _largest(weight) if weight is not None and kind == "gradients" else 0.0
        return max(largest, FLOOR * self._largest_of(kind))

    def _largest_of(self, kind: str) -> float:
        if kind not in self._largest_of_kind:
            self._largest_of_kind[kind] = max(map(_largest, self.tensors(kind).values()), default=0.0)
        return self._largest_of_kind[kind]


def _largest(tensor: T) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass
class Errors:
    """The largest error of each compared quantity, with the name of its tensor.

    Attributes:
        wrong: parameters whose gradients exceed the bound, with their errors.
        failed: the error that ended the step, or empty.
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
    errors: Errors, kind: str, actual: Mapping[str, T], reference: ReferenceValues, names: set[str], bound: float
) -> None:
    """Compare the gradients or weights (`kind`) of the parameters `names`, which a rank has."""
    expected = reference.tensors(kind)
    errors.add(kind, 0.0)
    for name in sorted(names):
        if name not in expected and name not in actual:
            continue  # frozen or unused
        if name in expected and name in actual:
            tensor = actual[name]
            error = error_of(tensor, expected[name].to(tensor.device), reference.floor(kind, name))
        else:
            error = float("inf")
        errors.add(kind, error, name)
        if kind == "gradients" and error > bound:
            errors.wrong[name] = error
