"""What `lint` and `explain` say about modules that are gathered over `cp`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from parallelize.base.errors import Problem
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan


def gathered_modules(resolved: ResolvedPlan) -> dict[str, int]:
    """Generic name of the modules that run on the full sequence on every rank of `cp` -> how many there are."""
    return dict(Counter(generic(fqn) for fqn, kind in resolved.attention.items() if kind == "gathered"))


def gathered_over_cp(resolved: ResolvedPlan) -> Iterator[Problem]:
    """`gathered-over-cp`, once for each name."""
    cp = resolved.mesh.ranks("cp")
    for name, count in gathered_modules(resolved).items():
        what = f"each of {cp} ranks of cp computes {name} ({count} modules) for all tokens, and stores its activations of the full sequence"
        fix = "correct, but cp does not divide these modules; recompute=full stores them for one layer at a time, and tp divides them"
        yield Problem("gathered-over-cp", what, resolved.plan.source, fix=fix)
