"""Gradients of odd shapes and sizes, narrow dtypes and different sequence lengths."""

from __future__ import annotations

import pytest

from tests.training import mesh_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_scalars_strides_and_few_rows(four_processes, zero, fused):
    assert max(four_processes.run(jobs.odd_shapes, zero, fused)) < 1e-12


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_large_parameters_are_gathered_in_place(two_processes, zero):
    assert max(two_processes.run(jobs.large_parameters, zero)) < 1e-12


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_many_narrow_gradients_are_summed_in_float32(two_processes, zero):
    assert max(two_processes.run(jobs.many_narrow_microbatches, zero)) == 0.0


def test_data_ranks_have_different_sequence_lengths(four_processes):
    assert max(four_processes.run(jobs.lengths_of_their_own)) < 1e-12
