"""The variables by which torch.distributed finds its ranks, from what the launcher said. Torch-free."""

from __future__ import annotations

from collections.abc import MutableMapping

from parallelize.launch.environment.launcher import Launcher


def set_torch_variables(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a process that is a rank."""
    values = {
        "RANK": launcher.rank,
        "WORLD_SIZE": launcher.world_size,
        "LOCAL_RANK": launcher.local_rank,
        "LOCAL_WORLD_SIZE": launcher.local_world_size,
        "MASTER_ADDR": launcher.head,
        "MASTER_PORT": launcher.port,
    }
    environ.update({name: str(value) for name, value in values.items()})
