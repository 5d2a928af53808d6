"""An error in one stage is raised on every rank. All gradients are dropped, and the next step works.

Ranks that wait for the failed one in a collective of the step, such as a gather of ZeRO 3, never come to where failures
are exchanged. They find its failure in the store, when their collective has given up.
"""

from __future__ import annotations

import json
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.base.errors import PipelineError, Problem, ShapeError
from parallelize.base.torch_private.torch_groups import default_store
from parallelize.base.user_code import frames_of, innermost_module
from parallelize.ops.vocabulary.class_targets import check_ids
from parallelize.watchdog.watching import follows_from_another_rank

_KEY = "parallelize/stage-failed"
LOOK_AT_PEER = "look at that rank's own output; start again on all ranks"
_PHASES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


@dataclass(frozen=True)
class Failure:
    """The first error of one rank.

    Attributes:
        rank: the global rank.
        phase: a value of `_PHASES`.
        module: fqn of the innermost module whose code raised it; empty where there is none.
        error: type and message.
        at: time of the failure, in seconds since the epoch.
    """

    rank: int
    stage: int
    microbatch: int
    phase: str
    module: str
    error: str
    at: float

    @classmethod
    def of(cls, error: BaseException, root: nn.Module, stage: int, microbatch: int, kind: str) -> Failure:
        named = _named(error)
        text = "".join(traceback.format_exception_only(type(named), named)).strip()
        module = innermost_module(error, {id(module): name for name, module in root.named_modules()})
        return cls(dist.get_rank(), stage, microbatch, _PHASES[kind], module, text, time.time())


def _named(error: BaseException) -> BaseException:
    """`id-out-of-range` for torch's IndexError of an embedding, as tables over `tp` raise it; else the error itself."""
    for frame, _ in frames_of(error) if isinstance(error, IndexError) else ():
        values = frame.f_locals
        rows = getattr(values.get("self"), "num_embeddings", None)
        for ids in values.values():
            if isinstance(rows, int) and isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32):
                try:
                    check_ids(ids, rows, "ids")
                except ShapeError as named:
                    return named
    return error


def raise_together(local: Failure | None, group: dist.ProcessGroup, cause: BaseException | None) -> None:
    """Raise the earliest failure of the group on all its ranks. A collective.

    Raises: PipelineError `stage-failed`.
    """
    if local is not None:
        _forget_stored()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, None if local is None else asdict(local), group=group)
    failures = sorted((Failure(**fields) for fields in gathered if fields), key=lambda failure: failure.at)
    raise _stage_failed(failures) from cause


def sum_outcomes(totals: torch.Tensor, group: dist.ProcessGroup, local: Failure | None, cause: Any) -> None:
    """Add the totals of all ranks, in place. A collective.

    A failure of this rank is in the store meanwhile, for ranks that never get here, because they wait for this one in a
    collective.

    Args:
        local, cause: the failure of this rank and its exception, or None.

    Raises: where the ranks cannot reach each other, PipelineError `stage-failed` with the first failure that is known,
        or `peer-lost` where this rank has failed because another one is gone.
    """
    follows = cause is not None and follows_from_another_rank(cause)
    if local is not None and not follows:
        _store_failure(local)
    try:
        dist.all_reduce(totals, group=group)
    except RuntimeError as error:
        _raise_known(None if follows else local, cause or error)
        if local is None:
            raise
        what = f"a rank that this one works with does not answer: {local.error.splitlines()[0]}"
        raise PipelineError(Problem("peer-lost", what, fix=LOOK_AT_PEER)) from cause


def raise_reason(error: BaseException) -> None:
    """Raise the failure that an error follows from; nothing where none is known.

    Raises: PipelineError `stage-failed`, from the error.
    """
    if follows_from_another_rank(error):
        _raise_known(None, error)


def _store_failure(local: Failure) -> None:
    """Put a failure into the store, unless an earlier one is there."""
    store = default_store()
    with suppress(RuntimeError):  # the process that has the store is gone
        if store is not None:
            store.compare_set(_KEY, "", json.dumps(asdict(local)))


def _stored_failure() -> Failure | None:
    """The failure in the store, of any rank; None where there is none."""
    store = default_store()
    with suppress(RuntimeError):
        if store is not None and store.check([_KEY]) and (text := store.get(_KEY)):
            return Failure(**json.loads(text))
    return None


def _forget_stored() -> None:
    """Remove the failure from the store: all ranks exchange theirs, and a later step may fail otherwise."""
    store = default_store()
    with suppress(RuntimeError):
        if store is not None:
            store.delete_key(_KEY)


def _raise_known(local: Failure | None, cause: BaseException) -> None:
    failures = {failure.rank: failure for failure in (local, _stored_failure()) if failure is not None}
    if failures:
        raise _stage_failed(sorted(failures.values(), key=lambda failure: failure.at)) from cause


def _stage_failed(failures: list[Failure]) -> PipelineError:
    first = failures[0]
    rows = (
        ("stage", f"{first.stage}, on rank {first.rank}"),
        ("microbatch", f"{first.microbatch}, {first.phase}"),
        ("module", first.module or "-"),
        ("error", first.error),
        *((("also", ", ".join(f"rank {other.rank}" for other in failures[1:9])),) if len(failures) > 1 else ()),
    )
    what = f"stage {first.stage} failed on rank {first.rank}: {first.error.splitlines()[0]}"
    fix = "the gradients are dropped; correct the cause and call step again"
    return PipelineError(Problem("stage-failed", what, rows=rows, fix=fix))


def forget_gradients(root: nn.Module) -> None:
    """Drop all gradients, because those of an incomplete step are wrong."""
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.grad = None
