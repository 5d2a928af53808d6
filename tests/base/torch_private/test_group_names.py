"""Names of process groups: short, equal on the ranks of a group, and of one group alone."""

from __future__ import annotations

import threading
import time
from collections import Counter

import torch.distributed as dist

from parallelize.base.mesh import short_name
from parallelize.base.torch_private import torch_groups


def test_names_of_large_groups_are_short_and_differ():
    assert short_name([3, 1, 2]) == "3_1_2"
    even, odd = list(range(0, 2048, 2)), list(range(1, 2048, 2))
    names = [short_name(ranks) for ranks in (even, odd, [*even[:5], 11, *even[6:]], [0, *even[2:], 2])]
    assert len(set(names)) == 4 and all(len(name) < 64 for name in names)
    assert short_name(list(even)) == names[0]


class Slow(Counter):
    """Lets another thread in between reading and writing a count."""

    def __getitem__(self, ranks):
        count = super().__getitem__(ranks)
        time.sleep(0.01)
        return count


def test_groups_that_threads_make_at_the_same_time_have_different_names(monkeypatch):
    monkeypatch.setattr(torch_groups, "_groups_made", {dist.group.WORLD: Slow()})
    turns: list[int] = []
    threads = [threading.Thread(target=lambda: turns.append(torch_groups._count_groups_of((0, 1)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turns) == [1, 2, 3, 4]
