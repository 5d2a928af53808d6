"""Weights in the documented layouts of bitsandbytes and torchao, built by hand, with the values that they stand for.

The classes have the names and attributes of those of the libraries, which need not be installed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

T = torch.Tensor
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25]
FP4 += [-value for value in FP4]


class Linear4bit(nn.Linear):
    """As of bitsandbytes."""


class Linear8bitLt(nn.Linear):
    """As of bitsandbytes."""


class Params4bit(nn.Parameter):
    """As of bitsandbytes."""


class Int8Params(nn.Parameter):
    """As of bitsandbytes."""


class Int8Tensor(nn.Parameter):
    """As of torchao, by its attributes."""


class IntxUnpackedToInt8Tensor(nn.Parameter):
    """As of torchao, by its attributes."""


class Float8Tensor(nn.Parameter):
    """As of torchao: nothing here converts it."""


def of_4_bits(linear: nn.Linear, word: str = "nf4", block: int = 64, nested: bool = False) -> tuple[nn.Linear, T]:
    """(a linear of bitsandbytes with random codes and scales, its weight in float32): one block after another, over
    rows."""
    out, count = linear.weight.shape
    codes = torch.randint(0, 16, (out * count,))
    scales, state2, offset = torch.rand(out * count // block) * 0.2, None, None
    stored: T = scales
    if nested:  # blocks of 8 scales: each an 8-bit code into a table, times the largest of its block, plus an offset
        stored, table, largest = (
            torch.randint(0, 256, scales.shape).byte(),
            torch.rand(256),
            torch.rand(-(-len(scales) // 8)),
        )
        offset = torch.tensor(0.03)
        state2 = SimpleNamespace(absmax=largest, code=table, blocksize=8)
        scales = torch.tensor([table[int(c)] * largest[i // 8] + offset for i, c in enumerate(stored)])
    weight = torch.tensor(NF4 if word == "nf4" else FP4)[codes] * scales.repeat_interleave(block)
    parameter: Any = Params4bit((codes[0::2] * 16 + codes[1::2]).byte()[:, None], requires_grad=False)
    parameter.quant_state = SimpleNamespace(
        absmax=stored, state2=state2, offset=offset, blocksize=block, quant_type=word, dtype=linear.weight.dtype
    )
    parameter.quant_state.shape = torch.Size((out, count))
    return _with(Linear4bit, linear, parameter), weight.reshape(out, count)


def of_8_bits(linear: nn.Linear, after_forward: bool = False) -> tuple[nn.Linear, T]:
    """Of bitsandbytes: a scale for each row. After its first forward, the module has it, and the weight has not."""
    codes, scales = torch.randint(-127, 128, linear.weight.shape).to(torch.int8), torch.rand(linear.weight.shape[0])
    parameter: Any = Int8Params(codes, requires_grad=False)
    parameter.CB, parameter.SCB = (None, None) if after_forward else (codes, scales)
    made: Any = _with(Linear8bitLt, linear, parameter)
    made.state = SimpleNamespace(CB=codes if after_forward else None, SCB=scales if after_forward else None)
    return made, codes.float() * scales[:, None] / 127


def of_integers(linear: nn.Linear, group: int = 32, bits: int = 4, zeros: bool = True) -> tuple[nn.Linear, T]:
    """Of torchao: groups of a row, with integer zero points."""
    out, count = linear.weight.shape
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.randint(low, high, (out, count)).to(torch.int8)
    scales = torch.rand(out, count // group).bfloat16().to(linear.weight.dtype)
    zero = torch.randint(low, high, scales.shape).to(torch.int8) if zeros else torch.zeros(scales.shape).to(torch.int8)
    full = (tensor.float().repeat_interleave(group, 1) for tensor in (zero, scales))
    parameter: Any = IntxUnpackedToInt8Tensor(torch.empty(out, count, dtype=linear.weight.dtype), requires_grad=False)
    parameter.qdata, parameter.scale, parameter.zero_point, parameter.block_size = codes, scales, zero, (1, group)
    points, factors = full
    return _with(nn.Linear, linear, parameter), (codes.float() - points) * factors


def _with(cls: Any, linear: nn.Linear, weight: nn.Parameter) -> nn.Linear:
    linear.__class__ = cls
    linear._parameters["weight"] = weight
    return linear
