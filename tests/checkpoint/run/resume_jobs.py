"""What each rank does in the tests of resuming: all state of a run, on the same mesh and on another."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from parallelize import GlobalBatches, Streams, build_mesh, load_checkpoint, rebuild
from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import ParallelizeError
from parallelize.checkpoint.format import disk
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.training.apply_axes import parallelize_model
from tests.checkpoint.checkpoint_jobs import built, different, everything, train
from tests.support import device
from tests.support.models import tiny_model


class Counter:
    """An object of the user with state."""

    def __init__(self) -> None:
        self.seen = {"words": 0, 3: torch.arange(4)}

    def state_dict(self) -> dict[Any, Any]:
        return self.seen

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.seen = state


class Training:
    """A run with dropout, a scheduler, streams, data and a user's object."""

    def __init__(self, axes: dict[str, int], options: dict[str, Any], seed: int):
        model = tiny_model("gpt2", num_hidden_layers=2, seed=seed, resid_pdrop=0.2, embd_pdrop=0.1)
        mesh = build_mesh("cpu", **axes)
        self.parallel: ParallelModel = parallelize_model(model, mesh, dropout_seed=7, **options)
        self.optimizer = self.parallel.optimizer(torch.optim.AdamW, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        self.streams = Streams(5, mesh)
        self.streams.declare("noise", differs_over=[axis for axis in ("dp",) if axis in axes])
        self.streams.declare("same")
        self.text = torch.randint(0, 67, (64, 6), generator=torch.Generator().manual_seed(3))
        self.batches = GlobalBatches(len(self.text), 16, seed=2, mesh=mesh)
        self.user = Counter()

    def checkpoints(self, root: str, **options: Any) -> Checkpointer:
        return Checkpointer(
            root,
            self.parallel,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            streams=self.streams,
            data=self.batches,
            user={"counter": self.user},
            **options,
        )

    def steps(self, count: int) -> list[list[float]]:
        """[loss, learning rate, a number of each stream and of each ordinary generator] of each step."""
        steps: list[list[float]] = []
        while len(steps) < count:
            for rows in self.batches.track(DataLoader(self.text, batch_sampler=self.batches)):
                loss = self.parallel.step(rows[:, :-1], targets=rows[:, 1:])
                self.parallel.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                numbers = [float(loss), self.scheduler.get_last_lr()[0]]
                for name in ("noise", "same"):
                    with self.streams(name):
                        numbers += [float(torch.rand(())), random.random()]
                numbers += [float(torch.rand(())), random.random()]
                self.user.seen["words"] += rows.numel()
                steps.append(numbers)
                if len(steps) == count:
                    break
        return steps


def resume_on_same_mesh(
    rank: int, axes: dict[str, int], options: dict[str, Any], root: str, asynchronous: bool
) -> list[str]:
    """Five steps more after a save, and the same five by a new run that resumes: bit for bit."""
    original = Training(axes, options, 0)
    original.steps(5)
    with original.checkpoints(root, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(5, values={"note": ("a", 1.5)})
        expected = original.steps(5)
    state = everything(original.parallel, original.optimizer)
    torch.manual_seed(99)
    other = Training(axes, options, 1)
    other.steps(2)
    with other.checkpoints(root) as checkpoints:
        wrong = [] if checkpoints.resume() == 5 and checkpoints.values == {"note": ("a", 1.5)} else ["step or values"]
    wrong += [] if other.user.seen["words"] == 5 * 16 // other.batches.data_ranks * 6 else [f"user {other.user.seen}"]
    actual = other.steps(5)
    wrong += [f"step {n}: {a} for {b}" for n, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
    after = everything(other.parallel, other.optimizer)
    return wrong + [name for name in state if not torch.equal(state[name], after[name])]


def run_and_save(rank: int, axes: dict[str, int], options: dict[str, Any], root: str) -> list[list[float]]:
    original = Training(axes, options, 0)
    original.steps(3)
    with original.checkpoints(root) as checkpoints:
        checkpoints.save(3)
    return original.steps(5)


def resume_elsewhere(rank: int, axes: dict[str, int], options: dict[str, Any], root: str) -> list[list[float]]:
    other = Training(axes, options, 1)
    with other.checkpoints(root) as checkpoints:
        assert checkpoints.resume() == 3
    return other.steps(5)


def rebuilt_run(rank: int, axes: dict[str, int], options: dict[str, Any], root: str) -> list[float]:
    """A run whose optimizer and scheduler come out of the checkpoint."""
    model = tiny_model("gpt2", num_hidden_layers=2, seed=1, resid_pdrop=0.2, embd_pdrop=0.1)
    parallel = parallelize_model(model, build_mesh("cpu", **axes), dropout_seed=7, **options)
    made = rebuild(parallel, root)
    assert made.step == 3 and type(made.optimizers["optimizer"]) is torch.optim.AdamW
    optimizer, scheduler = made.optimizers["optimizer"], made.schedulers["scheduler"]
    text = torch.randint(0, 67, (64, 6), generator=torch.Generator().manual_seed(3))
    batches = GlobalBatches(len(text), 16, seed=2, mesh=parallel.mesh)
    losses: list[float] = []
    for number, rows in enumerate(DataLoader(text, batch_sampler=batches)):
        if number >= 3:
            losses.append(float(parallel.step(rows[:, :-1], targets=rows[:, 1:])))
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(scheduler.get_last_lr()[0])
    return losses


def masters(rank: int, root: str) -> list[str]:
    """bfloat16 training with float32 copies: the copies are what is saved, on each ZeRO stage, and load on each."""
    wrong = []
    dtype = {"dtype": torch.bfloat16}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for zero in (0, 1, 2, 3):
        parallel, optimizer = built("llama", {"dp": 2}, {"zero": zero, **dtype})
        train(parallel, optimizer, 0, 2)
        with Checkpointer(f"{root}/{zero}", parallel, optimizer=optimizer) as checkpoints:
            checkpoints.save(2)
        state[zero] = everything(parallel, optimizer)
        for name, value in state[zero].items():
            if name.startswith("model/") and value.dtype != torch.float32:
                wrong.append(f"{name} of ZeRO {zero} is kept in {value.dtype}")
    for zero in (0, 1, 2, 3):
        parallel, optimizer = built("llama", {"dp": 2}, {"zero": zero, **dtype}, seed=1)
        train(parallel, optimizer, 7, 1)
        for source in (0, 1, 2, 3):
            load_checkpoint(f"{root}/{source}", parallel, optimizer=optimizer)
            wrong += [f"{source} to {zero}: {name}" for name in different(parallel, optimizer, state[source])]
    narrow, _ = built("llama", {"dp": 2}, {"zero": 0})
    narrow.module.to(torch.bfloat16)
    for cast in (False, True):
        try:
            load_checkpoint(f"{root}/0", narrow, cast=cast)
            slugs: tuple[str, ...] = ()
        except ParallelizeError as error:
            slugs = error.slugs
        if slugs != (() if cast else ("narrower-dtype",)):
            wrong.append(f"cast={cast}: {slugs}")
    return wrong


# -- the folder --------------------------------------------------------------------------------------------------------


def small(root: str, **options: Any) -> tuple[nn.Module, Checkpointer]:
    """A small replicated module, and its checkpoints."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    return module, Checkpointer(root, module, mesh=build_mesh("cpu", dp=dist.get_world_size()), **options)


def in_the_background(rank: int, root: str) -> list[str]:
    """The state as it was when `save` was called; training goes on meanwhile; errors come at the next call."""
    wrong = []
    module, checkpoints = small(root, asynchronous=True)
    release, real = threading.Event(), disk.flush
    disk.flush = lambda descriptor: (release.wait(20), real(descriptor))[1]  # type: ignore[assignment]
    try:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        checkpoints.save(1)  # returns, although nothing can reach the disk before `release`
        if not checkpoints.saving:
            wrong.append("save waited for the disk")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        release.set()
        buffers = {key: value.data_ptr() for key, value in checkpoints._staging.buffers.items()}  # type: ignore[union-attr]
        checkpoints.save(2)  # waits for the first
        buffers_again = {key: value.data_ptr() for key, value in checkpoints._staging.buffers.items()}  # type: ignore[union-attr]
        if buffers != buffers_again or not (Path(root) / "step-00000001").is_dir():
            wrong.append("staged twice, or not waited")
        checkpoints.wait()
        if rank == 1:
            disk.flush = _full  # type: ignore[assignment]
        checkpoints.save(3)
        for call in (checkpoints.wait, checkpoints.wait):
            try:
                call()
                wrong += ["no error"] if call is checkpoints.wait and not wrong and not _raised else []
            except ParallelizeError as error:
                _raised.append(error.slugs[0])
    finally:
        disk.flush = real
    if _raised != ["write-failed"]:
        wrong.append(f"raised {_raised}")
    _raised.clear()
    checkpoints.save(4)
    checkpoints.close()
    if sorted(os.listdir(root))[-3:] != ["step-00000001", "step-00000002", "step-00000004"]:
        wrong.append(str(os.listdir(root)))
    load_checkpoint(root, module, step=1, mesh=build_mesh("cpu", dp=2))
    return wrong + [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]


def bytes_sent(rank: int, root: str) -> tuple[int, int]:
    """(bytes that the collectives of a save send, bytes of this rank's file): tensors are not sent."""
    parallel, optimizer = built("llama", {"dp": 2, "tp": 2}, {"zero": 1})
    train(parallel, optimizer, 0, 1)
    sent = 0
    real = {name: getattr(dist, name) for name in ("all_gather", "gather", "broadcast")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, torch.Tensor))
            return real[name](*args, **kwargs)

        return call

    with Checkpointer(root, parallel, optimizer=optimizer) as checkpoints:
        for name in real:
            setattr(dist, name, counted(name))
        others = {name: getattr(dist, name) for name in ("send", "isend", "all_reduce", "all_to_all_single", "scatter")}
        for name in others:
            setattr(dist, name, None)
        try:
            checkpoints.save(1)
        finally:
            for name, function in {**real, **others}.items():
                setattr(dist, name, function)
    return sent, os.path.getsize(Path(root) / "step-00000001" / f"rank-{rank:05d}.safetensors")


class Position:
    """A position in the data that differs between ranks; its `state_dict` is a collective."""

    def __init__(self, at: int):
        self.at = at

    def state_dict(self) -> dict[str, int]:
        dist.all_reduce(torch.ones(1))
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def positions_by_rank(rank: int, root: str) -> list[Any]:
    """Each data rank's own position; ranks of one data rank share theirs; another number of data ranks is refused."""
    module = nn.Linear(2, 2)
    mesh = build_mesh("cpu", dp=2)
    position = Position(10 + rank)
    with Checkpointer(root, module, data=position, user={"same": Position(7)}, mesh=mesh) as checkpoints:
        checkpoints.save(1)
        position.at = 0
        checkpoints.resume()
    observed: list[Any] = [position.at]
    other = Position(0)
    with Checkpointer(
        root, module, data=other, user={"same": Position(0)}, mesh=build_mesh("cpu", tp=2)
    ) as checkpoints:
        observed.append(slug_of(checkpoints.resume))
    return observed


def axis_of_another_name(rank: int, root: str) -> bool:
    """A mesh of one axis may be called anything: its shards are saved and loaded like those of `tp`."""
    from torch.distributed.device_mesh import init_device_mesh

    from parallelize import full_state_dict, parallelize_module

    mesh = init_device_mesh(device.current().type, (2,), mesh_dim_names=("model",))
    first, second = (parallelize_module(tiny_model("phi3", seed=seed), mesh) for seed in (0, 1))
    with Checkpointer(root, first) as checkpoints:
        checkpoints.save(1)
    load_checkpoint(root, second)
    expected, actual = (full_state_dict(module, every_rank=True) for module in (first, second))
    return all(torch.equal(actual[name], value) for name, value in expected.items())


def groups_of_stages(rank: int, root: str) -> list[float]:
    """A stage that holds none of a group's parameters gets the group's options too."""
    rates = []
    for seed in (0, 1):
        model = tiny_model("llama", num_hidden_layers=2, seed=seed)
        parallel = parallelize_model(model, build_mesh("cpu", pp=2))
        names = dict(model.named_parameters())
        head = [p for name, p in names.items() if name.startswith("lm_head")]
        rest = [p for name, p in names.items() if not name.startswith("lm_head")]
        groups = [{"params": rest, "lr": 0.1 + seed}, {"params": head, "lr": 0.2 + seed}]
        optimizer = parallel.optimizer(torch.optim.SGD, groups, lr=0.3)
        with Checkpointer(root, parallel, optimizer=optimizer) as checkpoints:
            if seed == 0:
                checkpoints.save(1)
            else:
                checkpoints.resume()
                rates = [group["lr"] for group in optimizer.param_groups]
    return rates


_raised: list[str] = []


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def slug_of(call: Any) -> str:
    try:
        call()
    except ParallelizeError as error:
        return error.slugs[0]
    return ""


def folder_rules(rank: int, root: str) -> list[Any]:
    """What stands in the folder, and slugs, as retention, resuming and writers go on."""
    observed: list[Any] = []
    module, checkpoints = small(root, keep_last=2, keep_every=40)
    for step in range(10, 90, 10):
        with torch.no_grad():
            module[0].weight.fill_(step)
        checkpoints.save(step)
    dist.barrier()
    observed.append(sorted(name for name in os.listdir(root) if not name.startswith(".")))
    observed.append((Path(root) / "latest").read_text().strip())
    observed.append(slug_of(lambda: checkpoints.save(80)))
    observed.append(slug_of(lambda: small(root)))  # a second writer
    observed.append(slug_of(lambda: checkpoints.resume(step=40)))
    observed.append(slug_of(lambda: checkpoints.resume(step=41)))
    observed.append((checkpoints.resume(), float(module[0].weight[0, 0])))
    observed.append((checkpoints.resume(step=40, set_aside=True), float(module[0].weight[0, 0])))
    dist.barrier()
    observed.append(((Path(root) / "latest").read_text().strip(), checkpoints.resume()))
    checkpoints.save(80)
    checkpoints.close()
    observed.append(slug_of(lambda: small(f"{root}-of-rank-{rank}")))
    observed.append(slug_of(lambda: load_checkpoint(root, nn.Linear(3, 3), mesh=build_mesh("cpu", dp=2))))
    return observed
