"""Guards of data axes and of optimizers, as rows of the table in `state/guards/guard_table.py`, and the steps that they
refuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.axes.zero.router_loss import refuse_router_loss
from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES
from parallelize.base.patches import active as patches
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
from parallelize.state.guards.partial_values import watch_backwards
from parallelize.state.guards.rank_means import mark_outputs
from parallelize.state.guards.unreduced_gradients import NOT_REDUCED, guard_gradients
from parallelize.state.records import applied, mark_of
from parallelize.state.tensor_tables import TensorTable


def _sums(model: Guarded) -> bool:
    """Whether there are several data ranks."""
    return model.has_several(*DATA_AXES)


def _sums_or_did(model: Guarded) -> bool:
    return _sums(model) or applied(model.module).gradient_guard is not None


def _divides_loss(model: Guarded) -> bool:
    return model.has_several("pp", *DATA_AXES)


def _guard_copies(model: Guarded) -> None:
    if model.mesh is not None:
        guard_gradients(model.module, model.mesh, None)


def _guard_all(model: Guarded) -> None:
    if model.mesh is not None:
        guard_gradients(model.module, model.mesh, NOT_REDUCED)


def _guard_means(model: Guarded) -> None:
    if model.mesh is not None:
        watch_backwards()
        mark_outputs(model.module, model.mesh)


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
        ("mean-of-rank",),
        "a backward of a loss that is the mean over one data rank's targets",
        (REDUCED,),
        _guard_means,
        applies=_sums,
    ),
    Guard(
        ("other-data-parallel",),
        "DistributedDataParallel and `replicate` around a model whose gradients are summed",
        (REDUCED,),
        lambda model: refuse_wrappers(model.module),
        applies=_sums_or_did,
    ),
    Guard(
        ("unsharded-optimizer", "not-elementwise"),
        "steps of optimizers that cannot step DTensors, shards, or one stage alone",
        (STEPPED, SHARDED),
        lambda model: watch_optimizers(),
    ),
)


# -- other optimizers ------------------------------------------------------------------------------------------------
# Refuses steps of stock optimizers that would fail half-way, or step something else than the unsharded model's do.
# Those of parameters whose gradients, or whose wider copies, only the optimizers of `build_optimizer` know; those of
# classes whose update PyTorch cannot run on DTensors; and searches along all parameters, of which a pipeline stage
# has its own.


_REFUSED: TensorTable[bool] = TensorTable()


def refuse_steps(parameters: Iterable[Any]) -> None:
    """Let a step of an optimizer that has one of these parameters itself raise ModelError `unsharded-optimizer`."""
    for parameter in parameters:
        if not _REFUSED.get(parameter):
            _REFUSED[parameter] = True
            watch_optimizers()


def watch_optimizers() -> None:
    """Refuse classes that cannot step DTensors, and LBFGS on a pipeline stage, by name before their step."""
    patches.hook("hook before optimizer steps", register_optimizer_step_pre_hook, _refuse)


_FAIL_ON_DTENSORS = ("Adafactor", "Rprop")
"""Classes of which an operation is not defined for DTensors (torch 2.13)."""

_NOT_FUSED = ("Adagrad", "SGD")
"""Classes whose fused kernels are not defined for DTensors (torch 2.13)."""


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        fused = name in _NOT_FUSED and bool(group.get("fused"))
        if _REFUSED or fused or name in _FAIL_ON_DTENSORS or name == "LBFGS":
            for parameter in group["params"]:
                _refuse_parameter(name, parameter, fused)


def _refuse_parameter(name: str, parameter: Any, fused: bool) -> None:
    if _REFUSED.get(parameter):
        what = f"{name} was given parameters that are stepped as shards or as float32 copies after shard_data"
        fix = f"build_optimizer(model, {name}, ...), or optimizer() of what parallelize_model returns"
        raise ModelError(Problem("unsharded-optimizer", what, fix=fix))
    if name in _FAIL_ON_DTENSORS and isinstance(parameter, DTensor):
        what = f"{name} of PyTorch cannot step parameters that are DTensors"
        fix = f"build_optimizer(model, {name}, ...), or optimizer() of what parallelize_model returns"
        raise ModelError(Problem("unsharded-optimizer", what, fix=fix))
    if fused and isinstance(parameter, DTensor):
        what = f"PyTorch has no fused kernel of {name} for parameters that are DTensors"
        fix = f"build_optimizer(model, {name}, fused=True, ...), which steps local tensors; or fused=False"
        raise ModelError(Problem("unsharded-optimizer", what, fix=fix))
    if name == "LBFGS" and mark_of(parameter).stage is not None:
        what = "LBFGS searches along one vector of all parameters, and this rank has those of its pipeline stages"
        raise ModelError(Problem("not-elementwise", what, fix="use AdamW, or a mesh without pp"))
