"""Whether a loader gives the ranks of one data rank the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallelize.applied.stored_slices import data_rank
from parallelize.errors import DataError, Problem
from parallelize.mesh import SAMPLE_AXES

_SHARDED_BY = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""Attributes in which samplers keep how many parts there are and which one they take: those of `DistributedSampler`,
of accelerate's samplers and data sets, and of the configuration that `datasets.split_dataset_by_node` leaves. Its dispatcher, which
has a `slice_fn`, sends each process a slice of what the first one reads."""
_INSIDE = ("batch_sampler", "sampler", "dataset", "_distributed")


def check_loader(loader: Any, mesh: Any) -> None:
    """Refuse a loader that divides its samples over other ranks than the data ranks of the mesh.

    `DistributedSampler`, accelerate's `prepare` and `split_dataset_by_node` divide over all processes unless told otherwise:
    then the tp, cp and pp ranks of one data rank get different samples.

    Args:
        loader: a DataLoader, or what a library made of one.
        mesh: a DeviceMesh with any axes.

    Raises: DataError `loader-over-world`, with the numbers of both.
    Cost: no communication.
    """
    index, count = data_rank(mesh, SAMPLE_AXES)
    for part in _parts(loader):
        for count_name, index_name in _SHARDED_BY:
            parts, part_index = getattr(part, count_name, None), getattr(part, index_name, None)
            if isinstance(parts, int) and isinstance(part_index, int) and (parts, part_index) != (count, index):
                raise DataError(_over_world(part, (count_name, parts), (index_name, part_index), (index, count)))
        if callable(getattr(part, "slice_fn", None)) and torch.distributed.get_world_size() > count:
            world = torch.distributed.get_world_size(), torch.distributed.get_rank()
            raise DataError(_over_world(part, ("num_processes", world[0]), ("process_index", world[1]), (index, count)))


def _parts(loader: Any) -> Iterator[Any]:
    """The loader's samplers and data sets, from the outside in."""
    seen: set[int] = set()
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [value for name in _INSIDE if (value := getattr(part, name, None)) is not None]


def _over_world(part: Any, parts: tuple[str, int], index: tuple[str, int], here: tuple[int, int]) -> Problem:
    data_index, count = here
    return Problem(
        "loader-over-world",
        f"the loader's {type(part).__name__} takes part {index[1]} of {parts[1]}; this rank is data rank {data_index} of {count}",
        fix=f"pass {parts[0]}={count} and {index[0]}={data_index}, or use GlobalBatches(len(dataset), size, mesh=mesh) as the "
        "DataLoader's batch_sampler, and let no other library prepare the loader",
    )
