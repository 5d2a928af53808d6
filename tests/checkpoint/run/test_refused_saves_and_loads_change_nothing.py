"""Saves and loads that would lose something are refused by name, and change nothing."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from parallelize import Checkpointer, Streams, load_checkpoint, save_pretrained
from parallelize.checkpoint.run.local_tensors import bare
from parallelize.state.records import mark_applied
from tests.checkpoint.small_checkpoints import linear, saved, slug_of


def test_a_wrapper_around_a_parallel_model_is_refused():
    inner = linear()
    mark_applied(inner, data=SimpleNamespace(mesh=SimpleNamespace(size=1)))
    assert slug_of(lambda: bare(nn.Sequential(inner))) == "wrapped-model"
    assert bare(inner) is inner


def test_what_is_not_filled_on_meta_is_an_error(tmp_path):
    saved(tmp_path, linear(bias=False))
    with torch.device("meta"):
        module = linear()
    assert slug_of(lambda: load_checkpoint(tmp_path, module, strict=False)) == "missing-tensor"
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_run_does_not_save_before_the_newest_step(tmp_path):
    saved(tmp_path, linear(), 100)
    with Checkpointer(tmp_path, linear(), keep_last=1) as checkpoints:
        assert slug_of(lambda: checkpoints.save(1)) == "newer-checkpoints"
        assert slug_of(lambda: checkpoints.save(10**18)) == "bad-step"
    assert load_checkpoint(tmp_path, linear()) == 100


def test_casts_are_of_floating_numbers(tmp_path):
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    module.register_buffer("scale", torch.tensor([0.5]))
    other.register_buffer("scale", torch.tensor([1], dtype=torch.int8))
    saved(tmp_path, module)
    assert slug_of(lambda: load_checkpoint(tmp_path, other, cast=True)) == "narrower-dtype"


class Refusing:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ValueError("no")


def test_nothing_changes_if_one_part_refuses(tmp_path):
    streams = Streams(1)
    streams.declare("s")
    saved(tmp_path, linear(0), streams=streams, user={"refusing": Refusing()})
    module = linear(1)
    before = module[0].weight.clone()
    with Checkpointer(tmp_path, module, streams=streams, user={"refusing": Refusing()}) as checkpoints:
        assert slug_of(checkpoints.resume) == "failed"
    with Checkpointer(tmp_path, module, streams=streams) as checkpoints, streams("s"):
        assert slug_of(checkpoints.resume) == "stream-open"
    assert torch.equal(module[0].weight, before)


def test_state_with_odd_names_and_dtypes_is_refused(tmp_path):
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module[0].weight][0] = torch.zeros(4, 6)
    with Checkpointer(tmp_path, module, optimizer=optimizer) as checkpoints:
        assert slug_of(lambda: checkpoints.save(1)) == "unsavable-state"
    assert slug_of(lambda: save_pretrained(module, tmp_path / "out", dtype=torch.complex64)) == "unsavable-dtype"
