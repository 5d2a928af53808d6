"""The mesh of a verification where none is chosen."""

from __future__ import annotations

from parallelize.errors import PlanError
from parallelize.mesh import MeshSpec
from parallelize.models.model_source import ModelSource
from parallelize.plan.choose import plan_or_none, shipped_plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve

_SIZES = (4, 3, 2)


def default_mesh(source: ModelSource, plan: object) -> MeshSpec:
    """tp=4; tp=3 or tp=2 where that divides the heads of a config, and 4 does not.

    Raises: ModelError of a model that cannot be built; PlanError of a plan that cannot be read.
    """
    chosen = None
    if source.config is not None and plan != "auto":
        chosen = shipped_plan_of(source.config) if plan is None else plan_or_none(None, plan)
    if chosen is None:
        return MeshSpec(tp=_SIZES[0])
    facts = describe(source.build("meta"))
    for size in _SIZES:
        try:
            resolve(chosen, facts, MeshSpec(tp=size), Options(sequence_parallel=False))
        except PlanError as error:
            if set(error.slugs) != {"uneven-heads"}:
                break  # what another size does not mend
        else:
            return MeshSpec(tp=size)
    return MeshSpec(tp=_SIZES[0])
