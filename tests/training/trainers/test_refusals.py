"""What a ParallelTrainer does not serve is refused by name, before anything is changed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler

from parallelize import build_mesh
from parallelize.base.errors import CheckpointError, DataError, MeshError, ModelError, ShapeError
from parallelize.base.mesh import MeshSpec
from parallelize.training.trainers import served_options as served
from parallelize.training.trainers.sft import ParallelSFTTrainer
from parallelize.training.trainers.stock_order import StockOrder, stock_order
from parallelize.training.trainers.trainer import OVERRIDDEN, ParallelTrainer, _optimizer_class
from parallelize.training.trainers.trainer_checkpoints import _compare_batches, read_weights
from parallelize.training.trainers.trainer_loaders import MicroBatches
from tests.training.trainers.trainer_jobs import arguments, counted_loss, launched

pytest.importorskip("accelerate")


def refused(stages=False, settings=None, cp=1, **keywords):
    """The settings that are refused of a trainer on some mesh."""
    parallel, view = SimpleNamespace(module=torch.nn.Linear(1, 1)), SimpleNamespace(spec=MeshSpec(cp=cp))
    trainer = SimpleNamespace(has_stages=stages, parallel=parallel, mesh_view=view)
    with launched(1), pytest.raises(ModelError) as caught:
        served.refuse_options(trainer, arguments("nowhere", **(settings or {})), keywords)
    assert set(caught.value.slugs) == {"trainer-option"}
    return [problem.what.removesuffix(" is not served by SimpleNamespace") for problem in caught.value.problems]


def test_an_order_that_is_no_function_of_a_seed():
    assert refused(settings={"accelerator_config": {"use_seedable_sampler": False}}) == ["use_seedable_sampler=False"]


def test_a_sampler_of_the_users():
    own = WeightedRandomSampler([1.0] * 4, 4)
    trainer = SimpleNamespace(args=None, train_dataset=range(4), _get_train_sampler=lambda dataset: own)
    with pytest.raises(ModelError, match="trainer-option: the WeightedRandomSampler of _get_train_sampler"):
        stock_order(trainer, 4)


def test_settings_that_no_mesh_serves():
    settings = {"neftune_noise_alpha": 5.0, "train_sampling_strategy": "batch_rebalance", "auto_find_batch_size": True}
    expected = ["auto_find_batch_size", "neftune_noise_alpha", "train_sampling_strategy='batch_rebalance'"]
    assert refused(settings=settings) == expected
    assert refused(settings={"batch_eval_metrics": True, "eval_use_gather_object": True}, model_init=len) == [
        *("model_init", "batch_eval_metrics", "eval_use_gather_object")
    ]
    assert refused(settings={"accelerator_config": {"split_batches": True}}) == ["split_batches"]


def test_settings_that_stages_do_not_serve():
    names = ["compute_loss_func", "label_smoothing_factor", "torch_compile"]
    settings = {"label_smoothing_factor": 0.1, "torch_compile": True}
    assert refused(True, settings, compute_loss_func=counted_loss) == [f"{name} on a mesh with pp" for name in names]


def test_settings_that_parts_of_sequences_do_not_serve():
    names = ["compute_loss_func", "label_smoothing_factor", "torch_compile"]
    settings = {"label_smoothing_factor": 0.1, "torch_compile": True}
    assert refused(False, settings, 2, compute_loss_func=counted_loss) == [
        f"{name} on a mesh with cp" for name in names
    ]


def test_settings_that_read_full_logits(monkeypatch):
    options = SimpleNamespace(loss_parallel=True, fuse_loss=False)
    monkeypatch.setattr(served, "resolution_of", lambda _: SimpleNamespace(options=options))
    settings = {"label_smoothing_factor": 0.1, "torch_compile": True}
    assert refused(settings=settings) == [f"{name} with sharded or deferred logits" for name in settings]


def test_other_models_and_meshes():
    with pytest.raises(ModelError, match="trainer-model: the model is a Linear"):
        ParallelTrainer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    view = SimpleNamespace(spec=MeshSpec(tp=4))
    parallel, args = SimpleNamespace(pipeline=SimpleNamespace(mesh=view)), SimpleNamespace(world_size=1)
    with pytest.raises(MeshError, match=r"trainer-mesh: .*the trainer sees 1 processes"):
        served.refuse_other_meshes(parallel, args)  # type: ignore[arg-type]


def test_other_versions_and_trainers():
    from transformers import Trainer

    class OnMesh(ParallelTrainer, Trainer):
        pass

    class WrongWayAround(ParallelTrainer):
        pass

    missing = [name for name in OVERRIDDEN if not any(name in vars(cls) for cls in ParallelTrainer.__mro__)]
    assert not missing
    served.refuse_other_versions(object.__new__(OnMesh), ParallelTrainer, OVERRIDDEN)
    with pytest.raises(ModelError, match=r"trainer-version: WrongWayAround has no stock method get_train_dataloader"):
        served.refuse_other_versions(object.__new__(WrongWayAround), ParallelTrainer, OVERRIDDEN)


def test_trainers_of_trl():
    trl = pytest.importorskip("trl")

    class Plain(ParallelTrainer, trl.SFTTrainer):
        pass

    class Tuning(ParallelSFTTrainer, trl.SFTTrainer):
        pass

    served.refuse_other_trainers(object.__new__(Tuning), ParallelSFTTrainer.served_of_trl)
    with pytest.raises(ModelError, match="trainer-option: TRL's SFTTrainer is not served by Plain") as caught:
        served.refuse_other_trainers(object.__new__(Plain), ())
    assert "ParallelSFTTrainer, SFTTrainer" in str(caught.value)
    with launched(1), pytest.raises(ModelError, match="trainer-option: loss_type='dft'"):
        ParallelSFTTrainer(SimpleNamespace(), trl.SFTConfig("nowhere", loss_type="dft", use_cpu=True, bf16=False))  # type: ignore[arg-type]


def test_smoothed_labels_without_a_count():
    from transformers import Trainer

    smooth, stock = object.__new__(Trainer), object.__new__(Trainer)
    for trainer, smoother in ((smooth, object()), (stock, None)):
        trainer.mesh_view = SimpleNamespace(sample_place=(0, 2))
        trainer.label_smoother, trainer.model = smoother, torch.nn.Linear(1, 1)
    served.refuse_uncounted(smooth, 7)
    served.refuse_uncounted(stock, None)
    with pytest.raises(
        ModelError, match="trainer-option: label_smoothing_factor of Linear is a mean over one data rank"
    ):
        served.refuse_uncounted(smooth, None)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_data_that_is_iterated():
    with pytest.raises(DataError, match=r"trainer-data: the training data \(Stream\)") as caught:
        served.refuse_iterated(Stream(), "training")
    assert "IterableBatches" in str(caught.value)


def indivisible(rank, last):

    try:
        MicroBatches(
            StockOrder("random", 21 if last else 24),
            8 if last else 3,
            1,
            at_once=8 if last else 3,
            drop_last=not last,
            mesh=build_mesh("cpu", dp=2),
        )
    except ShapeError as error:
        return str(error)
    return ""


def test_samples_that_do_not_divide(two_processes):
    for text in two_processes.run(indivisible, True):
        assert "indivisible-batch: the last 5 samples" in text and "dataloader_drop_last=True" in text
    assert all("indivisible-batch: a global batch of 3" in text for text in two_processes.run(indivisible, False))


def test_other_batches_than_those_of_the_checkpoint(tmp_path):
    order = {"global_batch_size": 8, "num_samples": 40, "samples_of_an_epoch": 40, "sampling": "random", "seed": 3}
    saved = tmp_path / "global_batches.json"
    saved.write_text(json.dumps(order))
    _compare_batches(saved, SimpleNamespace(order=lambda: order))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="data-position: ") as caught:
        _compare_batches(saved, SimpleNamespace(order=lambda: order | {"global_batch_size": 16}))  # type: ignore[arg-type]
    assert "8 was saved, 16 is set" in str(caught.value)


def test_a_checkpoint_of_the_order_of_earlier_versions_goes_on(tmp_path):
    saved = tmp_path / "global_batches.json"
    saved.write_text(json.dumps({"global_batch_size": 8, "num_samples": 40, "seed": 3, "shuffle": True}))
    now = {"global_batch_size": 8, "num_samples": 40, "samples_of_an_epoch": 40, "sampling": "random", "seed": 3}
    with pytest.warns(UserWarning, match="another order"):
        _compare_batches(saved, SimpleNamespace(order=lambda: now))  # type: ignore[arg-type]
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="data-position: "):
        _compare_batches(saved, SimpleNamespace(order=lambda: now | {"num_samples": 48}))  # type: ignore[arg-type]


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="missing-file"):
        read_weights(None, tmp_path / "absent")


def test_optimizers_that_are_no_classes_of_groups():
    assert _optimizer_class(torch.optim.AdamW, {"lr": 1.0}) is torch.optim.AdamW
    for cls, options in ((torch.optim.AdamW, {"params": []}), (lambda: None, {})):
        with pytest.raises(ModelError, match="trainer-option: "):
            _optimizer_class(cls, options)
