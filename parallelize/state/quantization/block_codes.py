"""Codes and scales of a weight, and the weight that they stand for.

A block is `block` consecutive elements of a row of the weight [out, in], so that columns of ranks are rows of codes and
scales, and any part of the weight between two blocks has the codes that it has in the full weight. The arithmetic is
that of float32.

Scales are bfloat16, and codes are computed with the rounded scale, so that rounding adds no error of its own; those of
another library may be float32. They are stored as bytes, which no cast of the model to another dtype changes, and which
every backend sends (gloo and NCCL send no integers of 16 bits).

Source: Dettmers et al., QLoRA, 2023, section 3 and appendix E (the values of NF4); bitsandbytes,
    `functional.get_4bit_type` (those of FP4).
"""

from __future__ import annotations

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.block_formats import BlockFormat

T = torch.Tensor
BYTES = torch.uint8
_INT8_STEPS, _INT8_ZERO = 127, 128
_PART = 1 << 18  # elements that are quantized at a time, in float32
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4 = tuple(
    sign * value for sign in (1, -1) for value in (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
)
_VALUES = {"nf4": _NF4, "fp4": _FP4}


def quantize_rows(weight: T, form: BlockFormat, codes: T, scales: T) -> None:
    """Quantize a weight into `codes` and `scales`, a part of its rows at a time.

    Args:
        weight: [out, in], floating-point, of which `form.block` divides `in`.
        codes: uint8 [out, in / codes_per_byte]. scales: uint8 [out, 2 in / block]. On any device.

    Raises: ModelError `not-finite-weight`.
    """
    step = max(1, _PART // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        codes[part], scales[part] = _quantized(weight[part], form)


def _quantized(weight: T, form: BlockFormat) -> tuple[T, T]:
    blocks = weight.detach().float().unflatten(1, (-1, form.block))
    largest = blocks.abs().amax(-1)
    steps = _INT8_STEPS if form.word == "int8" else 1
    scale = (largest / steps).to(getattr(torch, form.scales))
    if not bool(scale.isfinite().all()):
        what = "a weight to be quantized is infinite, not a number, or beyond the range of its scales"
        raise ModelError(
            Problem("not-finite-weight", what, fix="leave its linear out of `modules`, or repair the weight")
        )
    divisor = scale.float()
    scaled = blocks / torch.where(divisor == 0, 1.0, divisor).unsqueeze(-1)
    if form.word == "int8":
        codes = (scaled.round().clamp(-_INT8_STEPS, _INT8_STEPS) + _INT8_ZERO).to(BYTES).flatten(1)
    else:
        midpoints, order = _midpoints(form.word, weight.device)
        nearest = order[torch.bucketize(scaled.flatten(1), midpoints)]
        codes = nearest[:, ::2] << 4 | nearest[:, 1::2]
    return codes, scale.view(BYTES)


def dequantize(codes: T, scales: T, form: BlockFormat, dtype: torch.dtype) -> T:
    """The weight [out, in], computed in float32 and converted to `dtype`.

    Args:
        codes, scales: as `quantize_rows` makes them; of any part of the weight between blocks.
    """
    if form.word == "int8":
        values = codes.float() - _INT8_ZERO
    else:
        values = _pairs(form.word, codes.device)[codes.int()]
    factors = scales.contiguous().view(getattr(torch, form.scales)).float().unsqueeze(-1)
    return (values.reshape(*factors.shape[:2], form.block) * factors).flatten(1).to(dtype)


def _midpoints(word: str, device: torch.device) -> tuple[T, T]:
    """(midpoints between the values in order of size, the code of each value in that order)."""
    values, codes = torch.tensor(_VALUES[word], device=device).sort()
    return (values[1:] + values[:-1]) / 2, codes.to(BYTES)


_PAIRS: dict[tuple[str, torch.device], T] = {}


def _pairs(word: str, device: torch.device) -> T:
    """[256, 2]: the two values that a byte stands for, of its higher bits first."""
    table = _PAIRS.get((word, device))
    if table is None:
        values = torch.tensor(_VALUES[word], device=device)
        table = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
        if type(table) is T:  # a simulated tensor is of its simulation
            _PAIRS[word, device] = table
    return table
