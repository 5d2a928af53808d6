"""Models that mix the rows of their batch are refused where the batch is divided, by every step that would divide
it."""

from __future__ import annotations

import pytest
from torch import nn

from parallelize import ModelError, build_mesh, shard_data
from parallelize.base.mesh import MeshSpec
from parallelize.plan.local_rows import MIXING
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from tests.support.threads import run_ranks


class DogeCDMoE(nn.Linear):
    """Named as the mixture of Doge."""


def model():
    return nn.ModuleDict({"first": nn.Linear(4, 4), "mixture": DogeCDMoE(4, 4)})


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"dp": 2}, {}), ({"dp_replicate": 2}, {}), ({"cp": 2}, {}), ({"tp": 1}, {"num_microbatches": 2})],
)
def test_a_divided_batch_is_refused(mesh, options):
    with pytest.raises(ModelError, match="mixes-rows: mixture mixes the rows of its batch"):
        resolve(None, describe(model()), MeshSpec(**mesh), Options(**options))


def test_one_batch_and_other_models_are_resolved():
    resolve(None, describe(model()), MeshSpec(dp=1), Options(num_microbatches=1))
    resolve(None, describe(nn.Linear(4, 4)), MeshSpec(dp=2), Options(num_microbatches=2))


def test_data_parallelism_without_a_plan_is_refused():
    with pytest.raises(ModelError, match="mixes-rows"):
        run_ranks(2, lambda rank: shard_data(model(), build_mesh("cpu", dp=2)))


def test_the_class_exists():
    doge = pytest.importorskip("transformers.models.doge.modeling_doge")
    assert all(hasattr(doge, name) for name in MIXING)
