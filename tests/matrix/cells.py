"""One cell of the matrix: a feature alone, the same on a mesh, and what became of it."""

from __future__ import annotations

import copy
import re
import tempfile
import traceback
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize import ParallelizeError
from tests.matrix.axes import AXES, Axis
from tests.matrix.feature import Feature, feature_of
from tests.matrix.kinds import KINDS, Kind
from tests.matrix.pools import pool_of
from tests.matrix.sides import Alone, Planned, Side
from tests.support.parity import worst
from tests.support.threads import run_ranks

Records = dict[str, torch.Tensor]
Models = tuple[nn.Module, ...]
RIGHT, REFUSED, WRONG, CRASHED = "right", "refused", "wrong", "crashed"
_GROUPS = ("gradient", "weight")


@dataclass(frozen=True)
class Verdict:
    """What a cell is.

    Attributes:
        word: RIGHT, REFUSED, WRONG or CRASHED.
        detail: the slug, the error with its name, or the exception.
        trace: of a refusal or crash, for whoever looks at it.
    """

    word: str
    detail: str = ""
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.word} {self.detail}".strip()


def cells_of(feature: Feature, kind_name: str) -> list[str]:
    """The axes on which the feature has a meaning for a kind."""
    kind = KINDS[kind_name]
    if not feature.serves(kind):
        return []
    return [name for name, axis in AXES.items() if _fits(axis, kind) and feature.on(axis)]


def _fits(axis: Axis, kind: Kind) -> bool:
    return not axis.mixture or "experts" in kind.traits


NO_REFERENCE = "no-reference"
"""In the place of a slug: one process cannot do what the rows of a cell ask for."""


def run_cell(feature_name: str, kind_name: str, axis_name: str, pool: Any = None) -> Verdict:
    """A cell on ranks that are threads, or on the processes of a pool, which may be that of the caller."""
    feature, kind, axis = feature_of(feature_name), KINDS[kind_name], AXES[axis_name]
    try:
        expected = reference(feature, kind_name, axis.deep)
        bounds = bounds_of(feature, kind_name, axis.deep, expected)
    except ParallelizeError as error:  # of a mesh of one rank, which is refused too
        return _refusal({**feature.refused, **kind.refused}, error)
    except Exception as error:
        if "+" in feature_name and _fails_alone(feature, kind_name, axis.deep, error):
            return Verdict(REFUSED, NO_REFERENCE, "".join(traceback.format_exception(error)))
        raise
    if "+" in feature_name and not all(value.isfinite().all() for value in expected.values()):
        return Verdict(REFUSED, NO_REFERENCE)  # such as a mean over no targets
    ranks, failure = ranks_of(feature, kind_name, kind, axis, pool)
    verdict = judge(feature, kind, ranks, failure, expected, bounds)
    if verdict.word == WRONG and not bounds:
        return judge(feature, kind, ranks, failure, expected, _of_one_ulp(feature, kind_name, axis.deep, expected))
    return verdict


def ranks_of(
    feature: Feature, kind_name: str, kind: Kind, axis: Axis, pool: Any = None, models: Models | None = None
) -> tuple[list[Records], BaseException | None]:
    """The records of every rank, or what was raised."""
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        models = models or models_of(feature, kind_name, axis.deep)

        def body(rank: int) -> Records:
            own = copy.deepcopy(models)
            return run_side(feature, Planned(kind, own[0], folder, axis, own[1:]))

        try:
            if feature.processes:
                pool = pool or pool_of(axis.world_size)
            if pool is not None:
                return pool.run(rank_of_cell, feature.name, kind_name, axis, folder), None
            return run_ranks(axis.world_size, body), None
        except Exception as error:
            return [], error


def rank_of_cell(rank: int, feature_name: str, kind_name: str, axis: Axis, folder: str) -> Records:
    """A rank of a cell, as a process of a pool."""
    feature, kind = feature_of(feature_name), KINDS[kind_name]
    own = copy.deepcopy(models_of(feature, kind_name, axis.deep))
    return run_side(feature, Planned(kind, own[0], folder, axis, own[1:]))


def run_side(feature: Feature, side: Side) -> Records:
    feature.run(side)
    side.finish()
    return side.records


# -- the reference -----------------------------------------------------------------------------------------------------

_REFERENCES: OrderedDict[tuple[str, str, bool], Records] = OrderedDict()
_MODELS: OrderedDict[tuple[str, str, bool], tuple[nn.Module, ...]] = OrderedDict()
_KEPT = 64


def reference(feature: Feature, kind_name: str, deep: bool = False) -> Records:
    """What the feature records on one process; made once for all axes."""
    key = (feature.name, kind_name, deep)
    if key not in _REFERENCES:
        if feature.one_rank:
            records = _on_one_rank(feature, kind_name, deep)
        else:
            records = _alone(feature, kind_name, deep)
        _keep(_REFERENCES, key, records)
    return _REFERENCES[key]


def _alone(feature: Feature, kind_name: str, deep: bool, models: Models | None = None) -> Records:
    """models: in the place of the feature's own, with other values."""
    own = copy.deepcopy(models or models_of(feature, kind_name, deep))
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        return run_side(feature, Alone(KINDS[kind_name], own[0], folder, own[1:]))


def _fails_alone(feature: Feature, kind_name: str, deep: bool, error: Exception) -> bool:
    """Whether plain PyTorch cannot do these rows in one loop either, as the reference could not."""
    if not feature.one_rank or "does not require grad" in str(error):  # a draw that leaves out what trains
        return True
    try:
        _alone(feature, kind_name, deep)
    except type(error):
        return True
    return False


def _on_one_rank(feature: Feature, kind_name: str, deep: bool, models: Models | None = None) -> Records:
    ranks, error = ranks_of(feature, kind_name, KINDS[kind_name], replace(AXES["one"], deep=deep), models=models)
    if error is not None:
        raise error
    return ranks[0]


_BOUNDS: OrderedDict[tuple[str, str, bool], dict[str, float]] = OrderedDict()


def bounds_of(feature: Feature, kind_name: str, deep: bool, expected: Records) -> dict[str, float]:
    """Group of records -> the largest error that is allowed, where a feature rounds."""
    key = (feature.name, kind_name, deep)
    if key not in _BOUNDS:
        bounds = {}
        if feature.rounds is not None:
            own, least = _on_one_rank(feature, kind_name, deep), 2 * torch.finfo(feature.rounds).eps
            bounds = {group: max(3 * error, least) for group, (error, _) in errors_of(own, expected).items()}
        _keep(_BOUNDS, key, bounds)
    return _BOUNDS[key]


_MOST = 1e-9


def _of_one_ulp(feature: Feature, kind_name: str, deep: bool, expected: Records) -> dict[str, float]:
    """Group of records -> the largest error that is allowed where a loop makes rounding larger, as steps do that divide
    small gradients by their own size: four times what the reference changes by where each of its
    weights is moved by one unit in the last place."""
    models = copy.deepcopy(models_of(feature, kind_name, deep))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters() if p.dtype == torch.float64):
            moves = torch.randint(-1, 2, parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + 2.0**-52 * moves)
    moved = (
        _on_one_rank(feature, kind_name, deep, models) if feature.one_rank else _alone(feature, kind_name, deep, models)
    )
    return {
        group: min(max(feature.bound, 4 * error), _MOST) for group, (error, _) in errors_of(moved, expected).items()
    }


def models_of(feature: Feature, kind_name: str, deep: bool) -> tuple[nn.Module, ...]:
    """The feature's models with their weights, to be copied: building draws from the generator that threads share."""
    key = (feature.name, kind_name, deep)
    if key not in _MODELS:
        names = (kind_name, *(other or kind_name for other in feature.others))
        built = []
        for seed, name in enumerate(names):
            layers = KINDS[name].deep if deep else {}
            overrides = {**layers, **feature.overrides.get("", {}), **feature.overrides.get(name, {})}
            model = KINDS[name].build(**overrides)
            if seed:
                _perturb(model, seed)
            built.append(model)
        if feature.prepare is not None:
            torch.manual_seed(1)
            built[0] = feature.prepare(built[0])
        _keep(_MODELS, key, tuple(built))
    return _MODELS[key]


def _perturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def _keep(cache: OrderedDict, key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)


# -- the verdict -------------------------------------------------------------------------------------------------------


def judge(
    feature: Feature,
    kind: Kind,
    ranks: list[Records],
    error: BaseException | None,
    expected: Records,
    bounds: dict[str, float],
) -> Verdict:
    if error is not None:
        return _refusal({**feature.refused, **kind.refused}, error)
    for rank, records in enumerate(ranks):
        problem = difference(records, expected, feature.bound, bounds, all_weights=rank == 0)
        if problem:
            return Verdict(WRONG, f"rank {rank}: {problem}")
    return Verdict(RIGHT)


def _refusal(refused: dict[str, str], error: BaseException) -> Verdict:
    trace = "".join(traceback.format_exception(error))
    slugs = list(error.slugs) if isinstance(error, ParallelizeError) else ["stage-failed"]
    if "stage-failed" in slugs:  # the error of a rank, on the others
        slugs = re.findall(_SLUG_IN_TEXT, str(error))
    for slug in slugs:
        if slug in refused:
            return Verdict(REFUSED, slug, trace)
    first = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
    return Verdict(CRASHED, f"{type(error).__name__}: {first}", trace)


_SLUG_IN_TEXT = re.compile(r"\b([a-z]+(?:-[a-z0-9]+)+): ")


def difference(records: Records, expected: Records, bound: float, bounds: dict[str, float], all_weights: bool) -> str:
    """What differs between a rank and the reference; empty where nothing does."""
    wanted = {name: value for name, value in expected.items() if all_weights or not name.startswith("weight ")}
    if records.keys() - expected.keys() or wanted.keys() - records.keys():
        missing, more = sorted(wanted.keys() - records.keys()), sorted(records.keys() - expected.keys())
        return f"names: {len(missing)} missing {missing[:2]}, {len(more)} more {more[:2]}"
    for name, value in records.items():
        if value.shape != expected[name].shape:
            return f"{name} is {list(value.shape)} for {list(expected[name].shape)}"
        if not value.isfinite().all():
            return f"{name} is not finite"
    for group, (error, name) in errors_of(records, expected).items():
        if error > bounds.get(group, bound):
            return f"{name} differs by {error:.1e}"
    return ""


def errors_of(records: Records, expected: Records) -> dict[str, tuple[float, str]]:
    """Group -> its largest relative error and where that is. Gradients are one group, weights another; what else was
    recorded is a group of its own."""
    groups: dict[str, list[str]] = {}
    for name in records:
        prefix = name.partition(" ")[0]
        groups.setdefault(prefix if prefix in _GROUPS else name, []).append(name)
    return {
        group: worst({n: records[n].double() for n in names}, {n: expected[n].double() for n in names})
        for group, names in groups.items()
    }
