"""Targets of a cross entropy: for each token, weights q over the vocabulary, from an id or from a value per class.

With z the logits, e the label smoothing and w the class weights (1 if there are none):

    hard   q_c = (1 - e) w_y [c = y] + e/V w_c      y the target id
    soft   q_c = w_c ((1 - e) p_c + e/V)            p the target's values
    loss = Q lse(z) - sum_c q_c z_c,   d loss / d z_c = Q softmax_c - q_c,   Q = sum_c q_c

A rank knows q for its shard of the vocabulary. Source: `torch.nn.CrossEntropyLoss`, which defines these meanings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.comm.handshake import InputCheck

T = torch.Tensor


@dataclass(frozen=True)
class RowTerms:
    """A multiple of q that is two numbers a row: `of_all` for each class, and `of_id` more for the class `ids`.

    Attributes:
        ids: [n], positions in this rank's shard.
        of_id: [n], 0 where the id is on another rank.
        of_all: [n], or None for 0.
    """

    ids: T
    of_id: T
    of_all: T | None


class HardTargets:
    """Ids of the full vocabulary.

    Shapes: ids [N], all valid; weight [V] or None, in full on each rank.
    """

    def __init__(self, ids: T, vocabulary: Vocabulary, smoothing: float, weight: T | None, dtype: torch.dtype):
        full, start, stop = vocabulary.full, vocabulary.start, vocabulary.stop
        self.ids, self.outside = local_ids(ids, start, stop)
        self.smoothing = smoothing / full  # per class
        self.weight = None if weight is None or not smoothing else weight[start:stop].to(dtype)
        id_weight = torch.ones(ids.shape, dtype=dtype, device=ids.device) if weight is None else weight.to(dtype)[ids]
        self.id_weight = id_weight * (1.0 - smoothing)
        local_weight = float(stop - start) if weight is None else weight[start:stop].sum(dtype=dtype)
        self.smoothing_mass = local_weight * self.smoothing  # the part of q on this rank that comes from smoothing
        full_weight = float(full) if weight is None else weight.sum(dtype=dtype)
        self.full_mass: T | None = self.id_weight + full_weight * self.smoothing

    def of_tokens(self, start: int, stop: int) -> HardTargets:
        """The targets of some tokens."""
        chunk = object.__new__(HardTargets)
        chunk.__dict__.update(self.__dict__)
        for name in ("outside", "ids", "id_weight", "full_mass"):
            chunk.__dict__[name] = self.__dict__[name][start:stop]
        return chunk

    def mass(self) -> T:
        """[n]: the sum of q on this rank."""
        return self.id_weight.masked_fill(self.outside, 0.0) + self.smoothing_mass

    def dot(self, z: T, highest: T) -> T:
        """[n]: the sum of q (z - highest) on this rank. Relative to `highest`, so that a small loss is not lost in
        rounding."""
        if not z.shape[-1]:
            return torch.zeros_like(highest)
        z_of_id = z.gather(-1, self.ids.unsqueeze(-1)).squeeze(-1).to(highest.dtype) - highest
        out = (z_of_id * self.id_weight).masked_fill_(self.outside, 0.0)
        if self.smoothing:
            relative = z - highest.unsqueeze(-1)
            out += self.smoothing * (relative.sum(-1) if self.weight is None else relative @ self.weight)
        return out

    def row_terms(self, scale: T) -> RowTerms | None:
        """scale [n] * q; None if its smoothing has a weight for each class."""
        if self.smoothing and self.weight is not None:
            return None
        return RowTerms(self.ids, self._weight_of_ids(scale), scale * self.smoothing if self.smoothing else None)

    def subtract_(self, out: T, scale: T) -> None:
        """out [n, V/P] -= scale [n] * q."""
        if not out.shape[-1]:
            return
        if self.smoothing and self.weight is None:
            out -= (scale * self.smoothing).unsqueeze(-1)
        elif self.smoothing and self.weight is not None:
            out.addr_(scale, self.weight, alpha=-self.smoothing)
        out.scatter_add_(-1, self.ids.unsqueeze(-1), self._weight_of_ids(scale).neg_().unsqueeze(-1))

    def _weight_of_ids(self, scale: T) -> T:
        return (scale * self.id_weight).masked_fill(self.outside, 0.0)


class SoftTargets:
    """A value for each class.

    Shapes: values [N, V/P], this rank's shard; weight [V] or None, in full on each rank.
    """

    full_mass: T | None = None  # known only after a reduction over ranks

    def __init__(self, values: T, vocabulary: Vocabulary, smoothing: float, weight: T | None, dtype: torch.dtype):
        start, stop = vocabulary.start, vocabulary.stop
        self.values, self.smoothing, self.full, self.dtype = values, smoothing, vocabulary.full, dtype
        self.weight = None if weight is None else weight[start:stop].to(dtype)

    def of_tokens(self, start: int, stop: int) -> SoftTargets:
        chunk = object.__new__(SoftTargets)
        chunk.__dict__.update(self.__dict__)
        chunk.values = self.values[start:stop]
        return chunk

    def mass(self) -> T:
        return self._q().sum(-1)

    def dot(self, z: T, highest: T) -> T:
        return (z - highest.unsqueeze(-1)).mul_(self._q()).sum(-1)

    def row_terms(self, scale: T) -> None:
        """None: each class has a value of its own."""

    def subtract_(self, out: T, scale: T) -> None:
        out.sub_(self._q() * scale.unsqueeze(-1))

    def _q(self) -> T:
        q = self.values.to(self.dtype)
        if self.smoothing:
            q = q * (1.0 - self.smoothing) + self.smoothing / self.full
        return q if self.weight is None else q * self.weight


Targets = HardTargets | SoftTargets


def soft_shard(targets: T, lead: tuple[int, ...], vocabulary: Vocabulary) -> T:
    """This rank's shard [..., V/P] of soft targets, which may be full or already be that shard.

    Raises: ShapeError `bad-targets`.
    """
    full, start, stop = vocabulary.full, vocabulary.start, vocabulary.stop
    if tuple(targets.shape[:-1]) == lead and targets.shape[-1] == full:
        return targets[..., start:stop]
    if tuple(targets.shape) == (*lead, stop - start):
        return targets
    what = (
        f"soft targets {list(targets.shape)} for logits {[*lead, full]}, of which this rank has {stop - start} classes"
    )
    raise ShapeError(Problem("bad-targets", what, fix="one value for each class, or for each class of this rank"))


def check_class_weight(weight: T | None, full: int) -> None:
    """Raises: ShapeError `bad-class-weight`."""
    if weight is None:
        return
    if tuple(weight.shape) != (full,) or not weight.is_floating_point():
        what = f"class weights {list(weight.shape)} ({weight.dtype}) for a vocabulary of {full}"
        raise ShapeError(Problem("bad-class-weight", what, fix=f"floating numbers of shape [{full}], on every rank"))
    if weight.requires_grad:
        raise ShapeError(Problem("bad-class-weight", "class weights have no gradient", fix="`weight.detach()`"))


# -- vocabulary shard ------------------------------------------------------------------------------------------------
# A vocabulary that is sharded over ranks: rank r stores ids [start, stop) of V, split as by `torch.chunk`.


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of `full` entries, sharded over a group. `targets`: compares targets of losses over the group."""

    full: int
    group: Group
    targets: InputCheck | None = None

    @property
    def start(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[0]

    @property
    def stop(self) -> int:
        return even_interval(self.full, self.group.size, self.group.rank)[1]

    def __deepcopy__(self, memo: dict) -> Vocabulary:
        return self


def check_ids(ids: torch.Tensor, full: int, what: str) -> None:
    """Refuse ids outside the vocabulary: every rank would treat them as another rank's, and they would become zeros.

    Raises: ShapeError `id-out-of-range` (on an accelerator, an asynchronous assertion).
    """
    if ids.is_meta or torch.compiler.is_compiling() or not ids.numel():
        return
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < full)).all())
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= full:
        what = f"{what} range from {low} to {high}, and the vocabulary has {full} entries"
        raise ShapeError(Problem("id-out-of-range", what, fix=f"use ids from 0 to {full - 1}"))


def local_ids(ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids relative to `start`, 0 for ids outside; the mask of ids outside)."""
    outside = (ids < start) | (ids >= stop)
    return (ids - start).masked_fill_(outside, 0), outside
