"""Which ranks a node has, and which groups of a mesh cross nodes. Torch-free arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.base.errors import LaunchError, Problem
from parallelize.base.mesh import MeshSpec, folded, folding_order


@dataclass(frozen=True)
class RankMap:
    """Ranks in blocks: node n has the ranks n * ranks_per_node and following."""

    mesh: MeshSpec
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.mesh.world_size // self.ranks_per_node

    def lines(self) -> list[str]:
        """One line a node: its ranks, and their coordinates from the first to the last."""
        lines = []
        for node in range(self.nodes):
            first, last = node * self.ranks_per_node, (node + 1) * self.ranks_per_node - 1
            ends = " to ".join(_coordinates_text(self.mesh, rank) for rank in dict.fromkeys((first, last)))
            lines.append(f"node {node}: ranks {first}-{last} ({ends})")
        return lines


def rank_map(mesh: MeshSpec, expert_ranks: int, ranks_per_node: int) -> RankMap:
    """The map that keeps tp and experts inside nodes.

    Args:
        ranks_per_node: the most that a node takes.

    Raises: LaunchError `uneven-nodes` where ranks do not fill nodes; `crosses-nodes` where a group of tp, or of
        experts, would have ranks on several nodes.
    """
    per_node = min(ranks_per_node, mesh.world_size)
    if mesh.world_size % per_node:
        fitting = [n for n in range(1, per_node + 1) if mesh.world_size % n == 0]
        what = f"{mesh.world_size} ranks of {mesh} do not fill nodes of {per_node}"
        raise LaunchError(Problem("uneven-nodes", what, fix=f"--ranks-per-node {fitting[-1]}, or another mesh"))
    placed = RankMap(mesh, per_node)
    hosts = {rank: str(rank // per_node) for rank in range(mesh.world_size)}
    crossing = crossing_groups(mesh, expert_ranks, hosts)
    if crossing:
        problems = [
            Problem(
                "crosses-nodes",
                f"{len(groups)} groups of {axis} cross nodes of {per_node} ranks, such as ranks {list(groups[0])}",
                fix=f"make {axis} at most {per_node} and a divisor of it, and name tp last in the mesh {mesh}",
            )
            for axis, groups in crossing.items()
        ]
        raise LaunchError(*problems)
    return placed


def crossing_groups(mesh: MeshSpec, expert_ranks: int, host_of: Mapping[int, str]) -> dict[str, list[tuple[int, ...]]]:
    """The groups of tp, and of experts where they are divided, that have ranks on several hosts, by axis."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    if mesh.ranks("tp") > 1:
        groups["tp"] = mesh.groups("tp")
    if expert_ranks > 1:
        groups["ep"] = expert_groups(mesh, expert_ranks)
    return {
        axis: crossing
        for axis, ranks in groups.items()
        if (crossing := [group for group in ranks if len({host_of.get(rank, "") for rank in group}) > 1])
    }


def expert_groups(mesh: MeshSpec, expert_ranks: int) -> list[tuple[int, ...]]:
    """The groups of ranks that have one copy of all experts together."""
    ordered = MeshSpec([(name, mesh.size(name)) for name in folding_order(mesh)])
    rank_at = [mesh.rank(**ordered.coordinates(index)) for index in range(ordered.world_size)]
    return [tuple(rank_at[index] for index in group) for group in folded(ordered, expert_ranks).groups("ep")]


def _coordinates_text(mesh: MeshSpec, rank: int) -> str:
    return " ".join(f"{axis}={index}" for axis, index in mesh.coordinates(rank).items())
