"""Parameters that train only since data axes were applied: what was unfrozen, added, or replaced; under ZeRO 3 adapters
alone.

Both are taken in before a forward, before a step of several backwards, and before an optimizer is built. Ranks of the
data axes must do so together: they compare the names. Values of added parameters are those of the first rank, as ranks
may not be seeded alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.data_guards import refuse_steps
from parallelize.axes.zero.data_ranks import DataOptions, DataRanks, DataRanksOf
from parallelize.axes.zero.fsdp import FsdpEngine
from parallelize.axes.zero.optimizer_shards import OptimizerShard
from parallelize.axes.zero.reduced_parameters import (
    RefusesCasts,
    cast_parameters,
    master_dtype_of,
    optimizer_shard,
    reduced_parameters,
    stepped_in_shards,
)
from parallelize.axes.zero.reducer import ReducedParameter, Reducer
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import in_groups
from parallelize.comm.handshake import compare_facts
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.adapters import is_adapter_parameter
from parallelize.state.guards.unreduced_gradients import guard_gradients
from parallelize.state.later_changes import plan_changes, when_changed
from parallelize.state.records import applied, record_of, resolution_so_far
from parallelize.state.sharding import rows_by_name

_FIRST = "get_peft_model(model, config) first, then parallelize_model(model, mesh, zero=3); or zero=2"


class AddedParameters:
    """Takes parameters in that train only since `shard_data`: a forward hook of the model, and a call.

    Args:
        module: the model. mesh, zero, options: as it was sharded. master: the dtype of wider copies, or None.
        reducer: of its gradients, or None. shards: of its parameters. casts: refuses casts of them.
        units: the reducer of ZeRO 3; only adapters may be added next to it.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: MeshView,
        zero: int,
        options: DataOptions,
        master: torch.dtype | None,
        reducer: Reducer | None,
        shards: list[OptimizerShard],
        casts: RefusesCasts,
        units: FsdpEngine | None = None,
    ):
        self._module, self._mesh, self._zero, self._options, self._master = (
            weakref.ref(module),
            mesh,
            zero,
            options,
            master,
        )
        self._reducer, self._shards, self._casts, self._units = reducer, shards, casts, units
        self._known = {shard.name for shard in shards}
        self._dropouts = weakref.WeakSet(_dropouts(module))
        self._is_changed = False
        if reducer is not None:
            reducer.before_step = self.manage_added
        self._watch(module)

    def __deepcopy__(self, memo: dict) -> Any:
        return _nothing_later

    def __reduce__(self) -> Any:
        """Raises: ModelError `model-in-groups`, as the model's record does."""
        raise in_groups()

    def _watch(self, module: nn.Module) -> None:
        when_changed(module, partial(_changed, weakref.ref(self)))

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            if self._units is not None:
                self._units.forward_begins()
            self.manage_added()
            if self._reducer is not None:
                self._reducer.forward_begins()

    def changed(self) -> None:
        """The model was given a module or a parameter."""
        self._is_changed = True

    def manage_added(self) -> None:
        """Reduce, and let optimizers step, what trains by now.

        Raises: HandshakeError `ranks-disagree`, `ranks-missing` where data ranks do not train the same parameters;
            ModelError `added-parameter` for what cannot be added any more.
        """
        module = self._module()
        if module is None:
            return
        if self._is_changed:
            plan_changes(module)
            self._is_changed = False
            self._watch(module)
            self._add(self._added(module))
        newly_unfrozen = self._reducer.newly_unfrozen() if self._reducer is not None else []
        if newly_unfrozen and self._reducer is not None:
            self._agree([parameter.name for parameter in newly_unfrozen])
            self._reducer.manage(newly_unfrozen)

    def _added(self, module: nn.Module) -> list[tuple[ReducedParameter, DataRanks]]:
        """Parameters under names that the model did not have, or that have replaced another one."""
        record, ids = record_of(module), {id(shard.param) for shard in self._shards}
        known = self._known - {shard.name for shard in self._replaced(module)}
        over_tp = record is not None and record.group.size > 1
        ranks_of = DataRanksOf(self._mesh, self._zero, record)
        return [
            (parameter, ranks)
            for parameter, ranks in reduced_parameters(module, resolution_so_far(module), ranks_of)
            if id(parameter.param) not in ids
            and parameter.name not in known
            and (isinstance(parameter.param, DTensor) or not over_tp)  # others are of no plan
            and (self._units is None or self._is_beside_units(self._units, parameter))
        ]

    def _is_beside_units(self, units: FsdpEngine, parameter: ReducedParameter) -> bool:
        """Whether a parameter is of an adapter that `fully_shard` has not sharded.

        Raises: ModelError `added-parameter` of one that was copied from shards, and where compute is narrower than what
            is stored.
        """
        name = parameter.name
        if not is_adapter_parameter(name) or name in units.names:
            return False
        is_copy = units.shards(name, parameter.param)
        if is_copy or self._options.low_precision:
            reason = "was copied from shards" if is_copy else "would compute in the dtype in which it is stored"
            what = f"{name} was added after parameters were sharded over data axes (ZeRO 3), and {reason}"
            raise ModelError(Problem("added-parameter", what, fix=_FIRST))
        return True

    def _replaced(self, module: nn.Module) -> list[OptimizerShard]:
        """Shards of parameters that the model does not have any more."""
        current = {id(parameter) for parameter in module.parameters()}
        return [shard for shard in self._shards if id(shard.param) not in current]

    def _drop(self, shards: list[OptimizerShard]) -> None:
        """Raises: ModelError `added-parameter` of experts over `ep`: which ranks sum what replaced them is not
        known."""
        record = record_of(self._module())  # type: ignore[arg-type]
        rows = rows_by_name(record) if record is not None else {}
        folded = [shard.name for shard in shards if shard.name in rows and rows[shard.name].axis == "ep"]
        if folded:
            what = f"{folded[0]} was replaced after the plan, and its experts are divided over data ranks"
            raise ModelError(Problem("added-parameter", what, fix="change the model first, then apply the plan"))
        ids = {id(shard.param) for shard in shards}
        if self._reducer is not None:
            self._reducer.drop(ids)
        self._shards[:] = [shard for shard in self._shards if id(shard.param) not in ids]
        self._casts.drop(ids)

    def _add(self, added: Sequence[tuple[ReducedParameter, DataRanks]]) -> None:
        module = self._module()
        if not added or module is None:
            return
        self._agree([parameter.name for parameter, _ in added])
        self._refuse_dropout(module)
        self._drop(self._replaced(module))
        for parameter, ranks in added:
            _broadcast_from_first_rank(parameter.param, ranks)
        shards = [
            optimizer_shard(parameter, ranks, master_dtype_of(parameter.param, self._options, self._master))
            for parameter, ranks in added
        ]
        if self._options.dtype is not None:
            names = {parameter.name.rpartition(".")[0] for parameter, _ in added}
            cast_parameters([module.get_submodule(name) for name in sorted(names)], self._options.dtype)
        self._shards += shards
        self._known |= {shard.name for shard in shards}
        self._casts.add(shards)
        refuse_steps(shard.param for shard in shards if stepped_in_shards(shard, self._zero))
        if self._reducer is not None:
            self._reducer.specs |= {id(shard.param): shard.spec for shard in shards}
            self._reducer.manage([parameter for parameter, _ in added if parameter.param.requires_grad])
            self._reducer.frozen += [parameter for parameter, _ in added if not parameter.param.requires_grad]
            guard_gradients(module, self._mesh, None)

    def _refuse_dropout(self, module: nn.Module) -> None:
        """Raises: ModelError `added-parameter` for dropout that came with the parameters, on several data ranks."""
        new = [inner for inner in _dropouts(module) if inner not in self._dropouts]
        if new and self._mesh.spec.data_axes:
            what = (
                f"parameters were added after shard_data, with dropout of {new[0].p:g}, whose masks would depend on "
                "the mesh"
            )
            fix = (
                "a rate of 0 (lora_dropout=0), or add them first: get_peft_model(model, config), then parallelize_model"
            )
            raise ModelError(Problem("added-parameter", what, fix=fix))

    def _agree(self, names: list[str]) -> None:
        group = self._mesh.data_group
        if group.size > 1:
            compare_facts(list(group.ranks), {"parameters that train now": ", ".join(names)}, call="the next forward")


def _dropouts(module: nn.Module) -> list[nn.Dropout]:
    """Dropout that draws from PyTorch's generator."""
    return [
        inner
        for inner in module.modules()
        if isinstance(inner, nn.Dropout) and inner.p > 0 and applied(inner).dropout is None
    ]


def _changed(later: weakref.ref[AddedParameters]) -> None:
    taker = later()
    if taker is not None:
        taker.changed()


def _nothing_later(module: nn.Module, args: Any) -> None:
    """The hook of a copy of the model: its gradients are not reduced."""


@torch.no_grad()
def _broadcast_from_first_rank(parameter: Any, ranks: DataRanks) -> None:
    """Of the ranks that sum its gradient, give all the values of the first."""
    if ranks.axes:
        group = ranks.mesh.group(*ranks.axes)
        local = to_local(parameter).detach()
        values = local.contiguous()
        group.broadcast(values, 0)
        local.copy_(values)
