"""What a ParallelTrainer saves: a run resumes on another mesh, the best weights come back, and `transformers` loads the
folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from parallelize.base.errors import CheckpointError
from parallelize.training.trainers.trainer_checkpoints import _newest
from tests.training.trainers import trainer_jobs as jobs

pytest.importorskip("accelerate")
pytestmark = pytest.mark.on_cpus("the Trainer of its jobs is told to use the CPU")

SAVED = dict(save_strategy="steps", save_steps=4, train_sampling_strategy="random", max_steps=14)
DROPS = {"config": {"attention_dropout": 0.1}}
PAIRS = [
    pytest.param({"dp": 2}, dict(zero=1), {"tp": 2}, dict(sequence_parallel=True), DROPS, id="ZeRO 1 to tp"),
    pytest.param(
        *({"pp": 2}, dict(num_microbatches=2), {"dp": 2, "tp": 2}, dict(zero=3), {}),
        marks=pytest.mark.sweep,
        id="pp to ZeRO 3 x tp",
    ),
    pytest.param(
        *({"dp": 2, "tp": 2}, dict(zero=2), {"pp": 2}, dict(num_microbatches=4), DROPS),
        marks=pytest.mark.sweep,
        id="ZeRO 2 x tp to pp",
    ),
    pytest.param(
        *({"dp": 2, "tp": 2}, dict(zero=1, ep=4), {"dp": 2}, dict(zero=3), {"family": "mixtral"}),
        marks=pytest.mark.sweep,
        id="ep to ZeRO 3",
    ),
    pytest.param(
        *({"dp": 2, "cp": 2}, dict(zero=1), {"tp": 2}, {}, {}),
        marks=pytest.mark.sweep,
        id="ZeRO 1 x cp to tp",
    ),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("before", "before_options", "after", "after_options", "model"), PAIRS)
def test_a_run_resumes_on_another_mesh(ranks, tmp_path, before, before_options, after, after_options, model):
    settings = {**SAVED, **model}
    full, run = str(tmp_path / "full"), str(tmp_path / "run")
    expected = ranks(before, jobs.run_trainer, full, before, before_options, **settings)[0]
    ranks(before, jobs.run_trainer, run, before, before_options, stop_after=4, **settings)
    actual = ranks(after, jobs.run_trainer, run, after, after_options, resume=True, **settings)[0]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert actual[name][-10:] == pytest.approx(expected[name][-10:], rel=1e-6), name
    assert actual["last eval_loss"] == pytest.approx(expected["last eval_loss"], rel=1e-6)
    assert sorted(path.name for path in Path(run).glob("checkpoint-*")) == [
        "checkpoint-12",
        "checkpoint-14",
        "checkpoint-4",
        "checkpoint-8",
    ]


BEST = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True)
BEST |= dict(metric_for_best_model="loss", save_total_limit=2, max_steps=9)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2, "tp": 2}, dict(zero=3)), ({"pp": 2}, dict(num_microbatches=4)), ({"tp": 2}, dict(loss_parallel=True))],
)
def test_early_stopping_loads_the_best_weights(ranks, tmp_path, axes, options):
    expected = jobs.stops_early(0, str(tmp_path / "one"), None, **BEST)
    actual = ranks(axes, jobs.stops_early, str(tmp_path / "mesh"), axes, options, **BEST)[0]
    assert len(actual["eval_loss"]) == len(expected["eval_loss"])
    assert actual["last eval_loss"] == pytest.approx(expected["last eval_loss"], rel=1e-6)
    assert len(list((tmp_path / "mesh").glob("checkpoint-*"))) <= 2


def test_the_folder_is_one_of_transformers(ranks, tmp_path):
    from transformers import LlamaForCausalLM

    one = dict(
        dtype=torch.float32, save_strategy="steps", save_steps=4, max_steps=4, train_sampling_strategy="sequential"
    )
    ranks({"tp": 2}, jobs.run_trainer, str(tmp_path / "mesh"), {"tp": 2}, {}, **one)
    jobs.run_trainer(0, str(tmp_path / "one"), None, **one)
    actual, expected = (
        LlamaForCausalLM.from_pretrained(tmp_path / name / "checkpoint-4").state_dict() for name in ("mesh", "one")
    )
    folder = tmp_path / "mesh" / "checkpoint-4"
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4)
    assert json.loads((folder / "global_batches.json").read_text())["global_batch_size"] == jobs.BATCH
    assert {path.name for path in folder.iterdir()} >= {"parallel", "trainer_state.json", "config.json"}


def test_an_incomplete_checkpoint_is_passed_over(tmp_path):
    for step, state in ((4, '{"global_step": 4}'), (8, '{"global'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert _newest(tmp_path).name == "checkpoint-4"
    shutil.rmtree(tmp_path / "checkpoint-4")
    with pytest.raises(CheckpointError) as caught:
        _newest(tmp_path)
    assert caught.value.slugs == ("no-checkpoint",)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"tp": 2}, dict(sequence_parallel=True)),
        pytest.param({"pp": 2}, dict(num_microbatches=4), marks=pytest.mark.sweep),
        pytest.param({"dp": 2, "tp": 2}, dict(zero=3), marks=pytest.mark.sweep),
    ],
)
def test_adapters_are_saved_alone_and_the_best_come_back(ranks, tmp_path, axes, options):
    peft = pytest.importorskip("peft")
    settings = {**BEST, "max_steps": 4, "adapter": "lora", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    expected = jobs.run_trainer(0, str(tmp_path / "one"), None, **settings)
    actual = ranks(axes, jobs.run_trainer, str(tmp_path / "mesh"), axes, options, **settings)[0]
    assert expected["last eval_loss"] < max(expected["eval_loss"][1:])  # the last weights are not the best
    assert actual["last eval_loss"] == pytest.approx(expected["last eval_loss"], rel=1e-6)
    checkpoint = max((tmp_path / "mesh").glob("checkpoint-*"))
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    peft.PeftConfig.from_pretrained(checkpoint)
