"""Long sequences on real processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallelize import Checkpointer, build_mesh, parallelize_model
from tests.support.context import alone, batch_of, error_of, family, on_mesh


def equals_alone(
    rank: int, name: str, sizes: dict[str, int], options: dict[str, Any], packed: bool
) -> tuple[float, str]:
    """The worst relative error against the same model in one process."""
    model, (ids, targets) = family(name, num_hidden_layers=2), batch_of(19, 4)
    inputs = {}
    if packed:
        inputs = {"position_ids": torch.cat([torch.arange(8), torch.arange(11)]).expand(4, -1).contiguous()}
    expected = alone(model, ids, targets, **inputs)
    return error_of(on_mesh(model, sizes, ids, targets, inputs, **options), expected)


def moved_between_meshes(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of two steps on cp after a checkpoint, and of the same two steps on dp, resumed from it."""
    size = dist.get_world_size()
    over_cp = parallelize_model(family("llama"), build_mesh("cpu", dp=1, cp=size), zero=1)
    first = over_cp.optimizer(torch.optim.AdamW, lr=1e-2)
    steps = [batch_of(length, 4) for length in (19, 8, 33)]
    _step(over_cp, first, *steps[0])
    with Checkpointer(folder, over_cp, optimizer=first) as checkpoints:
        checkpoints.save(1)
    over_dp = parallelize_model(family("llama", seed=5), build_mesh("cpu", dp=size), zero=1)
    second = over_dp.optimizer(torch.optim.AdamW, lr=1e-2)
    with Checkpointer(folder, over_dp, optimizer=second) as checkpoints:
        checkpoints.resume()
    shards = [[x.chunk(size)[rank] for x in step] for step in steps]
    return (
        [_step(over_cp, first, *step) for step in steps[1:]],
        [_step(over_dp, second, *shard) for shard in shards[1:]],
    )


def _step(parallel: Any, optimizer: Any, ids: torch.Tensor, targets: torch.Tensor) -> float:
    loss = parallel.step(input_ids=ids, targets=targets)
    parallel.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)
