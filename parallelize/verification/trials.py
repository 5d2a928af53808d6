"""Which mode is tried with which model and how many microbatches: each choice is met at least once, without a product of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelize.verification.case import Case, Mode
from parallelize.verification.compare import Numbers


@dataclass(frozen=True)
class Trial:
    """One application of the plan, and the batches that it is stepped on, with the unsharded model's numbers."""

    mode: Mode
    cases: list[Case]
    wants: list[Numbers]


def trials(variants: list[tuple[list[Case], list[Numbers]]], cuts: bool) -> list[Trial]:
    """Modes in turn take the models (of several vocabularies), and few and many microbatches; a mode alone takes both.

    cuts: whether there may be several microbatches where none were asked for.
    """
    case = variants[0][0][0]
    modes, request = case.modes(), case.request
    few, many = (
        request.fewest_microbatches,
        request.num_microbatches if cuts and case.can_cut else request.fewest_microbatches,
    )
    if len(modes) == 1:
        alike = len(variants) == 1 and few == many
        modes = modes if alike else modes * 2
    found = []
    for at, mode in enumerate(modes):
        cases, wants = variants[at % len(variants)]
        count = many if (at + 1) // 2 % 2 else few
        found.append(Trial(replace(mode, microbatches=count), cases, wants))
    return found
