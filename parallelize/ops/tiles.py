"""What one rank computes of attention between its own query rows and a block of key rows, as few calls of a kernel as can be.

Rows are known by the runs of the sequence that they are. Between a run of queries and a run of keys a causal or windowed mask
lets all pairs through, none, or some; neighbours of one kind are one tile. Pure arithmetic, torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

Run = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """Local rows q_start to q_stop of the queries against k_start to k_stop of the keys.

    kind: "full"; "causal", where both are the same rows in the same order; or "masked", where only positions tell.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: str


def tiles(queries: tuple[Run, ...], keys: tuple[Run, ...], causal: bool, window: int) -> list[Tile]:
    """The tiles between two lists of runs, each in ascending order.

    Args:
        window: how many rows back a query sees, itself included; 0 for no limit. Only with `causal`.
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
    """By the least and the greatest distance back from a query to a key."""
    least, most = q_start - (k_stop - 1), q_stop - 1 - k_start
    if most < 0 or (window and least >= window):
        return ""
    if least >= 0 and (not window or most < window):
        return "full"
    return "causal" if (q_start, q_stop) == (k_start, k_stop) and (not window or most < window) else "masked"


def _merged(found: list[Tile]) -> list[Tile]:
    """Full tiles that lie beside each other, then those that lie below each other, as one."""
    out: list[Tile] = []
    for tile in found:
        last = out[-1] if out else tile
        if out and tile.kind == last.kind == "full" and (tile.q_start, tile.k_start) == (last.q_start, last.k_stop):
            out[-1] = replace(last, k_stop=tile.k_stop)
        else:
            out.append(tile)
    down: list[Tile] = []
    for tile in out:
        above = next((n for n, one in enumerate(down) if _below(tile, one)), None)
        if above is None:
            down.append(tile)
        else:
            down[above] = replace(down[above], q_stop=tile.q_stop)
    return down


def _below(tile: Tile, above: Tile) -> bool:
    same = (tile.k_start, tile.k_stop) == (above.k_start, above.k_stop)
    return tile.kind == above.kind == "full" and same and tile.q_start == above.q_stop
