"""From a model on meta, a plan and a mesh to a `MicrobatchTrace`: all units of a training step, equal layers once.

The pipeline is not split here: all units run one after another, and `cost/training_step.py` assigns them to stages. The
axes `tp` and `cp` are in the mesh. Reductions over data axes are computed in `cost/data_axes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.axes.batch.input_batch import BatchForm
from parallelize.axes.context.context_parallel import apply_context
from parallelize.axes.context.forward_state import context_of
from parallelize.axes.context.local_sequences import local_targets
from parallelize.axes.pipeline.batch_reader import beside_prompts, split_batch, token_loss
from parallelize.axes.pipeline.schedules import Action, build_schedule
from parallelize.axes.pipeline.stage_forward import SingleStageRunner, carried_arguments
from parallelize.axes.pipeline.step_runner import StepRun
from parallelize.axes.recomputation.recompute import recompute
from parallelize.axes.tensor.experts.routing_load import experts_of
from parallelize.axes.vocabulary.loss.losses import fuse_heads, valid_tokens
from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.reduced_parameters import cast_parameters
from parallelize.axes.zero.router_loss import asks_for_router_loss, recorded_routers
from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.experts.routes import AssumedRouting
from parallelize.plan.dims.meta_calls import without_values
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.stages import Stages
from parallelize.state.records import record_of
from parallelize.tools.analysis.record.attention_model import forwards_on_meta
from parallelize.tools.analysis.record.layer_dedup import (
    LayerClasses,
    Marks,
    drop_represented,
    freed_inputs,
    is_regular,
    segments_of,
)
from parallelize.tools.analysis.record.trace_data import OUTSIDE, MicrobatchTrace, StageBoundary
from parallelize.tools.analysis.record.tracing import Event, MeshAxes, Scopes, Tracer
from parallelize.training.apply_plan import apply_plan

T = torch.Tensor
RECORDED_OPTIONS = (
    "sequence_parallel",
    "loss_parallel",
    "fuse_loss",
    "recompute",
    "recompute_every",
    "recompute_save",
    "dtype",
    "ulysses",
    "ep",
    "etp",
)
"""Options that change what a rank does with a microbatch; overlap changes only when."""
NUM_MICROBATCHES = 2  # the first allocates gradients, the second adds to them


@dataclass(frozen=True)
class RecordedBatch:
    """The inputs of a rank and its loss. make: (model, number of sequences) -> inputs on meta. size: sequences per
    microbatch. loss, count: as `Pipeline` takes them."""

    make: Callable[[nn.Module, int], dict[str, Any]]
    size: int
    loss: Callable[[Any, Any], T] | None = None
    count: Callable[[Any], Any] | None = None


def record(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    resolved: ResolvedPlan,
    stages: Stages | None,
    classes: LayerClasses,
    options: Options,
    batch: RecordedBatch,
    split_backward: bool = False,
    to_one_rank: bool = False,
) -> MicrobatchTrace:
    """Run two microbatches of `model`, which is modified and cannot be used afterwards.

    Args:
        model: on meta, no plan applied, with all of its layers.
        resolved: the plan of the model with all layers.
        stages: one stage with all units; None where the model has no layers.
        classes: which layers run, in the model's order.
        options: those of `RECORDED_OPTIONS` are applied.
        split_backward: run dgrad and wgrad apart.
        to_one_rank: this rank gets all tokens of its group of `ep`; otherwise tokens are routed evenly.
    """
    layers = list(classes.representatives)
    routers = _routers(model, stages)
    drop_represented(model, classes)
    view = MeshView(mesh)
    _apply(model, view, resolved, options, classes)
    unit_of = stages.unit_of if stages is not None else (lambda name: OUTSIDE)
    tracer = Tracer(Scopes(model), unit_of, MeshAxes(view.spec, 0, _expert_ranks(model)))
    boundaries = _Boundaries(model, stages, tracer)
    entry = model.get_submodule(layers[0]) if split_backward else None
    with AssumedRouting(to_one_rank) as routing:
        actions = _run(model, tracer, boundaries, batch, entry)
    gradients = {
        serial for p in model.parameters() if p.grad is not None and (serial := tracer.serial_of(to_local(p.grad)))
    }
    units = stages.units if stages is not None else ()
    representatives = {unit: classes.representatives.get(unit, unit) for unit in units}
    marks = Marks(layers, gradients, boundaries.carried)
    half = len(actions) // NUM_MICROBATCHES
    first, later = segments_of(actions[:half], marks), segments_of(actions[half:], marks)
    regular = is_regular(actions[half:], marks)
    most = routing.most_rows, routing.most_choices
    none = frozenset(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    sizes, skips = boundaries.sizes, boundaries.skips
    inputs = freed_inputs(actions[half:], marks)
    return MicrobatchTrace(first, later, sizes, representatives, regular, *most, routers, none, skips, inputs)


def _apply(model: nn.Module, mesh: MeshView, full: ResolvedPlan, options: Options, classes: LayerClasses) -> None:
    """Apply the plan to the layers that run."""
    resolved = resolve(full.plan, describe(model), mesh.spec, replace(options, overlap="off", recompute="off"))
    if "tp" in mesh.spec.names:
        apply_plan(model, mesh, lambda: resolved)
    else:
        if options.fuse_loss:
            fuse_heads(model, resolved)
        apply_context(model, mesh, lambda: resolved)
    if options.recompute != "off":
        every, left_out = full.options.recompute_every, set(classes.representatives) - set(classes.running)
        units = [fqn for fqn in full.recompute_units[::every] if not any(_inside(fqn, layer) for layer in left_out)]
        recompute(model, options.recompute, units=units, save=options.recompute_save)
    if options.dtype is not None:
        cast_parameters(model.modules(), getattr(torch, options.dtype))


def _routers(model: nn.Module, stages: Stages | None) -> dict[str, int]:
    """Units with a router whose sums the load-balancing loss reads -> the number of its experts; none where it is not
    asked for."""
    if stages is None or not asks_for_router_loss(model):
        return {}
    count = max((count for _, _, count in experts_of(model)), default=0)
    names = {id(module): name for name, module in model.named_modules()}
    units = (stages.unit_of(names[id(router)]) for router, _ in recorded_routers(model))
    return {unit: count for unit in units if unit is not None}


def _expert_ranks(model: nn.Module) -> tuple[int, ...]:
    """The ranks over which experts are folded; empty where they are not."""
    plan_record = record_of(model)
    folded = plan_record.folded if plan_record is not None else None
    return folded.group("ep").ranks if folded is not None else ()


def _inside(fqn: str, module: str) -> bool:
    return fqn == module or fqn.startswith(module + ".")


def _run(
    model: nn.Module, tracer: Tracer, boundaries: _Boundaries, batch: RecordedBatch, entry: nn.Module | None
) -> list[list[Event]]:
    """Events of the actions of two microbatches.

    entry: the first layer. If it is given, backward is split there into dgrad and wgrad, as on a stage without the
    embedding.
    """
    with torch.device("meta"):
        inputs = batch.make(model, NUM_MICROBATCHES * batch.size)
    inputs = private.tree_map(without_values, inputs)
    targets, context = inputs.pop("targets", None), context_of(model)
    call = BatchForm(model, dict.fromkeys([*inputs, "targets"], False)).step_batch((), inputs)
    if context is not None:
        targets = local_targets(context, call.length, targets)
    targets = beside_prompts(model, inputs, targets)
    tensors = [leaf for leaf in private.tree_leaves((inputs, targets)) if isinstance(leaf, T)]
    tracer.ignore([*map(to_local, model.parameters()), *model.buffers(), *tensors])
    total = (batch.count or valid_tokens)(targets) if targets is not None else 1
    loss = batch.loss or token_loss
    actions: list[list[Event]] = []
    kinds = "FB" if entry is None else "FIW"

    def begin_action(stage: int, microbatch: int, microbatch_inputs: Any) -> None:
        actions.append(tracer.begin("backward" if len(actions) % len(kinds) else "forward"))

    run = _RecordedRun(
        schedule=build_schedule("1f1b", 1, NUM_MICROBATCHES),
        steps=[Action(0, kind, microbatch) for microbatch in range(NUM_MICROBATCHES) for kind in kinds],
        runner=SingleStageRunner(model),
        transport=None,
        microbatches=split_batch(replace(call, targets=targets), NUM_MICROBATCHES),
        signatures=[()] * NUM_MICROBATCHES,
        headers={},
        root=model,
        loss_of=lambda output, targets: loss(output, targets) / total,
        enter=begin_action,
    )
    run.begin_at(entry)
    record = record_of(model)
    pending = record.pending_reductions.accumulating() if record is not None else nullcontext()
    with forwards_on_meta(model), tracer, tracer.scopes.watching(), boundaries, pending:
        run.run()
        tracer.begin("step")  # pending reductions run when the block ends; `cost/training_step.py` counts them
    if run.cause is not None:
        raise run.cause if isinstance(run.cause, ParallelizeError) else _cannot_record(model, run.cause) from run.cause
    return actions


def _cannot_record(model: nn.Module, cause: BaseException) -> ModelError:
    """The error for a stock forward that raises on tensors without values."""
    what = f"the forward of {type(model).__name__} cannot run on tensors without values: {cause}".splitlines()[0]
    fix = "it reads values (.item(), `if tensor`), or got inputs that it does not take"
    return ModelError(Problem("cannot-record", what, fix=fix))


class _RecordedRun(StepRun):
    """A step of one stage. It may begin at a layer, so that its dgrad has an input to end at."""

    _entry_input: T | None = None

    def begin_at(self, entry: nn.Module | None) -> None:
        if entry is not None:
            entry.register_forward_pre_hook(self._detach_input, with_kwargs=True)

    def _detach_input(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if private.backward_id() != -1:  # recompute
            return args, kwargs
        arguments = {**dict(enumerate(args)), **kwargs}
        tensors = {key: x for key, x in arguments.items() if isinstance(x, T) and x.is_floating_point()}
        trained = (key for key, x in tensors.items() if x.requires_grad)
        key = next(trained, next(iter(tensors)))  # of the first layer after a frozen embedding none does
        arguments[key] = self._entry_input = arguments[key].detach().requires_grad_()
        return tuple(arguments[index] for index in range(len(args))), {key: arguments[key] for key in kwargs}

    def _finish_forward(self, microbatch: int, inputs: list[T], output: Any, microbatch_inputs: Any) -> None:
        entry_input, self._entry_input = self._entry_input, None
        super()._finish_forward(microbatch, inputs if entry_input is None else [entry_input], output, microbatch_inputs)


def _tensors_of(value: Any) -> list[T]:
    return [leaf for leaf in private.tree_leaves(value) if isinstance(leaf, T)]


def _sizes_of(value: Any) -> StageBoundary:
    return StageBoundary(tuple((x.numel() * x.element_size(), x.requires_grad) for x in _tensors_of(value)))


class _Boundaries:
    """Records what units are called with, chosen as `axes/pipeline/stage_forward.py` chooses what travels."""

    def __init__(self, model: nn.Module, stages: Stages | None, tracer: Tracer):
        self.model, self.stages, self.tracer = model, stages, tracer
        self.sizes: dict[str, StageBoundary] = {}
        # storages of what travels, and of its gradients -> the unit that consumes them
        self.carried: dict[int, str] = {}
        self.skips: dict[str, StageBoundary] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        if self.stages is None:
            return
        modules = dict(self.model.named_modules())
        previous = ""
        for unit in self.stages.units:
            if unit in modules:
                hook = self._recorder(unit, previous, self.stages.cuts.carry)
                self._handles.append(modules[unit].register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
                previous = unit
        for source, _ in self.stages.cuts.skips:
            self._handles.append(modules[source].register_forward_hook(partial(self._record_output, source)))

    def _record_output(self, unit: str, module: nn.Module, args: tuple, output: Any) -> None:
        self.skips.setdefault(unit, _sizes_of(output))

    def _recorder(self, unit: str, previous: str, carry: Sequence[str]) -> Callable[[nn.Module, tuple, dict], None]:
        def record_inputs(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if private.backward_id() != -1:  # recompute
                return
            carried = carried_arguments(module, {**dict(enumerate(args)), **kwargs}, carry)
            self.sizes.setdefault(unit, _sizes_of(carried))
            for x in _tensors_of(carried):
                self._carry(unit, x)
                if x.requires_grad and previous:
                    x.register_hook(partial(self._carry, previous))

        return record_inputs

    def _carry(self, unit: str, x: T) -> None:
        serial = self.tracer.serial_of(x)
        if serial:
            self.carried.setdefault(serial, unit)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
