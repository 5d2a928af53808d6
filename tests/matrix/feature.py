"""What a row of the matrix is: one function of a side, with what it needs and what it may be refused for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import nn

from tests.matrix.axes import Axis
from tests.matrix.kinds import Kind
from tests.matrix.sides import Side

FLOAT64_BOUND = 1e-12


@dataclass(frozen=True)
class Feature:
    """A feature of the package, as a user combines it with a model and a mesh.

    Attributes:
        name: of the row. run: what both sides do.
        needs: traits of `Kind` that the model must have. without: traits that it must not have.
        names: public names and options that this row exercises, for the policy test.
        overrides: config fields of the model that differ, by the kind's name or "" for all.
        prepare: changes the model before it is placed, once for both sides (adapters, frozen parts).
        others: further models that the feature takes (a teacher, a critic), by kind; None: another one of its kind.
        bound: the largest relative error in float64.
        rounds: the dtype that it computes in, where that is not float64: the error may be three times that of the same
            on a mesh of one rank, and always two roundings, as the error of a single number may be zero by chance.
        refused: slugs by which cells may be refused, each with the reason, which docs/ give too.
        on: says for which axes the feature has a meaning; the others have no cell.
        one_rank: the reference is the planned model on a mesh of one rank, where randomness is the package's.
        processes: its ranks are processes always: it changes what a process has only once.
    """

    name: str
    run: Callable[[Side], None]
    needs: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    prepare: Callable[[nn.Module], nn.Module] | None = None
    others: tuple[str | None, ...] = ()
    bound: float = FLOAT64_BOUND
    rounds: torch.dtype | None = None
    refused: dict[str, str] = field(default_factory=dict)
    on: Callable[[Axis], bool] = lambda axis: True
    one_rank: bool = False
    processes: bool = False

    def serves(self, kind: Kind) -> bool:
        return self.needs <= kind.traits and not self.without & kind.traits


FEATURES: dict[str, Feature] = {}


def feature(**facts: Any) -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    """Makes a function of a side a row, with the function's name unless `name` is given."""

    def register(run: Callable[[Side], None]) -> Callable[[Side], None]:
        name = facts.pop("name", run.__name__)
        assert name not in FEATURES, name
        for key in ("needs", "without"):
            facts[key] = frozenset(facts.get(key, ()))
        FEATURES[name] = Feature(name, run, **facts)
        return run

    return register


def load_features() -> dict[str, Feature]:
    """All rows, by name."""
    from tests.matrix import features

    for module in iter_modules([str(Path(features.__file__).parent)]):
        import_module(f"{features.__name__}.{module.name}")
    return FEATURES
