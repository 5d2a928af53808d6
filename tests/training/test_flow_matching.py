"""Flow matching with models of `diffusers` on meshes: noise, times, losses and gradients are those of one process."""

from __future__ import annotations

from math import prod

import pytest

from parallelize import PlanError
from tests.support import flow_matching
from tests.support.flow_matching import flow_of, train
from tests.support.parity import worst
from tests.support.threads import run_ranks

BOUND = 1e-12
MESHES = [
    ({"dp": 2, "tp": 2}, {"zero": 0, "num_microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 1, "recompute": "full"}),
    ({"dp": 2, "tp": 2}, {"zero": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full"}),
    ({"dp": 2}, {"zero": 3}),
]


def check(name, axes, **options):
    flow_of(name)  # the plan, once
    losses, gradients = run_ranks(1, lambda rank: train(name, {"dp": 1}))[0]
    for got_losses, got_gradients in run_ranks(prod(axes.values()), lambda rank: train(name, axes, **options)):
        assert got_losses == pytest.approx(losses, rel=BOUND)
        assert worst(got_gradients, gradients)[0] < BOUND


@pytest.mark.variants(every=13)
@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "pixart", "cogvideox", "hunyuan_video", "dit", "unet"])
def test_tp_and_zero(name, axes, options):
    check(name, axes, **options)


def test_zero_of_a_derived_plan_without_units(monkeypatch):
    """DiT calls the embedding of its first layer once more, so that the plan names no layers: one unit is the model."""
    model, text = flow_of("dit")
    assert "pipeline" not in text
    monkeypatch.setattr(flow_matching, "flow_of", lambda name: (model, text.partition("zero:")[0]))
    check("dit", {"dp": 2}, zero=3)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["sd3", "cogvideox"])
def test_stages(name):
    check(name, {"pp": 2, "dp": 2}, zero=1, num_microbatches=2)


@pytest.mark.sweep
def test_what_stages_cannot_cut_is_refused():
    """A time that is read beside the layers, by a parameter of the model itself."""
    flow_of("wan")
    with pytest.raises(PlanError, match="unassigned-parameter"):
        run_ranks(2, lambda rank: train("wan", {"pp": 2}, num_microbatches=2))


def test_a_run_that_goes_on_on_another_mesh(tmp_path):
    """Its noise is that of the step, whatever the mesh was."""
    losses, gradients = (flow_of("flux"), run_ranks(1, lambda rank: train("flux", {"dp": 1})))[1][0]
    folder = str(tmp_path / "run")
    run_ranks(2, lambda rank: train("flux", {"dp": 2}, folder=folder, steps=1, zero=3))
    for later, got in run_ranks(2, lambda rank: train("flux", {"tp": 2}, folder=folder)):
        assert later == pytest.approx(losses[1:], rel=BOUND) and worst(got, gradients)[0] < BOUND


@pytest.mark.parametrize("options", [{}, {"ulysses": 2}], ids=str)
def test_cp_is_refused_before_anything_runs(options):
    flow_of("wan")
    with pytest.raises(PlanError, match="no-attention"):
        run_ranks(2, lambda rank: train("wan", {"cp": 2}, **options))
