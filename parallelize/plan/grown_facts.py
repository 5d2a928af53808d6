"""The facts of a full model that has got adapters since it was cut into stages, on a rank that has a part of it.

Modules are the objects that they were, under other names: a layer with adapters is its wrapper's `base_layer`. Of what
other stages store, shapes are those from before the cut; new adapters have theirs on every rank, until they are
dropped.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from parallelize.plan.adapters import COPIES, ORIGINAL, copied_layers
from parallelize.plan.model_facts import ModelFacts, ParameterFacts
from parallelize.plan.styles.style import ModuleFacts

Slot = tuple[int, str]
"""(id of a module, key of one of its parameters)."""


def with_adapters(before: ModelFacts, now: ModelFacts, trains: Mapping[str, bool]) -> ModelFacts:
    """The full model under its names of now.

    Args:
        before: of the full model, before the cut or at the last call.
        now: of this rank's module tree, where absent parameters are None.
        trains: by name of now, whether a parameter requires a gradient, on the rank that has it.
    """
    known = {id(module): before.modules[name] for name, module in before.objects.items()}
    originals = {id(copy): id(original) for original, copy in _copies(now)}
    slots, module_names = _facts_by_slot(before), _module_names(now)
    modules: dict[str, ModuleFacts] = {}
    facts: dict[tuple[int, int], ParameterFacts] = {}
    names: dict[tuple[int, int], list[str]] = {}
    for first, module in now.objects.items():
        source = id(module) if id(module) in known else originals.get(id(module), 0)
        modules[first] = _module_facts(now.modules[first], module, known.get(source))
        for key in modules[first].shapes:
            fact = slots.get((source, key)) or now.parameters[now.parameter_fqns[_joined(first, key)]]
            identity = id(fact), id(module) if source not in (0, id(module)) else 0  # each copy has its own
            facts[identity] = fact
            names.setdefault(identity, []).extend(_joined(name, key) for name in module_names[id(module)])
    parameters = {
        of[0]: replace(facts[key], names=tuple(of), requires_grad=any(trains.get(name, False) for name in of))
        for key, of in names.items()
    }
    parameter_fqns = {name: fact.fqn for fact in parameters.values() for name in fact.names}
    return replace(
        before,
        modules=modules,
        objects=now.objects,
        module_fqns=now.module_fqns,
        parameters=parameters,
        parameter_fqns=parameter_fqns,
    )


def _module_names(model: ModelFacts) -> dict[int, list[str]]:
    """id of a module -> all its names."""
    names: dict[int, list[str]] = {}
    for name, first in model.module_fqns.items():
        names.setdefault(id(model.objects[first]), []).append(name)
    return names


def _copies(model: ModelFacts) -> Iterator[tuple[Any, Any]]:
    """(a module of a layer of `modules_to_save`, the same one of a trained copy)."""
    for name in copied_layers(model):
        original = f"{name}.{ORIGINAL}"
        inside = {key[len(original) :]: module for key, module in model.objects.items() if _is_within(key, original)}
        for copy in model.objects[f"{name}.{COPIES}"]._modules:
            for key, module in inside.items():
                copied = model.objects.get(f"{name}.{COPIES}.{copy}{key}")
                if copied is not None:
                    yield module, copied


def _is_within(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")


def _module_facts(now: ModuleFacts, module: Any, known: ModuleFacts | None) -> ModuleFacts:
    """With the shapes of all parameters that it has, also of those that this rank lacks."""
    if known is None:
        return now
    shapes = {**now.shapes, **known.shapes}
    present = {key: shape for key, shape in shapes.items() if key in module._parameters or key in module.__dict__}
    return replace(known, fqn=now.fqn, shapes=present)


def _facts_by_slot(model: ModelFacts) -> dict[Slot, ParameterFacts]:
    slots = {}
    for name, first in model.parameter_fqns.items():
        owner, _, key = name.rpartition(".")
        slots[id(model.objects[model.module_fqns[owner]]), key] = model.parameters[first]
    return slots


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")
