"""What is not what a call expects is named on every rank: a class, a mesh without names, an attribute of the module."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallelize import MeshError, ModelError, build_mesh, parallelize_model, parallelize_module, shard_data
from tests.support.threads import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("call", "axis"),
    [(parallelize_module, "tp"), (parallelize_model, "tp"), (parallelize_model, "dp"), (shard_data, "dp")],
)
def test_a_class_in_the_place_of_a_module(call, axis):
    def body(rank):
        with pytest.raises(ModelError, match="not-a-module: the class Net") as error:
            call(Net, build_mesh("cpu", **{axis: 2}))
        return error.value.problems[0].fix

    assert run_ranks(2, body) == ["an instance: Net(...)"] * 2


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_a_mesh_without_names(shape):
    def body(rank):
        with pytest.raises(MeshError) as error:
            parallelize_model(Net(), init_device_mesh("cpu", shape), {"up": "colwise"})
        return error.value.slugs

    assert run_ranks(2, body) == [("unnamed-mesh",)] * 2


def test_attributes_of_a_module_are_those_of_its_module():
    parallel = run_ranks(1, lambda rank: parallelize_model(Net(), build_mesh("cpu", dp=1)))[0]
    for name, fix in (("parameters", "parallel.module.parameters"), ("stepp", "one of step, evaluate")):
        assert not hasattr(parallel, name)
        with pytest.raises(ModelError, match="no-such-attribute") as error:
            getattr(parallel, name)
        assert error.value.problems[0].fix.startswith(fix)
