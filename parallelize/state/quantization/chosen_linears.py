"""Which linears of a model are quantized, and what is wrong with them, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem, did_you_mean, short_list, warn_caller
from parallelize.plan.adapters import is_adapter_parameter
from parallelize.plan.block_formats import BlockFormat, is_conv1d
from parallelize.plan.pattern import check_pattern, generic, matches
from parallelize.state.quantization.quantized_experts import stacked_weights
from parallelize.state.quantization.quantized_linear import partial_block

_Convolution = nn.modules.conv._ConvNd
Names = str | Sequence[str] | None


def chosen_modules(model: nn.Module, form: BlockFormat, modules: Names) -> dict[str, nn.Module]:
    """The linears and stacked experts to quantize, by their first names. Raises: as `quantize`."""
    tied = _tied(model)
    if modules is None:
        chosen = _in_layers(model, form, tied)
    else:
        chosen = _named(model, [modules] if isinstance(modules, str) else modules)
    problems = [problem for name, module in chosen.items() for problem in _problems(name, module, form, tied)]
    if problems:
        raise ModelError(*problems)
    if modules is None:
        _warn_of_experts(model, chosen)
    return chosen


def _in_layers(model: nn.Module, form: BlockFormat, tied: set[int]) -> dict[str, Any]:
    named = {n: m for n, m in model.named_modules() if any(part.isdigit() for part in n.split("."))}
    chosen = {
        name: module
        for name, module in named.items()
        if not is_adapter_parameter(name)
        and not tied & {id(p) for p in module._parameters.values()}
        and (stacked_weights(module) or (_is_linear(module) and features(module)[1] >= form.block))
    }
    if not chosen:
        kinds = sorted({type(module).__name__ for module in named.values() if not module._modules})
        what = "the model has no linears in a list of layers"
        fix = "modules=[...], the names of linears"
        raise ModelError(Problem("no-such-linear", what, rows=(("modules", short_list(kinds, 8)),), fix=fix))
    return chosen


def _named(model: nn.Module, patterns: Sequence[str]) -> dict[str, Any]:
    named, problems = dict(model.named_modules()), []
    for pattern in patterns:
        check_pattern(pattern, "modules")
        if not any(matches(pattern, name) for name in named):
            fix = did_you_mean(pattern, {generic(name) for name in named if name})
            problems.append(Problem("no-such-linear", f"{pattern!r} matches no module", "modules", fix=fix))
    if problems:
        raise ModelError(*problems)
    return {name: m for name, m in named.items() if any(matches(pattern, name) for pattern in patterns)}


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a linear of any class: refused where it cannot be quantized, rather than left out."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _is_stock(module: Any) -> bool:
    """Whether it is `nn.Linear`, or the Conv1D of `transformers`, with its own forward."""
    is_known = type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and is_conv1d(module))
    return is_known and "forward" not in module.__dict__


def features(module: Any) -> tuple[int, int]:
    """(input, output) features of a linear or Conv1D."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.weight.shape[0], module.weight.shape[1]


def _problems(name: str, module: Any, form: BlockFormat, tied: set[int]) -> Iterator[Problem]:
    if weights := stacked_weights(module):
        yield from _problems_of_experts(name, weights, form, tied)
        return
    if not _is_stock(module):
        why = "has a forward of its own" if "forward" in module.__dict__ else f"is a {type(module).__name__}"
        what = f"{generic(name)} {why}, and nn.Linear, Conv1D and stacked experts alone can be quantized"
        yield Problem("unquantizable-linear", what, fix="leave it out of `modules`")
        return
    if problem := partial_block(generic(name), features(module)[0], form):
        yield problem
    if id(module.weight) in tied:
        what = f"the weight of {generic(name)} is used by another module too"
        yield Problem("tied-weight", what, fix="leave it out of `modules`")
    if not module.weight.is_meta and not bool(module.weight.isfinite().all()):
        what = f"the weight of {generic(name)} is not finite"
        yield Problem("not-finite-weight", what, fix="leave it out of `modules`, or repair the weight")


def _problems_of_experts(
    name: str, weights: Mapping[str, nn.Parameter], form: BlockFormat, tied: set[int]
) -> Iterator[Problem]:
    for key, weight in weights.items():
        which = f"{generic(name)}.{key}"
        if problem := partial_block(which, weight.shape[-1], form):
            yield problem
        if id(weight) in tied:
            yield Problem("tied-weight", f"{which} is used by another module too", fix="leave it out of `modules`")
        if not weight.is_meta and not bool(weight.isfinite().all()):
            what = f"{which} is not finite"
            yield Problem("not-finite-weight", what, fix="leave it out of `modules`, or repair the weight")


def _tied(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    seen, tied = set[int](), set[int]()
    for module in model.modules():
        ids = {id(p) for p in module._parameters.values() if p is not None}
        tied |= seen & ids
        seen |= ids
    return tied


def _warn_of_experts(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Warn of stacked weights that stay as they are: the forward of their module reads all experts at once."""
    owners = {n: model.get_submodule(n.rpartition(".")[0]) for n, p in model.named_parameters() if p.ndim == 3}
    named = [
        n for n, owner in owners.items() if n.rpartition(".")[0] not in chosen and not isinstance(owner, _Convolution)
    ]
    stacked = {n: model.get_parameter(n) for n in named if not is_adapter_parameter(n)}
    if stacked:
        count = sum(prod(p.shape) for p in stacked.values())
        names = short_list(list(dict.fromkeys(map(generic, stacked))), 4)
        warn_caller(f"quantize leaves stacked experts as they are: {count} parameters in {names}")
