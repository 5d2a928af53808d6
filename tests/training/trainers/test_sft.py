"""TRL's SFTTrainer on a mesh has the losses and norms of TRL's SFTTrainer on one process."""

from __future__ import annotations

from functools import partial

import pytest

from tests.training.trainers.sft_jobs import run_sft

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.on_cpus("the Trainer of its jobs is told to use the CPU")

swept = partial(pytest.param, marks=pytest.mark.sweep)
SPLIT = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4)
ROUTED = dict(family="mixtral", config={"output_router_logits": True}, **SPLIT)
PACKED = dict(packing=True, max_length=16)


@pytest.mark.parametrize(
    ("axes", "options", "settings"),
    [
        swept({"tp": 2}, dict(loss_parallel=True), PACKED, id="tp, packed"),
        swept({"dp": 2}, dict(zero=2), PACKED, id="ZeRO 2, packed"),
        swept({"dp": 2}, dict(zero=2), ROUTED, id="ZeRO 2, router loss, accumulation"),
        swept({"dp": 2, "tp": 2}, dict(zero=3), SPLIT, id="ZeRO 3, tp, accumulation"),
        swept({"pp": 2}, dict(num_microbatches=4), {}, id="pp"),
        swept({"dp": 2, "cp": 2}, dict(zero=1), SPLIT, id="ZeRO 1, cp, accumulation"),
    ],
)
def test_sft_is_that_of_one_process(ranks, tmp_path, axes, options, settings):
    expected = run_sft(0, str(tmp_path / "one"), None, **settings)
    actual = ranks(axes, run_sft, str(tmp_path / "mesh"), axes, options, **settings)[0]
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-6), name
