"""A batch in which the texts of one data rank have no image: gradients of the tower are those of one process with all
texts."""

from __future__ import annotations

import pytest

from tests.tp_plans import image_jobs as jobs


@pytest.mark.variants(every=100)
@pytest.mark.parametrize("zero", [2, 0, 1, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl"])
def test_a_data_rank_without_an_image(four_processes, family, sequence_parallel, zero):
    assert max(four_processes.run(jobs.one_rank_without_an_image, family, zero, sequence_parallel)) < 1e-12
