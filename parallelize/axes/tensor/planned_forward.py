"""What a planned module runs: conversion of its input, its own forward on local parameters, conversion of its output.

Every style is the step `planned` of its module; see `forward_steps.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.tensor.local_inputs import Call, advice_on_widths
from parallelize.axes.tensor.overlap_sites import CallSite
from parallelize.axes.tensor.region import Region
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.collectives import pad_to
from parallelize.ops.matmul.overlapped_linear import OverlappedLinear
from parallelize.plan.block_formats import is_conv1d
from parallelize.state.forward_steps import PLANNED, add_step, own_forward, step_of
from parallelize.state.parameters import Slot
from parallelize.state.records import applied
from parallelize.state.step_results import as_instance

Conversion = Callable[[torch.Tensor], torch.Tensor]
_NONE: Mapping[str, Conversion] = {}


class ModuleRuntime:
    """The run-time state of one planned module.

    Args:
        slots: its own parameters.
        enter: conversion of the input, or None.
        argument: (position, name) of the input that `enter` converts.
        max_inputs: the most positional inputs that a call may have; 0: any number.
        leave: conversion of the output, or None. Of a tuple, it converts the first item.
        hide_bias: add the bias after `leave`, so that the reduction of partial outputs does not sum it.
        bias_group: where that may leave a shard of the features, the group over which they are sharded: the bias is
            full on every rank, and the part for this rank's features is added.
        overlap: what runs this module where its collective overlaps with its matmul: an `OverlappedRowLinear` or a
            `SharedInput`. `index` is then the module's index among those that share an input.
        prefetched: of experts, and of a module that is computed while their results return: that module's
            `ComputedAhead`.
        shows_local: forwards of parents that run now and read its parameters, for which its attributes stay local
            tensors.
        in_adapter: of a layer with adapters: whether their module calls it now.
        reparametrized: what adapters that run now make of a local parameter, by key. Called in the module's own
            forward, in which ZeRO 3 has gathered its parameters.
        convert_choices: of experts that are split: the conversion of a call's choices and weights.
        region: that the module's forward asks, where it exchanges tokens for heads. A deep copy of the model has
            conversions and a region of its own, so that no forward may refer to them otherwise.
        inputs: functions from a call's arguments to those with this rank's part of one of them.
        bias_scale: of a row linear whose output an adapter scales before the reduction: 1 on the rank that adds its
            bias, else 0.
    """

    __slots__ = (
        "argument",
        "bias",
        "bias_group",
        "bias_scale",
        "convert_choices",
        "defer_bias",
        "enter",
        "in_adapter",
        "index",
        "inputs",
        "leave",
        "max_inputs",
        "overlap",
        "prefetched",
        "region",
        "reparametrized",
        "shows_local",
        "slots",
        "weight",
    )

    def __init__(self, slots: tuple[Slot, ...]):
        self.slots = slots
        self.weight = next((slot for slot in slots if slot.key == "weight"), None)
        self.bias = next((slot for slot in slots if slot.key == "bias"), None)
        self.enter: Conversion | None = None
        self.argument: tuple[int, str] = (0, "input")
        self.max_inputs = 0
        self.leave: Conversion | None = None
        self.defer_bias = False
        self.bias_group: Group | None = None
        self.overlap: Any = None
        self.prefetched: Any = None
        self.index = 0
        self.shows_local = 0
        self.bias_scale: float | None = None
        self.reparametrized: dict[str, Conversion] = {}
        self.in_adapter = False
        self.convert_choices: Conversion | None = None
        self.region: Any = None
        self.inputs: tuple[Callable[[tuple[Any, ...], dict[str, Any]], Call], ...] = ()

    def run_stock(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for with_own_part in self.inputs:
            args, kwargs = with_own_part(args, kwargs)
        inner = module._applied.inner.get(PLANNED)  # `run_inner`, without its call
        if inner is None:
            return type(module).forward(module, *args, **kwargs)
        return inner(module, *args, **kwargs)


def install(module: nn.Module, planned: ModuleRuntime, forward: Callable[..., Any] | None = None) -> None:
    """Make `module` run as planned, by the fastest forward that fits it."""
    if forward is not None:
        add_step(module, PLANNED, forward, planned=planned)
        return
    is_linear = type(module) is nn.Linear
    if planned.defer_bias:
        forward, general = _rowwise_linear if is_linear else _rowwise_stock, _rowwise_stock
    elif is_linear and planned.weight is not None:
        forward, general = _linear, _stock
    else:
        forward, general = _fast_forward_for(planned) if planned.leave is None else _stock, _stock
    add_step(module, PLANNED, forward, general, planned=planned)


def read_changed_parameters(module: nn.Module) -> None:
    """Let a planned module run a forward that asks for what adapters make of its parameters
    (`ModuleRuntime.reparametrized`)."""
    if step_of(module, PLANNED) is _weight_only_forward:
        add_step(module, PLANNED, _stock)


def installed(module: nn.Module) -> ModuleRuntime | None:
    """What `install` gave to this module, or None."""
    return as_instance(applied(module).planned, ModuleRuntime)


def _fast_forward_for(planned: ModuleRuntime) -> Callable[..., Any]:
    """The fastest forward for a module whose output is not converted."""
    if not planned.slots and planned.enter is not None:
        return _forward_with_converted_input
    only_weight = len(planned.slots) == 1 and planned.weight is not None
    return _weight_only_forward if only_weight and planned.enter is None else _stock


def argument_of(module: nn.Module, name: str) -> tuple[int, str]:
    """(position, name) of the named argument of the module's forward, or of its first one.

    Raises: ModelError `no-such-argument`.
    """
    parameters = list(inspect.signature(own_forward(module)).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not name and names:
        return 0, names[0]
    if not names and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 0, name or "input"
    if name not in names:
        raise ModelError(
            Problem(
                "no-such-argument",
                f"{type(module).__name__}.forward takes no argument {name!r}",
                fix="it takes: " + ", ".join(names),
            )
        )
    return names.index(name), name


def too_many_inputs(module: str, num_inputs: int, layouts: int) -> ModelError:
    """The error of a call with more positional inputs than there are layouts of inputs."""
    what = f"{module} got {num_inputs} positional inputs, and input_layouts has {layouts}"
    return ModelError(
        Problem("layout-count", what, fix="one layout for each positional input; None leaves it unchanged")
    )


def convert_argument(
    conversion: Conversion, argument: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """The call with one argument converted, whether it was passed by position or by name.

    Raises: ModelError `no-such-argument` where it was not passed.
    """
    position, name = argument
    if position == 0 and len(args) == 1:
        return (conversion(args[0]),), kwargs
    if position < len(args):
        return (*args[:position], conversion(args[position]), *args[position + 1 :]), kwargs
    if name in kwargs:
        return args, {**kwargs, name: conversion(kwargs[name])}
    raise ModelError(
        Problem(
            "no-such-argument", f"called without `{name}`, which the plan converts", fix="pass it by position or name"
        )
    )


# -- forwards, each bound to its module -----------------------------------------------------------------------------


def _linear(self: Any, input: torch.Tensor) -> torch.Tensor:
    planned = self._applied.planned
    parameters = self._parameters
    if planned.enter is not None:
        input = planned.enter(input)
    bias = planned.bias
    out = F.linear(input, planned.weight.local(parameters), bias if bias is None else bias.local(parameters))
    return out if planned.leave is None else planned.leave(out)


def _rowwise_linear(self: Any, input: torch.Tensor) -> torch.Tensor:
    planned = self._applied.planned
    parameters = self._parameters
    if planned.enter is not None:
        input = planned.enter(input)
    out = planned.leave(F.linear(input, planned.weight.local(parameters)))
    return out if planned.bias is None else add_bias(planned, out, planned.bias.local(parameters))


def _forward_with_converted_input(self: Any, *args: Any, **kwargs: Any) -> Any:
    planned = self._applied.planned
    if planned.max_inputs and len(args) > planned.max_inputs:
        raise too_many_inputs(type(self).__name__, len(args), planned.max_inputs)
    args, kwargs = convert_argument(planned.enter, planned.argument, args, kwargs)
    if torch.compiler.is_dynamo_compiling():
        return planned.run_stock(self, args, kwargs)
    try:
        return planned.run_stock(self, args, kwargs)
    except RuntimeError as error:
        if is_shape_error(error):
            raise misread_shard(self, error) from error
        raise


FIX_SHAPES = (
    "list the head counts and widths that it reads under `local:`; check that each `colwise` is followed by a "
    "`rowwise`; modules "
    "that are shared or get adapters: share them before the plan, and merge adapters before it"
)
FIX_WIDTHS = (
    "say in the plan that it reads the width of this rank's heads: `local_inputs: {MODULE: {ARGUMENT: width(heads)}}`"
)
_SHAPE_ERRORS = ("is invalid for input of size", "shapes cannot be multiplied", "must match the size")


def is_shape_error(error: RuntimeError) -> bool:
    """Whether PyTorch refused an operation for its shapes."""
    return any(text in str(error) for text in _SHAPE_ERRORS)


def misread_shard(module: nn.Module, error: RuntimeError) -> ModelError:
    """The error of a stock forward that expects a full shape and gets a shard's, most often for want of a local head
    count."""
    advice = advice_on_widths(type(module))
    numbers = [f"{k} = {v}" for k, v in vars(module).items() if type(v) is int and v > 1 and not k.startswith("_")]
    return ModelError(
        Problem(
            "shard-misread",
            f"{type(module).__name__}.forward fails on this rank's shards: {str(error).splitlines()[0]}",
            rows=(("holds", ", ".join(numbers) or "no integers of its own"),),
            fix=f"{advice}; or {FIX_WIDTHS}" if advice else FIX_SHAPES,
        )
    )


def _stock(self: Any, *args: Any, **kwargs: Any) -> Any:
    planned = self._applied.planned
    if planned.enter is not None:
        args, kwargs = convert_argument(planned.enter, planned.argument, args, kwargs)
    out = on_local_parameters(self, planned, args, kwargs)
    if planned.leave is None:
        return out
    return (planned.leave(out[0]), *out[1:]) if isinstance(out, tuple) else planned.leave(out)


def reading_children(children: tuple[str, ...]) -> Callable[..., Any]:
    """A forward that reads parameters of these modules inside of it: local tensors in their place."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = [self.get_submodule(child) for child in children]
        try:
            for module in modules:
                planned = module._applied.planned
                planned.shows_local += 1
                for slot in planned.slots:
                    module.__dict__[slot.key] = slot.local(module._parameters)
            return _stock(self, *args, **kwargs)
        finally:
            for module in modules:
                planned = module._applied.planned
                planned.shows_local -= 1
                if not planned.shows_local:
                    hide_local(module.__dict__, planned)

    return forward


def hide_local(attributes: dict[str, Any], planned: ModuleRuntime) -> None:
    for slot in planned.slots:
        attributes.pop(slot.key, None)


def on_local_parameters(
    self: Any,
    planned: ModuleRuntime,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    converted: Mapping[str, Conversion] = _NONE,
) -> Any:
    """The module's own forward, which reads local tensors for its parameters, some of them `converted` by key.

    Attribute look-up reads an instance's dictionary before the parameters, so the local tensors are put there.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(self, planned, args, kwargs, converted)
    attributes, parameters = self.__dict__, self._parameters
    try:
        for slot in planned.slots:
            attributes[slot.key] = slot.local(parameters)
        for key, change in planned.reparametrized.items():
            attributes[key] = change(getattr(self, key))
        for key in converted:
            if key in attributes:
                attributes[key] = converted[key](attributes[key])
        return planned.run_stock(self, args, kwargs)
    finally:
        if not planned.shows_local:
            hide_local(attributes, planned)
        for key in planned.reparametrized:
            attributes.pop(key, None)


def _traced(
    self: Any,
    planned: ModuleRuntime,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    converted: Mapping[str, Conversion] = _NONE,
    replaced: Mapping[str, torch.Tensor | None] | None = None,
) -> Any:
    """The same for Dynamo, which in torch 2.11 can trace a store into `_parameters` but not a removal from a
    dictionary.

    replaced: other tensors to read for some parameters.
    """
    parameters = self._parameters
    stored = {key: parameters[key] for key in (*(slot.key for slot in planned.slots), *(replaced or ()))}
    for slot in planned.slots:
        local = slot.local(parameters)
        parameters[slot.key] = converted[slot.key](local) if slot.key in converted else local
    for key, value in (replaced or {}).items():
        parameters[key] = value
    out = planned.run_stock(self, args, kwargs)
    for key, parameter in stored.items():
        parameters[key] = parameter
    return out


def _weight_only_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`_stock` for a module with one parameter and no conversions, such as most norms: the same at less cost."""
    if torch.compiler.is_dynamo_compiling():
        return _traced(self, self._applied.planned, args, kwargs)
    attributes, planned = self.__dict__, self._applied.planned
    attributes["weight"] = planned.weight.local(self._parameters)
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        if not planned.shows_local:
            attributes.pop("weight", None)


def _rowwise_stock(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward of a linear on its shard without the bias, which is added once, after the reduction."""
    planned = self._applied.planned
    if planned.enter is not None:
        args, kwargs = convert_argument(planned.enter, planned.argument, args, kwargs)
    bias = None if planned.bias is None else planned.bias.local(self._parameters)
    # Conv1D cannot run without a bias
    hidden = torch.zeros_like(bias) if bias is not None and is_conv1d(self) else None
    out = planned.leave(on_shard(self, planned, hidden, args, kwargs).contiguous())
    if bias is None:
        return out
    if isinstance(self, nn.modules.conv._ConvNd):  # whose channels come before the positions; a batch may have no dim
        return add_bias(planned, out, bias, out.ndim - len(self.kernel_size) - 1)
    return add_bias(planned, out, bias)


def on_shard(
    self: Any, planned: ModuleRuntime, bias: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The stock forward of a linear on its shard, with another bias in the place of its own."""
    if torch.compiler.is_dynamo_compiling():
        return _traced(self, planned, args, kwargs, replaced={"bias": bias} if "bias" in self._parameters else None)
    attributes, parameters = self.__dict__, self._parameters
    shown = {key: attributes[key] for key in ("bias",) if key in attributes}
    for slot in planned.slots:
        attributes[slot.key] = slot.local(parameters)
    attributes["bias"] = bias
    try:
        return planned.run_stock(self, args, kwargs)
    finally:
        if not planned.shows_local:
            hide_local(attributes, planned)
        attributes.pop("bias", None)
        attributes.update(shown)


def add_bias(planned: ModuleRuntime, out: torch.Tensor, bias: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """In the dtype of the matmul, as a linear under autocast does. dim: of the features."""
    group = planned.bias_group
    if group is not None and out.shape[-1] != bias.shape[0]:
        start, stop = even_interval(bias.shape[0], group.size, group.rank)
        bias = bias[start:stop]
    bias = bias if bias.dtype == out.dtype else bias.to(out.dtype)
    return out + (bias if dim == -1 else bias.view(-1, *(1 for _ in range(out.ndim - dim - 1))))


# -- row linear ------------------------------------------------------------------------------------------------------
# A row linear whose reduction overlaps with its matmul.


class OverlappedRowLinear:
    """Reduces partial outputs while the matmul computes them.

    Args:
        region: where outputs are scattered along the sequence; None where they are all-reduced.
        dim: the dim of the sequence.
        transposed: the weight is stored [in, out].
        features: (input, output) features on the rank that has the most.
    """

    def __init__(
        self, call_site: CallSite, region: Region | None, dim: int, *, transposed: bool, features: tuple[int, int]
    ):
        self.call_site, self.region, self.dim = call_site, region, dim
        self.transposed, self.features = transposed, features

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = weight.t() if self.transposed else weight
        call_site, scatters = self.call_site, self.region is not None and self.region.scatters()
        op = "linear_reduce_scatter" if scatters else "linear_all_reduce"
        call = OverlappedLinear(
            op, x, [weight], bias, call_site.group, decided=call_site.algorithm, features=self.features
        )
        if not scatters:
            return call.reduce(call_site.deferred)
        out = call.scatter(self.dim, call_site.deferred)
        padded = -(-x.shape[self.dim] // call_site.group.size)  # shards inside a region are equally long on all ranks
        return out if out.shape[self.dim] == padded else pad_to(out, self.dim, padded)
