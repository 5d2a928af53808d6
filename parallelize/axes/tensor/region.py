"""The sequence-parallel region at run time: its entry, its exit, and the sequence length inside.

Every rank has a shard of ceil(S/P) tokens inside the region, padded where needed, so the sequence length S cannot be
derived from a shard. The region records it at the entry. A recompute in backward looks it up among the forwards whose
autograd graphs still exist.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops import replay_cache


class _Pass:
    """One forward through the region: the full sequence length, and whether activations are sharded."""

    __slots__ = ("__weakref__", "active", "full")

    def __init__(self, full: int, active: bool):
        self.full, self.active = full, active


class Region:
    """The region of one model, which all modules inside share. `dim` is the sequence dim of the hidden states."""

    def __init__(self, group: Group, dim: int = 1):
        self.group, self.dim = group, dim
        self._inside: _Pass | None = None
        self._last: _Pass | None = None
        self._interrupted = False
        self._select: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._with_graph: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return memo.setdefault(id(self), Region(self.group, self.dim))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the replicated hidden states [batch, S, hidden]."""
        full = x.shape[self.dim]
        # decoding: one token cannot be sharded, so the boundary conversions of blocks fall back to all-reduces
        active = full > 1 or torch.is_grad_enabled()
        self._interrupted = False
        entered = self._last = _Pass(full, active)
        if torch.compiler.is_compiling() or private.backward_id() == -1:
            self._inside = entered
        if not active:
            return x
        out = ops.split(x, self.group, self.dim, padded=True)
        self._tie_to_graph(out, entered)
        return out

    def _tie_to_graph(self, out: torch.Tensor, entered: _Pass) -> None:
        """Keep a pass as long as the autograd graph of the shard at its entry exists."""
        if not torch.compiler.is_compiling() and out.grad_fn is not None:
            self._with_graph.add(entered)
            metadata: Any = out.grad_fn.metadata
            metadata["sequence_parallel_pass"] = entered

    def resume(self, x: torch.Tensor, full: int) -> torch.Tensor:
        """Continue inside the region with a shard from another pipeline stage. `full`: the sequence length."""
        entered = self._inside = self._last = _Pass(full, True)
        self._interrupted = False
        out = x.view_as(x)
        self._tie_to_graph(out, entered)
        return out

    @property
    def inside(self) -> int | None:
        """The full sequence length while activations are sharded, else None."""
        current = None if self._interrupted else self._inside
        return current.full if current is not None and current.active else None

    def forget(self) -> None:
        """End a forward that stopped, or failed, inside the region."""
        self._inside = None

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The full hidden states. Outside the region their gradient is full on every rank."""
        entered = self._pass_of(x, self.dim)
        self._inside = None
        return ops.gather(x, self.group, self.dim, entered.full, "replicate") if entered.active else x

    def gather_recorded(self, x: torch.Tensor) -> torch.Tensor:
        """The full hidden states of a shard that was recorded in the last forward, or the full ones that `x` is.

        Their gradient is full on every rank, as that of hidden states outside of the region.

        Raises: ModelError `hidden-states-are-shards` for a sequence of one token, of which a shard looks like all.
        """
        last = self._last
        if last is None or not last.active:
            return x
        if last.full == 1:
            raise hidden_states_are_shards("of one token would return padding on all ranks but the first")
        is_shard = x.shape[self.dim] == -(-last.full // self.group.size)
        return ops.gather(x, self.group, self.dim, last.full, "replicate") if is_shard else x

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """The full hidden states, for a module that every rank runs on all tokens; `rescatter` ends it."""
        entered = self._pass_of(x, self.dim)
        self._interrupted = True
        return ops.gather(x, self.group, self.dim, entered.full, "replicate") if entered.active else x

    def rescatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the output of such a module."""
        self._interrupted = False
        return ops.split(x, self.group, self.dim, padded=True) if self.scatters() else x

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tokens of all ranks, for the sharded projections of a block."""
        entered = self._pass_of(x, dim)
        if not entered.active:
            return ops.copy(x, self.group)
        return ops.gather(x, self.group, dim, self._gathered_size(entered, x, dim), "partial")

    @contextmanager
    def selecting(self, select: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """A context in which blocks compute other tokens too: `select` returns the region's tokens of their partial
        outputs."""
        self._select = select
        try:
            yield
        finally:
            self._select = None

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of the sum of a block's partial outputs."""
        if self._select is not None:
            x = self._select(x)
        if not self.scatters():
            return ops.reduce_owned(x, self.group)
        return ops.reduce_scatter(x, self.group, dim, padded=True)

    def gathers(self, x: torch.Tensor, dim: int) -> bool:
        """Whether `x` is a shard. It is not while one token is decoded."""
        return self._pass_of(x, dim).active

    def gathered_size(self, x: torch.Tensor, dim: int) -> int:
        """The size of `dim` after `gather`."""
        return self._gathered_size(self._pass_of(x, dim), x, dim)

    def _gathered_size(self, entered: _Pass, x: torch.Tensor, dim: int) -> int:
        # flattened [tokens, hidden] keeps its padding: its tokens are not ordered by position
        return entered.full if dim == self.dim else x.shape[dim] * self.group.size

    def scatters(self) -> bool:
        """Whether partial sums are reduce-scattered, rather than all-reduced."""
        return self._inside is None or self._inside.active

    def _pass_of(self, x: torch.Tensor, dim: int) -> _Pass:
        """The pass that `x` belongs to, also when it is recomputed in backward."""
        if torch.compiler.is_compiling():
            current = self._inside
        elif private.backward_id() == -1 or replay_cache.in_recompute():
            current = replay_cache.remembered("sequence-parallel region", lambda: self._inside)
        elif dim != self.dim:  # flattened tokens: only `active` is used, and a recomputed pass is one of training
            return _Pass(0, True)
        else:
            current = self._recomputed(x.shape[self.dim])
        shard_size = x.shape[dim]
        if current is None or (
            dim == self.dim and current.active and shard_size != -(-current.full // self.group.size)
        ):
            inside = f"of {current.full} tokens" if current else "which nothing has entered"
            raise ModelError(
                Problem(
                    "outside-region",
                    f"a block of the sequence-parallel region, {inside}, is called on its own with {shard_size} tokens",
                    fix="call the model, whose first layer enters the region; or apply with sequence_parallel=False",
                )
            )
        return current

    def _recomputed(self, shard_size: int) -> _Pass | None:
        """The pass that is recomputed in backward: the one whose shards have so many tokens."""
        candidates = {p.full: p for p in self._with_graph if -(-p.full // self.group.size) == shard_size}
        if len(candidates) > 1:
            raise ModelError(
                Problem(
                    "ambiguous-sequence",
                    f"recompute may belong to forwards of {sorted(candidates)} tokens, which all have shards of "
                    f"{shard_size} tokens",
                    fix=f"run backward before the next forward, or pad sequences to a multiple of {self.group.size}",
                )
            )
        return next(iter(candidates.values()), self._last)


def hidden_states_are_shards(what: str) -> ModelError:
    """The error of hidden states that a rank has a part of."""
    return ModelError(
        Problem(
            "hidden-states-are-shards",
            f"output_hidden_states under sequence parallelism {what}",
            fix="apply the plan with sequence_parallel=False to look at hidden states",
        )
    )


class EvenShards(Region):
    """Sequence shards that a dict of styles makes: no module marks their beginning, and all shards are equally long."""

    def __init__(self, tp: DeviceMesh, group: Group):
        super().__init__(group)
        self.tp = tp

    def __deepcopy__(self, memo: dict[int, Any]) -> EvenShards:
        return self

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tokens of all ranks. The gradient of each rank is one term of a sum."""
        return ops.gather(x, self.group, dim, self.gathered_size(x, dim), "partial")

    def gathers(self, x: torch.Tensor, dim: int) -> bool:
        return True

    def gathered_size(self, x: torch.Tensor, dim: int) -> int:
        return x.shape[dim] * self.group.size

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of the sum of partial outputs; uneven ones are split as PyTorch does."""
        if x.shape[dim] % self.group.size == 0:
            return ops.reduce_scatter(x, self.group, dim)
        summed = DTensor.from_local(x, self.tp, (Partial(),), run_check=False)
        return summed.redistribute(placements=(Shard(dim),)).to_local()

    def scatters(self) -> bool:
        return True
