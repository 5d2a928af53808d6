"""Recompute: units of a model forget what their forward computed, and compute it again when backward comes.

A unit (by default each layer) keeps its inputs and what it is told to save. Its forward is intercepted on the instance, as
the forwards of planned modules are, outside of the edges that the plan put around it and inside of the user's hooks. What a
replay must find as it was stands in `ops/tape.py`; what may be saved, and at what cost, in `ops/saving.py`.

    recompute(model)                                            full: a unit keeps its inputs only
    recompute(model, "selective", save=("collectives",))        nothing is sent twice
    recompute(model, every=2)                                   units 0, 2, 4, ...
    set_recompute(model.model.layers[3], False)                 from the next forward on

Losses and gradients are bit for bit those without recompute. (A model that makes a key/value cache even in training makes
none meanwhile, as with `use_cache=False`: compare with that.) Order: after `parallelize_module`, before `fully_shard`.

Cost: a full unit runs its forward once more, collectives included except those after the last tensor that backward needs.
The bytes that are kept are in `recompute_cost`.

Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198 (selective).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from parallelize.errors import ModelError, PlanError, Problem, did_you_mean
from parallelize.handshake import agree_on
from parallelize.ops.saving import DEFAULT, what_to_keep
from parallelize.ops.tape import in_recompute, remembered, replay_key
from parallelize.plan.load import load_plan
from parallelize.plan.pattern import alternatives, check_pattern, matches
from parallelize.plan.schema import Plan
from parallelize.replay import Unit, UnitCost, install, install_on_root, installed, refuse_foreign
from parallelize.sharding import record_of

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
    """Let units of a model recompute their activations in backward, in place, and return it. Call it on every rank.

    Args:
        model: planned or not; before `fully_shard`, or after it.
        mode: "full", "selective", or "off": ready to be switched on by `set_recompute`.
        every: n recomputes units 0, n, 2n, ... in the model's order (units of other pipeline stages count).
        units: patterns of module names. Default: what the plan says, or each of its layers.
        save: for "selective", names of `ops/saving.py`. Default: "matmul", "attention" and "collectives".
        plan: where units are looked up. Default: the model's own.

    Raises: PlanError `bad-recompute`, `unknown-op`, `cannot-save`; ModelError `no-recompute-units`, `nested-units`,
        `already-recomputed`, `foreign-recompute`; HandshakeError where tp ranks differ. Nothing is changed then.
    """
    record = record_of(model)
    with agree_on(record.tp) if record is not None else nullcontext({}) as facts:
        names = _names(mode, every, save)
        kinds, ops = what_to_keep(names)
        _refuse_others(model)
        found = _units(model, units, plan)
        facts |= {"recompute": f"{mode} every {every}, save {' '.join(names)}", "units": " ".join(found)}
    cut: Any = model.__dict__.get("_parallelize_cut")
    for fqn in list(found)[::every]:
        if cut is None or cut.present(fqn):
            install(found[fqn], Unit(found[fqn], kinds, ops, names, on=mode != "off"))
    install_on_root(model)
    return model


def set_recompute(module: nn.Module, on: bool) -> None:
    """Switch recompute of a unit, or of all units inside a module, from the next forward on. On every rank alike.

    Raises: ModelError `no-recompute-units`.
    """
    units = [unit for _, unit in installed(module)]
    if not units:
        fix = "call recompute(model) first, and set_recompute on a unit or on what contains it"
        raise ModelError(Problem("no-recompute-units", f"{type(module).__name__} has no recomputed units", fix=fix))
    for unit in units:
        unit.on = bool(on)


def recomputed(model: nn.Module) -> dict[str, str]:
    """Unit name to "full", "selective", or "off" where it is switched off."""
    return {fqn: unit.mode for fqn, unit in installed(model)}


def recompute_cost(model: nn.Module) -> dict[str, UnitCost]:
    """Unit name to what it kept in its most recent forward in training (zeros before one)."""
    return {fqn: unit.cost() for fqn, unit in installed(model)}


# -- which units -------------------------------------------------------------------------------------------------------


def _names(mode: str, every: int, save: str | Sequence[str] | None) -> tuple[str, ...]:
    """What is saved, by name.

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


def _units(model: nn.Module, given: str | Sequence[str] | None, plan: Plan | str | None) -> dict[str, nn.Module]:
    """Name to module, in the model's order.

    Raises: ModelError `no-recompute-units`, `nested-units`; PlanError of patterns and plans.
    """
    modules = dict(model.named_modules())
    patterns = [given] if isinstance(given, str) else given
    if patterns is None:
        patterns = _planned_units(model, modules, plan)
    chosen: set[str] = set()
    for pattern in patterns:
        check_pattern(pattern, "recompute units")
        for one in alternatives(pattern):
            matched = {name for name in modules if name and matches(one, name)}
            if not matched:
                what = f"no module is called {one!r}"
                raise ModelError(Problem("no-recompute-units", what, fix=did_you_mean(one, modules)))
            chosen |= matched
    found = {name: module for name, module in modules.items() if name in chosen}
    for name, module in found.items():
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            what = f"{name} is a {type(module).__name__}, which is never called"
            raise ModelError(Problem("no-recompute-units", what, fix=f"name what it holds: {name}.*"))
        above = next((other for other in found if name.startswith(other + ".")), None)
        if above is not None:
            what = f"{name} lies in {above}, and both are to be recomputed"
            raise ModelError(Problem("nested-units", what, fix="name one of them"))
    return found


def _planned_units(model: nn.Module, modules: dict[str, nn.Module], plan: Plan | str | None) -> list[str]:
    """Patterns of the units that a plan names, or of its layers; for a base model without its head, too."""
    record = record_of(model)
    if isinstance(plan, str):
        plan = load_plan(plan)
    if plan is None and record is not None:
        plan = record.resolved.plan
    layers = plan and ((plan.cuts and plan.cuts.layers) or (plan.region and plan.region.layers))
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
    known = list(installed(model))
    if known:
        what = f"{type(model).__name__} has {len(known)} recomputed units: {known[0][0] or 'itself'}, ..."
        fix = "set_recompute switches them; make the model anew for other units or another mode"
        raise ModelError(Problem("already-recomputed", what, fix=fix))
    for name, module in model.named_modules():
        refuse_foreign(module, name)
