"""Key/value caches of `transformers`, divided over `cp`: each rank stores its tokens.

The layers of a cache keep their classes and get other methods. A layer's `keys` and `values` are those of the tokens
that this rank stores, in the order of their positions; its length is that of the full sequence. A static layer reserves
what this rank will store of its maximum, a sliding one drops what no later token attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.base.errors import ModelError, Problem, ShapeError

T = torch.Tensor
_LAYERS = {
    f"transformers.cache_utils.{name}"
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
}
_UNUSED = "transformers.cache_utils.DummyLayer"  # of layers that store nothing
_LEAST_ROOM = 64  # a rank's memory grows by at least so many tokens


class CachedSequence:
    """What the layers of one cache have in common.

    Attributes:
        tokens: which rank stores which token.
        new: tokens of the forward that runs, or 0. splits: whether each rank computes its part of them.
        shards: the layers of this rank.
    """

    def __init__(self, layout: SequenceLayout, rank: int):
        self.rank, self.tokens = rank, CachedTokens(layout)
        self.new, self.splits = 0, False
        self.shards: list[CacheShard] = []

    @property
    def full(self) -> int:
        """Tokens of the full sequence, before the forward that runs."""
        return max((shard.full for shard in self.shards), default=0)

    def begin(self, new: int, split: SequenceLayout | None) -> None:
        """A forward starts, of so many new tokens; `split`: their layout if each rank computes a part of them."""
        if self.full == 0:
            empty = SequenceLayout(0, self.tokens.prompt.ring, self.tokens.prompt.ulysses, self.tokens.prompt.balanced)
            self.tokens = CachedTokens(empty if split is None else split)
        limit = min((shard.limit for shard in self.shards if shard.limit), default=0)
        if limit and self.full + new > limit:
            what = f"a static cache of {limit} tokens has {self.full}, and gets {new} more"
            raise ShapeError(Problem("cache-full", what, fix="a larger max_cache_len, or a dynamic cache"))
        self.new, self.splits = new, split is not None

    def end(self) -> None:
        self.new = 0


class CacheShard:
    """The tokens of one layer that this rank stores.

    Attributes:
        full: tokens of the full sequence.
        start: positions before it are not stored any more.
        limit: the maximum of `full` in a static layer; 0 for none.
    """

    def __init__(self, layer: Any, sequence: CachedSequence):
        self.layer, self.sequence = layer, sequence
        length = int(getattr(layer, "max_cache_len", 0))  # of a static layer; of a sliding one, its window
        self.window = int(getattr(layer, "sliding_window", length)) if layer.is_sliding else 0
        self.limit = 0 if self.window else length
        self.full = self.start = 0
        self._memory: list[T] = []  # keys and values, with room behind them
        self._first = self._stop = 0  # the tokens of the memory that are stored
        for name in _METHODS:
            setattr(layer, name, getattr(self, name))
        layer.is_compileable = False  # which a mask of all tokens would be made for
        sequence.shards.append(self)

    def update(self, keys: T, values: T, *_: Any, **__: Any) -> tuple[T, T]:
        """New keys and values [B, heads, n, width] of the tokens that this rank computed; returns those to attend to.

        Of a prompt over cp these are the local new ones, for the ring, else all that this rank stores.

        Raises: ModelError `outside-context`.
        """
        sequence, new = self.sequence, keys.shape[2]
        expected = sequence.tokens.count(sequence.rank, 0, sequence.new) if sequence.splits else sequence.new
        if not sequence.new or new != expected:
            what = f"a cache over cp gets {new} tokens in a forward of {sequence.new}"
            raise ModelError(Problem("outside-context", what, fix="call the model, not a part of it"))
        before, self.full = self.full, self.full + sequence.new
        if sequence.splits:
            start = self._oldest(self.full + 1)
            count = sequence.tokens.count(sequence.rank, start, self.full)
            self._store(keys[:, :, new - count :], values[:, :, new - count :], start)
            return keys, values
        owned = sequence.tokens.of_rank(sequence.rank, before, self.full)
        chosen = [position - before for run in owned for position in run]
        self._store(_select(keys, chosen), _select(values, chosen), self._oldest(before + 1))
        return self.layer.keys, self.layer.values

    def _oldest(self, length: int) -> int:
        """The first position that the last of `length` tokens, and later ones, attend to."""
        recorded = self.full == self.sequence.new and getattr(self.layer, "record_past", False)
        return max(self.start, length - self.window) if self.window and not recorded else self.start

    def _store(self, keys: T, values: T, start: int) -> None:
        """Drop tokens before `start`, and append these."""
        tokens, rank = self.sequence.tokens, self.sequence.rank
        before = self.full - self.sequence.new
        self._first += tokens.count(rank, self.start, min(start, before))
        self.start = start
        stop = self._stop + keys.shape[2]
        if not self._memory or stop > self._memory[0].shape[2]:
            self._grow(stop - self._first, keys, values)
            stop = self._stop + keys.shape[2]
        for memory, x in zip(self._memory, (keys, values), strict=True):
            memory[:, :, self._stop : stop].copy_(x)
        self._show(self._first, stop)

    def _grow(self, needed: int, keys: T, values: T) -> None:
        """Move what is stored to the beginning of larger memory."""
        room = needed + max(_LEAST_ROOM, needed // 4)
        if self.limit:
            room = self.sequence.tokens.count(self.sequence.rank, 0, self.limit)
        stored = self._stop - self._first
        grown = [x.new_empty((*x.shape[:2], room, x.shape[3])) for x in (keys, values)]
        for larger, memory in zip(grown, self._memory, strict=False):
            larger[:, :, :stored].copy_(memory[:, :, self._first : self._stop])
        self._memory, self._first, self._stop = grown, 0, stored

    def _show(self, first: int, stop: int) -> None:
        self._first, self._stop = first, stop
        self.layer.keys, self.layer.values = (memory[:, :, first:stop] for memory in self._memory)
        self.layer.is_initialized = True

    # -- the other methods of a layer -------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.full

    def get_max_length(self) -> int:
        return self.window or self.limit or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the full sequence, for a mask of all tokens; over cp none is made."""
        return self.full + query_length, 0

    def reset(self) -> None:
        self.full = self.start = self._first = self._stop = 0
        self._memory, self.layer.keys, self.layer.values, self.layer.is_initialized = [], None, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. Raises: ModelError `crop-past-window`; ValueError for a positive number, as the stock
        layer."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number of tokens: those to remove from the end")
        full = self.full + tokens_to_remove
        if self.window and self.start > max(0, full - self.window + 1):
            what = (
                f"{-tokens_to_remove} of {self.full} tokens are removed from a cache whose window begins at "
                f"{self.start}"
            )
            fix = "cache.activate_past_recording() before the forward that added them"
            raise ModelError(Problem("crop-past-window", what, fix=fix))
        removed = self.sequence.tokens.count(self.sequence.rank, max(self.start, full), self.full)
        self.full = full
        if self._memory:
            self._show(self._first, self._stop - removed)

    def reorder_cache(self, beam_idx: T) -> None:
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: T) -> None:
        self._change_rows(lambda x: x[indices])

    def _change_rows(self, change: Any) -> None:
        if self._memory:
            self._memory = [change(memory) for memory in self._memory]
            self._show(self._first, self._stop)


_METHODS = (
    *("update", "get_seq_length", "get_max_length", "get_mask_sizes", "reset", "crop"),
    *("reorder_cache", "batch_repeat_interleave", "batch_select_indices"),
)


def shard_cache(cache: Any, layout: SequenceLayout, rank: int) -> CachedSequence:
    """Let each rank of cp store its tokens of a cache, in place. A second call changes nothing.

    Args:
        cache: an empty `DynamicCache` or `StaticCache`, sliding layers included.
        layout: the layout of sequences of 0 tokens.

    Raises: ModelError `cache-over-cp` for any other cache.
    """
    sequence = getattr(cache, "sequence_over_cp", None)
    if sequence is not None:
        _check_layout(sequence, layout, rank)
        return sequence
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        raise cache_refused(f"a {type(cache).__name__} that is offloaded, or that has no list of layers,")
    for layer in layers:
        _check_layer(layer)
    sequence = CachedSequence(layout, rank)
    for layer in layers:
        _shard_layer(layer, sequence)
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = partial(_new_layer, cache.layer_class_to_replicate, sequence)
    cache.sequence_over_cp = sequence
    return sequence


def cache_refused(what: str) -> ModelError:
    fix = (
        "an empty DynamicCache or StaticCache of transformers, a new one for each model, under torch.no_grad(); or a "
        "mesh without cp"
    )
    return ModelError(Problem("cache-over-cp", f"{what} is not supported over cp", fix=fix))


def _check_layout(sequence: CachedSequence, layout: SequenceLayout, rank: int) -> None:
    prompt = sequence.tokens.prompt
    if (prompt.ring, prompt.ulysses, sequence.rank) != (layout.ring, layout.ulysses, rank):
        raise cache_refused("a cache that was filled by a model on another mesh")


def _new_layer(make: Any, sequence: CachedSequence) -> Any:
    layer = make()
    _check_layer(layer)
    _shard_layer(layer, sequence)
    return layer


def _shard_layer(layer: Any, sequence: CachedSequence) -> None:
    if _class_name(layer) != _UNUSED:
        CacheShard(layer, sequence)


def _check_layer(layer: Any) -> None:
    if _class_name(layer) not in (*_LAYERS, _UNUSED):
        raise cache_refused(f"a cache with a {type(layer).__name__}")
    if getattr(layer, "is_initialized", False):
        raise cache_refused("a cache that stores all tokens already")


def _class_name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__name__}"


def _select(x: T, chosen: list[int]) -> T:
    """Some tokens of [B, heads, n, width]."""
    if len(chosen) == x.shape[2]:
        return x
    return x[:, :, chosen] if chosen else x[:, :, :0]


# -- cached tokens ---------------------------------------------------------------------------------------------------
# Which tokens of a cached sequence each rank of `cp` stores. Pure arithmetic, torch-free. The tokens of a prompt that
# was computed over `cp` are stored where they were computed. Every token after it is computed by all ranks, and
# stored by one, by turns. So each rank stores 1/cp of a sequence, to within a token per chunk of the prompt, and the
# rank of a token is a function of its position alone: tokens that are removed and computed again go where they were.


@dataclass(frozen=True)
class CachedTokens:
    """The tokens of a sequence over the ranks of cp.

    Args:
        prompt: the layout of the tokens that were computed over cp; of 0 tokens if none were.
    """

    prompt: SequenceLayout

    def of_rank(self, rank: int, start: int, stop: int) -> tuple[range, ...]:
        """The positions from `start` to `stop` - 1 that a rank stores, ascending."""
        runs = [range(max(start, low), min(stop, high)) for low, high in self.prompt.of_rank(rank)]
        first, size = max(start, self.prompt.full), self.prompt.size
        runs.append(range(first + (rank - first) % size, stop, size))
        return tuple(run for run in runs if run)

    def count(self, rank: int, start: int, stop: int) -> int:
        """The number of these positions."""
        return sum(map(len, self.of_rank(rank, start, stop)))


def last_positions(runs: tuple[range, ...], count: int) -> tuple[range, ...]:
    """The last `count` of these positions."""
    last: list[range] = []
    for run in reversed(runs):
        part = run[max(0, len(run) - count) :] if count else run[:0]
        count -= len(part)
        if part:
            last.insert(0, part)
    return tuple(last)
