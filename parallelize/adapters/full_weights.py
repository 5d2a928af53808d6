"""What PEFT would do with layers of which this rank stores shards, or none, and with prompts that nothing reduces.

Linears have the sizes of the full ones; what computes with a full weight is refused by name. This package
never imports PEFT: what is not loaded when a model is planned, cut or sharded stays unpatched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES
from parallelize.base.patches import active as patches
from parallelize.state.later_changes import roots_around, take_changes
from parallelize.state.records import applied

_FIRST = "before the plan: model = get_peft_model(model, config), then parallelize_model(model, mesh)"
_COMBINE = (
    "combine adapters before the plan; or save_adapter(model, folder) on every rank, then combine them in one process, "
    "and model.load_adapter(folder, name) here"
)
_MERGE_IN_ONE = "save_adapter(model, folder) on every rank, then merge in one process; or zero=2"
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


def refuse_merging_unplanned(layer: nn.Module, base: nn.Module) -> None:
    """Raises: ModelError `unplanned-adapter` where the layer has shards and its adapters, which were added later, do
    not: stages plan together, and one layer cannot ask for it."""
    own = {id(parameter) for parameter in base.parameters()}
    adapters = [parameter for parameter in layer.parameters() if id(parameter) not in own]
    weight = base._parameters.get(getattr(layer, "parameter_name", "weight"))
    if "tp" in _axes_of(weight) and adapters and not any(isinstance(parameter, DTensor) for parameter in adapters):
        what = "adapters that were added after the plan are merged in one layer, before the stages have planned them"
        raise ModelError(Problem("unplanned-adapter", what, fix="model.merge_adapter() on every rank"))


def refuse_merging_into_shards(layer: nn.Module, base: nn.Module) -> None:
    """Raises: ModelError `unplanned-adapter` where data ranks store rows of a layer (ZeRO 3), and its adapters in full,
    which were added later; or rows of adapters, and the layer's experts over `ep`."""
    bases = {id(parameter) for parameter in base.parameters()}
    adapters = [parameter for parameter in layer.parameters() if id(parameter) not in bases]
    name = getattr(layer, "parameter_name", "weight")
    weight = base._parameters.get(name)
    if any(map(_is_sharded_over_data, adapters)) and "ep" in _axes_of(weight):
        what = (
            f"ZeRO 3 shards the adapters of {name} over all data ranks, and {name} over others: ep divides the experts"
        )
        raise ModelError(Problem("unplanned-adapter", what, fix=_MERGE_IN_ONE))
    if _is_sharded_over_data(weight) and not all(map(_is_sharded_over_data, adapters)):
        what = "adapters that were added under ZeRO 3 are merged, and this rank stores rows of the layers"
        raise ModelError(Problem("unplanned-adapter", what, fix=_MERGE))


def _is_sharded_by_rows(module: nn.Module) -> bool:
    """Whether `fully_shard` has sharded its weight or its codes, which it gathers before the module's forward."""
    return any(map(_is_sharded_over_data, module._parameters.values()))


def _is_sharded_over_data(parameter: Any) -> bool:
    return not {*DATA_AXES}.isdisjoint(_axes_of(parameter))


def _axes_of(parameter: Any) -> tuple[str, ...]:
    """Of the mesh of a DTensor."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


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


_FIRST_OR_ZERO_2 = "get_peft_model(model, config) first, then parallelize_model(model, mesh, zero=3); or zero=2"
_COPY_WEIGHTS = ("modules_to_save", "trainable_token_indices", "token_indices")
"""Settings of PEFT that let an adapter begin with weights of the model."""


def add_to_sharded_units() -> None:
    """Let PEFT, where it is imported, freeze parameters while they are shards: what is gathered forgets it."""
    tuner: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    if tuner is not None:
        patches.replace(tuner, "inject_adapter", _resharded)


def _resharded(stock: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        units: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        config = self.peft_config[adapter_name]
        copied = [key for key in _COPY_WEIGHTS if getattr(config, key, None)]
        if units and copied:
            what = f"{copied[0]} of {type(config).__name__} copies full weights, of which ranks store shards (ZeRO 3)"
            raise ModelError(Problem("added-parameter", what, fix=_FIRST_OR_ZERO_2))
        for unit in units:
            unit.reshard()
        return stock(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def plan_before_merging() -> None:
    """Let PEFT have adapters planned when it merges them before a forward. Again where more modules of Python are
    known."""
    notes = patches.lease().notes
    if notes.get("modules seen") == len(sys.modules):
        return
    notes["modules seen"] = len(sys.modules)
    tuner: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    for name in ("merge_adapter", "_unload_and_optionally_merge"):
        if hasattr(tuner, name):
            patches.replace(tuner, name, _plan_before_merging_all)
    for name, layers in list(sys.modules.items()):
        if name.startswith("peft.tuners.") and hasattr(layers, "check_adapters_to_merge"):
            patches.replace(layers, "check_adapters_to_merge", _plan_before_merging_layer)


def _plan_before_merging_all(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a tuner that merges the adapters of all layers."""

    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        for root in roots_around(self.model.modules()):
            take_changes(root)
        return stock(self, *args, **kwargs)

    return merge


def _plan_before_merging_layer(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The function that each layer calls for the adapters to merge: also of layers that are merged by themselves."""

    def check(layer: Any, *args: Any, **kwargs: Any) -> Any:
        base = layer.get_base_layer()
        if applied(base).absent:  # another stage merges it
            return []
        for root in roots_around([layer, base]):
            if applied(root).stage_adapters is None:  # all stages plan together, and some may have no such layer
                take_changes(root)
        refuse_merging_unplanned(layer, base)
        refuse_merging_into_shards(layer, base)
        return stock(layer, *args, **kwargs)

    return check
