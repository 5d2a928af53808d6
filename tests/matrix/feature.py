"""What a row of the matrix is: one function of a side, with what it needs and what it may be refused for.

Most rows are changes of one loop, `change` and `at`; two or more of them are a row too, whose name is that of each with
`+` between them: `feature_of("clip+lora_before")`. A row whose loop is like no other is a function, `feature`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import nn

from tests.matrix.axes import Axis
from tests.matrix.kinds import KINDS, Kind
from tests.matrix.loops import MOMENTS, Loop, merged
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
        loop: the loop of a row that is a change of it; others meet no row.
        refused_with: names of other rows, as a pattern, or a word of their `apart` -> slugs by which cells of both may
            be refused, with reasons.
        apart: words of what at most one row of a loop may be, such as an adapter.
        own_batches: it divides a rank's rows by their number, so that the k-th draw is not of the rows that it is of on
            one rank.
        turn: of `prepare`, where several rows have one: those with larger numbers come later.
        meets: whether others join it; not where it is several in one already.
        files: that the row is written in.
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
    loop: Loop | None = None
    refused_with: dict[str, dict[str, str]] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    own_batches: bool = False
    turn: int = 0
    meets: bool = True
    files: frozenset[str] = frozenset()

    def serves(self, kind: Kind) -> bool:
        return self.needs <= kind.traits and not self.without & kind.traits


FEATURES: dict[str, Feature] = {}


def feature(**facts: Any) -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    """Makes a function of a side a row, with the function's name unless `name` is given."""

    def register(run: Callable[[Side], None]) -> Callable[[Side], None]:
        _register(facts.pop("name", run.__name__), run, facts)
        return run

    return register


def change(name: str, *, options: dict[str, Any] | None = None, **facts: Any) -> Feature:
    """A row that changes the loop of all: with `options`, by a function for a moment of `MOMENTS`, or by its model."""
    moments = {moment: (facts.pop(moment),) for moment in MOMENTS if moment in facts}
    loop = Loop(options or {}, moments)
    return _register(name, loop.run, {**facts, "loop": loop})


def at(moment: str, **facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function a row that is called at one moment of the loop of all."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        change(facts.pop("name", run.__name__), **{moment: run}, **facts)
        return run

    return register


_SETS = ("needs", "without", "apart")


def _register(name: str, run: Callable[[Side], None], facts: dict[str, Any]) -> Feature:
    assert name not in FEATURES and "+" not in name, name
    sets = {key: frozenset(facts.get(key, ())) for key in _SETS}
    FEATURES[name] = Feature(name, run, **{**facts, **sets, "files": frozenset({_file_of_row()})})
    return FEATURES[name]


def _file_of_row() -> str:
    """The file that calls this module to make a row."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename


# -- several in one loop -----------------------------------------------------------------------------------------------


@cache
def feature_of(name: str) -> Feature:
    """The row of this name, or that of several with `+` between their names."""
    rows = [load_features()[part] for part in name.split("+")]
    row = rows[0] if len(rows) == 1 else together(rows)
    assert row is not None, f"{name} meet in no loop"
    return row


def is_feature(name: str) -> bool:
    """Whether there is a row, or there are several that meet, of this name."""
    parts = name.split("+")
    rows = [load_features()[part] for part in parts if part in load_features()]
    return len(rows) == len(parts) and (len(rows) == 1 or together(rows) is not None)


def together(rows: Iterable[Feature]) -> Feature | None:
    """One row that does what all of these do; None where they do not meet."""
    rows = sorted(rows, key=lambda row: (row.turn, row.name))
    loop = merged([row.loop for row in rows if row.loop is not None])
    overrides = _merged_overrides(rows)
    rounds = {row.rounds for row in rows} - {None}
    is_one_rank, words = any(row.one_rank for row in rows), [word for row in rows for word in row.apart]
    if (
        loop is None
        or overrides is None
        or any(row.loop is None for row in rows)
        or len(words) > len(set(words))
        or len(rounds) + is_one_rank > 1  # both compare with a mesh of one rank, for other reasons
        or (is_one_rank and any(row.own_batches for row in rows))
    ):
        return None
    return Feature(
        "+".join(sorted(row.name for row in rows)),
        loop.run,
        needs=frozenset().union(*(row.needs for row in rows)),
        without=frozenset().union(*(row.without for row in rows)),
        overrides=overrides,
        prepare=_prepared_by([row.prepare for row in rows if row.prepare is not None]),
        bound=max(row.bound for row in rows),
        rounds=next(iter(rounds), None),
        refused=_merged_refusals(rows),
        on=lambda axis: all(row.on(axis) for row in rows),
        one_rank=is_one_rank,
        processes=any(row.processes for row in rows),
        loop=loop,
        files=frozenset().union(*(row.files for row in rows)),
    )


def _prepared_by(steps: list[Callable[[nn.Module], nn.Module]]) -> Callable[[nn.Module], nn.Module] | None:
    def prepare(model: nn.Module) -> nn.Module:
        for step in steps:
            model = step(model)
        return model

    return prepare if steps else None


def _merged_refusals(rows: list[Feature]) -> dict[str, str]:
    """Those of each row, and those of two."""
    refused = {slug: why for row in rows for slug, why in row.refused.items()}
    for row in rows:
        for pattern, slugs in row.refused_with.items():
            if any(fnmatchcase(other.name, pattern) or pattern in other.apart for other in rows):
                refused |= slugs
    return refused


def _merged_overrides(rows: list[Feature]) -> dict[str, dict[str, Any]] | None:
    """Config fields of all; None where two want one field to differ."""
    merged_fields: dict[str, dict[str, Any]] = {}
    for row in rows:
        for kind, fields in row.overrides.items():
            own = merged_fields.setdefault(kind, {})
            if any(name in own and own[name] != value for name, value in fields.items()):
                return None
            own |= fields
    return merged_fields


def has_kind(row: Feature) -> bool:
    """Whether a kind of model has what a row needs."""
    return any(row.serves(kind) for kind in KINDS.values())


def load_features() -> dict[str, Feature]:
    """All rows, by name."""
    from tests.matrix import features

    for module in iter_modules([str(Path(features.__file__).parent)]):
        import_module(f"{features.__name__}.{module.name}")
    return FEATURES
