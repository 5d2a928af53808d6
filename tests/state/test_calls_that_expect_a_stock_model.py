"""Calls of PyTorch and transformers that expect full parameters are refused by name on a planned model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from parallelize import ModelError, build_mesh, full_state_dict, parallelize_model, parallelize_module
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

IDS, LABELS = tiny_batch()
UP = "model.layers.0.mlp.up_proj"


def planned(rank_models: list[nn.Module], rank: int) -> nn.Module:
    return parallelize_module(rank_models[rank], build_mesh("cpu", tp=2))


def models() -> list[nn.Module]:
    model = tiny_model("llama", torch.float64)
    return [copy.deepcopy(model) for _ in range(2)]


def slugs_of(call) -> tuple[str, ...]:
    with pytest.raises(ModelError) as error:
        call()
    return error.value.slugs


def test_a_part_of_a_number_is_not_read_as_the_number():
    copies = models()
    stock = copy.deepcopy(copies[0])
    F.cross_entropy(stock(input_ids=IDS).logits.flatten(0, 1), LABELS.flatten()).backward()
    expected = stock.get_parameter(f"{UP}.weight").grad

    def body(rank):
        model = planned(copies, rank)
        F.cross_entropy(model(input_ids=IDS).logits.flatten(0, 1), LABELS.flatten()).backward()
        grad, norm = model.get_parameter(f"{UP}.weight").grad, model.get_parameter("model.norm.weight").grad
        for read in (
            lambda: grad.norm().item(),
            lambda: float(grad.sum()),
            lambda: int(grad.abs().max()),
        ):
            assert slugs_of(read) == ("partial-value",)
        is_nan = grad.isnan().any()
        if any(placement.is_partial() for placement in is_nan.placements):
            assert slugs_of(lambda: bool(is_nan)) == ("partial-value",)
        else:  # torch 2.15 reduces it
            assert not bool(is_nan)
        assert grad.norm().full_tensor().item() == pytest.approx(float(expected.norm()), abs=1e-12)
        assert bool(grad.norm() > 0.9 * float(expected.norm()))  # PyTorch reduces it before it compares
        assert norm.sum().item() == pytest.approx(float(norm.full_tensor().sum()))

    run_ranks(2, body)
    stock.zero_grad()
    run_ranks(1, lambda rank: parallelize_module(stock, build_mesh("cpu", tp=1)).lm_head.weight.norm().item())


def test_pickling_a_parallelized_model_names_what_to_do():
    copies = models()

    def body(rank):
        model = planned(copies, rank)
        for part in (model, model.get_submodule(UP), copy.deepcopy(model)):
            assert slugs_of(lambda part=part: torch.save(part, io.BytesIO())) == ("model-in-groups",)
        state = full_state_dict(model)
        if rank == 0:
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            assert torch.load(file)[f"{UP}.weight"].shape == (72, 48)

    run_ranks(2, body)
    data = models()
    parallel = lambda rank: parallelize_model(data[rank], build_mesh("cpu", dp=2)).module  # noqa: E731
    assert run_ranks(2, lambda rank: slugs_of(lambda: pickle.dumps(parallel(rank)))) == [("model-in-groups",)] * 2
    pickle.dumps(tiny_model("llama"))


def test_methods_that_need_full_parameters_are_refused(tmp_path):
    copies = models()

    def body(rank):
        stock = {name: value.clone() for name, value in copies[rank].state_dict().items()}
        model = planned(copies, rank)
        for part in (model, copy.deepcopy(model)):
            assert slugs_of(lambda part=part: part.save_pretrained(tmp_path / "no")) == ("reads-full-parameters",)
            assert slugs_of(lambda part=part: part.model.resize_token_embeddings(80)) == ("reads-full-parameters",)
        state = full_state_dict(model)
        if rank == 0:
            model.save_pretrained(tmp_path / "saved", state_dict=state)
        return stock

    expected = run_ranks(2, body)[0]
    saved = type(copies[0]).from_pretrained(tmp_path / "saved", dtype=torch.float64).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        nn.utils.weight_norm,
        lambda module: parametrize.register_parametrization(module, "weight", Twice()),
        lambda module: module.__delattr__("weight"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parameters_that_disappear_after_the_plan_are_named(change):
    copies = models()

    def body(rank):
        model = planned(copies, rank)
        change(model.get_submodule(UP))
        with pytest.raises(ModelError, match="parameter weight") as error:
            model(input_ids=IDS)
        assert error.value.slugs == ("removed-parameter",)

    run_ranks(2, body)


def test_a_parametrization_that_is_removed_leaves_a_planned_module():
    copies = models()
    expected = copies[0](input_ids=IDS).logits

    def body(rank):
        model = planned(copies, rank)
        parametrize.register_parametrization(model.get_submodule(UP), "weight", Twice())
        parametrize.remove_parametrizations(model.get_submodule(UP), "weight", leave_parametrized=False)
        assert (model(input_ids=IDS).logits - expected).abs().max() < 1e-12

    run_ranks(2, body)


def test_a_layer_that_is_shared_after_the_plan_is_told_when_to_share_it():
    copies = models()

    def body(rank):
        model = parallelize_module(copies[rank], build_mesh("cpu", tp=2), sequence_parallel=True)
        model.model.layers[1] = model.model.layers[0]
        with pytest.raises(ModelError, match="share them before the plan") as error:
            model(input_ids=IDS)
        assert error.value.slugs == ("shard-misread",)

    run_ranks(2, body)


class Adapter(nn.Module):
    """A sum of a linear and of one of low rank, as libraries of adapters put it in a linear's place."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, linear.out_features, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


@pytest.mark.parametrize(("trains", "slug"), [(True, "added-parameter"), (False, "shard-misread")])
@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_adapters_of_planned_linears_are_told_when_to_be_merged(name, trains, slug):
    copies = models()

    def body(rank):
        mlp = planned(copies, rank).model.layers[0].mlp
        adapter = Adapter(getattr(mlp, name))
        adapter.down.requires_grad_(trains), adapter.up.requires_grad_(trains)
        setattr(mlp, name, adapter)
        with pytest.raises(ModelError, match="merge adapters before it") as error:
            copies[rank](input_ids=IDS)
        assert error.value.slugs == (slug,)

    run_ranks(2, body)
