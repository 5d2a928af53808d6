"""The sizes that PEFT reads of a linear of which this rank stores shards: it is told those of the full one.

PEFT is not imported: what is not imported when a model is planned or sharded is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.applied.records import applied
from parallelize.mesh import DATA_AXES


def tell_full_sizes() -> None:
    """Let PEFT, where it is imported, make adapters of planned and sharded linears in their full sizes."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    stock = getattr(layers, "_get_in_out_features", None)
    if stock is not None and not isinstance(stock, FullSizes):
        layers._get_in_out_features = FullSizes(stock)


class FullSizes:
    """PEFT's function that returns the input and output features of a layer. stock: as PEFT wrote it."""

    def __init__(self, stock: Callable[[nn.Module], Any]):
        self.stock = stock

    def __call__(self, module: nn.Module) -> Any:
        if isinstance(module, nn.Linear) and (applied(module).planned is not None or _is_sharded_by_rows(module)):
            return module.in_features, module.out_features
        return self.stock(module)


def _is_sharded_by_rows(module: nn.Module) -> bool:
    """Whether `fully_shard` has sharded it, which gathers it before its forward."""
    weight: Any = module._parameters.get("weight")
    names = weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else None
    return not {*DATA_AXES}.isdisjoint(names or ())
