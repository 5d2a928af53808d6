"""Models that other libraries have changed are refused: PyTorch's own data parallelism, accelerate's offloading,
quantizers.

DistributedDataParallel and `replicate` put their hooks on autograd nodes that planned parameters do not have, and would
reduce the gradients of `shard_data` a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from parallelize.base.errors import ModelError, Problem, short_list
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.float8_linears import is_float8_linear
from parallelize.plan.pattern import generic


def refuse_wrapped(module: nn.Module) -> None:
    """Raises: ModelError `other-data-parallel` for a model of which PyTorch reduces gradients already."""
    for name, inner in module.named_modules():
        wrapper = _wrapper_of(inner)
        if wrapper:
            raise _refusal(f"{name or 'the model'} is under {wrapper} already")


def refuse_wrappers(module: nn.Module) -> None:
    """Let DistributedDataParallel and `replicate` around this model, or around one that it is a part of, raise
    ModelError `other-data-parallel`: DistributedDataParallel when it wraps, `replicate` in the first forward."""
    private.wrap_in_torch("data parallel", _constructing)
    if _refuse_active not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_refuse_active, prepend=True)


def _constructing(construct: Any) -> Any:
    """The constructor of DistributedDataParallel, for models without planned parts alone."""

    @wraps(construct)
    def checked(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, inner in module.named_modules():
            if _refuse_active in inner._forward_pre_hooks.values():
                raise _refusal(f"DistributedDataParallel around {name or type(module).__name__}")
        construct(self, module, *args, **kwargs)

    return checked


def _refuse_active(module: nn.Module, args: Any) -> None:
    """Refuses DistributedDataParallel and `replicate` around the model."""
    if torch.compiler.is_compiling():
        return
    if private.active_ddp(DistributedDataParallel) is not None:
        private.leave_ddp(DistributedDataParallel)
        raise _refusal(f"DistributedDataParallel around {type(module).__name__}")
    if _is_replicated(module):
        raise _refusal(f"replicate() of {type(module).__name__}")


def _is_replicated(module: nn.Module) -> bool:
    """`replicate` gives a module a class with the interface of DDP; as one of `fully_shard` in some versions of
    torch."""
    cls = type(module)  # whose attributes are found in a tenth of the time
    return hasattr(cls, "register_comm_hook") and hasattr(cls, "set_requires_gradient_sync")


def _wrapper_of(module: nn.Module) -> str:
    if isinstance(module, DistributedDataParallel):
        return "DistributedDataParallel"
    return "replicate()" if _is_replicated(module) else "fully_shard" if isinstance(module, FSDPModule) else ""


def _refusal(what: str) -> ModelError:
    fix = (
        "the unwrapped model, and shard_data(model, mesh) or parallelize_model, which sum gradients over the data axes"
    )
    return ModelError(Problem("other-data-parallel", f"{what}: its gradients would be reduced wrongly", fix=fix))


# -- offloaded models ------------------------------------------------------------------------------------------------
# Models whose parameters accelerate loads for each forward (`device_map` with CPU or disk) are refused. Its hooks put
# full tensors in the place of parameters, by the shapes that these had when the model was dispatched. Hooks that only
# move inputs to a device change nothing, and stay.


def refuse_offloaded(module: nn.Module) -> None:
    """Raises: ModelError `offloaded-parameters` for a model with parameters on CPU or disk that hooks load for each
    forward."""
    names = [
        name or "the model"
        for name, inner in module.named_modules()
        if any(getattr(hook, "offload", None) is True for hook in _hooks(getattr(inner, "_hf_hook", None)))
    ]
    if names:
        what = f"accelerate loads the parameters of {short_list(names, 3)} for each forward, in full"
        fix = "load the model without device_map, or call accelerate.hooks.remove_hook_from_submodules(model) first; "
        fix += "a plan shards a model on the CPU or on meta, so that no rank's device stores all of it"
        raise ModelError(Problem("offloaded-parameters", what, fix=fix))


def _hooks(hook: Any) -> Iterator[Any]:
    """A hook, or those that a sequence of hooks contains."""
    yield hook
    for inner in getattr(hook, "hooks", ()):
        yield from _hooks(inner)


# -- other quantizers ------------------------------------------------------------------------------------------------
# Weights that other libraries have quantized: recognized by the names of their classes, and refused.


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

    A plan would split their bytes without the state that they need, which is kept beside them in objects of that
    library. Linears that compute in float8 from a weight that is not quantized are split as others are.
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
        "import_quantized(model) before the plan and before adapters, for weights of bitsandbytes and torchao; or "
        "load the model without "
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
