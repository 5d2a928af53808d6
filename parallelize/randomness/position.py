"""When a dropout mask is drawn: the step, the rows of the global batch, the call; and the same again in recompute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.ops.tape import remembered
from parallelize.randomness.counter import Key, key


@dataclass(frozen=True)
class Position:
    """Where a forward stands in training.

    Args:
        step: of the optimiser.
        batch_offset: the row of the step's global batch at which this rank's microbatch begins.
        batch_size: rows of this microbatch; None: the first dim of the model's first tensor.
    """

    step: int
    batch_offset: int = 0
    batch_size: int | None = None


@dataclass(eq=False)
class Forward:
    """One forward of the model, or all forwards at one explicit position. It lives as long as their graphs."""

    position: Position
    tokens: int | None = None  # the full sequence length, once a sequence shard has been met
    calls: dict[str, int] = field(default_factory=dict)


class Clock:
    """Knows which forward is going on, or is being recomputed.

    A forward that drops something, at no explicit position, is a step of its own: the clock counts them. Its state is two
    numbers.

    Args:
        data: (place, number) of this rank along the data axes, whose ranks hold neighbouring rows of the batch.
    """

    def __init__(self, seed: int, data: tuple[int, int] = (0, 1)):
        self.seed, self.data = seed, data
        self.step = 0
        self.explicit: Forward | None = None
        self.now: Forward | None = None
        self.replayed: Forward | None = None

    def __deepcopy__(self, memo: dict) -> Clock:
        copy = memo[id(self)] = Clock(self.seed, self.data)
        copy.step = self.step
        return copy

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.step = int(state["seed"]), int(state["step"])

    def move(self, position: Position | None) -> None:
        """Let the next forwards draw what belongs to this position; None: count forwards again."""
        self.explicit = None if position is None else Forward(position)

    @contextmanager
    def at(self, position: Position) -> Iterator[None]:
        outer = self.explicit
        self.move(position)
        try:
            yield
        finally:
            self.explicit = outer

    # -- a forward of the model -----------------------------------------------------------------------------------

    def begin(self, inputs: Any) -> None:
        if self.explicit is not None:
            self.now = self.explicit
            return
        rows = next((leaf.shape[0] for leaf in private.tree_leaves(inputs) if _has_rows(leaf)), None)
        self.now = Forward(Position(self.step, self.data[0] * (rows or 0), rows))

    def end(self, outputs: Any) -> None:
        """When backward of this forward begins, at its outputs, recompute belongs to it."""
        forward, self.now = self.now, None
        if forward is None:
            return

        def replay(*_: Any) -> None:
            self.replayed = forward

        nodes = {leaf.grad_fn for leaf in private.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        for node in nodes:
            if node is not None:
                node.register_prehook(replay)

    # -- a call of a site -----------------------------------------------------------------------------------------

    def call(self, site: str) -> tuple[Key, Forward]:
        """The key of this call. In a recompute, that of the call that is repeated.

        Raises: ModelError `dropout-outside-forward`, `ambiguous-dropout`.
        """
        return remembered("dropout", lambda: self._call(site))

    def _call(self, site: str) -> tuple[Key, Forward]:
        again = private.backward_id() != -1
        forward = self.replayed if again else self.now
        if forward is None:
            raise _outside(site)
        number = 0 if again else forward.calls.get(site, 0)
        if not again:
            if not forward.calls and forward is not self.explicit:
                self.step += 1
            forward.calls[site] = number + 1
        elif forward.calls.get(site, 1) > 1:
            raise _ambiguous(site, forward.calls[site])
        return key(self.seed, f"dropout {site}", forward.position.step, number), forward


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _outside(site: str) -> ModelError:
    return ModelError(
        Problem(
            "dropout-outside-forward",
            f"{site} runs outside a forward of the model that install_dropout was given, so its step is not known",
            fix="call that model; or install_dropout on the part that is called",
        )
    )


def _ambiguous(site: str, calls: int) -> ModelError:
    return ModelError(
        Problem(
            "ambiguous-dropout",
            f"{site} ran {calls} times in one forward, and a recompute does not tell which of them it repeats",
            fix="use parallelize.recompute, which does, or leave this module out of recompute",
        )
    )
