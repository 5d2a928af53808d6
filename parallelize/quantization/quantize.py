"""Quantizing the linears of a model that is not planned yet, in place, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.applied.records import mesh_of
from parallelize.errors import ModelError, Problem
from parallelize.plan.block_formats import BlockFormat, block_format
from parallelize.quantization.block_codes import dequantize as dequantized_weight
from parallelize.quantization.block_codes import quantize_rows
from parallelize.quantization.chosen_linears import Names, chosen_linears
from parallelize.quantization.other_quantizers import refuse_other_quantizers
from parallelize.quantization.quantized_linear import QuantizedLinear, allocate_codes


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


def quantize_linear(linear: nn.Linear, form: BlockFormat) -> None:
    """Make one linear a `QuantizedLinear`. It stays the same object, with its hooks."""
    weight, made = linear._parameters.pop("weight"), linear
    bias = linear._parameters.pop("bias", None)
    assert weight is not None
    made.__class__ = QuantizedLinear
    assert isinstance(made, QuantizedLinear)
    allocate_codes(made, form, weight.dtype, bias, weight.device)
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
