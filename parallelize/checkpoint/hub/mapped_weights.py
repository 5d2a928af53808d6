"""Weights that stay in their file: parameters as views of a private map, where a shard is one run of bytes in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.boxes import Box
from parallelize.checkpoint.format.device_pieces import Arena, torch_dtype
from parallelize.checkpoint.hub.folder import HubFolder
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh
from parallelize.checkpoint.run.meta_model import move_to_arena, place
from parallelize.state.stored_slices import named_once

T = torch.Tensor


class FolderRead(Protocol):
    """One read: a box of a tensor of the folder, and the view that it fills."""

    @property
    def source(self) -> str: ...
    @property
    def box(self) -> Box: ...
    @property
    def out(self) -> T: ...


def check_mappable(module: nn.Module, device: Any, was_meta: bool) -> None:
    """Raises: CheckpointError `not-mappable` for a model with values, on another device than the CPU, or under ZeRO."""
    reason = ""
    if not was_meta:
        reason = "the model has values, which are changed in place after everything was read"
    elif torch.device(device).type != "cpu":
        reason = f"the model is allocated on {torch.device(device)}"
    elif data_of(module) is not None or any(isinstance(part, FSDPModule) for part in module.modules()):
        reason = "ZeRO stores parameters in buffers of its own"
    if reason:
        fix = "build the model on the meta device, for the CPU, without ZeRO; or leave mapped out"
        raise CheckpointError(Problem("not-mappable", f"load_pretrained(mapped=True): {reason}", fix=fix))


def map_parameters(
    on_mesh: ModelOnMesh,
    hub: HubFolder,
    tensors: Sequence[tuple[str, LocalTensor]],
    loaded: Container[str],
    reads_of: Callable[[LocalTensor], Iterable[FolderRead]],
) -> tuple[set[str], list[LocalTensor]]:
    """Make parameters that were allocated, and not written to, views of the files; move all others to huge pages.

    Args:
        tensors: (name in the model, its local tensor) of all parameters and buffers. loaded: the names that the folder has.
        reads_of: what would fill a local tensor.

    Returns: the names of the parameters that are views, and every local tensor with its new memory.
    """
    memory: dict[str, T] = {}
    views, arena, by_name = set(), Arena(), {name: tensor for name, tensor in tensors if name in loaded}
    for names, parameter in named_once(on_mesh.module):
        name = on_mesh.canonical(names[0])
        view = (
            _view_of_file(hub, by_name[name].stored.local, list(reads_of(by_name[name]))) if name in by_name else None
        )
        if view is None:
            move_to_arena(parameter, arena)
        else:
            place(parameter, view)
            views.add(name)
        memory[name] = to_local(parameter)
    return views, [
        replace(tensor, stored=replace(tensor.stored, local=memory[name])) if name in memory else tensor
        for name, tensor in tensors
    ]


def _view_of_file(hub: HubFolder, local: T, reads: list[FolderRead]) -> T | None:
    """What a local tensor can be instead of being read, or None."""
    if len(reads) != 1 or torch_dtype(hub.tensors[reads[0].source][0]) != local.dtype or not local.is_contiguous():
        return None
    out = reads[0].out
    fills_it = out.numel() == local.numel() and out.data_ptr() == local.data_ptr() and out.stride() == local.stride()
    return hub.mapped(reads[0].source, reads[0].box) if fills_it and out.shape == local.shape else None
