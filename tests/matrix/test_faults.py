"""Seeded faults of the package: each can be made, and the matrix finds it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.matrix import verdicts
from tests.matrix.cells import RIGHT, WRONG, run_cell
from tests.matrix.fault_table import FAULTS
from tests.matrix.faults import Fault, function_at, search

GROUPS = {"reductions", "layouts", "order", "counts", "state"}
OF_A_GATHER = next(fault for fault in FAULTS if fault.where == "ops.collectives:reduce_scatter_dim")


def test_there_are_a_hundred_of_every_group():
    assert len(FAULTS) >= 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    counts = Counter(fault.group for fault in FAULTS)
    assert set(counts) == GROUPS
    assert min(counts.values()) >= 15


@pytest.mark.parametrize("module", sorted({fault.where.partition(":")[0] for fault in FAULTS}))
def test_every_fault_can_be_made(module):
    """The text that it changes stands in its function, which takes the new code."""
    for fault in FAULTS:
        if fault.where.partition(":")[0] == module:
            assert fault.code().co_freevars == function_at(fault.where).__code__.co_freevars, fault.name
            assert fault.cells({}), f"{fault.name}: no cell of {fault.rows} is on {fault.axes}"


def test_a_fault_is_there_inside_of_its_context_alone():
    cell = ("targets", "llama", "tp-sp")
    with OF_A_GATHER.applied():
        assert run_cell(*cell).word == WRONG
    assert run_cell(*cell).word == RIGHT


@pytest.mark.processes
def test_what_changes_nothing_is_not_found():
    harmless = Fault("nothing", "order", OF_A_GATHER.where, "shards.flatten(0, 1)", "shards.flatten(0, 1) * 1", "tp-sp")
    assert not search(harmless, [("targets", "llama", "tp-sp")], {})


@pytest.mark.processes
@pytest.mark.variants(every=8)
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name.replace(" ", "-")) for fault in FAULTS])
def test_the_matrix_finds_the_fault(fault):
    table = verdicts.read()
    assert search(fault, fault.cells(table, 12), table), fault.name
