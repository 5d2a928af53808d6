"""What the attention of a model on `cp` must know about the running forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.context.cache_shards import CachedSequence, shard_cache
from parallelize.axes.context.sequence_shards import Run, SequenceLayout
from parallelize.axes.tensor.region import Region
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group, group_for
from parallelize.comm.mesh_view import MeshView
from parallelize.ops import replay_cache
from parallelize.state.records import applied
from parallelize.state.step_results import as_instance

T = torch.Tensor


@dataclass(eq=False)
class ForwardSequences:
    """The sequences of one forward. It lives as long as the graph of that forward.

    Attributes:
        layout: which tokens each rank stores.
        documents: [B or 1, S], the document of each token, -1 - d for padding; None for one document without padding.
        cached: the cache of new tokens that every rank computes; None if each rank computes its part.
        padding: [B, S], 0 for padding, as the model was called; None without padding.
        positions: [1 or B, S], those of packed documents; None without.
        is_gathered: whether a gathered module runs, on all tokens.
        cut: (local tokens, all tokens) of each input that was cut.
    """

    layout: SequenceLayout
    documents: T | None = None
    cached: CachedSequence | None = None
    padding: T | None = None
    positions: T | None = None
    is_gathered: bool = False
    cut: list[tuple[T, T]] = field(default_factory=list)


class Context:
    """How a model's sequences are sharded over `cp`; stored on the root of the model.

    Attributes:
        group: all ranks of cp.
        ring: the ranks that store other tokens of the same heads.
        ulysses: the ranks that exchange heads.
        attention: fqn -> "causal", "bidirectional" or "gathered".
        length: tokens of the last forward's sequences.
        attended: modules whose attention was computed over cp at least once.
        checked: whether the checks of the first forward have passed.
        compared: whether a step, which compares its inputs over all ranks, calls the forward.
        generating: whether `generate` calls the forward, and needs the last token's logits on every rank.
        cache: the cache of the forward that runs, or None.
    """

    def __init__(self, mesh: MeshView, attention: dict[str, str], ulysses: int = 1):
        self.mesh, self.attention = mesh, attention
        self.group = mesh.group("cp")
        size, rank, ranks = self.group.size, self.group.rank, self.group.ranks
        first = rank - rank % ulysses
        self.ulysses, self.ring = Group.alone(), self.group
        if ulysses > 1:
            self.ulysses = Group(group_for(ranks[first : first + ulysses])) if ulysses < size else self.group
            self.ring = Group(group_for(ranks[rank % ulysses :: ulysses])) if ulysses < size else Group.alone()
        balanced = "causal" in attention.values()
        self._empty_layout = SequenceLayout(0, size // ulysses, ulysses, balanced)
        self.length = 0
        self.attended: set[str] = set()
        self.checked = self.compared = self.generating = False
        self.cache: CachedSequence | None = None
        self._running: ForwardSequences | None = None
        self._with_graph = False  # whether the running forward records a graph
        self._attended_without_graph = False  # in such a forward: it is checkpointed with use_reentrant=True
        self._alive: weakref.WeakSet[ForwardSequences] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> Context:
        copy = memo[id(self)] = object.__new__(Context)
        fresh: dict[str, Any] = {
            "_running": None,
            "_alive": weakref.WeakSet(),
            "attended": set(),
            "checked": False,
            "compared": False,
            "generating": False,
            "cache": None,
        }
        copy.__dict__ |= self.__dict__ | fresh
        return copy

    @property
    def ring_rank(self) -> int:
        """This rank's index in its ring."""
        return self.group.rank // self._empty_layout.ulysses

    @property
    def is_causal(self) -> bool:
        """Whether no attention is bidirectional: a token depends on those before it."""
        return "bidirectional" not in self.attention.values()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model runs."""
        return self._running is not None

    @property
    def has_gathered(self) -> bool:
        return "gathered" in self.attention.values()

    @property
    def makes_masks(self) -> bool:
        """Whether masks of the full sequence are made: no attention runs over the ranks, which takes none."""
        return set(self.attention.values()) == {"gathered"}

    @property
    def runs_gathered(self) -> bool:
        """Whether the forward that runs is inside of a gathered module."""
        return self._running is not None and self._running.is_gathered

    def layout_of(self, full: int) -> SequenceLayout:
        """The layout of sequences of `full` tokens."""
        return replace(self._empty_layout, full=full)

    def local_runs(self) -> tuple[Run, ...]:
        """This rank's positions in the last forward's sequences."""
        return self.layout_of(self.length).of_rank(self.group.rank)

    def local_positions(self) -> tuple[int, tuple[Run, ...]] | None:
        """(tokens of the full sequence, this rank's positions) of the forward that runs, or is recomputed; None in a
        gathered module.

        Raises: as `current`.
        """
        sequences = self.current()
        layout = sequences.layout
        return None if sequences.is_gathered else (layout.full, layout.of_rank(self.group.rank))

    def begin(
        self,
        full: int,
        documents: T | None,
        cache: CachedSequence | None = None,
        splits: bool = True,
        padding: T | None = None,
        positions: T | None = None,
    ) -> None:
        """A forward starts, with sequences of `full` tokens.

        Args:
            documents, padding, positions: as in `ForwardSequences`.
            cache: where it stores keys and values.
            splits: whether each rank computes a part of the tokens; else all ranks compute those that the cache has
                not.
        """
        self.length, self._with_graph = full if splits else 0, torch.is_grad_enabled()
        layout = self.layout_of(full)
        if cache is not None:
            cache.begin(full - cache.full, layout if splits else None)
        self.cache = cache
        self._running = ForwardSequences(layout, documents, None if splits else cache, padding, positions)

    def end(self) -> None:
        """The forward has ended, or failed."""
        self._running = None
        if self.cache is not None:
            self.cache.end()
        self.cache = None

    def shard_cache(self, cache: Any) -> CachedSequence:
        """Let each rank store its tokens of a cache of `transformers`, in place. Raises: ModelError `cache-over-cp`."""
        return shard_cache(cache, self._empty_layout, self.group.rank)

    @contextmanager
    def in_generation(self) -> Iterator[None]:
        """A context in which forwards give the last token's logits, on every rank."""
        outer, self.generating = self.generating, True
        try:
            yield
        finally:
            self.generating = outer

    def current(self) -> ForwardSequences:
        """The sequences of the forward that is running, or is recomputed.

        Raises: ModelError `outside-context`, `reentrant-checkpoint`, `ambiguous-sequence`.
        """
        if private.backward_id() == -1 or replay_cache.in_recompute():
            return replay_cache.remembered("context", self._required)
        alive = list(self._alive)
        if self._attended_without_graph or not alive:
            what = "a forward over cp was checkpointed without a graph, so it is not known which forward is recomputed"
            raise ModelError(Problem("reentrant-checkpoint", what, fix="use_reentrant=False, or parallelize.recompute"))
        different = {(sequences.layout, id(sequences.documents)) for sequences in alive}
        if len(different) != 1:
            what = f"{len(different)} forwards with different sequences could be the one that is recomputed"
            fix = "use parallelize.recompute, which knows; or release earlier graphs: keep loss.detach(), not the loss"
            raise ModelError(Problem("ambiguous-sequence", what, fix=fix))
        return alive[0]

    def _required(self) -> ForwardSequences:
        if self._running is None:
            what = "attention over cp runs outside a forward of the model, so the length of its sequences is not known"
            raise ModelError(Problem("outside-context", what, fix="call the model, not a part of it"))
        return self._running

    def attach(self, sequences: ForwardSequences, out: T) -> None:
        """Let `sequences` live as long as the graph of an output of attention."""
        if private.backward_id() == -1 and not torch.is_grad_enabled():
            self._attended_without_graph = self._attended_without_graph or self._with_graph
        if out.grad_fn is not None and not torch.compiler.is_compiling():
            self._alive.add(sequences)
            metadata: Any = out.grad_fn.metadata
            metadata["context_parallel_sequence"] = sequences


def context_of(module: nn.Module) -> Context | None:
    """How this model's sequences are sharded over `cp`, or None."""
    return as_instance(applied(module).context, Context)


@dataclass
class ContextAttention:
    """One attention module over cp; stored on the module.

    Attributes:
        kind: "causal" or "bidirectional".
        region: of a gathered module, the sequence-parallel region that it is in, or None.
    """

    context: Context
    fqn: str
    kind: str
    region: Region | None = None


def attention_of(module: nn.Module) -> ContextAttention | None:
    """What the attention of this module runs with over `cp`, or None."""
    return as_instance(applied(module).attention, ContextAttention)
