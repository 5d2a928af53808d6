"""Random numbers that a model draws in its forward: noise, masks, timesteps, the layers that it skips.

Each draw is a function of seed, step, call site and of an element's place in the global batch, as dropout's masks are.
So the ranks of tp, cp and pp that must share it do, one process draws the same, and a recompute draws it again.
PyTorch's own generator is not used, and does not advance. A draw with a generator of the caller's own is the caller's.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from copy import deepcopy
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.base.errors import ModelError, Problem
from parallelize.base.package import FOLDER
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_draws import serve_draws
from parallelize.base.user_code import TORCH, is_ours
from parallelize.ops.random.counter import Key, key
from parallelize.state.randomness.dropout.call_sites import DropoutSites
from parallelize.state.randomness.dropout.draw_places import DrawPlace, no_place
from parallelize.state.randomness.dropout.drawn_numbers import (
    IN_PLACE,
    Draw,
    exponential_of,
    in_place,
    integers,
    normal_of,
    uniform_of,
)

T = torch.Tensor

_thread = threading.local()  # `running`: the model whose forward runs in this thread, or None
_model_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # module -> the model that it belongs to, for recomputes


class RunningModel:
    """A model whose forwards draw: its call sites, and the names of its modules."""

    def __init__(self, sites: DropoutSites):
        self.sites = sites
        self.root: weakref.ref[nn.Module] | None = None
        self.outer: RunningModel | None = None  # whose forward has called this one
        self.names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # modules that are called inside of the model, and are no part of it
        self.foreign: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        """Names are learned again, and no forward runs in a pickle."""
        return RunningModel, (self.sites,)

    def __deepcopy__(self, memo: dict) -> RunningModel:
        copy = memo[id(self)] = RunningModel(deepcopy(self.sites, memo))
        return copy

    def begin(self, root: nn.Module) -> None:
        """What this thread draws from now on is drawn in a forward of this model."""
        serve_draws(OPERATIONS, _serve)
        outer = getattr(_thread, "running", None)
        self.root, self.outer, _thread.running = weakref.ref(root), outer if outer is not self else None, self

    def end(self) -> None:
        _thread.running, self.outer = self.outer, None

    def has(self, module: nn.Module) -> bool:
        if module not in self.names and module not in self.foreign:
            self._learn()
            if module not in self.names:
                self.foreign[module] = True
        return module in self.names

    def _learn(self) -> None:
        root = self.root() if self.root is not None else None
        for fqn, module in root.named_modules() if root is not None else ():
            self.names[module] = fqn
            _model_of[module] = weakref.ref(self)


def _serve(name: str, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The result of an operation that draws; NotImplemented where PyTorch's own generator is to be used."""
    again = private.backward_id() != -1
    running: RunningModel | None = getattr(_thread, "running", None)
    if (running is None and not (again and _model_of)) or kwargs.get("generator") is not None:
        return NotImplemented
    device = _device(args, kwargs)
    if device.type == "meta":
        return NotImplemented
    call = draw_call(_is_owned if again else running.has, again)  # type: ignore[union-attr]
    model = _owner(call.module) if again and call is not None else running
    if call is None or model is None:
        return NotImplemented
    with private.plain_calls():
        return _Drawing(model, call, device).result(name, run, args, kwargs)


def _is_owned(module: nn.Module) -> bool:
    return _owner(module) is not None


def _owner(module: nn.Module) -> RunningModel | None:
    reference = _model_of.get(module)
    return None if reference is None else reference()


def _device(args: tuple, kwargs: dict) -> torch.device:
    return next(x.device for x in (*args, *kwargs.values()) if isinstance(x, T))


class _Drawing:
    """One draw."""

    def __init__(self, model: RunningModel, call: DrawCall, device: torch.device):
        self.sites, self.call, self.device = model.sites, call, device
        self.site = f"{model.names[call.module]} {call.path}"

    def result(self, name: str, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if self.call.compiled:
            return run(*args, **{**kwargs, "generator": self._generator(self._key_of_rows())})
        if name == "randperm.generator_out":
            return self._permutation(args[0], kwargs["out"])
        x = args[0]
        numbers = None if x.is_complex() else in_place(name, *args)
        if numbers is not None:
            return x.copy_(self._numbers(x.shape, numbers, x.dtype))
        serve = _SERVED.get(name)
        if serve is not None:
            return serve(self, *args)
        return run(*args, **{**kwargs, "generator": self._generator(self._key_of_full(name, x))})

    def _numbers(self, shape: torch.Size, numbers: Draw, dtype: torch.dtype) -> T:
        return self._place(shape).draw(shape, numbers, dtype)

    def _place(self, shape: torch.Size) -> DrawPlace:
        return self.sites.place_of_draw(shape, self.device, self.site, self.call.place)

    def bernoulli(self, x: T, p: T) -> T:
        return x.copy_(self._numbers(x.shape, uniform_of(torch.float64), torch.float64) < p)

    def normal(self, mean: T | float, std: T | float) -> T:
        like = torch.add(mean, std)
        return self._numbers(like.shape, normal_of(), torch.float64).mul_(std).add_(mean).to(like.dtype)

    def multinomial(self, weights: T, count: int, replacement: bool = False) -> T:
        """With replacement by the inverse of the cumulative distribution; without, the first of exponential
        arrivals."""
        if not replacement:
            arrivals = self._numbers(weights.shape, exponential_of(), torch.float64)
            return (weights / arrivals).topk(count, -1).indices
        shares = weights.to(torch.float64).cumsum(-1)
        u = self._numbers(torch.Size((*weights.shape[:-1], count)), uniform_of(torch.float64), torch.float64)
        return torch.searchsorted(shares, u * shares[..., -1:], right=True).clamp_(max=weights.shape[-1] - 1)

    def _permutation(self, count: int, out: T) -> T:
        """One for the whole step, of any number of elements."""
        stream, _ = self.sites.clock.call(self.site)
        order = integers(0, 2**62)(stream, torch.arange(count, device=self.device)).argsort(stable=True)
        return out.resize_(count).copy_(order)

    def _key_of_full(self, name: str, x: T) -> Key:
        """Of an operation that has a generator's numbers: of a tensor that every rank that shares it has in full."""
        place = self._place(x.shape)
        if place.is_cut:
            raise no_place(f"what {name} draws of shape {list(x.shape)}", self.call.place)
        return key(place.key.start, name, place.first_row)

    def _key_of_rows(self) -> Key:
        stream, forward = self.sites.clock.call(self.site)
        return key(stream.start, "compiled", forward.position.batch_offset)

    def _generator(self, stream: Key) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(stream.start & (2**63 - 1))


_SERVED: dict[str, Callable[..., T]] = {
    "bernoulli_.Tensor": _Drawing.bernoulli,
    "normal.Tensor_float": _Drawing.normal,
    "normal.float_Tensor": _Drawing.normal,
    "normal.Tensor_Tensor": _Drawing.normal,
    "multinomial": _Drawing.multinomial,
}
_BY_GENERATOR = (
    *("normal.Tensor_float_out", "normal.float_Tensor_out", "normal.Tensor_Tensor_out", "multinomial.out"),
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise", "rrelu_with_noise_"),
)
OPERATIONS = (*IN_PLACE, *_SERVED, *_BY_GENERATOR, "randperm.generator_out")
"""The operations of aten that all others draw with, apart from fused dropout: a model's dropout replaces that."""


# -- draw calls ------------------------------------------------------------------------------------------------------
# The call site of a draw, read from the stack of Python: the innermost module that is called, and the path to the
# draw inside of it. The path has the functions of the model's own code with the instruction of each, so that it is
# the same on every rank, and again in a recompute. What runs around a module (a pipeline stage, a recomputed unit,
# hooks, wrappers) is not in it.


_DTENSOR = os.path.join(TORCH, "distributed", "tensor") + os.sep
_MODULES = nn.modules.module.__file__
_INDUCTOR = "torch._inductor."  # begins the name of the module that a compiled graph's file is
_UNITS = os.path.join(FOLDER, "axes", "recomputation", "unit.py")


class DrawCall(NamedTuple):
    """module: the innermost known module that is called. path: of the draw in its code. place: file and line, for
    messages.

    compiled: whether a compiled graph draws, the seeds of its own generator.
    """

    module: nn.Module
    path: str
    place: str
    compiled: bool = False


def draw_call(is_known: Callable[[nn.Module], bool], again: bool) -> DrawCall | None:
    """The call site of the draw that runs. None: of no known module, or by a DTensor.

    Args:
        again: whether backward runs, so that it is a recompute.

    Raises: ModelError `unplaceable-draw` in a checkpointed function that is not the call of a module: no recompute
        would find it.
    """
    frame: FrameType | None = sys._getframe(3)
    path: list[str] = []
    place, in_checkpoint, compiled = "", False, False
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if file.startswith(_DTENSOR):
            return None
        if file == checkpoint.__file__:
            if again:  # the call of the module has ended
                return None
            in_checkpoint = in_checkpoint or torch.is_grad_enabled()
        compiled = compiled or frame.f_globals.get("__name__", "").startswith(_INDUCTOR)
        module = _called(frame)
        if module is not None and is_known(module):
            if in_checkpoint:
                raise _checkpointed(place)
            return DrawCall(module, "/".join(reversed(path)), place, compiled)
        if not is_ours(file):
            place = place or f"{os.path.basename(file)}:{frame.f_lineno}"
            step = f"{code.co_name}:{frame.f_lasti}"
            # in a class that `fully_shard` derives, what `transformers` wraps around a layer's forward is there twice
            if not in_checkpoint and step not in path[-1:]:
                path.append(step)
        frame = frame.f_back
    return None


def _called(frame: FrameType) -> nn.Module | None:
    """The module that this frame calls, or runs as a recomputed unit."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name == "_call_impl" and file == _MODULES:
        return frame.f_locals["self"]
    if name == "_pass" and file == _UNITS:
        return frame.f_locals["module"]
    return None


def _checkpointed(place: str) -> ModelError:
    what = (
        f"{place} draws random numbers in a checkpointed function, which is called again in backward without its module"
    )
    return ModelError(
        Problem("unplaceable-draw", what, fix="checkpoint the call of a module, or use parallelize.recompute")
    )
