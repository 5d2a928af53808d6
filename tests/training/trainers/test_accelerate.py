"""accelerate's `prepare`: what would be wrong around a model on a mesh is refused with the lines to write, what is
right passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from parallelize import build_mesh
from parallelize.base.errors import ParallelizeError
from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.record.shapes import fake_mesh
from parallelize.training.apply_axes import parallelize_model
from tests.support.models import tiny_model
from tests.training.trainers.trainer_jobs import launched, rows

pytest.importorskip("accelerate")


def prepares(rank: int, axes: dict[str, int]) -> dict[str, str]:
    """What becomes of each thing that is prepared: a class, or a slug."""
    from accelerate import Accelerator

    with launched():
        accelerator = Accelerator(cpu=True)
        parallel = parallelize_model(tiny_model("llama"), build_mesh("cpu", **axes))
        optimizer = parallel.optimizer(torch.optim.SGD, lr=1.0)
        things = {
            "model": parallel.module,
            "loader": DataLoader(rows(16), batch_size=4),
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }
        outcomes = {name: _prepared(accelerator, thing) for name, thing in things.items()}
        inference = accelerator.prepare_model(parallel.module, evaluation_mode=True)
        return outcomes | {"inference": type(inference).__name__}


def _prepared(accelerator: Any, thing: Any) -> str:
    try:
        return type(accelerator.prepare(thing)).__name__
    except ParallelizeError as error:
        return str(error)


def test_what_would_be_wrong_is_refused(two_processes):
    split, copies = two_processes.run(prepares, {"tp": 2})[0], two_processes.run(prepares, {"dp": 2})[0]
    for outcome in (split, copies):
        assert outcome["model"].startswith("prepared-by-accelerate: LlamaForCausalLM")
        assert "GlobalBatches(len(dataset)" in outcome["model"] and "ParallelTrainer" in outcome["model"]
        assert outcome["optimizer"] == "AcceleratedOptimizer" and outcome["inference"] == "LlamaForCausalLM"
    assert split["loader"].startswith("loader-over-world: the loader's BatchSamplerShard takes part 0 of 2")
    assert split["schedule"].startswith("prepared-by-accelerate: accelerate would step the schedule 2 times")
    assert (copies["loader"], copies["schedule"]) == ("DataLoaderShard", "AcceleratedScheduler")


def stock_trainer(rank: int, axes: dict[str, int], folder: str) -> str:
    from transformers import Trainer

    from tests.training.trainers.trainer_jobs import arguments

    with launched():
        parallel = parallelize_model(tiny_model("llama"), build_mesh("cpu", **axes))
        try:
            Trainer(parallel.module, arguments(folder), train_dataset=rows()).train()
        except ParallelizeError as error:
            return error.slugs[0]
        return "trained"


def test_a_stock_trainer_without_the_mixin_is_refused(two_processes, tmp_path):
    assert two_processes.run(stock_trainer, {"tp": 2}, str(tmp_path)) == ["loader-over-world"] * 2
    assert two_processes.run(stock_trainer, {"dp": 2}, str(tmp_path)) == ["prepared-by-accelerate"] * 2


def test_a_model_whose_groups_are_gone_checks_no_loaders(caplog):
    """As in a process that trained on a mesh, destroyed its groups, and goes on alone."""
    from accelerate import Accelerator

    warned = []
    with fake_mesh(MeshSpec(dp=2, tp=2)) as mesh:
        parallel = parallelize_model(tiny_model("llama"), mesh)
        Accelerator(cpu=True).prepare(DataLoader(rows(16), batch_size=4))
        warned.append("nothing in the loader divides its samples" in caplog.text)
    caplog.clear()
    Accelerator(cpu=True).prepare(DataLoader(rows(16), batch_size=4))
    assert [*warned, bool(caplog.text)] == [True, False] and parallel.module.training
