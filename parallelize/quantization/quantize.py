"""Quantizing the linears of a model that is not planned yet, in place, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.applied.records import mesh_of
from parallelize.errors import ModelError, Problem, did_you_mean, short_list
from parallelize.plan.adapters import is_adapter_parameter
from parallelize.plan.block_formats import BlockFormat, block_format
from parallelize.plan.pattern import check_pattern, generic, matches
from parallelize.quantization.block_codes import dequantize as dequantized_weight
from parallelize.quantization.block_codes import quantize_rows
from parallelize.quantization.other_quantizers import refuse_other_quantizers
from parallelize.quantization.quantized_linear import QuantizedLinear

Names = str | Sequence[str] | None


def quantize(model: nn.Module, form: str | BlockFormat = "nf4", *, modules: Names = None) -> nn.Module:
    """Store the weights of linears in 4 or 8 bits by block, in place, before the plan. They do not train any more.

    Args:
        model: with weights, or on the meta device: weights are then quantized while they are read (`load_pretrained`).
        form: "nf4" or "int8", with blocks of 64 elements of a row; "nf4(block=32)" for others.
        modules: names or patterns of linears, as plans write them. None: every `nn.Linear` inside of a list of layers, except
            adapters, tied weights, and those with fewer outputs than a block, such as gates: embedding and head stay as they are.

    Returns: the model.
    Raises: ModelError, before anything is changed: `unknown-format`, `no-such-linear`, `unquantizable-linear`, `partial-block`,
        `tied-weight`, `not-finite-weight`, `other-quantizer`, `wrong-order` after a plan.
    Warns: of stacked experts, which stay as they are.
    Cost: no communication. Codes and one part of a weight in float32 are allocated beside the weights, one linear at a time.
    """
    form = block_format(form)
    refuse_planned(model, "quantize")
    refuse_other_quantizers(model)
    for linear in chosen_linears(model, form, modules).values():
        quantize_linear(linear, form)
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """Give every quantized linear of a model its dequantized weight, in place: `nn.Linear` again, and frozen.

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
    return model


def refuse_planned(model: nn.Module, call: str) -> None:
    if any(mesh_of(module) is not None for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        what = f"{call} changes the parameters of a model, and a plan has sharded them already"
        raise ModelError(Problem("wrong-order", what, fix=f"{call}(model) first, then the plan"))


def chosen_linears(model: nn.Module, form: BlockFormat, modules: Names) -> dict[str, nn.Linear]:
    """The linears to quantize, by their first names. Raises: as `quantize`."""
    chosen = (
        _in_layers(model, form)
        if modules is None
        else _named(model, [modules] if isinstance(modules, str) else modules)
    )
    problems = [problem for name, module in chosen.items() for problem in _problems(name, module, model, form)]
    if problems:
        raise ModelError(*problems)
    if modules is None:
        _warn_of_experts(model)
    return chosen


def _in_layers(model: nn.Module, form: BlockFormat) -> dict[str, Any]:
    tied = _tied(model)
    named = {n: m for n, m in model.named_modules() if any(part.isdigit() for part in n.split("."))}
    chosen = {
        name: module
        for name, module in named.items()
        if _is_linear(module)
        and not is_adapter_parameter(name)
        and not tied & {id(p) for p in module._parameters.values()}
        and _outputs(module) >= form.block
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
    return type(module) is nn.Linear or hasattr(module, "nf")


def _outputs(module: Any) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.nf


def _problems(name: str, module: Any, model: nn.Module, form: BlockFormat) -> Iterator[Problem]:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        kind = type(module).__name__
        why = "has a forward of its own" if type(module) is nn.Linear else f"is a {kind}"
        what = f"{generic(name)} {why}, and nn.Linear alone can be quantized"
        fix = "leave it out of `modules`" + (": its weight is stored as [in, out]" if kind == "Conv1D" else "")
        yield Problem("unquantizable-linear", what, fix=fix)
        return
    if module.in_features % form.block:
        left = module.in_features % form.block
        what = f"{generic(name)} has {module.in_features} input features, not a multiple of {form.block}"
        fix = f"a smaller block: '{form.word}(block={module.in_features & -module.in_features})'; or leave it out of `modules`"
        rows = (("rest", f"{module.in_features} % {form.block} = {left}"),)
        yield Problem("partial-block", what, rows=rows, fix=fix)
    if id(module.weight) in _tied(model):
        what = f"the weight of {generic(name)} is used by another module too"
        yield Problem("tied-weight", what, fix="leave it out of `modules`")
    if not module.weight.is_meta and not bool(module.weight.isfinite().all()):
        what = f"the weight of {generic(name)} is not finite"
        yield Problem("not-finite-weight", what, fix="leave it out of `modules`, or repair the weight")


def _tied(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    seen, tied = set[int](), set[int]()
    for module in model.modules():
        ids = {id(p) for p in module._parameters.values() if p is not None}
        tied |= seen & ids
        seen |= ids
    return tied


def _warn_of_experts(model: nn.Module) -> None:
    stacked = {n: p for n, p in model.named_parameters() if p.ndim == 3 and not is_adapter_parameter(n)}
    if stacked:
        count = sum(prod(p.shape) for p in stacked.values())
        names = short_list(list(dict.fromkeys(map(generic, stacked))), 4)
        text = f"quantize leaves stacked experts as they are: {count} parameters in {names}"
        warnings.warn(text, stacklevel=4)


def quantize_linear(linear: nn.Linear, form: BlockFormat) -> None:
    """Make one linear a `QuantizedLinear`. It stays the same object, with its hooks."""
    weight, made = linear._parameters.pop("weight"), linear
    bias = linear._parameters.pop("bias", None)
    assert weight is not None
    made.__class__ = QuantizedLinear
    assert isinstance(made, QuantizedLinear)
    made.store(form, weight.dtype, bias, weight.device)
    if not weight.is_meta:
        quantize_rows(weight, form, made.weight_codes.data, made.weight_scales.data)


def restore_linear(linear: QuantizedLinear, weight: torch.Tensor | None = None) -> None:
    """Make it an `nn.Linear` again. weight: default: the dequantized one."""
    if weight is None:
        codes, scales = linear.weight_codes, linear.weight_scales
        weight = dequantized_weight(codes.detach(), scales.detach(), linear.form, linear.dtype)
    bias = linear._parameters["bias"]
    linear._parameters.clear()
    for key in ("form", "dtype", "packs"):
        del linear.__dict__[key]
    plain: Any = linear
    plain.__class__ = nn.Linear
    plain.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    plain.register_parameter("bias", bias)
