"""The global index of each element of a local activation, which makes a dropout mask the same on every mesh.

full      [batch, ..]            all elements, except the batch rows of other data ranks and microbatches
sequence  [batch, s, ..]         the tokens of a sequence shard, ceil(S / P) per rank
features  [.., w]                the local columns of a column linear, according to its layout
heads     [batch, n, .., ..]     the local heads

Over `cp` a rank has the tokens of some runs of the sequence, of which "sequence" is a slice: see `LocalTokens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Interval, Layout, count, slice_runs
from parallelize.ops.random.counter import IndexRun


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of one rank of `cp`.

    Args:
        full: tokens of the full sequence.
        runs: [start, stop) of the rank's consecutive positions, in the order of its tokens.
    """

    full: int
    runs: tuple[Interval, ...]

    @property
    def count(self) -> int:
        return count(self.runs)

    def shard(self, rank: int, size: int) -> LocalTokens:
        """The tokens of a shard of a sequence-parallel region: ceil(s / size) of them, fewer where shards are
        padded."""
        each = -(-self.count // size)
        return replace(self, runs=slice_runs(self.runs, rank * each, (rank + 1) * each))

    def positions(self, device: torch.device) -> torch.Tensor:
        """The position of each token, int64 [s]."""
        return torch.cat([torch.arange(*run, device=device) for run in self.runs])


@dataclass(frozen=True)
class ActivationLayout:
    """The layout of activations at one call site, determined at its first call.

    Args:
        kind: "full", "sequence", "features" or "heads".
        rank, size: rank and size of the tp group.
        columns: for "features", the global intervals of the local columns, in order.
        width: for "features", the number of columns over all ranks.
    """

    kind: str
    rank: int = 0
    size: int = 1
    columns: tuple[Interval, ...] = ()
    width: int = 0

    def global_index(
        self,
        shape: torch.Size,
        batch: tuple[int, int | None],
        tokens: int | None,
        device: torch.device,
        local: LocalTokens | None = None,
    ) -> tuple[torch.Tensor, list[IndexRun]]:
        """(offsets, runs) for `counter.blocks`: the tensor as rows, each of runs with consecutive global indices.

        Args:
            batch: (global row of the first batch row, batch rows of this call or None).
            tokens: the full sequence length, for "sequence".
            local: the tokens of this rank, over `cp`.
        """
        if local is not None:
            return self._indices_over_cp(shape, batch, local, device)
        first = first_row(shape, *batch)
        if self.kind == "full":
            row_size = math.prod(shape[1:])
            return _offsets(1, 0, device), [IndexRun(0, first * row_size, math.prod(shape))]
        if self.kind == "sequence":
            return self._sequence(shape, first, tokens, device)
        if self.kind == "heads":
            row_size = math.prod(shape[1:])
            offsets = _offsets(shape[0], row_size * self.size, device, first)
            return offsets, [IndexRun(0, self.rank * row_size, row_size)]
        rows = math.prod(shape[:-1])
        offsets = _offsets(rows, self.width, device, first * (rows // max(shape[0], 1)))
        return offsets, self._column_runs()

    def _sequence(
        self, shape: torch.Size, first: int, tokens: int | None, device: torch.device
    ) -> tuple[torch.Tensor, list[IndexRun]]:
        local_tokens = -(-tokens // self.size) if tokens else 0
        flattened = len(shape) == 2 and local_tokens > 0 and shape[0] % local_tokens == 0  # [batch times s, hidden]
        if local_tokens == 0 or not (flattened or (len(shape) > 2 and shape[1] == local_tokens)):
            raise no_global_mask(
                f"an activation of shape {list(shape)} inside the sequence-parallel region of {tokens} tokens",
                "keep activations [batch, sequence, ...] where dropout is, or turn sequence_parallel off",
            )
        batch = shape[0] // local_tokens if flattened else shape[0]
        first = first // local_tokens if flattened else first
        token_size = math.prod(shape[1 if flattened else 2 :])
        run = IndexRun(0, self.rank * local_tokens * token_size, local_tokens * token_size)
        return _offsets(batch, (tokens or 0) * token_size, device, first), [run]

    def _indices_over_cp(
        self, shape: torch.Size, batch: tuple[int, int | None], local: LocalTokens, device: torch.device
    ) -> tuple[torch.Tensor, list[IndexRun]]:
        is_shard = self.kind == "sequence"
        tokens = -(-local.count // self.size) if is_shard else local.count
        rows, token_shape = _rows_and_token_shape(shape, tokens)
        first = first_row(torch.Size((rows,)), *batch)
        if self.kind == "features":
            return self._features_of_tokens(first, rows, token_shape, local, device)
        token_size = math.prod(token_shape)
        runs, position = [], 0
        for start, stop in local.shard(self.rank, self.size).runs if is_shard else local.runs:
            runs.append(IndexRun(position * token_size, start * token_size, (stop - start) * token_size))
            position += stop - start
        return _offsets(rows, local.full * token_size, device, first), runs

    def _features_of_tokens(
        self, first: int, rows: int, token_shape: tuple[int, ...], local: LocalTokens, device: torch.device
    ) -> tuple[torch.Tensor, list[IndexRun]]:
        """Rows of a batch, of tokens, and of what a token has before its last dim, each of runs of columns."""
        each = math.prod(token_shape[:-1])
        tokens = _offsets(rows, local.full, device, first).unsqueeze(-1) + local.positions(device)
        offsets = (tokens.unsqueeze(-1) * each + torch.arange(each, device=device)).flatten() * self.width
        return offsets, self._column_runs()

    def _column_runs(self) -> list[IndexRun]:
        runs, local = [], 0
        for start, stop in self.columns:
            runs.append(IndexRun(local, start, stop - start))
            local += stop - start
        return runs


def _rows_and_token_shape(shape: torch.Size, tokens: int) -> tuple[int, tuple[int, ...]]:
    """(batch rows, shape of a token) of an activation [batch, tokens, ..] or [batch times tokens, hidden]."""
    if len(shape) == 2 and tokens and shape[0] % tokens == 0:
        return shape[0] // tokens, shape[1:]
    if len(shape) > 2 and shape[1] == tokens and (len(shape) == 3 or shape[2] != tokens):
        return shape[0], shape[2:]
    raise no_global_mask(
        f"an activation of shape {list(shape)} over cp, where this rank has {tokens} tokens of each sequence",
        "keep activations [batch, sequence, ...] where dropout is, or use a mesh without cp",
    )


def _offsets(rows: int, stride: int, device: torch.device, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + rows, device=device) * stride


def first_row(shape: torch.Size, offset: int, rows: int | None) -> int:
    """The index in the global batch at which the first dim starts.

    The first dim may be the batch, batch times sequence, or 1 for a tensor without a batch.
    """
    if offset == 0 or not shape:
        return 0
    if rows is None or shape[0] == rows:
        return offset
    if shape[0] == 1:
        return 0
    if shape[0] % rows:
        raise no_global_mask(
            f"the first dim of an activation of shape {list(shape)}, in a batch of {rows} rows",
            "keep the batch in the first dim, by itself or times the sequence",
        )
    return offset * (shape[0] // rows)


def columns_of(layout: Layout, rank: int, width: int) -> ActivationLayout | None:
    """The layout of a column linear's output, or of one of its equal chunks; None for any other width."""
    assert layout.dim is not None
    full, owned = layout.shape[layout.dim], layout.owned[rank]
    if width == layout.local_size(rank):
        return ActivationLayout("features", rank, layout.num_ranks, owned, full)
    chunks = len(owned)
    if chunks > 1 and width * chunks == layout.local_size(rank) and full % chunks == 0:
        step = full // chunks
        intervals = [(start - n * step, stop - n * step) for n, (start, stop) in enumerate(owned)]
        if all(interval == intervals[0] for interval in intervals):  # gate and up, split from one matmul
            return ActivationLayout("features", rank, layout.num_ranks, (intervals[0],), step)
    return None


def no_global_mask(what: str, fix: str, fqn: str = "") -> ModelError:
    """The error for dropout whose result would depend on the mesh."""
    return ModelError(Problem("unplaceable-dropout", f"no global mask can be drawn for {what}", fqn, fix=fix))
