"""PyTorch's form of a plan: a dict from name patterns to styles. All patterns are matched before any style is applied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import parallel as stock

from parallelize.applied.pending_reductions import PendingReductions
from parallelize.applied.records import facts_of
from parallelize.errors import ModelError, PlanError, Problem, near
from parallelize.tensor.shared_conversion import SharedConversion
from parallelize.tensor.torch_styles.boundary import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)
from parallelize.tensor.torch_styles.linear import ColwiseParallel, RowwiseParallel
from parallelize.tensor.torch_styles.module_style import ModuleStyle, ParallelStyle, target_of


def is_style(plan: Any) -> bool:
    return isinstance(plan, ParallelStyle)


def is_styles(plan: Any) -> bool:
    """Whether a plan is one style, or a dict of name patterns to styles."""
    return is_style(plan) or (isinstance(plan, Mapping) and not any(isinstance(s, str) for s in plan.values()))


def spelled(style: Any) -> str:
    """A style as text that is the same on every rank, without addresses."""
    return repr(style) if isinstance(style, ModuleStyle) else type(style).__qualname__


def match_styles(module: nn.Module, styles: Any) -> list[tuple[str, nn.Module, Any]]:
    """(fqn, module, style) for every match, in the order of the dict. Nothing is changed.

    Raises: PlanError `unmatched-rule`, `bad-plan`, `broken-tie`, and the problems of styles that do not support a module.
    """
    if is_style(styles):
        styles = {"": styles}
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
            problems.append(Problem("unmatched-rule", f"{pattern!r} matches no module", fix=fix))
        matched += [(name, names[name], from_pytorch(style, names[name])) for name in matches]
    facts = facts_of(module)
    for name, _, style in matched:
        if isinstance(style, ModuleStyle):
            try:
                style.check(facts.modules[facts.aliases[name]], names[name])
            except ModelError as error:
                problems += error.problems
    sharded = {
        id(submodule)
        for _, submodule, style in matched
        if isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel))
    }
    problems += _Ties(module).check({id(submodule): name for name, submodule in names.items()}, sharded)
    if problems:
        raise PlanError(*problems)
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


def keys_replaced(module: nn.Module, style: Any) -> Iterator[str]:
    """The names, below a module, of the parameters that a style replaces by DTensors.

    Of a style that is not known here, all: PyTorch's `distribute_module` replaces those that no function replaces.
    """
    if not isinstance(style, _CONVERTS):
        shards_own = isinstance(style, ModuleStyle)
        yield from (key for key, _ in module.named_parameters(recurse=not shards_own))


def from_pytorch(style: Any, module: nn.Module) -> Any:
    """This package's style that means the same as one of PyTorch's own. Any other style, subclasses included, is returned.

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
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in root.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((owner, key))
        self.groups = [group for group in owners.values() if len(group) > 1]

    def restore(self, changed: nn.Module) -> None:
        """Give the DTensor of a module that was changed to the modules that are tied to it."""
        for group in self.groups:
            new: Any = next((owner._parameters[key] for owner, key in group if owner is changed), None)
            if isinstance(new, DTensor):
                for owner, key in group:
                    parameters: Any = owner._parameters
                    parameters[key] = new

    def check(self, names: dict[int, str], sharded: set[int]) -> Iterator[Problem]:
        """A parameter that a style shards must not belong to a module without a style too, which would misread it."""
        for group in self.groups:
            rest = [f"{names[id(owner)]}.{key}" for owner, key in group if id(owner) not in sharded]
            if rest and len(rest) < len(group):
                styled = [f"{names[id(owner)]}.{key}" for owner, key in group if id(owner) in sharded]
                yield Problem(
                    "broken-tie",
                    f"{styled[0]} is sharded, and tied to {', '.join(rest)}, which has no style",
                    fix="give it a style that shards the same dim: ColwiseParallel for a head",
                )


def _matches(pattern: str, name: str) -> bool:
    tokens, parts = pattern.split("."), name.split(".")
    return len(tokens) == len(parts) and all(
        fnmatchcase(part, token) for token, part in zip(tokens, parts, strict=True)
    )
