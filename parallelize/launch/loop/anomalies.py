"""Losses and gradients that are not finite, and losses far above those before: what to do, the same on every rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import ParallelizeError
from parallelize.base.torch_private.torch_tensors import plain_local, tree_leaves
from parallelize.launch.config.run_config import AnomalySection

GOES_ON = ("ignore", "warn", "")


@dataclass(frozen=True)
class Anomaly:
    """Something unusual at a step. kind: nonfinite or spike. action: of `AnomalySection`."""

    kind: str
    action: str
    what: str


@dataclass
class AnomalyWatch:
    """Compares each loss with a window of those before. Losses and norms are the same on every rank, so its answers are
    too.

    Its state is saved with the run, so that a resumed run judges as one that goes on.
    """

    section: AnomalySection
    num_anomalies: int = 0
    _window: deque[float] = field(default_factory=deque)

    def judge(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        """What is wrong with a step; None where nothing is. A loss that is right joins the window."""
        anomaly = self._judge(step, loss, grad_norm)
        if anomaly is None or (anomaly.kind == "spike" and anomaly.action in GOES_ON):
            self._window.append(loss)
            if len(self._window) > self.section.window:
                self._window.popleft()
        if anomaly is not None:
            self.num_anomalies += 1
        return anomaly

    def _judge(self, step: int, loss: float, grad_norm: float) -> Anomaly | None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = f"step {step}: the loss is {loss:g}, the norm of gradients {grad_norm:g}"
            return Anomaly("nonfinite", self.section.nonfinite, what)
        if self.section.spike == "ignore" or len(self._window) < self.section.window:
            return None
        mean = sum(self._window) / len(self._window)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in self._window) / len(self._window))
        if loss <= mean + self.section.spike_factor * max(deviation, 1e-3 * abs(mean)):
            return None
        what = (
            f"step {step}: the loss is {loss:.4g}, after {mean:.4g} +- {deviation:.2g} in the last {len(self._window)} "
            "steps"
        )
        return Anomaly("spike", self.section.spike, what)

    @property
    def too_many(self) -> bool:
        return self.num_anomalies >= self.section.most

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.num_anomalies, "window": list(self._window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After going back to a checkpoint the number of anomalies is that of the process, not the saved one.

        The window has the file's length, which may be less than the saved one.
        """
        self.num_anomalies = max(self.num_anomalies, int(state["seen"]))
        self._window = deque(state["window"][-self.section.window :])


# -- anomaly source --------------------------------------------------------------------------------------------------
# Which module, on which rank, is the source of a number that is not finite, or has the largest gradient at a spike.
# The forward is run again on the same batch with a hook on each module. The source is the module whose output is not
# finite while its inputs are: of all ranks the one that ran first, in the first stage. Where all outputs are finite,
# it is the first parameter, in order of backward, whose gradient is not.


@dataclass(frozen=True, order=True)
class _Suspect:
    """A module or parameter. Ordered by when it runs: sure ones first, then by stage, then by number."""

    doubt: int
    stage: int
    order: int
    rank: int
    name: str


def source_of_nonfinite(parallel: ParallelModel, batch: dict[str, Any]) -> str:
    """One line that names module and rank. A collective; call it before gradients are zeroed."""
    gradient = _nonfinite_gradient(parallel.module)  # before the forward, which may leave none
    weight = next(
        (name for name, parameter in parallel.module.named_parameters() if not _finite(plain_local(parameter))), ""
    )
    first = _first_output(parallel, batch)
    answers = _gathered((first, weight, gradient))
    suspects = [answer[0] for answer in answers if answer[0] is not None]
    weights = [f"{name} on rank {rank}" for rank, (_, name, _) in enumerate(answers) if name]
    if weights:
        return f"parameters are not finite: {', '.join(weights[:4])}"
    if suspects:
        source = min(suspects)
        return f"the output of {source.name} on rank {source.rank} is the first that is not finite"
    gradients = [f"{name} on rank {rank}" for rank, (_, _, name) in enumerate(answers) if name]
    if gradients:
        return f"outputs are finite in the forward; gradients that are not: {', '.join(gradients[:4])}"
    return (
        "all outputs and gradients are finite when the forward is run again: a sum over ranks has overflowed, or a "
        "device errs"
    )


def largest_gradient(parallel: ParallelModel) -> str:
    """The parameter with the largest local gradient, and its rank. A collective."""
    largest, name = -1.0, ""
    for fqn, parameter in parallel.module.named_parameters():
        if parameter.grad is not None and plain_local(parameter.grad).numel():
            norm = float(plain_local(parameter.grad).float().norm())
            if norm > largest:
                largest, name = norm, fqn
    answers = _gathered((largest, name))
    rank = max(range(len(answers)), key=lambda index: answers[index][0])
    return f"the largest gradient is that of {answers[rank][1]} on rank {rank}, of norm {answers[rank][0]:.4g}"


def _nonfinite_gradient(module: nn.Module) -> str:
    """The last parameter, which backward reaches first, with a gradient that is not finite."""
    last = ""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not _finite(plain_local(parameter.grad)):
            last = name
    return last


def _first_output(parallel: ParallelModel, batch: dict[str, Any]) -> _Suspect | None:
    """The first module of this rank whose output is not finite while its inputs are."""
    outputs: list[tuple[str, bool]] = []
    watched = _watched(parallel.module, lambda name, clean: outputs.append((name, clean)))
    with watched, suppress(ParallelizeError):  # of the loss that is not finite, which is known
        parallel.evaluate(**batch)
    rank = dist.get_rank() if dist.is_initialized() else 0
    stage = parallel.pipeline.mesh.index("pp")
    suspects = [_Suspect(0 if clean else 1, stage, order, rank, name) for order, (name, clean) in enumerate(outputs)]
    return min(suspects, default=None)


@contextmanager
def _watched(module: nn.Module, report: Callable[[str, bool], None]) -> Iterator[None]:
    """Report each module whose output is not finite, with whether its inputs were; inner modules before outer ones."""

    def hook(name: str) -> Callable[..., None]:
        def check(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not _all_finite(output):
                report(name or type(module).__name__, _all_finite((args, kwargs)))

        return check

    handles = [inner.register_forward_hook(hook(name), with_kwargs=True) for name, inner in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _all_finite(values: Any) -> bool:
    """Whether floating-point tensors among nested values are. Masks have infinities on purpose, and count as finite."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return all(_finite(plain_local(leaf)) for leaf in leaves if leaf.dim() != 4 or leaf.shape[1] != 1)


def _finite(tensor: torch.Tensor) -> bool:
    """Of a tensor without values: it counts as finite."""
    return (
        tensor.is_meta
        or math.isfinite(float(tensor.detach().float().abs().sum()))
        or bool(torch.isfinite(tensor).all())
    )


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
