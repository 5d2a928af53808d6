"""The peak that `explain` says is that of all live bytes of a rank, counted from outside, in 200 drawn runs."""

from __future__ import annotations

import pytest

from tests.tools.analysis.cost.memory_cells import APART, CELLS, WITHIN, compared, drawn, worst

pytestmark = [pytest.mark.processes, pytest.mark.on_cpus("kernels of a GPU allocate otherwise")]


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("number", range(CELLS))
def test_the_peak_of_a_drawn_run(two_processes, four_processes, number):
    cell = drawn(number)
    rows = compared(cell, {2: two_processes, 4: four_processes}[cell.ranks])
    assert (abs(worst(rows)) <= WITHIN) == (number not in APART), (str(cell), rows, APART.get(number))
