"""Global batches whose samples are dealt by what they cost: rows of uneven length, and documents joined to rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from parallelize import FittedRows, GlobalBatches, JoinedRows, RowCosts, collate_rows
from tests.matrix.feature import feature
from tests.matrix.kinds import IGNORED, VOCAB
from tests.matrix.sides import Side

T = torch.Tensor
LENGTHS = (29, 3, 4, 2, 5, 11, 6, 2, 3, 7, 4, 2, 9, 5, 2, 13)
"""Of the documents of a step: a long one, which is a rank's alone on four ranks, and many short ones."""
COSTS = RowCosts(token=1.0, pair=0.05)
STEPS = 2


def _documents() -> list[dict[str, T]]:
    """Of two steps; the first tokens of longer ones are not learned."""
    generator = torch.Generator().manual_seed(7)
    documents = []
    for length in LENGTHS * STEPS:
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < length // 4, IGNORED, ids)
        documents.append({"input_ids": ids, "labels": labels})
    return documents


def _alone(side: Any, documents: list[dict[str, T]]) -> None:
    """Each document by itself: the static run, without padding, rows or microbatches."""
    total = sum(int((document["labels"][1:] != IGNORED).sum()) for document in documents)
    losses = []
    for document in documents:
        targets = document["labels"].roll(-1)
        targets[-1] = IGNORED
        output = side.model(input_ids=document["input_ids"][None], use_cache=False)
        losses.append(side.summed_loss(output, targets[None]) / total)
        losses[-1].backward()
    side.record("loss", torch.stack(losses).sum().detach())


def _microbatches(side: Any) -> int:
    return 4 // side.axis.data_ranks


def _train(side: Any, batches: Any, loader: DataLoader) -> None:
    for number, batch in enumerate(batches.track(loader)):
        if number:
            side.update()
        side.record("loss", side.parallel.step(**batch))


def _train_alone(side: Side) -> None:
    documents = _documents()
    for number in range(STEPS):
        if number:
            side.update()
        _alone(side, documents[number * len(LENGTHS) : (number + 1) * len(LENGTHS)])


@feature(needs={"text", "stock"}, without={"recurrent"}, names=("JoinedRows", "RowCosts"))
def balanced_documents(side: Any) -> None:
    """Documents joined to rows of uneven length, one for each microbatch."""
    if side.alone:
        return _train_alone(side)
    side.place(num_microbatches=_microbatches(side))
    rows, batches = _joined(side)
    return _train(side, batches, DataLoader(rows, batch_sampler=batches, collate_fn=collate_rows))


def _joined(side: Any) -> tuple[JoinedRows, GlobalBatches]:
    rows = JoinedRows(_documents(), unshifted=True)
    batches = GlobalBatches(
        len(rows),
        len(LENGTHS),
        shuffle=False,
        mesh=side.mesh,
        costs=COSTS.of(rows.lengths),
        num_microbatches=_microbatches(side),
        joined=True,
    )
    return rows, batches


@feature(needs={"text", "stock"}, without={"recurrent"})
def balanced_rows(side: Any) -> None:
    """Rows with a document each, of which each rank and microbatch gets as many, cut to the longest of a microbatch."""
    if side.alone:
        return _train_alone(side)
    side.place(num_microbatches=_microbatches(side))
    rows, _ = _joined(side)
    batches = GlobalBatches(
        len(rows),
        len(LENGTHS),
        shuffle=False,
        mesh=side.mesh,
        costs=COSTS.of(rows.lengths),
        num_microbatches=_microbatches(side),
    )
    return _train(side, batches, DataLoader(rows, batch_sampler=batches, collate_fn=collate_rows))


@feature(needs={"text", "stock"}, without={"recurrent"})
def balanced_fitted_rows(side: Any) -> None:
    """Rows of one length, whose documents cost more or less, over the ranks."""
    documents = _documents()
    if side.alone:
        _alone(side, documents)
        return
    side.place(num_microbatches=1 if "pp" not in side.axis.sizes else _microbatches(side))
    rows = FittedRows(documents, 29, unshifted=True)
    count = len(rows) - len(rows) % 4
    assert count == len(rows), "all rows are in the batch"
    costs = COSTS.of_rows(rows.row_lengths)
    batches = GlobalBatches(count, count, shuffle=False, mesh=side.mesh, costs=costs)
    _train(side, batches, DataLoader(rows, batch_sampler=batches, collate_fn=collate_rows))
