"""The stacked weights of a mixture's experts as codes and scales: an expert is dequantized where the forward indexes
it.

The stock forwards of experts compute with `weight[expert]`, one expert after another. What they get is no tensor, and
dequantizes in the matmul, and in its backward again, as a quantized linear does: at most one expert is dense at a time,
and autograd saves codes. Whatever else reads such a weight gets the dense tensor, which cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.plan.block_formats import BlockFormat
from parallelize.state.quantization.block_codes import dequantize
from parallelize.state.quantization.quantized_linear import not_written, quantized_linear

T = torch.Tensor


@dataclass(frozen=True)
class LowRankParts:
    """What an adapter adds to each expert's weight: `scaling` times left @ right, of a part of it after another.

    Attributes:
        parts: (left [rows, r], right [r, columns]) of each expert, for each part.
        dim: along which the parts of an expert follow each other: 0 rows, 1 columns.
    """

    parts: Sequence[tuple[Sequence[T], Sequence[T]]]
    dim: int
    scaling: float

    def dense(self, expert: int) -> T:
        """[rows, columns] of an expert."""
        return torch.cat([left[expert] @ right[expert] for left, right in self.parts], self.dim) * self.scaling

    def applied(self, input: T, expert: int, is_transposed: bool) -> T:
        """input: [..., in]. is_transposed: rows are the inputs. Returns: [..., out]."""
        joins_outputs = self.dim == (1 if is_transposed else 0)
        outputs, first = [], 0
        for lefts, rights in self.parts:
            left, right = lefts[expert].to(input.dtype), rights[expert].to(input.dtype)
            of_part = input
            if not joins_outputs and len(self.parts) > 1:
                width = left.shape[0] if is_transposed else right.shape[1]
                of_part, first = input[..., first : first + width], first + width
            inner = (of_part @ left) @ right if is_transposed else F.linear(F.linear(of_part, right), left)
            outputs.append(inner)
        joined = torch.cat(outputs, -1) if joins_outputs else torch.stack(outputs).sum(0)
        return joined * self.scaling


class QuantizedStack:
    """Codes and scales of stacked weights [experts, rows, columns], with the attributes of a frozen tensor.

    Args:
        codes: uint8 [experts, rows, columns / codes_per_byte]. scales: uint8 [experts, rows, 2 columns / block].
        dtype: of the dense weight. adapters: what is added to it.
    """

    def __init__(
        self, codes: T, scales: T, form: BlockFormat, dtype: torch.dtype, adapters: tuple[LowRankParts, ...] = ()
    ):
        self.codes, self.scales, self.form, self.dtype, self.adapters = codes, scales, form, dtype, adapters
        self.shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * form.codes_per_byte))
        self.ndim, self.device, self.requires_grad = codes.ndim, codes.device, False

    def with_adapter(self, adapter: LowRankParts) -> QuantizedStack:
        """The same weights plus what an adapter adds."""
        return QuantizedStack(self.codes, self.scales, self.form, self.dtype, (*self.adapters, adapter))

    def __getitem__(self, index: Any) -> Any:
        """An expert, by an integer or a tensor of one number; any other part is dense."""
        is_one = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0)
        return ExpertWeight(self, int(index)) if is_one else self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def dense(self) -> T:
        """All experts: [experts, rows, columns]."""
        if self.adapters:
            return torch.stack([self[n].dense() for n in range(self.shape[0])])
        flat = dequantize(self.codes.flatten(0, 1), self.scales.flatten(0, 1), self.form, self.dtype)
        return not_written(flat.view(self.shape))

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run_on_dense(func, args, kwargs)


class ExpertWeight:
    """The weight of one expert, which `F.linear` and `@` dequantize."""

    def __init__(self, stack: QuantizedStack, expert: int):
        self.stack, self.expert = stack, expert
        self.dtype, self.device, self.shape, self.ndim = stack.dtype, stack.device, stack.shape[1:], stack.ndim - 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> T:
        return self.dense()[index]

    def dense(self) -> T:
        """[rows, columns]."""
        stack = self.stack
        weight = dequantize(stack.codes[self.expert], stack.scales[self.expert], stack.form, stack.dtype)
        for adapter in stack.adapters:
            weight = weight + adapter.dense(self.expert).to(weight.dtype)
        return weight if stack.adapters else not_written(weight)

    def product(self, input: T, bias: T | None, is_transposed: bool) -> T:
        """The input times this weight, or its transpose."""
        stack = self.stack
        codes, scales = stack.codes[self.expert], stack.scales[self.expert]
        out = quantized_linear(input, codes, scales, bias, stack.form, is_transposed=is_transposed)
        for adapter in stack.adapters:
            out = out + adapter.applied(input, self.expert, is_transposed)
        return out

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        weight = args[1] if len(args) > 1 else None
        if isinstance(weight, ExpertWeight) and isinstance(args[0], torch.Tensor):
            if func is F.linear:
                bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
                return weight.product(args[0], bias, False)
            if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
                return weight.product(args[0], None, True)
        return _run_on_dense(func, args, kwargs)


def _run_on_dense(func: Callable, args: tuple, kwargs: dict | None) -> Any:
    def dense(value: Any) -> Any:
        return value.dense() if isinstance(value, (QuantizedStack, ExpertWeight)) else value

    return func(*map(dense, args), **{key: dense(value) for key, value in (kwargs or {}).items()})
