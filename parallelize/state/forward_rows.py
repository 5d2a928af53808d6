"""Which tokens of a batch the rows of a router are: activations [batch, sequence, ..] of this rank, flattened.

`ForwardRows` are the rows of one forward. A step calls several forwards, each with a `BatchPart` of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.layout import Interval
from parallelize.comm.groups import Group
from parallelize.plan.models.wrapped_models import forward_signature
from parallelize.state.records import applied, record_of
from parallelize.state.step_results import as_instance

T = torch.Tensor


@dataclass(frozen=True)
class ForwardRows:
    """The tokens of one forward on this rank.

    Attributes:
        batch, length: of the inputs.
        tokens: the intervals of each sequence that this rank of `cp` has, in order.
        sequence: the ranks that divide these in the sequence-parallel region; alone without one.
    """

    batch: int
    length: int
    tokens: tuple[Interval, ...]
    sequence: Group

    def is_divided(self, rows: int) -> bool:
        """Whether an activation of so many rows has this rank's shards of the sequence-parallel region."""
        return self.sequence.size > 1 and rows != self.batch * sum(stop - start for start, stop in self.tokens)

    def indices(self, rows: int, device: torch.device) -> T:
        """[rows]: the index, in the inputs' [batch x length] tokens, of each row; -1 for rows that only pad a shard.

        Args:
            rows: the number of rows of an activation.

        Raises: ShapeError `unknown-rows`.
        """
        tokens = torch.cat([torch.arange(start, stop, device=device) for start, stop in self.tokens])
        if self.is_divided(rows):
            size = -(-len(tokens) // self.sequence.size)
            padded = torch.full((size * self.sequence.size,), -1, device=device)
            padded[: len(tokens)] = tokens
            tokens = padded[self.sequence.rank * size :][:size]
        if rows != self.batch * len(tokens):
            what = (
                f"a router got {rows} rows of inputs [{self.batch}, {self.length}], of which this rank has "
                f"{len(tokens)} tokens each"
            )
            fix = "a model whose routers see each token once"
            raise ShapeError(Problem("unknown-rows", what, fix=fix))
        first = torch.arange(self.batch, device=device)[:, None] * self.length
        return torch.where(tokens < 0, -1, first + tokens).flatten()


@dataclass
class BatchPart:
    """Which sequences of a step's batch the running forward gets. On the root of the model, while a step runs.

    Attributes:
        first: the index of its first sequence in this data rank's batch.
        size: the number of sequences of that batch.
        place: () -> (index of that batch's first sequence in the global batch, number of sequences of the global
            batch). A collective over the data ranks, where these have different numbers of sequences.
        tokens: (the tokens before its first one, the tokens of this data rank's batch), where its sequences have other
            lengths than those of other forwards; else None.
    """

    first: int
    size: int
    place: Callable[[], tuple[int, int]]
    tokens: tuple[int, int] | None = None


def batch_part(module: nn.Module) -> BatchPart | None:
    """The part of the batch of the running step; None for forwards that no step calls."""
    return as_instance(applied(module).batch_part, BatchPart)


def forward_rows(module: nn.Module, arguments: dict[str, Any]) -> ForwardRows:
    """The tokens of a forward that begins.

    Args:
        module: the root of a model, planned or not.
        arguments: of the call, by name; full sequences, as the caller gives them.
    """
    ids = arguments.get("input_ids")
    batch, length = (ids if ids is not None else arguments["inputs_embeds"]).shape[:2]
    context: Any = applied(module).context
    tokens = ((0, length),) if context is None else context.layout_of(length).of_rank(context.group.rank)
    record = record_of(module)
    region: Any = record.region if record is not None else None
    return ForwardRows(batch, length, tuple(tokens), region.group if region is not None else Group.alone())


def call_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a root by name; those of `**kwargs` too."""
    bound = forward_signature(module).bind_partial(None, *args, **kwargs)
    extra = next((p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return {**bound.arguments, **bound.arguments.get(extra, {})}
