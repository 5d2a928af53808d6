"""Private names of torch for compiled modules."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch

from parallelize.base.torch_private.torch_tensors import at_least

T = TypeVar("T")


class InterceptedCall:
    """Is called instead of all that calling a module does, hooks included (the attribute of `Module.compile`, 2.0).

    `inside` does what the call did before: compiled, if the module was compiled before the interception or is during
    it.
    """

    def __init__(self, module: Any):
        earlier: Any = module._compiled_call_impl
        self.module = module
        self.compiled: Callable[..., Any] | None = earlier.compiled if isinstance(earlier, InterceptedCall) else earlier
        module._compiled_call_impl = self
        module.__dict__["compile"] = MethodType(_compile, module)

    def inside(self, args: tuple, kwargs: dict) -> Any:
        call = self.module._call_impl if self.compiled is None else self.compiled
        return call(*args, **kwargs)

    def release(self) -> None:
        """Intercept calls no more."""
        self.module._compiled_call_impl = self.compiled
        self.module.__dict__.pop("compile", None)


def _compile(module: Any, *args: Any, **kwargs: Any) -> None:
    """`Module.compile` of a module whose call is intercepted. (Not that of its copies, which have this method too.)"""
    intercepted = module._compiled_call_impl
    if isinstance(intercepted, InterceptedCall):
        intercepted.compiled = torch.compile(module._call_impl, *args, **kwargs)
    else:
        type(module).compile(module, *args, **kwargs)


def traced_local_of(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, in words that Dynamo follows and guards."""
    return tensor._local_tensor


def not_traced(function: Callable[..., T]) -> Callable[..., T]:
    """A function that graphs leave to eager mode, as `torch.compiler.disable` makes it, which imports Dynamo when it is
    called (2.0)."""
    return torch._disable_dynamo(function)


def call_around_compilation(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call these before Dynamo traces a graph and when it has compiled it (2.3), until `torch._dynamo.reset()`."""
    from torch._dynamo.callback import callback_handler

    if before not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(before)
        callback_handler.register_end_callback(after)


def leave_side_effects_out_of_replays(leave_out: bool) -> bool:
    """Whether a checkpointed forward that has side effects is traced, and its replay leaves them out. Returns what was
    set (2.8).

    Without the switch Dynamo runs such a forward in eager mode.
    """
    from torch._dynamo import config

    before = getattr(config, _SWITCH, leave_out)
    if before != leave_out:
        setattr(config, _SWITCH, leave_out)
    return before


_SWITCH = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def traces_graph() -> bool:
    """Whether operations are traced into a graph. (What Dynamo calls then is not told so by `torch.compiler` before
    2.13.)"""
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return torch.compiler.is_compiling() or proxy is not None


def function_of(cls: Any) -> Callable[..., Any]:
    """`cls.apply` of an autograd Function without its preparations for functorch, which take 1.2 us a call (since 2.0).

    Compilers, which know `apply` alone, and transforms of functorch, which `apply` refuses, get `apply`.
    """
    in_c, traced = super(torch.autograd.Function, cls).apply, with_new_results(cls)

    def run(*args: Any) -> Any:
        if _is_traced():
            return traced.apply(*args)
        return cls.apply(*args) if _transforms_are_active() else in_c(*args)

    return run


def with_new_results(cls: Any) -> Any:
    """The autograd Function that compilers get, of one whose forward returns one tensor.

    Before 2.13 (2.11 was tried) a graph drops the gradient of a result that is the same tensor as another value of the
    forward: what an operation in place returns, a `contiguous()` without effect, the wait for a collective. So the
    result is copied, which Inductor fuses with what reads it. A result that is an argument stays itself.
    """
    if at_least(2, 13):
        return cls

    class Copied(cls):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = cls.forward(ctx, *args)
            return out if any(out is arg for arg in args) else out.clone()

    return Copied


_is_traced = torch.compiler.is_dynamo_compiling
_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
