"""Equal layers are analyzed once: which layers run, and what replaces the others.

A layer's signature is everything that could change what it does: its classes, shapes, plain attributes and its entries in the
config's lists, but not its number. Layers with one signature are an equivalence class. The first and the last layer of the model
always run, because regions and stages end there. Of the others, a few of each class run. The rest are replaced by modules that
return their input and have no parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from parallelize.plan.model_facts import ModelFacts
from parallelize.tools.analysis.record.trace_data import MicrobatchTrace, Segment

NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx"}
_MODULE_ATTRIBUTES = set(vars(nn.Module()))  # of every module: its tables of parameters, hooks and children
_PLAIN = (int, float, bool, str, type(None))


class PassThrough(nn.Module):
    """Returns its first input, in the structure (tensor or tuple) in which the layer's representative returns its output.

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
    """What is compared of an attribute: plain values, also in containers; the identity of a function; else the class."""
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

    Of each class the first, the second and the last run. The first creates what several layers share (masks) and frees it in
    backward; the last frees it in forward. The second does neither, so it represents the others.
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
    return tied or any(inside(alias) != inside(first) for alias, first in model.aliases.items() if alias != first)


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
