"""Optimizers whose update of a parameter needs all of it, where ranks store shards: each parameter is stepped in full
on one rank, its owner, which has its state."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallelize.base.boxes import full_box, volume
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.optimizers.owners import OwnerExchange, assign_owners, boxes_by_rank, is_everywhere, stage_group
from parallelize.state.stored_slices import StoredSlices, StoredTensor

T = torch.Tensor
NamesOf = Callable[[], Mapping[int, tuple[str, ...]]]


def step_in_full(optimizer: Optimizer, module: nn.Module, names_of: NamesOf) -> FullSteps:
    """Let an optimizer step each parameter in full, in place. What every rank has in full is stepped by each; any other
    parameter by one rank, to which shards and gradients are sent, and which sends the new values back.

    The numbers are those of the class on the unsharded model. A collective over the ranks of a pipeline stage, and once
    more in a step whose parameters are others than in the last one.

    Args:
        optimizer: of parameters that are sharded perhaps. Outside of a step these stay in its groups.
        module: the model.
        names_of: returns, by id of a parameter of the optimizer, its names in the model.
    """
    full = FullSteps(module, names_of)
    optimizer._full_steps = full  # type: ignore[attr-defined]
    optimizer.step = MethodType(_step, optimizer)  # type: ignore[method-assign]
    full.bind(optimizer)
    return full


def full_steps_of(optimizer: Optimizer) -> FullSteps | None:
    """How an optimizer steps full parameters; None: it does not, or has all of them anyway."""
    return getattr(optimizer, "_full_steps", None)


def _step(self: Any, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
    loss = None
    if closure is not None:  # called before: it uses the model's own parameters and gradients
        with torch.enable_grad():
            loss = closure()
    with self._full_steps.swapped(self):
        type(self).step(self, **keywords)
    return loss


class FullSteps:
    """Which rank steps which parameter, and the exchange around a step."""

    def __init__(self, module: nn.Module, names_of: NamesOf):
        self._module, self._names_of = weakref.ref(module), names_of
        self._parameters: list[T] = []
        self._stored: dict[int, StoredTensor] = {}
        self._owners: dict[str, int] = {}
        self._exchange = OwnerExchange((), {}, None)
        self._stepped: dict[str, T] = {}  # those of a step that have owners, by name
        self._dtype = torch.float32  # in which these are sent

    def bind(self, optimizer: Optimizer) -> None:
        """Find out which rank owns which parameter, if this was not done for these parameters. A collective over the
        ranks of a pipeline stage.

        Raises: ModelError `foreign-parameter`, `matrix-not-covered`.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_bound = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        if is_bound and all(id(p) in self._stored for p in parameters):  # planned adapters take the places of others
            return
        module, names = self._module(), self._names_of()
        assert module is not None
        where, group = StoredSlices(module), stage_group(module)
        for p in parameters:
            if id(p) not in names:
                what = f"{type(optimizer).__name__} steps a parameter of shape {list(p.shape)} that is not the model's"
                fix = "take parameters after the model was wrapped"
                raise ModelError(Problem("foreign-parameter", what, fix=fix))
        self._stored = {id(p): where.of(names[id(p)], p) for p in parameters}
        pairs = {stored.fqn: stored.slices for stored in self._stored.values()}
        boxes = [(stored.fqn, full_box(stored.shape)) for stored in self._stored.values() if stored.shape]
        by_rank = boxes_by_rank(pairs, group)
        divided = sorted(item for item in boxes if not is_everywhere(*item, by_rank))
        owned = assign_owners(divided, by_rank, volume)
        self._owners = {item.name: item.owner for item in owned}
        self._exchange = OwnerExchange(owned, pairs, group)
        self._parameters = parameters

    def is_owner(self, parameter: T) -> bool | None:
        """Whether this rank steps a parameter in full and alone; None: every rank steps it."""
        owner = self._owners.get(self._stored[id(parameter)].fqn)
        return None if owner is None else owner == self._exchange.rank

    def refuse_every_state(self, optimizer: Optimizer) -> None:
        """Raises: ModelError `state-on-owner` where a rank does not have the state of every parameter."""
        self.bind(optimizer)
        if self._owners:
            what = (
                f"{type(optimizer).__name__} steps {len(self._owners)} of {len(self._parameters)} parameters in full "
                "on one rank each, which alone has their state, and PyTorch's functions ask every rank for it"
            )
            fix = "a Checkpointer, which loads it on any mesh; or each rank's own optimizer.state_dict()"
            raise ModelError(Problem("state-on-owner", what, fix=fix))

    @contextmanager
    def swapped(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer's groups and state have the full parameters that this rank steps, and afterwards the
        shards have their new values. A collective over the ranks of a pipeline stage."""
        self.bind(optimizer)
        leaves = self._leaves(optimizer)
        own_state, own_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
        optimizer.state = _state_of(leaves, own_state)
        for group in optimizer.param_groups:
            group["params"] = [leaves[id(p)][1] for p in group["params"] if id(p) in leaves]
        try:
            yield
            for parameter, leaf in leaves.values():
                if leaf in optimizer.state:
                    own_state[parameter] = optimizer.state.pop(leaf)
            own_state.update(optimizer.state)  # what has the key of no parameter
        finally:
            optimizer.state = own_state
            for group, params in zip(optimizer.param_groups, own_params, strict=True):
                group["params"] = params
        self._publish(leaves)

    def _leaves(self, optimizer: Optimizer) -> dict[int, tuple[T, nn.Parameter]]:
        """By id of a parameter that has a gradient and that this rank steps: the parameter, and its full values and
        gradient."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        divided = [p for p in parameters if self.is_owner(p) is not None]
        leaves = {}
        for p in parameters:
            if p.grad is not None and self.is_owner(p) is None:
                leaves[id(p)] = (p, _leaf(p, private.plain_local(p).detach(), private.plain_local(p.grad)))
        if not divided:
            return leaves
        device = private.plain_local(divided[0]).device
        flags = self._exchange.any_rank([p.grad is not None for p in divided], device)
        self._stepped = {self._name(p): p for p, has in zip(divided, flags, strict=True) if has}
        self._dtype = reduce(torch.promote_types, (p.dtype for p in divided))
        values = {name: private.plain_local(p).detach() for name, p in self._stepped.items()}
        gradients = {name: private.plain_local(p.grad) for name, p in self._stepped.items() if p.grad is not None}
        full = [self._exchange.gather(tensors, self._dtype, device) for tensors in (values, gradients)]
        for owned, value, gradient in zip(self._exchange.owned, *full, strict=True):
            if owned.name in self._stepped:
                p = self._stepped[owned.name]
                leaves[id(p)] = (p, _leaf(p, value, gradient))
        return leaves

    def _name(self, parameter: T) -> str:
        return self._stored[id(parameter)].fqn

    @torch.no_grad()
    def _publish(self, leaves: Mapping[int, tuple[T, nn.Parameter]]) -> None:
        """Write the new values to what each rank stores."""
        for parameter, leaf in leaves.values():
            local = private.plain_local(parameter)
            if self.is_owner(parameter) is None and leaf.data_ptr() != local.data_ptr():
                local.copy_(leaf)  # of a class that puts other tensors in the place of values
        if not self._owners:
            return
        by_name = {self._name(parameter): leaf for parameter, leaf in leaves.values()}
        device = next(iter(self._stored.values())).local.device
        results = [
            by_name[owned.name].detach() if owned.name in by_name else _nothing(owned, self._dtype, device)
            for owned in self._exchange.owned
        ]
        parts = self._exchange.scatter(results, self._dtype, device)
        for (owned, pair), part in zip(self._exchange.stored_here, parts, strict=True):
            if owned.name in self._stepped:
                private.plain_local(self._stepped[owned.name])[pair.local] = part.to(self._stepped[owned.name].dtype)


def _leaf(parameter: T, value: T, gradient: T) -> nn.Parameter:
    leaf = nn.Parameter(value.to(parameter.dtype))
    leaf.grad = gradient.to(parameter.dtype)
    return leaf


def _nothing(owned: Any, dtype: torch.dtype, device: torch.device) -> T:
    return torch.zeros([stop - start for start, stop in owned.box], dtype=dtype, device=device)


def _state_of(leaves: Mapping[int, tuple[T, nn.Parameter]], own_state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """The state of an optimizer by leaf, and what has the key of no parameter."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({key: value for key, value in own_state.items() if not isinstance(key, T)})
    for parameter, leaf in leaves.values():
        if parameter in own_state:
            state[leaf] = {key: private.plain_local(value) for key, value in own_state[parameter].items()}
    return state
