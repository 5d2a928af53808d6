"""Equal layers are analyzed once: which layers run, and what replaces the others.

A layer's signature is everything that could change what it does: its classes, shapes, plain attributes and its entries
in the config's lists, but not its number. Layers with one signature are an equivalence class. The first and the last
layer of the model always run, because regions and stages end there. Of the others, a few of each class run. The rest
are replaced by modules that return their input and have no parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from parallelize.plan.model_facts import ModelFacts
from parallelize.tools.analysis.record.trace_data import (
    LOSS,
    OUTSIDE,
    MemoryChange,
    MicrobatchSegments,
    MicrobatchTrace,
    Segment,
)
from parallelize.tools.analysis.record.tracing import Event

NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx"}
_MODULE_ATTRIBUTES = set(vars(nn.Module()))  # of every module: its tables of parameters, hooks and children
_PLAIN = (int, float, bool, str, type(None))


class PassThrough(nn.Module):
    """Returns its first input, in the structure (tensor or tuple) in which the layer's representative returns its
    output.

    `named_modules` yields nothing, so rules, hooks and recompute do not see it.
    """

    def __init__(self, layer: nn.Module, representative: nn.Module):
        super().__init__()
        # outside the module tree: attributes of the layer can be read, and its parameters do not count
        self.__dict__["_layer"], self.__dict__["_representative"] = layer, representative

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return iter(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        length = self.__dict__["_representative"].__dict__.get("_output_length")
        return (x, *(None for _ in range(length - 1))) if length else x


def _comparable(value: Any) -> Any:
    """What is compared of an attribute: plain values, also in containers; the identity of a function; else the
    class."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _comparable(entry)) for key, entry in value.items()), key=str))
    if isinstance(value, partial):
        return _comparable(value.func), _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType)):
        return value.__qualname__, id(getattr(value, "__func__", value))
    return type(value).__qualname__


def layer_signature(layer: nn.Module, number: int, config: Any, recompute_every: int = 1) -> tuple:
    """Equal for layers that do the same work."""
    signature: list[Any] = [recompute_every and number % recompute_every == 0]
    for name, module in layer.named_modules():
        plain = {k: _comparable(v) for k, v in vars(module).items() if k not in NUMBERS and k not in _MODULE_ATTRIBUTES}
        tensors = [*module._parameters.items(), *module._buffers.items()]
        shapes = tuple((k, tuple(p.shape), str(p.dtype), p.requires_grad) for k, p in tensors if p is not None)
        signature.append((name, type(module).__qualname__, tuple(sorted(plain.items(), key=str)), shapes))
    signature += [(key, str(values[number])) for key, values in _layer_lists(config) if number < len(values)]
    return tuple(signature)


def _layer_lists(config: Any) -> Iterator[tuple[str, Any]]:
    """Lists of the config with one entry per layer."""
    count = getattr(config, "num_hidden_layers", None)
    for key, values in sorted(vars(config).items()) if config is not None else ():
        if isinstance(values, (list, tuple)) and len(values) == count:
            yield key, values


@dataclass(frozen=True)
class LayerClasses:
    """Equivalence classes of layers.

    Attributes:
        representatives: layer -> the layer that runs in its place (itself where it runs).
        samples: of each class that has layers which do not run, those that do.
    """

    representatives: dict[str, str]
    samples: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def all_run(layers: Sequence[str]) -> LayerClasses:
        """Every layer is its own representative."""
        return LayerClasses({name: name for name in layers})

    @property
    def running(self) -> list[str]:
        return [name for name, representative in self.representatives.items() if name == representative]


def layer_classes(layers: Sequence[str], model: ModelFacts, recompute_every: int = 1) -> LayerClasses:
    """Which layers represent which others.

    Of each class the first, the second and the last run. The first creates what several layers share (masks) and frees
    it in backward; the last frees it in forward. The second does neither, so it represents the others.
    """
    classes: dict[tuple, list[str]] = {}
    representatives = {name: name for name in layers}
    for number, name in enumerate(layers):
        if number not in (0, len(layers) - 1) and not _is_shared(name, model):
            signature = layer_signature(model.objects[name], number, model.config, recompute_every)
            classes.setdefault(signature, []).append(name)
    for names in classes.values():
        for name in names[2:-1]:
            representatives[name] = names[1]
    samples = tuple((names[0], names[1], names[-1]) for names in classes.values() if len(names) > 3)
    return LayerClasses(representatives, samples)


def _is_shared(layer: str, model: ModelFacts) -> bool:
    """Whether a part of a layer is also elsewhere in the model: a module that is used twice, a tied parameter."""

    def inside(name: str) -> bool:
        return name == layer or name.startswith(layer + ".")

    if layer not in model.objects:
        return True
    several = (fact.names for fact in model.parameters.values() if len(fact.names) > 1)
    tied = any(len({inside(name) for name in names}) > 1 for names in several)
    return tied or any(inside(alias) != inside(first) for alias, first in model.module_fqns.items() if alias != first)


def consistent(trace: MicrobatchTrace, classes: LayerClasses) -> bool:
    """Whether the samples of each class did the same.

    They need not: a forward may depend on a layer's number, or use the outputs of much earlier layers.
    """
    if not trace.regular and classes.samples:
        return False
    for segments in (trace.later.forward, trace.later.backward):
        work = {segment.unit: _work(segment) for segment in segments}
        if any(len({work.get(name) for name in names}) > 1 for names in classes.samples):
            return False
    return True


def _work(segment: Segment) -> tuple:
    """Operations and messages, without the unit's name."""
    prefix = len(segment.unit)
    messages = (message._replace(module=message.module[prefix:]) for message in segment.messages)
    return segment.flops, tuple(sorted(messages))


def drop_represented(root: nn.Module, classes: LayerClasses) -> None:
    """Replace, in place, each layer that another one represents. None of its parameters may be tied to others."""
    for name, representative in classes.representatives.items():
        if name != representative:
            parent_name, _, key = name.rpartition(".")
            parent = root.get_submodule(parent_name)
            stand_in = PassThrough(parent.get_submodule(key), root.get_submodule(representative))
            parent._modules[key] = stand_in
    _record_output_lengths(root, set(classes.representatives.values()))


def _record_output_lengths(root: nn.Module, names: set[str]) -> None:
    """Let each representative note the length of the tuple that it returns (0 for a tensor), for `PassThrough`."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        module.__dict__["_output_length"] = len(output) if isinstance(output, tuple) else 0

    for name in names:
        root.get_submodule(name).register_forward_hook(note)


# -- segmenting ------------------------------------------------------------------------------------------------------
# From the events of a microbatch to its segments: which unit each event belongs to, and which storages cross units.
# What a layer allocates and the next layer frees repeats with every layer, so both events stay where they are. Other
# storages that cross units (rotary tables, the gradient of a tied weight, a variable of the model's own forward) are
# marked with the unit at the other end: the two units may be on different stages, and then each stage must free its
# own storages.


ABSENT = -1
"""`MemoryChange.freed_in` of a storage that is allocated only on the stage that also has its other unit."""


@dataclass(frozen=True)
class Marks:
    """What is known of units and storages.

    Attributes:
        layers: units that are layers; the first of them ends what every stage runs.
        gradients: storages that stay as gradients.
        carried: storages that travel between stages -> the unit that consumes them (as its input, or as the gradient of
            its output).
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
        elif unit != marks.carried[storage] and index == 0:  # a variable of the model's own forward keeps it
            crossings[storage] = _Crossing(first, index, unit)
    return crossings


def freed_inputs(actions: Sequence[list[Event]], marks: Marks) -> dict[str, tuple[int, int]]:
    """Unit -> bytes of its input that a forward frees: its own, and any. A stage that begins at the unit stores its
    input until backward."""
    freed: dict[str, tuple[int, int]] = {}
    for event, unit in zip(actions[0], _units(actions[0], marks, False), strict=True):
        if event.bytes < 0 and (consumer := marks.carried.get(event.storage)) is not None:
            own, every = freed.get(consumer, (0, 0))
            freed[consumer] = own - event.bytes * (unit == consumer), every - event.bytes
    return freed


def is_regular(actions: Sequence[list[Event]], marks: Marks) -> bool:
    """Whether everything that a layer allocates in forward, and that forward frees, is freed by the end of the next
    unit.

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
