"""The tiles of attention that one rank computes between its query rows and a block of key rows, in as few kernel calls as possible.

Rows are given as runs of positions in the sequence. Between a run of queries and a run of keys, a causal or windowed mask allows
all pairs, none, or some; adjacent pairs of runs of the same kind form one tile. Pure arithmetic, torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

Run = tuple[int, int]
"""[start, stop) of consecutive positions"""


@dataclass(frozen=True)
class Tile:
    """Local rows q_start to q_stop of the queries against k_start to k_stop of the keys.

    kind: "full"; "causal" if queries and keys are the same rows in the same order; "masked" if it needs a mask by positions.
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
    """The kind of a pair of runs, from the smallest and largest distance from a query back to a key; "" if all is masked."""
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
