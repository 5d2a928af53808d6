"""Where a local activation lies in the global one: what makes a dropout mask the same on every mesh.

whole     [batch, ..]            all of it, but for the batch rows of other data ranks and microbatches
sequence  [batch, s, ..]         rows of a sequence shard, ceil(S / P) a rank
features  [.., w]                columns after a column linear, as its layout says
heads     [batch, n, .., ..]     the heads of this rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallelize.errors import ModelError, Problem
from parallelize.layout import Interval, Layout
from parallelize.randomness.counter import Run


@dataclass(frozen=True)
class Spread:
    """How activations lie at one site, found once.

    Args:
        kind: "whole", "sequence", "features" or "heads".
        rank, size: of the tp group.
        columns: of "features": the global intervals that this rank holds, in order.
        width: of "features": columns of all ranks.
    """

    kind: str
    rank: int = 0
    size: int = 1
    columns: tuple[Interval, ...] = ()
    width: int = 0

    def place(
        self, shape: torch.Size, batch: tuple[int, int | None], tokens: int | None, device: torch.device
    ) -> tuple[torch.Tensor, list[Run]]:
        """(offsets, runs) for `counter.blocks`: the tensor as rows of runs of neighbours.

        Args:
            batch: (global row of the first batch row, batch rows of this call or None).
            tokens: the full sequence length, for "sequence".
        """
        first = _first_row(shape, *batch)
        if self.kind == "whole":
            each = math.prod(shape[1:])
            return _rows(1, 0, device), [Run(0, first * each, math.prod(shape))]
        if self.kind == "sequence":
            return self._sequence(shape, first, tokens, device)
        if self.kind == "heads":
            each = math.prod(shape[1:])
            offsets = _rows(shape[0], each * self.size, device, first)
            return offsets, [Run(0, self.rank * each, each)]
        rows = math.prod(shape[:-1])
        offsets = _rows(rows, self.width, device, first * (rows // max(shape[0], 1)))
        runs, at = [], 0
        for start, stop in self.columns:
            runs.append(Run(at, start, stop - start))
            at += stop - start
        return offsets, runs

    def _sequence(
        self, shape: torch.Size, first: int, tokens: int | None, device: torch.device
    ) -> tuple[torch.Tensor, list[Run]]:
        rows = -(-tokens // self.size) if tokens else 0
        flattened = len(shape) == 2 and rows > 0 and shape[0] % rows == 0  # [batch times s, hidden]
        if rows == 0 or not (flattened or (len(shape) > 2 and shape[1] == rows)):
            raise unplaceable(
                f"an activation of shape {list(shape)} inside the sequence-parallel region of {tokens} tokens",
                "keep activations [batch, sequence, ...] where dropout is, or turn sequence_parallel off",
            )
        batch = shape[0] // rows if flattened else shape[0]
        first = first // rows if flattened else first
        each = math.prod(shape[1 if flattened else 2 :])
        run = Run(0, self.rank * rows * each, rows * each)
        return _rows(batch, (tokens or 0) * each, device, first), [run]


def _rows(count: int, stride: int, device: torch.device, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, device=device) * stride


def _first_row(shape: torch.Size, offset: int, rows: int | None) -> int:
    """Where the first dim begins in the global batch. It may hold tokens (batch times sequence), or no batch at all."""
    if offset == 0 or not shape:
        return 0
    if rows is None or shape[0] == rows:
        return offset
    if shape[0] == 1:
        return 0
    if shape[0] % rows:
        raise unplaceable(
            f"the first dim of an activation of shape {list(shape)}, in a batch of {rows} rows",
            "keep the batch in the first dim, whole or times the sequence",
        )
    return offset * (shape[0] // rows)


def columns_of(layout: Layout, rank: int, width: int) -> Spread | None:
    """The spread of a column linear's output, or of one of its equal chunks; None where the width is another."""
    assert layout.dim is not None
    full, owned = layout.shape[layout.dim], layout.owned[rank]
    if width == layout.local_size(rank):
        return Spread("features", rank, layout.num_ranks, owned, full)
    chunks = len(owned)
    if chunks > 1 and width * chunks == layout.local_size(rank) and full % chunks == 0:
        step = full // chunks
        parts = [(start - n * step, stop - n * step) for n, (start, stop) in enumerate(owned)]
        if all(part == parts[0] for part in parts):  # gate and up, split from one product
            return Spread("features", rank, layout.num_ranks, (parts[0],), step)
    return None


def unplaceable(what: str, fix: str, where: str = "") -> ModelError:
    """Dropout that would depend on the mesh, in silence, if it ran."""
    return ModelError(Problem("unplaceable-dropout", f"no global mask can be drawn for {what}", where, fix=fix))
