"""Where dropout happens in a model, and by what it is replaced.

`nn.Dropout` modules get a forward of their own. Functional dropout and attention dropout are met by a function mode, which
is on only while modules run whose code has them. Both find out once, at a site's first call, how activations lie there: by
the last planned module that ran before it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.layout import Layout
from parallelize.randomness.dropout import attention, drop, mask
from parallelize.randomness.position import Clock
from parallelize.randomness.where import Spread, columns_of, unplaceable


@dataclass(frozen=True)
class Columns:
    """The output of a column linear that stays split: its layout, and the widest split output beside it."""

    layout: Layout
    widest: int


class Sites:
    """All dropout of one model: the clock, how activations lie, and what runs now.

    Args:
        rank, size: of the tp group.
        region: the sequence-parallel region, or None.
    """

    def __init__(self, clock: Clock, rank: int = 0, size: int = 1, region: Any = None):
        self.clock, self.rank, self.size, self.region = clock, rank, size, region
        self.spreads: dict[str, Spread] = {}
        self.last: Columns | None = None  # of the last planned module, None where its output is not split
        self.scopes: list[Scope] = []
        self.mode = _Functions(self)
        self.watch: Watch | None = None
        self.watched = False

    def __deepcopy__(self, memo: dict) -> Sites:
        copy = memo[id(self)] = Sites(deepcopy(self.clock, memo), self.rank, self.size, deepcopy(self.region, memo))
        copy.spreads.update(self.spreads)
        return copy

    # -- the first forward ----------------------------------------------------------------------------------------

    def watch_first(self, training: bool) -> None:
        """In the first forward in training, refuse dropout that no module's code gave away."""
        if training and not self.watched:
            self.watched, self.watch = True, Watch(self)
            self.watch.__enter__()

    def unwatch(self) -> None:
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch.__exit__(None, None, None)

    # -- what replaces dropout ------------------------------------------------------------------------------------

    def dropped(self, x: torch.Tensor, p: float, site: str, inplace: bool) -> torch.Tensor:
        with private.plain_calls():
            keep = self._mask(x.shape, x.device, p, site, self._of_activation)
            return drop(x, keep, p, inplace)

    def attended(self, site: str, query: Any, key: Any, value: Any, attn_mask: Any, p: float, rest: dict) -> Any:
        """Attention with a mask over the weights [batch, heads, query tokens, key tokens]."""
        with private.plain_calls():
            if query.ndim != 4:
                raise unplaceable(f"attention of shape {list(query.shape)}", "call it with [batch, heads, ..]", site)
            shape = torch.Size((*query.shape[:-1], key.shape[-2]))
            keep = self._mask(shape, query.device, p, site, self._of_attention)
            return attention(query, key, value, keep, p, attn_mask, **rest)

    def _mask(self, shape: torch.Size, device: torch.device, p: float, site: str, find: Callable) -> torch.Tensor:
        key, forward = self.clock.call(site)
        spread = self.spreads.get(site)
        if spread is None:
            spread = self.spreads[site] = find(shape, site)
        if p >= 1.0:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        if spread.kind == "sequence" and private.backward_id() == -1:
            forward.tokens = self.region.inside
            if forward.tokens is None:  # one token is decoded: nothing is split
                spread = Spread("whole")
        at = forward.position
        where = spread.place(shape, (at.batch_offset, at.batch_size), forward.tokens, device)
        return mask(shape, where, key, p)

    # -- how activations lie --------------------------------------------------------------------------------------

    def _of_activation(self, shape: torch.Size, site: str) -> Spread:
        if self.size == 1:
            return Spread("whole")
        if self.last is None:
            split = self.region is not None and self.region.inside is not None
            return Spread("sequence", self.rank, self.size) if split else Spread("whole")
        found = columns_of(self.last.layout, self.rank, shape[-1])
        if found is not None:
            return found
        if len(shape) == 4 and shape[2] == shape[3]:  # attention weights of a forward that computes them itself
            return self._of_attention(shape, site)
        raise unplaceable(
            f"an activation of shape {list(shape)} after a column linear of {self.last.widest} local features",
            "put dropout on the linear's own output, on attention weights, or after the row linear",
            site,
        )

    def _of_attention(self, shape: torch.Size, site: str) -> Spread:
        if self.size == 1 or self.last is None:
            if self.region is not None and self.region.inside is not None:
                raise unplaceable("attention on a sequence shard", "give the block a `gather` rule", site)
            return Spread("whole")
        if self.last.widest % shape[1]:
            raise unplaceable(
                f"attention over {shape[1]} heads after column linears of {self.last.widest} local features",
                "split whole heads: `colwise(heads)`",
                site,
            )
        return Spread("heads", self.rank, self.size)


class Scope:
    """One call of a module whose code drops by function: its sites are numbered within the call."""

    __slots__ = ("fqn", "number")

    def __init__(self, fqn: str):
        self.fqn, self.number = fqn, 0

    def site(self) -> str:
        self.number += 1
        return f"{self.fqn}#{self.number - 1}"


# -- functions ----------------------------------------------------------------------------------------------------------


class _Functions(TorchFunctionMode):
    """Meets calls of functional dropout while a module with such calls runs."""

    def __init__(self, sites: Sites):
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        serve = _SERVED.get(func)
        kwargs = kwargs or {}
        return func(*args, **kwargs) if serve is None else serve(self.sites, func, args, kwargs)


def _functional_dropout(sites: Sites, func: Any, args: tuple, kwargs: dict) -> Any:
    given = _bound(("input", "p", "training", "inplace"), (None, 0.5, True, False), args, kwargs)
    if not given["training"] or not given["p"]:
        return func(*args, **kwargs)
    return sites.dropped(given["input"], given["p"], sites.scopes[-1].site(), given["inplace"])


def _torch_dropout(sites: Sites, func: Any, args: tuple, kwargs: dict) -> Any:
    given = _bound(("input", "p", "train"), (None, 0.5, True), args, kwargs)
    if not given["train"] or not given["p"]:
        return func(*args, **kwargs)
    return sites.dropped(given["input"], given["p"], sites.scopes[-1].site(), func is torch.dropout_)


def _attention(sites: Sites, func: Any, args: tuple, kwargs: dict) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = _bound(names, (None, None, None, None, 0.0, False, None, False), args, kwargs)
    p = given.pop("dropout_p")
    if not p:
        return func(*args, **kwargs)
    query, key, value, attn_mask = (given.pop(name) for name in names[:4])
    return sites.attended(sites.scopes[-1].site(), query, key, value, attn_mask, p, given)


def _refused(sites: Sites, func: Any, args: tuple, kwargs: dict) -> Any:
    name = func.__name__
    training = kwargs.get("training", kwargs.get("train", True))
    p = kwargs.get("dropout_p", kwargs.get("p", 0.5))
    if name == "multi_head_attention_forward":
        p, training = args[12] if len(args) > 12 else p, args[15] if len(args) > 15 else training
    if not training or not p:
        return func(*args, **kwargs)
    raise refused_function(name, sites.scopes[-1].fqn)


def refused_function(name: str, where: str) -> ModelError:
    return unplaceable(f"{name}", "use nn.Dropout, F.dropout, or scaled_dot_product_attention(dropout_p=...)", where)


def _bound(names: tuple[str, ...], defaults: tuple, args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(names, defaults, strict=True)), **dict(zip(names, args, strict=False)), **kwargs}


REFUSED = (
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    torch.native_dropout,
    torch.bernoulli,
    torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_,
)
_SERVED: dict[Any, Callable[[Sites, Any, tuple, dict], Any]] = {
    F.dropout: _functional_dropout,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(REFUSED, _refused),
}


# -- modules ------------------------------------------------------------------------------------------------------------


class Watch(TorchFunctionMode):
    """The first forward in training: dropout that no module's code gave away is an error, not a surprise."""

    def __init__(self, sites: Sites):
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SERVED and not self.sites.scopes and self._drops(func, args, kwargs):
            raise unplaceable(
                f"{func.__name__}, called by a function outside of the modules' own code",
                "call it from the forward of a module, or use nn.Dropout",
            )
        return func(*args, **kwargs)

    def _drops(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if func is F.scaled_dot_product_attention:
            return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        given = _bound(("input", "p", "training"), (None, 0.5, True), args[:3], kwargs)
        return bool(given.get("p")) and bool(given.get("training", given.get("train", True)))


def dropout_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """`nn.Dropout.forward` with the global mask."""
    if not self.training or self.p == 0.0:
        return input
    sites, fqn = self.__dict__["_parallelize_dropout"]
    return sites.dropped(input, self.p, fqn, self.inplace)


def scoped_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module whose code drops by function, with those calls met while it trains at a rate above zero."""
    sites, fqn, stock, rates = self.__dict__["_parallelize_dropout"]
    if stock is None:
        stock = MethodType(type(self).forward, self)
    if not self.training or (rates and not any(holder.__dict__[name] for holder, name in rates)):
        return stock(*args, **kwargs)
    sites.scopes.append(Scope(fqn))
    try:
        if len(sites.scopes) > 1:  # the mode is on
            return stock(*args, **kwargs)
        with sites.mode:
            return stock(*args, **kwargs)
    finally:
        sites.scopes.pop()


def rates_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a module keeps its rates: numbers called something with `drop`, of its own, and those of its `nn.Dropout`s.

    While all of them are zero nothing drops, and the function mode, which costs 1 to 2 us a torch call, stays off.
    """
    own = [
        (module, name) for name, value in vars(module).items() if "drop" in name.lower() and type(value) in (int, float)
    ]
    return own + [(child, "p") for child in module.children() if isinstance(child, nn.Dropout)]


def refused_modules(module: nn.Module) -> list[Problem]:
    """Modules that drop in a way that has no global mask."""
    found = []
    for fqn, inner in module.named_modules():
        p = getattr(inner, "p", 0.0) if isinstance(inner, _REFUSED_MODULES) else 0.0
        if isinstance(inner, (nn.MultiheadAttention, nn.RNNBase)):
            p = inner.dropout
        if isinstance(inner, nn.RReLU) or p:
            found += list(refused_function(f"{type(inner).__name__}", fqn).problems)
    return found


_REFUSED_MODULES = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
