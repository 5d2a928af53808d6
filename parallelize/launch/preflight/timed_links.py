"""One timed collective along each axis: its bandwidth beside what its group should reach, and who has not come.

What a group should reach follows the rules that `fit` estimates by: the links in a node, or the cards of all ranks that
the group has on one host, and a start-up that grows with its ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import LaunchError, Problem, short_list
from parallelize.comm.meshes import mesh_spec
from parallelize.tools.analysis.cost.machine import Machine, Placement

CPU_BYTES, GPU_BYTES = 2 * 2**20, 64 * 2**20
_ROUNDS = 3
SLOW = 0.5  # of what the group should reach


@dataclass(frozen=True)
class TimedLink:
    """The slowest group of an axis.

    Attributes:
        in_node: the most ranks that a group has on one host.
        bytes_per_s: that each rank sends (bus bandwidth). assumed: what such a group should reach with this message, by
            the profile.
    """

    axis: str
    ranks: int
    in_node: int
    bytes_per_s: float
    assumed: float

    @property
    def is_slow(self) -> bool:
        return self.bytes_per_s < SLOW * self.assumed

    def line(self) -> str:
        where = f"{self.ranks} ranks" + (f", {self.in_node} on a host" if self.in_node < self.ranks else "")
        slow = ": slower than the profile that `fit` assumes" if self.is_slow else ""
        return (
            f"{self.axis} ({where}): all_reduce at {self.bytes_per_s / 1e9:.2f} GB/s, "
            f"{self.bytes_per_s / self.assumed:.0%} of the assumed {self.assumed / 1e9:.2f} GB/s{slow}"
        )


def timed_links(
    mesh: DeviceMesh, machine: Machine, store: Any, hosts: dict[int, str], limit_s: float
) -> list[TimedLink]:
    """The bandwidth of each axis with several ranks, the same on every rank. A collective.

    Raises: LaunchError `link-silent` with the ranks of a group that have not come to the collective.
    Cost: three all_reduces of 2 MB (64 MB on GPUs) an axis.
    """
    spec = mesh_spec(mesh)
    links = []
    for axis in (name for name in spec.names if spec.size(name) > 1):
        seconds = _slowest(_timed(mesh, axis, store, hosts, limit_s), mesh)
        links.append(compared(axis, machine, _placement(mesh, axis, hosts), _bytes(mesh), seconds))
    return links


def compared(axis: str, machine: Machine, placement: Placement, size: int, seconds: float) -> TimedLink:
    """An all_reduce of `size` bytes that took `seconds`, beside what its group should reach."""
    sent = 2 * (placement.ranks - 1) / placement.ranks * size
    expected_s = machine.messages_s("all_reduce", placement, sent, 1)
    return TimedLink(axis, placement.ranks, placement.in_node, sent / seconds, sent / expected_s)


def _placement(mesh: DeviceMesh, axis: str, hosts: Mapping[int, str]) -> Placement:
    """This rank's group on the hosts that its ranks run on. A rank whose host is unknown counts as on one with the
    others of that kind."""
    ranks = dist.get_process_group_ranks(mesh.get_group(axis))
    return Placement(len(ranks), max(Counter(hosts.get(rank, "") for rank in ranks).values()))


def _bytes(mesh: DeviceMesh) -> int:
    return CPU_BYTES if mesh.device_type == "cpu" else GPU_BYTES


def _timed(mesh: DeviceMesh, axis: str, store: Any, hosts: dict[int, str], limit_s: float) -> float:
    """Seconds of one all_reduce along an axis: the fastest of a few, after a first one."""
    data = torch.zeros(_bytes(mesh) // 4, device=mesh.device_type)
    group, rank = mesh.get_group(axis), dist.get_rank()
    store.set(f"link/{axis}/{rank}", "here")
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        work = dist.all_reduce(data, group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise _silent(axis, dist.get_process_group_ranks(group), store, hosts, error) from None
        if mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _silent(axis: str, ranks: list[int], store: Any, hosts: dict[int, str], error: Exception) -> LaunchError:
    absent = [rank for rank in ranks if not store.check([f"link/{axis}/{rank}"])]
    named = [f"{rank} on {hosts.get(rank, 'an unknown host')}" for rank in absent or ranks]
    what = f"an all_reduce along {axis} did not end; " + (
        f"ranks {short_list(named)} have not come"
        if absent
        else f"all of ranks {short_list(named)} have come, so a link is cut"
    )
    return LaunchError(
        Problem("link-silent", what, rows=(("said", str(error).splitlines()[0][:160]),), fix="look at that host")
    )


def _slowest(seconds: float, mesh: DeviceMesh) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)
