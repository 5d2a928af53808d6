"""The check of replicas: what ranks store of parameters that must be equal, compared every N calls of a step.

| copies | why they are equal | compared |
|---|---|---|
| of data ranks | they apply the same reduced gradient | by digest of all bits |
| of a tied parameter, on several stages | they apply the same summed gradient | by digest of all bits |
| replicated over `tp` | each rank computes the gradient, up to rounding | by sketch (see `zero.sketches`) |

Digests travel in the message of the step, times the weights of `rank_weights`. Sketches are gathered over `tp` before
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.pipeline.ties import TieGroup, Ties
from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.replicas import apart, is_replicated, replicated_over, sketches
from parallelize.base.agreement import Facts, text_digest
from parallelize.base.errors import Problem, short_list
from parallelize.base.mesh import DATA_AXES, MeshSpec
from parallelize.comm.handshake import digest
from parallelize.comm.mesh_view import MeshView
from parallelize.state.written_versions import writes_to

T = torch.Tensor

_MOST_ROWS = 20
_FIX = (
    "write the same values on all ranks (edits, initializers, loads), and give their optimizers the same settings; "
    "compare_every=0 turns this comparison off"
)


@dataclass(frozen=True)
class CopyFacts:
    """What this rank stores of parameters that other ranks store too; gathered only where copies differ.

    Attributes:
        data: digests by axes and name, which the ranks along these axes share.
        ties: digests by name of the tie. Several, where a rank has several copies that differ.
        drift: by name of a parameter that is replicated over `tp`: the ranks whose values are not those of the first.
    """

    data: Mapping[tuple[str, ...], Facts] = field(default_factory=dict)
    ties: Facts = field(default_factory=dict)
    drift: Facts = field(default_factory=dict)


class ReplicaCheck:
    """The comparison of replicas, every N calls.

    Args:
        module: this rank's part of the model.
        mesh: the mesh with all axes.
        ties: its tied parameters, or None.
        every: the first call is compared, and each N-th after it. 0: none.
    """

    def __init__(self, module: nn.Module, mesh: MeshView, ties: Ties | None, every: int):
        self.module, self.ties, self.every = module, ties, every
        self.spec, self._index = mesh.spec, mesh.position
        self.tp = mesh.group("tp") if self.spec.ranks("tp") > 1 else None

        self._accepted: dict[str, int] = {}
        self.accept_edits()

    def due(self, call: int) -> bool:
        """Whether the call of this number, from 0, compares."""
        return self.every > 0 and call % self.every == 0

    @torch.no_grad()
    def total(self) -> tuple[T, T]:
        """(digests times weights, the number of replicas over `tp` that have drifted): 0 over all ranks if none
        differ."""
        terms = []
        for axes, tensors in self._copies().items():
            weight = weight_of(self.spec, self._index, [axis for axis in self.spec.names if axis not in axes])
            digests = torch.stack([digest(tensor)[:2].sum() for tensor in tensors.values()])
            odd = torch.arange(1, 2 * len(digests), 2, device=digests.device)
            terms.append((digests * odd).sum() * weight)
        drifted = self._drifted()[1].sum()
        for tie in self.shared_ties():
            first, *other_copies = (digest(copy)[:2].sum() for copy in self._tied(tie))
            terms.append(first * weight_in(tie.group.ranks, dist.get_rank()))
            drifted = drifted + sum((other != first).to(drifted.device) for other in other_copies)
        return (torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.int64)), drifted

    @torch.no_grad()
    def facts(self, due: bool) -> CopyFacts:
        """What names a difference. due: False for ties alone. A collective over `tp`, where it is due."""
        ties = {tie.name: " / ".join(sorted({_text(copy) for copy in self._tied(tie)})) for tie in self.shared_ties()}
        if not due:
            return CopyFacts(ties=ties)
        copies = self._copies().items()
        data = {axes: {name: _text(tensor) for name, tensor in tensors.items()} for axes, tensors in copies}
        return CopyFacts(data, ties, self._drift_rows())

    def problems(self, ranks: Sequence[int], every: Sequence[CopyFacts]) -> list[Problem]:
        """What differs. ranks: of the mesh, in its order. every: the facts of each."""
        return [*_differing_ties(self.spec, ranks, every), *_differing_copies(self.spec, ranks, every)]

    def edits(self) -> Facts:
        """How often this rank's copy of each tie was written to since `accept_edits`, as far as PyTorch counts it.

        Writes to `.data` of a DTensor, and those of its `foreach` ops, are not counted; `total` compares values.
        """
        return {name: str(writes - self._accepted[name]) for name, writes in self._writes().items()}

    def accept_edits(self) -> None:
        """The copies of each tie are equal now, however often each was written to."""
        self._accepted = self._writes()

    def _writes(self) -> dict[str, int]:
        return {tie.name: max(map(writes_to, self._parameters(tie))) for tie in self.shared_ties()}

    def shared_ties(self) -> list[TieGroup]:
        """The ties with copies on several ranks."""
        return [tie for tie in self.ties.groups if tie.group.size > 1] if self.ties is not None else []

    def _parameters(self, tie: TieGroup) -> list[nn.Parameter]:
        assert self.ties is not None
        return self.ties.parameters(tie)

    def _tied(self, tie: TieGroup) -> list[T]:
        return [to_local(parameter).detach() for parameter in self._parameters(tie)]

    def _copies(self) -> dict[tuple[str, ...], dict[str, T]]:
        """Data axes along which tensors are replicated -> these local tensors by name."""
        present = [axis for axis in self.spec.names if axis in DATA_AXES and self.spec.size(axis) > 1]
        copies: dict[tuple[str, ...], dict[str, T]] = {}
        for name, parameter in self.module.named_parameters():
            axes = tuple(axis for axis in present if is_replicated(parameter, axis))
            local = to_local(parameter).detach()
            if axes and not local.is_meta:
                copies.setdefault(axes, {})[name] = local
        return copies

    def _drifted(self) -> tuple[list[str], T]:
        """(names of what is replicated over `tp`; [ranks, names], whether a rank's values are not those of the
        first)."""
        tensors = replicated_over(self.module, "tp") if self.tp is not None else {}
        if self.tp is None or not tensors:
            return [], torch.zeros(0, 0, dtype=torch.bool)
        return list(tensors), apart(self.tp.all_gather(sketches(tensors)), tensors)

    def _drift_rows(self) -> Facts:
        names, drifted = self._drifted()
        rows: Facts = {}
        for name, by_rank in zip(names, drifted.T.tolist(), strict=True):
            assert self.tp is not None
            apart_ranks = [rank for rank, is_apart in zip(self.tp.ranks, by_rank, strict=True) if is_apart]
            if apart_ranks:
                rows[name] = _differ(apart_ranks, self.tp.ranks[0])
        return rows


def _text(tensor: T) -> str:
    return " ".join(f"{word & 0xFFFFFFFF:08x}" for word in digest(tensor)[:2].tolist())


def _differ(ranks: Sequence[int], first: int) -> str:
    return f"ranks {short_list([str(rank) for rank in ranks])} differ from rank {first}"


def _differing_ties(spec: MeshSpec, ranks: Sequence[int], every: Sequence[CopyFacts]) -> list[Problem]:
    rows = []
    for group in _groups(spec, ("pp",)):
        names = {name for index in group for name in every[index].ties}
        for name in sorted(names):
            digests = {ranks[index]: every[index].ties[name] for index in group if name in every[index].ties}
            if len({*digests.values()}) > 1 or any(" / " in text for text in digests.values()):
                rows.append((name, f"the copies on ranks {short_list([str(rank) for rank in digests])} are not equal"))
    if not rows:
        return []
    what = f"copies of {len({name for name, _ in rows})} tied parameters are not equal any more"
    fix = (
        "write the same values to all copies, by each of their names, and update them by one optimizer with the same "
        "settings"
    )
    return [Problem("ties-differ", what, rows=tuple(rows[:_MOST_ROWS]), fix=fix)]


def _differing_copies(spec: MeshSpec, ranks: Sequence[int], every: Sequence[CopyFacts]) -> list[Problem]:
    """Copies over data axes by digest, and replicas over `tp` by what the ranks of each group have found."""
    rows = []
    for axes in dict.fromkeys(axes for facts in every for axes in facts.data):
        for group in _groups(spec, axes):
            first = every[group[0]].data.get(axes, {})
            for name in first:
                differing_ranks = [
                    ranks[index] for index in group if every[index].data.get(axes, {}).get(name) != first[name]
                ]
                if differing_ranks:
                    rows.append((name, _differ(differing_ranks, ranks[group[0]])))
    rows += [row for facts in every for row in facts.drift.items()]
    rows = list(dict.fromkeys(rows))
    if not rows:
        return []
    what = f"{len({name for name, _ in rows})} parameters that ranks must store alike are not equal any more"
    return [Problem("replicas-differ", what, rows=tuple(rows[:_MOST_ROWS]), fix=_FIX)]


def _groups(spec: MeshSpec, axes: Sequence[str]) -> list[list[int]]:
    """The groups of indices of ranks that differ in their coordinates on these axes alone."""
    present = [axis for axis in axes if axis in spec.names]
    if not present:
        return [[index] for index in range(spec.world_size)]
    return [
        list(group)
        for group in sorted({tuple(sorted(spec.group_of(index, *present))) for index in range(spec.world_size)})
    ]


# -- zero sum weights ------------------------------------------------------------------------------------------------
# Weights of ranks: numbers that add up to 0 over the ranks that are compared, modulo 2^64. Each rank adds a digest
# times its weight to a sum over the mesh. Equal digests vanish, in any number of groups of ranks at once. All weights
# but the last are odd, so that no difference of one rank vanishes.


def weight_of(spec: MeshSpec, index: int, shared: Sequence[str]) -> int:
    """The weight of the rank at this index, among the ranks that have its coordinates on the axes `shared`."""
    across = [axis for axis in spec.names if axis not in shared]
    ranks = sorted(spec.group_of(index, *across)) if across else [index]
    return weight_in(ranks, index)


def weight_in(ranks: Sequence[int], rank: int) -> int:
    """The weight of one of these ranks: odd, or for the last one what makes the sum 0."""
    if rank != ranks[-1]:
        return _odd(rank)
    return signed(-sum(_odd(other) for other in ranks[:-1]))


def _odd(rank: int) -> int:
    return signed(number_of(f"rank {rank}") | 1)


def number_of(text: str) -> int:
    """The digest of a text as a number below 2^64."""
    return int.from_bytes(text_digest(text), "little")


def signed(value: int) -> int:
    """The same number modulo 2^64, as int64 stores it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
