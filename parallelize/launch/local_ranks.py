"""How many ranks a machine starts, and how many after some have failed."""

from __future__ import annotations

import torch

from parallelize.base.errors import LaunchError, ParallelizeError, Problem
from parallelize.launch.config.run_config import RunConfig
from parallelize.launch.environment.launcher import Launcher


def count_ranks(config: RunConfig, launcher: Launcher, requested: int | None) -> int:
    """Ranks of this node: what is asked for, else what the launcher says, else the mesh's part, else the GPUs.

    Raises: LaunchError `uneven-nodes`, `no-gpu`.
    """
    gpus = torch.cuda.device_count() if _uses_gpus(config) else 0
    if requested is not None or launcher.ranks_per_node is not None:
        ranks = requested if requested is not None else launcher.ranks_per_node or 1
    elif config.mesh is None:
        ranks = max(gpus, 1)
    else:
        ranks, rest = divmod(config.mesh.world_size, launcher.nodes)
        if rest:
            what = f"{config.mesh.world_size} ranks of the mesh {config.mesh} do not divide over {launcher.nodes} nodes"
            raise LaunchError(
                Problem("uneven-nodes", what, config.place("mesh"), fix="another mesh, or another number of nodes")
            )
    if _uses_gpus(config) and ranks > gpus:
        what = f"{ranks} ranks need {ranks} GPUs, and this machine has {gpus}"
        raise LaunchError(Problem("no-gpu", what, config.place("mesh"), fix="--ranks N, another mesh, or device: cpu"))
    return ranks


def _uses_gpus(config: RunConfig) -> bool:
    return config.device == "cuda" or (not config.device and torch.cuda.is_available())


def fewer_ranks(config: RunConfig, ranks: int) -> int | None:
    """The largest number below `ranks` with a mesh that fits; None where there is none. Cost: a `fit` of each number
    tried."""
    from parallelize.launch.preflight.mesh_choice import choose_mesh
    from parallelize.launch.preflight.prediction import machine_of, subject_of

    device = "cuda" if _uses_gpus(config) else "cpu"
    subject, machine = subject_of(config), machine_of(config, device)
    for count in range(ranks - 1, 0, -1):
        try:
            choose_mesh(config, count, subject, machine, other=True)
        except ParallelizeError:
            continue
        return count
    return None
