"""A save that cannot be loaded again is refused before anything is written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

from parallelize import Checkpointer, CheckpointError, ModelError, build_mesh, build_optimizer, shard_data
from tests.support.threads import run_ranks


class WithExtraState(nn.Linear):
    """A layer with state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("name", ["model", "state", "first/second", 1, None])
@pytest.mark.parametrize("kind", ["optimizer", "scheduler"])
def test_names_that_cannot_be_used(name, kind, tmp_path):
    layer = nn.Linear(4, 3)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path, layer, **{kind: {name: SGD(layer.parameters(), lr=0.1)}})
    assert caught.value.slugs == ("bad-name",) and repr(name) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_last": True}, "keep_last is True"),
        ({"keep_last": 2, "keep_every": 1.5}, "keep_every is 1.5"),
        ({"keep_every": 100}, "pass keep_last too"),
    ],
)
def test_retention_that_keeps_nothing_or_everything(options, text, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path, nn.Linear(4, 3), **options)
    assert caught.value.slugs == ("bad-retention",) and text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"data": [1, 2]}, "data is of type list"), ({"user": {"tokens": 12}}, "tokens is of type int")],
    ids=["data", "user"],
)
def test_objects_without_a_state(options, text, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path, nn.Linear(4, 3), **options)
    assert caught.value.slugs == ("not-stateful",)
    assert text in str(caught.value) and "state_dict" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Linear(4, 4), WithExtraState(4, 3)), "1 (WithExtraState)"),
        (WithExtraState(4, 3), "the model (WithExtraState)"),
    ],
    ids=["inside", "itself"],
)
def test_modules_with_a_state_that_is_not_a_tensor(model, text, tmp_path):
    with Checkpointer(tmp_path, model) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.save(1)
    assert caught.value.slugs == ("extra-state",)
    assert text in str(caught.value) and "user={...}" in str(caught.value)
    assert not list(tmp_path.glob("step-*"))


def test_an_optimizer_of_another_model(tmp_path):
    other = nn.Linear(5, 2)
    with (
        Checkpointer(tmp_path, nn.Linear(4, 3), optimizer=SGD(other.parameters(), lr=0.1)) as checkpoints,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoints.save(1)
    assert caught.value.slugs == ("foreign-parameter",)
    assert "group 0 of the SGD steps a parameter of shape [2, 5]" in str(caught.value)
    assert not list(tmp_path.glob("step-*"))


def test_building_an_optimizer_of_another_model_under_zero():
    stock = nn.Linear(4, 4)

    def build(rank: int) -> ModelError:
        model = shard_data(copy.deepcopy(stock), build_mesh("cpu", dp=2), zero=1)
        with pytest.raises(ModelError) as caught:
            build_optimizer(model, SGD, [nn.Parameter(torch.zeros(2, 5))], lr=0.1)
        return caught.value

    for error in run_ranks(2, build):
        assert error.slugs == ("foreign-parameter",)
        assert "shape [2, 5]" in str(error) and "after the model was wrapped" in str(error)
