"""Parameters on the hot path: stored as DTensors, and computed with as plain local tensors.

Each planned module reads its parameters through a `Slot`. At each forward the slot looks up the registered DTensor and
returns a plain leaf that shares its storage, so that native ops run without DTensor dispatch. When the leaf's gradient
is complete, a hook moves it to the DTensor, before any post-backward of a wrapper. A new leaf is made whenever the
parameter, its storage or its `requires_grad` has changed, so that `fully_shard`, `.to()`,
`load_state_dict(assign=True)`, freezing and mixed precision work.

A compiled graph reads the same leaf (`compiled_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_dynamo import traced_local_of
from parallelize.ops.collectives import pad_to
from parallelize.state.layout_tensor.layout_dtensor import layout_of, with_layout
from parallelize.state.pending_reductions import PendingReduction, PendingReductions
from parallelize.state.records import Shared, mark_of, mark_parameter

_local_of, _wrap = private.local_of, private.wrap
_is_traced = torch.compiler.is_dynamo_compiling


class Slot:
    """One parameter of one module.

    Args:
        key: its name in the module.
        valid: (dim, size) of the elements to compute with, where the DTensor's shard is padded at the end.
        reduction: what its gradient is summed over.
        pending_reductions: the pending reductions of the model.
        shared: the local intervals that other tp ranks store too.
        tied: whether several modules use the parameter.
    """

    __slots__ = (
        "key",
        "leaf",
        "own",
        "param",
        "pending_reductions",
        "reduction",
        "shared",
        "source",
        "tied",
        "trains",
        "valid",
    )

    def __init__(
        self,
        key: str,
        valid: tuple[int, int] | None,
        reduction: PendingReduction | None,
        pending_reductions: PendingReductions,
        shared: Shared = (),
        tied: bool = False,
    ):
        self.key, self.valid, self.reduction = key, valid, reduction
        self.pending_reductions, self.shared, self.tied = pending_reductions, shared, tied
        self.param: Any = None
        self.own = False
        self.forget()

    def forget(self) -> None:
        """Release the parameter's storage, which is about to be replaced."""
        self.source: Any = None
        self.leaf: Any = None
        self.trains = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        return Slot(self.key, self.valid, self.reduction, self.pending_reductions, self.shared, self.tied)

    def __reduce__(self) -> Any:
        return Slot, (self.key, self.valid, self.reduction, self.pending_reductions, self.shared, self.tied)

    def local(self, parameters: dict[str, Any]) -> torch.Tensor:
        """The tensor to compute with, for the current parameter in `parameters`."""
        try:
            param = parameters[self.key]
        except KeyError:
            raise _missing(self.key) from None
        if _is_traced():
            return self._traced(param)
        if param is self.param and _local_of(param) is self.source and param.requires_grad == self.trains:
            return self.leaf
        return self._refresh(param)

    def prepare(self, parameters: dict[str, Any]) -> None:
        """Make the leaf that a graph is about to read; not for what a wrapper stores between forwards
        (`fully_shard`)."""
        param = parameters.get(self.key)
        if not isinstance(param, DTensor) or not param.is_leaf:
            return
        is_assigned = self.param is not None and param.device_mesh == self.param.device_mesh
        if mark_of(param).own or is_assigned:
            self.local(parameters)

    def _refresh(self, param: Any) -> torch.Tensor:
        if not isinstance(param, DTensor):
            raise ModelError(
                Problem(
                    "plain-parameter",
                    f"parameter {self.key} of a planned module was replaced by a plain {type(param).__name__}",
                    fix="assign a DTensor of the same layout, or copy values in with `load_state_dict`",
                )
            )
        if not param.is_leaf:  # computed by the caller (`functional_call`): differentiate through it
            return self._traced(param)
        # `.to()` keeps the parameter object, replaces its storage, and drops its mark
        self.own = mark_of(param).own or (param is self.param and self.own)
        if self.shared:
            mark_parameter(param, shared=self.shared)
        self.param, self.source, self.trains = param, _local_of(param), param.requires_grad
        leaf = self.source.detach()
        if self.valid is not None:
            leaf = leaf.narrow(self.valid[0], 0, self.valid[1])
        if self.trains:
            leaf.requires_grad_()
            kind = _MoveGradient if self.reduction is None else _CollectGradient
            leaf.register_post_accumulate_grad_hook(self._hook_of(leaf, kind(self, param)))
        self.leaf = leaf
        return leaf

    def _hook_of(self, leaf: torch.Tensor, move: _MoveGradient) -> Callable[[torch.Tensor], None]:
        """What moves the gradient of a leaf: at the end of backward, unless something reads or reduces it before
        that."""
        param = move.param
        hooked = param._backward_hooks or param._post_accumulate_grad_hooks
        if hooked or self.tied or not self.own:
            leaf.receiver = move  # type: ignore[attr-defined]
            return _receive
        return self.pending_reductions.completed.hook(leaf, move)

    def pad(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the valid part, padded with zeros to the size of the stored shard."""
        if self.valid is None or grad.shape[self.valid[0]] == self.source.shape[self.valid[0]]:
            return grad
        dim = self.valid[0]
        return pad_to(grad, dim, self.source.shape[dim])

    def _traced(self, param: Any) -> torch.Tensor:
        """What a compiled graph reads: the eager leaf, as long as it is current, which Dynamo guards.

        Otherwise it is computed in the graph, and its gradient is reduced there.
        """
        leaf = self.leaf
        is_of_param = leaf is not None and param is self.param and self.trains == param.requires_grad
        if is_of_param and traced_local_of(param) is self.source:
            return leaf
        local = param.to_local()
        if self.valid is not None:
            local = local.narrow(self.valid[0], 0, self.valid[1])
        return local if self.reduction is None else self.reduction.reduce_in_backward(local)


def _missing(key: str) -> ModelError:
    what = (
        f"a planned module has no parameter {key} any more: it was parametrized, pruned, flattened or deleted after "
        "the plan"
    )
    fix = (
        "weight_norm, spectral_norm and other parametrizations only on modules that the plan does not name; "
        "remove_parametrizations brings the parameter back; "
    )
    fix += "fully_shard, or FullyShardedDataParallel(use_orig_params=True), in the place of use_orig_params=False"
    return ModelError(Problem("removed-parameter", what, fix=fix))


def _receive(leaf: torch.Tensor) -> None:
    """The hook of a leaf. Its receiver is an attribute: what a hook refers to is hidden from Python's garbage
    collector."""
    leaf.receiver(leaf)  # type: ignore[attr-defined]


class _MoveGradient:
    """Moves a leaf's gradient to the DTensor parameter, wrapped with the parameter's spec."""

    __slots__ = ("layout", "param", "slot", "spec")

    def __init__(self, slot: Slot, param: DTensor):
        self.slot, self.param, self.spec, self.layout = slot, param, private.spec_of(param), layout_of(param)

    def __call__(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:  # the op defers this gradient
            return
        slot, param = self.slot, self.param
        if slot.reduction is None:
            if slot.tied and slot.own and (param._backward_hooks or param._post_accumulate_grad_hooks):
                slot.pending_reductions.add_tied(self, grad)
            else:
                self.deliver(grad)
        else:
            # a wrapper that replaced the parameter (fully_shard) reads the gradient during backward: reduce it now
            slot.pending_reductions.add(
                self, slot.reduction, grad, immediately=not slot.own or private.backward_id() == -1
            )

    def deliver(self, grad: torch.Tensor) -> None:
        """Add a reduced local gradient to the parameter's gradient, and call the parameter's hooks."""
        if grad.requires_grad:
            raise _second_derivative()
        param = self.param
        if self.slot.valid is not None:
            grad = self.slot.pad(grad)
        if param._backward_hooks:
            grad = self._run_hooks(grad)
        accumulated = param.grad
        if accumulated is None:
            self._set(param, grad)
        else:
            _local_of(accumulated).add_(grad)
        if param._post_accumulate_grad_hooks:
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)

    receive = deliver
    """At the end of a pass a gradient without a pending reduction is complete."""

    def _set(self, param: Any, grad: torch.Tensor) -> None:
        try:
            wrapped = _wrap(grad, self.spec)
            param.grad = wrapped if self.layout is None else with_layout(wrapped, self.layout)
        except RuntimeError:  # a user, or `fully_shard` (2.15), accumulates in another dtype than the parameter's
            dtype = param.grad_dtype
            if dtype is None or grad.dtype is dtype:
                raise
            param.grad = with_layout(_wrap(grad.to(dtype), self.spec), self.layout)

    def _run_hooks(self, grad: torch.Tensor) -> torch.Tensor:
        dtensor_grad = with_layout(_wrap(grad, self.spec), self.layout)
        hooks: Any = self.param._backward_hooks
        for hook in list(hooks.values()):
            replaced = hook(dtensor_grad)
            dtensor_grad = dtensor_grad if replaced is None else replaced
        return _local_of(dtensor_grad)


class _CollectGradient(_MoveGradient):
    """The same for a gradient that is one term of a sum over ranks."""

    __slots__ = ()

    def receive(self, grad: torch.Tensor) -> None:
        slot = self.slot
        assert slot.reduction is not None
        slot.pending_reductions.collect(self, slot.reduction, grad)


def _second_derivative() -> ModelError:
    what = "backward(create_graph=True) reached a planned parameter, whose gradients have no graph"
    fix = "differentiate with respect to inputs, or leave this module out of the plan"
    return ModelError(Problem("double-backward", what, fix=fix))
