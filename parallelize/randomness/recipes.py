"""From a tape to what each parameter is drawn from: distributions in layers, later ones over earlier ones.

What is read: ops that fill (`normal_`, `uniform_`, `zero_`, `fill_`, `trunc_normal_`, `randn`, `zeros`, ...), ops that
scale and shift by a number, and copies. What draws nothing but computes (a table, an identity) is played as it is.
Everything else is unknown, and said so by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.randomness.distributions import Constant, Distribution, Normal, TruncatedNormal, Uniform
from parallelize.randomness.recording import Node, Tape, View

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Layer:
    """A distribution over a box of the full tensor."""

    box: Box
    distribution: Distribution


@dataclass(frozen=True)
class Layers:
    """Drawn one after another; the first covers everything."""

    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Played:
    """Computed without drawing: the ops are run with real numbers."""


@dataclass(frozen=True)
class Unknown:
    """Nobody can say, and why."""

    why: str


Reading = Layers | Played | Unknown


@dataclass
class Recipe:
    """How stock PyTorch initialises a model: a tape, and the place in it of each parameter and buffer, by every name."""

    tape: Tape
    places: dict[str, View]

    def __deepcopy__(self, memo: dict) -> Recipe:
        return self

    def read(self) -> dict[str, Reading]:
        """What each parameter and buffer is drawn from."""
        reader = _Reader(self.tape)
        return {name: reader.read(place) for name, place in self.places.items()}


class _Reader:
    def __init__(self, tape: Tape):
        self.tape, self.nodes = tape, tape.by_storage()
        self.order = {id(node): place for place, node in enumerate(tape.nodes)}

    def read(self, place: View) -> Reading:
        nodes = self.nodes.get(place.storage, [])
        if not any(node.name not in _EMPTY for node in nodes):
            return Unknown("nothing fills it")
        found = self._layers(place, nodes)
        if isinstance(found, Unknown) and not self._draws(place.storage):
            return Played()
        return found

    def _layers(self, place: View, nodes: list[Node]) -> Layers | Unknown:
        layers: list[Layer] = []
        for node in nodes:
            layers_now = self._after(node, place, layers)
            if isinstance(layers_now, Unknown):
                return layers_now
            layers = layers_now
        whole = tuple(slice(0, size) for size in place.size)
        return Layers(tuple(layers)) if layers and layers[0].box == whole else Unknown("a part of it is never filled")

    def _after(self, node: Node, place: View, layers: list[Layer]) -> list[Layer] | Unknown:
        """The layers when this op has run."""
        if node.name in _EMPTY:
            return []
        target = node.out if node.name in _MAKES or not node.args else node.args[0]
        box = _box(target, place) if isinstance(target, View) else None
        if box is None:
            return Unknown(f"{node.name} fills a part of it that is no block")
        whole = box == tuple(slice(0, size) for size in place.size)
        filled = _filled(node)
        if filled is not None:
            return [Layer(box, filled)] if whole else [*layers, Layer(box, filled)]
        scaled = _scaled(node)
        if scaled is not None and whole and layers:
            return [Layer(layer.box, layer.distribution.affine(*scaled)) for layer in layers]
        if node.name in _COPIES and whole:
            return self._copied(node, place)
        return Unknown(f"{node.name} computes it")

    def _copied(self, node: Node, place: View) -> list[Layer] | Unknown:
        """What an op makes of another tensor of the same shape: its numbers, perhaps scaled."""
        same = node.name in ("copy_", "clone", "_to_copy")
        source = node.args[1] if node.name == "copy_" else node.args[0]
        if not isinstance(source, View) or source.size != place.size or not (same or _is_affine(node)):
            return Unknown(f"{node.name} computes it")
        before = self.order[id(node)]
        nodes = [other for other in self.nodes.get(source.storage, ()) if self.order[id(other)] < before]
        found = self._layers(source, nodes)
        if isinstance(found, Unknown):
            return found
        scale, shift = (1.0, 0.0) if same else _affine(node)
        return [Layer(layer.box, layer.distribution.affine(scale, shift)) for layer in found.layers]

    def _draws(self, storage: int) -> bool:
        """Whether anything that the storage's content depends on is random."""
        open_, seen = [storage], set()
        while open_:
            now = open_.pop()
            seen.add(now)
            for node in self.nodes.get(now, ()):
                if node.random:
                    return True
                open_ += [other for other in node.reads if other not in seen]
        return False


_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_FACTORIES: dict[str, Distribution] = {
    "zeros": Constant(0.0),
    "zeros_like": Constant(0.0),
    "new_zeros": Constant(0.0),
    "ones": Constant(1.0),
    "ones_like": Constant(1.0),
    "new_ones": Constant(1.0),
    "rand": Uniform(),
    "rand_like": Uniform(),
    "randn": Normal(),
    "randn_like": Normal(),
}
_OUT_OF_PLACE = {"mul", "div", "add", "sub", "neg"}
_COPIES = {*_OUT_OF_PLACE, "copy_", "clone", "_to_copy"}
_MAKES = {*_FACTORIES, *_OUT_OF_PLACE, "full", "full_like", "new_full", "clone", "_to_copy"}


def _filled(node: Node) -> Distribution | None:
    """The distribution that an op fills its target with, whatever was there."""
    arguments = node.args
    if node.name in _FACTORIES:
        return _FACTORIES[node.name]
    if node.name == "zero_":
        return Constant(0.0)
    if node.name in ("fill_", "full", "full_like", "new_full"):
        value = arguments[-1]
        return Constant(float(value)) if isinstance(value, (int, float)) else None
    if node.name == "uniform_":
        return Uniform(*_numbers(arguments[1:3], (0.0, 1.0)))
    if node.name == "normal_":
        return Normal(*_numbers(arguments[1:3], (0.0, 1.0)))
    if node.name == "trunc_normal_":
        return TruncatedNormal(*arguments[1:5])
    return None


def _numbers(given: tuple, default: tuple[float, ...]) -> tuple[float, ...]:
    return (*given, *default[len(given) :])


def _scaled(node: Node) -> tuple[float, float] | None:
    """(scale, shift) of an in-place op with a number."""
    in_place = node.name.endswith("_") and node.name[:-1] in _OUT_OF_PLACE
    return _affine(node) if in_place and _is_affine(node) else None


def _is_affine(node: Node) -> bool:
    return all(isinstance(value, (int, float)) for value in node.args[1:])


def _affine(node: Node) -> tuple[float, float]:
    arguments, name = node.args, node.name.rstrip("_")
    value = float(arguments[1]) if len(arguments) > 1 else 0.0
    if name in ("add", "sub"):
        value *= float(node.kwargs.get("alpha", 1)) * (1 if name == "add" else -1)
    return {"mul": (value, 0.0), "div": (1.0 / value if value else 0.0, 0.0), "neg": (-1.0, 0.0)}.get(
        name, (1.0, value)
    )


def _box(view: View, place: View) -> Box | None:
    """Which block of the tensor at `place` a view of the same storage is; None where it is no block of it.

    Both are read as offsets and strides: each dim of the tensor is either cut by the view, or selected away.
    """
    at, box, dims = view.offset - place.offset, [], list(zip(view.size, view.stride, strict=True))
    if view.dtype != place.dtype or at < 0:
        return None
    for size, stride in zip(place.size, place.stride, strict=True):
        start = min(at // stride, max(size - 1, 0)) if stride else 0
        at -= start * stride
        length = dims.pop(0)[0] if dims and (dims[0][1] == stride or dims[0][0] == size == 1) else 1
        if start + length > size:
            return None
        box.append(slice(start, start + length))
    return None if dims or at else tuple(box)
