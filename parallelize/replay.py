"""How a recomputed unit runs: its forward without saved tensors, and again in backward as it was.

The interception is an instance-level forward, as those of planned modules are (`forwards.py`): outside of the plan's edges,
inside of the user's hooks and of `fully_shard`'s. The run itself is PyTorch's non-reentrant checkpoint; around it stands what
that leaves to its caller: every tensor of the arguments is handed to it by position, so that a write between forward and
backward is an error wherever the tensor stood, and one that was passed twice stays one tensor; key/value caches, to which a
replay would append a second time, are left out; and overlapped linears find the decisions of then.

Under `torch.compile` the graph is given to the compiler with what is to be saved. A planned unit changes its parameter table
while it runs, which Dynamo takes into such a graph only with its `skip_fwd_side_effects_in_bwd_under_checkpoint` on; else it
leaves the unit to eager mode (or, with `fullgraph=True`, says so).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.ops.saving import Saving, traced_ops
from parallelize.ops.tape import Call, Place, in_recompute, remembered
from parallelize.overlap import SharedInput

log = logging.getLogger("parallelize")
T = torch.Tensor
_UNIT, _UNITS = "_recompute_unit", "_recompute_units"  # in a unit's dictionary, and in the root's


@dataclass(frozen=True)
class UnitCost:
    """What a recomputed unit keeps, in its most recent forward in training, and how often it ran.

    Attributes:
        mode: "full", "selective" or "off". save: names of what is kept.
        input_bytes: of inputs that require a gradient; masks and tables, which units share, are not counted.
        collectives, collective_bytes: results of planned collectives that are kept.
        ops, op_bytes: results of other ops that are kept; the bytes are None where this torch does not tell them.
        forwards, replays: since `recompute` was called.
    """

    mode: str
    save: tuple[str, ...]
    input_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    ops: int = 0
    op_bytes: int | None = 0
    forwards: int = 0
    replays: int = 0


class Unit:
    """The run-time state of one recomputed module.

    Args:
        kinds, ops: of collectives and of ops whose results are kept. save: the names for them.
    """

    def __init__(self, module: nn.Module, kinds: frozenset[str], ops: frozenset[Any], save: tuple[str, ...], on: bool):
        self.kinds, self.ops, self.save, self.on = kinds, ops, save, on
        self.copies: set[Place] = set()
        self.stock: Callable | None = module.__dict__.get("forward")
        self.contexts = partial(_contexts, kinds, ops, self.copies)
        self.shared = _shared_inputs(module)
        numbers = [inner.__dict__.get("layer_idx") for inner in module.modules()]
        self.layer = next((number for number in numbers if isinstance(number, int)), 0)
        self.forwards = self.replays = 0
        self.last: dict[str, Any] = {}
        self.told = False

    @property
    def mode(self) -> str:
        return ("selective" if self.save else "full") if self.on else "off"

    def cost(self) -> UnitCost:
        return UnitCost(self.mode, self.save, forwards=self.forwards, replays=self.replays, **self.last)

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The forward that the module had."""
        if self.stock is None:
            return type(module).forward(module, *args, **kwargs)
        return self.stock(*args, **kwargs)

    def record(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The same with nothing saved for backward but inputs, and what the unit keeps."""
        refuse_foreign(module, type(module).__name__)
        args, kwargs = self._without_cache(module, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            run = partial(self._pass, module)
            return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=self.contexts)
        tensors, rebuilt = _lifted((args, kwargs))
        call, saving = _call(self.kinds, self.ops, self.copies), Saving(self.ops)

        def forward(*tensors: T) -> Any:
            return self._pass(module, *rebuilt(tensors))

        out = checkpoint(forward, *tensors, use_reentrant=False, context_fn=partial(saving.contexts, call))
        self.forwards += 1
        self.last = {
            "input_bytes": sum(tensor.nbytes for tensor in tensors if tensor.requires_grad),
            "collectives": len(call.kept),
            "collective_bytes": call.num_bytes,
            "ops": saving.number,
            "op_bytes": saving.num_bytes,
        }
        return out

    def _pass(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The forward or a replay of it."""
        if torch.compiler.is_dynamo_compiling():
            return self.run(module, args, kwargs)
        misses = remembered("misses", lambda: [list(shared.misses) for shared in self.shared])
        if not in_recompute():
            return self.run(module, args, kwargs)
        self.replays += 1
        with _as_then(self.shared, misses):
            return self.run(module, args, kwargs)

    def _without_cache(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call without a key/value cache, to which a replay would append a second time.

        Raises: ModelError `cache-in-recompute` where the cache has something that this unit would read.
        """
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        only_reads = getattr(module, "_can_checkpoint_with_cache", False)  # a mark of layers of `transformers`
        if not caches or only_reads:
            return args, kwargs
        filled = max(int(cache.get_seq_length(self.layer)) for cache in caches)
        if filled:
            what = f"{type(module).__name__} is recomputed, and called with a cache of {filled} tokens"
            fix = "give the whole sequence at once, or set_recompute(module, False) for such a forward"
            raise ModelError(Problem("cache-in-recompute", what, fix=fix))
        if not self.told:
            self.told = True
            log.warning("%s is recomputed: use_cache=False", type(module).__name__)
        kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return tuple(None if _is_cache(value) else value for value in args), kwargs


def _call(kinds: frozenset[str], ops: frozenset[Any], copies: set[Place]) -> Call:
    # in place, a sum would overwrite the product that is kept, or be overwritten where it is kept itself
    return Call(kinds, copies, overwrites=not ops and "all_reduce" not in kinds)


def _contexts(kinds: frozenset[str], ops: frozenset[Any], copies: set[Place]) -> Any:
    """What a compiler takes; or, where it has given up on a forward, what that is run in then."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(traced_ops(kinds, ops))
    return Saving(ops).contexts(_call(kinds, ops, copies))


def install(module: nn.Module, unit: Unit) -> None:
    """Make a module run as a recomputed unit."""
    module.__dict__[_UNIT] = unit
    module.__dict__["forward"] = MethodType(_forward, module)


def installed(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """The recomputed units inside a module, by name."""
    for name, inner in module.named_modules():
        if _UNIT in inner.__dict__:
            yield name, inner.__dict__[_UNIT]


def install_on_root(model: nn.Module) -> None:
    """Let a model that would make a key/value cache make none while its units are recomputed."""
    names = list(inspect.signature(type(model).forward).parameters)
    if "use_cache" in names:
        model.__dict__[_UNITS] = [unit for _, unit in installed(model)]
        model.register_forward_pre_hook(partial(_makes_no_cache, names.index("use_cache") - 1), with_kwargs=True)


def refuse_foreign(module: nn.Module, name: str) -> None:
    """Raises: ModelError `foreign-recompute` where `transformers` recomputes the module too."""
    if module.__dict__.get("gradient_checkpointing") is True:
        what = f"{name or 'the model'} has gradient checkpointing of its own on: its forward would run three times"
        fix = "model.gradient_checkpointing_disable(), or no parallelize.recompute"
        raise ModelError(Problem("foreign-recompute", what, fix=fix))


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    unit = self.__dict__[_UNIT]
    if unit.on and self.training and torch.is_grad_enabled():
        return unit.record(self, args, kwargs)
    return unit.run(self, args, kwargs)


def _makes_no_cache(position: int, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    recomputes = model.training and torch.is_grad_enabled() and any(unit.on for unit in model.__dict__[_UNITS])
    if not recomputes or position < len(args):
        return None
    if kwargs.get("use_cache"):
        log.warning("%s is recomputed: use_cache=False", type(model).__name__)
    return args, {**kwargs, "use_cache": False}


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _lifted(given: Any) -> tuple[list[T], Callable[[Sequence[T]], Any]]:
    """(the tensors in `given`, each once; what puts others in their places)."""
    leaves, structure = private.tree_flatten(given)
    tensors: list[T] = []
    numbers: dict[int, int] = {}
    places: list[int | None] = []
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            places.append(numbers[id(leaf)])
            leaves[n] = None  # checkpoint holds it, and sees to it that nobody writes to it
        else:
            places.append(None)

    def rebuilt(tensors: Sequence[T]) -> Any:
        pairs = zip(leaves, places, strict=True)
        return private.tree_unflatten([leaf if n is None else tensors[n] for leaf, n in pairs], structure)

    return tensors, rebuilt


def _shared_inputs(module: nn.Module) -> list[SharedInput]:
    """The overlapped inputs in a module, which learn from each forward who reads them."""
    sites = [getattr(inner.__dict__.get("_planned"), "overlap", None) for inner in module.modules()]
    return list({id(site): site for site in sites if isinstance(site, SharedInput)}.values())


@contextmanager
def _as_then(shared: list[SharedInput], misses: list[list[int]]) -> Iterator[None]:
    """Inside, products are made ahead for the linears for which they were made in the forward."""
    now = [one.misses for one in shared]
    for one, then in zip(shared, misses, strict=True):
        one.misses = list(then)
    try:
        yield
    finally:
        for one, kept in zip(shared, now, strict=True):
            one.misses = kept
