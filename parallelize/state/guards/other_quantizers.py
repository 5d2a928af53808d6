"""Weights that other libraries have quantized: recognized by the names of their classes, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem, short_list
from parallelize.plan.models.float8_linears import is_float8_linear
from parallelize.plan.pattern import generic

_PACKAGES = (
    "bitsandbytes",
    "torchao",
    "hqq",
    "gptqmodel",
    "auto_gptq",
    "awq",
    "eetq",
    "optimum",
    "quanto",
    "aqlm",
    "compressed_tensors",
    "fbgemm_gpu",
    "transformer_engine",
)
_CLASSES = (
    "Linear4bit",
    "Linear8bitLt",
    "Params4bit",
    "Int8Params",
    "AffineQuantizedTensor",
    "NF4Tensor",
    "Int4Tensor",
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
    "Float8Tensor",
    "QuantLinear",
)

_FLOAT8_GATHER = "WeightWithDynamicFloat8CastTensor"  # of torchao, for `fully_shard`


def refuse_other_quantizers(model: nn.Module) -> None:
    """Raises: ModelError `other-quantizer` for a model with weights that another library has quantized.

    A plan would split their bytes without the state that they need, which is kept beside them in objects of that library.
    Linears that compute in float8 from a weight that is not quantized are split as others are.
    """
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for kind in (*_loaded_by(module), *foreign_classes(module)):
            layers.setdefault(kind, []).append(generic(name))
    if not layers:
        return
    kind, names = next(iter(layers.items()))
    what = f"weights of {len(names)} modules are quantized by another library ({kind})"
    if kind.endswith(_FLOAT8_GATHER):
        what = f"weights of {len(names)} modules are to be gathered in float8 by fully_shard alone ({kind})"
    rows = (("modules", short_list([name or "the model" for name in dict.fromkeys(names)], 6)),)
    fix = (
        "import_quantized(model) before the plan and before adapters, for weights of bitsandbytes and torchao; or load the model without "
        "its quantization_config, and quantize(model, 'nf4') or 'int8'"
    )
    if kind.endswith(_FLOAT8_GATHER):
        fix = "Float8LinearConfig(enable_fsdp_float8_all_gather=False), which gathers them in their own dtype"
    raise ModelError(Problem("other-quantizer", what, rows=rows, fix=fix))


def _loaded_by(module: nn.Module) -> Iterator[str]:
    """What `transformers` says of a model that one of its quantizers has loaded."""
    if vars(module).get("is_quantized"):
        method: Any = vars(module).get("quantization_method", "unknown")
        yield f"quantization_config of transformers: {getattr(method, 'value', method)}"


def foreign_classes(module: nn.Module) -> Iterator[str]:
    """The class of a module, or of one of its own parameters and buffers, if it is of a library that quantizes."""
    own = () if is_float8_linear(module) else (module,)
    for item in (*own, *module._parameters.values(), *module._buffers.values()):
        for kind in type(item).__mro__:
            if kind.__module__.partition(".")[0] in _PACKAGES or kind.__name__ in _CLASSES:
                yield f"{kind.__module__}.{kind.__name__}"
                return
