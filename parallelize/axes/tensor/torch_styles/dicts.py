"""PyTorch's form of a plan: a dict from name patterns to styles. All patterns are matched before any style is applied.

A model may be planned in several calls, as with PyTorch's function. A pattern that matches nothing is warned of where
that function is replaced, and an error elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as stock

from parallelize.axes.tensor.torch_styles.placed_gradients import place_gradients
from parallelize.axes.tensor.torch_styles.styles import (
    CONVERTING,
    SHARDING,
    ColwiseParallel,
    RowwiseParallel,
    from_pytorch,
)
from parallelize.base.errors import ModelError, PlanError, Problem, near, warn_caller
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import applied, facts_of, mark_applied

_OWN = (*SHARDING, *CONVERTING)


def is_style(plan: Any) -> bool:
    return isinstance(plan, stock.ParallelStyle)


def is_styles(plan: Any) -> bool:
    """Whether a plan is one style, or a dict of name patterns to styles."""
    return is_style(plan) or (isinstance(plan, Mapping) and not any(isinstance(s, str) for s in plan.values()))


def spelled(style: Any) -> str:
    """A style as text that is the same on every rank, without addresses."""
    return repr(style) if isinstance(style, _OWN) else type(style).__qualname__


def match_styles(module: nn.Module, styles: Any, strict: bool = True) -> list[tuple[str, nn.Module, Any]]:
    """(fqn, module, style) for every match, in the order of the dict. Nothing is changed.

    strict: raise where a pattern matches no module, or there is none; otherwise warn.

    Raises: PlanError `unmatched-rule`, `bad-plan`, and the problems of styles that do not support a module.
    """
    if is_style(styles):
        styles = {"": styles}
    unmatched = [] if styles else [Problem("unmatched-rule", "the plan is empty: nothing is changed")]
    names = dict(module.named_modules(remove_duplicate=False))
    problems, matched = [], []
    for pattern, style in styles.items():
        if not is_style(style):
            problems.append(Problem("bad-plan", f"{pattern!r} has a {type(style).__name__}, not a style"))
            continue
        matches = [name for name in names if _matches(pattern, name)]
        if not matches:
            close = near(pattern, names)
            fix = "did you mean " + " or ".join(map(repr, close)) + "?" if close else "remove it"
            unmatched.append(Problem("unmatched-rule", f"{pattern!r} matches no module", fix=fix))
        matched += [(name, names[name], from_pytorch(style, names[name])) for name in matches]
    facts = facts_of(module)
    for name, _, style in matched:
        if isinstance(style, SHARDING):
            try:
                style.check(facts.modules[facts.module_fqns[name]], names[name])
            except ModelError as error:
                problems += error.problems
    if strict:
        problems += unmatched
    if problems:
        raise PlanError(*problems)
    for problem in unmatched:
        warn_caller(f"parallelize_module: {problem.what}" + (f"; {problem.fix}" if problem.fix else ""))
    return matched


def apply_styles(
    root: nn.Module,
    styles: Iterable[tuple[str, Any]],
    mesh: DeviceMesh,
    source: int | None,
    by_rule: Callable[[nn.Module, Any], bool],
) -> None:
    """Apply (fqn, style) pairs as PyTorch does. Tied parameters stay tied.

    Args:
        source: the rank of the mesh whose weights count; None: each rank slices its own.
        by_rule: applies a style that shards a module by a rule of its own, where it can.

    Raises: ModelError `already-parallelized`; PlanError `broken-tie`.
    """
    ties = _Ties(root)
    for fqn, style in styles:
        module = root.get_submodule(fqn)
        mark_applied(module, name=fqn)
        before = dict(module.named_parameters(recurse=False)) if isinstance(style, SHARDING) else {}
        if before:
            _check_sharding(module, fqn, style)
        if not before or not by_rule(module, style):
            copied = copy.copy(style)  # PyTorch's classes change themselves while they are applied
            if hasattr(copied, "src_data_rank"):
                copied.src_data_rank = source
            copied._apply(module, mesh)
            _keep(module, before)
            place_gradients(module)
        ties.restore(module)
    for owner, key in ties.unstyled():
        refuse_unstyled_tie(root, owner, key)


def open_tie(module: nn.Module, target: nn.Module, planned: set[int]) -> str:
    """Names a parameter outside of `planned` modules to which one of the target's is tied; empty where there is
    none."""
    names = {id(submodule): name for name, submodule in module.named_modules()}
    for group in _Ties(module).groups:
        if any(owner is target for owner, _ in group):
            for owner, key in group:
                if id(owner) not in planned:
                    return f"{names[id(owner)]}.{key}"
    return ""


def refuse_unstyled_tie(root: nn.Module, owner: nn.Module, key: str) -> None:
    """Refuse the first forward of a module that shares a sharded parameter, unless a later call gives it a style."""
    name = next(name for name, submodule in root.named_modules() if submodule is owner)

    def check(module: nn.Module, _: Any) -> None:
        if not _has_style(module) and isinstance(module._parameters.get(key), DTensor):
            what = f"{name}.{key} is tied to a parameter that a style shards, and {name} has no style"
            fix = (
                "give it one that shards the same dim: RowwiseParallel for the embedding, ColwiseParallel for the head"
            )
            raise ModelError(Problem("broken-tie", what, fix=fix))
        hook.remove()

    hook = owner.register_forward_pre_hook(check)


def keys_replaced(module: nn.Module, style: Any) -> Iterator[str]:
    """The names, below a module, of the parameters that a style replaces by DTensors.

    Of a style that is not known here, all: PyTorch's `distribute_module` replaces those that no function replaces.
    """
    if not isinstance(style, CONVERTING):
        yield from (key for key, _ in module.named_parameters())


def _check_sharding(module: nn.Module, fqn: str, style: Any) -> None:
    """Raises: ModelError `already-parallelized`; PlanError `broken-tie`, of parameters that are DTensors because they
    are tied to those of another style."""
    if _has_style(module):
        raise ModelError(Problem("already-parallelized", f"{fqn or type(module).__name__} has a style already"))
    for key, tied in module.named_parameters(recurse=False):
        placement = _placement(style, module, tied.ndim)
        if isinstance(tied, DTensor) and tied.placements != (placement,):
            what = f"{fqn}.{key} is tied, and its rules split it as {tied.placements[0]} and {placement}"
            fix = "split the same dim: RowwiseParallel for the embedding, ColwiseParallel for the head"
            raise PlanError(Problem("broken-tie", what, fix=fix))


def _placement(style: Any, module: nn.Module, ndim: int) -> Placement:
    """Of a parameter with so many dims, under a style of PyTorch's."""
    by_first = isinstance(style, ColwiseParallel) != isinstance(module, nn.Embedding)
    if ndim == 1:
        return Shard(0) if isinstance(style, ColwiseParallel) else Replicate()
    return Shard(0 if by_first else 1) if isinstance(style, (ColwiseParallel, RowwiseParallel)) else Replicate()


def _has_style(module: nn.Module) -> bool:
    """Whether a style computes a module with DTensors, or with their shards."""
    return bool(applied(module).planned is not None or private.is_distributed(module))


def _keep(module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Let the DTensors of a module be what its parameters were: frozen, with attributes of their own, and the very
    objects where an earlier call has made them."""
    parameters: Any = module._parameters
    for key, old in before.items():
        if isinstance(old, DTensor):
            parameters[key] = old
        else:
            parameters[key].requires_grad_(old.requires_grad)
            vars(parameters[key]).update(vars(old))


class _Ties:
    """Parameters that several modules share: after one module's is replaced, the others get the same one."""

    def __init__(self, root: nn.Module):
        slots: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in root.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append((owner, key))
        self.groups = [group for group in slots.values() if len(group) > 1]

    def restore(self, changed: nn.Module) -> None:
        """Give the DTensor of a module that was changed to the modules that are tied to it."""
        for group in self.groups:
            new: Any = next((owner._parameters[key] for owner, key in group if owner is changed), None)
            if isinstance(new, DTensor):
                for owner, key in group:
                    parameters: Any = owner._parameters
                    parameters[key] = new

    def unstyled(self) -> Iterator[tuple[nn.Module, str]]:
        """(module, key) of the parameters that are DTensors now, in modules that no style computes."""
        for group in self.groups:
            for owner, key in group:
                if isinstance(owner._parameters[key], DTensor) and not _has_style(owner):
                    yield owner, key


def _matches(pattern: str, name: str) -> bool:
    tokens, parts = pattern.split("."), name.split(".")
    return len(tokens) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True)
    )
