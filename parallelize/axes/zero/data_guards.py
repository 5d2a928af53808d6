"""The guards of data axes and of optimizers, as rows of the table of `state/guards/guard_table.py`."""

from __future__ import annotations

from parallelize.axes.zero.other_optimizers import watch_optimizers
from parallelize.axes.zero.router_loss import refuse_router_loss
from parallelize.base.mesh import DATA_AXES
from parallelize.comm.meshes import mesh_spec
from parallelize.state.guards.guard_table import (
    LEFT_UNREDUCED,
    REDUCED,
    RESOLVED,
    SHARDED,
    STEPPED,
    Guard,
    Guarded,
    add_guards,
)
from parallelize.state.guards.other_libraries import refuse_wrappers
from parallelize.state.guards.unreduced_gradients import NOT_REDUCED, guard_gradients
from parallelize.state.later_prompts import refuse_later_prompts
from parallelize.state.records import applied


def _sums(model: Guarded) -> bool:
    """Whether there are several data ranks."""
    return model.mesh is not None and mesh_spec(model.mesh).ranks(*DATA_AXES) > 1


def _sums_or_did(model: Guarded) -> bool:
    return _sums(model) or applied(model.module).gradient_guard is not None


def _divides_loss(model: Guarded) -> bool:
    return model.mesh is not None and any(mesh_spec(model.mesh).ranks(axis) > 1 for axis in ("pp", *DATA_AXES))


def _guard_copies(model: Guarded) -> None:
    if model.mesh is not None:
        guard_gradients(model.module, model.mesh, None)


def _guard_all(model: Guarded) -> None:
    if model.mesh is not None:
        guard_gradients(model.module, model.mesh, NOT_REDUCED)


add_guards(
    Guard(
        ("router-loss",),
        "a load-balancing loss of a formula that is not known as a sum over ranks",
        (RESOLVED,),
        lambda model: refuse_router_loss(model.module),
        applies=_divides_loss,
    ),
    Guard(
        ("unreduced-gradients",),
        "a backward of a model that nothing reduces over its data ranks",
        (LEFT_UNREDUCED,),
        _guard_all,
        applies=lambda model: _sums(model) and applied(model.module).data is None,
    ),
    Guard(
        ("unreduced-gradients",),
        "a backward of a deep copy, which its original's reducer does not know",
        (REDUCED,),
        _guard_copies,
        applies=_sums_or_did,
    ),
    Guard(
        ("other-data-parallel",),
        "DistributedDataParallel and `replicate` around a model whose gradients are summed",
        (REDUCED,),
        lambda model: refuse_wrappers(model.module),
        applies=_sums_or_did,
    ),
    Guard(
        ("added-parameter",),
        "prompts that PEFT puts around a model whose gradients are summed",
        (REDUCED,),
        lambda model: refuse_later_prompts(),
        applies=_sums,
    ),
    Guard(
        ("unsharded-optimizer", "not-elementwise"),
        "steps of optimizers that cannot step DTensors, shards, or one stage alone",
        (STEPPED, SHARDED),
        lambda model: watch_optimizers(),
    ),
)
