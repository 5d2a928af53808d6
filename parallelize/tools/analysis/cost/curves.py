"""The course of memory over a segment. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.tools.analysis.record.trace_data import Segment


@dataclass(frozen=True)
class Curve:
    """The net sum and the highest partial sum of a segment's changes: of activations alone, and with gradients."""

    net: int
    peak: int
    net_all: int
    peak_all: int


def curve_of(segment: Segment) -> Curve:
    now = peak = now_all = peak_all = 0
    for change in segment.changes:
        now += change.activations
        now_all += change.activations + change.gradients
        peak, peak_all = max(peak, now), max(peak_all, now_all)
    return Curve(now, peak, now_all, peak_all)
