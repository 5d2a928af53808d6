"""Whether a loader gives the ranks of one data rank the same samples."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

from parallelize.base.errors import DataError, ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.comm.mesh_view import AnyMesh, MeshView

log = logging.getLogger("parallelize")
_SHARDED_BY = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("world_size", "rank"),
    ("data_ranks", "data_index"),
)
"""Attributes in which samplers keep how many parts there are and which one they take: those of `DistributedSampler`, of
accelerate's samplers and data sets, of the configuration that `datasets.split_dataset_by_node` leaves, and of ours."""
_INSIDE = ("batch_sampler", "sampler", "dataset", "_distributed", "batches", "loader")
_STOCK = (SequentialSampler, RandomSampler)


def check_loader(loader: Any, mesh: AnyMesh) -> None:
    """Refuse a loader that divides its samples over other ranks than the data ranks of the mesh, or twice.

    `DistributedSampler`, accelerate's `prepare` and `split_dataset_by_node` divide over all processes unless told
    otherwise: then the tp, cp and pp ranks of one data rank get different samples. Of a loader that was divided already
    they make one that never sees most of its samples. One of a stock sampler is not divided at all: it is warned of, as
    each rank's data set may be a part already.

    Args:
        loader: a DataLoader, or what a library made of one.
        mesh: a DeviceMesh with any axes.

    Raises: DataError `loader-over-world`, with the numbers of both; `divided-twice`.
    Cost: no communication.
    """
    index, count = MeshView.of(mesh).sample_place
    parts = list(_parts(loader))
    for part in parts:
        for count_name, index_name in _SHARDED_BY:
            part_count, part_index = getattr(part, count_name, None), getattr(part, index_name, None)
            if (
                isinstance(part_count, int)
                and isinstance(part_index, int)
                and (part_count, part_index) != (count, index)
            ):
                pass_them = f"pass {count_name}={count} and {index_name}={index}, or "
                pass_them = "pass mesh=mesh to it, or " if count_name == "data_ranks" else pass_them
                raise DataError(_over_world_problem(part, (part_index, part_count), (index, count), pass_them))
        dispatched = _dispatched(part)
        if dispatched not in (None, (index, count)):
            raise DataError(_over_world_problem(part, dispatched, (index, count)))
    _check_how_often(parts, count)


def _check_how_often(parts: Sequence[Any], count: int) -> None:
    """Raises: DataError `divided-twice`. Warns of a loader that nothing divides."""
    dividing = [type(part).__name__ for part in parts if _divides(part)] if count > 1 else [""]
    if len(dividing) > 1:
        what = (
            f"each of the loader's {' and '.join(dividing)} takes one of {count} parts: the ranks never see the other "
            "samples"
        )
        fix = "let no other library prepare a loader whose samples are divided already"
        raise DataError(Problem("divided-twice", what, fix=fix))
    if not dividing and any(isinstance(part, _STOCK) for part in parts):
        log.warning(
            "nothing in the loader divides its samples over the %d data ranks: unless each rank's data set is a part "
            "of its own, all of "
            "them train on the same samples. GlobalBatches(len(dataset), size, mesh=mesh) as batch_sampler divides "
            "them",
            count,
        )


def _divides(part: Any) -> bool:
    numbers = [getattr(part, count_name, None) for count_name, index_name in _SHARDED_BY if hasattr(part, index_name)]
    return any(isinstance(number, int) and number > 1 for number in numbers) or (_dispatched(part) or (0, 1))[1] > 1


def _parts(loader: Any) -> Iterator[Any]:
    """The loader's samplers and data sets, from the outside in."""
    seen: set[int] = set()
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [value for name in _INSIDE if (value := getattr(part, name, None)) is not None]


def _dispatched(part: Any) -> tuple[int, int] | None:
    """(index, number) of the slice that this process gets from accelerate's `DataLoaderDispatcher`, whose first process
    reads."""
    state = getattr(part, "state", None)
    index, count = getattr(state, "process_index", None), getattr(state, "num_processes", None)
    if not callable(getattr(part, "slice_fn", None)) or not isinstance(index, int) or not isinstance(count, int):
        return None
    return (0, 1) if getattr(part, "submesh_tp", None) is not None else (index, count)


def _over_world_problem(part: Any, its: tuple[int, int], here: tuple[int, int], instead: str = "") -> Problem:
    """its, here: (index, number) of the parts that the loader takes, and of the data ranks."""
    return Problem(
        "loader-over-world",
        f"the loader's {type(part).__name__} takes part {its[0]} of {its[1]}; this rank is data rank {here[0]} of "
        f"{here[1]}",
        fix=f"{instead}use GlobalBatches(len(dataset), size, mesh=mesh) as the DataLoader's batch_sampler, and let no "
        "other library prepare the loader",
    )


# -- prepared by accelerate ------------------------------------------------------------------------------------------
# accelerate's `prepare` and a model on a mesh: it would wrap the model in DistributedDataParallel, divide data over
# all processes, and step a schedule once for each process. Its methods are wrapped where accelerate has been imported
# when a model is planned. A later import is not seen: then the wrapper refuses DistributedDataParallel, and the first
# forward compares its inputs.


_PLANNED: weakref.WeakKeyDictionary[nn.Module, MeshView] = weakref.WeakKeyDictionary()


def guard_accelerate(module: nn.Module, mesh: MeshView) -> None:
    """Let `Accelerator.prepare` refuse this model (ModelError `prepared-by-accelerate`), and, while it is the newest
    one, loaders that would give the ranks of one data rank other samples (DataError `loader-over-world`), and schedules
    that would be stepped too often. Inference (`evaluation_mode=True`) and optimizers are prepared as ever.
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
        data_ranks = {mesh.sample_place[1] for mesh in _newest()}
        per_step = 1 if self.split_batches or not self.step_scheduler_with_optimizer else self.num_processes
        if data_ranks and per_step not in {1, *data_ranks}:
            what = f"accelerate would step the schedule {per_step} times in each step, once for each process"
            fix = "do not prepare it: scheduler.step() after optimizer.step()"
            raise ModelError(Problem("prepared-by-accelerate", what, fix=fix))
        return stock(self, scheduler)

    return prepare_scheduler


def _newest() -> list[MeshView]:
    """The mesh of the model that was planned last and still lives, if there is one: loaders and schedules name no
    model. One whose process groups were destroyed trains no more."""
    return [mesh for mesh in _PLANNED.values() if mesh.has_groups][-1:]


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
