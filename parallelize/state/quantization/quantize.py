"""Quantizing the linears and experts of a model that is not planned yet, in place, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem, did_you_mean, short_list, warn_caller
from parallelize.plan.adapters import is_adapter_parameter
from parallelize.plan.block_formats import BlockFormat, block_format, is_conv1d
from parallelize.plan.pattern import check_pattern, generic, matches
from parallelize.state.guards.guard_table import QUANTIZED, Guarded, set_up
from parallelize.state.guards.other_libraries import refuse_other_quantizers
from parallelize.state.quantization.block_codes import dequantize as dequantized_weight
from parallelize.state.quantization.block_codes import quantize_rows
from parallelize.state.quantization.quantized_experts import (
    QuantizedExperts,
    quantize_experts,
    restore_experts,
    stacked_weights,
)
from parallelize.state.quantization.quantized_linear import QuantizedLinear, allocate_codes, partial_block
from parallelize.state.records import mark_applied, mesh_of


def quantize(model: nn.Module, form: str | BlockFormat = "nf4", *, modules: Names = None) -> nn.Module:
    """Store the weights of linears and stacked experts in 4 or 8 bits by block, in place, before the plan. They do not
    train any more.

    Args:
        model: with weights, or on the meta device: weights are then quantized while they are read (`load_pretrained`).
        form: "nf4" or "int8", with blocks of 64 elements of a row; "nf4(block=32)" for others.
        modules: names or patterns of linears and stacked experts, as plans write them. None: every `nn.Linear` (and
            Conv1D of GPT-2, whose weight is stored as [in, out]) and all stacked experts of `transformers` that run one
            after another, inside of a list of layers, except adapters, tied weights, and linears with fewer outputs
            than a block, such as gates: embedding and head stay.

    Returns: the model.
    Raises: ModelError, before anything is changed: `unknown-format`, `no-such-linear`, `unquantizable-linear`,
        `partial-block`, `tied-weight`, `not-finite-weight`, `other-quantizer`, `wrong-order` after a plan.
    Warns: of stacked experts of another form, which stay as they are.
    Cost: no communication. Codes and one part of a weight in float32 are allocated beside the weights, one module at a
        time.
    """
    form = block_format(form)
    refuse_planned(model, "quantize")
    refuse_other_quantizers(model)
    mark_applied(model)  # it holds what is changed in other libraries
    set_up(QUANTIZED, Guarded(model))
    for module in chosen_modules(model, form, modules).values():
        (quantize_experts if stacked_weights(module) else quantize_linear)(module, form)
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """Give every quantized linear and expert of a model its dequantized weight, in place: the stock module again, and
    frozen.

    Args:
        model: with or without adapters, which then can be merged.

    Returns: the model.
    Raises: ModelError `wrong-order` after a plan.
    Cost: no communication.
    """
    refuse_planned(model, "dequantize")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            restore_linear(module)
        elif isinstance(module, QuantizedExperts):
            restore_experts(module)
    return model


def refuse_planned(model: nn.Module, call: str) -> None:
    if any(mesh_of(module) is not None for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        what = f"{call} changes the parameters of a model, and a plan has sharded them already"
        raise ModelError(Problem("wrong-order", what, fix=f"{call}(model) first, then the plan"))


def quantize_linear(linear: nn.Module, form: BlockFormat) -> None:
    """Make one linear, or Conv1D, a `QuantizedLinear`. It stays the same object, with its hooks."""
    stock, quantized = type(linear), linear
    in_features, out_features = features(linear)
    weight, bias = linear._parameters.pop("weight"), linear._parameters.pop("bias", None)
    assert weight is not None
    for key in _CONV1D if is_conv1d(linear) else ():
        linear.__dict__.pop(key, None)
    quantized.__class__ = QuantizedLinear
    assert isinstance(quantized, QuantizedLinear)
    quantized.in_features, quantized.out_features, quantized.stock_class = in_features, out_features, stock
    allocate_codes(quantized, form, weight.dtype, bias, weight.device)
    if not weight.is_meta:
        rows = weight.T if quantized.is_transposed else weight
        quantize_rows(rows, form, quantized.weight_codes.data, quantized.weight_scales.data)


def restore_linear(linear: QuantizedLinear) -> None:
    """Make it again what it was, with the dequantized weight."""
    codes, scales, stock = linear.weight_codes.detach(), linear.weight_scales.detach(), linear.stock_class
    weight = dequantized_weight(codes, scales, linear.form, linear.dtype)
    bias, sizes = linear._parameters["bias"], (linear.in_features, linear.out_features)
    linear._parameters.clear()
    is_transposed = linear.is_transposed
    names = ("form", "dtype", "packs", "stock_class", *(("in_features", "out_features") if is_transposed else ()))
    for key in names:
        del linear.__dict__[key]
    plain: Any = linear
    plain.__class__ = stock
    if is_transposed:
        plain.nx, plain.nf = sizes
    plain.weight = nn.Parameter(weight.T.contiguous() if is_transposed else weight, requires_grad=False)
    plain.register_parameter("bias", bias)


_CONV1D = ("nx", "nf")


# -- chosen linears --------------------------------------------------------------------------------------------------
# Which linears of a model are quantized, and what is wrong with them, before anything is changed.


_Convolution = nn.modules.conv._ConvNd
Names = str | Sequence[str] | None


def chosen_modules(model: nn.Module, form: BlockFormat, modules: Names) -> dict[str, nn.Module]:
    """The linears and stacked experts to quantize, by their first names. Raises: as `quantize`."""
    tied = _tied(model)
    if modules is None:
        chosen = _modules_in_layers(model, form, tied)
    else:
        chosen = _matched(model, [modules] if isinstance(modules, str) else modules)
    problems = [problem for name, module in chosen.items() for problem in _problems(name, module, form, tied)]
    if problems:
        raise ModelError(*problems)
    if modules is None:
        _warn_of_experts(model, chosen)
    return chosen


def _modules_in_layers(model: nn.Module, form: BlockFormat, tied: set[int]) -> dict[str, Any]:
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


def _matched(model: nn.Module, patterns: Sequence[str]) -> dict[str, Any]:
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
    modules = {n: model.get_submodule(n.rpartition(".")[0]) for n, p in model.named_parameters() if p.ndim == 3}
    named = [
        n
        for n, module in modules.items()
        if n.rpartition(".")[0] not in chosen and not isinstance(module, _Convolution)
    ]
    stacked = {n: model.get_parameter(n) for n in named if not is_adapter_parameter(n)}
    if stacked:
        count = sum(prod(p.shape) for p in stacked.values())
        names = short_list(list(dict.fromkeys(map(generic, stacked))), 4)
        warn_caller(f"quantize leaves stacked experts as they are: {count} parameters in {names}")
