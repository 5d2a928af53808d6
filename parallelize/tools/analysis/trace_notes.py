"""What `lint --trace` prints: in each mode, how much of a plan was followed through the forward, and where that
ended."""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.base.errors import ParallelizeError
from parallelize.plan.dims.plan_check import PlanTrace, trace_plan
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ResolvedPlan
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.linting import built, modes_of
from parallelize.tools.analysis.record.attention_model import forwards_on_meta
from parallelize.tools.analysis.subject import Subject


def trace_notes(subject: Subject, setting: Setting) -> Iterator[str]:
    """Lines of text: one for each mode that the plan serves.

    Raises: PlanError, where there is no plan.
    """
    for mode in modes_of(subject, subject.plan_for(setting), setting):
        complete = subject.complete(mode)
        names = [name for name, value in (("sequence", mode.sequence_parallel), ("loss", mode.loss_parallel)) if value]
        title = " + ".join(names) + " parallel" if names else "plain"
        yield f"traced, {title}: {_note(subject, complete)}"


def _note(subject: Subject, setting: Setting) -> str:
    if setting.ep > 1:
        return "not at all: experts are divided over ep"
    try:
        resolved = subject.resolved(setting)
        model, inputs = built(subject, setting)
        inputs = {name: value for name, value in inputs.items() if name != "targets"}
        with forwards_on_meta(model):
            trace = trace_plan(model, inputs, resolved)
    except ParallelizeError as error:
        return f"not at all: {error.problems[0].slug}"
    except Exception as error:  # the forward may do what tensors without values cannot
        return f"not at all: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return _followed(trace, resolved)


def _followed(trace: PlanTrace, resolved: ResolvedPlan) -> str:
    names = {generic(name) for name, row in resolved.parameters.items() if row.layout.dim is not None}
    own = {name for name in names if name not in trace.followed}
    parts = [f"{len(names) - len(own)} of {len(names)} kinds of sharded parameters were followed"]
    if own:
        parts.append(f"styles or other modules compute with {', '.join(sorted(own))}")
    parts += [f"not through {name} in {generic(module) or 'the model'}" for name, module in trace.not_followed.items()]
    return "; ".join(parts)
