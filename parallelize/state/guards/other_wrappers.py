"""PyTorch's own data parallelism around a model whose gradients it cannot see, or that are reduced already, is refused.

DistributedDataParallel and `replicate` put their hooks on autograd nodes that planned parameters do not have, and would reduce
the gradients of `shard_data` a second time.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private


def refuse_wrapped(module: nn.Module) -> None:
    """Raises: ModelError `other-data-parallel` for a model of which PyTorch reduces gradients already."""
    for name, inner in module.named_modules():
        wrapper = _wrapper_of(inner)
        if wrapper:
            raise _refusal(f"{name or 'the model'} is under {wrapper} already")


def refuse_wrappers(module: nn.Module) -> None:
    """Let DistributedDataParallel and `replicate` around this model, or around one that it is a part of, raise ModelError
    `other-data-parallel`: DistributedDataParallel when it wraps, `replicate` in the first forward."""
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
    if torch.compiler.is_compiling():
        return
    if private.active_ddp(DistributedDataParallel) is not None:
        private.leave_ddp(DistributedDataParallel)
        raise _refusal(f"DistributedDataParallel around {type(module).__name__}")
    if _is_replicated(module):
        raise _refusal(f"replicate() of {type(module).__name__}")


def _is_replicated(module: nn.Module) -> bool:
    """`replicate` gives a module a class with the interface of DDP; as one of `fully_shard` in some versions of torch."""
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
