"""Adapters that PEFT adds to a model after it was cut into stages: each rank keeps those of its own layers.

PEFT gives adapters to the layers of other stages too, whose sizes it still knows. So ranks that are seeded alike draw
what one process draws. Before the next step, and before an optimizer is built, the plan of the full model is resolved
again under the names of now, what belongs to other stages is dropped, and the plan over `tp` gets the rest.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.pipeline.absent_parameters import drop_parameters
from parallelize.axes.pipeline.ties import mark_stages
from parallelize.base.errors import ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.comm.handshake import agree_on
from parallelize.plan.adapters import ORIGINAL, copied_layers, is_adapter_parameter
from parallelize.plan.grown_facts import with_adapters
from parallelize.plan.model_facts import ModelFacts, describe
from parallelize.plan.resolve import resolve_again
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.later_changes import when_changed
from parallelize.state.records import Cut, applied, mark_applied, mark_parameter, pipeline_cut, resolution_so_far

_CALL = "the next step, after adapters were added"
_FIRST = "get_peft_model(model, config) first, then parallelize_model(model, mesh)"


class StageAdapters:
    """Takes in the adapters that a model gets after its cut. Called with the model, by all ranks of the mesh or
    none."""

    def __init__(self, module: nn.Module):
        self._is_changed = False
        show_absent_to_peft()
        self._watch(module)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a model has no part in the steps of the pipeline."""

    def _watch(self, module: nn.Module) -> None:
        when_changed(module, partial(_changed, weakref.ref(self)))

    def changed(self) -> None:
        """The model was given a module or a parameter."""
        self._is_changed = True

    def __call__(self, module: nn.Module) -> None:
        """Plan the adapters that were added since the model was cut. Nothing, if there are none.

        Raises: ModelError `added-parameter`; PlanError `unplanned-adapter`; HandshakeError `ranks-disagree`,
            `ranks-missing`.
        """
        cut = pipeline_cut(module)
        if not self._is_changed or cut is None:
            return
        self._is_changed = False
        self._watch(module)
        now = describe(module)
        if not any(is_adapter_parameter(name) and name not in cut.facts.parameter_fqns for name in now.parameter_fqns):
            return
        with agree_on(cut.mesh, call=_CALL):
            _refuse(module, cut, now)
        trains = _trained_on_all_stages(cut, now)
        with agree_on(cut.mesh, call=_CALL) as agreed:
            resolved = resolve_again(cut.resolved, with_adapters(cut.facts, now, trains))
            _refuse_tied(cut.resolved, resolved)
            agreed |= resolved.structure()
        earlier = resolution_so_far(module)  # over all axes, where later steps were calls of their own
        over_all_axes = resolved if earlier is cut.resolved else resolve_again(earlier, resolved.facts)
        mark_applied(module, cut=replace(cut, resolved=resolved), resolved=over_all_axes)
        for unit in cut.stages.units:
            if unit in now.module_fqns and not cut.present(unit):
                inner = module.get_submodule(unit)
                for parameter in inner.parameters():
                    mark_parameter(parameter, absent=True)
                drop_parameters(inner)
        over_tp = applied(module).plan_later
        if over_tp is not None:
            over_tp(module)
        mark_stages(module)


def _refuse(module: nn.Module, cut: Cut, now: ModelFacts) -> None:
    """Refuse what PEFT can only be asked for before the cut."""
    plan = cut.resolved.plan
    added = [name for name in now.parameter_fqns if name not in cut.facts.parameter_fqns and is_adapter_parameter(name)]
    dropping = [name for name, inner in now.objects.items() if _drops_by_chance(inner)]
    copied = [name for name in copied_layers(now) if f"{name}.{ORIGINAL}" not in cut.facts.modules]
    reasons = {
        "its plan is a dict of style objects": plan.on_unclaimed == "leave",
        "collectives of its linears overlap with their matmuls": plan.options.overlap not in (None, "off"),
        f"{dropping[0] if dropping else ''} would draw masks that depend on the mesh": bool(dropping),
        f"{copied[0] if copied else ''} was copied, on a mesh with tp": bool(copied) and cut.resolved.tp_size > 1,
    }
    for reason, is_so in reasons.items():
        if is_so:
            what = f"adapters were added after the model was cut into stages ({added[0]}), and {reason}"
            raise ModelError(Problem("added-parameter", what, fix=_FIRST))


def _drops_by_chance(module: nn.Module) -> bool:
    """Whether a module drops by masks of PyTorch's generator."""
    return isinstance(module, nn.Dropout) and module.p > 0 and applied(module).dropout is None


def _refuse_tied(before: ResolvedPlan, now: ResolvedPlan) -> None:
    """Copies of a tied parameter are found by their names."""
    tied = {name for tie in before.ties for name in tie.members} - {name for tie in now.ties for name in tie.members}
    if tied:
        what = (
            f"adapters were added after the model was cut into stages, around {min(tied)}, which other stages have too"
        )
        raise ModelError(Problem("added-parameter", what, fix=_FIRST))


def _trained_on_all_stages(cut: Cut, now: ModelFacts) -> dict[str, bool]:
    """By name, whether a parameter requires a gradient on the stage that has it. A collective over `pp`."""
    local = {name: fact.requires_grad for fact in now.parameters.values() for name in fact.names if cut.present(name)}
    parts: list[Any] = [None] * cut.group.size
    dist.all_gather_object(parts, local, group=cut.group.pg)
    return {name: trains for part in parts for name, trains in part.items()}


def _changed(adapters: weakref.ref[StageAdapters]) -> None:
    taker = adapters()
    if taker is not None:
        taker.changed()


def show_absent_to_peft() -> None:
    """Let PEFT, where it is imported, make adapters of layers of other stages: it reads the shape, dtype and device of
    their weights."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None:
        patches.replace(tuners.BaseTuner, "inject_adapter", _with_absent_weights)
    if hasattr(tuners, "_set_layer_requires_grad"):
        patches.replace(tuners, "_set_layer_requires_grad", _skip_absent)


def _skip_absent(stock: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's function that freezes or unfreezes an adapter, which in a dictionary of parameters is None where it is
    absent."""

    def set_requires_grad(layer: Any, requires_grad: bool) -> None:
        if layer is not None:
            stock(layer, requires_grad)

    return set_requires_grad


def _with_absent_weights(stock: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _as_parameters(model):
            return stock(self, model, *args, **kwargs)

    return inject_adapter


@contextmanager
def _as_parameters(model: nn.Module) -> Iterator[None]:
    """Within it, absent parameters are NaN of their shapes, which takes the memory of one element."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    absent = [module for module in model.modules() if applied(module).absent]
    shown: dict[nn.Module, set[str]] = {}
    for module in absent:
        for key, (shape, dtype) in applied(module).absent.items():
            if key in module._parameters and module._parameters[key] is None:
                value = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
                module._parameters[key] = nn.Parameter(value.expand(shape), requires_grad=False)
                shown.setdefault(module, set()).add(key)
    try:
        yield
    finally:
        for module, keys in shown.items():
            module._parameters.update(dict.fromkeys(keys))
