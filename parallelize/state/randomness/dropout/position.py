"""The position of a dropout mask, or of another draw: step, rows of the global batch and call, which a recompute
repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.random.counter import Key, key
from parallelize.ops.replay_cache import remembered


@dataclass(frozen=True)
class Position:
    """The position of a forward in training, for `clock.move` and `clock.at`.

    Args:
        step: the optimizer step.
        batch_offset: the index in the step's global batch of this microbatch's first row.
        batch_size: rows of this microbatch; None: the first dim of the model's first tensor.
    """

    step: int
    batch_offset: int = 0
    batch_size: int | None = None


@dataclass(eq=False)
class Forward:
    """One forward of the model, or all forwards at one explicit position. It stays alive as long as their graphs.

    find: finds its position, for the first number that is drawn. training: the mode of the model.
    """

    find: Callable[[], Position]
    training: bool = True
    # by call site, the full sequence length of a sequence shard
    tokens: dict[str, int | None] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # call site -> number of calls

    @property
    def position(self) -> Position:
        """Found once. Not by `cached_property`, whose lock ranks that are threads share, while to find it they may
        communicate."""
        position = self.find()
        self.find = partial(_same, position)  # the inputs of the model are kept no longer
        return position


class Clock:
    """The dropout clock: which forward is running, or is being recomputed.

    Without an explicit position, the clock counts each forward with dropout or other draws as one step, and those in
    evaluation by themselves. Its state is three numbers.

    Args:
        seed: None: `agree` returns it, at the first draw.
        data: (data rank, number of data ranks). Data rank i gets the i-th part of the rows of the global batch.
    """

    def __init__(self, seed: int | None, data: tuple[int, int] = (0, 1), agree: Callable[[], int] | None = None):
        self.seed, self.data, self.agree = seed, data, agree
        self.agree_later = seed is None
        self.step = self.evaluations = 0
        self.explicit: Forward | None = None
        self.now: Forward | None = None
        self.replayed: Forward | None = None

    def __deepcopy__(self, memo: dict) -> Clock:
        copy = memo[id(self)] = Clock(self.seed, self.data, self.agree)
        copy.step, copy.evaluations = self.step, self.evaluations
        return copy

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.agreed_seed(), "step": self.step, "evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self.evaluations = int(state.get("evaluations", 0))

    def agreed_seed(self) -> int:
        if self.seed is None:
            self.seed = self.agree() if self.agree is not None else 0
        return self.seed

    def move(self, position: Position | Callable[[], Position] | None) -> None:
        """Set the position of the next forwards, or what finds it where something is drawn; None: count forwards
        again."""
        if isinstance(position, Position):
            position = partial(_same, position)
        self.explicit = None if position is None else Forward(position)

    @contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """A context that sets the position of the forwards inside."""
        outer = self.explicit
        self.move(position)
        try:
            yield
        finally:
            self.explicit = outer

    # -- a forward of the model -----------------------------------------------------------------------------------

    def begin(self, inputs: Any, training: bool = True) -> None:
        self.now = self.explicit
        if self.now is None:
            step = self.step if training else self.evaluations
            self.now = Forward(partial(self._counted, step, inputs), training)
        self.now.training = training

    def _counted(self, step: int, inputs: Any) -> Position:
        rows = next((leaf.shape[0] for leaf in private.tree_leaves(inputs) if _has_rows(leaf)), None)
        return Position(step, self.data[0] * (rows or 0), rows)

    def end(self, outputs: Any) -> None:
        """End a forward. When its backward starts, at its outputs, recomputes belong to this forward."""
        forward, self.now = self.now, None
        if forward is None or not forward.calls:
            return

        def replay(*_: Any) -> None:
            self.replayed = forward

        nodes = {leaf.grad_fn for leaf in private.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        for node in nodes:
            if node is not None:
                node.register_prehook(replay)

    def has_drawn(self) -> bool:
        """Whether the forward that runs has drawn anything."""
        return self.now is not None and bool(self.now.calls)

    # -- a call at a call site ------------------------------------------------------------------------------------

    def call(self, call_site: str) -> tuple[Key, Forward]:
        """The key of this call, and its forward. In a recompute, those of the repeated call.

        Raises: ModelError `dropout-outside-forward`, `ambiguous-dropout`.
        """
        return remembered("dropout", lambda: self._call(call_site))

    def _call(self, call_site: str) -> tuple[Key, Forward]:
        again = private.backward_id() != -1
        forward = self.replayed if again else self.now
        if forward is None:
            raise _outside_forward_error(call_site)
        number, step = 0 if again else forward.calls.get(call_site, 0), forward.position.step
        if not again:
            if not forward.calls and forward is not self.explicit:
                self.step, self.evaluations = self.step + forward.training, self.evaluations + (not forward.training)
            forward.calls[call_site] = number + 1
        elif forward.calls.get(call_site, 1) > 1:
            raise _ambiguous(call_site, forward.calls[call_site])
        kind = "dropout" if forward.training else "evaluation"
        return key(self.agreed_seed(), f"{kind} {call_site}", step, number), forward


def _same(position: Position) -> Position:
    return position


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _outside_forward_error(call_site: str) -> ModelError:
    return ModelError(
        Problem(
            "dropout-outside-forward",
            f"{call_site} runs outside a forward of the model of install_dropout, so its step is not known",
            fix="call that model; or install_dropout on the part that is called",
        )
    )


def _ambiguous(call_site: str, calls: int) -> ModelError:
    return ModelError(
        Problem(
            "ambiguous-dropout",
            f"{call_site} ran {calls} times in one forward, and a recompute does not show which call it repeats",
            fix="use parallelize.recompute, which does, or leave this module out of recompute",
        )
    )
