"""Parameters on the hot path: stored as DTensors, computed with as plain local tensors.

Each planned module reads its parameters through a `Slot`. The slot finds the registered DTensor at each forward, and
yields a plain leaf that shares its storage, so that native ops run without DTensor dispatch; when the leaf's gradient is
complete, a hook hands it over to the DTensor, before any post-backward of a wrapper. The leaf is looked up again
whenever the parameter, its storage or its `requires_grad` has changed, which is what makes `fully_shard`, `.to()`,
`load_state_dict(assign=True)`, freezing and mixed precision work.

Under `torch.compile` the slot traces `to_local()` instead: the compiled graph has no host cost to save.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.gradients import Debt, Ledger
from parallelize.groups import Group

_local_of = private.local_of


OWN = "_parallelize_own"  # on a parameter that `apply` made: nothing takes its gradient before backward has ended
SHARED = "_parallelize_shared"  # on a parameter: which of its local rows other tp ranks hold too
STAGE = "_parallelize_stage"  # on a parameter of a pipeline stage: a StageMark
Shared = tuple[tuple[int, int, int, int], ...]  # (dim, start, stop, holders)


class StageMark(NamedTuple):
    """`group`: of the pipeline. `counted`: not a copy of a tied parameter that another stage owns."""

    group: Group
    counted: bool = True


class Slot:
    """One parameter of one module.

    Args:
        key: its name in the module.
        valid: (dim, size) where the DTensor's shard is padded at the end: what the module computes with.
        debt: what its gradient owes to other ranks.
        ledger: where debts are written down.
        shared: the local rows that other tp ranks hold too.
    """

    __slots__ = ("debt", "key", "leaf", "ledger", "own", "param", "shared", "source", "trains", "valid")

    def __init__(self, key: str, valid: tuple[int, int] | None, debt: Debt | None, ledger: Ledger, shared: Shared = ()):
        self.key, self.valid, self.debt, self.ledger, self.shared = key, valid, debt, ledger, shared
        self.param: Any = None
        self.own = False
        self.forget()

    def forget(self) -> None:
        """Let go of the storage, which the parameter is about to leave."""
        self.source: Any = None
        self.leaf: Any = None
        self.trains = False

    def __deepcopy__(self, memo: dict) -> Slot:
        return Slot(self.key, self.valid, self.debt, self.ledger, self.shared)

    def __reduce__(self):
        return Slot, (self.key, self.valid, self.debt, self.ledger, self.shared)

    def local(self, parameters: dict[str, Any]) -> torch.Tensor:
        """The tensor to compute with, for the parameter that `parameters` holds now."""
        param = parameters[self.key]
        if torch.compiler.is_dynamo_compiling():
            return self._traced(param)
        if param is self.param and _local_of(param) is self.source and param.requires_grad == self.trains:
            return self.leaf
        return self._refresh(param)

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
        # a parameter that was moved is another storage in the same object, and has lost its marks
        self.own = getattr(param, OWN, False) or (param is self.param and self.own)
        if self.shared:
            setattr(param, SHARED, self.shared)
        self.param, self.source, self.trains = param, _local_of(param), param.requires_grad
        leaf = self.source.detach()
        if self.valid is not None:
            leaf = leaf.narrow(self.valid[0], 0, self.valid[1])
        if self.trains:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(_Handover(self, param))
        self.leaf = leaf
        return leaf

    def pad(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the valid part, as large as the stored shard (zeros in the padding)."""
        if self.valid is None or grad.shape[self.valid[0]] == self.source.shape[self.valid[0]]:
            return grad
        dim, size = self.valid
        after = [0, 0] * (grad.ndim - 1 - dim) + [0, self.source.shape[dim] - size]
        return F.pad(grad, after)

    def _traced(self, param: Any) -> torch.Tensor:
        """What a compiled graph reads. An owed gradient goes through the eager leaf, whose hook adds it to the ledger, as
        long as Dynamo can guard that this is still the parameter's; otherwise it is paid inside the graph."""
        if (
            self.debt is not None
            and self.leaf is not None
            and param is self.param
            and param.requires_grad == self.trains
        ):
            return self.leaf
        local = param.to_local()
        if self.valid is not None:
            local = local.narrow(self.valid[0], 0, self.valid[1])
        return local if self.debt is None else self.debt.pay_in_backward(local)


class _Handover:
    """Moves a leaf's gradient to the DTensor parameter, wrapped with the parameter's own spec."""

    __slots__ = ("param", "slot", "spec")

    def __init__(self, slot: Slot, param: DTensor):
        self.slot, self.param, self.spec = slot, param, private.spec_of(param)

    def __call__(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:  # this pass gave the leaf none: its op computes it later
            return
        if grad.requires_grad:
            raise ModelError(
                Problem(
                    "double-backward",
                    "backward(create_graph=True) reached a planned parameter, whose gradients have no graph",
                    fix="differentiate with respect to inputs, or leave this module out of the plan",
                )
            )
        slot = self.slot
        if slot.debt is None:
            self.deliver(grad)
        else:
            # a wrapper that swapped the parameter (fully_shard) takes the gradient during backward: settle at once
            slot.ledger.owe(self, slot.debt, grad, at_once=not slot.own or private.backward_id() == -1)

    def deliver(self, grad: torch.Tensor) -> None:
        """Add a finished local gradient to the parameter's, with the parameter's own hooks around it."""
        param = self.param
        if self.slot.valid is not None:
            grad = self.slot.pad(grad)
        if param._backward_hooks:
            grad = self._hooked(grad)
        held = param.grad
        if held is None:
            param.grad = private.wrap(grad, self.spec)
        else:
            _local_of(held).add_(grad)
        if param._post_accumulate_grad_hooks:
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)

    def _hooked(self, grad: torch.Tensor) -> torch.Tensor:
        whole = private.wrap(grad, self.spec)
        hooks: Any = self.param._backward_hooks
        for hook in list(hooks.values()):
            changed = hook(whole)
            whole = whole if changed is None else changed
        return _local_of(whole)
