"""Linears that bitsandbytes or torchao has quantized, made those of this package: then plans split them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.block_formats import BLOCK, LEAST_BLOCK, BlockFormat, block_format
from parallelize.plan.pattern import generic
from parallelize.state.guards.other_libraries import foreign_classes
from parallelize.state.quantization.block_codes import BYTES
from parallelize.state.quantization.quantize import refuse_planned
from parallelize.state.quantization.quantized_linear import QuantizedLinear, allocate_codes

_MARKS = ("is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit")
"""What `transformers` sets on a model that a quantizer has loaded."""


def import_quantized(model: nn.Module, *, block: int = BLOCK) -> nn.Module:
    """Make each linear that bitsandbytes or torchao has quantized a `QuantizedLinear` with the same codes, in place,
    before the plan.

    Args:
        model: with weights of 4 bits (NF4, FP4; also with nested scales) or of 8 bits by row of bitsandbytes, or of
            integers of at most 8 bits by row or group of torchao, whose activations are not quantized. Without
            adapters.
        block: the most elements that share a scale here, a power of two from 8: a larger block becomes several with one
            scale, so that more sizes of `tp` split it.

    Returns: the model. The weights are those that the other library dequantizes: scales are float32 where bfloat16
        would round them, and codes of fewer than 8 bits of torchao take 8. Linears compute with the dequantized weight
        in the dtype of their input: bitsandbytes' multiplication of 8-bit activations is not repeated.
    Raises: ModelError, before anything is changed: `other-quantizer` for each weight that cannot be converted, with the
        reason; `no-such-linear` where nothing is quantized; `unknown-format` of another block; `wrong-order` after a
        plan.
    Cost: no communication. Codes and scales of all linears are allocated before the others are freed.
    Source: see `state/quantization/import_quantized.py`.
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
    quantized: Any = linear
    bias = linear._parameters.get("bias")
    sizes = quantized.in_features, quantized.out_features
    attributes = {*nn.Linear(1, 1).__dict__, *nn.Module().__dict__}
    for key in [key for key in quantized.__dict__ if key not in attributes]:
        del quantized.__dict__[key]
    quantized._parameters.clear()
    quantized._buffers.clear()
    quantized.__class__ = QuantizedLinear
    quantized.in_features, quantized.out_features = sizes
    allocate_codes(quantized, form, weight.dtype, bias, weight.codes.device)
    quantized.weight_codes.data.copy_(weight.codes)
    quantized.weight_scales.data.copy_(scales)


# -- foreign weights -------------------------------------------------------------------------------------------------
# Weights that bitsandbytes and torchao have quantized by block, as codes and scales of this package. Neither library
# is imported: a weight is recognized by the name of its class, and read by its documented attributes.
#
# `Params4bit` of bitsandbytes (NF4, FP4)
#     codes: the same bytes, two elements each, the first in the higher bits
#     scales: `absmax`, or nested: 8-bit codes of blocks of their own, plus an offset
# `Int8Params` of bitsandbytes
#     codes: plus 128
#     scales: `SCB` of a row, divided by 127
# `Int8Tensor`, `IntxUnpackedToInt8Tensor` of torchao
#     codes: minus an integer zero point, plus 128
#     scales: of groups of a row, or of a row
#
# Source: bitsandbytes 0.50, `functional.QuantState`, `nn.modules`; torchao 0.18, `quantization/quantize_/workflows`.


T = torch.Tensor
_INT8_ZERO, _INT8_STEPS = 128, 127


class UnconvertibleError(Exception):
    """Why codes and scales of this package cannot stand for a weight."""


class ForeignWeight(NamedTuple):
    """codes: as `QuantizedLinear` has them. scales: float32 [out, groups], each of `in / groups` elements. dtype: of
    the weight."""

    word: str
    codes: T
    scales: T
    dtype: torch.dtype

    def stored(self, in_features: int, most: int) -> tuple[BlockFormat, T]:
        """(the format, the bytes of the scales). A group of more than `most` elements is several blocks with one scale.

        Raises: UnconvertibleError.
        """
        group = in_features // self.scales.shape[1]
        block = min(most, group & -group)
        if block < LEAST_BLOCK:
            raise UnconvertibleError(f"has groups of {group} elements, no multiple of {LEAST_BLOCK}")
        by_block = self.scales.repeat_interleave(group // block, 1)
        is_exact = bool((by_block.bfloat16().float() == by_block).all())
        form = BlockFormat(self.word, block, "bfloat16" if is_exact else "float32")
        return form, by_block.to(getattr(torch, form.scales)).contiguous().view(BYTES)


def foreign_weight(linear: nn.Module) -> ForeignWeight:
    """The weight of a linear of another library. Raises: UnconvertibleError."""
    weight: Any = linear._parameters.get("weight")
    reader = _READERS.get(type(weight).__name__)
    if reader is None:
        raise UnconvertibleError(f"has a {type(weight).__name__}")
    return reader(linear, weight)


def _weight_of_4_bits(linear: Any, weight: Any) -> ForeignWeight:
    state = getattr(weight, "quant_state", None)
    if state is None:
        raise UnconvertibleError("is not quantized yet: bitsandbytes does so when the model is moved to a device")
    shape = (linear.out_features, linear.in_features)
    if tuple(state.shape) != shape or shape[1] % state.blocksize:
        raise UnconvertibleError(f"has blocks of {state.blocksize} elements, which do not divide rows of {shape[1]}")
    scales = state.absmax
    if state.state2 is not None:
        inner = state.state2
        by_block = inner.absmax.float().repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = inner.code.float()[scales.flatten().int()] * by_block + state.offset
    codes = weight.data.contiguous().view(BYTES).reshape(shape[0], -1)
    return ForeignWeight(state.quant_type, codes, scales.float().reshape(shape[0], -1), state.dtype)


def _weight_of_8_bits(linear: Any, weight: Any) -> ForeignWeight:
    """After its first forward, bitsandbytes keeps codes and scales in the `state` of the module."""
    state = getattr(linear, "state", None)
    scales = next((s for s in (getattr(weight, "SCB", None), getattr(state, "SCB", None)) if s is not None), None)
    codes = next((c for c in (getattr(weight, "CB", None), getattr(state, "CB", None)) if c is not None), weight.data)
    if scales is None or codes.dtype != torch.int8 or getattr(weight, "has_fp16_weights", False):
        raise UnconvertibleError("is not quantized: it has fp16 weights, or was not moved to a device yet")
    dtype = linear.bias.dtype if linear.bias is not None else torch.float16
    return ForeignWeight("int8", _plus_zero(codes.int()), scales.float().reshape(-1, 1) / _INT8_STEPS, dtype)


def _weight_of_integers(linear: Any, weight: Any) -> ForeignWeight:
    for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization"):
        if getattr(weight, name, None) is not None:
            raise UnconvertibleError(f"quantizes activations too ({name})")
    if len(weight.block_size) != 2 or weight.block_size[0] != 1:
        raise UnconvertibleError(f"has blocks of {list(weight.block_size)} elements, which are not parts of a row")
    codes, zero = weight.qdata.int(), getattr(weight, "zero_point", None)
    if zero is not None:
        if zero.is_floating_point():
            raise UnconvertibleError("has zero points that are no integers")
        codes = codes - zero.int().repeat_interleave(weight.block_size[1], 1)
    return ForeignWeight("int8", _plus_zero(codes), weight.scale.float(), weight.dtype)


def _plus_zero(values: T) -> T:
    if int(values.min()) < -_INT8_ZERO or int(values.max()) > _INT8_STEPS:
        raise UnconvertibleError("has codes of more than 8 bits, after its zero points are subtracted")
    return (values + _INT8_ZERO).to(BYTES)


_READERS = {
    "Params4bit": _weight_of_4_bits,
    "Int8Params": _weight_of_8_bits,
    "Int8Tensor": _weight_of_integers,
    "IntxUnpackedToInt8Tensor": _weight_of_integers,
}
