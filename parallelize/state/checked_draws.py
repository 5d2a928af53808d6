"""A check before each op that draws numbers into a DTensor, or like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private

aten = torch.ops.aten

_INTO = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_")
_LIKE = ("randn_like", "rand_like", "randint_like")
DRAWS_INTO = {aten.bernoulli_.float, *(getattr(aten, name).default for name in _INTO)}
DRAWS_LIKE = {aten.randint_like.low_dtype, *(getattr(aten, name).default for name in _LIKE)}


def check_draws(check: Callable[[str, Any], None]) -> None:
    """Call `check(name of the op, DTensor)` before each of these ops.

    The op then runs as always, of which a handler takes the place: on local tensors, and on devices with a generator that knows
    of shards, without the handler.
    """
    handlers = private.dtensor_handlers

    def handle(op: Any, args: tuple, kwargs: dict) -> Any:
        target = args[0]
        check(op._schema.name.removeprefix("aten::"), target)
        if target.device.type in ("cpu", "meta") and not any(placement.is_partial() for placement in target.placements):
            drawn = op(private.local_of(target), *args[1:], **kwargs)
            spec = private.spec_of(target)
            return target if op in DRAWS_INTO else private.wrap(drawn, private.with_dtype(spec, drawn))
        handlers.pop(op, None)  # another thread may miss a check, no more
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handle

    for op in DRAWS_INTO | DRAWS_LIKE:
        handlers.setdefault(op, handle)
