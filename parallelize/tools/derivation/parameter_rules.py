"""Rules of parameters that are no linear's: by their module, or each by its name where those of one module differ."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from parallelize.plan.model_facts import describe
from parallelize.tools.derivation.shared_inputs import PARTIAL_GRADIENT


def note_partial(styles: dict[str, str], model: nn.Module, partial: Set[str]) -> None:
    """Add the rules of the parameters of whose gradient each rank has a part: by their module, if all of its own are such.

    styles: so far, by the name of a module or parameter. partial: by name.
    """
    for name in sorted(partial):
        module = name.rpartition(".")[0]
        owner = model.get_submodule(module)
        own = {f"{module}.{key}".lstrip("."): value for key, value in owner.named_parameters(recurse=False)}
        if not own[name].requires_grad:
            continue
        trained = {key for key, parameter in own.items() if parameter.requires_grad}
        are_alike = bool(module) and trained <= partial and not own.keys() & styles.keys()
        styles.setdefault(module if are_alike else name, PARTIAL_GRADIENT)


def other_parameters(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    """The other parameters of modules of which some have rules of their own: the rule of all other modules does not claim them."""
    others: list[str] = []
    for name, facts in describe(model).modules.items():
        own = [f"{name}.{key}".lstrip(".") for key in facts.shapes]
        if name and name not in styles and any(parameter in styles for parameter in own):
            others += [parameter for parameter in own if parameter not in styles]
    return others


def leaves_something(model: nn.Module, styles: Mapping[str, str]) -> bool:
    """Whether some parameter has no rule yet."""
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return any(not {name, name.rpartition(".")[0]} & styles.keys() for name in parameters)


def names_of(model: nn.Module) -> list[str]:
    """The names of modules, and of parameters in them. A module of several names has the first alone."""
    modules = [name for name, _ in model.named_modules()]
    known = set(modules)
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [*modules, *(name for name in parameters if name.rpartition(".")[0] in known)]
