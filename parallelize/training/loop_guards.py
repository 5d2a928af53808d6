"""The guards of other libraries' loops, as rows of the table of `state/guards/guard_table.py`."""

from __future__ import annotations

from parallelize.state.guards.guard_table import FINISHED, PLANNED, Guard, Guarded, add_guards
from parallelize.training.data.loader_check import guard_accelerate


def _guard(model: Guarded) -> None:
    if model.mesh is not None:
        guard_accelerate(model.module, model.mesh)


add_guards(
    Guard(
        ("prepared-by-accelerate",),
        "`Accelerator.prepare` of the model, and of loaders and schedules that would count processes as data ranks",
        (PLANNED, FINISHED),
        _guard,
    )
)
