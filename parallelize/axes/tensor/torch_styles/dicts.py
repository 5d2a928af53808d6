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
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import parallel as stock

from parallelize.axes.tensor.shared_input import SharedConversion
from parallelize.axes.tensor.torch_styles.boundary import (
    ModuleStyle,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
    target_of,
)
from parallelize.axes.tensor.torch_styles.linear import ColwiseParallel, RowwiseParallel
from parallelize.base.errors import ModelError, PlanError, Problem, near, warn_caller
from parallelize.state.pending_reductions import PendingReductions
from parallelize.state.records import applied, facts_of


def is_style(plan: Any) -> bool:
    return isinstance(plan, ParallelStyle)


def is_styles(plan: Any) -> bool:
    """Whether a plan is one style, or a dict of name patterns to styles."""
    return is_style(plan) or (isinstance(plan, Mapping) and not any(isinstance(s, str) for s in plan.values()))


def spelled(style: Any) -> str:
    """A style as text that is the same on every rank, without addresses."""
    return repr(style) if isinstance(style, ModuleStyle) else type(style).__qualname__


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
        if isinstance(style, ModuleStyle):
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
) -> None:
    """Apply (fqn, style) pairs as they are. Tied parameters stay tied."""
    pending_reductions = PendingReductions()
    conversions: dict[Placement, SharedConversion] = {}
    ties = _Ties(root)
    for fqn, style in styles:
        module = root.get_submodule(fqn)
        if isinstance(style, ModuleStyle):
            style.install(target_of(module, fqn, mesh, pending_reductions, source, conversions))
        else:  # a style of PyTorch or of a third party
            copied = copy.copy(style)  # such a style may change itself while it is applied
            if hasattr(copied, "src_data_rank"):
                copied.src_data_rank = source
            copied._apply(module, mesh)
        ties.restore(module)
    for owner, key in ties.unplanned():
        refuse_unplanned_tie(root, owner, key)


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


def refuse_unplanned_tie(root: nn.Module, owner: nn.Module, key: str) -> None:
    """Refuse the first forward of a module that shares a sharded parameter, unless a later call gives it a style."""
    name = next(name for name, submodule in root.named_modules() if submodule is owner)

    def check(module: nn.Module, _: Any) -> None:
        if applied(module).planned is None and isinstance(module._parameters.get(key), DTensor):
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
    if not isinstance(style, _CONVERTS):
        shards_own = isinstance(style, ModuleStyle)
        yield from (key for key, _ in module.named_parameters(recurse=not shards_own))


def from_pytorch(style: Any, module: nn.Module) -> Any:
    """This package's style that means the same as one of PyTorch's own. Any other style, subclasses included, is
    returned.

    So is a style for a dropout: PyTorch's draws other masks on each shard, from the generator of DTensors.
    """
    convert = _FROM_PYTORCH.get(type(style))
    return style if convert is None or isinstance(module, _DROPOUTS) else convert(style)


def _linear_options(style: Any) -> dict[str, Any]:
    layouts = {"input_layouts": style.input_layouts[0], "output_layouts": style.output_layouts[0]}
    return {**layouts, "use_local_output": style.use_local_output}


def _input_options(style: Any) -> dict[str, Any]:
    names = ("input_layouts", "desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts")
    return {name: getattr(style, name) for name in names}


def _output_options(style: Any) -> dict[str, Any]:
    names = ("output_layouts", "desired_output_layouts", "use_local_output")
    return {name: getattr(style, name) for name in names}


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_CONVERTS = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
_FROM_PYTORCH: dict[type, Callable[[Any], ModuleStyle]] = {
    stock.ColwiseParallel: lambda style: ColwiseParallel(**_linear_options(style)),
    stock.RowwiseParallel: lambda style: RowwiseParallel(**_linear_options(style)),
    stock.SequenceParallel: lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    stock.PrepareModuleInput: lambda style: PrepareModuleInput(
        **_input_options(style), use_local_output=style.use_local_output
    ),
    stock.PrepareModuleOutput: lambda style: PrepareModuleOutput(**_output_options(style)),
    stock.PrepareModuleInputOutput: lambda style: PrepareModuleInputOutput(
        **_input_options(style.prepare_module_input),
        use_local_input=style.prepare_module_input.use_local_output,
        **_output_options(style.prepare_module_output),
    ),
}


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

    def unplanned(self) -> Iterator[tuple[nn.Module, str]]:
        """(module, key) of the parameters that are DTensors now, in modules that no style computes."""
        for group in self.groups:
            for owner, key in group:
                if isinstance(owner._parameters[key], DTensor) and applied(owner).planned is None:
                    yield owner, key


def _matches(pattern: str, name: str) -> bool:
    tokens, parts = pattern.split("."), name.split(".")
    return len(tokens) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True)
    )
