"""Saves that are killed, or that get an error from the disk, at one operation: in forks of a process without threads.

A fork server (`python -m tests.checkpoint.run.fault_jobs`) reads test configurations, one JSON object per line, and
answers with the results of each rank and of a new loader. Ranks are forks of it, so that no test waits for imports.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.run import local_tensors
from parallelize.checkpoint.run.checkpointer import Checkpointer
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint

T = torch.Tensor
LIMIT_S = 15.0  # a rank that runs longer hangs
LINGERING_S = 8.0  # the same, where ranks wait on purpose until all have ended their save
TIMEOUT_S = 60.0  # how long ranks wait for each other: longer than LIMIT_S, so that a timeout cannot end a test
OPERATIONS = (
    "create",
    "write",
    "write_at",
    "flush",
    "flush_folder",
    "close",
    "make_folder",
    "rename",
    "replace",
    "write_file",
    "replace_file",
    "remove_file",
    "remove_folder",
)
INSIDE_REMOVAL = ("unlink", "rmdir")  # of os: steps of `remove_folder`


class Tiny(nn.Module):
    """Parameters to split, to shard over tp, of two dtypes, without elements and without dims; a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 6)
        self.norm = nn.LayerNorm(12, dtype=torch.bfloat16)
        self.scale, self.none = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def state_of(step: int) -> dict[str, T]:
    """Every tensor of the run at a step; no value is that of another step."""
    state = {}
    for name, value in [*Tiny().named_parameters(), *Tiny().named_buffers()]:
        random = torch.Generator().manual_seed(step * 1000 + len(state))
        state[name] = torch.randint(1, 100, value.shape, generator=random).to(value.dtype) + 100 * step
        if name != "count":
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{name}/{key}"] = state[name] + (1 if key == "exp_avg" else 2)
            state[f"{name}/step"] = torch.tensor(float(step))
    return state


class Bench:
    """A model and its optimizer on this rank, to be set to a step and compared with one."""

    def __init__(self, layout: str = "plain", world: int = 1):
        self.module, self.mesh = Tiny(), None
        if world > 1:
            self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp" if layout == "tp" else "dp",))
            if layout == "tp":
                parallelize_module(self.module, self.mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
        self.optimizer = torch.optim.Adam(self.module.parameters())
        self.set(0)

    @torch.no_grad()
    def set(self, step: int) -> None:
        state = state_of(step)
        self.module.count.copy_(state["count"])
        for name, parameter in self.module.named_parameters():
            parameter.copy_(self._as(parameter, state[name]))
            self.optimizer.state[parameter] = {
                "step": state[f"{name}/step"],
                "exp_avg": self._as(parameter, state[f"{name}/exp_avg"]),
                "exp_avg_sq": self._as(parameter, state[f"{name}/exp_avg_sq"]),
            }

    @staticmethod
    def _as(parameter: Any, full: T) -> Any:
        if not isinstance(parameter, DTensor):
            return full.clone()
        replicated = distribute_tensor(full, parameter.device_mesh, [Replicate()], src_data_rank=None)
        return replicated.redistribute(placements=parameter.placements)

    def differs(self, step: int) -> list[str]:
        """Names of tensors that are not bit-equal to those of this step, for an unsharded model."""
        expected, actual = state_of(step), {"count": self.module.count}
        for name, parameter in self.module.named_parameters():
            actual[name] = parameter.detach()
            actual |= {f"{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
        assert set(actual) == set(expected), set(actual) ^ set(expected)
        return [name for name in expected if not same_bits(expected[name], actual[name])]

    def checkpointer(self, root: Path, **more: Any) -> Checkpointer:
        return Checkpointer(
            root, self.module, optimizer=self.optimizer, mesh=self.mesh, generators=False, timeout_s=TIMEOUT_S, **more
        )


def same_bits(a: T, b: T) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


# -- faults -----------------------------------------------------------------------------------------------------------


class Faults:
    """Counts the operations of `disk`, and injects a fault of this kind at operation `at`. `at` < 0: none."""

    def __init__(self, kind: str = "", at: int = -1):
        self.kind, self.at, self.seen, self.armed, self.fired = kind, at, list[str](), False, False
        for name in OPERATIONS:
            setattr(disk, name, self._wrapped(name, getattr(disk, name)))
        for name in INSIDE_REMOVAL:
            setattr(os, name, self._wrapped(f"os.{name}", getattr(os, name)))
        if kind == "short":
            os.write, os.pwrite = _short(os.write), _short(os.pwrite)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def step(*args: Any, **more: Any) -> Any:
            number = len(self.seen)
            if self.armed:
                self.seen.append(name)
            if not self.armed or number != self.at:
                return real(*args, **more)
            self.fired = True
            return self._fault(name, functools.partial(real, *args, **more), args)

        return step

    def _fault(self, name: str, real: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if self.kind in ("kill-half", "ENOSPC-half"):
            half = memoryview(args[1]).cast("B")[: max(1, len(args[1]) // 2)]
            if name == "write_at":
                os.pwrite(args[0], half, args[2])
            else:
                os.write(args[0], half)
        try:
            if self.kind == "kill-after":
                real()
        finally:
            if self.kind.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.kind.removesuffix("-half"))
        if name == "close":
            return self._with_failing_close(real, number)
        raise OSError(number, os.strerror(number))

    @staticmethod
    def _with_failing_close(real: Callable[[], Any], number: int) -> Any:
        """Call `disk.close` while `os.close` closes, and then reports an error, as the system call does."""
        os_close = os.close

        def close(descriptor: int) -> None:
            os_close(descriptor)
            raise OSError(number, os.strerror(number))

        os.close = close
        try:
            return real()
        finally:
            os.close = os_close


def _short(real: Callable[..., int]) -> Callable[..., int]:
    return lambda descriptor, data, *at: real(descriptor, data[: max(1, len(data) // 3)], *at)


# -- ranks ------------------------------------------------------------------------------------------------------------


def rank_job(config: dict[str, Any], rank: int, root: Path, work: Path) -> dict[str, Any]:
    """One rank of a save of step 2 over a good step 1; and of step 3, where the disk has failed and no rank died."""
    world, victim = config["world"], rank == config["victim"]
    if world > 1:
        store = dist.FileStore(str(work / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    bench = Bench(config["layout"], world)
    bench.set(2)
    every_node, per_node = root, config["per_node"]
    root = root_of(root, rank, per_node)
    faults = Faults(config["kind"] if victim else "", config["at"] if victim else -1)
    faults.armed = config.get("early", False)
    result: dict[str, Any] = {}
    try:
        with bench.checkpointer(
            root, asynchronous=config["asynchronous"], keep_last=config["keep_last"], shared=not per_node
        ) as checkpoints:
            faults.armed = True
            try:
                checkpoints.save(2, values={"step": 2})
                checkpoints.wait()
                result["outcome"] = "saved"
            except Exception as error:
                result |= outcome_of(error)
            faults.armed = False
            if config["kind"].startswith("E"):
                if per_node:
                    dist.barrier()  # every node has removed its part of the failed save
                if rank == 0:
                    shutil.copytree(every_node, work / "after")
                if per_node:
                    dist.barrier()
                bench.set(3)
                checkpoints.save(3, values={"step": 3})
                checkpoints.wait()
                result["later"] = "saved"
            while config.get("lingers") and not (work / "all-ended").exists():
                (work / f"ended-{rank}").touch()
                time.sleep(0.02)
    except Exception as error:
        result["later" if "outcome" in result else "outcome"] = outcome_of(error)["outcome"]
        result.setdefault("text", outcome_of(error)["text"])
    return result | {"seen": faults.seen, "fired": faults.fired}


def root_of(root: Path, rank: int, per_node: int) -> Path:
    """The folder that a rank is given. `per_node`: ranks that share one; 0: all of them."""
    return root / f"node-{rank // per_node}" if per_node else root


def outcome_of(error: Exception) -> dict[str, Any]:
    if isinstance(error, CheckpointError):
        return {"outcome": f"CheckpointError {error.slugs[0]}", "text": str(error)}
    return {"outcome": f"another exception: {type(error).__name__}", "text": traceback.format_exc()}


def check_job(config: dict[str, Any], root: Path, work: Path, good_digest: str) -> dict[str, Any]:
    """What a new loader finds, in a process of its own; `wrong`: every error."""
    wrong: list[str] = []
    rounds = [(work / "after", (1, 2), False), (root, (3,), True)] if (work / "after").exists() else []
    steps = [
        _loaded(where, allowed, wrong, goes_on=last, good_digest=good_digest if config["keep_last"] is None else None)
        for where, allowed, last in rounds or [(root, (1, 2), True)]
    ]
    left = [name for name in leftovers(work / "after") if ".removing-" not in name] if rounds else []
    if left:
        wrong.append(f"a save that has failed leaves {left}")
    return {"step": steps[0], "wrong": wrong}


def check_job_of_nodes(config: dict[str, Any], rank: int, root: Path, work: Path) -> dict[str, Any]:
    """What the next run finds on the nodes of a run; `wrong`: every error. One rank of it."""
    wrong: list[str] = []
    world, per_node = config["world"], config["per_node"]
    store = dist.FileStore(str(work / "check-store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    bench = Bench("plain", world)
    after = work / "after"
    rounds = [(after, (1, 2), False), (root, (3,), True)] if after.exists() else [(root, (1, 2), True)]
    steps = []
    for every_node, allowed, goes_on in rounds:
        node = root_of(every_node, rank, per_node)
        if every_node == after and any(".writing-" in name for name in leftovers(node)):
            wrong.append(f"a save that has failed leaves {leftovers(node)}")
        dist.barrier()
        with bench.checkpointer(node, shared=False) as checkpoints:
            if left := leftovers(node):
                wrong.append(f"the next Checkpointer leaves {left}")
            bench.set(0)
            step = checkpoints.resume()
            steps.append(step)
            if step not in allowed or bench.differs(step) or checkpoints.values != {"step": step}:
                wrong.append(f"resumed as step {step}, not of it: {bench.differs(step)[:4]}")
            wrong += _differing_nodes(node, bench, config)
            if goes_on:
                bench.set(4)
                checkpoints.save(4, values={"step": 4})
                bench.set(0)
                if checkpoints.resume() != 4 or bench.differs(4) or (node / "latest").read_text() != "step-00000004\n":
                    wrong.append("a save of the next run does not load")
    return {"step": steps[0], "wrong": wrong}


def _differing_nodes(node: Path, bench: Bench, config: dict[str, Any]) -> list[str]:
    """Steps that not all nodes have, and steps that do not load. With retention, older steps may be there in part."""
    wrong = []
    own, on_ranks = list(folders.published(node)), [None] * config["world"]
    dist.all_gather_object(on_ranks, own)
    if config["keep_last"] is not None:
        own, on_ranks = own[-1:], [steps[-1:] for steps in on_ranks]
    if any(steps != own for steps in on_ranks):
        return [f"the nodes have different steps: {on_ranks}"]
    for step in own:
        bench.set(0)
        load_checkpoint(node, bench.module, optimizer=bench.optimizer, step=step, mesh=bench.mesh, shared=False)
        wrong += [f"step {step} is not of it"] if bench.differs(step) else []
    return wrong


def _loaded(root: Path, allowed: tuple[int, ...], wrong: list[str], goes_on: bool, good_digest: str | None) -> int:
    bench = Bench()
    step = load_checkpoint(root, bench.module, optimizer=bench.optimizer)
    if step not in allowed or bench.differs(step):
        wrong.append(f"{root.name} loads as step {step}, not of it: {bench.differs(step)[:4]}")
    there = folders.published(root)
    for number, folder in there.items():
        bench.set(0)
        if load_checkpoint(folder, bench.module, optimizer=bench.optimizer) != number or bench.differs(number):
            wrong.append(f"{folder.name} is not step {number}: {bench.differs(number)[:4]}")
    strange = [path.name for path in root.glob("step-*") if path not in there.values()]
    if strange:
        wrong.append(f"names of checkpoints without one: {strange}")
    latest = root / "latest"
    if latest.exists() and not (root / latest.read_text().strip() / "manifest.json").is_file():
        wrong.append(f"latest says {latest.read_text()!r}, and there are {list(there)}")
    if good_digest is not None and digest_of_folder(root / folders.folder_name(1)) != good_digest:
        wrong.append("the folder of step 1 has changed")
    if goes_on:
        _goes_on(root, bench, step, wrong)
    return step


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".") and path.name != ".lock")


def _goes_on(root: Path, bench: Bench, step: int, wrong: list[str]) -> None:
    """The next run clears what was left, resumes, and saves."""
    with bench.checkpointer(root) as checkpoints:
        if left := leftovers(root):
            wrong.append(f"the next Checkpointer leaves {left}")
        bench.set(0)
        if checkpoints.resume() != step or bench.differs(step) or checkpoints.values != {"step": step}:
            wrong.append(f"resumed otherwise than step {step}")
        bench.set(4)
        checkpoints.save(4, values={"step": 4})
    bench.set(0)
    if load_checkpoint(root, bench.module, optimizer=bench.optimizer) != 4 or bench.differs(4):
        wrong.append("a save of the next run does not load")
    if (root / "latest").read_text() != "step-00000004\n":
        wrong.append("latest does not name the newest")


def digest_of_folder(folder: Path) -> str:
    parts = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sorted(folder.iterdir())]
    return " ".join(parts)


# -- the server -------------------------------------------------------------------------------------------------------


class Server:
    """Runs tests, each in forks. Nothing here starts a thread, so that forks are complete."""

    def __init__(self, work: Path):
        self.work, self.number = work, 0
        self.good: dict[str, tuple[Path, str]] = {}

    def run(self, config: dict[str, Any]) -> dict[str, Any]:
        self.number += 1
        work = self.work / f"config-{self.number}"
        work.mkdir()
        good, good_digest = self._good(config["world"], config["layout"], config["per_node"])
        root = work / "run"
        shutil.copytree(good, root)
        ranks = self._forked(
            [functools.partial(rank_job, config, rank, root, work) for rank in range(config["world"])],
            work if config.get("lingers") else None,
        )
        if config["per_node"]:
            checked = _joined(
                self._forked(
                    [functools.partial(check_job_of_nodes, config, rank, root, work) for rank in range(config["world"])]
                )
            )
        else:
            checked = self._forked([functools.partial(check_job, config, root, work, good_digest)])[0]
        shutil.rmtree(work)
        return {"config": config, "ranks": ranks, "checked": checked}

    def _good(self, world: int, layout: str, per_node: int) -> tuple[Path, str]:
        """A folder with step 1, written by so many ranks, and the digest of that step; none for folders of nodes."""
        key = f"{layout}-{world}-{per_node}"
        if key not in self.good:
            root = self.work / f"good-{key}"
            jobs = [functools.partial(_save_good, layout, world, rank, root, per_node) for rank in range(world)]
            outcomes = self._forked(jobs)
            assert all(outcome == {"outcome": "saved"} for outcome in outcomes), outcomes
            self.good[key] = root, "" if per_node else digest_of_folder(root / folders.folder_name(1))
        return self.good[key]

    def _forked(self, jobs: list[Callable[[], dict[str, Any]]], lingering: Path | None = None) -> list[dict[str, Any]]:
        """The result of each job, in a process of its own; or that it died or hangs."""
        pids, pipes = [], []
        until = time.monotonic() + (LIMIT_S if lingering is None else LINGERING_S)
        for job in jobs:
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in (*pipes, read_end):
                    os.close(pipe)
                _child(job, write_end)
            os.close(write_end)
            pids.append(pid)
            pipes.append(read_end)
        received: dict[int, bytes] = dict.fromkeys(pipes, b"")
        open_pipes = set(pipes)
        while open_pipes and time.monotonic() < until:
            for pipe in select.select(list(open_pipes), [], [], 0.05)[0]:
                more = os.read(pipe, 1 << 16)
                received[pipe] += more
                if not more:
                    open_pipes.discard(pipe)
            if lingering is not None and len(list(lingering.glob("ended-*"))) >= len(open_pipes):
                (lingering / "all-ended").touch()
        outcomes = []
        for pid, pipe in zip(pids, pipes, strict=True):
            if pipe in open_pipes:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            os.close(pipe)
            ended = f"ended with {os.waitstatus_to_exitcode(status)}"
            missing = {"outcome": "hangs" if pipe in open_pipes else ended}
            outcomes.append(json.loads(received[pipe]) if received[pipe].endswith(b"\n") else missing)
        return outcomes


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The findings of all ranks as those of one."""
    wrong = [text for answer in answers for text in answer.get("wrong", [f"the check {answer}"])]
    return {"step": answers[0].get("step"), "wrong": wrong}


def _save_good(layout: str, world: int, rank: int, root: Path, per_node: int = 0) -> dict[str, Any]:
    if world > 1:
        store = dist.FileStore(str(root) + ".store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    bench = Bench(layout, world)
    bench.set(1)
    with bench.checkpointer(root_of(root, rank, per_node), shared=not per_node) as checkpoints:
        checkpoints.save(1, values={"step": 1})
    return {"outcome": "saved"}


def _child(job: Callable[[], dict[str, Any]], pipe: int) -> None:
    """Never returns."""
    try:
        result = job()
    except BaseException as error:
        result = {"outcome": f"another exception: {type(error).__name__}", "text": traceback.format_exc()}
    try:
        data = json.dumps(result).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]
    finally:
        os._exit(0)


def prepare(work: Path) -> None:
    """Split tensors of a few bytes among ranks, as large ones are; and import what forks would import."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    local_tensors.SPLIT_BYTES = 64
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
    _save_good("plain", 1, 0, work / "first")
    _loaded(work / "first", (1,), [], True, None)
    assert len(list(Path("/proc/self/task").glob("*"))) <= 1, "forks of a process with threads are not complete"


def main() -> None:
    work = Path(sys.argv[1])
    prepare(work)
    server = Server(work)
    for line in sys.stdin:
        print(json.dumps(server.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
