"""An embedding whose vocabulary is sharded over `tp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import check_ids, local_ids


def check_embedding(module: Any, fqn: str) -> None:
    """Raises: ModelError `unsplittable-embedding` for options that need the rows of other ranks."""
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise ModelError(
                Problem(
                    "unsplittable-embedding",
                    f"an embedding with {option} cannot be split over the vocabulary",
                    fix="use `replicate` or `embedding_colwise` for it",
                )
            )


def vocabulary_embedding(module: Any, group: Group, leave: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A forward for an embedding whose rows are divided among ranks.

    It runs the module's own forward on the ids of local rows. Other ids give zeros; the sum over ranks is the lookup.

    Args:
        leave: the conversion of the partial output; None: an all-reduce.
    """
    vocabulary_size = module.num_embeddings
    start, stop = even_interval(vocabulary_size, group.size, group.rank)
    padding = getattr(module, "padding_idx", None)
    local_padding = padding - start if padding is not None and start <= padding < stop else None

    def forward(self: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        planned, attributes = self._applied.planned, self.__dict__
        if planned.enter is not None:
            ids = planned.enter(ids)
        check_ids(ids, vocabulary_size, "ids")
        weight = attributes["weight"] = planned.weight.local(self._parameters)
        stock_padding = attributes.get("padding_idx")
        attributes["padding_idx"] = local_padding
        try:
            inside, outside = local_ids(ids, start, stop)
            if weight.shape[0] == 0:  # more ranks than rows
                out = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
            else:
                out = planned.run_stock(self, (inside, *args), kwargs).masked_fill(outside.unsqueeze(-1), 0.0)
        finally:
            attributes.pop("weight", None)
            attributes["padding_idx"] = stock_padding
        return ops.reduce_owned(out, group) if leave is None else leave(out)

    return forward
