"""Dicts written for PyTorch's own `parallelize_module`: unchanged, exact, and with no more collectives."""

from __future__ import annotations

import pytest

from tests.dist import jobs

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", ["tensor", "sequence", "loss"])
def test_tutorial_dicts(two_processes, kind):
    ours = two_processes.run(jobs.tutorial, kind, "ours")
    theirs = two_processes.run(jobs.tutorial, kind, "stock")
    for found in ours:
        assert found["loss"] < 1e-12 and found["grads"] < 1e-12, found
        assert found["collectives"] <= theirs[0]["collectives"], (found, theirs[0])


def test_what_stock_gets_wrong(two_processes):
    two_processes.run(jobs.dict_details)


def test_inputs_and_outputs_in_one(two_processes):
    ours = two_processes.run(jobs.input_and_output_layouts, "ours")
    stock = two_processes.run(jobs.input_and_output_layouts, "stock")
    for mine, theirs in zip(ours, stock, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).abs().max() < 1e-12


CASES = [
    "row embedding of sharded ids",
    "column embedding of sharded ids",
    "column linear of partial input",
    "norm on another sequence dim",
    "keyword layouts",
    "row linear to sequence shards",
]


@pytest.mark.parametrize("case", CASES)
def test_one_style_like_pytorch(two_processes, case):
    ours = two_processes.run(jobs.styles_like_stock, "ours", case)
    stock = two_processes.run(jobs.styles_like_stock, "stock", case)
    for mine, theirs in zip(ours, stock, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape and (a - b).abs().max() < 1e-11
