"""Guards as rows: what each refuses, by which error, and at which moments of a model's way onto a mesh it is set up.

A room that has guards lists them in one table and adds it here (`add_guards`): this one,
`axes/tensor/torch_styles/tensor_guards.py`, `axes/zero/data_guards.py`, `adapters/adapter_guards.py` and
`training/loop_guards.py`. `set_up` is the one place that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.providers import provider
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.guards.early_optimizers import refuse_early_optimizers
from parallelize.state.guards.other_libraries import (
    refuse_offloaded,
    refuse_other_quantizers,
    refuse_wrapped,
    refuse_wrappers,
)
from parallelize.state.guards.partial_values import guard_partial_values, refuse_gradient_inputs
from parallelize.state.guards.stock_methods import guard_initializers, guard_replacing_methods, guard_stock_methods

GIVEN = "a model is given"
RESOLVED = "its plan is resolved, and nothing is changed"
PLANNED = "a plan was applied over tp"
STYLED = "a dict of PyTorch's styles was applied as PyTorch does"
CUT = "it was cut into stages"
ON_CONTEXT = "its sequences were divided over cp"
REDUCED = "its gradients will be summed over data ranks"
SHARDED = "its parameters are sharded over data ranks (ZeRO 3)"
LEFT_UNREDUCED = "its plan is applied, and its gradients are not summed over data ranks yet"
STEPPED = "its optimizers may step DTensors, or one stage"
QUANTIZED = "its weights will be quantized"
FINISHED = "`parallelize_model` has applied every axis"
MOMENTS = (
    GIVEN,
    RESOLVED,
    PLANNED,
    STYLED,
    CUT,
    ON_CONTEXT,
    REDUCED,
    SHARDED,
    LEFT_UNREDUCED,
    STEPPED,
    QUANTIZED,
    FINISHED,
)


@dataclass(frozen=True)
class Guarded:
    """The model that guards are set up for.

    Attributes:
        mesh: over which it is planned now; None before that is known.
        folded: the mesh of its experts, where `ep` folds over others.
        plan, facts: of this rank's part of it, once they are resolved.
        replaced: names of the parameters that will be replaced. None: all.
    """

    module: nn.Module
    mesh: MeshView | None = None
    folded: MeshView | None = None
    plan: ResolvedPlan | None = None
    facts: ModelFacts | None = None
    replaced: Collection[str] | None = None

    def has_several(self, *axes: str) -> bool:
        """Whether the mesh is known, and has several ranks along one of the axes."""
        return self.mesh is not None and self.mesh.spec.ranks(*axes) > 1


@dataclass(frozen=True)
class Guard:
    """One row.

    Attributes:
        slugs: of its errors. refuses: what it is raised for, and when.
        moments: at which it is set up; at GIVEN and RESOLVED it raises at once.
        set_up: raises, or installs what will raise.
        applies: whether a model needs it.
    """

    slugs: tuple[str, ...]
    refuses: str
    moments: tuple[str, ...]
    set_up: Callable[[Guarded], None]
    applies: Callable[[Guarded], bool] = lambda model: True


GUARDS: list[Guard] = []
TABLES = ("tensor_guards", "data_guards", "adapter_guards", "loop_guards")
"""The tables of higher rooms: importing one adds its rows."""


def add_guards(*guards: Guard) -> None:
    """Add the table of a room."""
    GUARDS.extend(guards)


def set_up(moment: str, model: Guarded) -> None:
    """Set up the guards of a moment. Raises: at GIVEN and RESOLVED, what they refuse."""
    for table in TABLES:
        provider(table)
    for guard in GUARDS:
        if moment in guard.moments and guard.applies(model):
            guard.set_up(model)


def _meshes(model: Guarded) -> list[DeviceMesh]:
    return [mesh.device_mesh for mesh in (model.mesh, model.folded) if mesh is not None]


add_guards(
    Guard(
        ("other-quantizer",),
        "weights that another library has quantized",
        (GIVEN,),
        lambda model: refuse_other_quantizers(model.module),
    ),
    Guard(
        ("other-data-parallel",),
        "a model that PyTorch's data parallelism is around already",
        (RESOLVED,),
        lambda model: refuse_wrapped(model.module),
    ),
    Guard(
        ("offloaded-parameters",),
        "parameters that accelerate loads for each forward",
        (RESOLVED,),
        lambda model: refuse_offloaded(model.module),
    ),
    Guard(
        ("early-optimizer",),
        "optimizers that were built before parameters are replaced",
        (RESOLVED,),
        lambda model: refuse_early_optimizers(model.module, model.replaced),
    ),
    Guard(
        ("initializer-on-shards",),
        "initializers and draws that would give every shard the same numbers",
        (PLANNED, STYLED, SHARDED),
        lambda model: guard_initializers(model.module),
    ),
    Guard(
        ("reads-full-parameters",),
        "`save_pretrained` and `resize_token_embeddings` of a model of which a rank stores a part",
        (PLANNED, STYLED, CUT, SHARDED),
        lambda model: guard_stock_methods(model.module),
    ),
    Guard(
        ("replaces-parameters",),
        "`resize_token_embeddings` of a part of a model whose gradients are summed",
        (REDUCED,),
        lambda model: guard_replacing_methods(model.module),
        applies=lambda model: model.plan is None or model.plan.options.zero < 3,
    ),
    Guard(
        ("partial-value",),
        "a number of which each rank has its part, where it is read",
        (PLANNED, SHARDED),
        lambda model: guard_partial_values(*_meshes(model)),
    ),
    Guard(
        ("gradient-inputs",),
        "`backward(inputs=...)` and `torch.autograd.grad` of planned parameters",
        (PLANNED,),
        lambda model: refuse_gradient_inputs(),
    ),
    Guard(
        ("other-data-parallel",),
        "DistributedDataParallel and `replicate` around a planned model, where it is wrapped or runs",
        (PLANNED, ON_CONTEXT),
        lambda model: refuse_wrappers(model.module),
    ),
)
