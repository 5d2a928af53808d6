"""Mistakes with the data axes of a mesh, each by its slug."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, build_optimizer, parallelize_model, parallelize_module, shard_data
from tests.axes.tensor.experts.test_expert_tensor_parallel import PLAN, Mixture
from tests.support.models import tiny_model
from tests.support.refused import RULES, WIDTH, Block, refused, small_mesh
from tests.support.threads import run_ranks


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_data_axes_applied_twice(zero):
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, zero)
        with refused(ModelError, "data-axes-taken", "shard_data"):
            shard_data(block, mesh, zero)


def test_a_unit_that_no_module_matches():
    block = Block()
    with small_mesh(dp=2) as mesh, refused(ModelError, "unmatched-unit", "'dwon'", "`down`"):
        shard_data(block, mesh, 3, units=["up", "dwon"])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_cast_after_buffers_were_made(zero):
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, zero).double()
        with refused(ModelError, "cast-after-sharding", "up.weight", "float64", "float32", "before shard_data"):
            block(torch.randn(3, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_that_a_load_replaces(zero):
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, zero)
        with refused(ModelError, "parameter-replaced", "up.weight", "assign=False"):
            block.load_state_dict(copy.deepcopy(block.state_dict()), assign=True)


def test_a_parameter_that_is_unfrozen_between_forward_and_backward():
    block = Block()
    block.up.weight.requires_grad_(False)
    with small_mesh(dp=2) as mesh:
        shard_data(block, mesh, 0)
        hidden = block(torch.randn(3, WIDTH))
        block.up.weight.requires_grad_()
        with refused(ModelError, "unmanaged-parameter", "up.weight", "frozen"):
            (hidden.sum() + block.up.weight.sum()).backward()


@pytest.mark.parametrize("name", ["2", "1"])
def test_a_head_that_is_added_or_replaced_afterwards(name):
    """Of ZeRO 3: the modules of a unit are gathered together."""
    initial = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    models = [copy.deepcopy(initial) for _ in range(2)]
    head = nn.Linear(WIDTH, WIDTH)

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 3, units=["0"])
        model.add_module(name, copy.deepcopy(head))
        with refused(ModelError, "unmanaged-parameter", f"{name}.weight", "added after shard_data"):
            build_optimizer(model, torch.optim.SGD, lr=0.1)
        with refused(ModelError, "unmanaged-parameter", f"{name}.weight", "added after shard_data"):
            model(torch.randn(3, WIDTH)).sum().backward()

    run_ranks(2, body)


def test_an_optimizer_of_what_a_forward_has_left_gathered():
    """A head whose matmul is left to the loss stays so under ZeRO 3: what is gathered there is not what trains."""
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=3, fuse_loss=True)
        with torch.no_grad():
            parallel.module(input_ids=torch.arange(3)[None])
        gathered = list(parallel.module.parameters())
        with refused(ModelError, "foreign-parameter", "not between a forward and its backward"):
            parallel.optimizer(torch.optim.SGD, gathered, lr=0.1)
        with refused(ModelError, "unsharded-optimizer", "SGD"):
            torch.optim.SGD(gathered, lr=0.1).step()

    run_ranks(2, body)


def test_dropout_that_is_added_afterwards():
    with small_mesh(dp=2) as mesh:
        model = shard_data(nn.Sequential(Block()), mesh, 1)
        model.append(nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)))
        with refused(ModelError, "added-parameter", "dropout of 0.5", "lora_dropout=0"):
            model(torch.randn(3, WIDTH))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("zero", "dtype"), [(2, None), (0, torch.bfloat16), (1, torch.bfloat16), (2, torch.bfloat16)])
def test_an_optimizer_that_does_not_know_of_shards(zero, dtype, tp):
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2 * tp)]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=tp)
        model = parallelize_module(models[rank], mesh, RULES) if tp > 1 else models[rank]
        shard_data(model, mesh, zero, dtype=dtype)
        model(torch.randn(3, WIDTH, dtype=model.up.weight.dtype)).sum().backward()
        with refused(ModelError, "unsharded-optimizer", "AdamW", "build_optimizer(model, AdamW"):
            torch.optim.AdamW(model.parameters()).step()
        build_optimizer(model, torch.optim.AdamW).step()

    run_ranks(2 * tp, body)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_optimizer_that_needs_no_shards(zero):
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, zero)
        block(torch.randn(3, WIDTH)).sum().backward()
        torch.optim.AdamW(block.parameters()).step()


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_stock_optimizer_that_cannot_step_dtensors(axes, name):
    """Before its step has changed anything."""
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(math.prod(axes.values()))]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", **axes)
        model = parallelize_module(models[rank], mesh, RULES) if "tp" in axes else models[rank]
        if "dp" in axes:
            shard_data(model, mesh, 3)
        optimizer = getattr(torch.optim, name)(model.parameters())
        model(torch.ones(3, WIDTH)).sum().backward()
        with refused(ModelError, "unsharded-optimizer", name, "build_optimizer"):
            optimizer.step()
        assert not optimizer.state
        build_optimizer(model, getattr(torch.optim, name)).step()

    run_ranks(len(models), body)


def test_a_search_along_all_parameters_on_a_pipeline():
    models = [tiny_model("llama", torch.float32, num_hidden_layers=2) for _ in range(2)]

    def body(rank: int) -> None:
        parallel = parallelize_model(models[rank], build_mesh("cpu", pp=2), num_microbatches=2)
        optimizer = torch.optim.LBFGS(parallel.module.parameters())
        with refused(ModelError, "not-elementwise", "LBFGS", "pipeline stages"):
            optimizer.step(lambda: 0.0)

    run_ranks(2, body)


def test_parameters_beside_folded_experts_are_refused():
    """Experts are sharded over the ranks of their copies; what all experts share would be sharded over others."""
    model = Mixture()
    model.experts.gain = nn.Parameter(torch.ones(1))
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        with pytest.raises(ModelError, match=r"experts-not-shardable: experts.gain"):
            parallelize_model(models[rank], build_mesh("cpu", dp=2), PLAN, ep=2, zero=3)

    run_ranks(2, body)


class Clipped(nn.Module):
    """As Gemma 3n's AltUp: a forward that clips a parameter."""

    def __init__(self, most: float):
        super().__init__()
        self.inner, self.most = nn.Linear(WIDTH, WIDTH), most

    def forward(self, x):
        self.inner.weight.data.clamp_(-self.most, self.most)
        return self.inner(x)


@pytest.mark.parametrize("units", [["0"], []], ids=["unit", "model"])
def test_a_forward_that_writes_to_a_parameter(units):
    models = [nn.Sequential(Clipped(most)) for most in (1.0, 1e-3)]

    def body(rank):
        for model in copy.deepcopy(models):
            planned, x = shard_data(model, build_mesh("cpu", dp=2), 3, units=units), torch.randn(3, WIDTH)
            if model[0].most == 1.0:  # all values are within the bound
                planned(x).sum().backward()
                continue
            with refused(ModelError, "written-parameter", "0.inner.weight", "zero=2"):
                planned(x)

    run_ranks(2, body)
