"""What a folder of the stock model gets of a model with adapters of PEFT: merged weights, and the active copies of layers.

A folder has one weight for each layer. So adapters are in the weights (merged), or add nothing (disabled, or none active). Trained copies
of a layer (`modules_to_save`) take the layer's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.boxes import Part
from parallelize.checkpoint.hub.adapted_models import stock_name
from parallelize.checkpoint.hub.names import ModelTensor, Shape, parts_to_save
from parallelize.plan.adapters import BASE, COPIES, ORIGINAL, PROMPTS, TOKENS, is_adapter_parameter, peft_prefix
from parallelize.plan.model_facts import describe

_COPY = re.compile(rf"(.*)\.{COPIES}\.([^.]+)(?:\..*)?$")
_ORIGINAL = re.compile(rf"(.*)\.{ORIGINAL}(?:\..*)?$")


def stock_parts_to_save(module: nn.Module, tensors: Sequence[ModelTensor]) -> dict[str, tuple[Shape, tuple[Part, ...]]]:
    """`parts_to_save` of a model with or without adapters; sources are tensors of the model.

    Raises: CheckpointError `unwritable-conversion`.
    """
    prefix, copies = peft_prefix(describe(module)), _active_copies(module)
    if not prefix and not any(is_adapter_parameter(tensor.name) for tensor in tensors):
        return parts_to_save(module, tensors)
    stock: list[ModelTensor] = []
    sources: dict[str, str] = {}
    for tensor in tensors:
        names = tuple(dict.fromkeys(stock_name(name, prefix) for name in tensor.names if _is_saved(name, copies)))
        if names:
            stock.append(replace(tensor, name=names[0], names=names))
            sources[names[0]] = tensor.name
    saved = parts_to_save(stock_module(module), stock)
    return {
        name: (shape, tuple(replace(part, source=sources[part.source]) for part in parts))
        for name, (shape, parts) in saved.items()
    }


def stock_module(module: nn.Module) -> nn.Module:
    """The stock model that PEFT wraps; a model that it does not wrap itself."""
    return module.get_submodule(peft_prefix(describe(module)).rstrip("."))


def adapter_state(module: nn.Module) -> tuple[Any, ...]:
    """What decides which weights are those of the model: merged adapters, and active copies. It changes without any tensor."""
    return tuple(_active_copies(module).items()), tuple(_unmerged(module))


def refuse_unmerged(module: nn.Module, call: str) -> None:
    """Raises: CheckpointError `unmerged-adapters` for a model whose adapters are beside its weights."""
    unmerged = list(_unmerged(module))
    if unmerged:
        what = f"{call} writes one weight for each layer under the names of the Hub, and {len(unmerged)} have adapters beside it"
        fix = "model.merge_adapter() before and model.unmerge_adapter() after; or save_adapter(model, folder), which writes the adapters"
        raise CheckpointError(Problem("unmerged-adapters", what, unmerged[0], fix=fix))


def _is_saved(name: str, copies: dict[str, str]) -> bool:
    """Whether a parameter or buffer is one of the stock model, or takes the place of one. copies: wrapper -> active copy."""
    if copy := _COPY.match(name):
        return copies.get(copy[1]) == copy[2]
    if original := _ORIGINAL.match(name):
        return not copies.get(original[1])
    return not is_adapter_parameter(name) and f"{TOKENS}.trainable_tokens" not in name


def _active_copies(module: nn.Module) -> dict[str, str]:
    """Name of a layer with trained copies -> the copy that it calls; "" for the layer itself."""
    wrappers = [(name, inner) for name, inner in module.named_modules() if {ORIGINAL, COPIES} <= inner._modules.keys()]
    return {name: _active_copy(inner) for name, inner in wrappers}


def _active_copy(wrapper: Any) -> str:
    active = () if getattr(wrapper, "disable_adapters", False) else getattr(wrapper, "active_adapters", ())
    return next((name for name in active if name in wrapper._modules[COPIES]._modules), "")


def _unmerged(module: nn.Module) -> Iterator[str]:
    """Names of layers that add adapters to what their weight computes, and of learned prompts."""
    for name, inner in module.named_modules():
        layer: Any = inner
        if inner._modules.get(PROMPTS):
            yield f"{name}.{PROMPTS}".lstrip(".")
        elif BASE in inner._modules and not (layer.merged or layer.disable_adapters) and _adds(layer):
            yield name


def _adds(layer: Any) -> bool:
    """Whether an active adapter has a part in this layer."""
    known = {key for part in getattr(layer, "adapter_layer_names", ()) for key in getattr(layer, part, None) or ()}
    return not known.isdisjoint(layer.active_adapters)
