"""The tiles that a rank of a ring computes against the block of each rank, with their masks and their dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from parallelize.comm.groups import Group
from parallelize.ops.attention.score_blocks import Mask
from parallelize.ops.attention.weight_dropout import TileDropout, WeightDropout

# -- blocks ----------------------------------------------------------------------------------------------------------
# The tiles of attention that one rank computes between its query rows and a block of key rows, in as few kernel calls
# as possible. Rows are given as runs of positions in the sequence. Between a run of queries and a run of keys, a
# causal or windowed mask allows all pairs, none, or some; adjacent pairs of runs of the same kind form one tile. Pure
# arithmetic, torch-free.


Run = tuple[int, int]
"""[start, stop) of consecutive positions"""


@dataclass(frozen=True)
class Tile:
    """Local rows q_start to q_stop of the queries against k_start to k_stop of the keys.

    kind: "full"; "causal" if queries and keys are the same rows in the same order; "masked" if it needs a mask by
    positions.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: str


def tiles(queries: tuple[Run, ...], keys: tuple[Run, ...], causal: bool, window: int) -> list[Tile]:
    """The tiles between two lists of runs, each in ascending order.

    Args:
        window: number of positions that a query may attend to, including its own; 0 for no limit. Only with `causal`.
    """
    rows, columns = sum(b - a for a, b in queries), sum(b - a for a, b in keys)
    if not rows or not columns:
        return []
    if not causal:
        return [Tile(0, rows, 0, columns, "full")]
    if queries == keys and (not window or window >= queries[-1][1] - queries[0][0]):
        return [Tile(0, rows, 0, columns, "causal")]
    return _merged(list(_pairs(queries, keys, window)))


def _pairs(queries: tuple[Run, ...], keys: tuple[Run, ...], window: int) -> Iterator[Tile]:
    row = 0
    for q_start, q_stop in queries:
        column = 0
        for k_start, k_stop in keys:
            kind = _kind(q_start, q_stop, k_start, k_stop, window)
            if kind:
                yield Tile(row, row + q_stop - q_start, column, column + k_stop - k_start, kind)
            column += k_stop - k_start
        row += q_stop - q_start


def _kind(q_start: int, q_stop: int, k_start: int, k_stop: int, window: int) -> str:
    """The kind of a pair of runs, from the smallest and largest distance from a query back to a key; "" if all is
    masked."""
    nearest, farthest = q_start - (k_stop - 1), q_stop - 1 - k_start
    if farthest < 0 or (window and nearest >= window):
        return ""
    within = not window or farthest < window
    if nearest >= 0 and within:
        return "full"
    return "causal" if (q_start, q_stop) == (k_start, k_stop) and within else "masked"


def _merged(pairs: list[Tile]) -> list[Tile]:
    """Full tiles that are adjacent along the keys merged, then those that are adjacent along the queries."""
    along_keys: list[Tile] = []
    for tile in pairs:
        last = along_keys[-1] if along_keys else None
        if last and tile.kind == last.kind == "full" and (tile.q_start, tile.k_start) == (last.q_start, last.k_stop):
            along_keys[-1] = replace(last, k_stop=tile.k_stop)
        else:
            along_keys.append(tile)
    out: list[Tile] = []
    for tile in along_keys:
        above = next((n for n, other in enumerate(out) if _is_below(tile, other)), None)
        if above is None:
            out.append(tile)
        else:
            out[above] = replace(out[above], q_stop=tile.q_stop)
    return out


def _is_below(tile: Tile, above: Tile) -> bool:
    same_keys = (tile.k_start, tile.k_stop) == (above.k_start, above.k_stop)
    return tile.kind == above.kind == "full" and same_keys and tile.q_start == above.q_stop


# -- ring tiles ------------------------------------------------------------------------------------------------------


T = torch.Tensor
Ring = list[tuple[Run, ...]]
"""The positions of each rank of the ring, ascending"""


@dataclass(frozen=True)
class Masking:
    """Which keys a query attends to, and how scores are computed.

    Args:
        causal: only keys at the same or an earlier position.
        window: number of positions back, including the query's own; 0 for no limit. Only with `causal`.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap); 0 for none.
    """

    causal: bool = False
    window: int = 0
    scale: float = 1.0
    softcap: float = 0.0


def ring_of_flat(flat: list[int]) -> Ring:
    """The positions of each rank, from the op's argument."""
    ring: Ring = []
    start = 0
    while start < len(flat):
        edges = flat[start + 1 : start + 1 + 2 * flat[start]]
        ring.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
        start += 1 + len(edges)
    return ring


class RingTiles:
    """The tiles of the local queries against each rank's block, with their masks."""

    def __init__(
        self, q: T, documents: T | None, ring: Ring, masking: Masking, dropout: WeightDropout | None, group: Group
    ):
        self.ring, self.masking, self.device = ring, masking, q.device
        self.queries, self.documents, self._dropout = ring[group.rank], documents, dropout
        self.full = sum(map(num_tokens, ring))

    def block(self, ring_rank: int) -> Iterator[tuple[Tile, Mask | None]]:
        keys = self.ring[ring_rank]
        for tile in tiles(self.queries, keys, self.masking.causal, self.masking.window):
            if self.documents is None and tile.kind != "masked":
                yield tile, None
            else:  # documents mask every tile, so that no tile is the kernel's own causal one
                masked = Tile(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop, "masked")
                yield masked, self._mask(tile, self._positions(keys)[tile.k_start : tile.k_stop])

    def dropout(self, tile: Tile, ring_rank: int) -> TileDropout | None:
        """The dropout of a tile against the block of this rank."""
        if self._dropout is None:
            return None
        queries = self._positions(self.queries)[tile.q_start : tile.q_stop]
        keys = self._positions(self.ring[ring_rank])[tile.k_start : tile.k_stop]
        return TileDropout(self._dropout, queries, keys, self.full)

    def _positions(self, runs: tuple[Run, ...]) -> T:
        positions = [torch.arange(*run, device=self.device) for run in runs]
        return torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64, device=self.device)

    def _mask(self, tile: Tile, key_positions: T) -> Mask:
        positions = self._positions(self.queries)[tile.q_start : tile.q_stop]

        def visible(start: int, stop: int) -> T:
            return visible_keys(positions[start:stop], key_positions, self.masking, self.documents)

        return visible


def visible_keys(queries: T, keys: T, masking: Masking, documents: T | None) -> T:
    """Which keys each query attends to, by their positions in the full sequence: [B or 1, 1, queries, keys].

    Args:
        documents: [B or 1, S], the document of each position, -1 - d for padding; None for one document.
    """
    distance = queries.unsqueeze(-1) - keys
    mask = torch.ones_like(distance, dtype=torch.bool)
    if masking.causal:
        mask = distance >= 0
    if masking.window:
        mask = mask & (distance < masking.window)
    if documents is None:
        return mask.view(1, 1, *mask.shape)
    of_queries, of_keys = documents[:, queries], documents[:, keys]
    of_queries = torch.where(of_queries < 0, -1 - of_queries, of_queries)
    return (mask & (of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2))).unsqueeze(1)


def num_tokens(runs: tuple[Run, ...]) -> int:
    return sum(stop - start for start, stop in runs)
