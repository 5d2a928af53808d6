"""One call of a collective matmul: its arguments are checked, its algorithm is chosen, and the dispatcher op is
called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ParallelizeError, Problem, ShapeError
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group, GroupOrMesh, group_of
from parallelize.comm.link_profile import AlgorithmChoice, LinearWork, choose, gather_work, reduce_work, scatter_work
from parallelize.ops.matmul import dtensor_rules, linear_gradients, symmetric_memory
from parallelize.ops.matmul.calibrate import profile_of
from parallelize.ops.matmul.linear_gradients import DeferredGradients
from parallelize.ops.matmul.op_handshake import report_failure
from parallelize.plan.styles.contract import OVERLAPS

T = torch.Tensor
AnyGroup = Group | GroupOrMesh
"""As users name it: a 1-D mesh, or a process group."""
DEFAULT_CHUNKS = 4
_CAST = (torch.float32, torch.float16, torch.bfloat16)
_ops = torch.ops.parallelize


class OverlappedLinear:
    """One call of an op: checks its arguments, chooses the algorithm, and calls the dispatcher op.

    Args:
        op: the name of the op.
        x, weights, biases, group, overlap, chunks: as in the public functions.
        decided: chooses the algorithm instead of `overlap`.
        features: (input, output) features to choose by, if those of this rank may differ from its peers'.
    """

    def __init__(
        self,
        op: str,
        x: T,
        weights: list[T],
        biases: T | Sequence[T | None] | None,
        group: AnyGroup | None,
        *,
        overlap: str = "auto",
        chunks: int | None = None,
        decided: Callable[[Callable[[], LinearWork], torch.dtype, torch.device], str] | None = None,
        features: tuple[int, int] | None = None,
    ):
        self.op, self.overlap, self.chunks, self.decided, self.features = op, overlap, chunks, decided, features
        self.x, self.weights, self.biases = (
            x,
            [autocast_cast(weight) for weight in weights],
            _listed(biases, len(weights)),
        )
        self.biases = [None if bias is None else autocast_cast(bias) for bias in self.biases]
        self.is_dtensor = isinstance(x, DTensor) or any(isinstance(weight, DTensor) for weight in weights)
        self.group: Group | None = None
        self._group_argument = group

    def gather(self, dim: int, full: int | None, keep: bool, deferred: DeferredGradients | None) -> tuple[list[T], T]:
        """The outputs, and the gathered rows (differentiable too) if `keep`."""
        ready = self._ready(0, dim, full, gather_work, deferred)
        if ready is None:
            return self._plain(), self.x
        dim, full, algorithm = ready
        with linear_gradients.deferral(deferred):
            *outs, gathered = _ops.all_gather_linear(
                self.x, self.weights, self._bias_tensors(), dim, full, self.key, algorithm, keep
            )
        return outs, gathered

    def scatter(self, dim: int, deferred: DeferredGradients | None) -> T:
        ready = self._ready(1, dim, None, scatter_work, deferred)
        if ready is None:
            return self._plain()[0]
        dim, _, algorithm = ready
        with linear_gradients.deferral(deferred):
            out = _ops.linear_reduce_scatter(self._cast_x(), self.weights[0], dim, self.key, algorithm)
            return self._with_bias(out)

    def reduce(self, deferred: DeferredGradients | None) -> T:
        ready = self._ready(1, None, None, reduce_work, deferred)
        if ready is None:
            return self._plain()[0]
        with linear_gradients.deferral(deferred):
            return self._with_bias(_ops.linear_all_reduce(self._cast_x(), self.weights[0], self.key, ready[2]))

    def column(self, deferred: DeferredGradients | None) -> list[T]:
        ready = self._ready(0, None, None, reduce_work, deferred)
        if ready is None:
            return self._plain()
        with linear_gradients.deferral(deferred):
            return _ops.column_linear(self.x, self.weights, self._bias_tensors(), self.key, ready[2])

    # -- steps of every call -----------------------------------------------------------------------------------------

    def _ready(
        self, weight_dim: int, dim: int | None, full: int | None, work: Callable[..., LinearWork], deferred: Any
    ) -> tuple[int, int, str] | None:
        """(dim, full rows, algorithm), checked; None for one rank, which sends nothing. Other ranks learn of a failure.

        Raises: ShapeError, MeshError.
        """
        try:
            self._locate(weight_dim, dim)
            if self.size == 1 and not self.is_dtensor:
                return None
            if deferred is not None and self.is_dtensor:
                what = f"{self.op} on DTensors cannot defer weight gradients"
                raise ShapeError(Problem("cannot-defer", what, fix="pass local tensors and a group"))
            return self._checked(weight_dim, dim, full, work)
        except ParallelizeError as error:
            # every rank has the error, or no rank waits: a column linear sends nothing in forward
            known = error.slugs == ("ranks-disagree",) or self.op == "column_linear" or torch.compiler.is_compiling()
            if self.group is not None and not known:
                report_failure(self.group, self.x.device, error.problems[0])
            raise

    def _locate(self, weight_dim: int, dim: int | None) -> None:
        """Find the group, its key in the op's arguments, and the shape that a rank of the group computes with."""
        if not self.is_dtensor:
            self.group = group = _group_of(self._group_argument)
            self.key, self.size, self.shape = group.key, group.size, tuple(self.x.shape)
            self.width = sum(weight.shape[0] for weight in self.weights)
            return
        axis = dtensor_rules.WeightAxis(self.op, self.x, self.weights, weight_dim, dim)
        # a compiled graph finds the group by its axis
        self.group = None if torch.compiler.is_compiling() else axis.group()
        self.key, self.shape, self.width, self.size = axis.key, axis.shape, axis.width, axis.size

    def _checked(
        self, weight_dim: int, dim: int | None, full: int | None, work: Callable[..., LinearWork]
    ) -> tuple[int, int, str]:
        dim_index = _checked_dim(self.op, self.x, self.weights, dim)
        rows = prod(self.shape[:-1])
        if dim is None or weight_dim:
            full = self.x.shape[dim_index]
        else:
            local = self.x.shape[dim_index]
            full = local * (1 if self.is_dtensor else self.size) if full is None else full
            if self.group is not None and not self.is_dtensor:
                _check_rows(local, full, self.group)
            rows = prod(self.shape[:dim_index]) * full * prod(self.shape[dim_index + 1 : -1])
        inner, outs = self.features or (self.shape[-1], self.width)
        # what is sent is the input gradient, whose matmul has inputs and outputs swapped
        if self.op == "column_linear":
            inner, outs = outs, inner
        dtype, device = self.weights[0].dtype, self.x.device
        return (
            dim_index,
            full,
            self._algorithm(partial(work, rows, inner, outs, self.size, dtype.itemsize), dtype, device),
        )

    def _algorithm(self, work: Callable[[], LinearWork], dtype: torch.dtype, device: torch.device) -> str:
        if self.decided is not None:
            return self.decided(work, dtype, device)
        if self.overlap == "symm_mem" and self.group is not None:
            symmetric_memory.require(self.group, device)
        if self.overlap != "auto":
            return algorithm_of(self.overlap, self.chunks)
        if self.group is None:
            return "sync"
        algorithm = decide(self.group, dtype, device, work()).algorithm
        # plain shards may be uneven, so that ranks choose differently
        return algorithm if self.is_dtensor else f"auto/{algorithm}"

    def _plain(self) -> list[T]:
        """One rank: nothing is sent."""
        return [F.linear(self._cast_x(), w, b) for w, b in zip(self.weights, self.biases, strict=True)]

    def _cast_x(self) -> T:
        """The input; under autocast in the weight's dtype."""
        x, dtype = self.x, self.weights[0].dtype
        return x.to(dtype) if x.dtype != dtype and torch.is_autocast_enabled(x.device.type) else x

    def _bias_tensors(self) -> list[T]:
        """The biases for the op's schema, in which an empty tensor means no bias."""
        if all(bias is None for bias in self.biases):
            return []
        return [torch.empty(0, device=self.x.device) if bias is None else bias for bias in self.biases]

    def _with_bias(self, out: T) -> T:
        """Add the bias once, after the sum."""
        bias = self.biases[0]
        if bias is None:
            return out
        return out + (dtensor_rules.ReplicatedBias.apply(bias, self.key) if self.is_dtensor else bias)


# -- arguments --------------------------------------------------------------------------------------------------------


def _group_of(group: AnyGroup | None) -> Group:
    if group is None:
        fix = "pass group=, or DTensors"
        raise ShapeError(Problem("no-group", "the group of plain tensors is not known", fix=fix))
    return group_of(group)


def _listed(biases: T | Sequence[T | None] | None, number: int) -> list[T | None]:
    if biases is None:
        return [None] * number
    return [biases] if isinstance(biases, torch.Tensor) else list(biases)


def autocast_cast(x: T) -> T:
    """`x` in the dtype that `F.linear` would cast it to under autocast."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype not in _CAST:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _checked_dim(op: str, x: T, weights: list[T], dim: int | None) -> int:
    """The dim as a non-negative index. Raises: ShapeError `wrong-shape`, `wrong-dtype`."""
    for weight in weights:
        if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] != x.shape[-1]:
            what = f"{op} cannot multiply rows of {list(x.shape)} by a weight [out, in] of {list(weight.shape)}"
            raise ShapeError(Problem("wrong-shape", what, fix="the last dim of x and of the weight must be equal"))
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            what = f"{op} got x of {x.dtype} and a weight of {weight.dtype}"
            raise ShapeError(Problem("wrong-dtype", what, fix="cast one of them, or use autocast"))
    if dim is None:
        return 0
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        what = f"{op} of {list(x.shape)} along dim {dim}: rows may be along any dim but the last"
        fix = "`parallelize.ops.collectives.gather` gathers features"
        raise ShapeError(Problem("wrong-shape", what, fix=fix))
    return dim % x.ndim


def _check_rows(local: int, full: int, group: Group) -> None:
    """Raises: ShapeError `wrong-shape`."""
    start, stop = even_interval(full, group.size, group.rank)
    if local != stop - start and type(local) is int:  # in a simulation each rank has its own size, which is not an int
        what = f"rank {group.ranks[group.rank]} has {local} rows, and its shard of {full} is {stop - start}"
        fix = "split rows as torch.chunk does, and pass full= if they are uneven"
        raise ShapeError(Problem("wrong-shape", what, fix=fix))


# -- algorithms -------------------------------------------------------------------------------------------------------


def algorithm_of(overlap: str, chunks: int | None = None) -> str:
    """The algorithm that an `overlap` names. Raises: ShapeError `bad-overlap`."""
    if overlap not in OVERLAPS or (chunks is not None and chunks < 1):
        what = f"overlap={overlap!r}, chunks={chunks}"
        raise ShapeError(Problem("bad-overlap", what, fix="one of: " + ", ".join(OVERLAPS) + "; chunks at least 1"))
    return {"chunked": f"chunked/{chunks or DEFAULT_CHUNKS}", "off": "sync"}.get(overlap, overlap)


def decide(group: Group, dtype: torch.dtype, device: torch.device, work: LinearWork) -> AlgorithmChoice:
    """What "auto" means for this work on this group. The first call for a dtype calibrates, so every rank must make
    it."""
    profile = group.profiles.get((device.type, dtype))
    if profile is None and torch.compiler.is_compiling():
        return AlgorithmChoice("sync", "calibration cannot run while a graph is traced: calibrate first")
    if profile is None and group.backend(device) == "fake":
        return AlgorithmChoice("sync", "a simulated group has no speed: set a profile")
    return choose(work, profile or profile_of(group, dtype, device))
