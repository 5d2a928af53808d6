"""What travels between two stages: the tensors of a call, and a header that says how they are nested.

The header is sent once for each kind of input that a step may have (its signature: shapes, dtypes, mode); from then on both
sides know what comes, and only tensors travel.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem

T = torch.Tensor


@dataclass(frozen=True)
class Meta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, x: T) -> Meta:
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    def empty(self, device: torch.device) -> T:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def absent(self, device: torch.device) -> T:
        """What an absent module seems to have returned: not a number, so that using it shows. One element's memory."""
        value = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Nested:
    """Containers with a `Meta` where a tensor stands."""

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, value: Any) -> tuple[Nested, list[T]]:
        """(the form of a value, its tensors in order). Leaves that are no tensors are kept as they are."""
        leaves, structure = private.tree_flatten(value)
        form = tuple(Meta.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(form, structure), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def metas(self) -> list[Meta]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Meta)]

    def fill(self, make: Callable[[Meta], T]) -> Any:
        """The value again, each tensor made anew, in order."""
        leaves = [make(leaf) if isinstance(leaf, Meta) else leaf for leaf in self.leaves]
        return private.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True)
class Header:
    """What both sides of a boundary know.

    Attributes:
        content: {"call": {position or name: value}, "skips": {unit: value}}: what travels.
        outputs: what each unit up to here returned, by name.
        compared: the call's other tensors, by position or name, as digests: each side makes its own.
        region: the full sequence length where the boundary lies inside the sequence-parallel region.
    """

    content: Nested
    outputs: dict[str, Nested] = field(default_factory=dict)
    compared: dict[Any, list[list[int]]] = field(default_factory=dict)
    region: int | None = None

    def to_bytes(self) -> T:
        return torch.frombuffer(bytearray(pickle.dumps(self)), dtype=torch.uint8)

    @staticmethod
    def from_bytes(raw: T) -> Header:
        return unpickled(raw)


def unpickled(raw: T) -> Any:
    """From a rank of the same job."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own way of unpickling a structure warns in 2.13
        return pickle.loads(bytes(raw.cpu().tolist()))


def check_same_form(found: Nested, known: Nested, where: str) -> None:
    """Raises: ModelError `stage-output-changed` where a stage returns something else than it did for such inputs before."""
    if found.leaves != known.leaves or found.structure != known.structure:
        raise ModelError(
            Problem(
                "stage-output-changed",
                f"{where} passes on something else than it did for inputs of the same shapes",
                rows=(("before", _shown(known)), ("now", _shown(found))),
                fix="give the same shapes for the same inputs, or pad; after freezing parameters, make a new Pipeline",
            )
        )


def _shown(form: Nested) -> str:
    return (
        ", ".join(f"{list(m.shape)} {m.dtype}{' grad' if m.requires_grad else ''}" for m in form.metas) or "no tensor"
    )
