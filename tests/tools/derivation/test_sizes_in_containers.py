"""Heads that no attribute counts by itself: in the pairs of a layer that rearranges dims, in a list, in a function that
closes over them, in a cache that all layers share."""

from __future__ import annotations

import copy
import sys
from functools import lru_cache, partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.dims.trace import record_forward
from parallelize.state.local_config import set_local
from tests.tools.derivation.own_models import LENGTH, VOCABULARY, Mlp, _Decoder, _PreNorm

T = torch.Tensor
WIDTH, HEADS, SIZE = 40, 8, 3


def in_heads(x: T, heads: int) -> T:
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


class Rearranged(nn.Module):
    """A layer of a library for dims: the sizes that it was made with are a tuple of pairs."""

    def __init__(self, **sizes: int):
        super().__init__()
        self._sizes = tuple(sizes.items())

    def forward(self, x: T) -> T:
        return in_heads(x, dict(self._sizes)["h"])


class BesideLayers(nn.Module):
    """q, k and v of 8 heads of 3, as wide as nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, HEADS * SIZE, bias=False) for _ in range(3))
        self.to_out = nn.Linear(HEADS * SIZE, WIDTH)

    def mixed(self, q: T, k: T, v: T) -> T:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))


class ByLayers(BesideLayers):
    def __init__(self) -> None:
        super().__init__()
        self.split_q, self.split_kv = Rearranged(h=HEADS), Rearranged(h=HEADS)

    def forward(self, x: T) -> T:
        return self.mixed(self.split_q(self.to_q(x)), self.split_kv(self.to_k(x)), self.split_kv(self.to_v(x)))


class ByClosure(BesideLayers):
    """The number of heads is a local variable of `__init__`."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.split = lambda x: in_heads(x, heads)

    def forward(self, x: T) -> T:
        return self.mixed(self.split(self.to_q(x)), self.split(self.to_k(x)), self.split(self.to_v(x)))


class ByPartial(ByClosure):
    def __init__(self) -> None:
        super().__init__()
        self.split = partial(in_heads, heads=HEADS)


class ByList(nn.Module):
    """One weight, split by a list in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"split": [HEADS * SIZE, HEADS * SIZE, HEADS * SIZE], "heads": HEADS}
        self.qkv, self.to_out = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: T) -> T:
        q, k, v = (in_heads(y, self.sizes["heads"]) for y in self.qkv(x).split(self.sizes["split"], dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))


def model_of(attention: type[nn.Module]) -> nn.Module:
    return _Decoder([_PreNorm(attention(), Mlp(WIDTH, 52), WIDTH) for _ in range(2)], WIDTH)


IDS = {"ids": torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))}
LOCAL = {
    ByLayers: {("attn.split_{q,kv}", "_sizes.0.1")},
    ByClosure: {("attn", "split.heads")},
    ByPartial: {("attn", "split.heads")},
    ByList: {("attn", "sizes.heads"), *(("attn", f"sizes.split.{index}") for index in range(3))},
}


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("attention", LOCAL)
def test_they_become_local(attention, tp):
    derived = derive_plan(model_of(attention), IDS, tp=tp)
    assert not derived.whole and derived.share > 0.9 and "sequence parallel" in str(derived.proof)
    assert {(item.pattern.removeprefix("blocks.*."), item.attribute) for item in derived.plan.local} == LOCAL[attention]


def test_a_local_value_is_set_in_a_copy():
    module = ByClosure()
    module.pairs, module.more = (("h", HEADS), ("d", [2, SIZE])), partial(in_heads, heads=HEADS)
    other = copy.deepcopy(module)
    stock, pairs = module.split, module.pairs
    set_local(module, {"split.heads": 4, "pairs.0.1": 2, "pairs.1.1.1": 1, "more.heads": 1})
    assert (dotted(module, "split.heads"), dotted(module, "more.heads")) == (4, 1)
    assert module.pairs == (("h", 2), ("d", [2, 1])) and pairs == (("h", HEADS), ("d", [2, SIZE]))
    x = torch.randn(1, 2, HEADS * SIZE)
    assert module.split(x).shape[1] == 4 and stock(x).shape[1] == other.split(x).shape[1] == HEADS


def test_a_cache_that_layers_share_does_not_hide_which_of_them_reads(monkeypatch):
    """`einops.rearrange` keeps the sizes that it computed for equal arguments. It need not be installed."""
    einops = ModuleType("einops.einops")
    einops._reconstruct_from_shape = lru_cache(lambda width, heads: (heads, width // heads))
    monkeypatch.setitem(sys.modules, "einops.einops", einops)

    class Cached(BesideLayers):
        def __init__(self) -> None:
            super().__init__()
            self.heads = HEADS

        def forward(self, x: T) -> T:
            sizes = einops._reconstruct_from_shape(HEADS * SIZE, self.heads)
            q, k, v = (linear(x).unflatten(2, sizes).transpose(1, 2) for linear in (self.to_q, self.to_k, self.to_v))
            return self.mixed(q, k, v)

    cached = einops._reconstruct_from_shape
    reads = record_forward(model_of(Cached), IDS).reads
    assert {read.module for read in reads if read.attribute == "heads"} == {"blocks.0.attn", "blocks.1.attn"}
    assert einops._reconstruct_from_shape is cached
