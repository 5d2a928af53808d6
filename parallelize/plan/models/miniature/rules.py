"""How small sizes are chosen: the rules that a purpose asks for, and their arithmetic of heads, experts and widths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

VOCABULARIES = (67, 71, 73)  # primes: no tp size divides them
_GROUP = 3  # query heads for each key/value head, where a config is for a family
_MANY_HEADS = 64
_MAX_GROUPS = 4
MAX_CHOICES = 3
_MANY_EXPERTS = 12
_RATIO = 0.25  # of widths in a part without heads
_STEP = 8
_GRAIN = 4  # channels: matmuls of grouped experts read 16 bytes at a time
_SMALLEST = 48  # widths below this stay
_NARROW_EXPERT = 20


@dataclass(frozen=True)
class Rules:
    """What a small config is for.

    Attributes:
        tp, stages, ep, etp: over how many ranks heads and widths, layers, experts, and each of them are split.
        ratios_kept: whether heads stay in the ratio of the real model, so that a small model fails on a mesh on which
            the real one would. False: a plan is for a family, so that there are three query heads for each key/value
            head, and counts that tp divides.
        distinct: whether sizes that no product ties are unequal, so that each tells its field. False: widths stay in
            proportion, so that a multiple of another width stays one.
        even: whether tp divides the vocabulary.
        head_width: channels of a head; None: few, as many as its rotated parts need; 0: those of the config.
        only_layers: whether nothing changes but the number of layers.
    """

    tp: int = 2
    stages: int = 1
    ep: int = 1
    etp: int = 1
    even: bool = False
    ratios_kept: bool = True
    distinct: bool = True
    head_width: int | None = None
    only_layers: bool = False

    @property
    def vocabulary(self) -> int:
        return -(-VOCABULARIES[0] // self.tp) * self.tp if self.even else undivided(VOCABULARIES, self.tp)

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """(heads, key/value heads) of a small model. kv_heads: 0 where the config does not count them."""
        if not self.ratios_kept and kv_heads:
            return 2 * self.tp * _GROUP, 2 * self.tp
        if not self.ratios_kept and heads % (2 * self.tp):
            return 4 * self.tp, 4 * self.tp
        return fewer_heads(heads, kv_heads or heads, self.tp)

    def experts(self, count: int, groups: int) -> int:
        """A number of experts that `ep` and the groups divide where they divide `count`, with two experts for each
        rank or group."""
        if count <= _MANY_EXPERTS:
            return count
        ep, groups = self.ep, few_groups(groups)
        few = lcm(groups, ep if count % ep == 0 else 1)
        per_rank = 2 if count >= 2 * max(few, ep) else 1
        few *= -(-max(per_rank * ep, 2 * groups, 2 * MAX_CHOICES) // few)
        few += groups if count % ep and few % ep == 0 else 0
        return min(count, few)


def fewer_heads(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """(heads, key/value heads) with the ratio of the real ones. tp divides them where it divides the real ones."""
    ratio = max(1, heads // kv_heads)
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        return heads, kv_heads  # the real model cannot be sharded; this one must fail in the same way
    if kv_heads < tp:
        few = kv_heads
        if heads > _MANY_HEADS:
            ratio = next(r for r in range(2, ratio + 1) if few * r % tp == 0)
        return few * ratio, few
    few = tp * min(2, kv_heads // tp)  # two for each rank where the real model has at least two
    return few * min(ratio, 4 if tp < 8 else 2), few


def few_groups(groups: int) -> int:
    """Groups of experts of a small model."""
    return min(groups, _MAX_GROUPS)


def undivided(sizes: tuple[int, ...], tp: int) -> int:
    """The first of these sizes, or of the next odd number, that tp does not divide."""
    return next(size for size in (*sizes, sizes[-1] + 2) if size % tp or tp == 1)


class Widths:
    """What each width of a config became, in all of its parts: equal ones stay equal.

    ratio: of the part at hand, how many times its real widths its small ones are.
    """

    def __init__(self, rules: Rules):
        self.rules, self.ratio = rules, _RATIO
        self.new: dict[int, int] = {}
        self.inner: dict[int, int] = {}  # of MLPs, which equal no other width
        self.counts: dict[tuple[int, int], tuple[int, int]] = {}  # of heads and key/value heads
        self.hidden, self.few = 1, 1

    def begin(self, hidden: int, few: int) -> None:
        """Begin a part whose hidden size becomes `few`."""
        self.new.setdefault(hidden, few)
        self.hidden, self.few, self.ratio = hidden, few, few / hidden

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """As `Rules.heads`; of a family with distinct sizes, other counts than those of parts with other heads."""
        few, few_kv = self.rules.heads(heads, kv_heads)
        step = 2 * self.rules.tp
        while self.rules.distinct and not self.rules.ratios_kept and (heads, kv_heads) not in self.counts:
            taken = {count for counts in self.counts.values() for count in counts}
            if not taken & {few, few_kv}:
                break
            few, few_kv = (few + _GROUP * step, few_kv + step) if kv_heads else (few + step, few + step)
        return self.counts.setdefault((heads, kv_heads), (few, few_kv))

    def is_taken(self, width: int) -> bool:
        return width in self.new.values()

    def __call__(self, width: int) -> int:
        """The new width: a multiple or a part of the hidden size where the real one is, and else of a multiple of 8,
        which tp divides where it divides the real one."""
        if width < _SMALLEST:
            return width
        if width not in self.new:
            self.new[width] = self._tied(width) or self._free(width)
        return self.new[width]

    def _tied(self, width: int) -> int:
        """The width as a multiple of the hidden size, or a part of it; 0: it is none."""
        if self.hidden == 1:
            return 0
        if width % self.hidden == 0:
            return width // self.hidden * self.few
        few, rest = divmod(self.few * width, self.hidden)
        return few if self.hidden % width == 0 and not rest and few >= _STEP else 0

    def _free(self, width: int) -> int:
        few, tp = max(2, round(width * self.ratio / _STEP)) * _STEP, self.rules.tp
        while self.is_taken(few) or (few % tp == 0) > (width % tp == 0):
            few += _STEP if width % tp == 0 or _STEP % tp else _STEP // 2 + 1
        return few if width % tp else lcm(few, tp)

    def mlp(self, width: int, beside: int) -> int:
        """The width of an MLP, beside this number of channels: tp divides it where it divides the real one."""
        tp = self.rules.tp
        if not self.rules.distinct:
            return self(width)
        if width not in self.inner:
            step = lcm(tp, _GRAIN)
            few = step * (beside // step // 2 * 2 + 3) + self._uneven(width, tp)
            while few in self.inner.values() or self.is_taken(few):
                few += 2 * step
            self.inner[width] = few
        return self.inner[width]

    def _uneven(self, width: int, ranks: int) -> int:
        return 1 if self.rules.ratios_kept and width % ranks else 0

    def expert(self, width: int, others: Iterable[int]) -> int:
        """The width of an expert, which no other size equals."""
        if width <= _SMALLEST or not self.rules.distinct:
            return self(width)
        ranks = lcm(self.rules.tp, self.rules.etp)
        divisor, used = lcm(ranks, _GRAIN), {*others, *self.inner.values()}
        if width not in self.inner:
            few = -(-_NARROW_EXPERT // divisor) * divisor + self._uneven(width, ranks)
            while few in used:
                few += divisor
            self.inner[width] = few
        return self.inner[width]
