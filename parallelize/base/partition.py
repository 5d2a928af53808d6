"""Costs in parts of nearly equal sums, the same on every rank: arithmetic, torch-free.

Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969 (largest first); of few costs
for a part, Karmarkar, Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

Part = list[int]


def balanced_parts(costs: Sequence[float], count: int, *, equal: bool = False) -> list[Part]:
    """The indices of `costs` in `count` parts whose largest sum is small; none is empty where there are enough.

    The largest costs go first, each to the part with the smallest sum, or, with as many in each, one of the next
    `count` to every part. Of few costs a second partition is made by differencing, and the better one is taken. Then
    the largest part changes costs with small ones as long as it becomes smaller.

    Args:
        costs: positive.
        equal: as many in each part, which divides their number.

    Returns: parts in the order of their sums, the largest first; indices ascend. Equal costs give the same parts.
    Cost: O(n log n) for n costs; of up to 16 for a part O(n (log n + count)).
    """
    candidates = [_largest_first(costs, count, equal)]
    if len(costs) <= _FEW * count and len(costs) * count <= _MOST_MERGED:
        candidates.append(_differenced(costs, count, equal))
    for parts in candidates:
        _refine(parts, costs, equal)
    sums = [max(sum(costs[n] for n in part) for part in parts) for parts in candidates]
    parts = candidates[sums.index(min(sums))]
    return sorted((sorted(part) for part in parts), key=lambda part: (-sum(costs[n] for n in part), part))


_FEW = 16
_MOST_MERGED = 2**16
"""Numbers that differencing sorts at most, about 0.1 s."""


def balance_of(sums: Sequence[float]) -> float:
    """The mean over the largest; 1 where all are 0."""
    return sum(sums) / len(sums) / max(sums) if sums and max(sums) > 0 else 1.0


def best_balance(costs: Sequence[float], count: int) -> float:
    """No partition into `count` parts has a better balance: a part has at least the largest of the costs, and with more
    costs than parts, some part has two of the first `count` + 1."""
    ordered, mean = sorted(costs, reverse=True), sum(costs) / count
    least = max(ordered[0], sum(ordered[count - 1 : count + 1]) if len(ordered) > count else 0.0)
    return min(1.0, mean / least) if least > 0 else 1.0


def _largest_first(costs: Sequence[float], count: int, equal: bool) -> list[Part]:
    ordered = sorted(range(len(costs)), key=lambda n: (-costs[n], n))
    parts: list[Part] = [[] for _ in range(count)]
    heap = [(0.0, number) for number in range(count)]
    if not equal:
        for n in ordered:
            total, number = heap[0]
            parts[number].append(n)
            heapq.heapreplace(heap, (total + costs[n], number))
        return parts
    for start in range(0, len(ordered), count):
        heap.sort()
        turn = ordered[start : start + count]
        for n, (_, number) in zip(turn, heap, strict=False):
            parts[number].append(n)
        heap = [(total + costs[n], number) for n, (total, number) in zip(turn, heap, strict=False)]
    return parts


def _differenced(costs: Sequence[float], count: int, equal: bool) -> list[Part]:
    """By the largest differencing method."""
    ordered = sorted(range(len(costs)), key=lambda n: (-costs[n], n))
    size = count if equal else 1
    heap: list[tuple[float, int, list[tuple[float, Part]]]] = []
    for number, start in enumerate(range(0, len(ordered), size)):
        parts = [(float(costs[n]), [n]) for n in ordered[start : start + size]]
        parts += [(0.0, [])] * (count - len(parts))
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, p + q) for (a, p), (b, q) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(count)]


_MOST_ROUNDS = 200


def _refine(parts: list[Part], costs: Sequence[float], equal: bool) -> None:
    """Improve the largest part by what it gives to another one, or changes with it."""
    sums = [sum(costs[n] for n in part) for part in parts]
    for _ in range(_MOST_ROUNDS if len(parts) > 1 else 0):
        largest = max(range(len(parts)), key=lambda p: (sums[p], -p))
        change = _best_change(parts, costs, sums, largest, equal)
        if change is None:
            return
        other, gives, takes = change
        parts[largest].remove(gives)
        parts[other].append(gives)
        moved = costs[gives]
        if takes is not None:
            parts[other].remove(takes)
            parts[largest].append(takes)
            moved -= costs[takes]
        sums[largest] -= moved
        sums[other] += moved


def _best_change(
    parts: list[Part], costs: Sequence[float], sums: list[float], largest: int, equal: bool
) -> tuple[int, int, int | None] | None:
    """(another part, what the largest gives to it, what it takes for it): after it, the larger of both is smallest."""
    best, best_sum = None, sums[largest] * (1 - 1e-9)
    for other in heapq.nsmallest(_MOST_OTHERS, range(len(parts)), key=lambda p: (sums[p], p)):
        if other == largest:
            continue
        gap = sums[largest] - sums[other]
        ordered = sorted(parts[other], key=lambda n: (costs[n], n))
        values = [costs[n] for n in ordered]
        for gives in sorted(parts[largest]):
            near = bisect.bisect_left(values, costs[gives] - gap / 2)  # half of the gap is what both need
            takes: list[int | None] = [*ordered[max(near - 1, 0) : near + 1]]
            if not equal and len(parts[largest]) > 1:
                takes.append(None)
            for taken in takes:
                moved = costs[gives] - (costs[taken] if taken is not None else 0.0)
                larger = max(sums[largest] - moved, sums[other] + moved)
                if 0 < moved < gap and larger < best_sum:
                    best, best_sum = (other, gives, taken), larger
    return best


_MOST_OTHERS = 4
