"""A term of the loss that depends on the weights alone, counted once on every mesh.

Its value and its gradient are the same on all data ranks, and gradients of the loss are sums over them. A backward of
its own would therefore count as often as there are ranks, except under ZeRO 3, where it reaches the shards directly.
Here it is computed on what each rank stores, after the gradients of the loss were summed, and added to these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallelize.axes.zero.optimizer_shards import OptimizerShard
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.full_values import reshard_units
from parallelize.state.later_changes import plan_changes
from parallelize.state.layout_tensor.layout_dtensor import wrap_like
from parallelize.state.records import applied, pipeline_cut
from parallelize.state.stage_values import planned_root

Penalty = Callable[[str, torch.Tensor], torch.Tensor | None]


def add_penalty(module: AnyModel, penalty: Penalty) -> torch.Tensor:
    """Add the gradient of a penalty on weights (L2-SP, EWC, L1) to the gradients of the loss, and return its value.

    A collective over the model's mesh: call it on every rank, after `step` (or after a backward of one's own, which
    sums the gradients) and before clipping. The full penalty is the sum of `penalty(name, weight)` over all parameters
    that require a gradient, each counted once: over data ranks, ties and copies of other stages, as on one process.
    Hooks of a parameter see the gradient of the loss alone.

    Args:
        module: a model on any mesh, or any other.
        penalty: (name, weight) -> a scalar, or None where this weight has no penalty. The weight is what this rank
            stores, a DTensor where it is sharded; tensors that it is combined with (weights to stay close to, Fisher
            information) are copies of parameters or gradients of the planned model: `{n: p.detach().clone() for n, p in
            model.named_parameters()}`.

    Returns: the sum over all parameters of the model, a scalar plain tensor, the same on every rank.
    Raises: ModelError `bad-penalty`, if `penalty` returns something else than a scalar tensor; before gradients are
        changed.
    Cost: the penalty of this rank's shards, and one all-reduce of a number for each mesh that shards parameters, and
        over `pp`.
    Source: L2-SP, arXiv:1802.01483; EWC, arXiv:1612.00796.
    """
    module = module_of(module)
    _, root = planned_root(module)
    plan_changes(root)
    reshard_units(root)
    ties = applied(root).ties
    copies = ties.copies() if ties is not None else set()
    shards = {id(shard.param): shard for shard in _shards_of(root)}
    values: list[Any] = []
    additions: list[tuple[Any, Any]] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        value, gradient = _differentiated(penalty, name, parameter)
        if value is not None and id(parameter) not in copies:
            values.append(value)
        if gradient is not None:
            additions.append((parameter, gradient))
    for parameter, gradient in additions:
        _add(parameter, gradient, shards.get(id(parameter)))
    return _total(values, root)


def _shards_of(root: nn.Module) -> Iterable[OptimizerShard]:
    data = data_of(root)
    return data.shards if data is not None else ()


def _differentiated(penalty: Penalty, name: str, parameter: Any) -> tuple[Any, Any]:
    """(value, gradient) of the penalty of one parameter, by a leaf of its own: no hook of the parameter sees this
    backward."""
    leaf = parameter.detach().requires_grad_()
    with torch.enable_grad():
        value = penalty(name, leaf)
    if value is None:
        return None, None
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
        )
        what = f"the penalty of {name} is {got}, not a scalar tensor"
        raise ModelError(
            Problem("bad-penalty", what, fix="sum over the elements: (weight - start[name]).square().sum()")
        )
    if not value.requires_grad:
        return value, None
    (gradient,) = torch.autograd.grad(value.reshape(()), leaf, allow_unused=True)
    return value.detach().reshape(()), gradient


@torch.no_grad()
def _add(parameter: Any, gradient: Any, shard: OptimizerShard | None) -> None:
    """Add a gradient that is the same on all data ranks to the one that is summed over them."""
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    local = private.plain_local(gradient)
    if shard is not None:
        shard.add_to_gradient(local)
    elif parameter.grad is not None:
        private.plain_local(parameter.grad).add_(local)
    else:
        parameter.grad = wrap_like(parameter, local) if isinstance(parameter, DTensor) else local


@torch.no_grad()
def _total(values: list[Any], root: nn.Module) -> torch.Tensor:
    """The sum of scalars of all ranks: those of one mesh that are sums of local ones are added before they are
    reduced."""
    plain: list[torch.Tensor] = []
    terms: dict[tuple[Any, ...], list[Any]] = {}
    for value in values:
        if not isinstance(value, DTensor):
            plain.append(value)
        elif all(p == Replicate() or p == Partial("sum") for p in value.placements):
            terms.setdefault((value.device_mesh, value.placements), []).append(value)
        else:
            plain.append(value.full_tensor())
    for same in terms.values():
        local = torch.stack([private.local_of(value) for value in same]).sum()
        plain.append(wrap_like(same[0], local).full_tensor())
    device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
    total = (
        torch.stack([value.float() if value.dtype.itemsize < 4 else value for value in plain]).sum() if plain else None
    )
    cut = pipeline_cut(root)
    if cut is None or cut.group.size == 1:
        return torch.zeros((), device=device) if total is None else total
    sent = torch.zeros((), dtype=torch.float64, device=device) if total is None else total.double()
    cut.group.all_reduce(sent)
    return sent if total is None else sent.to(total.dtype)
