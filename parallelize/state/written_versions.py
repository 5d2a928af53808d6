"""PyTorch's guard against weights that are changed between forward and backward, for planned parameters.

Autograd raises an error in backward if a tensor that forward saved was written to since; it compares version counters. A planned
forward saves the local tensor of a parameter, and an optimizer that writes to the DTensor changes the counter of the DTensor
alone. So the counters of local tensors are changed after each step of any optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import mark_of


def count_optimizer_writes() -> None:
    """Watch the steps of all optimizers of this process."""
    patches.hook("hook after optimizer steps", register_optimizer_step_post_hook, _count_writes)


def _count_writes(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    written = [
        private.local_of(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, DTensor) and mark_of(parameter).own
    ]
    if written:
        torch.autograd.graph.increment_version(written)


def writes_to(tensor: torch.Tensor) -> int:
    """A number that every counted write to a tensor, or to the local tensor of a DTensor, raises."""
    return sum(part._version for part in (tensor, private.plain_local(tensor)) if not part.is_inference())
