"""ZeRO 3: PyTorch's `fully_shard`, applied to the plan's units, with gradients that are sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallelize.axes.vocabulary.loss.losses import deferred_heads, watch_writes
from parallelize.axes.zero.calls_of_parts import gather_for_parts
from parallelize.axes.zero.collective_order import UnitOrder
from parallelize.axes.zero.data_guards import refuse_steps
from parallelize.axes.zero.data_ranks import DataOptions, DataRanksOf
from parallelize.axes.zero.reducer import BatchNormSync, Reducer
from parallelize.axes.zero.unit_groups import (
    forget_unsharded_gradients,
    gathered_parameters,
    has_run,
    in_backward,
    reduce_outside_backward,
    unit_groups,
)
from parallelize.axes.zero.unused_parameters import UnusedParameters, refuse_writes
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.mesh_view import MeshView
from parallelize.comm.turns import takes_turns
from parallelize.plan.parameter_shards import expert_zero_dim
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.full_values import restore_layouts
from parallelize.state.later_changes import is_of_packages
from parallelize.state.records import applied, mark_parameter, pipeline_cut, record_of, require_record
from parallelize.state.sharding import shared_of_parameters


class FsdpEngine:
    """The calls of a pipeline engine (see `Reducer`), for a model under `fully_shard`.

    A backward must not be split into dgrad and wgrad: each half would gather and reduce. Parameters that were added
    since are stored in full, and reduced by `added`, which is set after the units were sharded.
    """

    splits_backward = False

    def __init__(
        self,
        module: nn.Module,
        units: list[Any],
        stages: dict[int, int | None],
        defer: bool,
        axis: str,
        unused: UnusedParameters,
        order: UnitOrder,
    ):
        self.unused, self.order = unused, order
        self._reduces_in_finish = False  # the caller does not say which backward is the last
        self.axis, self.names = axis, {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self.module, self.units, self.defer = module, units, defer
        self.stages = stages  # id of a unit -> its pipeline stage
        self.added: Reducer | None = None
        unused.at_end.append(self._refuse_unmanaged)
        for unit in units:
            unit.__dict__["__deepcopy__"] = _refuse_copy

    def _refuse_unmanaged(self) -> None:
        """Raises: ModelError `unmanaged-parameter` for a gradient of what was added since, which no data rank gets."""
        if self.added is not None:
            self.added.refuse_unmanaged()

    def hold(self, auto_flush: bool = False) -> None:
        """Only a deferred reduction waits for the last backward; with `auto_flush`, for `finish`."""
        if self.added is not None:
            self.added.hold(auto_flush)
        self._reduces_in_finish = auto_flush and self.defer
        self.order.begin_step()
        if self.defer:
            for unit in self.units:
                unit.set_requires_gradient_sync(False, recurse=False)

    def release(self, stage: int) -> None:
        """The stage's next backward is its last of the step."""
        if self.added is not None:
            self.added.release(stage)
        for unit in self.units:
            if self.defer and self.stages.get(id(unit), stage) in (stage, None):
                unit.set_requires_gradient_sync(True, recurse=False)

    def flush(self, stage: int) -> None:
        """`fully_shard` reduces in backward."""
        if self.added is not None:
            self.added.flush(stage)

    def finish(self) -> None:
        """Reduce what no backward has reduced; for what one has, `fully_shard` waits at its end."""
        if self._reduces_in_finish:
            self._reduces_in_finish = False
            self._reduce_now()
        if self.added is not None:
            self.added.finish()
        self.order.end_step()

    def _reduce_now(self) -> None:
        """Reduce what the backwards of `accumulate_gradients` have left."""
        for unit in self.units:
            unit.set_requires_gradient_sync(True, recurse=False)
        parts = [part for unit in reversed(self.units) for part in unit_groups(unit) if self.unused.waits(part)]
        if parts:
            reduce_outside_backward(parts)
            self.unused.drop_zeros()

    def reduces(self, name: str, param: Any) -> bool:
        """Whether a parameter is summed over the data ranks."""
        return self.shards(name, param) or (self.added is not None and self.added.reduces(name, param))

    def shards(self, name: str, param: Any) -> bool:
        """Whether a parameter was the model's when it was sharded, also under another name, or while it is gathered; a
        plain one in its place was not."""
        axes = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else ()
        if self.axis in (axes or ()):
            return True
        return name in self.names and (isinstance(param, DTensor) or self._is_gathered(param))

    def _is_gathered(self, param: Any) -> bool:
        groups = (group for unit in self.units for group in unit_groups(unit))
        return any(param is gathered for group in groups for gathered in gathered_parameters(group))

    def forward_begins(self) -> None:
        """Drop what a failed backward has left, after which the next one would reduce nothing. In a loop of the user's
        nobody says that it failed."""
        if in_backward(self.module) and private.backward_id() == -1 and not takes_turns():
            self.reset()

    def reset(self) -> None:
        """Drop what a failed forward or backward has left."""
        if self.added is not None:
            self.added.reset()
        self.unused.reset()
        self.order.reset()
        self._reduces_in_finish = False
        for unit in self.units:
            unit.set_requires_gradient_sync(True, recurse=False)
        reset_iteration: Any = getattr(self.module, "reset_iter_state", None)  # since 2.13
        if reset_iteration is not None and has_run(self.module):
            reset_iteration()
        for unit in self.units:
            forget_unsharded_gradients(unit)
            unit.reshard()


def apply_fsdp(module: nn.Module, mesh: MeshView, options: DataOptions, resolved: ResolvedPlan) -> FsdpEngine:
    """Apply `fully_shard` to each ZeRO unit and to the rest. With `dp_replicate`, sharding is hybrid.

    Raises: ModelError `scalar-parameter`.
    """
    cut = pipeline_cut(module)
    names = [name for name in resolved.zero_units if cut is None or cut.present(name)]
    scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars:
        what = f"{scalars[0]} is a scalar, which `fully_shard` cannot shard"
        raise ModelError(Problem("scalar-parameter", what, fix="make it a tensor of one element, or use zero=2"))
    shared = shared_of_parameters(module)
    marks = {name: shared[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    deferring = {_unit_of(head, names) for head in deferred_heads(module)}
    ranks_of = DataRanksOf(mesh, 3, record_of(module))
    folded = _folded_experts(module)  # inside of units, and sharded before them
    inner_first = sorted(names, key=lambda name: -name.count("."))  # `fully_shard` leaves out what it sharded before
    names = [*folded, *(name for name in inner_first if name not in folded)]
    units = [module.get_submodule(name) for name in names]
    for name, unit in [*zip(names, units, strict=True), ("", module)]:
        if any(True for _ in unit.parameters()) or unit is module:
            # a deferred head is needed after its forward has ended
            reshard = options.reshard_after_forward and name not in deferring
            ranks = ranks_of.dense
            keywords: dict[str, Any] = {"mp_policy": options.mixed_precision, "reshard_after_forward": reshard}
            if name in folded:
                ranks = ranks_of.experts
                keywords["shard_placement_fn"] = _expert_placements(module, name)
            fully_shard(unit, mesh=ranks.fsdp_mesh, **keywords)
    fsdp_units: list[Any] = [unit for unit in [*units, module] if isinstance(unit, FSDPModule)]
    for name in deferring:
        heads = [module.get_submodule(head) for head in deferred_heads(module) if _unit_of(head, names) == name]
        _leave_gathered(module.get_submodule(name), heads)
    cp_group = mesh.group("cp").pg if mesh.spec.ranks("cp") > 1 else None
    experts = {id(module.get_submodule(name)) for name in folded}
    for unit in fsdp_units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if cp_group is not None and id(unit) not in experts:  # a third axis of ranks with other tokens
            unit.set_all_reduce_hook(partial(dist.all_reduce, group=cp_group))
    restore_layouts(module)
    module.register_forward_pre_hook(_refuse_gradient_hooks, prepend=True)  # before parameters are gathered
    module.register_forward_pre_hook(refuse_second_derivatives, prepend=True, with_kwargs=True)
    refuse_writes(
        {name: unit for name, unit in [*zip(names, units, strict=True), ("", module)] if unit in fsdp_units}, module
    )
    managed = [name for name, unit in zip(names, units, strict=True) if isinstance(unit, FSDPModule)]
    _hook_owners(module, managed, mesh.spec.shard_axis)
    for name, mark in marks.items():
        mark_parameter(module.get_parameter(name), shared=mark)
    pairs = zip(names, units, strict=True)
    stages = {} if cut is None else {id(unit): cut.stages.stage_of(name) for name, unit in pairs}
    summed_over = mesh.data_group
    name_of = {id(unit): name for name, unit in zip(names, units, strict=True)}
    order = UnitOrder([(name_of.get(id(unit), ""), unit) for unit in fsdp_units], summed_over)
    unused = UnusedParameters(fsdp_units, summed_over, order, at_end=[BatchNormSync(module, summed_over).share])
    return FsdpEngine(module, fsdp_units, stages, options.defer, mesh.spec.shard_axis, unused, order)


def _hook_owners(module: nn.Module, units: Sequence[str], axis: str) -> None:
    """Let each module with parameters load shards, and be called by itself where it is in none of the units.

    axis: over which parameters are sharded.
    """
    in_no_unit: list[nn.Module] = []
    for name, owner in module.named_modules():
        if owner._parameters:
            unit = module.get_submodule(_unit_of(name, units))
            owner.register_load_state_dict_pre_hook(partial(_shard_what_is_loaded, unit))
            if unit is module and owner is not module:
                in_no_unit.append(owner)
    gather_for_parts(module, in_no_unit, axis, _refuse_gradient_hooks)


def _folded_experts(module: nn.Module) -> list[str]:
    """The modules of experts that are folded over data axes, whose copies other ranks have than those of dense
    parameters.

    Raises: ModelError `experts-not-shardable`.
    """
    record = record_of(module)
    rows = record.resolved.parameters.values() if record is not None else ()
    names = list(dict.fromkeys(row.fqn.rpartition(".")[0] for row in rows if row.axis == "ep"))
    for row in rows:
        if row.axis != "ep" and row.fqn.rpartition(".")[0] in names:
            what = f"{row.fqn} is beside experts that are folded over data axes, and not one for each of them"
            raise ModelError(Problem("experts-not-shardable", what, fix="zero=2, or ep=1"))
    return names


def _expert_placements(module: nn.Module, name: str) -> Callable[[Any], Shard]:
    """How `fully_shard` splits the parameters of folded experts: see `expert_zero_dim`."""
    record = require_record(module)
    assert record.folded is not None
    ranks = record.folded.spec.size("edp")
    parameters = module.get_submodule(name).named_parameters(recurse=False)
    dims = {
        id(parameter): expert_zero_dim(record.resolved.parameters[f"{name}.{key}"].layout, ranks)
        for key, parameter in parameters
    }
    return lambda parameter: Shard(dims[id(parameter)])


def _leave_gathered(unit: nn.Module, heads: Sequence[nn.Module]) -> None:
    """Let a unit with deferred heads stay gathered after its forward, for the loss."""
    unit.register_forward_pre_hook(partial(_gather_anew, heads), prepend=True)  # before the hook of `fully_shard`
    unit.register_forward_hook(_refuse_gathered)


def _gather_anew(heads: Sequence[nn.Module], unit: Any, args: Any) -> None:
    """Reshard a unit with a deferred head before its forward, which then gathers the current parameters.

    The unit stays gathered after its forward, until a backward reshards it. After a forward without a backward
    (evaluation, generation), an optimizer may have stepped since. Earlier forwards whose backward is still to come find
    the unit gathered again, in the same storage.
    """
    if private.backward_id() != -1:  # recompute: the backward that replays has gathered the unit
        return
    unit.reshard()
    for head in heads:
        watch_writes(head)


def _refuse_gathered(unit: Any, *_: Any) -> None:
    """The parameters of a unit that stays gathered are none to step: an optimizer that was given them would train
    nothing."""
    refuse_steps(parameter for group in unit_groups(unit) for parameter in gathered_parameters(group))


def _refuse_copy(memo: dict) -> NoReturn:
    """Raises: ModelError `sharded-copy`."""
    what = (
        "a model is copied (copy.deepcopy, AveragedModel) whose parameters ZeRO 3 shards, which `fully_shard` does not "
        "support"
    )
    fix = "zero=2; or average the shards: lerp_ on [p.detach().clone() for p in model.parameters()], once a step"
    raise ModelError(Problem("sharded-copy", what, fix=fix))


def _refuse_gradient_hooks(module: nn.Module, args: Any) -> None:
    """Raises: ModelError `hook-not-run`: `fully_shard` sets the gradient of a parameter without running its tensor
    hooks."""
    data = applied(module).data
    if not torch.is_grad_enabled() or data is None:
        return
    engine: Any = data.engine
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks or {}).values()
        # those of this package are on parameters that are gathered, where they run
        if not all(map(is_of_packages, hooks)) and engine.shards(name, parameter):
            what = f"{name} has a gradient hook (register_hook), which `fully_shard` does not run"
            fix = "parameter.register_post_accumulate_grad_hook, which gets the reduced gradient; or zero=2"
            raise ModelError(Problem("hook-not-run", what, fix=fix))


def _shard_what_is_loaded(unit: Any, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert full tensors that are loaded to DTensors; those of planned parameters have a conversion of their own."""
    unit.reshard()  # it may be gathered still
    for key, parameter in owner._parameters.items():
        value = state.get(prefix + key)
        is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not is_full or not isinstance(parameter, DTensor) or key in applied(owner).state_rows:
            continue
        if value.shape == parameter.shape:  # torch names the shapes of others
            placements = parameter.placements
            state[prefix + key] = distribute_tensor(value, parameter.device_mesh, placements, src_data_rank=None)


def _unit_of(name: str, units: Sequence[str]) -> str:
    """The innermost unit that contains a module; "" is the rest."""
    return max((unit for unit in units if name == unit or name.startswith(unit + ".")), key=len, default="")


# -- second derivatives ----------------------------------------------------------------------------------------------
# Second derivatives by a model's inputs under ZeRO 3 (gradient penalties) are refused by name. `fully_shard` frees
# the gathered parameters at the end of the first backward; the second one would read them.


def refuse_second_derivatives(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook. A derivative by an input is refused where it is differentiated again; by itself it is right.

    Raises: ModelError `double-backward`, in the second backward, before a parameter is read.
    """
    if torch.is_grad_enabled():
        return private.tree_map(_watched, args), private.tree_map(_watched, kwargs)
    return None


def _watched(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    view = value.view_as(value)
    view.register_hook(_unless_differentiated)
    return view


def _unless_differentiated(grad: torch.Tensor) -> torch.Tensor:
    return _Once.apply(grad) if torch.is_grad_enabled() and grad.requires_grad else grad


class _Once(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        what = (
            "a derivative by the model's input is differentiated again, and ZeRO 3 has freed the parameters that it "
            "needs"
        )
        raise ModelError(Problem("double-backward", what, fix="zero=2, whose ranks have all parameters"))
