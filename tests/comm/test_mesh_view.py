"""A mesh as one of its ranks sees it."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from parallelize import build_mesh
from parallelize.comm.mesh_view import MeshView
from tests.support.threads import run_ranks


def test_each_rank_finds_its_place_and_its_groups():
    def job(rank):
        view = MeshView(build_mesh("cpu", pp=2, dp=2, tp=2))
        data = torch.tensor([float(rank)])
        view.data_group.all_reduce(data)
        return view.position, view.place("pp", "tp"), view.sample_place, view.group("dp", "cp").ranks, float(data)

    for rank, (position, place, samples, group, summed) in enumerate(run_ranks(8, job)):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert (position, place, samples) == (rank, (2 * pp + tp, 4), (dp, 2))
        assert group == (4 * pp + tp, 4 * pp + 2 + tp) and summed == sum(group)


def test_an_axis_that_the_mesh_lacks_has_one_rank():
    def job(rank):
        view = MeshView(build_mesh("cpu", tp=2))
        return view.index("pp"), view.sample_place, view.group("dp", "cp").size, view.data_group.size, view.world.ranks

    assert run_ranks(2, job) == [(0, (0, 1), 1, 1, (0, 1))] * 2


def test_a_mesh_without_names_has_a_view():
    def job(rank):
        view = MeshView(init_device_mesh("cpu", (2,)))
        return view.spec.names, view.index("tp"), view.group("tp").ranks

    assert run_ranks(2, job) == [(("tp",), rank, (0, 1)) for rank in range(2)]


def test_a_view_is_handed_down():
    def job(rank):
        view = MeshView(build_mesh("cpu", dp=2))
        return MeshView.of(view) is view and MeshView.of(view.device_mesh).spec == view.spec

    assert run_ranks(2, job) == [True, True]


def test_experts_see_the_same_ranks_along_other_axes():
    def job(rank):
        view = MeshView(build_mesh("cpu", dp=2, cp=1, tp=2)).folded(4)
        return view.spec.axes, view.index("ep"), view.group("ep").ranks

    assert run_ranks(4, job) == [((("edp", 1), ("ep", 4)), rank, (0, 1, 2, 3)) for rank in range(4)]


def test_an_axis_tp_of_one_rank_is_added_once():
    def job(rank):
        view = MeshView(build_mesh("cpu", dp=2)).with_tp()
        return view.spec.axes, view.with_tp() is view, view.tp.size()

    assert run_ranks(2, job) == [((("dp", 2), ("tp", 1)), True, 1)] * 2


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [([0, 1], ("tp",)), ([1, 3], ("dp",)), ([0, 1, 2, 3], ("dp", "tp")), ([0, 3], ()), ([0, 9], ()), ([], ())],
)
def test_the_axes_of_a_group_are_the_fewest_that_have_its_ranks(ranks, axes):
    def job(rank):
        return MeshView(build_mesh("cpu", dp=2, cp=1, tp=2)).axes_along(ranks)

    assert set(run_ranks(4, job)) == {axes}
