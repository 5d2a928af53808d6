"""A step that fails on one data rank, without a watch: every rank says which rank it was and its error, on every
mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from parallelize import build_mesh, parallelize_model
from tests.support.failing_ranks import run_ranks
from tests.support.models import tiny_batch, tiny_model

GROUP_TIMEOUT_S = 12.0
VOCABULARY = 67
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "zero 0": ({"dp": 2}, {"zero": 0}),
    "zero 1": ({"dp": 2}, {"zero": 1}),
    "zero 2": ({"dp": 2}, {"zero": 2}),
    "zero 3": ({"dp": 2}, {"zero": 3}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {"num_microbatches": 2}),
    "zero 1 x tp": ({"dp": 2, "tp": 2}, {"zero": 1}),
    "zero 3 x tp": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp x zero 3": ({"pp": 2, "dp": 2}, {"zero": 3, "num_microbatches": 2}),
}
IN_EVERY_RUN = ("zero 3 x tp",)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.sweep) for name in MESHES]
)
def test_every_rank_names_the_rank_and_its_error(name, tmp_path):
    axes, options = MESHES[name]
    size = 2 ** len(axes)
    ended = run_ranks(size, tmp_path, bad_id_on_the_last_data_rank, axes, options, group_timeout_s=GROUP_TIMEOUT_S)
    for end in ended:
        assert end.status == 1 and "stage-failed" in end.text, end.text
        assert f"id-out-of-range: ids range from 0 to {VOCABULARY}" in end.text, end.text


def bad_id_on_the_last_data_rank(rank: int, axes: dict[str, int], options: dict[str, Any]) -> None:
    mesh = build_mesh("cpu", **axes)
    parallel = parallelize_model(tiny_model("llama"), mesh, **options)
    ids, labels = tiny_batch(batch=4, length=8)
    if "dp" not in axes or mesh.get_local_rank("dp") == 1:
        ids[0, 3] = VOCABULARY
    parallel.step(ids, targets=labels)
    dist.barrier()
