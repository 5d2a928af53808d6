"""Ops of a forward that runs on tensors without values.

A forward may make constants where nothing says the device, as in `torch.arange(16)`. They stay on the CPU, where code
can read them, until they meet a tensor of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor


def called(func: Any, args: tuple, kwargs: dict, call: Callable[[], Any]) -> Any:
    """What an op returns. Where it is refused because only some of its tensors have values, none has.

    call: runs it with these arguments.
    """
    try:
        return call()
    except RuntimeError:
        leaves = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
        if len({leaf.is_meta for leaf in leaves}) < 2:
            raise
        args, kwargs = private.tree_map(without_values, (args, kwargs))
        return func(*args, **kwargs)


def without_values(value: Any) -> Any:
    """A tensor on the device meta; anything else itself."""
    return value.to("meta") if isinstance(value, T) else value
