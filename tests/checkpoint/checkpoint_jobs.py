"""What each rank does in the tests of checkpoints: save on one mesh, load on another, compare without the checkpoint's
code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import build_mesh
from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.axes.zero.shard_data import data_of
from parallelize.checkpoint.run import optimizer_state as optimizers
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.local_tensors import ModelOnMesh, targets
from parallelize.comm.mesh_view import MeshView
from parallelize.state.full_values import full_parameter
from parallelize.training.apply_axes import parallelize_model
from tests.support.models import tiny_batch, tiny_model

OVERRIDES = {"llama": {"num_key_value_heads": 2}, "gpt2": {}, "phi3": {"num_key_value_heads": 2}}


def small_model(family: str, seed: int = 0) -> nn.Module:
    """A small model of four layers."""
    return tiny_model(family, seed=seed, num_hidden_layers=4, **OVERRIDES.get(family, {}))


def built(
    family: str, axes: dict[str, int], options: dict[str, Any], seed: int = 0, model: nn.Module | None = None
) -> tuple[ParallelModel, Any]:
    """A small model of four layers on a mesh, and its optimizer. `model`: already built, where ranks are threads."""
    model = small_model(family, seed) if model is None else model
    options = {"num_microbatches": axes.get("pp", 1), **options}
    parallel = parallelize_model(model, build_mesh("cpu", **axes), **options)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def train(parallel: ParallelModel, optimizer: Any, first: int, steps: int) -> list[float]:
    """Losses of some steps on the global batches number `first` and so on."""
    losses = []
    index, ranks = MeshView(parallel.mesh).place("dp_replicate", "dp")
    for step in range(first, first + steps):
        ids, labels = (t.chunk(ranks)[index] for t in tiny_batch(batch=8, length=3, seed=step))
        losses.append(float(parallel.step(ids, targets=labels)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(module: nn.Module, name: str, value: Any) -> torch.Tensor:
    """A full tensor, without the code of checkpoints."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    record = module._applied.plan if "_applied" in vars(module) else None
    return full_parameter(module, name, value) if record is not None else value.full_tensor().detach()


def everything(parallel: ParallelModel, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the full model, on rank 0. A collective."""
    module, data = parallel.module, data_of(parallel.module)
    stepped = {id(s.param): s.stepped for s in data.shards} if data is not None else {}
    cut = module._applied.cut if "_applied" in vars(module) else None
    tensors = {}
    for name, parameter in module.named_parameters():
        first = cut.facts.parameter_fqns[name] if cut is not None else name
        own = stepped.get(id(parameter), parameter)
        tensors[f"model/{first}"] = full(module, name, own if data is not None and data.masters else parameter)
        for key, value in optimizer.state.get(own, {}).items():
            tensors[f"optimizer/{first}/{key}"] = full(module, name, value)
    if cut is None or not dist.is_initialized():
        return tensors
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, tensors)
    return {key: value for tensors in reversed(by_rank) for key, value in tensors.items()}


def save_source(rank: int, family: str, axes: dict[str, int], options: dict[str, Any], root: str) -> list[float]:
    """Two steps, a checkpoint, and the full state next to it; then the losses of three more steps."""
    parallel, optimizer = built(family, axes, options)
    train(parallel, optimizer, 0, 2)
    with Checkpointer(root, parallel, optimizer=optimizer) as checkpoints:
        checkpoints.save(2)
    state = everything(parallel, optimizer)
    if rank == 0:
        save_file({key: value.contiguous() for key, value in state.items()}, Path(root) / "reference.safetensors")
    return train(parallel, optimizer, 2, 3)


def different(parallel: ParallelModel, optimizer: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of this rank's tensors that are not bit-equal to their part of the full tensors."""
    on_mesh = ModelOnMesh(parallel.module, parallel.mesh)
    moments, _ = optimizers.collect(on_mesh, "optimizer", optimizer, lambda where, tensor: where)
    seen, wrong = set(), []
    for tensor in [*targets(on_mesh), *moments]:
        stored = tensor.stored
        seen.add(tensor.name)
        full = expected[tensor.name].to(stored.local.dtype)
        equal = all(torch.equal(stored.local[pair.local], full[pair.full]) for pair in stored.slices)
        wrong += [] if equal and stored.shape == tuple(full.shape) else [tensor.name]
    steps = {
        stepped.local.name: float(state["step"])
        for stepped in optimizers.parameters_of(on_mesh, optimizer)
        if (state := optimizer.state.get(stepped.parameter))
    }
    wrong += [name for name, step in steps.items() if step != float(expected[f"optimizer/{name}/step"])]
    if on_mesh.cut is None and seen | {f"optimizer/{name}/step" for name in steps} != set(expected):
        wrong.append("the set of names")
    return wrong
