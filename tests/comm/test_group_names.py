"""Names of process groups: short, equal on the ranks of a group, and of one group alone."""

from __future__ import annotations

from parallelize.mesh import short_name


def test_names_of_large_groups_are_short_and_differ():
    assert short_name([3, 1, 2]) == "3_1_2"
    even, odd = list(range(0, 2048, 2)), list(range(1, 2048, 2))
    names = [short_name(ranks) for ranks in (even, odd, [*even[:5], 11, *even[6:]], [0, *even[2:], 2])]
    assert len(set(names)) == 4 and all(len(name) < 64 for name in names)
    assert short_name(list(even)) == names[0]
