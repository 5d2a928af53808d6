"""PyTorch's form of a plan: a dict of name patterns to styles. Matched first, applied in its order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.errors import ModelError, PlanError, Problem, near
from parallelize.gradients import Ledger
from parallelize.plan.model import describe
from parallelize.torch_styles.boundary import SequenceParallel
from parallelize.torch_styles.linear import ColwiseParallel, RowwiseParallel
from parallelize.torch_styles.style import ParallelStyle, Style, target_of


def is_style(plan: Any) -> bool:
    return isinstance(plan, ParallelStyle)


def is_style_dict(plan: Any) -> bool:
    return isinstance(plan, Mapping) and not any(isinstance(style, str) for style in plan.values())


def spelled(style: Any) -> str:
    """A style as text that is the same on every rank: no addresses."""
    return repr(style) if isinstance(style, Style) else type(style).__qualname__


def match_styles(module: nn.Module, styles: Any) -> list[tuple[str, nn.Module, Any]]:
    """(fqn, module, style) for every match, in the order of the dict. Nothing is changed.

    Raises: PlanError `unmatched-rule`, `bad-plan`; ModelError where a style cannot serve its module.
    """
    if is_style(styles):
        styles = {"": styles}
    names = dict(module.named_modules(remove_duplicate=False))
    problems, matched = [], []
    for pattern, style in styles.items():
        if not is_style(style):
            problems.append(Problem("bad-plan", f"{pattern!r} has a {type(style).__name__}, not a style"))
            continue
        found = [name for name in names if _fits(pattern, name)]
        if not found:
            close = near(pattern, names)
            fix = "did you mean " + " or ".join(map(repr, close)) + "?" if close else "remove it"
            problems.append(Problem("unmatched-rule", f"{pattern!r} matches no module", fix=fix))
        matched += [(name, names[name], style) for name in found]
    facts = describe(module)
    for name, _, style in matched:
        if isinstance(style, Style):
            try:
                style.check(facts.modules[facts.aliases[name]], names[name])
            except ModelError as error:
                problems += error.problems
    split = {
        id(found)
        for _, found, style in matched
        if isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel))
    }
    problems += _Ties(module).check({id(found): name for name, found in names.items()}, split)
    if problems:
        raise PlanError(*problems)
    return matched


def apply_styles(root: nn.Module, matched: list, mesh: DeviceMesh, source: int | None) -> None:
    """Install matched styles; ties by identity stay ties."""
    ledger = Ledger()
    ties = _Ties(root)
    for fqn, module, style in matched:
        if isinstance(style, Style):
            style.install(target_of(module, fqn, mesh, ledger, source))
        else:  # PyTorch's own, or a third party's: applied as it is
            own = copy.copy(style)  # theirs write on themselves while they are applied
            if hasattr(own, "src_data_rank"):
                own.src_data_rank = source
            own._apply(module, mesh)
        ties.share(module)


class _Ties:
    """Parameters that several modules share: after one is replaced, the others are given the same."""

    def __init__(self, root: nn.Module):
        holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in root.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((owner, key))
        self.groups = [group for group in holders.values() if len(group) > 1]

    def share(self, changed: nn.Module) -> None:
        """Give every holder the DTensor that one of them was just given."""
        for group in self.groups:
            new: Any = next((owner._parameters[key] for owner, key in group if owner is changed), None)
            if isinstance(new, DTensor):
                for owner, key in group:
                    parameters: Any = owner._parameters
                    parameters[key] = new

    def check(self, names: dict[int, str], split: set[int]) -> Iterator[Problem]:
        """A parameter that one style splits must not also be held by a module without a style: it would misread it."""
        for group in self.groups:
            rest = [f"{names[id(owner)]}.{key}" for owner, key in group if id(owner) not in split]
            if rest and len(rest) < len(group):
                held = [f"{names[id(owner)]}.{key}" for owner, key in group if id(owner) in split]
                yield Problem(
                    "broken-tie",
                    f"{held[0]} is split, and tied to {', '.join(rest)}, which no style serves",
                    fix="give it a style that splits the same dim: ColwiseParallel for a head",
                )


def _fits(pattern: str, name: str) -> bool:
    tokens, parts = pattern.split("."), name.split(".")
    return len(tokens) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True)
    )
