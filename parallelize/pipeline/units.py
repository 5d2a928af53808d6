"""One stage of a stock model: the model's own forward runs, and stops where the next stage begins.

Every unit's call is intercepted. Units before the stage return NaN of the form that they returned on their owner, so that
what the forward does around them (masks, positions, rotary tables) sees right shapes; the stage's first unit gets what the
stage before passed on, in the very tensor that the forward called it with; and the call of the unit after the last one ends
the forward there. So a layer's number, its kind of attention, and whatever else the stock loop does are its own. A forward
that uses anything else of an absent unit ends in NaN, which is looked for once for each kind of input.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.handshake import digest
from parallelize.pipeline.cut import Cut
from parallelize.pipeline.package import Header, Nested
from parallelize.region import Region

T = torch.Tensor


class _StageEnd(BaseException):
    """Ends a forward at the first unit of the next stage, with that unit's call. No error, so no `Exception`."""

    def __init__(self, args: tuple, kwargs: dict):
        self.call: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}


@dataclass
class Outcome:
    """What a stage's forward gave: the model's output on the last stage, else what travels on."""

    output: Any = None
    header: Header | None = None
    tensors: list[T] = field(default_factory=list)


@dataclass
class _Forward:
    """A forward that is going on."""

    first: int
    stop: int
    content: dict[str, Any]  # what the stage before passed on
    header: Header | None
    learn: bool  # whether a header is to be made
    grad: bool
    entered: bool = False
    end: _StageEnd | None = None
    outputs: dict[str, Nested] = field(default_factory=dict)
    skips: dict[str, Any] = field(default_factory=dict)


class StageRunner:
    """Runs the stages of one rank on the one module tree that it has.

    Args:
        region: the sequence-parallel region of the plan, where there is one.
    """

    def __init__(self, module: nn.Module, cut: Cut, region: Region | None = None):
        self.module, self.cut, self.region = module, cut, region
        self.units = cut.stages.units
        self.modules: dict[str, nn.Module] = {}
        self.now: _Forward | None = None
        self._until = {source: cut.stages.stage_of_unit(target) for source, target in cut.stages.cuts.skips}
        for place, unit in enumerate(self.units):
            if unit in cut.facts.aliases:
                self.modules[unit] = inner = module.get_submodule(unit)
                private.intercept_call(inner, _Call(self, place, inner))
        # the end of a stage is caught inside the root's own call, so that wrappers around it see a normal return
        own = module.__dict__.get("forward") or MethodType(type(module).forward, module)
        own = own.forward if isinstance(own, _Ending) else own  # of a runner before this one
        module.__dict__["forward"] = _Ending(self, own)

    def run(
        self, stage: int, args: tuple, kwargs: dict, content: dict[str, Any], header: Header | None, learn: bool
    ) -> Outcome:
        """One microbatch through one stage.

        Args:
            content, header: what the stage before passed on; nothing for the first stage.
            learn: make a header, because the next stage has none for inputs like these.
        """
        first, stop = self.cut.stages.bounds(stage)
        now = self.now = _Forward(first, stop, content, header, learn, torch.is_grad_enabled())
        if learn and header is not None:
            now.outputs |= header.outputs
        try:
            torch.set_grad_enabled(now.grad and first == 0)  # what comes before the first unit is computed from nothing
            result = self.module(*args, **kwargs)
            if not now.entered and stage:
                raise self._order(first, "is never called")
            if now.end is None and stop < len(self.units):
                raise self._order(stop, "is never called, so the stage has no end")
            outcome = Outcome(output=result, header=Header(Nested((), None)))
            if now.end is not None:
                outcome = self._package(stage, now.end, now)
            if learn and stage:
                self._look_for_absent(stage, content, outcome)
            return outcome
        finally:
            self.now = None
            torch.set_grad_enabled(now.grad)
            if self.region is not None:
                self.region.forget()

    # -- units ----------------------------------------------------------------------------------------------------

    def call(self, place: int, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        now = self.now
        if now is None:
            raise ModelError(
                Problem(
                    "stage-called-alone",
                    f"{self.units[place]} is called on a rank that holds a part of the model",
                    fix="run the model by Pipeline.step, or on a mesh without `pp`",
                )
            )
        if place < now.first:
            return self._absent(place, now)
        if place >= now.stop:
            if place > now.stop or not (now.entered or now.first == 0):
                raise self._order(place, f"is called before {self.units[now.stop]}")
            raise _StageEnd(args, kwargs)
        if place == now.first and place > 0:
            if now.entered:
                raise self._order(place, "is called twice")
            now.entered = True
            torch.set_grad_enabled(now.grad)
            args, kwargs = self._entered(now, args, kwargs)
        elif now.first > 0 and not now.entered:
            raise self._order(place, f"is called before {self.units[now.first]}")
        out = private.call_module(module, args, kwargs)
        unit = self.units[place]
        if unit in self._until:
            now.skips[unit] = out
        if now.learn:
            now.outputs[unit] = Nested.of(out)[0]
        return out

    def _absent(self, place: int, now: _Forward) -> Any:
        unit = self.units[place]
        if now.entered:
            raise self._order(place, f"is called after {self.units[now.first]}")
        if unit in now.content["skips"]:
            return now.content["skips"][unit]
        assert now.header is not None
        if unit not in now.header.outputs:
            raise self._order(place, "was not called by its owner")
        return now.header.outputs[unit].fill(lambda meta: meta.absent(self.device))

    @property
    def device(self) -> torch.device:
        assert self.now is not None
        return next((leaf.device for leaf in private.tree_leaves(self.now.content) if isinstance(leaf, T)), _CPU)

    def _entered(self, now: _Forward, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call of the stage's first unit with what the stage before passed on."""
        assert now.header is not None
        call: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        if now.header.compared:
            self._compare(now, call)
            now.header.compared.clear()  # once for each kind of input
        received = {
            k: private.tree_map(lambda leaf: self._received(leaf, now), v) for k, v in now.content["call"].items()
        }
        for key, value in received.items():
            call[key] = call[key] if _put(value, call.get(key)) else value
        places = [key for key in call if isinstance(key, int)]
        return tuple(call[key] for key in sorted(places)), {k: v for k, v in call.items() if isinstance(k, str)}

    def _received(self, leaf: Any, now: _Forward) -> Any:
        """What came from the stage before, as its forward is to see it: not the leaf itself, whose gradient goes back."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        full = now.header.region if now.header is not None else None
        if full is not None and self.region is not None and leaf.is_floating_point() and leaf.ndim > self.region.dim:
            return self.region.resume(leaf, full)
        return leaf.view_as(leaf)

    def _look_for_absent(self, stage: int, content: dict[str, Any], outcome: Outcome) -> None:
        output = [leaf for leaf in private.tree_leaves(outcome.output) if isinstance(leaf, torch.Tensor)]
        if _has_nan(outcome.tensors or output) and not _has_nan(private.tree_leaves(content)):
            unit = self.units[self.cut.stages.bounds(stage)[0]]
            what = (
                f"stage {stage} computes NaN from numbers: its forward uses more of absent modules than {unit} is given"
            )
            fix = "cut elsewhere, name the argument under `carry:`, or the module under `skips:` of the plan's `pipeline:`"
            raise ModelError(Problem("absent-module-used", what, self.cut.stages.cuts.where, fix=fix))

    def _compare(self, now: _Forward, call: dict[int | str, Any]) -> None:
        """What is not carried must be what this stage computes too."""
        assert now.header is not None
        for key, wanted in now.header.compared.items():
            if _digests(call.get(key)) != wanted:
                unit = self.units[now.first]
                what = f"argument {_name(self.modules.get(unit), key)} of {unit} differs from what the stage before has"
                fix = "name it in the plan: `pipeline: {carry: [...]}`, together with the layer's own input"
                raise ModelError(Problem("argument-not-carried", what, fix=fix))

    # -- what travels ---------------------------------------------------------------------------------------------

    def _package(self, stage: int, end: _StageEnd, now: _Forward) -> Outcome:
        unit = self.units[now.stop]
        carried = self._carried(unit, end.call)
        skips = {name: value for name, value in (now.content["skips"] | now.skips).items() if self._until[name] > stage}
        form, tensors = Nested.of({"call": carried, "skips": skips})
        if not now.learn:
            return Outcome(header=Header(form), tensors=tensors)
        others = {key: _digests(value) for key, value in end.call.items() if key not in carried}
        full = self.region.inside if self.region is not None else None
        header = Header(form, now.outputs, {key: value for key, value in others.items() if value}, full)
        return Outcome(header=header, tensors=tensors)

    def _carried(self, unit: str, call: dict[int | str, Any]) -> dict[int | str, Any]:
        return carried_arguments(self.modules.get(unit), call, self.cut.stages.cuts.carry)

    def _order(self, place: int, what: str) -> ModelError:
        fix = "list modules under `pipeline:` in the order in which the forward calls them, each called once"
        return ModelError(Problem("unit-order", f"{self.units[place]} {what}", self.cut.stages.cuts.where, fix=fix))


def carried_arguments(
    module: nn.Module | None, call: dict[int | str, Any], names: Sequence[str]
) -> dict[int | str, Any]:
    """Of a unit's call (by position or name) what travels from the stage before: the arguments that the plan names, else
    the first, and whatever requires a gradient."""
    found = {key: value for key, value in call.items() if _name(module, key) in names or key in names}
    if not names and call:
        key = next(iter(call))
        found[key] = call[key]
    for key, value in call.items():
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in private.tree_leaves(value)):
            found[key] = value
    return {key: call[key] for key in call if key in found}


_CPU = torch.device("cpu")


def _has_nan(values: list[Any]) -> bool:
    return any(
        bool(_plain(value).isnan().any())
        for value in values
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )


def _plain(value: Any) -> T:
    """This rank's part of logits that stay sharded, or of a DTensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def _put(value: Any, local: Any) -> bool:
    """Make the forward's own tensor hold what was received, so that code around the unit that uses it too sees that."""
    if not isinstance(value, torch.Tensor) or type(local) is not torch.Tensor or local.requires_grad:
        return False
    try:
        torch.utils.swap_tensors(local, value)
    except RuntimeError:  # something else holds it: the unit gets the received one, and the forward keeps its NaN
        return False
    return True


def _digests(value: Any) -> list[list[int]]:
    return [digest(leaf).tolist() for leaf in private.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _name(module: nn.Module | None, key: int | str) -> str:
    """The name of a positional argument of a module's forward."""
    if isinstance(key, str) or module is None:
        return str(key)
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return names[key] if key < len(names) else str(key)


class _Call:
    """Stands before a unit's call. A copy of the model is not part of the pipeline, so it gets none."""

    def __init__(self, runner: StageRunner, place: int, module: nn.Module):
        self.runner, self.place, self.module = runner, place, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.call(self.place, self.module, args, kwargs)


class _Ending:
    """The root's forward, which returns where the stage ends: the tensors that travel, for wrappers around the model."""

    def __init__(self, runner: StageRunner, forward: Any):
        self.runner, self.forward = runner, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.forward(*args, **kwargs)
        except _StageEnd as end:
            end.__traceback__ = None  # its frames would keep the whole forward alive
            assert self.runner.now is not None
            self.runner.now.end = end
            return tuple(leaf for leaf in private.tree_leaves(end.call) if isinstance(leaf, torch.Tensor))
