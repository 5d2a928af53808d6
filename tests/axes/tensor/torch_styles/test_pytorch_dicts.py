"""Dicts written for PyTorch's own `parallelize_module`: unchanged, exact, and with no more collectives."""

from __future__ import annotations

import pytest
import torch.distributed.tensor.parallel as stock
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import parallelize
from parallelize.axes.tensor.torch_styles.styles import from_pytorch
from tests.axes.tensor import jobs

pytestmark = pytest.mark.processes


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["tensor", "sequence", "loss"])
def test_tutorial_dicts(two_processes, kind):
    ours = two_processes.run(jobs.tutorial, kind, "ours")
    theirs = two_processes.run(jobs.tutorial, kind, "stock")
    for result in ours:
        assert result["loss"] < 1e-12 and result["grads"] < 1e-12, result
        assert result["collectives"] <= theirs[0]["collectives"], (result, theirs[0])


def test_what_stock_gets_wrong(two_processes):
    two_processes.run(jobs.dict_details)


def test_inputs_and_outputs_in_one(two_processes):
    ours = two_processes.run(jobs.input_and_output_layouts, "ours")
    stock = two_processes.run(jobs.input_and_output_layouts, "stock")
    for ours_of_rank, theirs in zip(ours, stock, strict=True):
        for a, b in zip(ours_of_rank, theirs, strict=True):
            assert (a - b).abs().max() < 1e-12


CONFIGURATIONS = [
    "row embedding of sharded ids",
    "column embedding of sharded ids",
    "column linear of partial input",
    "norm on another sequence dim",
    "keyword layouts",
    "row linear to sequence shards",
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_one_style_like_pytorch(two_processes, configuration):
    ours = two_processes.run(jobs.styles_like_stock, "ours", configuration)
    stock = two_processes.run(jobs.styles_like_stock, "stock", configuration)
    for ours_of_rank, theirs in zip(ours, stock, strict=True):
        for a, b in zip(ours_of_rank, theirs, strict=True):
            assert a.shape == b.shape and (a - b).abs().max() < 1e-11


_INPUTS = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
_KEYWORDS = {"input_kwarg_layouts": {"x": Shard(1)}, "desired_input_kwarg_layouts": {"x": Replicate()}}
_OUTPUTS = {"output_layouts": (Shard(1),), "desired_output_layouts": (Replicate(),)}
ARGUMENTS = {
    "ColwiseParallel": {"input_layouts": Shard(1), "output_layouts": Replicate(), "use_local_output": False},
    "RowwiseParallel": {"input_layouts": Replicate(), "output_layouts": Shard(1), "use_local_output": False},
    "SequenceParallel": {"sequence_dim": 0, "use_local_output": True},
    "PrepareModuleInput": {**_INPUTS, **_KEYWORDS, "use_local_output": True},
    "PrepareModuleOutput": {**_OUTPUTS, "use_local_output": False},
    "PrepareModuleInputOutput": {
        **_INPUTS,
        **_KEYWORDS,
        **_OUTPUTS,
        "use_local_input": True,
        "use_local_output": False,
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("with_arguments", [True, False], ids=["arguments", "defaults"])
def test_pytorchs_own_styles_become_ours(name, with_arguments):
    needed = _OUTPUTS if "Output" in name else {}
    arguments = ARGUMENTS[name] if with_arguments else needed
    assert repr(from_pytorch(getattr(stock, name)(**arguments), nn.Linear(2, 2))) == repr(
        getattr(parallelize, name)(**arguments)
    )


def test_a_subclass_of_pytorchs_style_is_applied_as_it_is():
    class Own(stock.ColwiseParallel):
        pass

    style = Own()
    assert from_pytorch(style, nn.Linear(2, 2)) is style


def test_dropout_on_shards_is_left_to_pytorch_which_draws_a_mask_for_each():
    style = stock.SequenceParallel()
    assert from_pytorch(style, nn.Dropout(0.5)) is style and from_pytorch(style, nn.LayerNorm(4)) is not style


def test_a_norm_with_parameters_in_a_module_inside_is_refused(two_processes):
    assert two_processes.run(jobs.norm_with_parameters_inside) == ["wrong-module-for-style"] * 2
