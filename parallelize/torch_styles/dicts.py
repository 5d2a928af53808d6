"""PyTorch's form of a plan: a dict of name patterns to styles. Matched first, applied in its order."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.errors import ModelError, PlanError, Problem, near
from parallelize.forwards import Planned, install
from parallelize.gradients import Ledger
from parallelize.parameters import Slot
from parallelize.plan.model import describe
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
            if hasattr(style, "src_data_rank"):
                style.src_data_rank = source
            style._apply(module, mesh)
        ties.share(module)
    ties.serve_the_rest(ledger)


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
                    owner._parameters[key] = new

    def serve_the_rest(self, ledger: Ledger) -> None:
        """Holders without a style of their own compute with the local shard too."""
        for group in self.groups:
            for owner, key in group:
                held: Any = owner._parameters[key]
                if isinstance(held, DTensor) and "_planned" not in owner.__dict__:
                    install(owner, Planned((Slot(key, held, None, None, ledger),), owner.__dict__.get("forward")))


def _fits(pattern: str, name: str) -> bool:
    tokens, parts = pattern.split("."), name.split(".")
    return len(tokens) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True)
    )
