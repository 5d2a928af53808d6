"""Layers that are alike are analysed once: which of them run, and what stands in for the others.

A layer is known by everything that could change what it does: its classes, shapes, plain attributes and its entries in the
config's lists, but not by its number. The first and the last layer always run, since regions and stages end there; of the
others a few of each kind. The rest pass their input on, and hold no parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from parallelize.analysis.records import Segment, Trace
from parallelize.plan.model import ModelFacts

NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx"}
_OWN = set(vars(nn.Module()))  # what every module has: its tables of parameters, hooks and children
_PLAIN = (int, float, bool, str, type(None))


class PassThrough(nn.Module):
    """Returns its first input, in the form in which the layer it stands for returns its output.

    Nobody who lists modules finds it: to rules, hooks and recompute it is not there.
    """

    def __init__(self, stands_for: nn.Module, like: nn.Module):
        super().__init__()
        # beside the module tree: its attributes are read, its parameters are nobody's
        self.__dict__["_stands_for"], self.__dict__["_like"] = stands_for, like

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return iter(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        shape = self.__dict__["_like"].__dict__.get("_returned")
        return (x, *(None for _ in range(shape - 1))) if shape else x


def _told(value: Any) -> Any:
    """What is compared of an attribute: values of plain ones, also in containers; which function; else the class."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_told, value))
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _told(one)) for key, one in value.items()), key=str))
    if isinstance(value, partial):
        return _told(value.func), _told(value.args), _told(value.keywords)
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType)):
        return value.__qualname__, id(getattr(value, "__func__", value))
    return type(value).__qualname__


def layer_signature(layer: nn.Module, number: int, config: Any, rules: Mapping[str, Any]) -> tuple:
    """Equal for layers that do the same work."""
    found: list[Any] = [rules.get("recompute_every", 1) and number % rules.get("recompute_every", 1) == 0]
    for name, module in layer.named_modules():
        plain = {k: _told(v) for k, v in vars(module).items() if k not in NUMBERS and k not in _OWN}
        tensors = [*module._parameters.items(), *module._buffers.items()]
        shapes = tuple((k, tuple(p.shape), str(p.dtype), p.requires_grad) for k, p in tensors if p is not None)
        found.append((name, type(module).__qualname__, tuple(sorted(plain.items(), key=str)), shapes))
    found += [(key, str(values[number])) for key, values in _lists(config) if number < len(values)]
    return tuple(found)


def _lists(config: Any) -> Iterator[tuple[str, Any]]:
    count = getattr(config, "num_hidden_layers", None)
    for key, values in sorted(vars(config).items()) if config is not None else ():
        if isinstance(values, (list, tuple)) and len(values) == count:
            yield key, values


@dataclass(frozen=True)
class Alike:
    """stands_for: layer -> the layer that runs in its place. kinds: of those that stand for others, the ones that run."""

    stands_for: dict[str, str]
    kinds: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def none(layers: Sequence[str]) -> Alike:
        """Every layer runs."""
        return Alike({name: name for name in layers})


def likenesses(layers: Sequence[str], model: ModelFacts, recompute_every: int = 1) -> Alike:
    """Which layers run for which others.

    Of each kind the first, the second and the last run: what several layers share (masks) is made by the first of them, and
    let go by the first in backward, or by the last in forward; the second does neither, so it stands for the others.
    """
    rules = {"recompute_every": recompute_every}
    kinds: dict[tuple, list[str]] = {}
    found = {name: name for name in layers}
    for number, name in enumerate(layers):
        if number not in (0, len(layers) - 1) and not _shared(name, model):
            kinds.setdefault(layer_signature(model.objects[name], number, model.config, rules), []).append(name)
    for names in kinds.values():
        for name in names[2:-1]:
            found[name] = names[1]
    return Alike(found, tuple((names[0], names[1], names[-1]) for names in kinds.values() if len(names) > 3))


def _shared(name: str, model: ModelFacts) -> bool:
    """Whether something in a layer is something elsewhere, too: a module used twice, a tied parameter."""

    def inside(other: str) -> bool:
        return other == name or other.startswith(name + ".")

    if name not in model.objects:
        return True
    tied = any(
        len({inside(one) for one in fact.names}) > 1 for fact in model.parameters.values() if len(fact.names) > 1
    )
    return tied or any(inside(other) != inside(first) for other, first in model.aliases.items() if other != first)


def consistent(trace: Trace, alike: Alike) -> bool:
    """Whether layers of one kind did the same: a forward may depend on a layer's number, or use what layers long ago returned."""
    if not trace.regular and alike.kinds:
        return False
    for segments in (trace.later.forward, trace.later.backward):
        done = {segment.unit: _work(segment) for segment in segments}
        if any(len({done.get(name) for name in names}) > 1 for names in alike.kinds):
            return False
    return True


def _work(segment: Segment) -> tuple:
    cut = len(segment.unit)
    return segment.flops, tuple(sorted(message._replace(module=message.module[cut:]) for message in segment.messages))


def thin_out(root: nn.Module, alike: Mapping[str, str]) -> None:
    """Replace, in place, each layer that another stands for; parameters that are tied to others must not be among them."""
    for name, other in alike.items():
        if name != other:
            above, _, key = name.rpartition(".")
            holder = root.get_submodule(above)
            stand_in = PassThrough(holder.get_submodule(key), root.get_submodule(other))
            holder._modules[key] = stand_in


def remember_outputs(root: nn.Module, names: set[str]) -> None:
    """Have layers that run tell their stand-ins whether they return a tensor or a tuple."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        module.__dict__["_returned"] = len(output) if isinstance(output, tuple) else 0

    for name in names:
        root.get_submodule(name).register_forward_hook(note)
