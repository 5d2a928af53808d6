"""Refuses calls of a stock model that need full parameters, where ranks store shards: saving, resizing, initializers,
draws.

They would fail in the words of DTensors, or write the shards of one rank as if they were the model. Parameters that
replace others after `shard_data` would be trained by each rank alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallelize.base.errors import ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import applied, pipeline_cut

_FIXES = {
    "save_pretrained": "parallelize.save_pretrained(model, folder) on every rank; or model.save_pretrained(folder, "
    "state_dict=state) on rank 0, after state = full_state_dict(model) on every rank",
    "resize_token_embeddings": "resize before the plan is applied; or save a checkpoint, build the model with more "
    "tokens, and resume(resize_vocabulary=True)",
}
# adapters that are added are planned, and given to the reduction over data axes, before the next forward:
# `adapters/added_adapters.py`


def guard_stock_methods(module: nn.Module) -> None:
    """Let these methods of a planned model, and of its submodules, raise ModelError `reads-full-parameters`."""
    for owner in module.modules():
        for name in _GUARDS:
            if callable(getattr(type(owner), name, None)):
                owner.__dict__.setdefault(name, MethodType(_GUARDS[name], owner))


def guard_replacing_methods(module: nn.Module) -> None:
    """Let those of them that replace parameters raise ModelError `replaces-parameters`, for parts of a model whose
    gradients are summed."""
    for owner in module.modules():
        for name in _REFUSALS:
            if callable(getattr(type(owner), name, None)):
                owner.__dict__.setdefault(name, MethodType(_REFUSALS[name], owner))


def _refusal(name: str) -> Callable[..., Any]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"{type(self).__name__}.{name} replaces parameters of a part of a model whose gradients are summed"
        fix = _FIXES[name].replace("before the plan is applied", "before shard_data or parallelize_model")
        raise ModelError(Problem("replaces-parameters", what, fix=fix))

    return refused


def _guard(name: str) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state_dict")
        is_full = isinstance(state, Mapping) and not any(isinstance(value, DTensor) for value in state.values())
        stored = "" if name == "save_pretrained" and is_full else _stored_here(self)
        if stored:
            what = f"{type(self).__name__}.{name} needs full parameters, and this rank stores {stored}"
            raise ModelError(Problem("reads-full-parameters", what, fix=_FIXES[name]))
        return getattr(type(self), name)(self, *args, **kwargs)

    return guarded


def _stored_here(model: nn.Module) -> str:
    """What a rank stores of a model, where that is not all of it."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "shards of them"
    is_cut = pipeline_cut(model) is not None or any(applied(inner).absent for inner in model.modules())
    return "those of its pipeline stages" if is_cut else ""


def guarded_method(name: str) -> Callable[..., Any]:
    """What raises ModelError `reads-full-parameters` where a model stores shards, and calls the stock method where it
    does not."""
    return _GUARDS[name]


_GUARDS = {name: _guard(name) for name in _FIXES}
_REFUSALS = {name: _refusal(name) for name in _FIXES if name != "save_pretrained"}


# -- user initializers -----------------------------------------------------------------------------------------------
# Refuses initializers and noise that would draw the same numbers into every shard of a weight. On the CPU, PyTorch
# draws the values of a DTensor from each rank's own generator. Ranks that are seeded alike, as tensor parallelism
# asks, then store the same numbers in different shards. On other devices DTensors have a generator that knows of
# shards. Weights whose layout no `Shard` describes (`LayoutDTensor`) are drawn in full on every rank. Methods of
# modules are refused before they write anything. What they would call, and what users call on parameters themselves
# (`nn.init.normal_(p)`, `p.uniform_()`, `torch.randn_like(p)`), is refused op by op.


_guarded: dict[int, weakref.ref[nn.Module]] = {}
"""The parallelized models, by id, as long as they live. A weak reference to a parameter would keep `.to()` from
swapping it."""


def guard_initializers(module: nn.Module) -> None:
    """Refuse to draw the weights of a parallelized model where every shard would get the same numbers.

    By `reset_parameters` and `_init_weights` of its modules, and by ops on its parameters, or on DTensors that were
    made from them.
    """
    _check_draws()
    key = id(module)
    _guarded[key] = weakref.ref(module, lambda _: _guarded.pop(key, None))
    for owner in module.modules():
        for name, guard in _INITIALIZERS.items():
            if callable(getattr(type(owner), name, None)) and name not in owner.__dict__:
                owner.__dict__[name] = MethodType(guard, owner)


def is_guard(value: Any) -> bool:
    """Whether the value of a module's attribute is what `guard_initializers` set there."""
    return isinstance(value, MethodType) and value.__func__ in _INITIALIZERS.values()


def _guarded_initializer(name: str) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        targets = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        _refuse_shards(name, targets[0]._parameters.values() if targets else self.parameters())
        return getattr(type(self), name)(self, *args, **kwargs)

    return guarded


def _refuse_shards(name: str, parameters: Iterable[torch.Tensor | None]) -> None:
    """Weights of one dim are left out: initializers fill them with constants."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.ndim > 1 and _draws_alike(parameter):
            raise _initializer_on_shards_error(name, parameter)


def _draws_alike(tensor: DTensor) -> bool:
    """Whether ranks that are seeded alike draw the same numbers into different shards."""
    placements = enumerate(tensor.placements)
    sharded = any(isinstance(placement, Shard) and tensor.device_mesh.size(dim) > 1 for dim, placement in placements)
    return sharded and tensor.device.type == "cpu"


def _initializer_on_shards_error(name: str, tensor: torch.Tensor) -> ModelError:
    what = f"{name} would draw the same numbers into every shard of a weight of shape {list(tensor.shape)}"
    fix = "parallelize.initialize(model, seed), which draws one model on any mesh; or initialize before planning; or "
    fix += "draw full tensors, the same on every rank, and load them by load_state_dict"
    return ModelError(Problem("initializer-on-shards", what, fix=fix))


def _check_draws() -> None:
    """Watch the ops of this process that draw numbers."""
    check_draws(_refuse_draw)


def _refuse_draw(op: str, target: DTensor) -> None:
    """Only for parameters of parallelized models, and DTensors that are stored as one of them is."""
    if not _draws_alike(target):
        return
    for module in [reference() for reference in list(_guarded.values())]:
        for parameter in module.parameters() if module is not None else ():
            if _stored_alike(target, parameter):
                raise _initializer_on_shards_error(op, target)


def _stored_alike(target: DTensor, parameter: torch.Tensor) -> bool:
    """`p.data`, `empty_like(p)` and what `nn.init` makes are other objects than `p`, with its shape, mesh and
    placements."""
    return (
        isinstance(parameter, DTensor)
        and target.shape == parameter.shape
        and target.placements == parameter.placements
        and target.device_mesh == parameter.device_mesh
    )


_INITIALIZERS = {
    name: _guarded_initializer(name) for name in ("reset_parameters", "_reset_parameters", "_init_weights")
}


# -- checked draws ---------------------------------------------------------------------------------------------------
# A check before each op that draws numbers into a DTensor, or like one.


aten = torch.ops.aten

_INTO = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_")
_LIKE = ("randn_like", "rand_like", "randint_like")
DRAWS_INTO = {aten.bernoulli_.float, *(getattr(aten, name).default for name in _INTO)}
DRAWS_LIKE = {aten.randint_like.low_dtype, *(getattr(aten, name).default for name in _LIKE)}


def check_draws(check: Callable[[str, Any], None]) -> None:
    """Call `check(name of the op, DTensor)` before each of these ops.

    The op then runs as always, of which a handler takes the place: on local tensors, and on devices with a generator
    that knows of shards, without the handler.
    """
    handlers = private.dtensor_handlers

    def handle(op: Any, args: tuple, kwargs: dict) -> Any:
        target = args[0]
        check(op._schema.name.removeprefix("aten::"), target)
        if target.device.type in ("cpu", "meta") and not any(placement.is_partial() for placement in target.placements):
            drawn = op(private.local_of(target), *args[1:], **kwargs)
            spec = private.spec_of(target)
            return target if op in DRAWS_INTO else private.wrap(drawn, private.with_dtype(spec, drawn))
        handlers.pop(op, None)  # another thread may miss a check, no more
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handle

    for op in DRAWS_INTO | DRAWS_LIKE:
        patches.handle(f"DTensor's handler of {op}", handlers, op, handle)
