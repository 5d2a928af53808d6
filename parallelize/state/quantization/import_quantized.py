"""Linears that bitsandbytes or torchao has quantized, made those of this package: then plans split them."""

from __future__ import annotations

from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.block_formats import BLOCK, BlockFormat, block_format
from parallelize.plan.pattern import generic
from parallelize.state.guards.other_quantizers import foreign_classes
from parallelize.state.quantization.foreign_weights import ForeignWeight, UnconvertibleError, foreign_weight
from parallelize.state.quantization.quantize import refuse_planned
from parallelize.state.quantization.quantized_linear import QuantizedLinear, allocate_codes

_MARKS = ("is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit")
"""What `transformers` sets on a model that a quantizer has loaded."""


def import_quantized(model: nn.Module, *, block: int = BLOCK) -> nn.Module:
    """Make each linear that bitsandbytes or torchao has quantized a `QuantizedLinear` with the same codes, in place, before the plan.

    Args:
        model: with weights of 4 bits (NF4, FP4; also with nested scales) or of 8 bits by row of bitsandbytes, or of integers of at most 8
            bits by row or group of torchao, whose activations are not quantized. Without adapters.
        block: the most elements that share a scale here, a power of two from 8: a larger block becomes several with one scale, so that
            more sizes of `tp` split it.

    Returns: the model. The weights are those that the other library dequantizes: scales are float32 where bfloat16 would round them,
        and codes of fewer than 8 bits of torchao take 8. Linears compute with the dequantized weight in the dtype of their input:
        bitsandbytes' multiplication of 8-bit activations is not repeated.
    Raises: ModelError, before anything is changed: `other-quantizer` for each weight that cannot be converted, with the reason;
        `no-such-linear` where nothing is quantized; `unknown-format` of another block; `wrong-order` after a plan.
    Cost: no communication. Codes and scales of all linears are allocated before the others are freed.
    Source: see `state/quantization/foreign_weights.py`.
    """
    block = block_format(f"nf4(block={block})").block
    refuse_planned(model, "import_quantized")
    converted, problems = {}, []
    for name, module in model.named_modules():
        if any(foreign_classes(module)):
            try:
                converted[name] = _converted(module, block)
            except UnconvertibleError as reason:
                what = f"{generic(name) or 'the model'} {reason}"
                fix = "load the model without its quantization_config, and quantize(model) before the plan"
                problems.append(Problem("other-quantizer", what, fix=fix))
    if problems:
        raise ModelError(*dict.fromkeys(problems))
    if not converted:
        what = "no linear of the model is quantized by bitsandbytes or torchao"
        raise ModelError(Problem("no-such-linear", what, fix='quantize(model, "nf4")'))
    for name, (weight, form, scales) in converted.items():
        _replace(model.get_submodule(name), weight, form, scales)
    for module in model.modules():
        for key in _MARKS:
            module.__dict__.pop(key, None)
        vars(getattr(module, "config", None) or _Nothing()).pop("quantization_config", None)
    return model


class _Nothing:
    """A module without a config."""


def _converted(module: nn.Module, block: int) -> tuple[ForeignWeight, BlockFormat, Any]:
    if not isinstance(module, nn.Linear):
        raise UnconvertibleError(f"is a {type(module).__name__}, and linears alone can be converted")
    if "forward" in module.__dict__:
        raise UnconvertibleError("has a forward of its own, such as that of accelerate for a device_map")
    weight = foreign_weight(module)
    return weight, *weight.stored(module.in_features, block)


def _replace(linear: nn.Module, weight: ForeignWeight, form: BlockFormat, scales: Any) -> None:
    """The same object, with its hooks, and without what the other library kept in it."""
    made: Any = linear
    bias = linear._parameters.get("bias")
    sizes = made.in_features, made.out_features
    kept = {*nn.Linear(1, 1).__dict__, *nn.Module().__dict__}
    for key in [key for key in made.__dict__ if key not in kept]:
        del made.__dict__[key]
    made._parameters.clear()
    made._buffers.clear()
    made.__class__ = QuantizedLinear
    made.in_features, made.out_features = sizes
    allocate_codes(made, form, weight.dtype, bias, weight.codes.device)
    made.weight_codes.data.copy_(weight.codes)
    made.weight_scales.data.copy_(scales)
