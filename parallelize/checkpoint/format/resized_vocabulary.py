"""Weights and optimizer states of another vocabulary size: the tokens that a checkpoint and a model both have are read.

Tokens that the model alone has keep their values, and their optimizer states begin at zero. Those that the checkpoint
alone has are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from parallelize.base.errors import CheckpointError, Problem
from parallelize.plan.models.wrapped_models import stock_model

Shape = tuple[int, ...]


class ResizedVocabulary(NamedTuple):
    """The number of tokens that a checkpoint has, and that the model has."""

    saved: int
    own: int

    def explains(self, saved: Shape, own: Shape) -> bool:
        """Whether one dim alone differs between two shapes, by these numbers."""
        differing = [pair for pair in zip(saved, own, strict=False) if pair[0] != pair[1]]
        return len(saved) == len(own) and differing == [(self.saved, self.own)]

    @property
    def keeps_tokens(self) -> bool:
        """Whether the model has tokens that the checkpoint does not have."""
        return self.own > self.saved

    def resized(self, value: torch.Tensor) -> torch.Tensor:
        """A state with an entry for each token of the checkpoint, with one for each of the model."""
        for dim in [dim for dim, size in enumerate(value.shape) if size == self.saved]:
            kept = value.narrow(dim, 0, min(self.saved, self.own))
            more = list(value.shape)
            more[dim] = max(0, self.own - self.saved)
            value = torch.cat([kept, value.new_zeros(more)], dim)
        return value

    def refuse_without_values(self, where: str) -> None:
        """Raises: CheckpointError `missing-rows` for a model on the meta device that has more tokens."""
        if self.keeps_tokens:
            what = (
                f"tokens {self.saved} to {self.own - 1} are not in the checkpoint, and a model on the meta device has "
            )
            what += "no values to keep"
            fix = "initialize(model, seed) first, and then load"
            raise CheckpointError(Problem("missing-rows", what, where, fix=fix))


def resized_vocabulary(
    module: nn.Module, saved_shape: Callable[[str], Shape | None], own_shape: Callable[[str], Shape | None]
) -> ResizedVocabulary | None:
    """How the vocabulary of a checkpoint differs from that of a model; None where it does not.

    Args:
        module: the model, or one pipeline stage of it. The embedding of its tokens is that of `get_input_embeddings`.
            Of a model without such a method, the one as whose rows the outputs of a linear differ: its head; or the
            only one.
        saved_shape, own_shape: shape of a parameter by its name in the module; None if there is none.
    """
    stock = stock_model(module)
    ends = getattr(stock, "get_input_embeddings", None)
    chosen: Any = ends() if callable(ends) else None
    rows: dict[nn.Module, tuple[int, int]] = {}
    for name, inner in module.named_modules():
        if inner is chosen or isinstance(inner, (nn.Embedding, nn.Linear)):
            key = f"{name}.weight" if name else "weight"
            saved, own = saved_shape(key), own_shape(key)
            if saved is not None and own is not None and saved[:1] != own[:1] and saved[1:] == own[1:]:
                rows[inner] = saved[0], own[0]
    if chosen is not None:
        return ResizedVocabulary(*rows[chosen]) if chosen in rows else None
    tables = [inner for inner in module.modules() if isinstance(inner, nn.Embedding)]
    of_heads = {sizes for inner, sizes in rows.items() if isinstance(inner, nn.Linear)}
    sizes_of_tables = [
        rows[table] for table in tables if table in rows and (rows[table] in of_heads or len(tables) == 1)
    ]
    return ResizedVocabulary(*sizes_of_tables[0]) if sizes_of_tables else None
