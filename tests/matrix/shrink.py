"""A failing cell made small: fewer ranks, fewer options, fewer layers, as long as it fails in the same way."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tests.matrix.axes import AXES, Axis
from tests.matrix.cells import CRASHED, RIGHT, Verdict, bounds_of, judge, ranks_of, reference
from tests.matrix.feature import Feature, feature_of
from tests.matrix.kinds import KINDS

SECONDS = 120.0
_FEWER_LAYERS = {"num_hidden_layers": 1, "num_layers": 1, "layers": 1}
"""Config fields for the number of layers, of which a kind has one."""
_ALIKE = 24  # characters of a detail that two failures of the same kind share


@dataclass(frozen=True)
class SmallCell:
    """A cell with an axis of its own, and config fields over those of the row."""

    feature: str
    kind: str
    axis: Axis
    overrides: tuple[tuple[str, Any], ...] = ()

    def run(self) -> Verdict:
        feature = _with_overrides(feature_of(self.feature), self.kind, dict(self.overrides))
        kind = KINDS[self.kind]
        try:
            expected = reference(feature, self.kind, self.axis.deep)
            bounds = bounds_of(feature, self.kind, self.axis.deep, expected)
        except Exception as error:  # the row itself does not run on so small a model
            return Verdict(CRASHED, f"{type(error).__name__} alone: {error}")
        return judge(feature, kind, *ranks_of(feature, self.kind, kind, self.axis), expected, bounds)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axis.sizes.items())
        options = "".join(f", {name}={value!r}" for name, value in self.axis.options.items())
        layers = "".join(f", {name}={value}" for name, value in self.overrides)
        return f"{self.feature} of {self.kind} on {sizes}{options}{layers}"

    def script(self) -> str:
        """A file that shows the verdict: `python FILE` at the root of the repository."""
        return _SCRIPT.format(title=self, cell=repr(self))


_SCRIPT = '''"""{title}"""

import torch

from tests.matrix.axes import Axis
from tests.matrix.shrink import SmallCell

torch.set_num_threads(1)
cell = {cell}
verdict = cell.run()
print(verdict)
print(verdict.trace)
'''


def shrink(feature: str, kind: str, axis: str, seconds: float = SECONDS) -> tuple[SmallCell, Verdict]:
    """The smallest cell found that fails as this one does, and its verdict; the cell itself where none does, or where
    it is right.

    Args:
        seconds: no further cell is tried after so many.
    """
    stop = time.monotonic() + seconds
    cell = SmallCell(feature, kind, AXES[axis])
    verdict = cell.run()
    if verdict.word == RIGHT:
        return cell, verdict
    tried: set[str] = set()
    smaller = _smaller(cell)
    while time.monotonic() < stop and (candidate := next(smaller, None)) is not None:
        if str(candidate) in tried:
            continue
        tried.add(str(candidate))
        found = candidate.run()
        if is_alike(found, verdict):
            cell, smaller = candidate, _smaller(candidate)
    return cell, verdict if not tried else cell.run()


def is_alike(found: Verdict, wanted: Verdict) -> bool:
    """Whether two cells fail in the same way: numbers, ranks and names of parameters may differ."""
    return found.word == wanted.word and _start(found) == _start(wanted)


def _start(verdict: Verdict) -> str:
    """The first words of a detail; of a wrong value whether it is a loss, a norm, a gradient or a weight."""
    detail = re.sub(r"^(rank \d+: |PipelineError: stage-failed: stage \d+ failed on rank \d+: )", "", verdict.detail)
    if match := re.match(r"(\S+)( .*)? differs by ", detail):
        return match[1]
    return re.sub(r"\d+", "#", detail)[:_ALIKE]


def _smaller(cell: SmallCell) -> Iterator[SmallCell]:
    """Smaller cells, the smallest first: with fewer rows, on a smaller axis, of a smaller model."""
    names = cell.feature.split("+")
    for name in names if len(names) > 1 else ():
        yield replace(cell, feature="+".join(other for other in names if other != name))
    axes = sorted(_smaller_axes(cell.axis), key=lambda axis: (axis.world_size, len(axis.options), axis.deep))
    for axis in axes:
        yield replace(cell, axis=axis)
    if not cell.overrides and not cell.axis.deep and "pp" not in cell.axis.sizes:
        for name, value in _FEWER_LAYERS.items():
            if _has_field(cell.kind, name):
                yield replace(cell, overrides=((name, value),))


def _smaller_axes(axis: Axis) -> Iterator[Axis]:
    """Those of the matrix with a part of this one's sizes and options, and this one without a size or an option."""
    for other in AXES.values():
        if other != axis and _is_part(other, axis):
            yield other
    for name in axis.sizes:
        sizes = {key: size for key, size in axis.sizes.items() if key != name}
        if sizes:
            yield _valid(replace(axis, sizes=sizes))
    for name in axis.options:
        yield _valid(replace(axis, options={key: value for key, value in axis.options.items() if key != name}))


def _is_part(small: Axis, large: Axis) -> bool:
    sizes, within = Counter(small.sizes), Counter(large.sizes)
    options = large.options.items()
    return sizes <= within and all(item in options for item in small.options.items()) and small.deep <= large.deep


def _valid(axis: Axis) -> Axis:
    """Without the options that need a mesh axis which is not there."""
    options = dict(axis.options)
    if "pp" not in axis.sizes:
        options.pop("schedule", None)
    if axis.sizes.get("cp", 1) % options.get("ulysses", 1):
        options.pop("ulysses")
    if prod(axis.sizes.values()) % (options.get("ep", 1) * options.get("etp", 1)):
        options.pop("etp", None)
        options.pop("ep", None)
    return replace(axis, options=options, deep=axis.deep and "pp" in axis.sizes)


def _has_field(kind: str, name: str) -> bool:
    return name in KINDS[kind].deep or (name == "num_hidden_layers" and not KINDS[kind].deep)


def _with_overrides(feature: Feature, kind: str, overrides: dict[str, Any]) -> Feature:
    """The row with config fields of the kind, under a name of its own, by which references are kept."""
    if not overrides:
        return feature
    own = {**feature.overrides.get(kind, {}), **overrides}
    name = f"{feature.name} {sorted(overrides.items())}"
    return replace(feature, name=name, overrides={**feature.overrides, kind: own})
