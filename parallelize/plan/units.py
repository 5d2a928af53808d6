"""Which modules are units of ZeRO 3, which gathers the parameters of a unit together: for `shard_data` and for `explain`.

Floor 2: torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallelize.errors import ModelError, Problem, did_you_mean
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.schema import Plan


def layers_of(plan: Plan | None) -> str:
    """The fqn of the module that contains the layers; empty where the plan does not name it."""
    source = (plan.cuts or plan.region) if plan is not None else None
    return source.layers if source is not None else ""


def zero_units(
    plan: Plan | None, names: Iterable[str], *, patterns: Sequence[str] | None = None, layers: str = ""
) -> list[str]:
    """The units: those that match `patterns`, else the plan's `zero: {units: ...}`, else the layers.

    Args:
        plan: of a model that has `names`: see `for_base_model`.
        names: modules of the model, in its order.
        patterns: the caller's choice; None: the plan's.
        layers: fqn of the layers where pipeline stages were cut; default: as the plan names it.

    Returns: names, in the model's order.
    Raises: ModelError `unmatched-unit` for a pattern, or one of its alternatives, that names no module.
    """
    names = [name for name in names if name]
    if patterns is None:
        patterns = plan.zero_units if plan is not None else ()
    if not patterns:
        layers = layers or layers_of(plan)
        return [name for name in names if layers and name.rpartition(".")[0] == layers]
    for alternative in (alternative for pattern in patterns for alternative in alternatives(pattern)):
        if not any(matches(alternative, name) for name in names):
            what = f"no module matches the ZeRO unit {alternative!r}"
            raise ModelError(Problem("unmatched-unit", what, fix=did_you_mean(alternative, names)))
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]
