"""Reduce-scatters over gloo: the sum in the order of ranks, to the bit."""

from __future__ import annotations

import pytest
import torch

from parallelize.layout import even_interval
from tests.ops.direct_sum_jobs import reduce_scatter

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [8, 6])
def test_every_rank_gets_its_rows_of_the_sum_in_rank_order(four_processes, dtype, rows):
    for rank, result in enumerate(four_processes.run(reduce_scatter, dtype, rows)):
        expected = result["terms"][0].float()
        for term in result["terms"][1:]:
            expected = expected + term.float()
        start, stop = even_interval(rows, 4, rank)
        assert torch.equal(result["out"], expected.to(dtype)[:, start:stop])
        assert result["unchanged"]
