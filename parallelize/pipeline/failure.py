"""A mistake in one stage becomes the same error on every rank, and leaves the pipeline as it was before the step."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import PipelineError, Problem

_PHASES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, first."""

    rank: int
    stage: int
    microbatch: int
    phase: str
    module: str
    error: str
    at: float

    @classmethod
    def of(cls, error: BaseException, root: nn.Module, stage: int, microbatch: int, kind: str) -> Failure:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        module = _module_of(error, root)
        return cls(dist.get_rank(), stage, microbatch, _PHASES[kind], module, text, time.time())


def _module_of(error: BaseException, root: nn.Module) -> str:
    """The name of the innermost module whose code was running."""
    names = {id(module): name for name, module in root.named_modules()}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    return found


def raise_together(mine: Failure | None, group: dist.ProcessGroup, cause: BaseException | None) -> None:
    """Tell every rank of the group what failed where, and raise it on all. A collective.

    Raises: PipelineError `stage-failed`.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, None if mine is None else asdict(mine), group=group)
    failures = sorted((Failure(**one) for one in everyone if one), key=lambda failure: failure.at)
    first = failures[0]
    rows = (
        ("stage", f"{first.stage}, on rank {first.rank}"),
        ("microbatch", f"{first.microbatch}, {first.phase}"),
        ("module", first.module or "-"),
        ("error", first.error),
        *((("also", ", ".join(f"rank {other.rank}" for other in failures[1:9])),) if len(failures) > 1 else ()),
    )
    what = f"stage {first.stage} failed on rank {first.rank}: {first.error.splitlines()[0]}"
    fix = "gradients of this step are gone; mend the cause and call step again"
    raise PipelineError(Problem("stage-failed", what, rows=rows, fix=fix)) from cause


def forget_gradients(root: nn.Module) -> None:
    """Half a step's gradients are no gradients."""
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.grad = None
