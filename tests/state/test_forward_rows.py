"""Rows of a router are found in the batch, whatever part of it this rank has."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ShapeError, build_mesh, parallelize_model
from parallelize.state.forward_rows import call_arguments, forward_rows
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

BATCH, LENGTH = 2, 7


def rows_by_rank(sizes, **options):
    """What each rank's routers get of embeddings that are the index of their token, and where `indices` says that they
    are from."""
    model = tiny_model("mixtral", num_hidden_layers=1)
    models = [copy.deepcopy(model) for _ in range(torch.tensor(list(sizes.values())).prod())]
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)

    def body(rank):
        mixture, seen = models[rank], []
        parallelize_model(mixture, build_mesh("cpu", **sizes), **options)
        gate = mixture.model.layers[0].mlp.gate
        gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape.numel() // args[0].shape[-1]))
        rows = forward_rows(mixture, call_arguments(mixture, (ids,), {}))
        with torch.no_grad():
            mixture(input_ids=ids)
        return rows.indices(seen[0], ids.device)

    return run_ranks(len(models), body)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"tp": 4}, {"sequence_parallel": True}),
        ({"cp": 2}, {}),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ],
)
def test_ranks_have_each_token_once(sizes, options):
    indices = rows_by_rank(sizes, **options)
    copies = 2 if sizes == {"tp": 2} and not options else 1
    kept = torch.cat([rows[rows >= 0] for rows in indices])
    assert sorted(kept.tolist()) == sorted(list(range(BATCH * LENGTH)) * copies)


def test_sequence_shards_are_padded_at_their_end():
    first, second = rows_by_rank({"tp": 2}, sequence_parallel=True)
    assert first.tolist() == [0, 1, 2, 3, 7, 8, 9, 10]
    assert second.tolist() == [4, 5, 6, -1, 11, 12, 13, -1]


def test_other_rows_are_an_error():
    model = tiny_model("mixtral")
    rows = forward_rows(model, {"input_ids": torch.zeros(BATCH, LENGTH)})
    with pytest.raises(ShapeError, match=r"unknown-rows: a router got 5 rows of inputs \[2, 7\]"):
        rows.indices(5, torch.device("cpu"))
