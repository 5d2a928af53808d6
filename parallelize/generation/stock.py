"""`transformers`' own `generate` on a planned model.

Most of it needs nothing: each rank's cache holds the keys and values of its own heads, since it takes its sizes from what the
layers hand it, and one token at a time leaves sequence parallelism off. While it runs, two things are different: a head that
keeps its logits sharded gathers them, and every rank draws what the first would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.context.state import context_of
from parallelize.errors import ModelError, Problem
from parallelize.fuse_loss import DEFERRED
from parallelize.groups import Group
from parallelize.pipeline.cut import cut_of
from parallelize.sharded_logits import ShardedLogits
from parallelize.sharding import record_of
from parallelize.styles.contract import Edge


def install_generation(module: nn.Module) -> None:
    """Let a planned model's own `generate` run as said above. A model without one is left alone."""
    if callable(getattr(type(module), "generate", None)) and "generate" not in module.__dict__:
        module.__dict__["generate"] = MethodType(_generate, module)
        if hasattr(module, "_get_static_cache_init_shape"):  # counts whole heads; without it the first keys tell
            module.__dict__["_get_static_cache_init_shape"] = _unknown_shape


def _unknown_shape() -> None:
    return None


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_split(self)
    record = record_of(self)
    assert record is not None
    with whole_logits(self), drawing_alike(record.group, torch.device(record.mesh.device_type)):
        return type(self).generate(self, *args, **kwargs)


def refuse_split(module: nn.Module) -> None:
    """Raises: ModelError `cut-model` where other ranks hold some of the model's stages; `generate-over-cp` where others see
    some of a sequence's tokens, so that the last position's logits are not on every rank."""
    cut, context = cut_of(module), context_of(module)
    if cut is not None and len(cut.mine) < len(cut.places):
        what = f"this rank holds {len(cut.mine)} of the {len(cut.places)} stages of {type(module).__name__}"
        fix = "save it, and generate on a mesh without pp: any mesh loads what another has saved"
        raise ModelError(Problem("cut-model", what, fix=fix))
    if context is not None and context.group.size > 1:
        what = f"{type(module).__name__} is on cp: its ranks hold other rows of a sequence, and no cache is split over them"
        fix = "save it, and generate on a mesh without cp: any mesh loads what another has saved"
        raise ModelError(Problem("generate-over-cp", what, fix=fix))


@contextmanager
def whole_logits(module: nn.Module) -> Iterator[None]:
    """Inside, heads that keep their logits sharded over the vocabulary gather them (one all-gather a forward)."""
    record = record_of(module)
    rows = record.resolved.modules.values() if record is not None else ()
    with ExitStack() as hooks:
        for row in rows:
            if row.contract.leave is Edge.VOCABULARY or row.contract.compute == DEFERRED:
                hooks.callback(module.get_submodule(row.fqn).register_forward_hook(_gather).remove)
        yield


def _gather(module: nn.Module, args: Any, out: Any) -> Any:
    return out.full_tensor() if isinstance(out, ShardedLogits) else out


@contextmanager
def drawing_alike(group: Group, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators of every rank are those of the group's first.

    Afterwards a rank whose generators were the first's goes on with it; another goes on where it was.

    Cost: one broadcast of the generators' states, 5 KB on a CPU.
    """
    if group.size == 1:
        yield
        return
    mine = _states(device)
    first = mine.to(device, copy=True)
    group.broadcast(first, 0)
    first = first.cpu()
    _set_states(first, device)
    try:
        yield
    finally:
        if not torch.equal(first, mine):
            _set_states(mine, device)


def _states(device: torch.device) -> torch.Tensor:
    """The states of torch's CPU generator and the device's, as bytes."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state()]
    return torch.cat([torch.get_rng_state(), *own])


def _set_states(states: torch.Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(states[:size].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[size:].clone())
