"""The optimizer of a run and the schedule of its learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import LaunchError, Problem, short_list
from parallelize.launch.config.run_config import OptimizerSection, RunConfig, ScheduleSection
from parallelize.launch.loop.memory_report import object_of


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
    return LambdaLR(optimizer, factor_of(config.schedule, config.steps))


def factor_of(section: ScheduleSection, steps: int) -> Callable[[int], float]:
    """Step -> factor of the learning rate: linear warmup, then constant, linear or cosine.

    A function, of which `LambdaLR` saves nothing: the shape is the file's in a run that goes on, too.
    """
    warmup, final = section.warmup_steps, section.final_fraction

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if section.decay == "none":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        shape: Any = 1.0 - done if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return final + (1.0 - final) * shape

    return factor


# -- of a run that goes on from a checkpoint --------------------------------------------------------------------------


@dataclass(frozen=True)
class FileOptions:
    """The options of an optimizer's groups as its file gives them, which a checkpoint would replace by the saved ones.

    Attributes:
        of_groups: the arguments of the class in each group. Other options of a group are state, as some classes have
            there.
    """

    section: OptimizerSection
    of_groups: list[dict[str, Any]]

    @classmethod
    def of(cls, section: OptimizerSection, optimizer: Optimizer) -> FileOptions:
        """Of an optimizer that was just built, before a schedule changes its learning rate."""
        names = _argument_names(type(optimizer)) | set(section.args)
        options = [
            {key: value for key, value in group.items() if _is_argument(key, names)} for group in optimizer.param_groups
        ]
        return cls(section, options)

    def restore(self, optimizer: Optimizer, schedule: LambdaLR) -> None:
        """Give the groups the file's options again, and learning rates those of the schedule at its step.

        Raises: LaunchError `bad-optimizer` where these options need state that was not saved.
        """
        for group, options in zip(optimizer.param_groups, self.of_groups, strict=True):
            group.update(options)
            group["initial_lr"] = options["lr"]
        schedule.base_lrs = [options["lr"] for options in self.of_groups]
        for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
        self._check_state(optimizer)

    def _check_state(self, optimizer: Optimizer) -> None:
        """Whether the class steps with the saved state: tried on a small matrix that has the entries of a saved one
        alone."""
        saved = next((set(state) for state in optimizer.state.values() if state), None)
        lacking = _lacking_state(optimizer_class(self.section), self.section, saved) if saved is not None else ()
        if lacking:
            what = (
                f"with these arguments {self.section.name} needs {short_list(lacking)}, which the checkpoint does not "
                "have"
            )
            fix = "the arguments of the saved run; or another checkpoints.folder, with which a run begins"
            raise LaunchError(Problem("bad-optimizer", what, fix=fix))


def _argument_names(cls: type) -> set[str]:
    inits = [base.__dict__["__init__"] for base in cls.__mro__ if "__init__" in base.__dict__ and base is not object]
    return {name for init in inits for name in inspect.signature(init).parameters}


def _is_argument(key: str, names: set[str]) -> bool:
    """Whether an option of a group is an argument of the class; one of some parameters may have the prefix of these
    (`adamw_betas`)."""
    return key != "params" and (key in names or any(name.endswith(f"_{key}") for name in names))


def _lacking_state(cls: Any, section: OptimizerSection, saved: set[str]) -> tuple[str, ...]:
    """Entries of state without which a step fails, of those that a first step makes."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    try:
        optimizer = cls([parameter], lr=section.lr, **section.args)
        optimizer.step()
    except Exception:  # a class that steps no matrix of its own, such as Muon
        return ()
    state = optimizer.state[parameter]
    lacking = tuple(key for key in state if key not in saved)
    for key in lacking:
        del state[key]
    try:
        optimizer.step()
    except Exception:
        return lacking
    return ()
