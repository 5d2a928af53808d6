"""The initialization of a model that is already built: `reset_parameters` and `_init_weights` of its modules, on
stand-ins.

The stand-ins are shallow copies of all modules with full-shaped meta parameters, so the model is not changed, and the
layout of its shards does not matter. Initialization inside a constructor cannot be repeated: then the model must be
built by `build_on_meta`, or rules given.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.state.guards.stock_methods import is_guard
from parallelize.state.local_config import LocalConfig
from parallelize.state.randomness.init.recorder import Initialization, Recipe, Unknown, record_initialization
from parallelize.state.randomness.init.stock_generator import replay_stock
from parallelize.state.records import KEY

_NOT_COPIED = {"forward", "to_empty", "_apply", KEY, "_is_hf_initialized", "_compiled_call_impl"}


def recipe_of_stand_ins(module: nn.Module, blanks: dict[str, torch.Tensor]) -> tuple[Recipe, dict[str, Initialization]]:
    """(recipe of the initializers, initialization of each parameter and persistent buffer).

    Args:
        blanks: full-shaped meta tensors of the parameters, by each name, including those of other pipeline stages.
    """
    with record_initialization() as recorder:
        stand_in = _StandIns(blanks).of(module, "")
        failures = _run_initializers(stand_in)
        named = [*stand_in.named_parameters(remove_duplicate=False), *stand_in.named_buffers(remove_duplicate=False)]
        recipe = Recipe(recorder.recording, {name: recorder.view(tensor) for name, tensor in named}, replay_stock)
    initializations = recipe.read()
    for prefix, reason in (*failures.items(), *_initializing_constructors(module)):
        for name in initializations:
            if not prefix or name.startswith(prefix + "."):
                initializations[name] = Unknown(reason)
    return recipe, initializations


class _StandIns:
    """Copies of modules, each created once. Tied parameters are separate, as they are when stock code initializes
    them."""

    def __init__(self, blanks: dict[str, torch.Tensor]):
        self.blanks = blanks
        self.keys: dict[str, list[str]] = {}  # module name -> names of its parameters
        for name in blanks:
            owner, _, key = name.rpartition(".")
            self.keys.setdefault(owner, []).append(key)
        self.modules: dict[int, Any] = {}

    def of(self, module: nn.Module, prefix: str) -> Any:
        if id(module) in self.modules:
            return self.modules[id(module)]
        copy: Any = object.__new__(_stock_class(module))
        self.modules[id(module)] = copy
        copied = {
            key: value for key, value in module.__dict__.items() if key not in _NOT_COPIED and not is_guard(value)
        }
        copy.__dict__ = {key: _plain(value) for key, value in copied.items()}
        keys = dict.fromkeys([*module._parameters, *self.keys.get(prefix.rstrip("."), ())])
        copy.__dict__["_parameters"] = {key: self._parameter(prefix + key) for key in keys}
        absent = any(p is None and prefix + key in self.blanks for key, p in module._parameters.items())
        copy.__dict__["_buffers"] = {key: _blank(b, absent) for key, b in module._buffers.items()}
        copy.__dict__["_modules"] = {
            key: None if child is None else self.of(child, f"{prefix}{key}.") for key, child in module._modules.items()
        }
        return copy

    def _parameter(self, name: str) -> nn.Parameter | None:
        return nn.Parameter(torch.empty_like(self.blanks[name]), requires_grad=False) if name in self.blanks else None


def _stock_class(module: nn.Module) -> type:
    """The class without that of `fully_shard`, which libraries mistake for a user's class and skip some of its
    modules."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _plain(value: Any) -> Any:
    return object.__getattribute__(value, "_config") if type(value) is LocalConfig else value


def _blank(buffer: torch.Tensor | None, absent: bool) -> torch.Tensor | None:
    """A meta copy of a buffer. `absent`: the module is of another pipeline stage, and its buffers were removed."""
    if buffer is None:
        return torch.empty((), device="meta") if absent else None
    return torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")


def _run_initializers(stand_in: Any) -> dict[str, str]:
    """Run initializers in the order of construction (children first), then those of a library.

    Returns: module name -> why its initializer failed.
    """
    failures: dict[str, str] = {}
    for name, module in _children_first(stand_in, ""):
        for method in ("reset_parameters", "_reset_parameters"):
            if callable(getattr(module, method, None)):
                _try(getattr(module, method), name, failures)
                break
    for name, module in _outermost(stand_in, ""):
        if callable(getattr(module, "initialize_weights", None)):
            _try(module.initialize_weights, name, failures)
        else:
            _try(partial(module.apply, module._init_weights), name, failures)
    return failures


def _try(call: Callable[[], Any], name: str, failures: dict[str, str]) -> None:
    try:
        with torch.no_grad():
            call()
    except Exception as error:  # the user's initializer may read values, which a meta tensor does not have
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        failures[name] = f"its initializer fails on the meta device: {reason}"


def _children_first(module: nn.Module, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    """The modules that initialize everything below them: those with `_init_weights(module)`, the outermost of each
    branch."""
    if callable(getattr(module, "_init_weights", None)):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, f"{name}.{key}" if name else key)


def _initializing_constructors(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, reason) of modules whose constructors initialize parameters."""
    for name, child in module.named_modules():
        line = _initializing_line(child.__class__)
        if line and not hasattr(child, "initialize_weights"):
            yield name, f"the constructor of {type(child).__name__} initializes parameters: `{line}`"


@lru_cache(maxsize=4096)
def _initializing_line(cls: Any) -> str:
    """The line of a user's constructor, or of a method that it calls, that fills parameters; "" if there is none."""
    if cls.__module__.partition(".")[0] in ("torch", "transformers") or "__init__" not in vars(cls):
        return ""
    lines = _source(cls.__init__)
    called = {name for line in lines for name in _OWN_CALL.findall(line)} - _RERUN_METHODS
    for name in sorted(called):
        method = getattr(cls, name, None)
        if str(getattr(method, "__module__", "torch")).partition(".")[0] not in ("torch", "transformers"):
            lines += _source(method)
    return next((line.strip() for line in lines if _FILLS.search(line) and not _RERUN.search(line)), "")


def _source(function: Any) -> list[str]:
    try:
        return inspect.getsource(function).splitlines()
    except (OSError, TypeError):
        return []


_OWN_CALL = re.compile(r"self\.(\w+)\(")
_FILLS = re.compile(
    r"\binit\.\w+_\(|\.apply\(|\.(?:normal|uniform|fill|zero|copy|mul|trunc_normal)_\(|(?<!self)\.data\s*[*/+-]?=[^=]"
)
_RERUN_METHODS = {"reset_parameters", "_reset_parameters", "_init_weights"}
_RERUN = re.compile(r"\.apply\(self\._init_weights\)")
