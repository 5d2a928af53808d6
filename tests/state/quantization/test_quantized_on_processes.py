"""Quantized linears on real processes: codes are broadcast and gathered, and a layer compiles whole."""

from __future__ import annotations

import pytest

from tests.state.quantization import quantized_jobs

pytest.importorskip("peft")


@pytest.mark.processes
def test_two_processes(two_processes):
    assert max(two_processes.run(quantized_jobs.error_of_logits)) < 1e-12


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("adapted", [False, True])
def test_a_layer_compiles_whole(two_processes, adapted):
    assert max(two_processes.run(quantized_jobs.error_of_a_compiled_layer, adapted, timeout_s=240)) < 1e-12
