"""Where a plan overlaps collectives with products, and what came of it.

A site is one call of a collective matmul: a row linear, a column linear with an input of its own, or a block whose gathered
input several column linears share. The block's products are computed together while its input arrives; its stock forward
then calls q, k and v one after another on that input, and each finds its product done. Which linears do so is known from
the plan, and corrected by the first forward: one that was not called with the block's input is left alone from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.groups import Group
from parallelize.hardware import Choice, Work
from parallelize.layout import even_interval
from parallelize.ops import collectives as ops
from parallelize.ops import symmetric
from parallelize.ops.collective_matmul import Call, decide, way_of
from parallelize.ops.linear_gradients import DeferredGradients
from parallelize.plan.model import ModelFacts
from parallelize.plan.resolve import ResolvedPlan
from parallelize.region import Region
from parallelize.sharding import require_record
from parallelize.styles.contract import Edge

T = torch.Tensor


@dataclass(frozen=True)
class SiteRow:
    """A site as the plan has it: the module, the op, what was asked, and the column linears that share its input."""

    fqn: str
    op: str
    asked: str
    consumers: tuple[str, ...] = ()


def site_rows(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[SiteRow]:
    """The sites of a plan on a model. Nothing is changed."""
    for fqn, row in resolved.modules.items():
        contract = row.contract
        asked = contract.overlap or resolved.plan.overlap
        if asked == "off" or contract.compute == "deferred_head":
            continue
        if contract.compute == "rowwise" and contract.leave in _ROW_OPS and is_plain_linear(model.objects[fqn]):
            yield SiteRow(fqn, _ROW_OPS[contract.leave], asked)
        elif contract.style == "colwise" and contract.enter in _COLUMN_OPS and is_plain_linear(model.objects[fqn]):
            yield SiteRow(fqn, _COLUMN_OPS[contract.enter], asked, (fqn,))
        elif contract.style == "gather" and contract.enter in _COLUMN_OPS:
            consumers = tuple(_sharing(fqn, resolved, model))
            if consumers:
                yield SiteRow(fqn, _COLUMN_OPS[contract.enter], asked, consumers)


_ROW_OPS = {Edge.SCATTER_SEQUENCE: "linear_reduce_scatter", Edge.REDUCE: "linear_all_reduce"}
_COLUMN_OPS = {Edge.GATHER_SEQUENCE: "all_gather_linear", Edge.COPY: "column_linear"}


def _sharing(block: str, resolved: ResolvedPlan, model: ModelFacts) -> Iterator[str]:
    """Column linears whose nearest gathered block above is this one."""
    blocks = {fqn for fqn, row in resolved.modules.items() if row.contract.style == "gather"}
    for fqn, row in resolved.modules.items():
        if row.contract.style != "colwise" or row.contract.enter is not Edge.NONE or row.contract.overlap == "off":
            continue
        above = fqn
        while above and (above == fqn or above not in blocks):
            above = above.rpartition(".")[0]
        if above == block and is_plain_linear(model.objects[fqn]):
            yield fqn


def is_plain_linear(module: nn.Module) -> bool:
    """A linear whose forward is known: `nn.Linear` itself, or `transformers`' Conv1D (its weight is [in, out])."""
    known = type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    return known and "forward" not in module.__dict__


def check_sites(resolved: ResolvedPlan, model: ModelFacts, group: Group, device: torch.device) -> tuple[SiteRow, ...]:
    """The sites, or why what was asked for cannot be: before anything is changed.

    Raises: ModelError `no-overlap`, MeshError `no-symmetric-memory`.
    """
    way_of(resolved.plan.overlap)
    rows = tuple(site_rows(resolved, model))
    if group.size == 1:  # nothing is sent, so nothing is left to hide
        return ()
    if any(row.asked == "symm_mem" for row in rows) or resolved.plan.overlap == "symm_mem":
        symmetric.require(group, device)
    asked = {row.contract.overlap or resolved.plan.overlap for row in resolved.modules.values()} - {"off", "auto"}
    missing = asked - {row.asked for row in rows}
    served = {row.fqn for row in rows}
    alone = [fqn for fqn, row in resolved.modules.items() if row.contract.overlap in _BY_NAME and fqn not in served]
    if alone:
        what = f"the rule of {alone[0]} asks for overlap={resolved.modules[alone[0]].contract.overlap}, which it cannot have"
        rows_ = (("module", type(model.objects[alone[0]]).__name__), ("and", f"{len(alone) - 1} more modules"))
        fix = "ask where the collective is: on `gather` or `rowwise` over nn.Linear or Conv1D with their own forward"
        raise ModelError(Problem("no-overlap", what, resolved.modules[alone[0]].rule.where, rows_, fix))
    if missing:
        linears = [fqn for fqn, row in resolved.modules.items() if row.contract.style in ("colwise", "rowwise")]
        kinds = sorted({type(model.objects[fqn]).__name__ for fqn in linears}) or ["no column or row linears"]
        raise ModelError(
            Problem(
                "no-overlap",
                f"overlap={sorted(missing)[0]} is asked for, and there is no linear to overlap with a collective",
                rows=(("linears", f"{', '.join(kinds)}; nn.Linear and Conv1D can be, with their own forward"),),
                fix="overlap=off, or a plan with colwise and rowwise linears",
            )
        )
    return rows


_BY_NAME = ("chunked", "symm_mem")


@dataclass
class Site:
    """One site at run time.

    Args:
        row: what the plan says.
        calls: forwards so far. fused: those whose collective ran beside products (in forward, or for a replicated input in
            backward).
        why: the last choice in words.
    """

    row: SiteRow
    group: Group
    deferred: DeferredGradients
    calls: int = 0
    fused: int = 0
    why: str = "not called yet"
    choices: dict[tuple[Work, torch.dtype], tuple[Any, Choice]] = field(
        default_factory=dict
    )  # with the profile behind it

    def __deepcopy__(self, memo: dict) -> Site:
        return self  # counts what copies of the model do, too

    def way(self, work: Work, dtype: torch.dtype, device: torch.device) -> str:
        """How to do this call."""
        profile, choice = self.choices.get((work, dtype), (None, None))
        if choice is None or profile is not self.group.profiles.get((device.type, dtype)):
            choice = self._choose(work, dtype, device)
            if not torch.compiler.is_compiling():
                self.choices[work, dtype] = self.group.profiles.get((device.type, dtype)), choice
        self.note(choice.way != "sync", f"{choice.way}: {choice.why}")
        return choice.way

    def _choose(self, work: Work, dtype: torch.dtype, device: torch.device) -> Choice:
        if self.row.asked == "auto":
            return decide(self.group, dtype, device, work)
        return Choice(way_of(self.row.asked), "asked for")

    def note(self, fused: bool, why: str) -> None:
        """Count a forward."""
        if not torch.compiler.is_compiling():  # a graph would be compiled again for every count
            self.calls += 1
            self.fused += fused
            self.why = why

    def had_no_effect(self, why: str, fix: str) -> None:
        """A forward that overlapped nothing, for a reason that will not go away.

        Raises: ModelError `overlap-unused` where overlap was asked for by name.
        """
        self.why = f"sync: {why}"
        if self.row.asked != "auto":
            what = f"overlap={self.row.asked} of {self.row.fqn} has no effect: {why}"
            rows = (("linears", ", ".join(self.row.consumers)),)
            raise ModelError(Problem("overlap-unused", what, rows=rows, fix=fix))


class RowSite:
    """A row linear that sums its partial products while they are made.

    Args:
        dim: of the sequence, where sums are scattered over a region; `region` is None where they are reduced.
        transposed: the weight is stored [in, out].
        features: (input, output), of the rank that has most.
    """

    def __init__(self, site: Site, region: Region | None, dim: int, transposed: bool, features: tuple[int, int]):
        self.site, self.region, self.dim, self.transposed, self.features = site, region, dim, transposed, features

    def __call__(self, x: T, weight: T, bias: T | None) -> T:
        weight = weight.t() if self.transposed else weight
        site, scatters = self.site, self.region is not None and self.region.scatters()
        op = "linear_reduce_scatter" if scatters else "linear_all_reduce"
        call = Call(op, x, [weight], bias, site.group, decided=site.way, features=self.features)
        if not scatters:
            return call.reduce(site.deferred)
        rows = -(-x.shape[self.dim] // site.group.size)
        return _padded(call.scatter(self.dim, site.deferred), self.dim, rows)


def _padded(out: T, dim: int, rows: int) -> T:
    """Shards inside a region hold equally many rows on every rank."""
    missing = rows - out.shape[dim]
    return F.pad(out, [0, 0] * (out.ndim - 1 - dim) + [0, missing]) if missing else out


_MISSES = 3  # forwards in a row without a call, after which a linear's product is not made any more


class _Entry:
    """One call of a block: its input, the products made of it, and the state that they were made in.

    Args:
        outs: products by place. read: the parameters behind each. fused: whether the call was counted as overlapped.
    """

    def __init__(
        self,
        x: T | None = None,
        outs: dict[int, T] | None = None,
        read: dict[int, list[T]] | None = None,
        fused: bool = False,
    ):
        self.x, self.outs, self.taken, self.fused = x, outs or {}, 0, fused
        self.made = tuple(self.outs)
        self.state = _state(x) if outs else ()
        self.read = {} if torch.compiler.is_compiling() else {n: _versions(ts) for n, ts in (read or {}).items()}


def _versions(tensors: list[T]) -> list[tuple[T, int]]:
    return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in tensors]


def _state(x: T | None) -> tuple:
    """What must still be so for a product made at the entry to be what the linear would give now."""
    if x is None or torch.compiler.is_compiling():  # a graph has one state, and traces writes as new values
        return ()
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return x._version, torch.is_grad_enabled(), autocast, private.saved_tensor_hooks()


class SharedInput:
    """An input that column linears share: their products are made with it, and handed out as they are called.

    Args:
        region: where rows are gathered; None where the input is replicated.
        dim: of the rows.
        linears: with the output features that each has on this rank in `widths`, and on the rank that has most in `most`.
    """

    def __init__(
        self,
        site: Site,
        region: Region | None,
        dim: int,
        linears: list[nn.Module],
        widths: list[int],
        most: list[int],
    ):
        self.site, self.region, self.dim = site, region, dim
        self.linears, self.widths, self.most = linears, widths, most
        self.misses = [0] * len(linears)
        self.ever_taken = False
        self.now = _Entry()
        self._outer: list[_Entry] = []

    @property
    def depth(self) -> int:
        """How many calls of the block are under way, one inside another."""
        return len(self._outer)

    def enter(self, x: T) -> T:
        """The whole input for the block; `take` hands out the products made of it."""
        self._outer.append(self.now)
        self.now = _Entry()
        gathers = self.region is not None and self.region.gathers(x, self.dim)
        sends = gathers or torch.is_grad_enabled()
        which, weights, biases = self._parameters(x) if sends else ([], [], [])
        before = self.site.fused
        if not which:
            self.site.note(
                False, "sync: no product is made ahead" if sends else "sync: nothing is sent without gradients"
            )
            whole = self.region.gather(x, self.dim) if self.region is not None else ops.copy(x, self.site.group)
            self.now = _Entry(whole)
            return whole
        op = "all_gather_linear" if gathers else "column_linear"
        features = x.shape[-1], sum(self.most[place] for place in which)
        call = Call(op, x, weights, biases, self.site.group, decided=self.site.way, features=features)
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            outs, whole = self._made(call, gathers)
        else:  # there tensors do not tell that they were written to; what is made outside of it does
            with torch.inference_mode(False), torch.no_grad():
                outs, whole = self._made(call, gathers)
        read = {place: self._read(place) for place in which}
        self.now = _Entry(whole, dict(zip(which, outs, strict=True)), read, self.site.fused > before)
        return whole

    def _read(self, place: int) -> list[T]:
        """The parameters of a linear as its next forward would find them, stored and local: a write tells on either."""
        planned, parameters = self.linears[place].__dict__["_planned"], self.linears[place]._parameters
        slots = [slot for slot in (planned.weight, planned.bias) if slot is not None]
        return [tensor for slot in slots for tensor in (parameters[slot.key], slot.local(parameters))]

    def _made(self, call: Call, gathers: bool) -> tuple[list[T], T]:
        """The products, and the whole input for whoever else reads it."""
        if not gathers:
            return call.column(self.site.deferred), ops.copy(call.x, self.site.group)
        assert self.region is not None
        full = self.region.rows(call.x, self.dim)
        start, stop = even_interval(full, self.site.group.size, self.site.group.rank)
        if stop - start != call.x.shape[self.dim]:
            call.x = call.x.narrow(self.dim, 0, stop - start)
        return call.gather(self.dim, full, True, self.site.deferred)

    def _parameters(self, x: T) -> tuple[list[int], list[T], list[T | None]]:
        """Places, weights and biases of the linears that are expected to read this input as it is."""
        which, weights, biases, sharded = [], [], [], False
        casts = torch.is_autocast_enabled(x.device.type)
        for place, linear in enumerate(self.linears):
            planned, parameters = linear.__dict__["_planned"], linear._parameters
            weight = planned.weight.local(parameters)
            weight = weight.t() if hasattr(linear, "nf") else weight
            if weight.shape != (self.widths[place], x.shape[-1]):
                sharded = True  # a wrapper has it sharded until the linear itself is called
            elif self.misses[place] < _MISSES and (casts or weight.dtype == x.dtype):
                which.append(place)
                weights.append(weight)
                biases.append(None if planned.bias is None else planned.bias.local(parameters))
        if sharded and not which:
            fix = "wrap the block with fully_shard rather than each linear, or overlap=off for it"
            self.site.had_no_effect("its weights are not whole when its input comes", fix)
        return which, weights, biases

    def take(self, place: int, x: T) -> T | None:
        """The product of the linear at `place`, once; None where `x` is not the input that it was made of, as it was."""
        if x is not self.now.x:
            return None
        self.now.taken += 1
        return self.now.outs.pop(place, None) if place in self.now.outs and self._still_so(place, x) else None

    def _still_so(self, place: int, x: T) -> bool:
        if torch.compiler.is_compiling():
            return True
        now = _versions(self._read(place))
        same = all(a is b and n == m for (a, n), (b, m) in zip(now, self.now.read[place], strict=True))
        return same and self.now.state == _state(x)

    def leave(self, depth: int, failed: bool = False) -> None:
        """A call of the block that began at this depth has ended: forget its input, remember who did not read it.

        Raises: ModelError `overlap-unused` where overlap was asked for by name and no linear ever took its product.
        """
        unread, taken, made, fused = set(self.now.outs), self.now.taken, self.now.made, self.now.fused
        while len(self._outer) > depth:
            self.now = self._outer.pop()
        if failed or torch.compiler.is_compiling():
            return
        self.ever_taken = self.ever_taken or taken > 0
        for place in made:
            self.misses[place] = min(self.misses[place] + 1, _MISSES) if place in unread else 0
        if made and not taken:
            self.site.fused -= fused
            if not self.ever_taken:
                self.site.had_no_effect(
                    "none of its linears is called with its input",
                    "give the linears their own rule without `gather`, or overlap=off for this block",
                )


class Overlap:
    """The sites of one model, and the weight gradients that they may defer."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.deferred = DeferredGradients()

    def site(self, row: SiteRow, group: Group) -> Site:
        site = Site(row, group, self.deferred)
        self.sites.append(site)
        return site


def deferred_gradients(module: nn.Module) -> DeferredGradients:
    """Where the weight gradients of a model's overlapped linears go inside `with ...deferring():`.

    Raises: ModelError `not-parallelized`.
    """
    return require_record(module).overlap.deferred
