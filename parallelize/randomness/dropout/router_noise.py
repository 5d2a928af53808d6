"""Noise by which routers choose experts in training (Gumbel sampling of Phi 3.5, jitter of inputs), drawn as dropout is: a function of
seed, step, call and an element's index in the full activation. So every rank of `tp` chooses the same experts, on any mesh and again in a
recompute.

Source of the sampling: Liu et al., GRIN: GRadient-INformed MoE, arXiv:2409.12136.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.randomness.dropout.call_sites import DropoutSites, Scope

T = torch.Tensor


def routers_that_draw(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(fqn, module) of routers and blocks of experts whose forward draws noise in training.

    Noise that a module multiplies by counts where an attribute of it, named after jitter or noise, is above zero.
    """
    for fqn, inner in module.named_modules():
        children = [inner, module.get_submodule(fqn.rpartition(".")[0])]
        if any("experts" in part._modules for part in children) and _draws(inner):
            yield fqn, inner


def _draws(module: nn.Module) -> bool:
    cls: Any = type(module)
    source = _source_of(cls)
    if _ALWAYS.search(source):
        return True
    rates = [value for name, value in vars(module).items() if _RATE.search(name) and type(value) in (int, float)]
    return ".uniform_(" in source and any(rate > 0 for rate in rates)


_ALWAYS, _RATE = re.compile(r"\.exponential_\("), re.compile("jitter|noise")


@lru_cache(maxsize=4096)
def _source_of(cls: Any) -> str:
    """The source of a class's forward and of the functions of its file that it calls; empty where there is none."""
    forward = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    called = [forward.__globals__.get(name) for name in code.co_names] if code is not None else []
    same_file = [f for f in called if inspect.isfunction(f) and f.__module__ == cls.__module__]
    try:
        return "\n".join(map(inspect.getsource, (forward, *same_file)))
    except (OSError, TypeError):
        return ""


def noisy_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of such a module."""
    sites, fqn, stock, _ = self._applied.dropout
    if stock is None:
        stock = MethodType(type(self).forward, self)
    if not self.training:
        return stock(*args, **kwargs)
    with _RouterNoise(sites, Scope(fqn)):
        return stock(*args, **kwargs)


class _RouterNoise(TorchFunctionMode):
    """Replaces what one call of a router draws. Its draws are numbered in the order of their calls."""

    def __init__(self, sites: DropoutSites, scope: Scope):
        super().__init__()
        self.sites, self.scope = sites, scope

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        draw = _DRAWS.get(func)
        if draw is None or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        uniform = self.sites.uniform(args[0], self.scope.call_site())
        return draw(uniform, *args, **(kwargs or {}))


def _exponential(uniform: T, x: T, lambd: float = 1.0) -> T:
    return x.copy_(uniform.log_().div_(-lambd))


def _uniform(uniform: T, x: T, low: float = 0.0, high: float = 1.0) -> T:
    return x.copy_(uniform.mul_(high - low).add_(low))


def _rand_like(uniform: T, x: T) -> T:
    return uniform.to(x.dtype)


_DRAWS: dict[Any, Callable[..., T]] = {
    torch.Tensor.exponential_: _exponential,
    torch.Tensor.uniform_: _uniform,
    torch.rand_like: _rand_like,
}
