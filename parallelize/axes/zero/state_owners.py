"""Whose shards an optimizer's state dict has: on another rank of as many they would be taken for that rank's own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import Optimizer

from parallelize.base.errors import ModelError, Problem
from parallelize.comm.mesh_view import MeshView

OWNER = "shards of"
"""Beside "state" and "param_groups": axis -> (the rank along it, its size), of the axes over which state is sharded."""


def remember_owner(built: Optimizer, mesh: MeshView, zero: int, folds: bool) -> None:
    """Let `state_dict()` say whose shards it has, and `load_state_dict()` refuse those of another rank.

    A state dict of another mesh, or without an owner, is loaded as PyTorch loads it.

    Args:
        built: the optimizer. mesh: of its model.
        zero: the ZeRO stage. folds: whether experts are divided over data axes.
    """
    place = _place(mesh, zero, folds)

    def add(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[OWNER] = place

    built.register_state_dict_post_hook(add)
    built.register_load_state_dict_pre_hook(partial(_refuse_another, place))


def _place(mesh: MeshView, zero: int, folds: bool) -> dict[str, tuple[int, int]]:
    spec = mesh.spec
    axes = {"pp", "tp", *([spec.shard_axis] if zero else []), *(spec.data_axes if folds else [])}
    sizes = {axis: spec.ranks(axis) for axis in spec.names if axis in axes}
    return {axis: (mesh.index(axis), size) for axis, size in sizes.items() if size > 1}


def _refuse_another(place: dict[str, tuple[int, int]], _: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raises: ModelError `state-of-other-rank`."""
    saved = state_dict.get(OWNER, place)
    if saved != place and {axis: size for axis, (_, size) in saved.items()} == {
        axis: size for axis, (_, size) in place.items()
    }:
        theirs, own = (", ".join(f"{axis} {rank}" for axis, (rank, _) in each.items()) for each in (saved, place))
        what = f"this state dict has the shards of the rank {theirs}, and this rank is {own}"
        fix = "load on each rank what it has saved itself; or save and resume by a Checkpointer, on any mesh"
        raise ModelError(Problem("state-of-other-rank", what, fix=fix))
