"""`explain` over cp: communication over all data ranks, and a bounded running time."""

from __future__ import annotations

import pytest

from parallelize import explain


@pytest.mark.sweep
def test_explain_times_sums_over_the_world():
    options = {"sequence": 1024, "batch": 1}
    alone = explain("llama", None, "dp=4", **options).time.data_s
    mixed = explain("llama", None, "dp=2,cp=2", **options).time.data_s
    assert 0.5 * alone < mixed < 2 * alone


@pytest.mark.sweep
def test_explain_of_float32_over_cp_ends_soon():
    import time

    began = time.process_time()  # not the wall clock, so that other processes do not matter
    explain("llama-3-8b", None, "cp=8", sequence=131072, batch=1)
    assert time.process_time() - began < 60  # it did not end in minutes
