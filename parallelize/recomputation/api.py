"""Recompute: units of a model do not save their activations, and compute them again in backward.

A unit (by default each layer) saves its inputs and what `save` names. Its forward is intercepted on the instance, like that of
planned modules: outside of the plan's boundary conversions, and inside of the user's hooks. `ops/replay_cache.py` has what a
replay must get from its forward; `recomputation/saving.py` has what can be saved, and the memory that it takes.

    recompute(model)                                            full: a unit saves only its inputs
    recompute(model, "selective", save=("collectives",))        no collective runs twice
    recompute(model, every=2)                                   units 0, 2, 4, ...
    set_recompute(model.model.layers[3], False)                 from the next forward on

Losses and gradients are bit-equal to those without recompute. (A model that builds a key/value cache even in training builds
none under recompute, as with `use_cache=False`; compare with that.) Order: after `parallelize_module`, before `fully_shard`.

Cost: a full unit runs its forward once more, including collectives except those after the last tensor that backward needs.
`recompute_cost` reports the saved bytes.

Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198 (selective).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from parallelize.applied.records import cut_of, record_of
from parallelize.comm.handshake import agree_on
from parallelize.errors import ModelError, PlanError, Problem, did_you_mean
from parallelize.ops.replay_cache import in_recompute, remembered, replay_key
from parallelize.plan.load import load_plan
from parallelize.plan.pattern import alternatives, check_pattern, matches
from parallelize.plan.schema import Plan
from parallelize.plan.units import layers_of
from parallelize.recomputation.saving import DEFAULT, kinds_and_ops
from parallelize.recomputation.unit import (
    RecomputeUnit,
    UnitCost,
    install,
    install_on_root,
    recompute_units_in,
    refuse_foreign,
)

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
        save: for "selective", names from `recomputation/saving.py`. Default: "matmul", "attention" and "collectives".
        plan: the plan, or its name, that names the units. Default: the model's own plan.

    Returns: the model.
    Raises: before anything is changed, PlanError `bad-recompute`, `unknown-op`, `cannot-save`; ModelError
        `no-recompute-units`, `nested-units`, `already-recomputed`, `foreign-recompute`; HandshakeError if the tp ranks
        differ. During a forward, ModelError `cache-in-recompute`, `foreign-recompute`.
    Cost: the handshake of the tp ranks. Each step, a full unit runs its forward once more, with its collectives; "selective"
        does not repeat what `save` names.
    """
    record = record_of(model)
    handshake: AbstractContextManager[Any] = nullcontext({}) if record is None else agree_on(record.tp)
    with handshake as facts:
        names = _names(mode, every, save)
        kinds, ops = kinds_and_ops(names)
        _refuse_others(model)
        modules = _units(model, units, plan)
        facts |= {"recompute": f"{mode} every {every}, save {' '.join(names)}", "units": " ".join(modules)}
    cut: Any = cut_of(model)
    for fqn in list(modules)[::every]:
        if cut is None or cut.present(fqn):
            install(modules[fqn], RecomputeUnit(modules[fqn], kinds, ops, names, on=mode != "off"))
    install_on_root(model)
    return model


def set_recompute(module: nn.Module, on: bool) -> None:
    """Switch recompute of a unit, or of all units inside a module, from the next forward on. The same on every rank.

    Args:
        module: a unit, or a module that contains units.
        on: whether the units are recomputed.

    Raises: ModelError `no-recompute-units`.
    Cost: no communication.
    """
    units = [unit for _, unit in recompute_units_in(module)]
    if not units:
        fix = "call recompute(model) first, and set_recompute on a unit or on what contains it"
        raise ModelError(Problem("no-recompute-units", f"{type(module).__name__} has no recomputed units", fix=fix))
    for unit in units:
        unit.on = bool(on)


def recomputed(model: nn.Module) -> dict[str, str]:
    """The recomputed units of a model.

    Args:
        model: any model.

    Returns: unit name -> "full", "selective", or "off" if the unit is switched off. No communication.
    """
    return {fqn: unit.mode for fqn, unit in recompute_units_in(model)}


def recompute_cost(model: nn.Module) -> dict[str, UnitCost]:
    """What the recomputed units of a model saved in their most recent forward in training (zeros before the first).

    Args:
        model: any model.

    Returns: unit name -> `UnitCost`: bytes of inputs, numbers and bytes of saved results, numbers of forwards and replays.
        No communication.
    """
    return {fqn: unit.cost() for fqn, unit in recompute_units_in(model)}


# -- which units -------------------------------------------------------------------------------------------------------


def _names(mode: str, every: int, save: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of what is saved.

    Raises: PlanError `bad-recompute`.
    """
    if mode not in MODES:
        raise PlanError(Problem("bad-recompute", f"mode is {mode!r}", fix=did_you_mean(str(mode), MODES)))
    if type(every) is not int or every < 1:
        raise PlanError(Problem("bad-recompute", f"every is {every!r}", fix="1 for each unit, 2 for every second one"))
    if save is not None and mode == "full":
        fix = 'mode="selective", or no save'
        raise PlanError(Problem("bad-recompute", f"a full unit saves nothing, and save is {save!r}", fix=fix))
    if save is None:
        return DEFAULT if mode == "selective" else ()
    return (save,) if isinstance(save, str) else tuple(save)


def _units(model: nn.Module, units: str | Sequence[str] | None, plan: Plan | str | None) -> dict[str, nn.Module]:
    """Unit name -> module, in the model's order.

    Raises: ModelError `no-recompute-units`, `nested-units`; PlanError of patterns and plans.
    """
    modules = dict(model.named_modules())
    patterns = [units] if isinstance(units, str) else units
    if patterns is None:
        patterns = _planned_units(model, modules, plan)
    chosen: set[str] = set()
    for pattern in patterns:
        check_pattern(pattern, "recompute units")
        for alternative in alternatives(pattern):
            matched = {name for name in modules if name and matches(alternative, name)}
            if not matched:
                what = f"no module is called {alternative!r}"
                raise ModelError(Problem("no-recompute-units", what, fix=did_you_mean(alternative, modules)))
            chosen |= matched
    chosen_modules = {name: module for name, module in modules.items() if name in chosen}
    for name, module in chosen_modules.items():
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            what = f"{name} is a {type(module).__name__}, which is never called"
            raise ModelError(Problem("no-recompute-units", what, fix=f"name the modules in it: {name}.*"))
        parent = next((other for other in chosen_modules if name.startswith(other + ".")), None)
        if parent is not None:
            what = f"{name} is inside {parent}, and both are to be recomputed"
            raise ModelError(Problem("nested-units", what, fix="name one of them"))
    return chosen_modules


def _planned_units(model: nn.Module, modules: dict[str, nn.Module], plan: Plan | str | None) -> list[str]:
    """Patterns of the units that a plan names, or of its layers. Also works for a base model without its head."""
    record = record_of(model)
    if isinstance(plan, str):
        plan = load_plan(plan)
    if plan is None and record is not None:
        plan = record.resolved.plan
    layers = layers_of(plan)
    patterns = list(plan.recompute_units) if plan else []
    if not patterns and layers:
        patterns = [f"{layers}.*"]
    if plan is None or not patterns:
        what = "no plan" if plan is None else f"plan {plan.name}, which names neither units nor layers"
        fix = 'recompute(model, units="model.layers.*"), or `recompute: {units: [...]}` in the plan'
        raise ModelError(Problem("no-recompute-units", f"{type(model).__name__} has {what}", fix=fix))
    if plan.base and plan.base not in modules:
        patterns = [pattern.removeprefix(plan.base + ".") for pattern in patterns]
    return patterns


def _refuse_others(model: nn.Module) -> None:
    """Raises: ModelError `already-recomputed`, `foreign-recompute`."""
    existing = list(recompute_units_in(model))
    if existing:
        what = f"{type(model).__name__} has {len(existing)} recomputed units: {existing[0][0] or 'itself'}, ..."
        fix = "set_recompute switches them; build the model again for other units or another mode"
        raise ModelError(Problem("already-recomputed", what, fix=fix))
    for name, module in model.named_modules():
        refuse_foreign(module, name)
