"""The weight of a quantized linear, as its attribute `weight` returns it: computed for the caller, and not to be written.

Merging an adapter writes `layer.weight.data += delta`, which would change a copy that nobody reads again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private

_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__set__")
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class _RefusesWrites:
    """Mixin: a tensor whose in-place operations are refused. What other operations return is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(next(iter((*args, *(kwargs or {}).values())), None), _RefusesWrites):
            raise written_weight()
        with private.plain_functions():
            out = func(*args, **(kwargs or {}))
        return not_written(out) if func == _DATA else out


def not_written(weight: torch.Tensor) -> torch.Tensor:
    """The same tensor, as one that refuses to be written."""
    if isinstance(weight, _RefusesWrites):
        return weight
    weight = weight.detach()
    if type(weight) is torch.Tensor:
        return weight.as_subclass(_class_of(torch.Tensor))
    weight.__class__ = _class_of(type(weight))  # a DTensor
    return weight


@lru_cache(maxsize=8)
def _class_of(kind: type) -> Any:
    return type(f"Unwritable{kind.__name__}", (_RefusesWrites, kind), {})


def written_weight() -> ModelError:
    """The error of a write into the weight of a quantized linear."""
    what = "the weight of a quantized linear was written (merging an adapter does it): it is computed from codes, which do not change"
    fix = "merge into weights that are not quantized: on one process dequantize(model), then merge_and_unload(); "
    fix += "of a parallel model save_adapter(), and load the adapter on the unquantized model"
    return ModelError(Problem("quantized-weight", what, fix=fix))
