"""Which groups of ranks cross nodes: those of tp and of experts should not, and what it costs by `explain` where they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from parallelize.base.errors import ParallelizeError
from parallelize.launch.environment.rank_map import crossing_groups
from parallelize.launch.preflight.prediction import Predicted
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.explain import explain_subject


def placement_warnings(predicted: Predicted, machine: Machine, host_of: Mapping[int, str]) -> list[str]:
    """One line for each axis whose groups cross nodes."""
    mesh, options = predicted.setting.mesh, predicted.setting
    crossing = crossing_groups(mesh, options.expert_ranks, host_of)
    if not crossing:
        return []
    cost = _cost(predicted, machine, Counter(host_of.values()).most_common(1)[0][1])
    return [
        f"{len(groups)} groups of {axis} cross nodes, such as ranks {list(groups[0])}{cost}: order hosts so that "
        f"{axis} stays inside a node, or make it smaller"
        for axis, groups in crossing.items()
    ]


def _cost(predicted: Predicted, machine: Machine, ranks_per_host: int) -> str:
    """How much longer a step takes than with all ranks on one node, by `explain`."""
    try:
        here = explain_subject(
            predicted.subject, predicted.setting, replace(machine, node_ranks=ranks_per_host)
        ).time.in_turn_s
        inside = replace(machine, node_ranks=predicted.setting.mesh.world_size)
        best = explain_subject(predicted.subject, predicted.setting, inside).time.in_turn_s
    except ParallelizeError:
        return ""
    return f"; a step takes about {here * 1e3:,.1f} ms instead of {best * 1e3:,.1f} ms (estimate)"
