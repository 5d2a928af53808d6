"""The loop that most rows share: a model is placed, then there are steps with updates between them.

A row says what is done at some moments of it, so that rows of other moments meet it in one loop. Moments, in the order
of the loop:

    options    of `parallelize_model`, over those of the axis
    batch      (inputs, targets, number) -> the same, of all rows; whatever reads a batch gets what it returns
    placed     side: what comes between the model on its mesh and its optimizer
    optimizer  side: builds one, or several; at most one row of a loop does
    step       side, number: forward and backward; at most one row
    around     side, number, step: calls `step(number)` itself, never or more than once
    gradients  side, number: after each backward, before the update
    update     side, number: at most one row
    restored   side, folder: after the first update, from files or states; what is next comes from these alone
    between    side, number: after each update but the last
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tests.matrix.sides import Side

STEPS = 3
MOMENTS = ("batch", "placed", "optimizer", "step", "around", "gradients", "update", "restored", "between")
ONCE = frozenset({"optimizer", "step", "update"})
"""Moments that belong to one row of a loop."""


@dataclass(frozen=True)
class Loop:
    """What is done at its moments.

    Attributes:
        options: of `parallelize_model`. at: moment -> what is called there, in order.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    at: Mapping[str, tuple[Callable[..., Any], ...]] = field(default_factory=dict)

    def run(self, side: Side) -> None:
        """The loop of a side, from a model that is on no mesh; the gradients of its last step stay."""
        side.loop, fresh = self, side.model
        side.kind = replace(side.kind, batch=partial(self._batch, side.kind.batch))
        if "restored" in self.at:
            fresh = copy.deepcopy(side.model)
        self.begin(side)
        for number in range(STEPS):
            self.step(side, number)
            self._call("gradients", side, number)
            if number == STEPS - 1:
                return
            self._once("update", _update)(side, number)
            if number == 0:
                self._restore(side, fresh)
            self._call("between", side, number)

    def begin(self, side: Side) -> None:
        """Put the side's model on its mesh as the loop did, with its optimizers."""
        side.place(**self.options)
        self._call("placed", side)
        self._once("optimizer", _optimizer)(side)

    def _batch(self, batch: Callable[[int], Any], number: int) -> Any:
        inputs, targets = batch(number)
        for change in self.at.get("batch", ()):
            inputs, targets = change(inputs, targets, number)
        return inputs, targets

    def step(self, side: Side, number: int) -> None:
        """One step, with all that rows do around it."""
        step = partial(self._once("step", _step), side)
        for around in self.at.get("around", ()):
            step = partial(_around, around, side, step)
        step(number)

    def _restore(self, side: Side, fresh: torch.nn.Module) -> None:
        for number, restore in enumerate(self.at.get("restored", ())):
            folder = f"{side.folder}/{number}"
            os.makedirs(folder, exist_ok=True)
            side.fresh = copy.deepcopy(fresh)
            restore(side, folder)

    def _once(self, moment: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        return next(iter(self.at.get(moment, ())), otherwise)

    def _call(self, moment: str, *arguments: Any) -> None:
        for change in self.at.get(moment, ()):
            change(*arguments)


def _optimizer(side: Side) -> None:
    side.optimizer(torch.optim.SGD, momentum=0.9)


def _step(side: Side, number: int) -> None:
    side.step(number)


def _update(side: Side, number: int) -> None:
    side.update()


def _around(around: Callable[..., Any], side: Side, step: Callable[[int], Any], number: int) -> Any:
    return around(side, number, step)


def merged(loops: Iterable[Loop]) -> Loop | None:
    """The loop in which all of these meet; None where two want one option or one moment for themselves."""
    options: dict[str, Any] = {}
    at: dict[str, tuple[Callable[..., Any], ...]] = {}
    for loop in loops:
        if options.keys() & loop.options.keys() or at.keys() & loop.at.keys() & ONCE:
            return None
        options |= loop.options
        for moment, changes in loop.at.items():
            at[moment] = (*at.get(moment, ()), *changes)
    return Loop(options, at)
