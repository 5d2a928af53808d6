"""From the events of a microbatch to its segments: which unit each moment belongs to, and which bytes cross units.

What a layer makes and the next one lets go of repeats with every layer, so both ends stay where they are. What else crosses
units (rotary tables, the gradient of a tied weight, a variable of the model's own forward) is marked with its other end: the
two may lie on different stages, and then each stage must let go of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallelize.analysis.records import LOSS, OUTSIDE, Change, Pass, Segment
from parallelize.analysis.tracing import Event

NOWHERE = -1  # place of what is not even made where its other end is not


@dataclass(frozen=True)
class Marks:
    """What is known of units and storages.

    Attributes:
        layers: units that are layers; the first of them ends what every stage runs. gradients: storages that stay as
            gradients. carried: storages that travel between stages, with the unit that uses them up: its input, or the
            gradient of its output.
    """

    layers: Sequence[str]
    gradients: set[int]
    carried: dict[int, str]


def pass_of(actions: Sequence[list[Event]], marks: Marks) -> Pass:
    """The segments of one microbatch: forward and backward, or forward and the two halves of backward."""
    units = [list(_units(events, marks, place > 0)) for place, events in enumerate(actions)]
    made: dict[int, str] = {}
    gone: dict[int, tuple[int, str]] = {}
    for place, events in enumerate(actions):
        for event, unit in zip(events, units[place], strict=True):
            if event.bytes > 0:
                made[event.storage] = unit
            elif event.bytes < 0 and not event.late:
                gone[event.storage] = place, unit
    crossing = {}
    for storage, (place, unit) in gone.items():
        first = made.get(storage)
        if first is None or not _crosses(first, unit, marks):
            continue
        if storage not in marks.carried:
            crossing[storage] = first, place, unit
        elif (
            first == OUTSIDE and marks.layers
        ):  # the first layer's input: on other stages what was received stands in its place
            crossing[storage] = marks.layers[0], NOWHERE, marks.layers[0]
    found = [tuple(_segments(events, names, marks, crossing)) for events, names in zip(actions, units, strict=True)]
    return Pass(*found)


def is_regular(actions: Sequence[list[Event]], marks: Marks) -> bool:
    """Whether what each layer makes in forward, and forward lets go of, goes by the end of the next unit (skips do not)."""
    units = list(_units(actions[0], marks, False))
    order = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    made = {event.storage: unit for event, unit in zip(actions[0], units, strict=True) if event.bytes > 0}
    return all(
        made.get(event.storage) not in marks.layers or order[unit] - order[made[event.storage]] <= 1
        for event, unit in zip(actions[0], units, strict=True)
        if event.bytes < 0
    )


def _units(events: Sequence[Event], marks: Marks, backward: bool) -> Iterator[str]:
    """The unit of each event. Between units the one before goes on, but for what comes before the first layer."""
    last = LOSS if backward else OUTSIDE
    inside = backward  # past the first layer
    for event in events:
        if event.late:
            yield marks.carried.get(event.storage, event.unit)
            continue
        if event.unit != OUTSIDE or not inside:
            last = event.unit
        inside = inside or last in marks.layers or last == LOSS
        yield last


def _crosses(made: str, gone: str, marks: Marks) -> bool:
    return made != gone and not (made in marks.layers and gone in marks.layers)


def _segments(
    events: Sequence[Event], units: Sequence[str], marks: Marks, crossing: dict[int, tuple[str, int, str]]
) -> list[Segment]:
    """One segment a unit, in the order in which units first appear."""
    found: dict[str, Segment] = {}
    for event, unit in zip(events, units, strict=True):
        segment = found.setdefault(unit, Segment(unit))
        if event.message is not None:
            segment.messages.append(event.message)
        elif event.work is not None:
            segment.kernels.append(event.work)
        elif event.storage in marks.gradients:
            segment.changes.append(Change(0, event.bytes))
        elif event.late:
            segment.late -= event.bytes
        else:
            made, place, gone = crossing.get(event.storage, (None, 0, None))
            other = gone if event.bytes > 0 else made
            segment.changes.append(Change(event.bytes, 0, other, place if event.bytes > 0 else 0))
    return list(found.values())
