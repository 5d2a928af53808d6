"""accelerate's `prepare` and a model on a mesh: it would wrap the model in DistributedDataParallel, divide data over all processes,
and step a schedule once for each process.

Its methods are wrapped where accelerate has been imported when a model is planned. A later import is not seen: then the wrapper
refuses DistributedDataParallel, and the first forward compares its inputs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import DataError, ModelError, Problem
from parallelize.base.mesh import SAMPLE_AXES
from parallelize.base.patches import active as patches
from parallelize.state.stored_slices import data_rank
from parallelize.training.data.loader_check import check_loader

_PLANNED: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()


def guard_accelerate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let `Accelerator.prepare` refuse this model (ModelError `prepared-by-accelerate`), and, while it is the newest
    one, loaders that would give the ranks of one data rank other samples (DataError `loader-over-world`), and schedules that
    would be stepped too often. Inference (`evaluation_mode=True`) and optimizers are prepared as ever.
    """
    _PLANNED.pop(module, None)
    _PLANNED[module] = mesh
    accelerate = sys.modules.get("accelerate")
    accelerator = getattr(accelerate, "Accelerator", None)
    if accelerator is not None:
        for name, check in _CHECKED.items():
            patches.replace(accelerator, name, check)


def _preparing_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def prepare_model(
        self: Any, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False, **more: Any
    ) -> Any:
        if not evaluation_mode and any(inner in _PLANNED for inner in model.modules()):
            raise _refused(type(model).__name__)
        return stock(self, model, device_placement, evaluation_mode, **more)

    return prepare_model


def _preparing_loader(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = stock(self, data_loader, *args, **kwargs)
        try:
            for mesh in _newest():
                check_loader(prepared, mesh)
        except DataError:
            self._dataloaders[:] = [loader for loader in self._dataloaders if loader is not prepared]
            raise
        return prepared

    return prepare_data_loader


def _preparing_scheduler(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def prepare_scheduler(self: Any, scheduler: Any) -> Any:
        data_ranks = {data_rank(mesh, SAMPLE_AXES)[1] for mesh in _newest()}
        per_step = 1 if self.split_batches or not self.step_scheduler_with_optimizer else self.num_processes
        if data_ranks and per_step not in {1, *data_ranks}:
            what = f"accelerate would step the schedule {per_step} times in each step, once for each process"
            fix = "do not prepare it: scheduler.step() after optimizer.step()"
            raise ModelError(Problem("prepared-by-accelerate", what, fix=fix))
        return stock(self, scheduler)

    return prepare_scheduler


def _newest() -> list[DeviceMesh]:
    """The mesh of the model that was planned last and still lives, if there is one: loaders and schedules name no model."""
    return list(_PLANNED.values())[-1:]


_CHECKED = {
    "prepare_model": _preparing_model,
    "prepare_data_loader": _preparing_loader,
    "prepare_scheduler": _preparing_scheduler,
}


def _refused(name: str) -> ModelError:
    lines = (
        ("loader", "DataLoader(dataset, batch_sampler=GlobalBatches(len(dataset), batch_size, mesh=mesh))"),
        ("optimizer", "parallel.optimizer(torch.optim.AdamW, lr=...)"),
        (
            "step",
            "loss = parallel.step(**batch); parallel.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()",
        ),
        ("Trainer", "class MyTrainer(ParallelTrainer, Trainer), in place of a Trainer of transformers"),
    )
    what = f"{name} is on a mesh, and accelerate would reduce its gradients a second time"
    fix = "keep model and loader out of prepare(), and write the lines above: examples/accelerate_loop.py"
    return ModelError(Problem("prepared-by-accelerate", what, rows=lines, fix=fix))
