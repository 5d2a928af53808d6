"""The mesh on which a plan is checked or verified where none is chosen."""

from __future__ import annotations

from parallelize.base.errors import PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import plan_or_none, shipped_plan_of
from parallelize.plan.model_facts import describe
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve

SIZES = (4, 3, 2)
"""Of tp: the first one is taken, or the first of the others that divides the heads where it does not."""


def default_mesh(source: ModelSource, plan: object, sizes: tuple[int, ...] = SIZES) -> MeshSpec:
    """tp=4; tp=3 or tp=2 where that divides the heads of a config, and 4 does not.

    sizes: to try, instead of these three.

    Raises: ModelError of a model that cannot be built; PlanError of a plan that cannot be read.
    """
    chosen = None
    if source.config is not None and plan != "auto":
        chosen = shipped_plan_of(source.config) if plan is None else plan_or_none(None, plan)
    if chosen is None:
        return MeshSpec(tp=sizes[0])
    facts = describe(source.build("meta"))
    for size in sizes:
        try:
            resolve(chosen, facts, MeshSpec(tp=size), Options(sequence_parallel=False))
        except PlanError as error:
            if set(error.slugs) != {"uneven-heads"}:
                break  # what another size does not mend
        else:
            return MeshSpec(tp=size)
    return MeshSpec(tp=sizes[0])
