"""Dropout of attention weights whose masks are drawn where they are used, block by block, and again in backward.

Whether a weight is dropped is a function of a key and of the weight's index in the full [batch, heads, S, S]. So every
sharding of tokens and heads draws the masks of one rank, and no mask is stored.

    forward out = sum of p keep / (1 - rate) v, by the log-sums of all p: dropped weights count in them backward dv +=
    (p keep)^T grad', ds = p (keep grad' v^T - delta), grad' = grad / (1 - rate), delta = sum(grad out)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from parallelize.ops.random.counter import Key, block_size, keep_mask

T = torch.Tensor


@dataclass(frozen=True)
class WeightDropout:
    """Which weights of one call of attention are dropped.

    Attributes:
        key: of the call, the same on every rank.
        rate: the probability with which a weight is dropped.
        first_row: the row of the global batch that is row 0 here.
        first_head: the head of the full model that is head 0 here.
        num_heads: heads of the full model.
    """

    key: Key
    rate: float
    first_row: int
    first_head: int
    num_heads: int

    @property
    def scale(self) -> float:
        """The factor of weights that are not dropped."""
        return 1.0 / (1.0 - self.rate) if self.rate < 1.0 else 0.0

    def from_head(self, head: int) -> WeightDropout:
        """The same where this head here is head 0."""
        return replace(self, first_head=self.first_head + head)

    def flat(self) -> list[int]:
        """Everything but the rate, as an argument of an op."""
        return [*self.key, self.first_row, self.first_head, self.num_heads]

    @staticmethod
    def of_flat(rate: float, numbers: list[int]) -> WeightDropout | None:
        """The dropout of an op's arguments, or None."""
        if not numbers:
            return None
        start, late, first_row, first_head, num_heads = numbers
        return WeightDropout(Key(start, late), rate, first_row, first_head, num_heads)


@dataclass(frozen=True)
class TileDropout:
    """The dropout of one tile.

    Attributes:
        queries, keys: the positions of the tile's rows in the full sequence, int64 [S] and [S'].
        full: the number of tokens of the full sequence.
    """

    dropout: WeightDropout
    queries: T
    keys: T
    full: int

    def keep(self, kv_heads: int, group: int, heads: slice, rows: slice, columns: slice) -> T:
        """True for weights that are not dropped, [heads, group x rows, columns].

        Args:
            kv_heads: key heads of one sample.
            group: query heads of each key head.
            heads: key heads, counted over all samples. rows, columns: of the tile.
        """
        firsts = self._firsts(kv_heads, group, heads, rows)
        keys = self.keys[columns]
        out = torch.empty((len(firsts), len(keys)), dtype=torch.bool, device=keys.device)
        step = max(1, block_size(keys.device) // max(1, len(keys)))
        for start in range(0, len(firsts), step):  # temporaries of 16 bytes a weight
            index = firsts[start : start + step].unsqueeze(-1) + keys
            out[start : start + step] = keep_mask(self.dropout.key, index, self.dropout.rate)
        return out.view(heads.stop - heads.start, -1, len(keys))

    def _firsts(self, kv_heads: int, group: int, heads: slice, rows: slice) -> T:
        """The index of key 0's weight of each query row, [heads x group x rows]."""
        drop, device = self.dropout, self.keys.device
        key_heads = torch.arange(heads.start, heads.stop, device=device)
        sample, key_head = key_heads // kv_heads, key_heads % kv_heads
        of_samples = (drop.first_row + sample) * drop.num_heads + drop.first_head + key_head * group
        of_heads = of_samples.unsqueeze(-1) + torch.arange(group, device=device)
        return ((of_heads.unsqueeze(-1) * self.full + self.queries[rows]) * self.full).flatten()
