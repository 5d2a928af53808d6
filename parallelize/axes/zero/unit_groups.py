"""What `fully_shard` gathers and reduces by: attributes of PyTorch's groups of parameters, which have no public name.

Nothing private is imported. Each function says since which version of torch the attributes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def unit_groups(unit: Any) -> list[Any]:
    """What gathers and reduces the parameters of a `fully_shard` module, with `fsdp_params` each (2.4; one before
    2.12)."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def has_run(unit: Any) -> bool:
    """Whether a forward of the outermost `fully_shard` module has begun, which makes what is reset after a failure
    (2.4)."""
    return unit._get_fsdp_state()._is_root is not None


def in_backward(unit: Any) -> bool:
    """Whether a backward of the outermost `fully_shard` module has begun, and has not ended or has failed (2.4)."""
    return has_run(unit) and unit._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def forget_unsharded_gradients(unit: Any) -> None:
    """Drop the gradients that a failed backward left on a `fully_shard` module's unsharded parameters (2.4)."""
    for group in unit_groups(unit):
        for param in group.fsdp_params:
            if not _accumulates_in_leaf(param):
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def before_reduction(group: Any, call: Callable[[Any], None]) -> None:
    """Call `call(group)` when backward has passed a group of `unit_groups`, before its gradients are reduced (2.4).

    It may be called for groups that backward did not reach, and more than once for a module that ran more than once.
    """
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        call(group)
        reduce(*unused)

    group.post_backward = post_backward


def watch_messages(group: Any, sending: Callable[[str], Any]) -> None:
    """Send each message of a group of `unit_groups` inside `sending("gathers")` or `sending("reduces")`, a context
    (2.8)."""
    for comm, kind in ((group._all_gather_comm, "gathers"), (group._reduce_scatter_comm, "reduces")):
        comm.__class__ = _watched(type(comm), sending, kind)  # a subclass, because `fully_shard` asks for classes


def _watched(comm_class: Any, sending: Callable[[str], Any], kind: str) -> type:
    class Watched(comm_class):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with sending(kind):
                return super().__call__(*args, **kwargs)

    return Watched


def reduce_outside_backward(groups: Sequence[Any]) -> None:
    """Reduce what backwards without a reduction left on these groups, as the end of a backward does (2.4)."""
    for group in groups:
        group.post_backward()
    for group in groups:
        group._training_state = type(group._training_state).IDLE
        group.finalize_backward()
        if hasattr(group.comm_ctx, "reduce_scatter_states"):
            group.comm_ctx.reduce_scatter_states.clear()
        else:  # before 2.12
            group.comm_ctx.reduce_scatter_state = None


def was_reached(group: Any) -> bool:
    """Whether backward reached the output of a group's module, since the group was last reduced (2.4)."""
    return group._training_state.name == "PRE_BACKWARD"


def gathered_parameters(group: Any) -> list[Any]:
    """What a group's module has in the place of its parameters while they are gathered (2.4)."""
    return [param._unsharded_param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]


def trained_in(group: Any) -> list[Any]:
    """Those of a group's parameters that require a gradient and have been gathered (2.4)."""
    return [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p._unsharded_param.requires_grad]


def has_unsharded_gradient(param: Any) -> bool:
    """Whether backward has added to the gradient of one of `trained_in` that is still to be reduced (2.4)."""
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


def fill_unsharded_gradients(params: Sequence[Any]) -> None:
    """Zeros for those of `trained_in` without a gradient, in the dtype of the others: they are reduced in one buffer
    (2.4)."""
    is_accumulated = any(param.unsharded_accumulated_grad is not None for param in params)
    for param in params:
        leaf = param._unsharded_param
        if not has_unsharded_gradient(param):
            leaf.grad = torch.zeros_like(leaf, dtype=leaf.grad_dtype)
        if is_accumulated and not _accumulates_in_leaf(param) and param.unsharded_accumulated_grad is None:
            param.to_accumulated_grad_if_needed()


def _accumulates_in_leaf(param: Any) -> bool:
    """Whether gradients of several backwards are added in `_unsharded_param.grad`, as since 2.15, or in an attribute of
    their own."""
    return isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property)
