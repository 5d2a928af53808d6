"""What PEFT would do with layers of which this rank stores shards, or none, and with prompts that nothing reduces.

Linears have the sizes of the full ones; what computes with a full weight is refused by name. PEFT is not imported: what
is not imported when a model is planned, cut or sharded is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES
from parallelize.base.patches import active as patches
from parallelize.comm.meshes import mesh_spec
from parallelize.state.records import applied

_FIRST = "before the plan: model = get_peft_model(model, config), then parallelize_model(model, mesh)"
_COMBINE = (
    "combine adapters before the plan; or save_adapter(model, folder) on every rank, then combine them in one process, "
    "and model.load_adapter(folder, name) here"
)
_MERGE = (
    "save_adapter(model, folder) on every rank, then merge in one process; or get_peft_model(model, config) before the "
    "plan"
)
_READS_WEIGHTS = ("pissa_init", "olora_init", "mica_init", "corda_init", "loftq_init", "lora_ga_init")
"""Methods of a layer of PEFT that initialize an adapter from the weight of the layer."""


def guard_peft_reads() -> None:
    """Let PEFT, where it is imported, make adapters of linears in their full sizes, and refuse what reads their
    weights."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    stock = getattr(layers, "_get_in_out_features", None)
    if stock is None:
        return
    patches.replace(layers, "_get_in_out_features", _FullSizes)
    for name in _READS_WEIGHTS:
        _refuse_of_shards(layers.LoraLayer, name, _base_of_whole_model, _FIRST)
    dora: Any = sys.modules.get("peft.tuners.lora.dora")
    _refuse_of_shards(getattr(dora, "DoraLinearLayer", None), "update_layer", lambda _, base_layer: base_layer, _FIRST)
    models: Any = sys.modules.get("peft.tuners.lora.model")
    _refuse_of_shards(getattr(models, "LoraModel", None), "add_weighted_adapter", lambda model: model.model, _COMBINE)


class _FullSizes:
    """PEFT's function that returns the input and output features of a layer. stock: as PEFT wrote it."""

    def __init__(self, stock: Callable[[nn.Module], Any]):
        self.stock = stock

    def __call__(self, module: nn.Module) -> Any:
        if isinstance(module, nn.Linear) and (applied(module).planned is not None or _is_sharded_by_rows(module)):
            return module.in_features, module.out_features
        return self.stock(module)


def refuse_merging_into_shards(layer: nn.Module, base: nn.Module) -> None:
    """Raises: ModelError `unplanned-adapter` where data ranks store rows of a layer (ZeRO 3), and its adapters in full,
    which were added later."""
    bases = {id(parameter) for parameter in base.parameters()}
    adapters = (parameter for parameter in layer.parameters() if id(parameter) not in bases)
    if _is_sharded_by_rows(base) and not all(map(_is_of_rows, adapters)):
        what = "adapters that were added under ZeRO 3 are merged, and this rank stores rows of the layers"
        raise ModelError(Problem("unplanned-adapter", what, fix=_MERGE))


def _is_sharded_by_rows(module: nn.Module) -> bool:
    """Whether `fully_shard` has sharded it, which gathers it before its forward."""
    return _is_of_rows(module._parameters.get("weight"))


def _is_of_rows(parameter: Any) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return not {*DATA_AXES}.isdisjoint(names or ())


def _base_of_whole_model(layer: Any) -> nn.Module:
    """The layer beside an adapter. Raises: ModelError `unplanned-adapter` where another pipeline stage has its
    weight."""
    base: nn.Module = layer.get_base_layer()
    if applied(base).absent:
        what = "this initialization of PEFT reads the weights of all layers, and this rank has those of its stages"
        raise ModelError(Problem("unplanned-adapter", what, fix=_FIRST))
    return base


def _refuse_of_shards(cls: Any, name: str, module_of: Callable[..., Any], fix: str) -> None:
    """Let a method raise ModelError `unplanned-adapter` where a module has parameters of which this rank stores shards.

    Args:
        cls: the class of PEFT; None, and a method that this version lacks, are left out.
        module_of: returns the module, from the object and from `base_layer=` of the call, if it has that.
    """
    stock = getattr(cls, name, None)
    if stock is None:
        return

    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {"base_layer": kwargs["base_layer"]} if "base_layer" in kwargs else {}
        if any(isinstance(parameter, DTensor) for parameter in module_of(self, **named).parameters()):
            what = f"{cls.__name__}.{name} of PEFT reads full weights, and this rank stores shards of them"
            raise ModelError(Problem("unplanned-adapter", what, fix=fix))
        return stock(self, *args, **kwargs)

    patches.change(cls, name, lambda: refusing, _refuse_of_shards)


# -- later prompts ---------------------------------------------------------------------------------------------------
# Prompts that PEFT puts around a model whose gradients are summed over data ranks: nothing sums theirs. PEFT is not
# imported: what is not imported when data axes are applied is as its authors wrote it.


def refuse_later_prompts() -> None:
    """Let PEFT, where it is imported, refuse prompts that train beside such a model."""
    model: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if model is not None:
        patches.replace(model, "get_prompt", _checked)


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.get_prompt`, which every forward calls. Raises: ModelError `added-parameter`."""

    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        _check(peft_model)
        return stock(peft_model, *args, **kwargs)

    return get_prompt


def _check(peft_model: Any) -> None:
    data = applied(peft_model.get_base_model()).data
    if data is None or applied(peft_model).data is not None or not torch.is_grad_enabled():
        return
    encoder = peft_model.prompt_encoder[peft_model.active_adapter]
    trains = any(parameter.requires_grad for parameter in encoder.parameters())
    if trains and mesh_spec(data.mesh).ranks(*DATA_AXES) > 1:
        what = "prompts were added after data axes were applied, whose gradients nothing sums over data ranks"
        fix = "get_peft_model(model, config) first, then parallelize_model or shard_data"
        raise ModelError(Problem("added-parameter", what, fix=fix))
