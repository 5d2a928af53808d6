"""The forward of a microbatch beside the backward of the microbatch before it.

    F0  B0  F1  B1  F2  B2      one after another
    F0  B0+F1   B1+F2   B2      in pairs

The two of a pair share no results, so their numbers are those of the order one after another, bit for bit. They take
turns (see `comm/turns.py`): the forward in the caller's thread, the backward in another. While the backward frees the
activations of its last layers, the forward makes those of its first, so that together they need about those of one
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from parallelize.axes.pipeline.schedules import Action
from parallelize.axes.recomputation.recompute import recomputed
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private.torch_draws import modes_of_this_thread
from parallelize.base.torch_private.torch_groups import ranks_are_threads
from parallelize.base.torch_private.torch_tensors import counts_collectives
from parallelize.comm.turns import is_second, run_in_turns

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


class InterleavedRunner:
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

        with _no_forward_in_a_backward():
            run_in_turns(lambda: run(pair.forward), backward, self._backwards)

    def steps(self, actions: Iterable[Action]) -> Iterator[Action | Pair]:
        """What a step runs. Where ranks are threads, a second thread would be another rank: they run in order."""
        return iter(actions) if ranks_are_threads() else paired(actions)


def _state_of_this_thread(device: torch.device) -> Callable[[], ExitStack]:
    """What operations of this thread depend on, for another thread: autocast, modes, the device and its stream."""
    kinds = {kind: torch.get_autocast_dtype(kind) for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)}
    caches, modes = torch.is_autocast_cache_enabled(), modes_of_this_thread()
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def enter() -> ExitStack:
        stack = ExitStack()
        # not by the context manager, whose end drops casts that the forward still uses
        for kind, dtype in kinds.items():
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(caches)
            stack.callback(torch.set_autocast_enabled, kind, False)
        if stream is not None:
            torch.accelerator.set_device_index(device.index)
            torch.accelerator.set_stream(stream)
        # autograd would run a device's operations in a thread of that device, which cannot take turns with two others
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(modes())
        return stack

    return enter


@contextmanager
def _no_forward_in_a_backward() -> Iterator[None]:
    """Refuse a module that a backward calls, such as one that a user recomputes: a forward may be in it."""

    def refuse(module: nn.Module, args: Any) -> None:
        if is_second():
            raise _refusal(f"a backward calls {type(module).__name__}, in which a forward may be")

    hook = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def check_overlap_of_microbatches(module: nn.Module) -> None:
    """Raises: ModelError `no-overlap` where the backward of this model would run its layers or free their weights."""
    modes = {mode for mode in recomputed(module).values() if mode != "off"}
    if modes or any(part.__dict__.get("gradient_checkpointing") is True for part in module.modules()):
        raise _refusal("the model recomputes activations: a backward would run layers in which a forward is")
    if counts_collectives():
        raise _refusal("CommDebugMode counts collectives, which then wait at once")
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise _refusal("fully_shard stores the weights of a layer either for a forward or for a backward")


def may_overlap_microbatches(module: nn.Module) -> bool:
    """Whether `check_overlap_of_microbatches` refuses nothing, as the model is now."""
    try:
        check_overlap_of_microbatches(module)
    except ModelError:
        return False
    return True


def _refusal(reason: str) -> ModelError:
    what = f"overlap_microbatches is asked for, and {reason}"
    return ModelError(Problem("no-overlap", what, fix="overlap_microbatches=False"))


# -- interleave trial ------------------------------------------------------------------------------------------------
# Whether a step is faster in pairs of a forward and a backward, or in order: measured in the first steps of training.
# Both give the same numbers, so the compared steps are steps of training; they alternate. Every rank decides by the
# sums of all ranks' times, which travel with the sums of the next step and are equal on every rank.


WARM_UP = 2  # steps: the first of each kind calibrates, compiles and allocates
COMPARED = 5  # steps of each kind


class PairTrial:
    """The measurement of one model.

    Args:
        report: called with a sentence about the choice, once.

    Attributes:
        in_pairs: whether the next step runs in pairs.
        own_s: the seconds of this rank's last step, which the others have not got; None: there is none to tell.
    """

    def __init__(self, report: Callable[[str], None]):
        self.report = report
        self.in_pairs = True
        self.own_s: float | None = None
        self._steps = 0
        self._was_in_pairs = True
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def is_running(self) -> bool:
        """Whether steps are still compared."""
        return len(self._seconds[False]) < COMPARED

    def end_step(self, own_s: float) -> None:
        """A step has ended on every rank, without a failure."""
        if not self.is_running:
            return
        self._steps += 1
        self._was_in_pairs = self.in_pairs
        self.own_s = own_s if self._steps > WARM_UP else None
        self.in_pairs = not self.in_pairs

    def take(self, mean_s: float) -> None:
        """The mean over all ranks of the step before this one, equal on all of them."""
        if self.own_s is None:
            return
        self.own_s = None
        self._seconds[self._was_in_pairs].append(mean_s)
        if not self.is_running:
            pairs, order = (1e3 * median(self._seconds[kind]) for kind in (True, False))
            self._choose(pairs, order)

    def _choose(self, pairs_ms: float, order_ms: float) -> None:
        self.in_pairs = pairs_ms < order_ms
        chosen = "in pairs" if self.in_pairs else "in order"
        self.report(
            f"a step of microbatches beside each other takes {pairs_ms:.1f} ms, one in order {order_ms:.1f} ms "
            f"(medians of {COMPARED}): {chosen} from now on"
        )
