"""What a plan does at the boundaries of modules, done to the dims of a record.

A gathered dim and its shards are two axes: what needs all of a dim may follow a gather, and not precede it. So where
the plan converts an input or output, the converted dim becomes a factor of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.plan.adapters import BASE
from parallelize.plan.dims.factors import Dim, Factor, leaves, new_dim
from parallelize.plan.dims.record import Dims, Record
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Contract, Conversion, InputShard

T = torch.Tensor
Call = tuple[tuple, dict]

_TO_FULL_TOKENS = (Conversion.GATHER_SEQUENCE, Conversion.LEAVE_REGION)
_TO_TOKEN_SHARDS = (Conversion.SCATTER_SEQUENCE, Conversion.ENTER_REGION)
_LAST_DIM = (Conversion.GATHER_LAST, Conversion.SPLIT_LAST, Conversion.VOCABULARY)
_SUMS_GRADIENT = (Conversion.COPY, Conversion.SUM_BOTH, Conversion.GATHER_SEQUENCE)


@dataclass(frozen=True)
class Boundary:
    """What is converted at one module: `enter` the argument, `leave` the output. `inputs`: arguments with a part for
    each head."""

    enter: Conversion = Conversion.NONE
    leave: Conversion = Conversion.NONE
    argument: str = ""
    sequence_dim: int = 1
    feature_dim: int = -1
    inputs: tuple[InputShard, ...] = ()

    @classmethod
    def of(cls, contract: Contract) -> Boundary:
        if contract.exchanges_heads:  # around its attention, which sees all tokens
            return cls(
                Conversion.GATHER_SEQUENCE, Conversion.SCATTER_SEQUENCE, contract.argument, contract.sequence_dim
            )
        return cls(
            contract.enter,
            contract.leave,
            contract.argument,
            contract.sequence_dim,
            contract.feature_dim,
            contract.inputs,
        )


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of a plan, in a forward that is recorded."""

    record: Record
    by_module: dict[str, Boundary]

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> Call | None:
        """The call with converted arguments; None: as it was."""
        boundary = self.by_module.get(name)
        if boundary is None:
            return None
        call = args, kwargs
        if boundary.enter is not Conversion.NONE:
            call = _replaced(module, boundary.argument, call, partial(self._convert_input, name, boundary))
        for shard in boundary.inputs:
            call = _replaced(module, shard.argument, call, partial(self._own_part, shard=shard))
        return call

    def leave(self, name: str, output: Any) -> Any:
        """The converted output; of a tuple, the first item is converted. None: as it was."""
        boundary = self.by_module.get(name)
        if boundary is None or boundary.leave is Conversion.NONE:
            return None
        if isinstance(output, tuple):
            return (self._convert_output(name, boundary, output[0]), *output[1:]) if output else None
        return self._convert_output(name, boundary, output)

    # -- one tensor ----------------------------------------------------------------------------------------------------

    def _convert_output(self, name: str, boundary: Boundary, x: Any) -> Any:
        out = self._convert(x, boundary.leave, boundary)
        if isinstance(out, T) and out.ndim and boundary.leave is Conversion.GATHER_LAST:
            self.record.gathered_outputs[name] = self.record.dims(out)[boundary.feature_dim]
        return out

    def _convert_input(self, name: str, boundary: Boundary, x: Any) -> Any:
        if isinstance(x, T) and x.ndim and boundary.enter is Conversion.SPLIT_LAST:
            self.record.split_inputs[name] = self.record.dims(x)[-1]
        out = self._convert(x, boundary.enter, boundary)
        if isinstance(out, T) and boundary.enter in _SUMS_GRADIENT:
            self.record.sum_gradient(out)
        return out

    def _convert(self, x: Any, conversion: Conversion, boundary: Boundary) -> Any:
        if not isinstance(x, T) or not x.ndim:
            return x
        dims, sequence_dim = list(self.record.dims(x)), boundary.sequence_dim
        if conversion in _LAST_DIM:
            feature_dim = boundary.feature_dim if conversion is Conversion.GATHER_LAST else -1
            dims[feature_dim] = new_dim(x.shape[feature_dim])
        elif conversion in (*_TO_FULL_TOKENS, *_TO_TOKEN_SHARDS) and sequence_dim < x.ndim:
            change = self._to_full if conversion in _TO_FULL_TOKENS else self._to_shards
            dims[sequence_dim] = change(dims[sequence_dim], sequence_dim)
        return self._alias(x, dims)

    def _alias(self, x: T, dims: Dims) -> T:
        alias = x.view_as(x)
        self.record.set(alias, dims)
        return alias

    def _to_full(self, dim: Dim, index: int) -> Dim:
        return _changed(dim, self.record.token_shards, self.record.gathered_tokens) or dim

    def _to_shards(self, dim: Dim, index: int) -> Dim:
        changed = _changed(dim, self.record.gathered_tokens, self.record.token_shards)
        if changed is not None:
            return changed
        # where the region begins, or of tensors that a block made
        changed = [Factor(factor.size) for factor in leaves(dim)]
        self.record.token_shards += [changed] if index else []  # dim 0 may be batch and tokens
        return changed

    def _own_part(self, x: Any, shard: InputShard) -> Any:
        if not isinstance(x, T) or x.ndim <= shard.dim or x.shape[shard.dim] % shard.heads:
            return x
        dims = list(self.record.dims(x))
        dims[shard.dim] = [*new_dim(x.shape[shard.dim] // shard.heads), *new_dim(shard.heads)]
        return self._alias(x, dims)


def boundaries_of(record: Record, resolved: ResolvedPlan) -> Boundaries:
    """The boundaries of a plan over `tp`, with those of its sequence-parallel region."""
    by_module = {name: Boundary.of(row.contract) for name, row in resolved.modules.items()}
    for name, row in resolved.modules.items():
        if row.contract.traits.wraps:  # it does the conversions of the layer, which has adapters beside it
            layer = name
            while layer in resolved.modules and resolved.modules[layer].contract.traits.wraps:
                layer = f"{layer}.{BASE}"
            inside = by_module.pop(layer, Boundary())
            by_module = {other: b for other, b in by_module.items() if not other.startswith(f"{name}.")} | {
                name: inside
            }
    for region in resolved.regions:
        first = by_module.get(region.enter, Boundary())
        by_module[region.enter] = replace(
            first, enter=Conversion.ENTER_REGION, argument=region.argument, sequence_dim=1
        )
        last = by_module.get(region.leave, Boundary())
        by_module[region.leave] = replace(last, leave=Conversion.LEAVE_REGION, sequence_dim=1)
    return Boundaries(record, by_module)


def _changed(dim: Dim, before: list[Dim], after: list[Dim]) -> Dim | None:
    """The dim with each factor that is among `before` replaced by a new one, which is added to `after`; None: there is
    none."""
    known = {factor for other in before for factor in leaves(other)}
    flat = leaves(dim)
    if known.isdisjoint(flat):
        return None
    changed = [Factor(factor.size) if factor in known else factor for factor in flat]
    after.append([new for new, old in zip(changed, flat, strict=True) if new is not old])
    return changed


def _replaced(module: nn.Module, argument: str, call: Call, change: Callable[[Any], Any]) -> Call:
    """The call with one argument changed, the first one if it has no name."""
    args, kwargs = call
    names = list(inspect.signature(module.forward).parameters)
    position = names.index(argument) if argument in names else 0
    name = argument or (names[0] if names else "")
    if position < len(args):
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
    return (args, {**kwargs, name: change(kwargs[name])}) if name in kwargs else call
