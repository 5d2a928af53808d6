"""PyTorch's distributed checkpoint: `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict` continue a run on any
mesh."""

from __future__ import annotations

import pytest
import torch

from tests.axes.zero import torch_checkpoint_jobs as jobs

MESHES = {
    "zero 0": ({"dp": 4}, {"zero": 0}),
    "zero 1": ({"dp": 4}, {"zero": 1}),
    "zero 2": ({"dp": 4}, {"zero": 2}),
    "zero 3": ({"dp": 4}, {"zero": 3}),
    "tp": ({"tp": 4}, {}),
    "dp x tp, zero 1": ({"dp": 2, "tp": 2}, {"zero": 1}),
    "dp x tp, zero 2": ({"dp": 2, "tp": 2}, {"zero": 2}),
    "dp x tp, zero 3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "dp_replicate x dp, zero 1": ({"dp_replicate": 2, "dp": 2}, {"zero": 1}),
    "dp_replicate x dp, zero 3": ({"dp_replicate": 2, "dp": 2}, {"zero": 3}),
    "pp x dp, zero 1": ({"pp": 2, "dp": 2}, {"zero": 1, "num_microbatches": 2}),
    "pp x tp": ({"pp": 2, "tp": 2}, {"num_microbatches": 2}),
}
NAMES = list(MESHES)
STAGES = NAMES[:4]


def check(pool, name, other, *args):
    for errors in pool.run(jobs.continued, MESHES[name], MESHES[other], *args):
        assert errors["loaded"] == 0 and max(errors.values()) < 1e-11, (name, other, errors)


@pytest.mark.variants(every=12)
@pytest.mark.parametrize("shift", range(len(NAMES)))
@pytest.mark.parametrize("name", NAMES)
def test_a_run_continues_on_any_mesh(four_processes, tmp_path, name, shift):
    number = NAMES.index(name) + shift
    cls, flat, family = ("AdamW", "SGD")[number % 2], shift % 3 == 1, ("llama", "phi3")[shift % 5 == 2]
    check(four_processes, name, NAMES[number % len(NAMES)], cls, str(tmp_path), family, flat)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("cls", jobs.CLASSES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_float32_copies_are_saved(four_processes, tmp_path, zero, tp, cls):
    where = {"dp": 4 // tp, "tp": tp} if tp > 1 else {"dp": 4}, {"zero": zero, "dtype": torch.bfloat16}
    for errors in four_processes.run(jobs.continued, where, where, cls, str(tmp_path)):
        assert errors["loaded"] == errors["continued"] == 0, errors


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_float32_copies_are_loaded_on_other_meshes(four_processes, tmp_path, zero, shift):
    saved = {"dp": 2, "tp": 2}, {"zero": zero, "dtype": torch.bfloat16}
    loaded = {"dp": 4}, {"zero": (zero + shift) % 3, "dtype": torch.bfloat16}
    for errors in four_processes.run(jobs.continued, saved, loaded, "AdamW", str(tmp_path)):
        assert errors["loaded"] == 0, errors


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("cls", jobs.CLASSES)
@pytest.mark.parametrize("name", [*STAGES, "tp", "dp x tp, zero 1"])
def test_full_state_dicts_of_one_rank(four_processes, name, cls):
    assert max(four_processes.run(jobs.continued_from_full, MESHES[name], cls)) < 1e-11


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("cls", jobs.CLASSES)
@pytest.mark.parametrize("name", NAMES)
def test_one_process_goes_on_with_the_files_of_a_mesh(four_processes, tmp_path, name, cls):
    assert four_processes.run(jobs.in_one_process, MESHES[name], cls, str(tmp_path))[0] < 1e-11


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("cls", jobs.CLASSES)
@pytest.mark.parametrize("zero", [0, 1, 2])  # 3 refuses scalars
def test_scalars_and_uneven_rows(four_processes, tmp_path, zero, cls):
    assert all(four_processes.run(jobs.scalars_and_uneven_rows, zero, cls, str(tmp_path)))
