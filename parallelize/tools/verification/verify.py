"""`verify`: checks that a model computes the same numbers on a mesh as without one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from parallelize.base.errors import MeshError, ModelError, Problem, did_you_mean
from parallelize.base.mesh import MeshSpec
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.options import options_of
from parallelize.tools.analysis.default_mesh import default_mesh
from parallelize.tools.verification.compare import ORDER, Errors, Row, Verification
from parallelize.tools.verification.configuration import Request, checked, name_of, source_of_request, without_weights
from parallelize.tools.verification.processes import on_gloo, on_running_processes
from parallelize.tools.verification.runner import RunResult, nothing_seen, on_threads

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from parallelize.plan.option_keywords import OptionKeywords

BACKENDS = ("threads", "gloo", "torchrun")


def default_backend(version: str = torch.__version__) -> str:
    """The backend where none is chosen: "threads", or "gloo" where this torch cannot have ranks as threads."""
    # with threads as ranks, the DTensors of 2.11 end the process
    return "threads" if private.at_least(2, 12, version) else "gloo"


def verify(
    model: str | ModelSource | Callable[..., Any],
    plan: Any = None,
    mesh: str | MeshSpec | Mapping[str, int] | None = None,
    *,
    backend: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    full_size: bool = False,
    timeout_s: float = 120.0,
    trace: bool | None = None,
    gain: float = 1.0,
    tell: Callable[[str], None] = lambda text: None,
    **options: Unpack[OptionKeywords],
) -> Verification:
    """Compare one training step on a mesh with the same step of the unsharded model.

    Compared are the loss, the outputs, the gradients of the inputs and of every parameter, their norm, and the weights
    after a step of SGD. The bound on the relative error follows from the dtype and the sizes
    (`tools/verification/runner.py`). By default the ranks are threads of this process on the CPU, which run the code of
    real ranks: neither torchrun nor a GPU is needed.

    Args:
        model: a `config.json` or its folder, a model type of transformers, a published size, `package.module:function`,
            a module, or a function that returns a module or a dict of `model`, `inputs`, `loss` and `count`. A config
            is scaled down and keeps its structure. A module, or the model of a function, is used as it is.
        plan: as in `parallelize_module`; None chooses a shipped plan by the model type.
        mesh: `"pp=2,dp=2,tp=2"`, or the same as a `MeshSpec` or a dict of sizes by axis. None: tp=4, or tp=3 or tp=2
            where that divides the heads of a config and 4 does not.
        backend: "threads"; "gloo" starts a process for each rank; "torchrun" uses the processes that torchrun started.
            None: as `default_backend`.
        overrides: fields of the config, or keyword arguments of the function.
        seed: seed of weights and batch, 0 or more.
        full_size: whether a config keeps its sizes.
        timeout_s: how long ranks may wait for each other, and how long one mode may take, in seconds.
        trace: follow the dims of the plan through the forward first, as `parallelize_module` does: what it needs in
            full is an error that names the operation. False: the numbers alone are compared.
        gain: what the deviation of weight matrices is multiplied by, above 0 and at most 1. Below 1 a model whose
            activations grow from layer to layer, or whose softmaxes have one element, has gradients that are no
            rounding.
        options: fields of `Options`, as `parallelize_model` takes them; options that are not given have the values of
            the plan's `defaults:`. Without `sequence_parallel` and `loss_parallel`, every mode that the plan serves is
            run, one after another; without `num_microbatches` and pp, one microbatch in some runs and two in others
            (one in all with `full_size`). overlap="auto" is run as "chunked", because at these sizes it would overlap
            nothing. dtype: "float64" (the default), "float32" or "bfloat16", of weights, compute and gradients.
        tell: called with a line of text before each mode.

    Returns:
        What was compared, each with its error and bound. It is false when anything differs; then it names the first
            module
        that differs, with its rule.

    Raises:
        ParallelizeError: for a plan, mesh, model or option with which no step can be run: `bad-backend`, `bad-mesh`,
            `bad-dtype`, `bad-option`, `unknown-option`, `bad-seed`, `bad-gain`, `bad-inputs`, `factory-failed`,
            `reference-failed`, `not-deterministic`, `loss-no-sum`, `ranks-timed-out`, ..., and whatever
            `parallelize_model` raises.

    Cost:
        The collectives of one to a few training steps for each mode. On threads they are copies in memory.
    """
    backend = default_backend() if backend is None else backend
    if backend not in BACKENDS:
        raise ModelError(
            Problem("bad-backend", f"no backend is called {backend!r}", fix=did_you_mean(backend, BACKENDS))
        )
    start = time.perf_counter()
    request = Request(
        model,
        plan,
        MeshSpec(tp=4) if mesh is None else _mesh(mesh),
        dict(overrides or {}),
        options_of(None, options),
        seed=seed,
        full_size=full_size,
        timeout_s=timeout_s,
        trace=trace,
        gain=gain,
    )
    with _isolated("threads"):
        if mesh is None:
            request = replace(request, mesh=default_mesh(source_of_request(request), request.plan))
        request = checked(request)
    run = {"threads": on_threads, "gloo": on_gloo, "torchrun": on_running_processes}[backend]
    with _isolated(backend):
        result = run(without_weights(request) if backend == "gloo" else request, tell)
    return _verification(request, backend, result, time.perf_counter() - start)


def assert_verified(model: Any, plan: Any = None, mesh: Any = None, **options: Any) -> Verification:
    """`verify` for use in tests: raises an AssertionError if anything differs.

    Args:
        model, plan, mesh: as in `verify`.
        options: the keyword arguments of `verify`.

    Returns:
        The result of `verify`, which is true.

    Raises:
        AssertionError: when anything differs, with the full report.
        ParallelizeError: as `verify` raises it.

    Cost:
        The cost of `verify`.
    """
    result = verify(model, plan, mesh, **options)
    if not result.ok:  # no `assert` statement: python -O removes those
        raise AssertionError(f"\n{result}")
    return result


@contextmanager
def _isolated(backend: str) -> Iterator[None]:
    """Enable gradients, whatever the caller has disabled, and restore the states of the caller's generators."""
    cuda = backend == "torchrun" and torch.cuda.is_available()
    state = random.getstate()
    devices = [torch.cuda.current_device()] if cuda else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(state)


def _mesh(mesh: Any) -> MeshSpec:
    if isinstance(mesh, MeshSpec):
        return mesh
    if isinstance(mesh, str):
        return MeshSpec.parse(mesh)
    try:
        sizes = dict(mesh)
    except (TypeError, ValueError):
        fix = "write `tp=4` or `pp=2,dp=2,tp=2`, or a dict of sizes by axis"
        raise MeshError(Problem("bad-mesh", f"{mesh!r} is not a mesh", fix=fix)) from None
    return MeshSpec(tuple(sizes.items()))


def _verification(request: Request, backend: str, result: RunResult, seconds: float) -> Verification:
    by_mode: dict[str, Errors] = {}
    for comparison in result.comparisons:
        by_mode.setdefault(str(comparison.mode), Errors()).merge(comparison.errors)
    rows = tuple(
        Row(mode, what, errors.worst[what][0], result.bound, errors.worst[what][1])
        for mode, errors in by_mode.items()
        for what in ORDER
        if what in errors.worst
    )
    failed = [mode for mode, errors in by_mode.items() if errors.failed]
    rows += tuple(Row(mode, "step", float("inf"), result.bound, "it failed") for mode in failed)
    differences = [comparison.difference for comparison in result.comparisons if comparison.difference is not None]
    return Verification(
        ok=result.equal,
        model=name_of(request.model),
        plan=result.plan,
        mesh=str(request.mesh),
        backend=backend,
        dtype=request.options.dtype or "float64",
        seconds=seconds,
        sizes=result.sizes,
        rows=rows,
        difference=differences[0] if differences else nothing_seen(result),
        unseen=_not_compared(request, rows) + result.not_compared,
    )


def _not_compared(request: Request, rows: tuple[Row, ...]) -> tuple[str, ...]:
    """What this run does not check, because of the request."""
    names = ["dropout, which was turned off", "the optimizer's state"]
    compared = {row.what for row in rows}
    if compared and "outputs" not in compared:
        names.append("outputs")
    if compared and "input gradients" not in compared:
        names.append("gradients of the input")
    if request.options.zero >= 2:
        names.append("gradients before ZeRO summed them")
    if request.full_size:
        names.append("outputs of single modules, which a full-size run does not store")
        names.append("several microbatches, padding masks, and sequences and vocabularies that tp divides")
    return tuple(names)
