"""Dims that are made of others, one after another: what a forward splits a dim into, and what it concatenates to one.

A packed weight of queries, keys and values is split after its matmul; the inputs of a convolution of all three are concatenated before,
and its results are split again. Each rank has its range of each part, so that what leads every part may be sharded.
"""

from __future__ import annotations

from collections import defaultdict

from parallelize.plan.dims.factors import Dim, Factor, leaves
from parallelize.plan.dims.record import FullDimUse, Record, Slice

Ranges = dict[tuple[int, int], list[Slice]]


def divide_into_parts(record: Record) -> dict[Factor, list[Dim]]:
    """The dims that make up a dim completely, in order; a part may be made of parts itself. Other ranges need all of it: they are added to
    the record's mixes."""
    ranges = _ranges(record)
    while True:
        for factor, own in ranges.items():
            if _is_complete(factor, own):
                _tie_alike(record, own)
        tied = _ranges(record)  # ties may have made two of these dims one, or divided one
        if tied.keys() == ranges.keys():
            break
        ranges = tied
    complete = {factor: own for factor, own in ranges.items() if _is_complete(factor, own)}
    known = {id(cut) for own in complete.values() for same in own.values() for cut in same}
    record.mixes += [mix for cut in record.slices if id(cut) not in known for mix in _mixed(cut)]
    return {factor: [own[key][0].part for key in sorted(own)] for factor, own in complete.items()}


def _ranges(record: Record) -> dict[Factor, Ranges]:
    """The ranges of each dim that is one factor."""
    ranges: dict[Factor, Ranges] = defaultdict(dict)
    for cut in record.slices:
        flat = leaves(cut.dim)
        if len(flat) == 1:
            ranges[flat[0]].setdefault((cut.start, cut.stop), []).append(cut)
    return ranges


def _is_complete(factor: Factor, ranges: Ranges) -> bool:
    """Whether each range begins where the one before it ends, from the beginning of a dim to its end."""
    ordered = sorted(ranges)
    ends = [0, *(stop for _, stop in ordered)]
    return all(start == end for (start, _), end in zip(ordered, ends, strict=False)) and ends[-1] == factor.size


def _tie_alike(record: Record, ranges: Ranges) -> None:
    for first, *others in ranges.values():
        for cut in others:
            record.tie(first.part, cut.part, "a slice")


def _mixed(cut: Slice) -> list[FullDimUse]:
    """What needs all of a dim: a range of it, or a concatenation, which needs all of its operand too."""
    if not cut.joined:
        return [FullDimUse(cut.dim, "a slice", cut.module, cut.line)]
    return [FullDimUse(dim, "a concatenation along it", cut.module, cut.line) for dim in (cut.dim, cut.part)]
