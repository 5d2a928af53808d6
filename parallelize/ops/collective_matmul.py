"""Linears that overlap their collective with their product: eager, differentiable, on any process group.

    all_gather_linear      rows are gathered while products run      backward: reduce-scatter beside the weight gradients
    linear_reduce_scatter  sums are scattered while products run     backward: all-gather beside both gradients
    linear_all_reduce      sums are shared while products run        backward: nothing to send
    column_linear          nothing to send                           backward: all-reduce beside the weight gradients

On plain tensors they work on this rank's shards, and take the group. On DTensors they mean `F.linear`, and take mesh and
layout from their arguments. `overlap` is "auto" (`decide` says what and why, from a calibration made once a group), "off",
"chunked" (pieces, on any group), or "symm_mem" (PyTorch's symmetric-memory kernels, CUDA).

Collectives of one call, P ranks, R full rows of K input and N output features:

| op                               | forward            | backward                                                 |
|----------------------------------|--------------------|----------------------------------------------------------|
| all_gather_linear, save gathered | all-gather  R x K  | reduce-scatter  R x K                                    |
| all_gather_linear, save shard    | all-gather  R x K  | all-gather  R x K,  reduce-scatter  R x K                |
| linear_reduce_scatter            | reduce-scatter R x N | all-gather  R x N                                      |
| linear_all_reduce                | all-reduce  R x N  | none                                                     |
| column_linear                    | none               | all-reduce  R x K                                        |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from parallelize.errors import ParallelizeError, Problem, ShapeError
from parallelize.groups import Group
from parallelize.hardware import Choice, Work, choose, gather_work, reduce_work, scatter_work
from parallelize.layout import even_interval
from parallelize.ops import linear_gradients as gradients
from parallelize.ops import linear_rules, symmetric
from parallelize.ops import simulate as _simulate  # noqa: F401 (registers the rules of simulation)
from parallelize.ops.agreement import tell
from parallelize.ops.calibrate import profile_of
from parallelize.ops.linear_gradients import DeferredGradients
from parallelize.styles.contract import OVERLAPS

T = torch.Tensor
AnyGroup = Group | dist.ProcessGroup
DEFAULT_CHUNKS = 4
_ops = torch.ops.parallelize


def all_gather_linear(
    x: T,
    weights: T | Sequence[T],
    biases: T | Sequence[T | None] | None = None,
    *,
    dim: int = 0,
    group: AnyGroup | None = None,
    full: int | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    save: str = "gathered",
    deferred: DeferredGradients | None = None,
):
    """Gather the rows of all ranks and multiply each by this rank's weights; the products run while rows arrive.

    Args:
        x: own rows [.., s, .., K], cut along `dim` as `torch.chunk` cuts (uneven or empty shards are fine).
        weights: [N, K], or several that share the one gather. biases: [N] or None, one a weight.
        dim: of the rows; not the last one.
        group: a process group; not needed for DTensors.
        full: rows of all ranks together, where shards are uneven. None: P times s.
        overlap: "auto", "off", "chunked" or "symm_mem". chunks: pieces a shard for "chunked".
        save: "gathered" (default: R x K is kept for backward, which then sends one reduce-scatter) or "shard" (s x K is
            kept, and gathered again in backward: one more all-gather).
        deferred: where the weight gradients go while `deferred.deferring()` is on.

    Returns: [.., full, .., N] for one weight, or a list of them. Gradients: of `x` summed over ranks, own rows; of each
        weight and bias over all rows.
    Raises: ShapeError `wrong-shape`, `ranks-disagree` (on every rank), MeshError `no-symmetric-memory`.
    """
    several = not isinstance(weights, torch.Tensor)
    call = Call("all_gather_linear", x, _weights(weights), biases, group, overlap, chunks)
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in call.weights)
    outs, _ = call.gather(dim, full, save == "gathered" and trains, deferred)
    return outs if several else outs[0]


def linear_reduce_scatter(
    x: T,
    weight: T,
    bias: T | None = None,
    *,
    dim: int = 0,
    group: AnyGroup | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    deferred: DeferredGradients | None = None,
) -> T:
    """Multiply by this rank's columns of a weight, sum over ranks in rank order, keep own rows; sums travel meanwhile.

    Args:
        x: all rows, own features [.., S, .., k]. weight: [N, k]. bias: [N], added once, after the sum.
        dim: of the rows that are scattered as `torch.chunk` cuts them; not the last one.
        group, overlap, chunks, deferred: as for `all_gather_linear`.

    Returns: [.., s, .., N]. Gradients: of `x` and `weight` complete; of `bias` over own rows, one part of its sum.
    Raises: ShapeError `wrong-shape`, `ranks-disagree` (on every rank), MeshError `no-symmetric-memory`.
    """
    return Call("linear_reduce_scatter", x, [weight], bias, group, overlap, chunks).scatter(dim, deferred)


def linear_all_reduce(
    x: T,
    weight: T,
    bias: T | None = None,
    *,
    group: AnyGroup | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    deferred: DeferredGradients | None = None,
) -> T:
    """Multiply by this rank's columns of a weight and sum over ranks; sums travel while later rows are multiplied.

    Args:
        x: own features [.., k]. weight: [N, k]. bias: [N], added once, after the sum.
        group, overlap, chunks, deferred: as for `all_gather_linear`; there is no "symm_mem" version.

    Returns: [.., N], whole. Gradients: complete, and nothing is sent for them.
    Raises: ShapeError `wrong-shape`, `ranks-disagree` (on every rank), MeshError `no-symmetric-memory`.
    """
    return Call("linear_all_reduce", x, [weight], bias, group, overlap, chunks).reduce(deferred)


def column_linear(
    x: T,
    weights: T | Sequence[T],
    biases: T | Sequence[T | None] | None = None,
    *,
    group: AnyGroup | None = None,
    overlap: str = "auto",
    chunks: int | None = None,
    deferred: DeferredGradients | None = None,
):
    """Multiply a replicated input by this rank's weights; in backward its gradient is all-reduced meanwhile.

    Args:
        x: [.., K], the same on every rank. weights: [N, K], or several that share the input. biases: [N] or None.
        group, overlap, chunks, deferred: as for `all_gather_linear`; there is no "symm_mem" version.

    Returns: [.., N] for one weight, or a list. Gradients: of `x` summed over ranks, on every rank.
    Raises: ShapeError `wrong-shape`, `ranks-disagree` (on every rank), MeshError `no-symmetric-memory`.
    """
    several = not isinstance(weights, torch.Tensor)
    call = Call("column_linear", x, _weights(weights), biases, group, overlap, chunks)
    outs = call.column(deferred)
    return outs if several else outs[0]


class Call:
    """One call of an op: its arguments checked, its ranks agreed, its way chosen; then the dispatcher op.

    Args:
        op: its name.
        x, weights, biases, group, overlap, chunks: as the public functions take them.
        decided: what chooses the way, in the place of `overlap`.
        features: (input, output) features to choose by, where a rank's own may differ from its peers'.
    """

    def __init__(
        self,
        op: str,
        x: T,
        weights: list[T],
        biases: T | Sequence[T | None] | None,
        group: AnyGroup | None,
        overlap: str = "auto",
        chunks: int | None = None,
        decided: Callable[[Work, torch.dtype, torch.device], str] | None = None,
        features: tuple[int, int] | None = None,
    ):
        self.op, self.overlap, self.chunks, self.decided, self.features = op, overlap, chunks, decided, features
        self.x, self.weights, self.biases = x, [_autocast(weight) for weight in weights], _listed(biases, len(weights))
        self.biases = [None if bias is None else _autocast(bias) for bias in self.biases]
        self.is_dtensor = isinstance(x, DTensor) or any(isinstance(weight, DTensor) for weight in weights)
        self.team: Group | None = None
        self._given = group

    def gather(self, dim: int, full: int | None, keep: bool, deferred: DeferredGradients | None) -> tuple[list[T], T]:
        """The products, and the gathered rows (differentiable too) if they are kept."""
        ready = self._ready(0, dim, full, gather_work, deferred)
        if ready is None:
            return self._plain(), self.x
        dim, full, way = ready
        with gradients.deferral(deferred):
            *outs, gathered = _ops.all_gather_linear(
                self.x, self.weights, self._bias_tensors(), dim, full, self.key, way, keep
            )
        return outs, gathered

    def scatter(self, dim: int, deferred: DeferredGradients | None) -> T:
        ready = self._ready(1, dim, None, scatter_work, deferred)
        if ready is None:
            return self._plain()[0]
        dim, _, way = ready
        with gradients.deferral(deferred):
            return self._with_bias(_ops.linear_reduce_scatter(self._cast_x(), self.weights[0], dim, self.key, way))

    def reduce(self, deferred: DeferredGradients | None) -> T:
        ready = self._ready(1, None, None, reduce_work, deferred)
        if ready is None:
            return self._plain()[0]
        with gradients.deferral(deferred):
            return self._with_bias(_ops.linear_all_reduce(self._cast_x(), self.weights[0], self.key, ready[2]))

    def column(self, deferred: DeferredGradients | None) -> list[T]:
        ready = self._ready(0, None, None, reduce_work, deferred)
        if ready is None:
            return self._plain()
        with gradients.deferral(deferred):
            return _ops.column_linear(self.x, self.weights, self._bias_tensors(), self.key, ready[2])

    # -- steps of every call -----------------------------------------------------------------------------------------

    def _ready(
        self, weight_dim: int, dim: int | None, full: int | None, work: Callable[..., Work], deferred: Any
    ) -> tuple[int, int, str] | None:
        """(dim, full rows, way), checked; None for one rank, which sends nothing. A failure is told to the other ranks.

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
            # known to all, or nobody waits: a column linear sends nothing in forward
            known = error.slugs == ("ranks-disagree",) or self.op == "column_linear" or torch.compiler.is_compiling()
            if self.team is not None and not known:
                tell(self.team, self.x.device, error.problems[0])
            raise

    def _locate(self, weight_dim: int, dim: int | None) -> None:
        """The group, its key in the op's arguments, and the shape that a rank of the group computes with."""
        if not self.is_dtensor:
            self.team = team = _group_of(self._given)
            self.key, self.size, self.shape = team.key, team.size, tuple(self.x.shape)
            self.width = sum(weight.shape[0] for weight in self.weights)
            return
        place = linear_rules.Place(self.op, self.x, self.weights, weight_dim, dim)
        # a graph finds the group by its axis
        self.team = None if torch.compiler.is_compiling() else place.group()
        self.key, self.shape, self.width, self.size = place.key, place.shape, place.width, place.size

    def _checked(
        self, weight_dim: int, dim: int | None, full: int | None, work: Callable[..., Work]
    ) -> tuple[int, int, str]:
        place = _checked(self.op, self.x, self.weights, dim)
        rows = prod(self.shape[:-1])
        if dim is None or weight_dim:
            full = self.x.shape[place]
        else:
            own = self.x.shape[place]
            full = own * (1 if self.is_dtensor else self.size) if full is None else full
            if self.team is not None and not self.is_dtensor:
                _check_rows(own, full, self.team)
            rows = prod(self.shape[:place]) * full * prod(self.shape[place + 1 : -1])
        inner, outs = self.features or (self.shape[-1], self.width)
        if self.op == "column_linear":  # what travels is the input gradient, a product with the weights' other side
            inner, outs = outs, inner
        dtype, device = self.weights[0].dtype, self.x.device
        return place, full, self._way(work(rows, inner, outs, self.size, dtype.itemsize), dtype, device)

    def _way(self, work: Work, dtype: torch.dtype, device: torch.device) -> str:
        if self.decided is not None:
            return self.decided(work, dtype, device)
        if self.overlap == "symm_mem" and self.team is not None:
            symmetric.require(self.team, device)
        if self.overlap != "auto":
            return way_of(self.overlap, self.chunks)
        if self.team is None:
            return "sync"
        way = decide(self.team, dtype, device, work).way
        return way if self.is_dtensor else f"auto/{way}"  # plain shards may be uneven, and ranks choose differently

    def _plain(self) -> list[T]:
        """One rank: nothing is sent."""
        return [F.linear(self._cast_x(), w, b) for w, b in zip(self.weights, self.biases, strict=True)]

    def _cast_x(self) -> T:
        """Under autocast, in the weight's dtype."""
        x, dtype = self.x, self.weights[0].dtype
        return x.to(dtype) if x.dtype != dtype and torch.is_autocast_enabled(x.device.type) else x

    def _bias_tensors(self) -> list[T]:
        """For the op's schema: an absent bias is an empty one."""
        if all(bias is None for bias in self.biases):
            return []
        return [torch.empty(0, device=self.x.device) if bias is None else bias for bias in self.biases]

    def _with_bias(self, out: T) -> T:
        """Added once, after the sum."""
        bias = self.biases[0]
        if bias is None:
            return out
        return out + (linear_rules.WholeGradient.apply(bias, self.key) if self.is_dtensor else bias)


# -- arguments --------------------------------------------------------------------------------------------------------


def _group_of(group: AnyGroup | None) -> Group:
    if group is None:
        fix = "pass group=, or DTensors"
        raise ShapeError(Problem("no-group", "plain tensors do not tell which ranks share them", fix=fix))
    return group if isinstance(group, Group) else Group(group)


def _weights(weights: T | Sequence[T]) -> list[T]:
    return [weights] if isinstance(weights, torch.Tensor) else list(weights)


def _listed(biases: T | Sequence[T | None] | None, number: int) -> list[T | None]:
    if biases is None:
        return [None] * number
    return [biases] if isinstance(biases, torch.Tensor) else list(biases)


def _autocast(x: T) -> T:
    """In autocast's dtype, as `F.linear` under autocast would have it."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype not in _CAST:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def _checked(op: str, x: T, weights: list[T], dim: int | None) -> int:
    """The dim counted from the front. Raises: ShapeError `wrong-shape`, `wrong-dtype`."""
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
        what = f"{op} of {list(x.shape)} along dim {dim}: rows lie along any dim but the last"
        fix = "`parallelize.ops.collectives.gather` gathers features"
        raise ShapeError(Problem("wrong-shape", what, fix=fix))
    return dim % x.ndim


def _check_rows(own: int, full: int, team: Group) -> None:
    """Raises: ShapeError `wrong-shape`."""
    start, stop = even_interval(full, team.size, team.rank)
    if own != stop - start and type(own) is int:  # under simulation every rank has a size of its own
        what = f"rank {team.ranks[team.rank]} holds {own} rows, and its shard of {full} is {stop - start}"
        fix = "cut rows as torch.chunk does, and pass full= where they are uneven"
        raise ShapeError(Problem("wrong-shape", what, fix=fix))


# -- ways -------------------------------------------------------------------------------------------------------------


def way_of(overlap: str, chunks: int | None = None) -> str:
    """The way that an `overlap` asks for by name. Raises: ShapeError `bad-overlap`."""
    if overlap not in OVERLAPS or (chunks is not None and chunks < 1):
        what = f"overlap={overlap!r}, chunks={chunks}"
        raise ShapeError(Problem("bad-overlap", what, fix="one of: " + ", ".join(OVERLAPS) + "; chunks at least 1"))
    return {"chunked": f"chunked/{chunks or DEFAULT_CHUNKS}", "off": "sync"}.get(overlap, overlap)


def decide(team: Group, dtype: torch.dtype, device: torch.device, work: Work) -> Choice:
    """What "auto" means for this work on this group. The first call for a dtype measures, so every rank must make it."""
    known = team.profiles.get((device.type, dtype))
    if known is None and torch.compiler.is_compiling():
        return Choice("sync", "nothing can be measured while a graph is traced: calibrate first")
    if known is None and team.backend(device) == "fake":
        return Choice("sync", "a simulated group has no speed: give it a profile")
    return choose(work, known or profile_of(team, dtype, device))
