"""What one rank does wrong in a training loop, on every kind of mesh: the jobs of the table in
docs/when-a-run-stops.md."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import build_mesh, clip_grad_norm_, parallelize_model, watch
from parallelize.checkpoint.run.checkpointer import Checkpointer
from tests.support.models import tiny_batch, tiny_model

TIMEOUT_S = 2.0
FAULT_STEP = 2
STEPS = 5

MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {"num_microbatches": 2}),
    "dp": ({"dp": 2}, {"zero": 0}),
    "zero2": ({"dp": 2}, {"zero": 2}),
    "zero3": ({"dp": 2}, {"zero": 3}),
    "cp": ({"cp": 2}, {}),
    "ep": ({"dp": 2, "tp": 2}, {"ep": 4, "zero": 1}),
    "dp x tp": ({"dp": 2, "tp": 2}, {"zero": 1}),
}


class Loop:
    """A training loop with one fault on one rank.

    Args:
        fault: a name of `FAULTS` or a method below. mesh: a key of `MESHES`.
    """

    def __init__(self, rank: int, mesh: str, fault: str, folder: Path):
        self.rank, self.fault, self.folder = rank, fault, folder
        self.axes, self.options = MESHES[mesh]
        self.family = "mixtral" if mesh == "ep" else "llama"
        self.faulty = rank == dist.get_world_size() - 1
        self.by_hand = set(self.axes) <= {"tp", "dp"} and mesh != "ep"

    def has(self, fault: str) -> bool:
        return self.faulty and self.fault == fault

    def run(self) -> None:
        axes, options = dict(self.axes), dict(self.options)
        if self.has("raises before planning") or self.has("hangs before planning"):
            self.mark()
        if self.has("raises before planning"):
            raise ValueError("boom before planning")
        if self.has("hangs before planning"):
            time.sleep(60)
        overrides = {"intermediate_size": 64} if self.has("another size") else {}
        model = tiny_model(self.family, **overrides)
        if self.has("frozen"):
            next(model.parameters()).requires_grad_(False)
        if self.has("another mesh"):
            axes = {"dp" if "tp" in axes else "tp": 2}
        if self.has("another stage"):
            options["zero"] = 3 - options["zero"]
        if self.has("another dtype"):
            options["dtype"] = torch.bfloat16
        plan = "no-such-plan" if self.has("no such plan") else None
        mesh = build_mesh("cpu", **axes)
        self.parallel = parallelize_model(model, mesh, plan, **options)
        self.model, self.mesh = model, mesh
        self.optimizer = self.parallel.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            if self.has("leaves the loop") and step == FAULT_STEP:
                self.mark()
                return
            if self.faulty and step == FAULT_STEP:
                self.mark()
            self.step(step, armed=self.faulty and step == FAULT_STEP)

    def mark(self) -> None:
        """Say when the fault begins, by the clock that all processes of a machine have in common."""
        (self.folder / "fault").write_text(str(time.monotonic()))

    def step(self, step: int, armed: bool) -> None:
        fault = self.fault if armed else ""
        if fault == "skips a step":
            return
        ids, labels = self.batch(fault, step)
        hook = self.arm(fault)
        amp: Any = torch.autocast("cpu", torch.bfloat16) if fault == "autocast" else nullcontext()
        with amp:
            if self.by_hand and fault != "evaluates alone":
                loss = self.model(input_ids=ids, labels=labels).loss
            elif fault == "evaluates alone":
                loss = None
                for _ in range(2):
                    self.evaluate(ids, labels)
        if self.by_hand and fault != "evaluates alone":
            loss.backward()
        elif not self.by_hand and fault != "evaluates alone":
            with amp:
                self.parallel.step(ids, labels=labels)
        if fault == "clips alone":
            clip_grad_norm_(self.model.parameters(), 1.0)
        if fault == "saves alone":
            Checkpointer(self.folder / "run", self.parallel, optimizer=self.optimizer).save(step)
        if fault == "a collective alone":
            dist.all_reduce(torch.zeros(3))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if hook is not None:
            hook.remove()

    def evaluate(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            if self.by_hand:
                self.model(input_ids=ids)
            else:
                self.parallel.evaluate(ids, labels=labels)
        self.model.train()

    def batch(self, fault: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The loader."""
        act(fault, "the loader")
        sizes = {"another batch size": {"batch": 6}, "another length": {"length": 24}}
        return tiny_batch(**({"batch": 4, "length": 16} | sizes.get(fault, {})))

    def arm(self, fault: str) -> Any:
        """A hook that does what is wrong inside the forward or backward."""
        layers = self.model.model.layers
        layer = next(
            (layer for layer in reversed(layers) if isinstance(layer, nn.Module) and list(layer.parameters())), None
        )
        if layer is None:
            return None
        if fault.endswith("the forward"):
            return layer.register_forward_pre_hook(lambda module, args: act(fault, "the forward"))
        if fault.endswith("the backward"):
            return layer.register_forward_hook(_on_gradient(fault))
        if fault.endswith("a hook"):
            parameter = next(p for p in layer.parameters() if p.requires_grad)
            return parameter.register_post_accumulate_grad_hook(lambda p: act(fault, "a hook"))
        return None


def _on_gradient(fault: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.register_hook(lambda gradient: act(fault, "the backward"))

    return hook


def act(fault: str, where: str) -> None:
    """Do what a fault such as "sleeps in the forward" says, if it is one of this part of the step."""
    kind, _, part = fault.partition(" in ")
    if part != where:
        return
    if kind == "raises":
        raise ValueError(f"boom in {where}")
    if kind == "sleeps":
        time.sleep(60)
    if kind == "deadlocks":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if kind == "keeps Python's lock":
        ctypes.PyDLL(None).sleep(60)
    if kind == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exits":
        os._exit(5)
    if kind == "crashes":
        ctypes.string_at(0)


def job(rank: int, mesh: str, fault: str, folder: Path, timeout_s: float) -> None:
    """One rank's script, under a watch with this timeout in seconds."""
    with watch(timeout_s=timeout_s, folder=folder / "reports"):
        Loop(rank, mesh, fault, folder).run()
