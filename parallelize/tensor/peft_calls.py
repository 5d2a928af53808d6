"""Functions of PEFT that would read shards of a planned layer: they are told the full sizes, or refused by name.

PEFT is not imported: what is not imported when a model is planned is as its authors wrote it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.applied.later_prompts import replace_once
from parallelize.applied.records import applied
from parallelize.errors import ModelError, Problem
from parallelize.quantization.quantized_linear import QuantizedLinear
from parallelize.tensor.peft_prompts import local_prefixes, readable_prompts
from parallelize.tensor.planned_forward import installed

_FIRST = "before the plan: model = get_peft_model(model, config), then parallelize_model(model, mesh)"
_COMBINE = (
    "combine adapters before the plan; or save_adapter(model, folder) on every rank, then combine them in one process, "
    "and model.load_adapter(folder, name) here"
)
_READS_WEIGHTS = ("pissa_init", "olora_init", "mica_init", "corda_init", "loftq_init", "lora_ga_init")
"""Methods of a layer of PEFT that initialize an adapter from the weight of the layer."""


def prepare_peft() -> None:
    """Let PEFT, where it is imported, make adapters of planned linears in their full sizes, and refuse what reads their weights."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    stock = getattr(layers, "_get_in_out_features", None)
    if stock is None or isinstance(stock, _FullSizes):
        return
    layers._get_in_out_features = _FullSizes(stock)
    for name in _READS_WEIGHTS:
        _refuse_of_shards(layers.LoraLayer, name, _base_of_whole_model, _FIRST)
    dora: Any = sys.modules.get("peft.tuners.lora.dora")
    _refuse_of_shards(getattr(dora, "DoraLinearLayer", None), "update_layer", lambda _, base_layer: base_layer, _FIRST)
    prompts: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if prompts is not None:
        replace_once(prompts, "get_prompt", _of_local_heads)
    models: Any = sys.modules.get("peft.tuners.lora.model")
    _refuse_of_shards(getattr(models, "LoraModel", None), "add_weighted_adapter", lambda model: model.model, _COMBINE)


class _FullSizes:
    """PEFT's function that returns the input and output features of a layer."""

    def __init__(self, stock: Callable[[nn.Module], Any]):
        self.stock = stock

    def __call__(self, module: nn.Module) -> Any:
        if type(module) in (nn.Linear, QuantizedLinear) and installed(module) is not None:
            return module.in_features, module.out_features
        return self.stock(module)


def _base_of_whole_model(layer: Any) -> nn.Module:
    """The layer beside an adapter. Raises: ModelError `unplanned-adapter` where another pipeline stage has its weight."""
    base: nn.Module = layer.get_base_layer()
    if applied(base).absent:
        what = "this initialization of PEFT reads the weights of all layers, and this rank has those of its stages"
        raise ModelError(Problem("unplanned-adapter", what, fix=_FIRST))
    return base


def _of_local_heads(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.get_prompt` of a planned model, whose keys and values of prefix tuning are those of the heads of this rank."""

    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        with readable_prompts(peft_model):
            prompt = stock(peft_model, *args, **kwargs)
        return local_prefixes(peft_model, prompt)

    return get_prompt


def _refuse_of_shards(cls: Any, name: str, module_of: Callable[..., Any], fix: str) -> None:
    """Let a method raise ModelError `unplanned-adapter` where a module has parameters of which this rank stores shards.

    Args:
        cls: the class of PEFT; None, and a method that this version lacks, are left out.
        module_of: returns the module, from the object and from `base_layer=` of the call, if it has that.
    """
    stock = getattr(cls, name, None)
    if stock is None:
        return

    @functools.wraps(stock)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {"base_layer": kwargs["base_layer"]} if "base_layer" in kwargs else {}
        if any(isinstance(parameter, DTensor) for parameter in module_of(self, **named).parameters()):
            what = f"{cls.__name__}.{name} of PEFT reads full weights, and this rank stores shards of them"
            raise ModelError(Problem("unplanned-adapter", what, fix=fix))
        return stock(self, *args, **kwargs)

    setattr(cls, name, refusing)
