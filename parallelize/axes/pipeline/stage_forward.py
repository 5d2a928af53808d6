"""Runs one stage of a stock model: the model's own forward, up to the beginning of the next stage.

The call of every unit is intercepted. Units before the stage return NaN with the shapes that they returned on the rank
that owns them, so that code around them (masks, positions, rotary tables) sees the right shapes. The stage's first unit
gets the output of the previous stage, swapped into the tensor object that the forward already holds. The call of the
first unit after the stage ends the forward. So layer numbers, kinds of attention and the rest of the stock loop stay as
they are. A forward that uses absent units in another way computes NaN, which is checked once for each signature of the
inputs.

A forward that draws random numbers may skip units (LayerDrop). All stages draw the same, so they skip the same: the
next unit that is called takes the place of a skipped first one, and a stage of which all are skipped passes on what it
received.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.axes.batch.media_rows import TOWER_OUTPUTS
from parallelize.axes.pipeline.absent_parameters import AbsentParameters
from parallelize.axes.pipeline.early_calls import watched
from parallelize.axes.pipeline.transport import Nested, StageHeader
from parallelize.axes.tensor.region import Region
from parallelize.axes.zero.router_loss import receive_router_sums, router_sums_to_send
from parallelize.base.errors import ModelError, Problem, short_list
from parallelize.base.torch_private import torch_tensors as private
from parallelize.base.torch_private.torch_dynamo import InterceptedCall
from parallelize.comm.handshake import digest
from parallelize.plan.adapters import prompt_encoders
from parallelize.state.forward_steps import STAGE, add_step, run_inner
from parallelize.state.randomness.dropout.draw_hooks import has_drawn
from parallelize.state.records import Cut

T = torch.Tensor


class _StageEnd(BaseException):
    """Ends a forward at the first unit of the next stage, with the call of that unit. Not an error, hence no
    `Exception`."""

    def __init__(self, unit: str, args: tuple, kwargs: dict):
        self.unit = unit
        self.call: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}


@dataclass
class Outcome:
    """The result of a stage's forward.

    Attributes:
        output: the output of the model, on the last stage.
        header, tensors: what is sent to the next stage, on the others.
    """

    output: Any = None
    header: StageHeader | None = None
    tensors: list[T] = field(default_factory=list)


@dataclass
class _RunningForward:
    """The state of a running forward.

    Attributes:
        first: index of the stage's first unit.
        stop: one past the index of its last unit.
        content, header: the content and header that the previous stage sent.
        make_header: the next stage needs a header.
        grad: gradients were enabled by the caller.
        entered: the first unit was called.
        end: the call of the next stage's first unit.
        outputs: the outputs of each unit so far, without values, for the header.
        skips: outputs of this stage's units that later stages use.
    """

    first: int
    stop: int
    content: dict[str, Any]
    header: StageHeader | None
    make_header: bool
    grad: bool
    entered: bool = False
    end: _StageEnd | None = None
    outputs: dict[str, Nested] = field(default_factory=dict)
    skips: dict[str, Any] = field(default_factory=dict)


class StageRunner:
    """Runs all stages of one rank, on its one module tree.

    Args:
        module: the root, after `cut_pipeline`.
        cut: its record.
        region: the sequence-parallel region of the plan, if any.
    """

    def __init__(self, module: nn.Module, cut: Cut, region: Region | None = None):
        self.module, self.cut, self.region = module, cut, region
        self.units = cut.stages.units
        self.modules: dict[str, nn.Module] = {}
        self._calls: list[_UnitCall] = []
        self.current: _RunningForward | None = None
        self.absent = AbsentParameters(module, cut)
        self._last_user = {source: cut.stages.stage_of_unit(target) for source, target in cut.stages.cuts.skips}
        for index, unit in enumerate(self.units):
            if unit in cut.facts.module_fqns:
                self.modules[unit] = inner = module.get_submodule(unit)
                self._calls.append(_UnitCall(self, index, inner))
        # the end of a stage is caught inside the call of the root, so that wrappers around the model see a normal
        # return
        add_step(module, STAGE, _Ending(self))  # in the place of that of an earlier runner

    def release(self) -> None:
        """Intercept no calls any more: another runner takes the place of this one."""
        for call in self._calls:
            call.release()

    def run(
        self,
        stage: int,
        args: tuple,
        kwargs: dict,
        content: dict[str, Any],
        header: StageHeader | None,
        make_header: bool,
    ) -> Outcome:
        """The forward of one stage on one microbatch.

        Args:
            stage: a stage of this rank.
            args, kwargs: inputs of the full model.
            content, header: the content and header that the previous stage sent; empty and None for the first stage.
            make_header: the next stage has no header for inputs of this signature yet.
        """
        first, stop = self.cut.stages.bounds(stage)
        now = self.current = _RunningForward(first, stop, content, header, make_header, torch.is_grad_enabled())
        if make_header and header is not None:
            now.outputs |= header.outputs
        try:
            receive_router_sums(self.module, content.get("router"))
            torch.set_grad_enabled(now.grad and first == 0)  # code before the first unit runs on NaN
            with self.absent.shown(self.device, is_watched=make_header) as read, self._early_calls(now) as early:
                result = self.module(*args, **kwargs)
            if early:
                raise self._too_early(first, early)
            if not now.entered and stage:
                raise self._order(first, "is never called")
            if now.end is None and stop < len(self.units):
                raise self._order(stop, "is never called, so the stage has no end")
            outcome = Outcome(output=_without_towers(result) if stage else result, header=StageHeader(Nested((), None)))
            if now.end is not None:
                outcome = self._package(stage, now.end, now)
            if make_header and (stage or read):
                self._check_for_nan(stage, (args, kwargs, content), outcome, read)
            return outcome
        finally:
            self.current = None
            torch.set_grad_enabled(now.grad)
            if self.region is not None:
                self.region.forget()

    # -- units ----------------------------------------------------------------------------------------------------

    def call(self, index: int, unit_call: InterceptedCall, args: tuple, kwargs: dict) -> Any:
        """The intercepted call of the unit with this index."""
        now = self.current
        if now is None and self._may_run_alone(self.units[index]):
            return unit_call.inside(args, kwargs)
        if now is None:
            raise ModelError(
                Problem(
                    "stage-called-alone",
                    f"{self.units[index]} is called on a rank that has a part of the model only",
                    fix="run the model by Pipeline.step, or on a mesh without `pp`",
                )
            )
        if index < now.first:
            return self._absent_output(index, now, args, kwargs)
        if index == now.first and now.entered:
            raise self._order(index, "is called twice")
        if now.first > 0 and not now.entered:
            if index != now.first and not self._skips():
                raise self._order(index, f"is called before {self.units[now.first]}")
            now.entered = True
            torch.set_grad_enabled(now.grad)
            args, kwargs = self._received_call(now, index, args, kwargs)
        if index >= now.stop:
            if index > now.stop and not self._skips():
                raise self._order(index, f"is called before {self.units[now.stop]}")
            raise _StageEnd(self.units[index], args, kwargs)
        out = unit_call.inside(args, kwargs)
        unit = self.units[index]
        if unit in self._last_user:
            now.skips[unit] = _copy_of(out)
        if now.make_header:
            now.outputs[unit] = Nested.of(out)[0]
        return out

    def _skips(self) -> bool:
        """Whether the forward may skip units: it has drawn random numbers."""
        return has_drawn(self.module)

    def _may_run_alone(self, unit: str) -> bool:
        """Whether a unit needs no other stage: learned prompts are computed alone to be saved."""
        return unit in prompt_encoders(self.cut.facts) and self.cut.present(unit)

    def _absent_output(self, index: int, now: _RunningForward, args: tuple, kwargs: dict) -> Any:
        """What the call of an absent unit returns: its true output where it is sent along, else NaN.

        Where the forward that made the header has skipped the unit, NaN of the shapes of another one of its list, or of
        its input.
        """
        unit = self.units[index]
        if now.entered:
            raise self._order(index, f"is called after {self.units[now.first]}")
        if unit in now.content["skips"]:
            torch.set_grad_enabled(now.grad)  # for what is computed from it; all else before the first unit is constant
            return _copy_of(now.content["skips"][unit])
        assert now.header is not None
        known = now.header.outputs.get(unit)
        if known is None and not self._skips():
            raise self._order(index, "was not called on the rank that owns it")
        if known is None:
            siblings = (name for name in now.header.outputs if name.rpartition(".")[0] == unit.rpartition(".")[0])
            known = now.header.outputs.get(next(siblings, ""), Nested.of(next(iter((*args, *kwargs.values()))))[0])
        return known.fill(lambda meta: meta.absent(self.device))

    @property
    def device(self) -> torch.device:
        """The device of the received tensors."""
        assert self.current is not None
        return next((leaf.device for leaf in private.tree_leaves(self.current.content) if isinstance(leaf, T)), _CPU)

    def _received_call(self, now: _RunningForward, index: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of the first unit that the stage calls, with those from the previous stage in place of NaN."""
        assert now.header is not None
        call: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        if now.header.compared:
            self._compare(now, self.units[index], call)
            now.header.compared.clear()  # once for each signature of the inputs
        received = {
            key: private.tree_map(lambda leaf: self._received(leaf, now), value)
            for key, value in now.content["call"].items()
        }
        for key, value in received.items():
            call[key] = call[key] if _put(value, call.get(key)) else value
        positions = sorted(key for key in call if isinstance(key, int))
        keywords = {key: value for key, value in call.items() if isinstance(key, str)}
        return tuple(call[position] for position in positions), keywords

    def _received(self, leaf: Any, now: _RunningForward) -> Any:
        """A received tensor as the forward sees it: a view, because the gradient of the leaf itself is sent back."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        length = now.header.region if now.header is not None else None  # full sequence length
        if length is not None and self.region is not None and leaf.is_floating_point() and leaf.ndim > self.region.dim:
            return self.region.resume(leaf, length)
        return leaf.view_as(leaf)

    def _check_for_nan(self, stage: int, inputs: Any, outcome: Outcome, read: list[str]) -> None:
        """inputs: of the stage. read: parameters of other stages that its forward has computed with."""
        output = [leaf for leaf in private.tree_leaves(outcome.output) if isinstance(leaf, torch.Tensor)]
        if _has_nan(outcome.tensors or output) and not _has_nan(private.tree_leaves(inputs)):
            unit = self.units[self.cut.stages.bounds(stage)[0]]
            what = (
                f"stage {stage} computes NaN: its forward uses more outputs of absent modules than the arguments of "
                f"{unit}"
            )
            fix = (
                "split elsewhere, name the argument under `carry:`, or the module under `skips:` of the plan's "
                "`pipeline:`"
            )
            rows = (("reads", f"{short_list(read)} of other stages"),) if read else ()
            if read and stage:
                fix += "; a parameter of another stage: a module that shares it, such as a tied head"
            elif read:
                what = f"stage 0 computes NaN: its forward reads {', '.join(read)} of another stage"
                fix = "modules are on stages in their order; name those that run first under `pipeline: {first: [...]}`"
            raise ModelError(Problem("absent-module-used", what, self.cut.stages.cuts.where, rows=rows, fix=fix))

    def _compare(self, now: _RunningForward, unit: str, call: dict[int | str, Any]) -> None:
        """Arguments that are not sent must be equal on both stages, which compute them."""
        assert now.header is not None
        for key, digests in now.header.compared.items():
            if _digests(call.get(key)) != digests:
                what = (
                    f"argument {_name(self.modules.get(unit), key)} of {unit} differs from that of the previous stage"
                )
                fix = "name it in the plan: `pipeline: {carry: [...]}`, together with the layer's own input"
                raise ModelError(Problem("argument-not-carried", what, fix=fix))

    # -- what is sent ---------------------------------------------------------------------------------------------

    def _package(self, stage: int, end: _StageEnd, now: _RunningForward) -> Outcome:
        carried = self._carried(end.unit, end.call)
        skips = {
            name: value for name, value in (now.content["skips"] | now.skips).items() if self._last_user[name] > stage
        }
        router = router_sums_to_send(self.module)
        form, tensors = Nested.of({"call": carried, "skips": skips, "router": router})
        if not now.make_header:
            return Outcome(header=StageHeader(form), tensors=tensors)
        compared = {key: _digests(value) for key, value in end.call.items() if key not in carried}
        length = self.region.inside if self.region is not None else None
        header = StageHeader(form, now.outputs, {key: digests for key, digests in compared.items() if digests}, length)
        return Outcome(header=header, tensors=tensors)

    def _carried(self, unit: str, call: dict[int | str, Any]) -> dict[int | str, Any]:
        return carried_arguments(self.modules.get(unit), call, self.cut.stages.cuts.carry)

    def _early_calls(self, now: _RunningForward) -> AbstractContextManager[list[str]]:
        """The modules that are called before the stage begins, once for each signature of the inputs."""
        if not (now.make_header and now.first and now.grad):
            return nullcontext([])
        units = ((unit, self.modules[unit]) for unit in self.units[now.first : now.stop] if unit in self.modules)
        return watched(units, lambda: now.entered)

    def _too_early(self, first: int, names: list[str]) -> ModelError:
        unit = self.units[first]
        what = f"{short_list(names)} is called before its stage begins at {unit}, and would get no gradient"
        fix = "cut elsewhere, or name the modules that run first under `pipeline: {first: [...]}`"
        return ModelError(Problem("unit-order", what, self.cut.stages.cuts.where, fix=fix))

    def _order(self, index: int, what: str) -> ModelError:
        fix = "list modules under `pipeline:` in the order in which the forward calls them, each called once"
        return ModelError(Problem("unit-order", f"{self.units[index]} {what}", self.cut.stages.cuts.where, fix=fix))


class SingleStageRunner:
    """Runs a model that was not split into stages."""

    def __init__(self, module: nn.Module):
        self.module = module

    def run(
        self,
        stage: int,
        args: tuple,
        kwargs: dict,
        content: dict[str, Any],
        header: StageHeader | None,
        make_header: bool,
    ) -> Outcome:
        return Outcome(output=self.module(*args, **kwargs))


def carried_arguments(
    module: nn.Module | None, call: dict[int | str, Any], names: Sequence[str]
) -> dict[int | str, Any]:
    """The arguments of a unit's call that are sent to its stage.

    These are the arguments that require a gradient, and those that the plan names under `carry:`, or the first argument
    where it names none.

    Args:
        module: the unit, for the names of positional arguments.
        call: position or name to value.
        names: the names in the plan.
    """
    carried = {key for key in call if _name(module, key) in names or key in names}
    if not names:
        carried.update(list(call)[:1])
    for key, value in call.items():
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in private.tree_leaves(value)):
            carried.add(key)
    return {key: value for key, value in call.items() if key in carried}


def _copy_of(out: Any) -> Any:
    """The same tensors in other containers, which the forward may write to."""
    return private.tree_map(lambda leaf: leaf, out)


def _without_towers(output: Any) -> Any:
    """The output of a model without what a tower returned, which the first stage has alone."""
    if isinstance(output, dict):
        for name in TOWER_OUTPUTS:
            if output.get(name) is not None:
                output[name] = None
    return output


_CPU = torch.device("cpu")


def _has_nan(values: list[Any]) -> bool:
    return any(
        bool(_plain(value).isnan().any())
        for value in values
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )


def _plain(value: Any) -> T:
    """The local tensor of sharded logits or of a DTensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def _put(value: Any, local: Any) -> bool:
    """Swap the received tensor into the forward's own tensor object, so that other code that uses this object sees it.

    Returns: whether it was swapped. Otherwise the unit gets the received tensor, and the forward keeps its NaN.
    """
    if not isinstance(value, torch.Tensor) or type(local) is not torch.Tensor or local.requires_grad:
        return False
    try:
        torch.utils.swap_tensors(local, value)
    except RuntimeError:  # a weak reference or a node of the graph refers to it
        return False
    return True


def _digests(value: Any) -> list[list[int]]:
    return [digest(leaf).tolist() for leaf in private.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _name(module: nn.Module | None, key: int | str) -> str:
    """The name of an argument of a module's forward that is given by position or name."""
    if isinstance(key, str) or module is None:
        return str(key)
    names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return names[key] if key < len(names) else str(key)


class _UnitCall(InterceptedCall):
    """The interception of a unit's call. Copies of the model are not part of the pipeline and have none."""

    def __init__(self, runner: StageRunner, index: int, module: nn.Module):
        super().__init__(module)
        self.runner, self.index = runner, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.call(self.index, self, args, kwargs)


class _Ending:
    """The root's forward, which returns at the end of a stage, with the tensors of the next call for wrappers around
    it."""

    def __init__(self, runner: StageRunner):
        self.runner = runner

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ending:
        return self  # the units of a copy are not intercepted

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return run_inner(module, STAGE, args, kwargs)
        except _StageEnd as end:
            end.__traceback__ = None  # its frames would keep all tensors of the forward alive
            assert self.runner.current is not None
            self.runner.current.end = end
            return tuple(leaf for leaf in private.tree_leaves(end.call) if isinstance(leaf, torch.Tensor))
