"""A position in the data belongs to a data rank: ranks along cp, which have the same samples, get the same one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from parallelize.base.errors import CheckpointError
from parallelize.base.mesh import MeshSpec
from parallelize.checkpoint.run import run_state
from parallelize.comm.mesh_view import MeshView
from tests.training.data.test_global_batches import Mesh


class Position:
    """A position that depends on the rank and cannot be merged."""

    def __init__(self, at: int):
        self.at = at

    def state_dict(self):
        return {"at": self.at}


def ranks_of(**sizes: int):
    """Each rank of a mesh, as runs describe it."""
    spec = MeshSpec(**sizes)
    for rank in range(spec.world_size):
        at = spec.coordinates(rank)
        yield SimpleNamespace(place=MeshView(Mesh(sizes, **at)).place, coordinates=at, spec=spec)


def saved_by(positions, **sizes: int):
    saved = {}
    for rank, at in zip(ranks_of(**sizes), positions, strict=True):
        saved |= run_state.collect_data(rank, Position(at), None)
    return json.loads(json.dumps(saved))


def loaded_by(saved, saved_mesh, **sizes: int):
    given = [[axis, size] for axis, size in saved_mesh.items()]
    return [run_state.decoded_data(rank, Position(0), saved, None, given)["at"] for rank in ranks_of(**sizes)]


def test_ranks_along_cp_share_the_position_of_their_data_rank():
    saved = saved_by([10, 10, 20, 20], dp=2, cp=2)
    assert saved.keys() == {"0", "1"}
    assert loaded_by(saved, {"dp": 2, "cp": 2}, dp=2, cp=2) == [10, 10, 20, 20]
    assert loaded_by(saved, {"dp": 2, "cp": 2}, dp=2) == [10, 20]
    assert loaded_by(saved_by([10, 20], dp=2), {"dp": 2}, dp=2, cp=3, tp=2) == [10] * 6 + [20] * 6
    with pytest.raises(CheckpointError) as caught:  # one rank would go on where the other one was
        loaded_by(saved_by([10, 20], dp=2), {"dp": 2, "cp": 1}, dp=1, cp=2)
    assert caught.value.slugs == ("data-position",)


def test_checkpoints_with_a_position_of_each_rank_along_cp_still_load():
    saved = {str(rank): {"at": at} for rank, at in enumerate([10, 10, 10, 20, 20, 20])}
    mesh = {"dp": 2, "cp": 3}
    assert loaded_by(saved, mesh, dp=2, cp=3) == [10, 10, 10, 20, 20, 20]
    assert loaded_by(saved, mesh, dp_replicate=2, tp=2) == [10, 10, 20, 20]
    assert loaded_by({"0": {"at": 5}, "1": {"at": 5}}, {"cp": 2}, dp=3) == [5, 5, 5]
    many = {str(rank): {"at": rank} for rank in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)}
    assert loaded_by(many, {"dp": 12}, dp=12) == list(range(12)), "in the order of numbers, not of texts"
