"""A mesh of any size in one process: PyTorch's fake process group, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelize.base.errors import MeshError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.torch_private import torch_groups as private_groups


@contextmanager
def fake_mesh(spec: MeshSpec, rank: int = 0) -> Iterator[DeviceMesh]:
    """The mesh as `rank` sees it, within the block. It is on the CPU, and nothing is sent.

    Raises: MeshError `process-group-taken` where the process has a process group already.
    """
    if dist.is_initialized():
        fix = "call it before init_process_group, or in a separate process"
        raise MeshError(
            Problem("process-group-taken", "explaining a mesh needs a process without process groups", fix=fix)
        )
    dist.init_process_group("fake", rank=rank, world_size=spec.world_size, store=private_groups.fake_store())
    try:
        yield init_device_mesh("cpu", spec.sizes, mesh_dim_names=spec.names)
    finally:
        dist.destroy_process_group()
