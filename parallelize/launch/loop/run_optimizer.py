"""The optimizer of a run and the schedule of its learning rate."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from parallelize.errors import LaunchError, Problem
from parallelize.launch.config.run_config import OptimizerSection, RunConfig, ScheduleSection
from parallelize.launch.loop.named_objects import object_of
from parallelize.pipeline.parallel_model import ParallelModel


def optimizer_class(section: OptimizerSection) -> type[Optimizer]:
    """The class that the file names. Raises: LaunchError `no-such-object`, `bad-optimizer`."""
    cls = object_of(section.name, "torch.optim")
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise LaunchError(
            Problem("bad-optimizer", f"{section.name} is no optimizer", fix="AdamW, SGD, or module:Class")
        )
    return cls


def build_optimizer_of(config: RunConfig, parallel: ParallelModel) -> Optimizer:
    """Raises: LaunchError `bad-optimizer` for arguments that the class does not take."""
    section = config.optimizer
    try:
        return parallel.optimizer(optimizer_class(section), lr=section.lr, **section.args)
    except (TypeError, ValueError) as error:
        what = f"{section.name} refuses its arguments: {error}"
        raise LaunchError(
            Problem("bad-optimizer", what, config.place("optimizer.args"), fix="optimizer: {args: {...}}")
        ) from error


def build_schedule_of(config: RunConfig, optimizer: Optimizer) -> LambdaLR:
    section, steps = config.schedule, config.steps
    return LambdaLR(optimizer, _Factor(section, steps))


class _Factor:
    """Step -> factor of the learning rate: linear warmup, then constant, linear or cosine. Its state is its arguments."""

    def __init__(self, section: ScheduleSection, steps: int):
        self.warmup, self.decay, self.final, self.steps = (
            section.warmup_steps,
            section.decay,
            section.final_fraction,
            steps,
        )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "none":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        shape: Any = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final + (1.0 - self.final) * shape
