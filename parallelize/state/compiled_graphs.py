"""What graphs of planned models need while they are traced.

**Plain tensors at their edge.** A graph that reads a DTensor unwraps it in each forward, and wraps its gradient in each
backward: 0.02 ms of the host for each parameter, half of what a planned layer costs beside the bare one. So a graph
reads the leaves of `parameters.py`. Eager forwards make them, and a trace cannot: they are made before it begins.

**Recomputed units in one graph.** A planned module puts local tensors where a stock forward reads its parameters, and
takes them away again. To Dynamo these are side effects, and unless replays may leave them out it runs such a unit in
eager mode without a word.
"""

from __future__ import annotations

import weakref

from torch import nn

from parallelize.base.torch_private.torch_dynamo import call_around_compilation, leave_side_effects_out_of_replays
from parallelize.state.records import applied

_planned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_set_before: list[bool] = []
"""What was set before the compilation that is under way, if a model has recomputed units."""


def serve_compilers(root: nn.Module) -> None:
    """From now on, until `torch._dynamo.reset()`. Not of deep copies, whose first forward in eager mode makes their
    leaves."""
    _planned.add(root)
    call_around_compilation(_before_compilation, _after_compilation)


def _before_compilation(*_: object) -> None:
    modules = [module for root in list(_planned) for module in root.modules()]
    for module in modules:
        planned = applied(module).planned
        for slot in planned.slots if planned is not None else ():
            slot.prepare(module._parameters)
    if any(applied(module).recompute_unit is not None for module in modules):
        _set_before.append(leave_side_effects_out_of_replays(True))


def _after_compilation(*_: object) -> None:
    if _set_before:
        leave_side_effects_out_of_replays(_set_before.pop())
