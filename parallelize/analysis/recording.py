"""From a model on meta, a plan and a mesh to a `Trace`: one stage's worth of a training step, each kind of layer once.

The pipeline is not cut here: all units run one after another, and `step.py` deals them out to stages. Data axes are in the
mesh, so that what is counted over them is, but gradients are not reduced: that is arithmetic too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.analysis.attention import fused_on_meta
from parallelize.analysis.likeness import Alike, remember_outputs, thin_out
from parallelize.analysis.records import OUTSIDE, Boundary, Trace
from parallelize.analysis.scopes import Scopes
from parallelize.analysis.segmenting import Marks, is_regular, pass_of
from parallelize.analysis.tracing import Axes, Event, Tracer
from parallelize.apply import parallelize_module
from parallelize.context.apply import context_parallel
from parallelize.context.inputs import length_of
from parallelize.context.sequences import own_targets
from parallelize.context.state import context_of
from parallelize.errors import ModelError, ParallelizeError, Problem
from parallelize.fuse_loss import fuse_heads
from parallelize.groups import mesh_spec
from parallelize.loss import cross_entropy, valid_tokens
from parallelize.pipeline.engine import WholeModel
from parallelize.pipeline.feed import microbatches
from parallelize.pipeline.schedules import Action, build_schedule
from parallelize.pipeline.step import StepRun
from parallelize.pipeline.units import carried_arguments
from parallelize.plan.schema import Plan
from parallelize.plan.stages import Stages
from parallelize.recomputation import recompute as recompute_units
from parallelize.sharding import record_of
from parallelize.zero.apply import cast_parameters
from parallelize.zero.buckets import local

T = torch.Tensor


@dataclass(frozen=True)
class Modes:
    """What is switched on where the plan is applied: as `parallelize_model` takes them."""

    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    fuse_loss: bool | None = None
    recompute: str = "off"
    recompute_every: int = 1
    recompute_save: tuple[str, ...] | None = None
    dtype: torch.dtype | None = None
    ulysses: int = 1


@dataclass(frozen=True)
class Work:
    """What a rank is fed: rows of one microbatch, and the loss. `make` gives inputs of that many rows, on meta."""

    make: Callable[[nn.Module, int], dict[str, Any]]
    rows: int
    loss: Callable[[Any, Any], T] | None = None
    count: Callable[[Any], Any] | None = None


def record(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None,
    stages: Stages | None,
    layers: Sequence[str],
    modes: Modes,
    work: Work,
    *,
    alike: Alike,
    halves: bool = False,
) -> Trace:
    """Run two microbatches of `model`, which is used up: on meta, planned by nobody, all of its layers present.

    Args:
        layers: in order. alike: which of them run. halves: run backward in two, gradients of inputs first.
    """
    stands_for = alike.stands_for
    thin_out(model, stands_for)
    remember_outputs(model, set(stands_for.values()))
    _apply(model, mesh, plan, modes, [name for name in layers if stands_for[name] == name], list(layers))
    unit_of = stages.unit_of if stages is not None else (lambda name: OUTSIDE)
    tracer = Tracer(Scopes(model), unit_of, Axes(mesh_spec(mesh), 0))
    boundaries = _Boundaries(model, stages, tracer)
    entry = model.get_submodule(layers[0]) if halves else None
    actions = _run(model, tracer, boundaries, work, entry)
    gradients = {
        serial for p in model.parameters() if p.grad is not None and (serial := tracer.serial_of(local(p.grad)))
    }
    likeness = {unit: stands_for.get(unit, unit) for unit in (stages.units if stages is not None else ())}
    marks = Marks(list(layers), gradients, boundaries.carried)
    half = len(actions) // 2
    first, later = pass_of(actions[:half], marks), pass_of(actions[half:], marks)
    return Trace(first, later, boundaries.found, likeness, is_regular(actions[half:], marks))


def _apply(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None, modes: Modes, present: list[str], layers: list[str]
) -> None:
    if "tp" in mesh_spec(mesh).names:
        switched: dict[str, Any] = {"sequence_parallel": modes.sequence_parallel, "loss_parallel": modes.loss_parallel}
        switched |= {"fuse_loss": modes.fuse_loss, "ulysses": modes.ulysses}
        parallelize_module(model, mesh, plan, overlap="off", **switched)
    else:
        if modes.fuse_loss or (modes.fuse_loss is None and plan is not None and plan.fuse_loss):
            fuse_heads(model, plan)
        context_parallel(model, mesh, plan, ulysses=modes.ulysses)
    if modes.recompute != "off":
        units = None
        if plan is None or not plan.recompute_units:  # layers keep their numbers, also where others are left out
            units = [name for name in present if layers.index(name) % modes.recompute_every == 0] or None
        every = 1 if units else modes.recompute_every
        recompute_units(model, modes.recompute, every=every, units=units, save=modes.recompute_save, plan=plan)
    if modes.dtype is not None:
        cast_parameters(model, modes.dtype)


def _run(
    model: nn.Module, tracer: Tracer, boundaries: _Boundaries, work: Work, entry: nn.Module | None
) -> list[list[Event]]:
    """Events of the actions of two microbatches.

    entry: the first layer; given, backward is split in halves there, as on a stage that does not hold the embedding.
    """
    with torch.device("meta"):
        given = work.make(model, 2 * work.rows)
    targets, context = given.pop("targets", None), context_of(model)
    if context is not None:
        targets = own_targets(context, length_of(model, (), given), targets)
    feeds = microbatches((), given, targets, 2, ())
    inputs = [leaf for leaf in private.tree_leaves((given, targets)) if isinstance(leaf, T)]
    tracer.known([*map(local, model.parameters()), *model.buffers(), *inputs])
    total = (work.count or valid_tokens)(targets) if targets is not None else 1
    loss = work.loss or _token_loss
    actions: list[list[Event]] = []
    kinds = "FB" if entry is None else "FIW"

    def enter(stage: int, microbatch: int, feed: Any) -> None:
        actions.append(tracer.begin("backward" if len(actions) % len(kinds) else "forward"))

    run = _Recorded(
        build_schedule("1f1b", 1, 2),
        [Action(0, kind, microbatch) for microbatch in range(2) for kind in kinds],
        WholeModel(model),
        None,
        feeds,
        (),
        {},
        model,
        lambda output, wanted: loss(output, wanted) / total,
        enter=enter,
    )
    run.begin_at(entry)
    record = record_of(model)
    owed = record.ledger.accumulating() if record is not None else nullcontext()
    with fused_on_meta(), tracer, tracer.scopes.watching(), boundaries, owed:
        run.run()
        tracer.begin("step")  # what is owed is paid when the block ends, and counted elsewhere
    if run.cause is not None:
        raise run.cause if isinstance(run.cause, ParallelizeError) else _cannot_record(model, run.cause) from run.cause
    return actions


def _cannot_record(model: nn.Module, cause: BaseException) -> ModelError:
    """Whatever a stock forward raises on tensors without values."""
    what = f"the forward of {type(model).__name__} cannot run on tensors without values: {cause}".splitlines()[0]
    fix = "it reads values (.item(), `if tensor`), or was given inputs that it does not take"
    return ModelError(Problem("cannot-record", what, fix=fix))


class _Recorded(StepRun):
    """A step of one stage that may begin at a layer, so that its backward has an input to end at."""

    _leaf: T | None = None

    def begin_at(self, entry: nn.Module | None) -> None:
        if entry is not None:
            entry.register_forward_pre_hook(self._cut, with_kwargs=True)

    def _cut(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if private.backward_id() != -1:
            return args, kwargs
        call = {**dict(enumerate(args)), **kwargs}
        key = next(key for key, value in call.items() if isinstance(value, T) and value.requires_grad)
        call[key] = self._leaf = call[key].detach().requires_grad_()
        return tuple(call[place] for place in range(len(args))), {key: call[key] for key in kwargs}

    def _finish_forward(self, microbatch: int, inputs: list[T], output: Any, feed: Any) -> None:
        leaf, self._leaf = self._leaf, None
        super()._finish_forward(microbatch, inputs if leaf is None else [leaf], output, feed)


def _token_loss(output: Any, targets: T) -> T:
    logits = output if isinstance(output, T) else output.logits
    return cross_entropy(logits, targets, reduction="sum")


class _Boundaries:
    """What units are called with: as `pipeline/units.py` chooses what travels."""

    def __init__(self, model: nn.Module, stages: Stages | None, tracer: Tracer):
        self.model, self.stages, self.tracer = model, stages, tracer
        self.found: dict[str, Boundary] = {}
        self.carried: dict[int, str] = {}  # storages of what travels, and of its gradients: the unit that uses them up
        self._handles: list[Any] = []
        self._present: dict[str, nn.Module] = {}

    def __enter__(self) -> None:
        self._present = dict(self.model.named_modules())
        for unit in self.stages.units if self.stages is not None else ():
            module = self._present.get(unit)
            if module is not None:
                hook = self._noting(unit)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def _noting(self, unit: str) -> Callable[[nn.Module, tuple, dict], None]:
        known = [name for name in self.stages.units if name in self._present] if self.stages is not None else []
        place = known.index(unit)
        before = known[place - 1] if place else ""

        def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if private.backward_id() != -1:
                return
            assert self.stages is not None
            carried = carried_arguments(module, {**dict(enumerate(args)), **kwargs}, self.stages.cuts.carry)
            tensors = [leaf for leaf in private.tree_leaves(carried) if isinstance(leaf, T)]
            sizes = [(x.numel() * x.element_size(), x.requires_grad) for x in tensors]
            self.found.setdefault(unit, Boundary(tuple(sizes)))
            for x in tensors:
                self._carry(unit, x)
                if x.requires_grad and before:
                    x.register_hook(partial(self._carry, before))

        return note

    def _carry(self, unit: str, x: T) -> None:
        serial = self.tracer.serial_of(x)
        if serial:
            self.carried.setdefault(serial, unit)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
