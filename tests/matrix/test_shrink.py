"""A failing cell is made small, and its script shows the same failure."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.matrix.axes import AXES, Axis
from tests.matrix.cells import WRONG, Verdict
from tests.matrix.shrink import SmallCell, _smaller_axes, is_alike, shrink
from tests.matrix.test_faults import OF_A_GATHER
from tests.matrix.test_matrix import check


def test_a_wrong_cell_of_four_ranks_is_one_of_two_with_one_layer():
    with OF_A_GATHER.applied():
        cell, verdict = shrink("targets", "llama", "dp-tp-zero1")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.script(), "script.py", "exec"), {})
    assert verdict.word == WRONG
    assert cell.axis == Axis({"tp": 2}, {"sequence_parallel": True})
    assert dict(cell.overrides) == {"num_hidden_layers": 1}
    assert printed.getvalue().startswith(f"wrong {verdict.detail.partition(' differs')[0]}")


@pytest.mark.parametrize(
    ("found", "wanted", "alike"),
    [
        (Verdict(WRONG, "rank 1: loss' differs by 2.0e-03"), Verdict(WRONG, "rank 0: loss' differs by 1.0e-06"), True),
        (Verdict(WRONG, "rank 0: loss differs by 2.0e-03"), Verdict(WRONG, "rank 0: norm differs by 2.0e-03"), False),
        (
            Verdict(WRONG, "rank 0: gradient a.1.w differs by 1.0e-03"),
            Verdict(WRONG, "rank 0: gradient b.w differs by 1.0e-03"),
            True,
        ),
        (Verdict("crashed", "KeyError: 3"), Verdict("crashed", "KeyError: 1"), True),
        (Verdict("crashed", "KeyError: 3"), Verdict(WRONG, "KeyError: 3"), False),
    ],
)
def test_failures_are_alike_by_what_is_wrong(found, wanted, alike):
    assert is_alike(found, wanted) == alike


def test_smaller_axes_are_parts_of_the_axis():
    smaller = list(_smaller_axes(AXES["pp-dp-tp"]))
    assert AXES["tp-sp-lp"] in smaller and AXES["dp-zero1"] in smaller
    assert AXES["dp-zero2"] not in smaller and AXES["tp4"] not in smaller
    assert all(axis.world_size <= 8 for axis in smaller)


def test_the_name_of_a_cell_tells_what_it_is():
    cell = SmallCell("clip", "llama", AXES["dp-zero1"], (("num_hidden_layers", 1),))
    assert str(cell) == "clip of llama on dp=2, zero=1, num_hidden_layers=1"


def test_a_failing_test_prints_the_smallest_cell_that_fails_so_and_its_script():
    with OF_A_GATHER.applied(), pytest.raises(pytest.fail.Exception) as failed:
        check(("targets", "llama", "dp-tp-zero1"))
    text = str(failed.value)
    assert "made small, targets of llama on tp=2, sequence_parallel=True, num_hidden_layers=1: wrong" in text
    assert "cell = SmallCell(feature='targets', kind='llama', axis=Axis(sizes={'tp': 2}" in text
