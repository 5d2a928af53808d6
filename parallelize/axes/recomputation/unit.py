"""How a recomputed unit runs: its forward without saved activations, and the same forward again in backward.

The forward is intercepted on the instance, like that of planned modules (`planned_forward.py`): outside of the plan's
boundary conversions, inside of the hooks of the user and of `fully_shard`. PyTorch's non-reentrant checkpoint runs it.
This module adds what the checkpoint leaves to its caller:

- Every tensor of the arguments is passed to it as an argument of its own. So a write to the tensor between forward and
  backward is an error, and a tensor that was passed twice stays one tensor.
- Key/value caches, to which a replay would append a second time, are not passed.
- A replay makes the same decisions in overlapped linears as its forward.

Under `torch.compile` the compiler gets the graph with the ops whose results are saved. A unit is one graph or none:
where its forward would break the graph (dropout, experts that exchange tokens) Dynamo runs it in eager mode, or raises
an error with `fullgraph=True`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallelize.axes.recomputation.saving import SavePolicy, traced_ops
from parallelize.axes.tensor.planned_forward import installed
from parallelize.axes.tensor.shared_input import SharedInput
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_dynamo import traces_graph
from parallelize.ops.replay_cache import ReplayCache, ResultKey, in_recompute, remembered
from parallelize.plan.models.wrapped_models import stock_model
from parallelize.state.forward_steps import RECOMPUTED, add_step, run_inner
from parallelize.state.randomness.dropout.call_sites import dropout_scope
from parallelize.state.records import applied, mark_applied
from parallelize.state.step_results import as_instance

log = logging.getLogger("parallelize")
T = torch.Tensor


@dataclass(frozen=True)
class UnitCost:
    """What a recomputed unit saved in its most recent forward in training, and how often it ran.

    Attributes:
        mode: "full", "selective" or "off".
        save: names of what is saved.
        input_bytes: of inputs that require a gradient; masks and tables, which units share, are not counted.
        collectives, collective_bytes: number and size of the saved results of planned collectives.
        ops, op_bytes: number and size of the saved results of other ops; the size is None if this torch does not report
            it.
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


class RecomputeUnit:
    """The run-time state of one recomputed module.

    Args:
        kinds: kinds of collectives whose results are saved.
        ops: ops whose results are saved.
        save: the names for both.
        on: whether the unit is recomputed.
    """

    def __init__(self, module: nn.Module, kinds: frozenset[str], ops: frozenset[Any], save: tuple[str, ...], on: bool):
        self.kinds, self.ops, self.save, self.on = kinds, ops, save, on
        self.copies: set[ResultKey] = set()
        self.contexts = partial(_contexts, kinds, ops, self.copies)
        self.shared = _shared_inputs(module)
        numbers = [inner.__dict__.get("layer_idx") for inner in module.modules()]
        self.layer = next((number for number in numbers if isinstance(number, int)), 0)
        self.forwards = self.replays = 0
        self.last_cost: dict[str, Any] = {}
        self.warned = False

    @property
    def mode(self) -> str:
        return ("selective" if self.save else "full") if self.on else "off"

    def cost(self) -> UnitCost:
        return UnitCost(self.mode, self.save, forwards=self.forwards, replays=self.replays, **self.last_cost)

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The forward itself."""
        return run_inner(module, RECOMPUTED, args, kwargs)

    def record(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The forward with only its inputs, and what `save` names, saved for backward."""
        refuse_foreign(module, type(module).__name__)
        args, kwargs = self._without_cache(module, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            run = partial(self._pass, module)
            return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=self.contexts)
        tensors, rebuilt = _split_tensors((args, kwargs))
        cache, policy = _replay_cache(self.kinds, self.ops, self.copies), SavePolicy(self.ops)

        def forward(*tensors: T) -> Any:
            return self._pass(module, *rebuilt(tensors))

        out = checkpoint(forward, *tensors, use_reentrant=False, context_fn=partial(policy.contexts, cache))
        self.forwards += 1
        self.last_cost = {
            "input_bytes": sum(tensor.nbytes for tensor in tensors if tensor.requires_grad),
            "collectives": len(cache.results),
            "collective_bytes": cache.num_bytes,
            "ops": policy.count,
            "op_bytes": policy.num_bytes,
        }
        return out

    def _pass(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The forward, or a replay of it."""
        if torch.compiler.is_dynamo_compiling():
            return self.run(module, args, kwargs)
        misses = remembered("misses", lambda: [list(shared.misses) for shared in self.shared])
        with dropout_scope(module):
            if not in_recompute():
                return self.run(module, args, kwargs)
            self.replays += 1
            with _with_misses(self.shared, misses):
                return self.run(module, args, kwargs)

    def _without_cache(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call without a key/value cache, to which a replay would append a second time.

        Raises: ModelError `cache-in-recompute` if the cache has tokens that this unit would read.
        """
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        only_reads = getattr(module, "_can_checkpoint_with_cache", False)  # an attribute of layers of `transformers`
        if not caches or only_reads:
            return args, kwargs
        filled = max(_filled(cache, self.layer) for cache in caches)
        if filled:
            what = f"{type(module).__name__} is recomputed, and called with a cache of {filled} tokens"
            fix = "pass the full sequence at once, or set_recompute(module, False) for such a forward"
            raise ModelError(Problem("cache-in-recompute", what, fix=fix))
        if not self.warned:
            self.warned = True
            log.warning("%s is recomputed: use_cache=False", type(module).__name__)
        kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return tuple(None if _is_cache(value) else value for value in args), kwargs


def _replay_cache(kinds: frozenset[str], ops: frozenset[Any], copies: set[ResultKey]) -> ReplayCache:
    # an in-place sum would overwrite the saved result of a matmul, or be overwritten itself after it was saved
    return ReplayCache(kinds, copies, overwrites=not ops and "all_reduce" not in kinds)


def _contexts(kinds: frozenset[str], ops: frozenset[Any], copies: set[ResultKey]) -> Any:
    """The contexts for a compiler; for a forward that it leaves to eager mode, the contexts of the forward and
    replays."""
    if traces_graph():
        return create_selective_checkpoint_contexts(traced_ops(kinds, ops))
    return SavePolicy(ops).contexts(_replay_cache(kinds, ops, copies))


def install(module: nn.Module, unit: RecomputeUnit) -> None:
    """Let a module run as a recomputed unit."""
    add_step(module, RECOMPUTED, _forward, recompute_unit=unit)


def recompute_units_in(module: nn.Module) -> Iterator[tuple[str, RecomputeUnit]]:
    """The recomputed units inside a module, by name."""
    for name, inner in module.named_modules():
        if (unit := as_instance(applied(inner).recompute_unit, RecomputeUnit)) is not None:
            yield name, unit


def install_on_root(model: nn.Module) -> None:
    """Disable the key/value cache of a model while its units are recomputed."""
    model = stock_model(model)
    names = list(inspect.signature(type(model).forward).parameters)
    if "use_cache" in names:
        mark_applied(model, recompute_units=tuple(unit for _, unit in recompute_units_in(model)))
        model.register_forward_pre_hook(partial(_disable_cache, names.index("use_cache") - 1), with_kwargs=True)


def refuse_foreign(module: nn.Module, name: str) -> None:
    """Raises: ModelError `foreign-recompute` if `transformers` recomputes the module too."""
    if module.__dict__.get("gradient_checkpointing") is True:
        what = f"{name or 'the model'} has its own gradient checkpointing on: its forward would run three times"
        fix = "model.gradient_checkpointing_disable(), or no parallelize.recompute"
        raise ModelError(Problem("foreign-recompute", what, fix=fix))


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    unit = self._applied.recompute_unit
    if unit.on and self.training and torch.is_grad_enabled():
        return unit.record(self, args, kwargs)
    return unit.run(self, args, kwargs)


def _disable_cache(position: int, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Makes no key/value cache while layers are recomputed."""
    recomputes = model.training and torch.is_grad_enabled() and any(unit.on for unit in applied(model).recompute_units)
    if not recomputes or position < len(args):
        return None
    if kwargs.get("use_cache"):
        log.warning("%s is recomputed: use_cache=False", type(model).__name__)
    return args, {**kwargs, "use_cache": False}


def _filled(cache: Any, layer: int) -> int:
    """Tokens that a layer has in a cache; of a state that has no length (a convolution, a recurrence), 1 where it is
    not new."""
    layers = getattr(cache, "layers", ())
    own = layers[layer] if layer < len(layers) else None
    if own is None or hasattr(own, "get_seq_length"):
        return int(cache.get_seq_length(layer))
    return int(any(getattr(own, "has_previous_state", {}).values()))


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _split_tensors(tree: Any) -> tuple[list[T], Callable[[Sequence[T]], Any]]:
    """(the tensors in a tree, each once; a function that rebuilds the tree with other tensors)."""
    leaves, structure = private.tree_flatten(tree)
    tensors: list[T] = []
    numbers: dict[int, int] = {}  # id of a tensor -> its index in `tensors`
    indices: list[int | None] = []  # of each leaf in `tensors`
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            indices.append(numbers[id(leaf)])
            leaves[n] = None  # checkpoint stores it, and detects writes to it
        else:
            indices.append(None)

    def rebuilt(tensors: Sequence[T]) -> Any:
        pairs = zip(leaves, indices, strict=True)
        return private.tree_unflatten([leaf if n is None else tensors[n] for leaf, n in pairs], structure)

    return tensors, rebuilt


def _shared_inputs(module: nn.Module) -> list[SharedInput]:
    """The overlapped inputs in a module, which record in each forward which linears read them."""
    overlaps = [planned.overlap for inner in module.modules() if (planned := installed(inner)) is not None]
    return list({id(overlap): overlap for overlap in overlaps if isinstance(overlap, SharedInput)}.values())


@contextmanager
def _with_misses(shared: list[SharedInput], misses: list[list[int]]) -> Iterator[None]:
    """A context with the misses of the forward, so that the same linears get a matmul computed ahead."""
    current = [shared_input.misses for shared_input in shared]
    for shared_input, of_forward in zip(shared, misses, strict=True):
        shared_input.misses = list(of_forward)
    try:
        yield
    finally:
        for shared_input, saved in zip(shared, current, strict=True):
            shared_input.misses = saved
