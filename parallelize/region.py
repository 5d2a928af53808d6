"""The sequence-parallel region at run time: where it is entered and left, and how long the sequence is inside.

Shards inside the region are ceil(S/P) rows on every rank, so a shard alone does not tell S. The region remembers it from
the entry; a recompute during backward finds it among the forwards whose graphs are still alive.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops import tape


class _Pass:
    """One forward through the region: the full length, and whether sequence parallelism was on."""

    __slots__ = ("__weakref__", "active", "full")

    def __init__(self, full: int, active: bool):
        self.full, self.active = full, active


class Region:
    """Shared by every module inside. `dim` is the sequence dim of the hidden states that enter."""

    def __init__(self, group: Group, dim: int = 1):
        self.group, self.dim = group, dim
        self._inside: _Pass | None = None
        self._last: _Pass | None = None
        self._alive: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> Region:
        return memo.setdefault(id(self), Region(self.group, self.dim))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Own rows of the replicated hidden states [batch, S, hidden]."""
        full = x.shape[self.dim]
        # decoding sends one token at a time: nothing to shard, so the block edges fall back to all-reduces
        active = full > 1 or torch.is_grad_enabled()
        now = self._last = _Pass(full, active)
        if torch.compiler.is_compiling() or private.backward_id() == -1:
            self._inside = now
        if not active:
            return x
        out = ops.split(x, self.group, self.dim, padded=True)
        self._mark(out, now)
        return out

    def _mark(self, out: torch.Tensor, now: _Pass) -> None:
        """Keep a pass as long as the graph of what it entered with."""
        if not torch.compiler.is_compiling() and out.grad_fn is not None:
            self._alive.add(now)
            metadata: Any = out.grad_fn.metadata
            metadata["sequence_parallel_pass"] = now

    def resume(self, x: torch.Tensor, full: int) -> torch.Tensor:
        """Go on inside with a shard that another pipeline stage has made."""
        now = self._inside = self._last = _Pass(full, True)
        out = x.view_as(x)
        self._mark(out, now)
        return out

    @property
    def inside(self) -> int | None:
        """The full length where activations are shards now, else None."""
        return self._inside.full if self._inside is not None and self._inside.active else None

    def forget(self) -> None:
        """A forward has ended, or failed, inside."""
        self._inside = None

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """All rows again; outside, the gradient is whole on every rank."""
        now = self._pass_of(x, self.dim)
        self._inside = None
        return ops.gather(x, self.group, self.dim, now.full, "replicate") if now.active else x

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Rows of all ranks for a block's sharded projections."""
        now = self._pass_of(x, dim)
        return (
            ops.gather(x, self.group, dim, self._rows(now, x, dim), "partial")
            if now.active
            else ops.copy(x, self.group)
        )

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum a block's partial outputs, own rows of it."""
        return (
            ops.reduce_scatter(x, self.group, dim, padded=True) if self.scatters() else ops.reduce_owned(x, self.group)
        )

    def gathers(self, x: torch.Tensor, dim: int) -> bool:
        """Whether `x` is a shard now: not while one token is decoded."""
        return self._pass_of(x, dim).active

    def rows(self, x: torch.Tensor, dim: int) -> int:
        """How many rows `gather` makes of `x`."""
        return self._rows(self._pass_of(x, dim), x, dim)

    def _rows(self, now: _Pass, x: torch.Tensor, dim: int) -> int:
        # flattened [tokens, hidden] keeps its padding: its rows are not ordered by position
        return now.full if dim == self.dim else x.shape[dim] * self.group.size

    def scatters(self) -> bool:
        """Whether partial sums are scattered now, rather than reduced."""
        return self._inside is None or self._inside.active

    def _pass_of(self, x: torch.Tensor, dim: int) -> _Pass:
        """The pass that `x` belongs to; what is recomputed in backward finds its own again."""
        if torch.compiler.is_compiling():
            now = self._inside
        elif private.backward_id() == -1 or tape.in_recompute():
            now = tape.remembered("sequence-parallel region", lambda: self._inside)
        elif dim != self.dim:  # flattened tokens: only `active` counts, and what is recomputed was trained on
            return _Pass(0, True)
        else:
            now = self._recomputed(x.shape[self.dim])
        rows = x.shape[dim]
        if now is None or (dim == self.dim and now.active and rows != -(-now.full // self.group.size)):
            inside = f"of {now.full} tokens" if now else "which nothing has entered"
            raise ModelError(
                Problem(
                    "outside-region",
                    f"a block of the sequence-parallel region, {inside}, is called on its own with {rows} rows",
                    fix="call the model, whose first layer enters the region; or apply with sequence_parallel=False",
                )
            )
        return now

    def _recomputed(self, rows: int) -> _Pass | None:
        """The pass that is being recomputed in backward: the one whose shards have so many rows."""
        fitting = {p.full: p for p in self._alive if -(-p.full // self.group.size) == rows}
        if len(fitting) > 1:
            raise ModelError(
                Problem(
                    "ambiguous-sequence",
                    f"recompute meets forwards of {sorted(fitting)} tokens, which all give shards of {rows} rows",
                    fix=f"run backward before the next forward, or pad sequences to a multiple of {self.group.size}",
                )
            )
        return next(iter(fitting.values()), self._last)
