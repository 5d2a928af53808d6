"""Which mode is run on which model, with how many microbatches: each choice is run at least once, without all combinations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelize.tools.verification.compare import ReferenceValues
from parallelize.tools.verification.configuration import Configuration, Mode


@dataclass(frozen=True)
class Comparison:
    """One application of the plan, the configurations on which it runs a step, and the unsharded model's values for each."""

    mode: Mode
    configurations: list[Configuration]
    references: list[ReferenceValues]


def choose_comparisons(
    variants: list[tuple[list[Configuration], list[ReferenceValues]]], can_split: bool
) -> list[Comparison]:
    """Distribute models and numbers of microbatches over the modes. A single mode gets every model and both numbers.

    Args:
        variants: the configurations and reference values of each model; the models differ in their vocabulary.
        can_split: whether a step may have several microbatches although none were requested.
    """
    configuration = variants[0][0][0]
    modes, request = configuration.modes(), configuration.request
    few = request.fewest_microbatches
    many = request.num_microbatches if can_split and configuration.can_split else few
    if len(modes) == 1 and (len(variants) > 1 or few != many):
        modes = modes * 2
    comparisons = []
    for index, mode in enumerate(modes):
        configurations, references = variants[index % len(variants)]
        microbatches = many if (index + 1) // 2 % 2 else few
        comparisons.append(Comparison(replace(mode, microbatches=microbatches), configurations, references))
    return comparisons
