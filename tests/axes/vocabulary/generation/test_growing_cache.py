"""A cache that grows in place shows what a concatenating one does, also where something else has changed it."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize.axes.vocabulary.generation.caches import reserve

cache_utils = pytest.importorskip("transformers.cache_utils")


def new(tokens: int, rows: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, tokens, 4, dtype=dtype), torch.randn(rows, 3, tokens, 4, dtype=dtype)


def pair() -> tuple:
    """(a cache that grows in place up to 12 tokens, a stock one), each with 5 tokens in 2 layers."""
    stock = cache_utils.DynamicCache()
    for index in range(2):
        stock.update(*new(5), index)
    growing = copy.deepcopy(stock)
    reserve(growing, 12)
    return growing, stock


def same(growing, stock) -> bool:
    layers = zip(growing.layers, stock.layers, strict=True)
    return growing.get_seq_length() == stock.get_seq_length() and all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in layers
    )


def test_tokens_one_by_one_and_several():
    growing, stock = pair()
    memory = set()
    for tokens in (1, 1, 2, 1, 1, 1, 4):  # the last ones are more than was reserved
        for index in range(2):
            added = new(tokens)
            pairs = zip(growing.update(*added, index), stock.update(*added, index), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        memory.add(growing.layers[0].keys.data_ptr())
        assert same(growing, stock)
    assert len(memory) <= 3  # room for 12, and then for more


CHANGES = {
    "crop": lambda cache: cache.crop(-2),
    "reset": lambda cache: cache.reset(),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_somebody_has_changed(change):
    growing, stock = pair()
    for _ in range(2):
        for cache in (growing, stock):
            CHANGES[change](cache)
        rows = 2 if stock.layers[0].keys is None else len(stock.layers[0].keys)
        for _ in range(2):
            added = new(1, rows)
            for index in range(2):
                growing.update(*added, index)
                stock.update(*added, index)
        assert same(growing, stock)


def test_other_layers_are_left_alone():
    sliding = cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    sliding.update(*new(3))
    empty = cache_utils.DynamicLayer()
    cache = cache_utils.DynamicCache()
    cache.layers = [sliding, empty]
    reserve(cache, 9)
    reserve(None, 9)
    assert "update" not in vars(sliding) and "update" not in vars(empty)
