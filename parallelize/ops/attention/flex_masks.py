"""The functions and block masks of `flex_attention` for some of the heads and queries of the unsharded model.

A rank calls attention with its own heads and rows, which it numbers from 0. The functions that a model passes count
heads and queries as the unsharded model does; here they are called with those numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from parallelize.ops.attention.flex_scores import MaskMod, ScoreMod

log = logging.getLogger("parallelize")

T = torch.Tensor
Run = tuple[int, int]
"""[start, stop) of consecutive positions"""
_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@dataclass(frozen=True)
class Numbers:
    """The numbers of local heads and queries in the unsharded model.

    Attributes:
        first_head: of the first local head.
        runs: the positions of the local queries, ascending; empty: all of them.
    """

    first_head: int = 0
    runs: tuple[Run, ...] = ()

    def head(self, h: Any) -> Any:
        return h + self.first_head if self.first_head else h

    def query(self, i: Any) -> Any:
        """The position of local query i: i + the start of its run - the local queries before that run."""
        position, before, last = i, 0, 0
        for start, stop in self.runs:
            step = start - before - last
            if step:
                position = position + (step if not before else (i >= before) * step)
            before, last = before + stop - start, start - before
        return position


def renumbered_scores(score_mod: ScoreMod | None, numbers: Numbers) -> ScoreMod | None:
    """A function of local heads and queries. It has five arguments by position, by which PyTorch tells the kinds."""
    if score_mod is None:
        return None

    def local_score_mod(score: T, b: T, h: T, i: T, j: T) -> T:
        return score_mod(score, b, numbers.head(h), numbers.query(i), j)

    return local_score_mod


def renumbered_mask(mask_mod: MaskMod, numbers: Numbers) -> MaskMod:
    """A function of local heads and queries."""

    def local_mask_mod(b: T, h: T, i: T, j: T) -> T:
        return mask_mod(b, numbers.head(h), numbers.query(i), j)

    return local_mask_mod


def visible_by(block_mask: Any) -> MaskMod:
    """The function of a block mask; of one that was made of blocks alone, a function that reads them."""
    mask_mod: MaskMod = block_mask.mask_mod
    if getattr(mask_mod, "__name__", "") != "noop_mask" or not hasattr(block_mask, "to_dense"):
        return mask_mod
    blocks = block_mask.to_dense().bool()
    (batch, heads), (rows, columns) = blocks.shape[:2], block_mask.BLOCK_SIZE

    def in_blocks(b: T, h: T, i: T, j: T) -> T:
        return blocks[b % batch, h % heads, i // rows, j // columns]

    return in_blocks


@dataclass(frozen=True)
class LocalMask:
    """A block mask that is built where a kernel needs it. It has the attributes of PyTorch's that say what it masks.

    Attributes:
        shape: (sequences or 1, heads or 1, queries, keys).
        mask_mod: of local heads and queries.
        BLOCK_SIZE: of queries, and of keys.
        origin: the model's block mask, which keeps what is built of it.
        key: tells the local masks of one origin apart.
    """

    shape: tuple[int, int, int, int]
    mask_mod: MaskMod
    BLOCK_SIZE: tuple[int, int]
    origin: Any
    key: tuple[Any, ...]

    def built(self, device: torch.device) -> Any:
        """PyTorch's block mask: rows of the model's blocks where those are the blocks of local queries, else computed
        from all pairs of queries and keys, once for all layers."""
        from torch.nn.attention.flex_attention import create_block_mask

        kept = self.origin.__dict__.setdefault("_parallelize_local", {})
        if self.key not in kept:
            blocks = _rows_of_blocks(self)
            kept[self.key] = blocks or create_block_mask(
                self.mask_mod, *self.shape, device=str(device), BLOCK_SIZE=self.BLOCK_SIZE
            )
        return kept[self.key]


def local_mask(block_mask: Any, numbers: Numbers, queries: int, heads: int) -> Any:
    """The block mask of local heads and queries; None for none.

    Args:
        block_mask: of all heads, or one for all; of all queries. queries, heads: the numbers of local ones.
    """
    if block_mask is None:
        return None
    origin = getattr(block_mask, "origin", block_mask)
    batch, mask_heads, _, keys = block_mask.shape
    renumbered = renumbered_mask(visible_by(block_mask), numbers)
    shape = (batch, 1 if mask_heads == 1 else heads, queries, keys)
    key = (*getattr(block_mask, "key", ()), numbers, heads)
    return LocalMask(shape, renumbered, tuple(block_mask.BLOCK_SIZE), origin, key)


def with_all_keys(block_mask: Any, mask_mod: MaskMod, tokens: int) -> LocalMask:
    """A block mask that a forward made for its local tokens, for all tokens; `mask_mod` reads those."""
    shape = (*block_mask.shape[:2], tokens, tokens)
    origin, key = getattr(block_mask, "origin", block_mask), (*getattr(block_mask, "key", ()), "all", tokens)
    return LocalMask(shape, mask_mod, tuple(block_mask.BLOCK_SIZE), origin, key)


def of_sequences(block_mask: Any, start: int, stop: int) -> Any:
    """A block mask of some of its sequences; of one that is the same for all, itself."""
    from torch.nn.attention.flex_attention import BlockMask

    if block_mask.shape[0] == 1:
        return block_mask
    mask_mod = visible_by(block_mask)

    def of_later(b: T, h: T, i: T, j: T) -> T:
        return mask_mod(b + start, h, i, j)

    blocks: dict[str, Any] = {
        name: None if (x := getattr(block_mask, name)) is None else x[start:stop] for name in _BLOCKS
    }
    options = {"BLOCK_SIZE": block_mask.BLOCK_SIZE, "seq_lengths": block_mask.seq_lengths}
    return BlockMask.from_kv_blocks(**blocks, mask_mod=of_later, **options)


def _rows_of_blocks(mask: LocalMask) -> Any:
    """The rows of the model's blocks that are those of local queries; None where these begin or end inside a block, or
    see other heads or keys."""
    from torch.nn.attention.flex_attention import BlockMask

    (*earlier, numbers, _), origin, size = mask.key, mask.origin, mask.BLOCK_SIZE[0]
    of_heads = all(isinstance(item, int) or (isinstance(item, Numbers) and not item.runs) for item in earlier)
    whole = of_heads and mask.shape[1] == 1 and mask.shape[3] == origin.shape[3]
    edges = [edge for run in numbers.runs for edge in run] if whole else [1]
    if any(edge % size for edge in edges[:-1]) or (edges and edges[-1] % size and edges[-1] != origin.shape[2]):
        return None

    def rows(blocks: T | None) -> T | None:
        if blocks is None or not numbers.runs:
            return blocks
        return torch.cat([blocks[:, :, start // size : -(-stop // size)] for start, stop in numbers.runs], 2)

    blocks: dict[str, Any] = {name: rows(getattr(origin, name)) for name in _BLOCKS}
    lengths = (mask.shape[2], mask.shape[3])
    return BlockMask.from_kv_blocks(**blocks, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, seq_lengths=lengths)


# -- what the functions read -------------------------------------------------------------------------------------------


def reading(function: Any, other: Callable[[T], T]) -> Any:
    """A function that reads other tensors: `other` of each that it closes over, or that functions do which it closes
    over, as those of `and_masks`."""

    def replaced(value: Any) -> Any:
        if isinstance(value, T):
            return other(value)
        if isinstance(value, (tuple, list)):
            items = [replaced(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
        if isinstance(value, partial):
            args, keywords = replaced(value.args), {name: replaced(x) for name, x in value.keywords.items()}
            return partial(replaced(value.func), *args, **keywords)
        return of_function(value) if isinstance(value, FunctionType) and value.__closure__ else value

    def of_function(value: FunctionType) -> Any:
        cells = value.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        others = [replaced(content) for content in contents]
        if all(a is b for a, b in zip(contents, others, strict=True)):
            return value
        made = [
            CellType(new) if new is not old else cell for cell, old, new in zip(cells, contents, others, strict=True)
        ]
        copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(made))
        copy.__kwdefaults__ = value.__kwdefaults__
        return copy

    return replaced(function)


def closed_over(function: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """(value, names that the code of its function reads) of what a function closes over, and functions in it."""
    if isinstance(function, MethodType):
        yield function.__self__, function.__code__.co_names
    if isinstance(function, partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield value, ()
            yield from closed_over(value)
    for cell in getattr(function, "__closure__", None) or ():
        content = _content(cell)
        for value in content if isinstance(content, (tuple, list)) else (content,):
            yield value, function.__code__.co_names
            yield from closed_over(value)


_warned: set[tuple[str, str]] = set()


def warn_of_local_numbers(fqn: str, functions: Iterable[Any], what: str, local: int, full: int) -> None:
    """Warn, once, of functions that close over a rank's number of heads or tokens as a Python integer.

    Args:
        what: "heads" or "tokens". local, full: how many this rank has, and the unsharded model.
    """
    if local == full or local < 2 or (fqn, what) in _warned or torch.compiler.is_compiling():
        return
    numbers = (value for function in functions for value, _ in closed_over(function))
    if any(type(value) is int and value == local for value in numbers):
        _warned.add((fqn, what))
        log.warning(
            "%s: a function of its flex_attention reads the number %d, as many %s as this rank has of %d: a size that "
            "is read from a tensor is local, and the functions get the numbers of all %s. Take it from the config",
            *(fqn, local, what, full, what),
        )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
