"""Models with adapters of PEFT, whose base is read from a folder of the stock model: names without PEFT's, and adapters beside them.

A trained copy of a layer (`modules_to_save`) begins with the values of the layer, as where PEFT makes it beside a model that has values.
LoRA and (IA)^3 that were made on the meta device get PEFT's initial values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.checkpoint.hub.names import ModelTensor, TensorSources
from parallelize.plan.adapters import BASE, COPIES, ORIGINAL, TOKENS, is_adapter_parameter, peft_prefix
from parallelize.plan.model_facts import describe

_OF_PEFT = re.compile(rf"\{TOKENS}(?=\.)|\.{BASE}(?=\.)|\.{ORIGINAL}(?=\.)|\.{COPIES}\.[^.]+(?=\.)")
_COPY = f".{COPIES}."
_MADE = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "ia3_l")


class StockNames:
    """The tensors of a model with adapters under the names of the stock model.

    Args:
        module: the model. tensors: of the unsharded model, with adapters.

    Attributes:
        module: the stock model inside. tensors: its own, without adapters.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[ModelTensor]):
        self.module: nn.Module = module
        self.tensors: list[ModelTensor] = list(tensors)
        self._names: dict[str, list[str]] = {}
        self._prefix = peft_prefix(describe(module))
        if not self._prefix and not any(is_adapter_parameter(tensor.name) for tensor in tensors):
            return
        self.module = module.get_submodule(self._prefix.rstrip("."))
        stock: dict[str, ModelTensor] = {}
        for tensor in tensors:
            if is_adapter_parameter(tensor.name) and _COPY not in tensor.name:
                continue
            names = tuple(dict.fromkeys(stock_name(name, self._prefix) for name in tensor.names))
            self._names.setdefault(names[0], []).append(tensor.name)
            stock.setdefault(names[0], replace(tensor, name=names[0], names=names))
        self.tensors = list(stock.values())

    def of_model(self, sources: TensorSources) -> TensorSources:
        """The sources under the names of the model; those of a layer are those of its copies too."""
        if not self._names:
            return sources
        by_name = {name: source for stock, source in sources.by_name.items() for name in self._names[stock]}
        return replace(sources, by_name=by_name)


def stock_name(name: str, prefix: str) -> str:
    """The name in the stock model of what PEFT put inside of other modules. prefix: of `peft_prefix`."""
    return _OF_PEFT.sub("", name.removeprefix(prefix))


def new_adapters(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(layer of PEFT, adapter) for adapters on the meta device that PEFT can initialize: of a model that no plan has sharded."""
    return [
        (layer, name)
        for layer in module.modules()
        if _initializer(layer) and not isinstance(next(layer.parameters(), None), DTensor)
        for name in _names_on_meta(layer)
    ]


def initialize_adapters(root: nn.Module, adapters: Sequence[tuple[nn.Module, str]]) -> None:
    """Give adapters the values that PEFT would have given them, from torch's generator of this rank."""
    for layer, name in adapters:
        made: Any = layer
        config = _configs(root).get(name)
        if _initializer(layer) == "reset_lora_parameters":
            made.reset_lora_parameters(name, getattr(config, "init_lora_weights", True))
        else:
            made.reset_ia3_parameters(name)


def names_of_adapters(root: nn.Module, adapters: Sequence[tuple[nn.Module, str]]) -> set[str]:
    """The names of the parameters that `initialize_adapters` fills."""
    named = {id(module): name for name, module in root.named_modules()}
    return {
        f"{named[id(layer)]}.{key}.{name}" + (f".{inner}" if inner else "")
        for layer, name in adapters
        for key, inner in _parameters_of(layer, name)
    }


def _parameters_of(layer: Any, name: str) -> Iterator[tuple[str, str]]:
    for key in _MADE:
        children = getattr(layer, key, None)
        child = children[name] if children is not None and name in children else None
        if isinstance(child, nn.Module):
            yield from ((key, inner) for inner, _ in child.named_parameters())
        elif child is not None:
            yield key, ""


def _names_on_meta(layer: Any) -> list[str]:
    names: dict[str, None] = {}
    for key in _MADE:
        children: Any = getattr(layer, key, None) or {}
        for name in children:
            child = children[name]
            values = list(child.parameters()) if isinstance(child, nn.Module) else [child]
            if any(value.is_meta for value in values):
                names[name] = None
    return list(names)


def _initializer(layer: nn.Module) -> str:
    known = ("reset_lora_parameters", "reset_ia3_parameters")
    return next((name for name in known if callable(getattr(type(layer), name, None))), "")


def _configs(root: nn.Module) -> dict[str, Any]:
    holders = (module for module in root.modules() if isinstance(vars(module).get("peft_config"), dict))
    return next((vars(holder)["peft_config"] for holder in holders), {})
