"""What is sent between two stages: the tensors of a call, and a header with their structure.

The header is sent once for each signature of a step's inputs (shapes, dtypes, mode). Both sides store it, and later steps
send tensors only.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor


@dataclass(frozen=True)
class Meta:
    """Shape, dtype and `requires_grad` of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: T) -> Meta:
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    def empty(self, device: torch.device) -> T:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def absent(self, device: torch.device) -> T:
        """The output of an absent module: NaN, so that a use of it is detected, in the memory of one element."""
        value = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Nested:
    """A nested value with a `Meta` in place of each tensor.

    Attributes:
        leaves: the leaves in order, each a `Meta` or a value that is not a tensor.
        structure: the pytree structure.
    """

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, value: Any) -> tuple[Nested, list[T]]:
        """(the value without its tensors, the tensors in order)."""
        leaves, structure = private.tree_flatten(value)
        form = tuple(Meta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(form, structure), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def metas(self) -> list[Meta]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Meta)]

    def fill(self, make: Callable[[Meta], T]) -> Any:
        """The nested value, with a tensor from `make` for each `Meta`, in order."""
        leaves = [make(leaf) if isinstance(leaf, Meta) else leaf for leaf in self.leaves]
        return private.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True)
class StageHeader:
    """What both sides of a stage boundary store.

    Attributes:
        content: what is sent: {"call": {position or name: value}, "skips": {unit: value}, "router": sums or None}.
        outputs: the output of each unit of the previous stages, by name.
        compared: digests of the call's other tensors, by position or name; both sides compute these tensors.
        region: the full sequence length, where the boundary is inside the sequence-parallel region.
    """

    content: Nested
    outputs: dict[str, Nested] = field(default_factory=dict)
    compared: dict[Any, list[list[int]]] = field(default_factory=dict)
    region: int | None = None

    def to_bytes(self) -> T:
        return torch.frombuffer(bytearray(pickle.dumps(self)), dtype=torch.uint8)

    @staticmethod
    def from_bytes(raw: T) -> StageHeader:
        return unpickled(raw)


def unpickled(raw: T) -> Any:
    """An object that a rank of the same job has pickled. Never used on data from elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 warns when it unpickles its own pytree structures
        return pickle.loads(bytes(raw.cpu().tolist()))


def check_same_form(sent: Nested, known: Nested, where: str) -> None:
    """Raises: ModelError `stage-output-changed` where the output of a stage differs from earlier ones for such inputs."""
    if sent.leaves != known.leaves or sent.structure != known.structure:
        raise ModelError(
            Problem(
                "stage-output-changed",
                f"{where} sends other tensors than it did before for inputs of the same shapes",
                rows=(("before", _shown(known)), ("now", _shown(sent))),
                fix="make output shapes, and what requires a gradient, depend on input shapes only; or pad",
            )
        )


def _shown(form: Nested) -> str:
    return (
        ", ".join(f"{list(m.shape)} {m.dtype}{' grad' if m.requires_grad else ''}" for m in form.metas) or "no tensor"
    )
