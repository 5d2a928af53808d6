"""Full values of models around which, inside which or beside which something is; and what no mesh has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from parallelize import (
    build_mesh,
    full_gradients,
    full_parameter,
    full_state_dict,
    next_tokens,
    parallelize_model,
    shard_info,
)
from parallelize.base.errors import ModelError
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

IDS = torch.arange(1, 41).view(4, 10)


class Marked(nn.Module):
    """A layer with a buffer, a counter, and extra state."""

    def __init__(self, number: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(number)))
        self.register_buffer("scale", torch.full((2,), float(number)).half())
        self.register_buffer("count", torch.tensor(number))
        self.register_buffer("empty", torch.zeros(0, 2, dtype=torch.bool))
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def get_extra_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Marked, range(4)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_buffers_and_extra_state_of_all_stages():
    model = Layers()

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", pp=2))
        state, want = full_state_dict(parallel.module, every_rank=True), model.state_dict()
        assert list(state) == list(want)
        for name, value in want.items():
            if isinstance(value, torch.Tensor):
                assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
            else:
                assert state[name] == value
        copy.deepcopy(model).load_state_dict(state)

    run_ranks(2, body)


@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2}], ids=str)
def test_a_module_around_the_model_gives_its_names(axes):
    base = tiny_model("llama", torch.float64, tie_word_embeddings=True)
    want = AveragedModel(base)

    def body(rank: int) -> None:
        around = AveragedModel(parallelize_model(copy.deepcopy(base), build_mesh("cpu", **axes)).module)
        state = full_state_dict(around, every_rank=True)
        assert list(state) == list(want.state_dict()) and worst(state, want.state_dict())[0] == 0
        name = "module.model.layers.1.mlp.up_proj.weight"
        assert torch.equal(full_parameter(around, name), want.get_parameter(name))
        assert shard_info(around).keys() == dict(want.named_parameters(remove_duplicate=False)).keys()

    run_ranks(2, body)


def test_names_that_no_stage_has_and_parts_of_stages_are_refused_on_every_rank():
    base = tiny_model("llama")

    def body(rank: int) -> None:
        model = parallelize_model(copy.deepcopy(base), build_mesh("cpu", pp=2)).module
        with refused(ModelError, "unknown-parameter", "model.layers.7.mlp.up_proj.weight", "named_parameters"):
            full_parameter(model, "model.layers.7.mlp.up_proj.weight")
        for part in (model.model, model.model.layers[0], model.model.layers[1]):
            with refused(ModelError, "part-of-stages", type(part).__name__, "pass the model itself"):
                full_state_dict(part)
            with refused(ModelError, "part-of-stages"):
                full_gradients(part)

    run_ranks(2, body)
    with refused(ModelError, "unknown-parameter", "head"):
        full_parameter(nn.Linear(2, 2), "head")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_are_the_ones_that_the_optimizer_steps_whatever_computes(zero):
    base = tiny_model("llama")

    def body(rank: int) -> tuple:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=zero, dtype=torch.bfloat16)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=1e-3)
        start = full_state_dict(parallel.module, every_rank=True)
        assert worst(start, base.state_dict())[0] == 0  # not rounded
        batch = IDS.chunk(2)[rank]
        parallel.step(input_ids=batch, targets=next_tokens(batch))
        optimizer.step()
        state = full_state_dict(parallel.module, every_rank=True)
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(full_parameter(parallel.module, name), state[name])
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert not torch.equal(state[name], start[name])  # smaller changes than bfloat16 stores
        return state

    first, second = run_ranks(2, body)
    assert worst(first, second)[0] == 0


def test_a_state_is_not_changed_by_later_steps():
    base = tiny_model("llama")

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2))
        state = full_state_dict(parallel.module, every_rank=True)
        with torch.no_grad():
            for parameter in parallel.module.parameters():
                parameter.zero_()
        assert worst(state, base.state_dict())[0] == 0

    run_ranks(2, body)


def test_stages_that_ask_for_different_parameters_are_told_so():
    """As a loop over the names of this rank's own stages would."""

    def body(rank: int) -> None:
        parallel = parallelize_model(Layers(), build_mesh("cpu", pp=2))
        own = [name for name, _ in parallel.module.named_parameters()]
        with refused(ModelError, "other-parameter", own[0], "shard_info(model)"):
            full_parameter(parallel.module, own[0])
        for name, value in parallel.module.named_parameters():  # what is passed is of this rank alone
            assert torch.equal(full_parameter(parallel.module, name, value), value)
        assert len(full_parameter(parallel.module, "layers.3.weight")) == 3

    run_ranks(2, body)
