"""Lists, tuples, NumPy arrays and objects among the inputs of a step: split with the sequences, passed whole, or
refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import HandshakeError, ShapeError, build_mesh, full_gradients, parallelize_model
from parallelize.axes.batch.input_batch import BatchForm
from parallelize.axes.pipeline.batch_reader import split_batch
from tests.support.parity import worst
from tests.support.threads import run_ranks

ROWS = 8
IDS = torch.randint(0, 50, (ROWS, 10), generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(ROWS) % 5
LENGTHS = [3, 10, 5, 7, 2, 9, 4, 6]


class Pooled(nn.Module):
    """The mean of the first tokens of each sequence, as many as its length says."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 5)
        self.double()

    def forward(self, ids: torch.Tensor, lengths: Any, name: str = "") -> torch.Tensor:
        lengths = lengths["of rows"] if isinstance(lengths, dict) else lengths
        return self.out(torch.stack([self.embed(ids[i, : int(lengths[i])]).mean(0) for i in range(len(ids))]))


def step(model: nn.Module, lengths: Any, axes: dict[str, int], whole: Any = ()) -> tuple[float, dict]:
    def body(rank):
        parallel = parallelize_model(
            copy.deepcopy(model),
            build_mesh("cpu", **axes),
            {"embed": "replicate", "out": "replicate"},
            num_microbatches=2,
            whole=whole,
            loss=lambda logits, classes: F.cross_entropy(logits, classes, reduction="sum"),
            count=lambda classes: classes.numel(),
        )
        loss = float(parallel.step(IDS, lengths=lengths, targets=CLASSES, name="four"))
        return loss, full_gradients(parallel.module)

    return run_ranks(2, body)[0]


CUT = {"lengths": False}


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        (torch.tensor(LENGTHS), ()),
        (np.array(LENGTHS), ()),
        (np.array(LENGTHS, dtype=np.float32), CUT),
        (LENGTHS, CUT),
        (tuple(LENGTHS), CUT),
        ([torch.tensor(n) for n in LENGTHS], CUT),
        ({"of rows": LENGTHS}, CUT),
        ({"of rows": np.array(LENGTHS)}, ()),
    ],
)
def test_each_microbatch_gets_the_entries_of_its_sequences(lengths, whole):
    model = Pooled()
    reference = copy.deepcopy(model)
    expected = F.cross_entropy(reference(IDS, lengths), CLASSES)
    expected.backward()
    loss, gradients = step(model, lengths, {"tp": 2}, whole)
    assert loss == pytest.approx(float(expected), abs=1e-12)
    assert worst(gradients, {name: p.grad for name, p in reference.named_parameters()})[0] < 1e-12


class AnyInputs(nn.Module):
    def forward(self, ids: torch.Tensor, **inputs: Any) -> None: ...


def parts(value: Any, count: int = 2, targets: Any = CLASSES, **named: Any) -> list:
    return split_batch(BatchForm(AnyInputs(), **named).step_batch((IDS,), {"value": value}, targets), count)


ENCODED = SimpleNamespace(ids=IDS)
UNCLEAR = [LENGTHS, tuple(LENGTHS), {"a": {"b": LENGTHS}}, ["text"] * ROWS, [torch.ones(3, 4)] * ROWS, ENCODED]
UNCLEAR += [np.ones(ROWS), [{"boxes": torch.ones(n, 4)} for n in LENGTHS]]


@pytest.mark.parametrize("value", UNCLEAR)
def test_what_may_have_an_entry_for_each_sequence_by_chance_is_asked_about(value):
    assert len(parts(value, 1)) == 1  # nothing is split
    with pytest.raises(ShapeError, match=r'whole=."value": True') as error:
        parts(value)
    assert error.value.slugs == ("unclear-batch-dim",)
    assert all(
        part.kwargs["value"] == value for part in parts(value, whole="value") if not isinstance(value, np.ndarray)
    )
    with pytest.raises(ShapeError, match="targets"):
        parts(None, targets=value)


def test_an_object_is_never_split():
    with pytest.raises(ShapeError, match="pass its tensors as inputs of their own"):
        parts(ENCODED, whole=CUT)


@pytest.mark.parametrize("value", ["a text", LENGTHS[:-1], (16, 16), IDS.shape, {"sizes": [1, 2]}, None, np.arange(3)])
def test_all_else_is_passed_to_every_microbatch(value):
    assert all(part.kwargs["value"] is value or part.kwargs["value"] == value for part in parts(value))


def test_a_list_of_tensors_by_batch_holds_tensors_that_are_split():
    for count, features in ((ROWS, [torch.ones(ROWS, 3) for _ in range(ROWS)]), (2, (IDS, {"deep": IDS}))):
        halves = [part.kwargs["value"] for part in parts(features)]
        assert [len(half) for half in halves] == [count, count] and type(halves[0]) is type(features)
        assert all(torch.equal(half[0], features[0][4 * n : 4 * n + 4]) for n, half in enumerate(halves))


def test_ranks_with_other_arrays_are_told():
    def body(rank):
        mesh = build_mesh("cpu", tp=2)
        parallel = parallelize_model(
            Pooled(), mesh, {"embed": "replicate", "out": "replicate"}, loss=lambda z, y: z.sum()
        )
        with pytest.raises(HandshakeError) as error:
            parallel.step(IDS, lengths=np.array(LENGTHS) - (rank == 1), targets=CLASSES)
        return error.value.slugs

    assert run_ranks(2, body) == [("ranks-diverged",)] * 2


@dataclass(frozen=True)
class Text:
    ids: torch.Tensor
    lengths: Any


class OfText(Pooled):
    def forward(self, text: Text) -> torch.Tensor:
        return super().forward(text.ids, text.lengths)


def test_an_object_alone_has_the_rows_of_its_first_tensor():
    """It is the input of one microbatch, and refused where it would have to be split."""
    form, text = BatchForm(OfText()), Text(IDS, LENGTHS)
    for batch in (form.batch((text,), {}), form.batch((), {"text": [3, text]})):
        assert batch.size == ROWS and batch.first is IDS
        assert split_batch(batch, 1)[0].args == batch.args
    with pytest.raises(ShapeError, match=r"unclear-batch-dim.*holds tensors of the size of the batch"):
        split_batch(form.batch((text,), {}, CLASSES), 2)
    with pytest.raises(ShapeError, match="no-inputs"):
        form.batch((Text(3, LENGTHS),), {}).size  # noqa: B018
