"""A linear with a frozen quantized weight, which is dequantized in forward and again in backward.

Autograd saves the codes and scales alone, which are stored anyway: of the weight only its matmul with the gradient of
the output is needed, as it does not train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import of_elements
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.block_formats import LEAST_BLOCK, BlockFormat, block_format
from parallelize.state.layout_tensor.layout_dtensor import layout_of, with_layout
from parallelize.state.quantization.block_codes import BYTES, dequantize

T = torch.Tensor


class QuantizedLinear(nn.Linear):
    """`nn.Linear` whose weight is stored as codes and scales by block: frozen parameters, split as the weight would be.

    The attribute `weight` is the dequantized weight, computed at each look-up, which cannot be written.

    Args:
        in_features, out_features: as of `nn.Linear`; the first is a multiple of the block.
        form: of the codes, such as "nf4": see `quantize`.
        bias: whether there is one; it is an ordinary parameter.
        dtype: of the bias, and of what the attribute `weight` returns. The matmul is done in the dtype of its input.
        device: of the parameters, which are allocated without values.

    Attributes:
        packs: parameter name to the elements of a row of the weight that one of its elements stands for.
        stock_class: of the module that it was: `nn.Linear`, or the Conv1D of `transformers`.

    Shapes: weight_codes uint8 [out, in / codes_per_byte], weight_scales uint8 [out, in / scale_packs]: the bytes of
        bfloat16, 2 in / block, or of float32.
    """

    form: BlockFormat
    dtype: torch.dtype
    packs: dict[str, int]
    stock_class: type = nn.Linear
    weight_codes: nn.Parameter
    weight_scales: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        form: str | BlockFormat,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        dtype = dtype or torch.get_default_dtype()
        values = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        allocate_codes(self, block_format(form), dtype, values, device)

    @property
    def is_transposed(self) -> bool:
        """Whether files, and the module that it was, have the weight as [in, out]."""
        return self.stock_class is not nn.Linear

    @property
    def weight(self) -> T:  # type: ignore[override]
        """The dequantized weight [out, in]; of a planned linear a DTensor, in its forward this rank's shard."""
        codes: Any = self.weight_codes
        if not isinstance(codes, DTensor):
            return not_written(dequantize(codes, self.weight_scales, self.form, self.dtype))
        return not_written(self._sharded_weight(codes, self.weight_scales))

    def _sharded_weight(self, codes: Any, scales: Any) -> DTensor:
        local = dequantize(private.local_of(codes), private.local_of(scales), self.form, self.dtype)
        spec, pack = private.spec_of(codes), self.form.codes_per_byte
        shape = torch.Size((spec.shape[0], spec.shape[1] * pack))
        weight = DTensor.from_local(
            local, codes.device_mesh, spec.placements, run_check=False, shape=shape, stride=(shape[1], 1)
        )
        layout = layout_of(codes)
        return with_layout(weight, None if layout is None else of_elements(layout, pack))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise written_weight()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[T], T], recurse: bool = True) -> QuantizedLinear:
        """What `.to()` calls. No cast of a model changes codes and scales; it changes the dtype that the weight has."""
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(1, dtype=self.dtype)).dtype
        return self

    def forward(self, input: T) -> T:
        """input: [..., in]. Returns: [..., out], in the dtype of the input, or of autocast."""
        return quantized_linear(input, self.weight_codes, self.weight_scales, self.bias, self.form)

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"{super().extra_repr()}, form={self.form}"


def allocate_codes(
    linear: QuantizedLinear, form: BlockFormat, dtype: torch.dtype, bias: nn.Parameter | None, device: Any
) -> None:
    """Give a linear codes and scales, without values, before the bias in the order of parameters.

    Raises: ModelError `partial-block`.
    """
    if problem := partial_block(type(linear).__name__, linear.in_features, form):
        raise ModelError(problem)
    linear.form, linear.dtype = form, dtype
    linear.packs = {"weight_codes": form.codes_per_byte, "weight_scales": form.scale_packs}
    for name, pack in linear.packs.items():
        stored = torch.empty(linear.out_features, linear.in_features // pack, dtype=BYTES, device=device)
        linear.register_parameter(name, nn.Parameter(stored, requires_grad=False))
    linear.register_parameter("bias", bias)


def partial_block(name: str, in_features: int, form: BlockFormat) -> Problem | None:
    """The problem of a linear whose rows are no whole number of blocks."""
    left = in_features % form.block
    if not left:
        return None
    what = f"{name} has {in_features} input features, not a multiple of {form.block}"
    largest = in_features & -in_features
    smaller = f"a smaller block: '{form.word}(block={largest})'; or " if largest >= LEAST_BLOCK else ""
    fix = f"{smaller}leave it out of `modules`"
    return Problem("partial-block", what, rows=(("rest", f"{in_features} % {form.block} = {left}"),), fix=fix)


def quantized_linear(
    input: T, codes: T, scales: T, bias: T | None, form: BlockFormat, *, is_transposed: bool = False
) -> T:
    """`F.linear` with the weight that codes and scales stand for.

    Args:
        input: [..., in]. codes, scales: see `QuantizedLinear`. bias: [out].
        is_transposed: the weight is [in, out], in blocks of outputs.

    Returns: [..., out]. Under autocast, input and weight and bias are in its dtype, as those of `F.linear` are.
    """
    device = input.device.type
    has_autocast = not input.is_meta and input.dtype != torch.float64  # meta has none, and it leaves float64 as it is
    if has_autocast and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, bias = input.to(dtype), bias if bias is None else bias.to(dtype)
    return _Linear.apply(input, codes, scales, bias, form, is_transposed)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: T, codes: T, scales: T, bias: T | None, form: BlockFormat, is_transposed: bool) -> T:
        ctx.save_for_backward(codes, scales)
        ctx.form, ctx.dtype, ctx.is_transposed = form, input.dtype, is_transposed
        weight = dequantize(codes, scales, form, input.dtype)
        return F.linear(input, weight.T if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> Any:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            codes, scales = ctx.saved_tensors
            weight = dequantize(codes, scales, ctx.form, ctx.dtype)
            of_input = grad @ (weight.T if ctx.is_transposed else weight)
        if ctx.needs_input_grad[3]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return of_input, None, None, of_bias, None, None


# -- computed weight -------------------------------------------------------------------------------------------------
# The weight of a quantized linear, as its attribute `weight` returns it: computed for the caller, and not to be
# written. Merging an adapter writes `layer.weight.data += delta`, which would change a copy that nobody reads again.


_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__set__")
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class _RefusesWrites:
    """Mixin: a tensor whose in-place operations are refused. What other operations return is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(next(iter((*args, *(kwargs or {}).values())), None), _RefusesWrites):
            raise written_weight()
        with private.plain_functions():
            out = func(*args, **(kwargs or {}))
        return not_written(out) if func == _DATA else out


def not_written(weight: torch.Tensor) -> torch.Tensor:
    """The same tensor, as one that refuses to be written."""
    if isinstance(weight, _RefusesWrites):
        return weight
    weight = weight.detach()
    if type(weight) is torch.Tensor:
        return weight.as_subclass(_class_of(torch.Tensor))
    weight.__class__ = _class_of(type(weight))  # a DTensor
    return weight


@lru_cache(maxsize=8)
def _class_of(kind: type) -> Any:
    return type(f"Unwritable{kind.__name__}", (_RefusesWrites, kind), {})


def written_weight() -> ModelError:
    """The error of a write into the weight of a quantized linear."""
    what = (
        "the weight of a quantized linear was written (merging an adapter does it): it is computed from codes, which "
        "do not change"
    )
    fix = "merge into weights that are not quantized: on one process dequantize(model), then merge_and_unload(); "
    fix += "of a parallel model save_adapter(), and load the adapter on the unquantized model"
    return ModelError(Problem("quantized-weight", what, fix=fix))
