"""From the events of a microbatch to its segments: which unit each event belongs to, and which storages cross units.

What a layer allocates and the next layer frees repeats with every layer, so both events stay where they are. Other storages that
cross units (rotary tables, the gradient of a tied weight, a variable of the model's own forward) are marked with the unit at the
other end: the two units may be on different stages, and then each stage must free its own storages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallelize.tools.analysis.record.trace_data import LOSS, OUTSIDE, MemoryChange, MicrobatchSegments, Segment
from parallelize.tools.analysis.record.tracing import Event

ABSENT = -1
"""`MemoryChange.freed_in` of a storage that is allocated only on the stage that also has its other unit."""


@dataclass(frozen=True)
class Marks:
    """What is known of units and storages.

    Attributes:
        layers: units that are layers; the first of them ends what every stage runs.
        gradients: storages that stay as gradients.
        carried: storages that travel between stages -> the unit that consumes them (as its input, or as the gradient of its
            output).
    """

    layers: Sequence[str]
    gradients: set[int]
    carried: dict[int, str]


class _Crossing(NamedTuple):
    """A storage that one unit allocates and another one frees. freed_in: see `MemoryChange`."""

    allocated_by: str | None
    freed_in: int
    freed_by: str | None


def segments_of(actions: Sequence[list[Event]], marks: Marks) -> MicrobatchSegments:
    """The segments of one microbatch: forward and backward, or forward, dgrad and wgrad."""
    units = [list(_units(events, marks, index > 0)) for index, events in enumerate(actions)]
    crossing = _crossings(actions, units, marks)
    segments = [tuple(_segments(events, names, marks, crossing)) for events, names in zip(actions, units, strict=True)]
    return MicrobatchSegments(*segments)


def _crossings(actions: Sequence[list[Event]], units: Sequence[list[str]], marks: Marks) -> dict[int, _Crossing]:
    allocated: dict[int, str] = {}
    freed: dict[int, tuple[int, str]] = {}
    for index, events in enumerate(actions):
        for event, unit in zip(events, units[index], strict=True):
            if event.bytes > 0:
                allocated[event.storage] = unit
            elif event.bytes < 0 and not event.at_end:
                freed[event.storage] = index, unit
    crossings = {}
    for storage, (index, unit) in freed.items():
        first = allocated.get(storage)
        if first is None or not _crosses(first, unit, marks):
            continue
        if storage not in marks.carried:
            crossings[storage] = _Crossing(first, index, unit)
        elif first == OUTSIDE and marks.layers:  # the first layer's input; other stages have a received tensor instead
            crossings[storage] = _Crossing(marks.layers[0], ABSENT, marks.layers[0])
    return crossings


def is_regular(actions: Sequence[list[Event]], marks: Marks) -> bool:
    """Whether everything that a layer allocates in forward, and that forward frees, is freed by the end of the next unit.

    False for models with skip connections over several layers.
    """
    units = list(_units(actions[0], marks, False))
    order = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    allocated = {event.storage: unit for event, unit in zip(actions[0], units, strict=True) if event.bytes > 0}
    return all(
        allocated.get(event.storage) not in marks.layers or order[unit] - order[allocated[event.storage]] <= 1
        for event, unit in zip(actions[0], units, strict=True)
        if event.bytes < 0
    )


def _units(events: Sequence[Event], marks: Marks, backward: bool) -> Iterator[str]:
    """The unit of each event. Events between units belong to the previous unit, except before the first layer."""
    last = LOSS if backward else OUTSIDE
    inside = backward  # past the first layer
    for event in events:
        if event.at_end:
            yield marks.carried.get(event.storage, event.unit)
            continue
        if event.unit != OUTSIDE or not inside:
            last = event.unit
        inside = inside or last in marks.layers or last == LOSS
        yield last


def _crosses(allocated_by: str, freed_by: str, marks: Marks) -> bool:
    return allocated_by != freed_by and not (allocated_by in marks.layers and freed_by in marks.layers)


def _segments(
    events: Sequence[Event], units: Sequence[str], marks: Marks, crossings: dict[int, _Crossing]
) -> list[Segment]:
    """One segment per unit, in the order in which units first appear."""
    segments: dict[str, Segment] = {}
    for event, unit in zip(events, units, strict=True):
        segment = segments.setdefault(unit, Segment(unit))
        if event.message is not None:
            segment.messages.append(event.message)
        elif event.kernel is not None:
            segment.kernels.append(event.kernel)
        elif event.storage in marks.gradients:
            segment.changes.append(MemoryChange(0, event.bytes))
        elif event.at_end:
            segment.freed_at_end -= event.bytes
        else:
            crossing = crossings.get(event.storage, _Crossing(None, 0, None))
            if event.bytes > 0:
                segment.changes.append(MemoryChange(event.bytes, 0, crossing.freed_by, crossing.freed_in))
            else:
                segment.changes.append(MemoryChange(event.bytes, 0, crossing.allocated_by))
    return list(segments.values())
