"""Models as they are given: checked to be modules, and the stock model inside of PEFT's wrappers.

PEFT is not imported: its wrappers are recognized by the package of their class, or of the class that `fully_shard` has
made a subclass of.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import nn

from parallelize.base.errors import ModelError, Problem

_BESIDE_TOKENS = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of learned prompts that are keys and values, not embeddings before those of the tokens."""


def stock_model(module: nn.Module) -> nn.Module:
    """The model inside PEFT's wrappers; the module itself where there are none."""
    while any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__):
        inner = module._modules.get("base_model") or module._modules.get("model")
        if inner is None:
            break
        module = inner
    return module


def num_prompt_logits(module: nn.Module) -> int:
    """The number of positions before those of the tokens, of which PEFT's model returns logits too: that of its learned
    prompts."""
    if not hasattr(module, "prompt_encoder"):
        return 0
    config: Any = module.active_peft_config
    return 0 if config.peft_type in _BESIDE_TOKENS else int(config.num_virtual_tokens)


def forward_signature(module: nn.Module) -> inspect.Signature:
    """The signature of a module's own forward, with `self`; that of a wrapper takes what the stock model takes, by
    name."""
    own = inspect.signature(type(module).forward)
    stock = stock_model(module)
    if stock is module:
        return own
    inner = inspect.signature(type(stock).forward)
    named = {name: p for name, p in own.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if len(named) == 1:  # (self, *args, **kwargs)
        return inner
    kinds: Any = inspect.Parameter
    more = [p for name, p in inner.parameters.items() if name not in named and p.kind is not kinds.VAR_POSITIONAL]
    by_name = [p if p.kind is kinds.VAR_KEYWORD else p.replace(kind=kinds.KEYWORD_ONLY) for p in more]
    last = [p for p in own.parameters.values() if p.kind is kinds.VAR_KEYWORD]
    accepts_any = any(p.kind is kinds.VAR_KEYWORD for p in by_name)
    return own.replace(parameters=[*named.values(), *by_name, *([] if accepts_any else last)])


# -- checked module --------------------------------------------------------------------------------------------------
# What is given as a module is one, and not its class or a config.


class HasModule(Protocol):
    """What contains a module: a `ParallelModel`."""

    module: nn.Module


AnyModel = nn.Module | HasModule


def module_of(model: AnyModel) -> nn.Module:
    """The module of a `ParallelModel`; a module itself. Raises: ModelError `not-a-module`."""
    module: Any = model if isinstance(model, (nn.Module, type)) else getattr(model, "module", model)
    require_module(module)
    return module


def require_module(module: Any) -> None:
    """Raises: ModelError `not-a-module`."""
    if isinstance(module, nn.Module):
        return
    is_class = isinstance(module, type)
    what = f"the class {module.__name__} was given" if is_class else f"a {type(module).__name__} was given"
    fix = f"an instance: {module.__name__}(...)" if is_class else "the nn.Module: of a ParallelModel `parallel.module`"
    raise ModelError(Problem("not-a-module", f"{what} in the place of a module", fix=fix))
