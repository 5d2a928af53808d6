"""`parallelize_module` in the place of PyTorch's: what its users and its tests do with it, compared with PyTorch's
own."""

from __future__ import annotations

import pytest

from tests.axes.tensor.torch_styles import drop_in_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.fixture(params=[2, 4])
def processes(request):
    return request.getfixturevalue({2: "two_processes", 4: "four_processes"}[request.param])


@pytest.mark.sweep
@pytest.mark.variants(every=4)
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("order", ["head last", "head first"])
def test_a_tied_model_in_several_calls(processes, sequence, order):
    """Exact, and no more collectives than PyTorch in a whole step: it reduces gradients of norms in the optimizer."""
    ours = processes.run(jobs.several_calls, "ours", sequence, order)
    theirs = processes.run(jobs.several_calls, "stock", sequence, order)
    for result in ours:
        assert max(result["errors"]) < 1e-12, result
        assert 0 < result["total"] <= theirs[0]["total"], (result, theirs[0])
        assert result["counts"].keys() <= jobs.NAMES


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("how", ["fully_shard", "shard_data"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_several_calls_and_data_axes(four_processes, how, sequence, tied):
    for errors in four_processes.run(jobs.several_calls_and_data_axes, how, sequence, tied):
        assert max(errors) < 1e-12


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("recomputes", [False, True], ids=["", "recomputed"])
def test_shards_of_features_and_fully_shard(four_processes, recomputes):
    """A row linear and a norm by `Shard(1)` of two dims. Of PyTorch's styles the same numbers are right."""
    for whose in ("ours", "stock"):
        for errors in four_processes.run(jobs.feature_shards_and_data_axes, whose, recomputes):
            assert max(errors) < 1e-12, (whose, errors)


ONE = [
    "column linear",
    "column linear of sharded rows",
    "column embedding",
    "row linear",
    "row linear to sharded rows",
    "row embedding",
    "row embedding to shards",
]


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("name", ONE)
def test_collectives_of_one_style_by_their_names(processes, name):
    """In the first forward too, whose comparison of inputs is none of the model's collectives."""
    assert processes.run(jobs.collectives_of_one, "ours", name) == processes.run(jobs.collectives_of_one, "stock", name)


@pytest.mark.parametrize("in_one_dict", [True, False], ids=["one dict", "two calls"])
def test_inputs_without_a_layout_and_inputs_beyond_the_layouts(processes, in_one_dict):
    ours = processes.run(jobs.inputs_and_layouts, "ours", in_one_dict)
    # PyTorch passes DTensors to the linear, and then adds a plain tensor
    stock = processes.run(jobs.inputs_and_layouts, "stock", in_one_dict)
    for (out, error), (expected, refused) in zip(ours, stock, strict=True):
        assert (out - expected).abs().max() < 1e-6
        assert "3 positional inputs, and input_layouts has 2" in error and refused


def test_patterns_without_a_match_and_empty_plans_are_warned_of(processes):
    for ours, stock in zip(processes.run(jobs.patterns, "ours"), processes.run(jobs.patterns, "stock"), strict=True):
        assert "'2.inner' matches no module" in ours[0] and stock[0]
        assert "the plan is empty" in ours[1]


@pytest.mark.parametrize("how", ["ddp", "replicate"])
@pytest.mark.parametrize("kept", [False, True], ids=["lowered", "as it is"])
def test_data_parallelism_of_pytorch_around_a_planned_part(four_processes, how, kept):
    for error in four_processes.run(jobs.wrapped_parts, how, kept):
        assert "other-data-parallel" in error and "shard_data(model, mesh)" in error
