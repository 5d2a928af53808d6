"""Checkpoints of plain modules on one process, without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import Checkpointer, install_dropout, load_checkpoint
from parallelize.base.errors import CheckpointError


def with_dropout(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    install_dropout(module, 3)
    return module


def test_dropout_of_a_plain_module_continues(tmp_path):
    """The state of dropout is the number of forwards, which the checkpoint must restore."""
    x = torch.ones(16, 8)
    model, other = with_dropout(0), with_dropout(1)
    for _ in range(3):
        model(x)
    with Checkpointer(tmp_path, model) as checkpoints:
        checkpoints.save(3)
    with Checkpointer(tmp_path, other) as checkpoints:
        assert checkpoints.resume() == 3
    expected = [model(x) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip([other(x) for _ in range(2)], expected, strict=True))
    assert not torch.equal(*expected)


def test_weights_into_a_model_on_meta(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model(torch.randn(4, 8))
    with Checkpointer(tmp_path, model) as checkpoints:
        checkpoints.save(7)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert load_checkpoint(tmp_path, other) == 7
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with torch.device("meta"):
        mismatched = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(9))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, mismatched)
    assert "wrong-shape" in caught.value.slugs and all(p.is_meta for p in mismatched.parameters())


def test_an_error_of_a_background_save_that_no_call_raises_is_a_warning(tmp_path):
    checkpoints = Checkpointer(tmp_path, nn.Linear(8, 4), asynchronous=True)

    def fails(*_: object) -> None:
        raise OSError("no space left")

    checkpoints._write = fails
    checkpoints.save(1)
    checkpoints._thread.join()
    checkpoints._folder.release()
    with pytest.warns(RuntimeWarning, match=r"was not saved, .*no space left"):
        checkpoints.__del__()
    checkpoints._failed = None
