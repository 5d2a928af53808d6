"""What each rank does in the tests of checkpoints: save on one mesh, load on another, compare with nothing of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import build_mesh
from parallelize.checkpoint import optimizers
from parallelize.checkpoint.checkpointer import Checkpointer
from parallelize.checkpoint.held import Place, targets
from parallelize.pieces import data_rank
from parallelize.sharding import full_parameter
from parallelize.training import ParallelModel, parallelize_model
from parallelize.zero.apply import data_of
from tests.support.models import tiny_batch, tiny_model

OVERRIDES = {"llama": {"num_key_value_heads": 2}, "gpt2": {}, "phi3": {"num_key_value_heads": 2}}


def built(family: str, axes: dict[str, int], options: dict[str, Any], seed: int = 0) -> tuple[ParallelModel, Any]:
    """A small model of four layers on a mesh, and its optimiser."""
    model = tiny_model(family, seed=seed, num_hidden_layers=4, **OVERRIDES.get(family, {}))
    options = {"num_microbatches": axes.get("pp", 1), **options}
    parallel = parallelize_model(model, build_mesh("cpu", **axes), **options)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def train(parallel: ParallelModel, optimizer: Any, first: int, steps: int) -> list[float]:
    """Losses of some steps on the global batches number `first` and so on."""
    losses = []
    place, ranks = data_rank(parallel.mesh, ("dp_replicate", "dp"))
    for step in range(first, first + steps):
        ids, labels = (t.chunk(ranks)[place] for t in tiny_batch(batch=8, length=3, seed=step))
        losses.append(float(parallel.step(ids, targets=labels)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(module: nn.Module, name: str, value: Any) -> torch.Tensor:
    """A whole tensor, by the way that has nothing to do with checkpoints."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    record = module.__dict__.get("_parallelize_record")
    return full_parameter(module, name, value) if record is not None else value.full_tensor().detach()


def everything(parallel: ParallelModel, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of the whole model, on rank 0. A collective."""
    module, data = parallel.module, data_of(parallel.module)
    stepped = {id(s.param): s.stepped for s in data.shards} if data is not None else {}
    cut = module.__dict__.get("_parallelize_cut")
    found = {}
    for name, parameter in module.named_parameters():
        first = cut.facts.owners[name] if cut is not None else name
        one = stepped.get(id(parameter), parameter)
        found[f"model/{first}"] = full(module, name, one if data is not None and data.masters else parameter)
        for key, value in optimizer.state.get(one, {}).items():
            found[f"optimizer/{first}/{key}"] = full(module, name, value)
    if cut is None or not dist.is_initialized():
        return found
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {key: value for one in reversed(everyone) for key, value in one.items()}


def save_source(rank: int, family: str, axes: dict[str, int], options: dict[str, Any], root: str) -> list[float]:
    """Two steps, a checkpoint, the whole state beside it; then the losses of three more steps."""
    parallel, optimizer = built(family, axes, options)
    train(parallel, optimizer, 0, 2)
    with Checkpointer(root, parallel, optimizer=optimizer) as checkpoints:
        checkpoints.save(2)
    whole = everything(parallel, optimizer)
    if rank == 0:
        save_file({key: value.contiguous() for key, value in whole.items()}, Path(root) / "reference.safetensors")
    return train(parallel, optimizer, 2, 3)


def load_sources(
    rank: int, family: str, axes: dict[str, int], options: dict[str, Any], roots: dict[str, tuple[str, list[float]]]
) -> list[str]:
    """Load each of them, into other weights and other state; what is not as it was, as text."""
    parallel, optimizer = built(family, axes, options, seed=1)
    train(parallel, optimizer, 7, 1)
    wrong = []
    for source, (root, losses) in roots.items():
        with Checkpointer(root, parallel, optimizer=optimizer) as checkpoints:
            assert checkpoints.resume() == 2
        wrong += [
            f"{source}: {key}"
            for key in different(parallel, optimizer, load_file(Path(root) / "reference.safetensors"))
        ]
        after = train(parallel, optimizer, 2, 3)
        if any(abs(a - b) > 5e-6 * abs(b) for a, b in zip(after, losses, strict=True)):
            wrong.append(f"{source}: losses {after} for {losses}")
    return wrong


def different(parallel: ParallelModel, optimizer: Any, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of what this rank holds that is not bit-equal to its part of the whole."""
    place = Place(parallel.module, parallel.mesh)
    held, _ = optimizers.collect(place, "optimizer", optimizer, lambda where, tensor: where)
    seen, wrong = set(), []
    for one in [*targets(place), *held]:
        seen.add(one.name)
        whole = wanted[one.name].to(one.stored.local.dtype)
        equal = all(torch.equal(one.stored.local[pair.local], whole[pair.full]) for pair in one.stored.pieces)
        wrong += [] if equal and one.stored.shape == tuple(whole.shape) else [one.name]
    steps = {
        name: float(state["step"])
        for _, p, name, _ in optimizers.parameters_of(place, optimizer)
        if (state := optimizer.state.get(p))
    }
    wrong += [name for name, step in steps.items() if step != float(wanted[f"optimizer/{name}/step"])]
    if place.cut is None and seen | {f"optimizer/{name}/step" for name in steps} != set(wanted):
        wrong.append("the set of names")
    return wrong
