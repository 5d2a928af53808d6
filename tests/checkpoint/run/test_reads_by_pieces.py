"""Loads whose tensors are filled by threads, piece by piece, as those of a GPU are; here they are on the CPU."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from parallelize import Checkpointer, build_mesh, full_parameter, load_checkpoint, load_pretrained, parallelize_module
from parallelize.base.files import digests
from parallelize.checkpoint.format import reader, writer
from parallelize.checkpoint.format.device_pieces import DevicePieces
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks


@pytest.fixture(autouse=True)
def _by_pieces(monkeypatch):
    for module in (digests, reader, writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 128)
    monkeypatch.setattr(reader, "goes_by_pieces", lambda device: True)
    monkeypatch.setattr(reader, "DevicePieces", partial(DevicePieces, piece_bytes=256))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, labels = tiny_batch(seed=1)
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    return model, optimizer


def on_meta() -> torch.nn.Module:
    return tiny_model("llama").to("meta")


def differing(model: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    return [name for name, value in expected.named_parameters() if not torch.equal(full_parameter(model, name), value)]


def test_a_run_continues(tmp_path):
    """Weights of the live model are compared before they are read, and moments of its new optimizer read meanwhile."""
    model, optimizer = trained()
    with Checkpointer(tmp_path, model, optimizer=optimizer) as checkpoints:
        checkpoints.save(1)
    other = tiny_model("llama", seed=5)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    load_checkpoint(tmp_path, other, optimizer=other_optimizer)
    assert differing(other, model) == []
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("start", ["on meta", "live"])
@pytest.mark.parametrize("source", ["checkpoint", "pretrained"])
def test_shards_of_both_dims(tmp_path, source, start):
    model, _ = trained()
    if source == "checkpoint":
        with Checkpointer(tmp_path, model) as checkpoints:
            checkpoints.save(1)
    else:
        model.save_pretrained(tmp_path)
    models = [on_meta() if start == "on meta" else copy.deepcopy(tiny_model("llama", seed=5)) for _ in range(2)]

    def body(rank: int) -> list[str]:
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), "llama")
        load = load_checkpoint if source == "checkpoint" else lambda folder, module: load_pretrained(module, folder)
        load(tmp_path, planned)
        return differing(planned, model)

    assert run_ranks(2, body) == [[], []]
