"""The forward of a microbatch beside the backward of the microbatch before it.

    F0  B0  F1  B1  F2  B2      one after another
    F0  B0+F1   B1+F2   B2      in pairs

The two of a pair share no results, so their numbers are those of the order one after another, bit for bit. They take turns (see
`comm/turns.py`): the forward in the caller's thread, the backward in another. While the backward frees the activations of its
last layers, the forward makes those of its first, so that together they need about those of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize._torch_groups import ranks_are_threads
from parallelize._torch_private import num_dispatch_modes
from parallelize.comm.turns import run_in_turns
from parallelize.errors import ModelError, Problem
from parallelize.pipeline.schedules import Action
from parallelize.recomputation.recompute import recomputed

Run = Callable[[Action], None]


@dataclass(frozen=True)
class Pair:
    """A backward, and the forward of the next microbatch."""

    backward: Action
    forward: Action


def paired(actions: Iterable[Action]) -> Iterator[Action | Pair]:
    """The actions of a rank in their order, each backward with the forward that follows it."""
    before: Action | None = None
    for action in actions:
        if before is not None and (before.kind, action.kind) == ("B", "F"):
            yield Pair(before, action)
            before = None
            continue
        if before is not None:
            yield before
        before = action
    if before is not None:
        yield before


class PairRunner:
    """Runs pairs of actions on a device. It has a thread for backwards, which ends with it."""

    def __init__(self, device: torch.device):
        self.device = device
        self._backwards = ThreadPoolExecutor(1, thread_name_prefix="backward")

    def __call__(self, pair: Pair, run: Run) -> None:
        """Run both of a pair by `run`. Raises: the error of the one that failed first."""
        enter = _state_of_this_thread(self.device)

        def backward() -> None:
            with enter():
                run(pair.backward)

        run_in_turns(lambda: run(pair.forward), backward, self._backwards)

    def steps(self, actions: Iterable[Action], module: nn.Module) -> Iterator[Action | Pair]:
        """What a step runs; no pairs where a second thread has no part in what this one has: a mode of PyTorch that watches its
        operations, or its process groups (where ranks are threads).

        Raises: ModelError `no-overlap` where the backward of this model would run its layers or free their weights.
        """
        check_overlap_of_microbatches(module)
        return iter(actions) if num_dispatch_modes() or ranks_are_threads() else paired(actions)


def _state_of_this_thread(device: torch.device) -> Callable[[], ExitStack]:
    """A function that gives another thread what operations of this one depend on: autocast, the device, and its stream."""
    kinds = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def enter() -> ExitStack:
        stack = ExitStack()
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype))
        if stream is not None:
            torch.accelerator.set_device_index(device.index)
            torch.accelerator.set_stream(stream)
        # autograd would run a device's operations in a thread of that device, which cannot take turns with two others
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        return stack

    return enter


def check_overlap_of_microbatches(module: nn.Module) -> None:
    """Raises: ModelError `no-overlap`."""
    if reason := _shared_state(module):
        what = f"overlap_microbatches is asked for, and {reason}"
        raise ModelError(Problem("no-overlap", what, fix="overlap_microbatches=False"))


def _shared_state(module: nn.Module) -> str:
    """What a forward and the backward of another microbatch would both change; empty: nothing."""
    modes = {mode for mode in recomputed(module).values() if mode != "off"}
    if modes or any(part.__dict__.get("gradient_checkpointing") is True for part in module.modules()):
        return "the model recomputes activations: a backward would run layers in which a forward is"
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return "fully_shard stores the weights of a layer either for a forward or for a backward"
    return ""
