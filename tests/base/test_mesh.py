"""Mesh arithmetic without devices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize import MeshError, MeshSpec
from parallelize.base.mesh import folded, folded_coordinates, possible_expert_ranks

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(sizes, st.data())
def test_rank_to_coordinates_and_back(sizes, data):
    names = data.draw(st.permutations(["pp", "dp", "cp", "tp"]))[: len(sizes)]
    mesh = MeshSpec(list(zip(names, sizes, strict=True)))
    assert [mesh.rank(**mesh.coordinates(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@given(sizes, st.data())
def test_groups_partition_the_ranks(sizes, data):
    names = ["pp", "dp", "cp", "tp"][: len(sizes)]
    mesh = MeshSpec(list(zip(names, sizes, strict=True)))
    axes = data.draw(st.lists(st.sampled_from(names), unique=True))
    groups = mesh.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    for group in groups:
        assert all(mesh.group_of(rank, *axes) == group for rank in group)


def test_ranks_along_the_last_axis_are_consecutive():
    assert MeshSpec(dp=2, tp=4).groups("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert MeshSpec(tp=4, dp=2).groups("tp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert MeshSpec(pp=2, dp=2, tp=2).groups("pp", "tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_agrees_with_a_device_mesh():
    import torch

    mesh = MeshSpec(pp=2, dp=3, tp=4)
    ranks = torch.arange(24).view(2, 3, 4)
    for rank in range(24):
        coordinates = mesh.coordinates(rank)
        assert ranks[coordinates["pp"], coordinates["dp"], coordinates["tp"]] == rank
        assert mesh.group_of(rank, "dp") == tuple(ranks[coordinates["pp"], :, coordinates["tp"]].tolist())


@pytest.mark.parametrize(
    ("make", "slug"),
    [
        (lambda: MeshSpec(tp=0), "bad-axis-size"),
        (lambda: MeshSpec([("tp", 2), ("tp", 2)]), "repeated-axis"),
        (lambda: MeshSpec(tp=2).size("pt"), "unknown-axis"),
        (lambda: MeshSpec(tp=2).coordinates(2), "bad-rank"),
        (lambda: MeshSpec(tp=2, dp=2).rank(tp=1), "bad-coordinate"),
        (lambda: MeshSpec.parse("tp=x"), "bad-mesh"),
        (lambda: MeshSpec.parse("tp=³"), "bad-mesh"),
        (lambda: MeshSpec.parse("tp=" + "1" * 5000), "bad-mesh"),
        (lambda: MeshSpec.parse("tp=99999999999999999999"), "bad-axis-size"),
        (lambda: MeshSpec(dp=1 << 19, tp=4), "bad-axis-size"),
    ],
)
def test_mistakes(make, slug):
    with pytest.raises(MeshError) as error:
        make()
    assert error.value.slugs == (slug,)


def test_parse_and_print():
    assert str(MeshSpec.parse("pp=2, dp=4,tp=8")) == "pp=2,dp=4,tp=8"


def test_experts_fold_over_the_ranks_of_a_pipeline_stage():
    spec = MeshSpec(pp=2, dp=2, cp=2, tp=2)
    assert str(folded(spec, 4)) == "pp=2,edp=2,ep=4"
    assert possible_expert_ranks(spec) == [1, 2, 4, 8]
    assert possible_expert_ranks(MeshSpec(dp=6, tp=6)) == [1, 2, 3, 6, 12, 18, 36]
    for rank in range(spec.world_size):  # axes in the folding's order: ranks stay, and groups of ep are consecutive
        coordinates = folded_coordinates(spec, 4, spec.coordinates(rank))
        assert (coordinates["pp"], coordinates["edp"], coordinates["ep"]) == (rank // 8, rank % 8 // 4, rank % 4)


def test_experts_fold_in_the_order_of_axes_wherever_the_mesh_has_them():
    spec = MeshSpec(tp=2, dp_replicate=2, dp_shard=2)
    assert str(folded(spec, 4)) == "dp_replicate=2,edp=1,ep=4"
    assert folded_coordinates(spec, 4, {"tp": 1, "dp_replicate": 1, "dp_shard": 0}) == {
        "dp_replicate": 1,
        "edp": 0,
        "ep": 1,
    }
    assert possible_expert_ranks(MeshSpec(dp=3, tp=4)) == [1, 2, 4, 12]
