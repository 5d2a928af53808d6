"""Recompute: units of a model do not save their activations, and compute them again in backward.

A unit (by default each layer) saves its inputs and what `save` names. Its forward is intercepted on the instance, like
that of planned modules: outside of the plan's boundary conversions, and inside of the user's hooks.
`ops/replay_cache.py` has what a replay must get from its forward; `axes/recomputation/saving.py` has what can be saved,
and the memory that it takes.

    recompute(model)                                            full: a unit saves only its inputs
    recompute(model, "selective", save=("collectives",))        no collective runs twice
    recompute(model, every=2)                                   units 0, 2, 4, ...
    set_recompute(model.model.layers[3], False)                 from the next forward on

Losses and gradients are bit-equal to those without recompute. (A model that builds a key/value cache even in training
builds none under recompute, as with `use_cache=False`; compare with that.) Order: after `parallelize_module`, before
`fully_shard`.

Cost: a full unit runs its forward once more, including collectives except those after the last tensor that backward
    needs.
`recompute_cost` reports the saved bytes.

Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198 (selective).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from parallelize.axes.recomputation.saving import DEFAULT, kinds_and_ops
from parallelize.axes.recomputation.unit import (
    RecomputeUnit,
    UnitCost,
    install,
    install_on_root,
    recompute_units_in,
    refuse_foreign,
)
from parallelize.base.errors import ModelError, PlanError, Problem, did_you_mean
from parallelize.comm.handshake import agree_on
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.replay_cache import in_recompute, remembered, replay_key
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.plan.options import Options
from parallelize.plan.plan_file import load_plan
from parallelize.plan.resolve import for_model, recompute_units
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.schema import Plan
from parallelize.state.records import facts_of, mark_applied, pipeline_cut, record_of, resolution_so_far

__all__ = [
    "UnitCost",
    "in_recompute",
    "recompute",
    "recompute_cost",
    "recomputed",
    "remembered",
    "replay_key",
    "set_recompute",
]
MODES = ("full", "selective", "off")


def recompute(
    model: nn.Module,
    mode: str = "full",
    *,
    every: int = 1,
    units: str | Sequence[str] | None = None,
    save: str | Sequence[str] | None = None,
    plan: Plan | str | None = None,
) -> nn.Module:
    """Make units of a model recompute their activations in backward, in place. Call it on every rank.

    Args:
        model: planned or not; before `fully_shard`, or after it.
        mode: "full", "selective", or "off", which `set_recompute` can switch on.
        every: n recomputes units 0, n, 2n, ... in the model's order, counted over all pipeline stages.
        units: patterns of module names. Default: the units that the plan names, or each of its layers.
        save: for "selective", names from `axes/recomputation/saving.py`. Default: "matmul", "attention" and
            "collectives".
        plan: the plan, or its name, that names the units. Default: the model's own plan.

    Returns: the model.
    Raises: before anything is changed, PlanError `bad-recompute`, `unknown-op`, `cannot-save`; ModelError
        `no-recompute-units`, `nested-units`, `already-recomputed`, `foreign-recompute`; HandshakeError if the tp ranks
        differ. During a forward, ModelError `cache-in-recompute`, `foreign-recompute`.
    Cost: the handshake of the tp ranks. Each step, a full unit runs its forward once more, with its collectives;
        "selective" does not repeat what `save` names.
    """

    def decide() -> ResolvedPlan:
        _check_mode(mode, every)
        earlier, facts = resolution_so_far(model), facts_of(model)
        chosen = load_plan(plan) if isinstance(plan, str) else plan
        names = recompute_units(
            earlier.plan if chosen is None else for_model(chosen, facts),
            facts,
            [units] if isinstance(units, str) else units,
        )
        earlier = earlier.with_options(recompute=mode, recompute_every=every, recompute_save=_saved(save))
        return replace(earlier, recompute_units=names)

    return apply_recompute(model, decide)


def apply_recompute(model: nn.Module, decide: Callable[[], ResolvedPlan]) -> nn.Module:
    """`recompute` by a resolved plan. decide: returns it; what it raises is raised on every rank of `tp`."""
    record = record_of(model)
    handshake: AbstractContextManager[Any] = nullcontext({}) if record is None else agree_on(MeshView(record.tp))
    with handshake as agreed:
        _refuse_others(model)
        resolved = decide()
        options = resolved.options
        _check_saved(options)
        names: tuple[str, ...] = DEFAULT if options.recompute == "selective" else ()
        names = names if options.recompute_save is None else options.recompute_save
        kinds, ops = kinds_and_ops(names)
        modules = {fqn: model.get_submodule(fqn) for fqn in resolved.recompute_units}
        _check_called(modules)
        agreed |= {"recompute": f"{options.recompute} every {options.recompute_every}, save {' '.join(names)}"}
        agreed |= {"units": " ".join(modules)}
    cut = pipeline_cut(model)
    for fqn in resolved.recompute_units[:: options.recompute_every]:
        if cut is None or cut.present(fqn):
            install(modules[fqn], RecomputeUnit(modules[fqn], kinds, ops, names, on=options.recompute != "off"))
    mark_applied(model, resolved=resolved)
    install_on_root(model)
    return model


def set_recompute(module: AnyModel, on: bool) -> None:
    """Switch recompute of a unit, or of all units inside a module, from the next forward on. The same on every rank.

    Args:
        module: a unit, or a module that contains units.
        on: whether the units are recomputed.

    Raises: ModelError `no-recompute-units`.
    Cost: no communication.
    """
    module = module_of(module)
    units = [unit for _, unit in recompute_units_in(module)]
    if not units:
        fix = "call recompute(model) first, and set_recompute on a unit or on what contains it"
        raise ModelError(Problem("no-recompute-units", f"{type(module).__name__} has no recomputed units", fix=fix))
    for unit in units:
        unit.on = bool(on)


def recomputed(model: AnyModel) -> dict[str, str]:
    """The recomputed units of a model.

    Args:
        model: any model.

    Returns: unit name -> "full", "selective", or "off" if the unit is switched off. No communication.
    """
    model = module_of(model)
    return {fqn: unit.mode for fqn, unit in recompute_units_in(model)}


def recompute_cost(model: AnyModel) -> dict[str, UnitCost]:
    """What the recomputed units of a model saved in their most recent forward in training (zeros before the first).

    Args:
        model: any model.

    Returns: unit name -> `UnitCost`: bytes of inputs, numbers and bytes of saved results, numbers of forwards and
        replays. No communication.
    """
    model = module_of(model)
    return {fqn: unit.cost() for fqn, unit in recompute_units_in(model)}


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_mode(mode: str, every: int) -> None:
    """Raises: PlanError `bad-recompute`."""
    if mode not in MODES:
        raise PlanError(Problem("bad-recompute", f"mode is {mode!r}", fix=did_you_mean(str(mode), MODES)))
    if type(every) is not int or every < 1:
        raise PlanError(Problem("bad-recompute", f"every is {every!r}", fix="1 for each unit, 2 for every second one"))


def _check_saved(options: Options) -> None:
    """Raises: PlanError `bad-recompute`."""
    if options.recompute_save is not None and options.recompute == "full":
        what = f"a full unit saves nothing, and save is {options.recompute_save!r}"
        raise PlanError(Problem("bad-recompute", what, fix='mode="selective", or no save'))


def _saved(save: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (save,) if isinstance(save, str) else None if save is None else tuple(save)


def _check_called(modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            what = f"{name} is a {type(module).__name__}, which is never called"
            raise ModelError(Problem("no-recompute-units", what, fix=f"name the modules in it: {name}.*"))


def _refuse_others(model: nn.Module) -> None:
    """Raises: ModelError `already-recomputed`, `foreign-recompute`."""
    existing = list(recompute_units_in(model))
    if existing:
        what = f"{type(model).__name__} has {len(existing)} recomputed units: {existing[0][0] or 'itself'}, ..."
        fix = "set_recompute switches them; build the model again for other units or another mode"
        raise ModelError(Problem("already-recomputed", what, fix=fix))
    for name, module in model.named_modules():
        refuse_foreign(module, name)
