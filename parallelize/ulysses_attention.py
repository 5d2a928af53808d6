"""The style `ulysses`: attention of a stock module inside the sequence-parallel region, its rows traded for heads over `tp`.

The module's projections are whole and see this rank's rows; `scaled_dot_product_attention` sees all rows of this rank's heads,
so a mask or a causal flag that the model made for the whole sequence is right as it is. What a decoder computes outside the
region for all rows (rotary tables) is named in the rule, `ulysses(position_embeddings)`, and cut to this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.forwards import argument_of, convert_argument
from parallelize.layout import even_interval
from parallelize.ops import collectives as ops
from parallelize.ops.ulysses import HeadCut, to_heads, to_rows
from parallelize.region import Region

T = torch.Tensor


def ulysses_attention(module: nn.Module, region: Region, split: tuple[str, ...]) -> Callable:
    """A forward that trades rows for heads where the module calls `scaled_dot_product_attention`.

    Raises: ModelError `no-such-argument`; from the forward, `no-attention-call`, `wrong-rows`.
    """
    hidden, places = argument_of(module, ""), [argument_of(module, name) for name in split]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        planned = self.__dict__["_planned"]
        x = args[0] if args else kwargs[hidden[1]]
        if not region.gathers(x, region.dim):  # one token is decoded: everything is whole
            return planned.run_stock(self, args, kwargs)
        full = region.rows(x, region.dim)

        def own(value: T) -> T:
            whole = isinstance(value, T) and value.ndim > region.dim and value.shape[region.dim] == full
            return ops.split(value, region.group, region.dim, padded=True) if whole else value

        for place in places:
            args, kwargs = convert_argument(lambda value: private.tree_map(own, value), place, args, kwargs)
        with _Traded(self, region, full) as mode:
            out = planned.run_stock(self, args, kwargs)
        mode.check()
        return out

    return forward


def check_ulysses(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `attention-by-hand` where a model of `transformers` is set to attention without PyTorch's function."""
    way = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if way != "sdpa":
        what = f"{fqn} attends by {way!r}, which never calls F.scaled_dot_product_attention"
        raise ModelError(Problem("attention-by-hand", what, fix='build the model with attn_implementation="sdpa"'))


class _Traded(TorchFunctionMode):
    """While it is on, `scaled_dot_product_attention` works on heads instead of rows."""

    def __init__(self, module: nn.Module, region: Region, full: int):
        super().__init__()
        self.module, self.group, self.full = type(module).__name__, region.group, full
        self.called = False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.called = True
        with private.plain_calls():
            return self._attend(*args, **(kwargs or {}))

    def _attend(self, query: T, key: T, value: T, attn_mask: T | None = None, *rest: Any, **others: Any) -> T:
        size, padded = self.group.size, query.shape[2]
        if query.ndim != 4 or padded != -(-self.full // size) or key.shape[2] != padded:
            what = f"a {self.module} attends with {list(query.shape)} to {list(key.shape)}; {self.full} rows lie over {size} ranks"
            raise ModelError(Problem("wrong-rows", what, fix="self-attention of [batch, heads, rows, width]"))
        cuts = [even_interval(self.full, size, rank) for rank in range(size)]
        rows = [stop - start for start, stop in cuts]
        heads = HeadCut.of(query.shape[1], key.shape[1], size)
        query, key, value = (x.narrow(2, 0, rows[self.group.rank]) for x in (query, key, value))
        q, k, v = to_heads(query, key, value, self.group, heads, rows)
        if not q.shape[1]:  # fewer heads than ranks: backward has to pass all the same
            out = q.new_zeros((*q.shape[:3], v.shape[3])) + (q.sum() + k.sum() + v.sum())
        else:
            mask = _of_heads(attn_mask, query.shape[1], *heads.queries[self.group.rank])
            shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
            others = {name: given for name, given in others.items() if name != "enable_gqa"}
            out = F.scaled_dot_product_attention(q, k, v, mask, *rest, **others, **shared)
        return ops.pad_to(to_rows(out, self.group, heads, rows), 2, padded)

    def check(self) -> None:
        if not self.called:
            what = f"a {self.module} under `ulysses` never calls F.scaled_dot_product_attention"
            fix = "the sdpa attention of transformers, or a rule on the module that does call it"
            raise ModelError(Problem("no-attention-call", what, fix=fix))


def _of_heads(mask: T | None, num_heads: int, start: int, stop: int) -> T | None:
    """A mask for own heads: [.., heads, rows, rows] where it has a head for each."""
    if mask is None or mask.ndim < 3 or mask.shape[-3] != num_heads or num_heads == 1:
        return mask
    return mask.narrow(-3, start, stop - start)
