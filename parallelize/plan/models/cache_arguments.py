"""Whether a model of `transformers` makes a key/value cache unless its caller says otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn

from parallelize.plan.models.wrapped_models import forward_signature, stock_model


def cache_off(module: nn.Module) -> dict[str, bool]:
    """The argument with which a model of `transformers` makes no key/value cache; empty for models that take none.

    A model whose own signature does not name it may pass it on to its decoder.
    """
    config: Any = getattr(stock_model(module), "config", None)
    if not hasattr(config, "_attn_implementation"):
        return {}
    parameters = forward_signature(module).parameters
    passes_on = "past_key_values" in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = "use_cache" in parameters or (passes_on and _makes_caches(config))
    return {"use_cache": False} if takes else {}


def _makes_caches(config: Any) -> bool:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return any(hasattr(part, "use_cache") for part in (config, text))
