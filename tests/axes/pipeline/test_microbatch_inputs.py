"""What a step splits along the batch, and where the sequences of each data rank are in the global batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ShapeError, build_mesh, full_gradients, next_tokens, parallelize_model
from parallelize.axes.batch.input_batch import BatchForm
from parallelize.axes.pipeline.batch_reader import MicrobatchInputs, split_batch
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks

IDS = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


class Weighted(nn.Module):
    """Its second input is a vector, of classes or of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.double()

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * (weights.sum() if len(weights) == 4 else weights[:, None, None]))


def step(model: nn.Module, *args: torch.Tensor, whole: object = (), **kwargs: torch.Tensor) -> float:
    """The loss of a step of two microbatches."""

    def body(rank: int) -> float:
        mesh = build_mesh("cpu", dp=1)
        parallel = parallelize_model(copy.deepcopy(model), mesh, num_microbatches=2, whole=whole)
        return float(parallel.step(*args, targets=next_tokens(IDS), **kwargs))

    return run_ranks(1, body)[0]


class AnyInputs(nn.Module):
    def forward(self, **inputs: object) -> None: ...


def split(inputs: dict, targets: object = IDS, *, count: int = 2, whole: object = ()) -> list[MicrobatchInputs]:
    return split_batch(BatchForm(AnyInputs(), whole).step_batch((), inputs, targets), count)


def loss(logits: torch.Tensor) -> float:
    return float(F.cross_entropy(logits.flatten(0, 1), next_tokens(IDS).flatten()))


def test_a_vector_that_has_the_size_of_the_batch_is_split_or_not_as_its_user_says():
    model = Weighted()
    for passed in ((), (WEIGHTS,)):
        named = {} if passed else {"weights": WEIGHTS}
        with pytest.raises(ShapeError, match="weights") as error:
            step(model, IDS, *passed, **named)
        assert error.value.slugs == ("unclear-batch-dim",)
        for whole in ("weights", ("weights",), {"weights": True}):
            assert step(model, IDS, *passed, whole=whole, **named) == pytest.approx(
                loss(model(IDS, WEIGHTS)), abs=1e-12
            )
        rows = model.head(model.embed(IDS) * WEIGHTS[:, None, None])
        assert step(model, IDS, *passed, whole={"weights": False}, **named) == pytest.approx(loss(rows), abs=1e-12)


SQUARE = torch.arange(16).view(4, 4)


@pytest.mark.parametrize(
    ("inputs", "clear"),
    [
        ({"ids": IDS, "labels": torch.arange(4)}, True),  # one class for each sequence
        ({"ids": IDS, "mask": torch.zeros(4, 6)}, True),
        ({"ids": IDS, "positions": torch.arange(6)}, True),
        ({"ids": torch.arange(4), "scale": torch.ones(4)}, True),  # a model of vectors
        ({"ids": SQUARE, "positions": SQUARE}, True),
        ({"ids": SQUARE, "attention_mask": torch.ones(4, 4)}, True),
        ({"ids": SQUARE, "positions": torch.arange(4)}, False),
        ({"ids": SQUARE, "mask": torch.zeros(4, 4)}, False),
        ({"ids": SQUARE, "mask": torch.zeros(4, 4, dtype=torch.bool)}, False),
        ({"ids": IDS, "pair": (torch.ones(3), torch.ones(4))}, False),
    ],
)
def test_what_is_clear(inputs, clear):
    assert len(split(inputs, count=1)) == 1  # nothing is split
    if clear:
        last = split(inputs)[1].kwargs
        assert torch.equal(last["ids"], inputs["ids"][2:])
        return
    with pytest.raises(ShapeError) as error:
        split(inputs)
    assert error.value.slugs == ("unclear-batch-dim",)


def test_targets_in_a_dict_are_asked_about_too():
    targets = {"labels": IDS, "reward": torch.ones(4)}
    with pytest.raises(ShapeError, match=r'whole=."targets": False'):
        split({"ids": IDS}, targets)
    parts = split({"ids": IDS}, targets, whole={"targets": False})
    assert [len(part.targets["reward"]) for part in parts] == [2, 2]
    assert [len(part.targets) for part in split({"ids": IDS}, torch.ones(4))] == [2, 2]


def test_the_batch_is_that_of_the_ids_in_any_order_of_inputs():
    inputs = {"classes": torch.ones(3, 2), "input_ids": IDS}
    for named in (inputs, {"table": torch.ones(20, 2), **inputs}):
        parts = split(named)
        assert [len(part.kwargs["input_ids"]) for part in parts] == [2, 2] and parts[1].batch_offset == 2


@pytest.mark.parametrize("sizes", [(3, 2), (1, 4), (2, 2)])
def test_data_ranks_with_unequal_batches_drop_what_one_process_drops(sizes):
    stock = tiny_model("gpt2", torch.float64, resid_pdrop=0.4, attn_pdrop=0.2)
    ids, labels = tiny_batch(batch=sum(sizes), length=6)

    def body(axes):
        def run(rank):
            mesh = build_mesh("cpu", **axes)
            parallel = parallelize_model(copy.deepcopy(stock), mesh, "gpt2")
            data = mesh.get_local_rank("dp") if axes["dp"] > 1 else 0
            rows = slice(sum(sizes[:data]), sum(sizes[: data + 1])) if axes["dp"] > 1 else slice(None)
            losses = [float(parallel.step(input_ids=ids[rows], targets=labels[rows])) for _ in range(2)]
            return losses, full_gradients(parallel.module)

        return run

    expected, gradients = run_ranks(1, body({"dp": 1, "tp": 1}))[0]
    assert expected[0] != expected[1]
    for losses, other in run_ranks(4, body({"dp": 2, "tp": 2})):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert worst(other, gradients)[0] < 1e-11
