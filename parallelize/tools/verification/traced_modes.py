"""Before a step runs on the mesh, the dims of the plan are followed through a forward, in each mode."""

from __future__ import annotations

from parallelize.base.errors import ParallelizeError
from parallelize.plan.model_facts import describe
from parallelize.plan.options import options_of
from parallelize.plan.resolve import resolve
from parallelize.tools.analysis.automatic_trace import check_by_trace
from parallelize.tools.verification.configuration import Configuration


def trace_modes(configuration: Configuration) -> None:
    """Raises: PlanError with the mistakes of the plan."""
    request, plan, model = configuration.request, configuration.plan, configuration.model
    if plan is None or request.size("tp") == 1 or request.trace is False:
        return
    facts = describe(model)
    for sequence in dict.fromkeys(mode.sequence_parallel for mode in configuration.modes()):
        try:
            options = {"sequence_parallel": sequence, "ep": request.options.ep, "etp": request.options.etp}
            resolved = resolve(plan, facts, request.mesh.only("tp"), options_of(None, options))
        except ParallelizeError:
            return  # which the ranks will raise too, with all axes
        check_by_trace(model, resolved, request.trace, configuration.inputs)
