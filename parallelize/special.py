"""Styles whose compute is not just the stock forward on a shard: vocabulary embeddings, and norms across heads."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from parallelize.errors import ModelError, Problem
from parallelize.groups import Group
from parallelize.layout import even_interval
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary import check_ids, local_ids


def check_embedding(module: Any, fqn: str) -> None:
    """Raises: ModelError `unsplittable-embedding` for options that look at rows of other ranks."""
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise ModelError(
                Problem(
                    "unsplittable-embedding",
                    f"an embedding with {option} cannot be split over the vocabulary",
                    fix="use `replicate` or `embedding_colwise` for it",
                )
            )


def vocabulary_embedding(module: Any, group: Group, leave: Callable | None = None) -> Callable:
    """The module's own forward on ids of local rows; other rows give zeros, and the sum over ranks is the lookup.

    `leave`: the output edge, where it is not an all-reduce.
    """
    rows = module.num_embeddings
    start, stop = even_interval(rows, group.size, group.rank)
    padding = getattr(module, "padding_idx", None)
    local_padding = padding - start if padding is not None and start <= padding < stop else None

    def forward(self: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        planned, shown = self._planned, self.__dict__
        if planned.enter is not None:
            ids = planned.enter(ids)
        check_ids(ids, rows, "ids")
        weight = shown["weight"] = planned.weight.local(self._parameters)
        had = shown.get("padding_idx")
        shown["padding_idx"] = local_padding
        try:
            inside, outside = local_ids(ids, start, stop)
            if weight.shape[0] == 0:  # more ranks than rows
                out = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
            else:
                out = planned.run_stock(self, (inside, *args), kwargs).masked_fill(outside.unsqueeze(-1), 0.0)
        finally:
            shown.pop("weight", None)
            shown["padding_idx"] = had
        return ops.reduce_owned(out, group) if leave is None else leave(out)

    return forward


@lru_cache(maxsize=4096)
def reads_of_children(cls: Any) -> tuple[tuple[str, str], ...]:
    """(child, parameter) pairs whose values the class's own code uses directly: `self.conv.weight` handed to a function.

    Found in the source text; asking a parameter for its dtype, device or shape is fine.
    """
    found = []
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and name not in _NOT_FORWARD:
            try:
                found += _CHILD_READ.findall(inspect.getsource(member))
            except OSError:  # no source to read
                continue
    return tuple(dict.fromkeys(found))


_NOT_FORWARD = {"__init__", "reset_parameters", "_init_weights", "tie_weights", "extra_repr", "_tie_weights"}
_CHILD_READ = re.compile(
    r"self\.(\w+)\.(weight|bias)\b(?!\s*\.(?:dtype|device|shape|size|ndim|requires_grad)|\s*(?:is|==|=))"
)


def check_rms_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-rms-norm` where the module computes something else (tried on random numbers)."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        x = torch.randn(3, trial.weight.shape[0], generator=generator)
        want = trial(x)
    got = _rms_norm(x, trial.weight, _eps(module, x.dtype), x.shape[-1], None)
    if want.shape != got.shape or (want - got).abs().max() > 1e-5 * want.abs().max():
        raise ModelError(
            Problem(
                "not-rms-norm", f"{type(module).__name__} is not x * rsqrt(mean(x^2) + eps) * weight", fix="`replicate`"
            )
        )


def sharded_rms_norm(group: Group) -> Callable:
    """RMSNorm over a width that is split over the ranks: one value a token is summed, forward and backward."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self._planned.weight.local(self._parameters)
        return _rms_norm(x, weight, _eps(self, x.dtype), x.shape[-1] * group.size, group)

    return forward


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, width: int, group: Group | None) -> torch.Tensor:
    """[.., n] local of `width` in all ranks. The mean square is taken in float32 at least."""
    work = x if x.dtype == torch.float64 else x.float()
    square = work.pow(2).sum(-1, keepdim=True)
    if group is not None:
        square = ops.sum_both(square, group)
    return (weight * (work * torch.rsqrt(square / width + eps))).to(x.dtype)


def _eps(module: Any, dtype: torch.dtype) -> float:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return torch.finfo(dtype).eps if eps is None else eps
