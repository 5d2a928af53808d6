"""What a cross entropy wants of each token: weights q over the vocabulary, given by an id or class by class.

With z the logits, e the label smoothing and w the class weights (1 where none are given):

    hard   q_c = (1 - e) w_y [c = y] + e/V w_c      y the target id
    soft   q_c = w_c ((1 - e) p_c + e/V)            p the target's values
    loss = Q lse(z) - sum_c q_c z_c,   d loss / d z_c = Q softmax_c - q_c,   Q = sum_c q_c

A rank knows q on its own part of the vocabulary. Source: `torch.nn.CrossEntropyLoss`, whose meaning this is.
"""

from __future__ import annotations

import torch

from parallelize.errors import Problem, ShapeError
from parallelize.ops.vocabulary import Vocabulary, local_ids

T = torch.Tensor


class HardTargets:
    """Ids of the full vocabulary.

    Shapes: ids [N], all valid; weight [V] or None, whole on each rank.
    """

    def __init__(self, ids: T, vocabulary: Vocabulary, smoothing: float, weight: T | None, dtype: torch.dtype):
        full, start, stop = vocabulary.full, vocabulary.start, vocabulary.stop
        self.ids, self.outside = local_ids(ids, start, stop)
        self.rest = smoothing / full
        self.weight = None if weight is None or not smoothing else weight[start:stop].to(dtype)
        own = torch.ones(ids.shape, dtype=dtype, device=ids.device) if weight is None else weight.to(dtype)[ids]
        self.own = own * (1.0 - smoothing)
        spread = float(stop - start) if weight is None else weight[start:stop].sum(dtype=dtype)
        self.spread = spread * self.rest  # mass of the smoothing on this rank
        everywhere = float(full) if weight is None else weight.sum(dtype=dtype)
        self.full_mass: T | None = self.own + everywhere * self.rest

    def rows(self, start: int, stop: int) -> HardTargets:
        """Those of some tokens."""
        part = object.__new__(HardTargets)
        part.__dict__.update(self.__dict__)
        for name in ("outside", "ids", "own", "full_mass"):
            part.__dict__[name] = self.__dict__[name][start:stop]
        return part

    def mass(self) -> T:
        """[n]: the sum of q on this rank."""
        return self.own.masked_fill(self.outside, 0.0) + self.spread

    def dot(self, z: T, highest: T) -> T:
        """[n]: the sum of q (z - highest) on this rank. Relative, or a sure model's loss would be lost in rounding."""
        if not z.shape[-1]:
            return torch.zeros_like(highest)
        own = z.gather(-1, self.ids.unsqueeze(-1)).squeeze(-1).to(highest.dtype) - highest
        out = (own * self.own).masked_fill_(self.outside, 0.0)
        if self.rest:
            relative = z - highest.unsqueeze(-1)
            out += self.rest * (relative.sum(-1) if self.weight is None else relative @ self.weight)
        return out

    def subtract_(self, out: T, scale: T) -> None:
        """out [n, V/P] -= scale [n] * q."""
        if not out.shape[-1]:
            return
        if self.rest and self.weight is None:
            out -= (scale * self.rest).unsqueeze(-1)
        elif self.rest and self.weight is not None:
            out.addr_(scale, self.weight, alpha=-self.rest)
        share = (scale * self.own).masked_fill(self.outside, 0.0).neg_()
        out.scatter_add_(-1, self.ids.unsqueeze(-1), share.unsqueeze(-1))


class SoftTargets:
    """Values of each class.

    Shapes: values [N, V/P], this rank's part; weight [V] or None, whole on each rank.
    """

    full_mass: T | None = None  # needs the other ranks

    def __init__(self, values: T, vocabulary: Vocabulary, smoothing: float, weight: T | None, dtype: torch.dtype):
        start, stop = vocabulary.start, vocabulary.stop
        self.values, self.smoothing, self.full, self.dtype = values, smoothing, vocabulary.full, dtype
        self.weight = None if weight is None else weight[start:stop].to(dtype)

    def rows(self, start: int, stop: int) -> SoftTargets:
        part = object.__new__(SoftTargets)
        part.__dict__.update(self.__dict__)
        part.values = self.values[start:stop]
        return part

    def mass(self) -> T:
        return self._q().sum(-1)

    def dot(self, z: T, highest: T) -> T:
        return (z - highest.unsqueeze(-1)).mul_(self._q()).sum(-1)

    def subtract_(self, out: T, scale: T) -> None:
        out.sub_(self._q() * scale.unsqueeze(-1))

    def _q(self) -> T:
        q = self.values.to(self.dtype)
        if self.smoothing:
            q = q * (1.0 - self.smoothing) + self.smoothing / self.full
        return q if self.weight is None else q * self.weight


Targets = HardTargets | SoftTargets


def soft_part(targets: T, lead: tuple[int, ...], vocabulary: Vocabulary) -> T:
    """This rank's part [..., V/P] of soft targets that are given whole, or already as that part.

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
