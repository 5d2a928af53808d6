"""What the attention of a model on `cp` has to know of the forward that is going on."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.context.rows import Run, SequenceRows
from parallelize.errors import ModelError, Problem
from parallelize.groups import Group, axis_group, group_for
from parallelize.ops import tape

T = torch.Tensor


@dataclass(eq=False)
class Sequence:
    """One forward's sequences. It lives as long as its graph.

    documents [B or 1, S]: which document each row belongs to, -1 - d for padding; None: one document, no padding.
    """

    rows: SequenceRows
    documents: T | None = None


class Context:
    """How a model's sequences lie over `cp`: a ring of places, each of `ulysses` ranks. Kept on the model's root.

    Attributes:
        group: all of cp. ring: the ranks that hold other rows of the same heads. ulysses: those that trade heads.
        attention: fqn -> "causal" or "bidirectional".
    """

    def __init__(self, mesh: DeviceMesh, attention: dict[str, str], ulysses: int = 1):
        self.mesh, self.attention = mesh, attention
        self.group = Group(axis_group(mesh, "cp"))
        size, rank, ranks = self.group.size, self.group.rank, self.group.ranks
        first = rank - rank % ulysses
        self.ulysses, self.ring = Group.alone(), self.group
        if ulysses > 1:
            self.ulysses = Group(group_for(ranks[first : first + ulysses])) if ulysses < size else self.group
            self.ring = Group(group_for(ranks[rank % ulysses :: ulysses])) if ulysses < size else Group.alone()
        balanced = "causal" in attention.values()
        self.kind = SequenceRows(0, size // ulysses, ulysses, balanced)
        self.now: Sequence | None = None
        self.length = 0  # of the last forward
        self.attended: set[str] = set()  # modules whose attention went over cp at least once
        self.checked = False
        self.learns = False  # whether the forward that is going on makes a graph
        self.graphless = False  # whether attention of such a forward ran without one: reentrant checkpointing
        self._alive: weakref.WeakSet[Sequence] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> Context:
        copy = memo[id(self)] = object.__new__(Context)
        copy.__dict__ |= self.__dict__ | {"now": None, "_alive": weakref.WeakSet(), "attended": set(), "checked": False}
        return copy

    @property
    def place(self) -> int:
        """This rank's place in the ring."""
        return self.group.rank // self.kind.ulysses

    @property
    def is_causal(self) -> bool:
        return "causal" in self.attention.values()

    def rows(self, full: int) -> SequenceRows:
        return replace(self.kind, full=full)

    def own_rows(self) -> tuple[Run, ...]:
        """This rank's rows of the last forward's sequences."""
        return self.rows(self.length).of_rank(self.group.rank)

    def begin(self, full: int, documents: T | None) -> None:
        self.length, self.learns = full, torch.is_grad_enabled()
        self.now = Sequence(self.rows(full), documents)

    def current(self) -> Sequence:
        """The sequences of the forward that is going on, or is being recomputed.

        Raises: ModelError `outside-context`, `ambiguous-sequence`.
        """
        if private.backward_id() == -1 or tape.in_recompute():
            return tape.remembered("context", self._required)
        if self.graphless:
            what = "a forward over cp was checkpointed without a graph, so nothing tells which forward is repeated"
            raise ModelError(Problem("reentrant-checkpoint", what, fix="use_reentrant=False, or parallelize.recompute"))
        alive = list(self._alive)
        same = {(one.rows, id(one.documents)) for one in alive}
        if len(same) != 1:
            what = f"recompute meets {len(same)} forwards whose sequences differ, and cannot tell which it repeats"
            fix = "use parallelize.recompute, which can; or let earlier graphs go: keep loss.detach(), not the loss"
            raise ModelError(Problem("ambiguous-sequence", what, fix=fix))
        return alive[0]

    def _required(self) -> Sequence:
        if self.now is None:
            what = "attention over cp runs outside a forward of the model, so the length of its sequences is not known"
            raise ModelError(Problem("outside-context", what, fix="call the model, not a part of it"))
        return self.now

    def keep(self, sequence: Sequence, out: T) -> None:
        """Remember a forward as long as the graph of what it gave."""
        if private.backward_id() == -1 and not torch.is_grad_enabled():
            self.graphless = self.graphless or self.learns
        if out.grad_fn is not None and not torch.compiler.is_compiling():
            self._alive.add(sequence)
            metadata: Any = out.grad_fn.metadata
            metadata["context_parallel_sequence"] = sequence


def context_of(module: nn.Module) -> Context | None:
    """How this model's sequences lie over `cp`, or None."""
    return module.__dict__.get("_parallelize_context")


@dataclass
class Attention:
    """One attention module over cp; kept on the module."""

    context: Context
    fqn: str
    kind: str
    stock: Any = field(default=None)  # the forward that it had, where its own calls are met by a function mode
