"""What is not what a call expects is named on every rank: a class, a mesh without names, an attribute of the module."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallelize
from parallelize import (
    MeshError,
    ModelError,
    accumulate_gradients,
    build_mesh,
    clip_grad_norm_,
    describe_plan,
    full_gradients,
    parallelize_model,
    parallelize_module,
    shard_data,
)
from tests.support.threads import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x):
        return self.up(x)


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


BEFORE = {
    *("parallelize_module", "parallelize_model", "shard_data", "cut_pipeline", "context_parallel", "recompute"),
    *("quantize", "import_quantized", "dequantize", "tie_parameters"),
}
"""What makes a planned model, or changes one that is not planned yet."""


def test_functions_of_a_planned_model_take_a_parallel_model():
    functions = {name: getattr(parallelize, name) for name in parallelize.__all__}
    functions = {name: function for name, function in functions.items() if inspect.isfunction(function)}
    signatures = {name: inspect.signature(function) for name, function in functions.items()}
    first = {name: next(iter(signature.parameters.values()), None) for name, signature in signatures.items()}
    of_modules = {name for name, p in first.items() if p is not None and p.annotation in ("nn.Module", nn.Module)}
    assert of_modules <= BEFORE
    of_both = {name for name, p in first.items() if p is not None and "AnyModel" in str(p.annotation)}
    assert of_both >= {"describe_plan", "full_gradients", "shard_info", "generate", "accumulate_gradients"}


def test_it_stands_for_its_module():
    def body(rank):
        parallel = parallelize_model(Net(), build_mesh("cpu", tp=2), {"up": "colwise"})
        assert str(describe_plan(parallel)) == str(describe_plan(parallel.module))
        with accumulate_gradients(parallel):
            parallel.module(torch.ones(2, 4)).sum().backward()
        gradients = full_gradients(parallel)
        norm = clip_grad_norm_(parallel, 1e9)
        assert norm == torch.stack([g.norm() for g in gradients.values()]).norm()
        with pytest.raises(ModelError, match="not-a-module"):
            describe_plan("net")

    run_ranks(2, body)


def test_attributes_of_a_module_are_those_of_its_module():
    parallel = run_ranks(1, lambda rank: parallelize_model(Net(), build_mesh("cpu", dp=1)))[0]
    for name, fix in (
        ("zero_grad", "parallel.module.zero_grad"),
        ("parameters", "parallel.optimizer("),
        ("stepp", "one of step, evaluate"),
    ):
        assert not hasattr(parallel, name)
        with pytest.raises(ModelError, match="no-such-attribute") as error:
            getattr(parallel, name)
        assert error.value.problems[0].fix.startswith(fix)
