"""`verify`: whether a model computes the same numbers on a mesh as without one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from parallelize.errors import MeshError, ModelError, ParallelizeError, Problem, did_you_mean
from parallelize.mesh import MeshSpec
from parallelize.model_source import ModelSource
from parallelize.verification.case import Request, check, name_of, without_weights
from parallelize.verification.compare import ORDER, Errors
from parallelize.verification.given import on_given_processes
from parallelize.verification.processes import on_gloo
from parallelize.verification.report import Row, Verification
from parallelize.verification.start import Outcomes, on_threads

BACKENDS = ("threads", "gloo", "torchrun")


def verify(
    model: str | ModelSource | Callable[..., Any],
    plan: Any = None,
    mesh: str | MeshSpec | Mapping[str, int] = "tp=4",
    *,
    backend: str = "threads",
    overrides: Mapping[str, Any] | None = None,
    zero: int = 0,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
    overlap: str | None = None,
    recompute: str = "off",
    dtype: str = "float64",
    seed: int = 0,
    full_size: bool = False,
    timeout_s: float = 120.0,
    ulysses: int = 1,
    fuse_loss: bool | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Compare a training step on a mesh with the unsharded one: loss, outputs, gradients, their norm, weights after it.

    Nothing needs torchrun or a GPU: the ranks are threads of this process, on the CPU, with the code of real ranks.

    Args:
        model: as `read_model` takes it; or a function that returns a fresh module, or a dict of `model`, `inputs`, `loss`,
            `count`. A config is scaled down, its structure kept; a function's model is used as it is.
        plan: as for `parallelize_module`.
        mesh: `"pp=2,dp=2,tp=2"`, or the same as a `MeshSpec` or a dict.
        backend: "threads"; "gloo" starts processes; "torchrun" uses those that run.
        overrides: fields of the config, or arguments of the function.
        sequence_parallel, loss_parallel: None for both: every mode that the plan has, one after another.
        zero, schedule, microbatches, stages_per_rank, overlap, ulysses, recompute, fuse_loss: see
            `parallelize_model`.
        dtype: "float64", "float32" or "bfloat16", of everything.
        full_size: do not scale a config down.

    Returns: what was compared with what bound; false when anything differs, then with the first module that does.
    Raises: ParallelizeError for a plan, mesh or model that cannot be run at all.
    """
    if backend not in BACKENDS:
        raise ModelError(
            Problem("bad-backend", f"no backend is called {backend!r}", fix=did_you_mean(backend, BACKENDS))
        )
    began = time.perf_counter()
    request = Request(
        model,
        plan,
        _mesh(mesh),
        dict(overrides or {}),
        zero,
        schedule,
        microbatches,
        stages_per_rank,
        sequence_parallel,
        loss_parallel,
        overlap,
        recompute,
        dtype,
        seed,
        full_size,
        timeout_s,
        ulysses=ulysses,
        fuse_loss=fuse_loss,
    )
    check(request)
    run = {"threads": on_threads, "gloo": on_gloo, "torchrun": on_given_processes}[backend]
    with _apart(backend):
        outcomes = run(without_weights(request) if backend == "gloo" else request, tell)
    return _verification(request, backend, outcomes, time.perf_counter() - began)


def assert_verified(model: Any, plan: Any = None, mesh: Any = "tp=4", **options: Any) -> Verification:
    """For your own tests: `verify`, and an AssertionError with the whole report where anything differs."""
    found = verify(model, plan, mesh, **options)
    if not found.ok:  # no `assert`: python -O leaves those out
        raise AssertionError(f"\n{found}")
    return found


@contextmanager
def _apart(backend: str) -> Iterator[None]:
    """With gradients, whatever the caller has turned off, and without a trace in the caller's generators."""
    cuda = backend == "torchrun" and torch.cuda.is_available()
    kept = random.getstate()
    devices = [torch.cuda.current_device()] if cuda else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(kept)


def _mesh(given: Any) -> MeshSpec:
    if isinstance(given, MeshSpec):
        return given
    if isinstance(given, str):
        return MeshSpec.parse(given)
    try:
        return MeshSpec(tuple(dict(given).items()))
    except ParallelizeError:
        raise
    except Exception:  # whatever else it is
        fix = "write `tp=4` or `pp=2,dp=2,tp=2`, or a dict of sizes by axis"
        raise MeshError(Problem("bad-mesh", f"{given!r} is no mesh", fix=fix)) from None


def _verification(request: Request, backend: str, outcomes: Outcomes, seconds: float) -> Verification:
    by_mode: dict[str, Errors] = {}
    for one in outcomes.each:
        by_mode.setdefault(str(one.mode), Errors()).merge(one.errors)
    rows = tuple(
        Row(mode, what, errors.worst[what][0], outcomes.bound, errors.worst[what][1])
        for mode, errors in by_mode.items()
        for what in ORDER
        if what in errors.worst
    )
    failed = [mode for mode, errors in by_mode.items() if errors.failed]
    rows += tuple(Row(mode, "step", float("inf"), outcomes.bound, "it failed") for mode in failed)
    first = next((one.difference for one in outcomes.each if one.difference is not None), None)
    return Verification(
        outcomes.equal,
        name_of(request.model),
        outcomes.plan,
        str(request.mesh),
        backend,
        request.dtype,
        seconds,
        outcomes.sizes,
        rows,
        first,
        _unseen(request, rows) + outcomes.unseen,
    )


def _unseen(request: Request, rows: tuple[Row, ...]) -> tuple[str, ...]:
    """What this run says nothing about."""
    found = ["dropout, which was turned off", "the optimiser's state"]
    compared = {row.what for row in rows}
    if compared and "outputs" not in compared:
        found.append("outputs")
    if compared and "input gradients" not in compared:
        found.append("gradients of the input")
    if request.zero >= 2:
        found.append("gradients before ZeRO summed them")
    if request.full_size:
        found.append("outputs of single modules, which a full-size run does not keep")
        found.append("several microbatches, padding masks, and sequences and vocabularies that tp divides")
    return tuple(found)
