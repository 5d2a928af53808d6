"""The store in which ranks find each other, opened without waiting for all of them: who is missing is for the roll call to say."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallelize.base.errors import LaunchError, Problem
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.launch.environment.launcher import Launcher


def rank_store(launcher: Launcher, limit_s: float, timeout_s: float) -> Any:
    """The store of all ranks, which rank 0 serves, or the agent of torchrun.

    Args:
        limit_s: how long rank 0 may take to serve it. timeout_s: of later calls of it.

    Raises: LaunchError `head-silent`.
    """
    if dist.is_initialized():  # by Ray
        return private_groups.default_store()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Any = dist.TCPStore(
            launcher.head,
            launcher.port,
            launcher.world_size,
            is_master=launcher.rank == 0 and not by_agent,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=not by_agent,
        )
    except (RuntimeError, ValueError) as error:
        what = f"the head node {launcher.head}:{launcher.port} has not answered within {limit_s:.0f} s"
        rows = (("said", str(error).splitlines()[0][:160]),)
        fix = "is rank 0 running there, and does a firewall let the port through?"
        raise LaunchError(Problem("head-silent", what, rows=rows, fix=fix)) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    return dist.PrefixStore(f"run/{attempt}", store)
