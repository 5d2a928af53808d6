"""What was not saved cannot be loaded: the message says what was saved, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from parallelize import Checkpointer, CheckpointError, Streams, load_checkpoint, rebuild
from parallelize.checkpoint.format.manifest import read_manifest
from parallelize.checkpoint.run import rebuild as rebuild_file


class Counter:
    """The smallest object with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def save(root: Path, model: nn.Module, **options: Any) -> None:
    with Checkpointer(root, model, **options) as checkpoints:
        checkpoints.save(7)


def stepped(parameters: Any, cls: type[Optimizer] = AdamW, **options: Any) -> Optimizer:
    """An optimizer with state for all of its parameters."""
    optimizer = cls(parameters, **{"lr": 0.1, **options})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def refusal(root: Path, layer: nn.Linear, **options: Any) -> CheckpointError:
    """The error of loading into a layer, which must stay unchanged."""
    weight = layer.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(root, layer, **options)
    assert torch.equal(layer.weight, weight)
    return caught.value


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_class(tmp_path):
    layer = nn.Linear(4, 3)
    save(tmp_path, layer, optimizer=stepped(layer.parameters()))
    other = nn.Linear(4, 3)
    error = refusal(tmp_path, other, optimizer=SGD(other.parameters(), lr=0.1))
    assert error.slugs == ("other-optimizer",)
    assert "the saved state is of class AdamW" in str(error) and "is of class SGD" in str(error)
    assert load_checkpoint(tmp_path, other) == 7


def test_an_optimizer_that_steps_more_than_the_saved_one(tmp_path):
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save(tmp_path, layer, optimizer=stepped([layer.weight]))
    optimizer = AdamW(other.parameters())
    error = refusal(tmp_path, other, optimizer=optimizer)
    assert error.slugs == (
        "missing-parameter",
    ) and "the AdamW steps parameters that the saved one did not: bias\n" in str(error)
    assert load_checkpoint(tmp_path, other, optimizer=optimizer, strict=False) == 7
    assert set(optimizer.state) == {other.weight}


def test_one_group_for_parameters_of_two_groups_with_different_options(tmp_path):
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    save(tmp_path, layer, optimizer=stepped(groups))
    error = refusal(tmp_path, other, optimizer=AdamW(other.parameters()))
    assert error.slugs == ("groups-differ",)
    assert "group 0 joins parameters of 2 saved groups" in str(error)


def test_two_groups_with_different_options_for_parameters_of_one(tmp_path):
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save(tmp_path, layer, optimizer=stepped(layer.parameters()))
    groups = [{"params": [other.weight], "lr": 0.1}, {"params": [other.bias], "lr": 0.2, "weight_decay": 0.0}]
    optimizer = AdamW(groups)
    error = refusal(tmp_path, other, optimizer=optimizer)
    assert error.slugs == ("groups-differ",)
    assert "groups 0 and 1 differ in lr, weight_decay" in str(error)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_two_groups_with_equal_options_take_those_of_the_one(tmp_path):
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save(tmp_path, layer, optimizer=stepped([{"params": list(layer.parameters()), "lr": 0.5}]))
    optimizer = AdamW([{"params": [other.weight]}, {"params": [other.bias]}])
    load_checkpoint(tmp_path, other, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_an_optimizer_of_a_name_that_was_not_saved(tmp_path):
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save(tmp_path, layer, optimizer={"slow": stepped(layer.parameters())})
    error = refusal(tmp_path, other, optimizer={"fast": AdamW(other.parameters())})
    assert error.slugs == ("no-optimizer-state",)
    assert "'fast'" in str(error) and "there: slow" in str(error)


def test_a_scheduler_cannot_be_rebuilt_without_its_optimizer(tmp_path):
    layer = nn.Linear(4, 3)
    save(tmp_path, layer, scheduler=StepLR(stepped(layer.parameters()), 10))
    with pytest.raises(CheckpointError) as caught:
        rebuild(nn.Linear(4, 3), tmp_path)
    assert caught.value.slugs == ("no-optimizer-state",)
    assert "scheduler scheduler was saved without" in str(caught.value)


FORGED = {
    "no groups": {"groups": []},
    "groups of text": {"groups": "abc"},
    "an unknown argument": {"groups": [{"number": 0, "options": {"lr": "fast"}, "params": ["weight"]}]},
    "a tensor of nothing": {"groups": [{"number": 0, "options": {"lr": {"$": "tensor"}}, "params": ["weight"]}]},
    "parameters replaced": {"groups": [{"number": 0, "options": {"params": [1], "lr": 0.1}, "params": ["weight"]}]},
    "no class": {"class": None},
    "class of a list": {"class": ["torch", "AdamW"]},
}


@pytest.mark.parametrize("kind", [*FORGED, "no mapping", "schedulers of text", "scheduled of numbers"])
def test_an_edited_description_is_refused_by_name(tmp_path, kind, monkeypatch):
    """The digest of a manifest is no signature: anybody can write one that fits."""
    layer = nn.Linear(4, 3)
    save(tmp_path, layer, optimizer=stepped(layer.parameters()), scheduler=StepLR(stepped(layer.parameters()), 10))
    folder = next(tmp_path.glob("step-*7"))
    state = read_manifest(folder).state
    if kind in FORGED:
        state["optimizers"]["optimizer"] |= FORGED[kind]
    else:
        state |= {
            "no mapping": {"optimizers": [1]},
            "schedulers of text": {"schedulers": "abc"},
            "scheduled of numbers": {"scheduled": 3},
        }[kind]
    monkeypatch.setattr(rebuild_file, "read_manifest", lambda path: replace(read_manifest(path), state=state))
    with pytest.raises(CheckpointError) as caught:
        rebuild(nn.Linear(4, 3), tmp_path)
    assert caught.value.slugs[0] in ("bad-value", "unknown-class")


# -- everything else ---------------------------------------------------------------------------------------------------


def scheduler_of(layer: nn.Linear) -> dict[str, Any]:
    optimizer = AdamW(layer.parameters())
    return {"optimizer": optimizer, "scheduler": {"warmup": StepLR(optimizer, 10)}}


ABSENT: dict[str, Callable[[nn.Linear], dict[str, Any]]] = {
    "warmup": scheduler_of,
    "counter": lambda layer: {"user": {"counter": Counter()}},
    "data": lambda layer: {"data": Counter()},
    "streams": lambda layer: {"streams": Streams(seed=1)},
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_state_that_was_not_saved(name, tmp_path):
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save(tmp_path, layer, optimizer=AdamW(layer.parameters()))
    with (
        Checkpointer(tmp_path, other, **ABSENT[name](other)) as checkpoints,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoints.resume()
    assert caught.value.slugs == ("missing-state",)
    assert f"no state of {name} was saved" in str(caught.value) and str(tmp_path / "step-00000007") in str(caught.value)
    assert not torch.equal(layer.weight, other.weight)
