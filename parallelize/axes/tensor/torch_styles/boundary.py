"""Styles at module boundaries: norms on sequence shards, and conversions of inputs and outputs between layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallelize.axes.tensor.layers.norms import gather_normalized
from parallelize.axes.tensor.placements import as_dtensor, convert, local_input
from parallelize.axes.tensor.planned_forward import ModuleRuntime, install, too_many_inputs
from parallelize.axes.tensor.shared_input import SharedConversion
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.base.layout import Layout, replicated
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.comm.meshes import tp_mesh
from parallelize.plan.model_facts import describe
from parallelize.plan.styles.style import ModuleFacts
from parallelize.state.parameters import Slot
from parallelize.state.pending_reductions import PendingReduction, PendingReductions
from parallelize.state.records import applied
from parallelize.state.sharding import Sharder, Unsharded

# -- module style ----------------------------------------------------------------------------------------------------
# What all styles share: the module they are applied to, its parameters as DTensors, and their slots.


ParallelStyle: Any = private.parallel_style_class()


@dataclass(frozen=True)
class Target:
    """What a style is applied to: one module on one mesh. `conversions`: of the column linears of one model, by input
    layout."""

    module: nn.Module
    facts: ModuleFacts
    mesh: DeviceMesh
    group: Group
    sharder: Sharder
    pending_reductions: PendingReductions
    conversions: dict[Placement, SharedConversion]

    def column_conversion(self, source: Placement) -> SharedConversion:
        """The conversion of an input to a full plain tensor whose gradient is one term of a sum."""
        if source not in self.conversions:
            desired = Replicate()
            convert = partial(
                local_input, mesh=self.mesh, group=self.group, source=source, desired=desired, partial_grad=True
            )
            self.conversions[source] = SharedConversion(convert)
        return self.conversions[source]


class ModuleStyle(ParallelStyle):
    """The base of the styles of this package. `_apply` is what PyTorch's `parallelize_module` calls."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = tp_mesh(device_mesh)
        self.install(target_of(module, "", mesh, PendingReductions(), getattr(self, "src_data_rank", 0), {}))
        return module

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Raises: ModelError where the style does not support the module."""

    def install(self, target: Target) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        attributes = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({attributes})"


def target_of(
    module: nn.Module,
    fqn: str,
    mesh: DeviceMesh,
    pending_reductions: PendingReductions,
    source: int | None,
    conversions: dict[Placement, SharedConversion],
) -> Target:
    """Raises: ModelError `already-parallelized`."""
    group = Group(mesh.get_group())
    facts = replace(describe(module).modules[""], fqn=fqn)
    planned = applied(module).planned
    if planned is not None and planned.slots:
        raise ModelError(Problem("already-parallelized", f"{fqn or type(module).__name__} has a style already"))
    sharder = Sharder(source, None, None)
    return Target(module, facts, mesh, group, sharder, pending_reductions, conversions)


def planned_of(target: Target, layouts: dict[str, Layout], partial_keys: tuple[str, ...] = ()) -> ModuleRuntime:
    """Shard the module's parameters and make slots for them.

    Args:
        layouts: of each parameter. partial_keys: the parameters whose gradients are summed over ranks.
    """
    table: dict[str, Any] = target.module._parameters
    for key in [key for key in layouts if isinstance(table[key], DTensor)]:  # tied, and sharded by another rule
        _check_tie(target, key, table[key], layouts[key])
    keys = [key for key in layouts if not isinstance(table[key], DTensor)]
    unsharded = [Unsharded(table[key], layouts[key], target.mesh) for key in keys]
    for index, new in target.sharder.parameters(unsharded):
        table[keys[index]] = new
    slots = []
    for order, key in enumerate(layouts):
        is_partial = key in partial_keys and target.group.size > 1
        reduction = PendingReduction(order, ((target.group, None, 0, 0),)) if is_partial else None
        slots.append(Slot(key, None, reduction, target.pending_reductions))
    return ModuleRuntime(tuple(slots), target.module.__dict__.get("forward"))


def _check_tie(target: Target, key: str, tied: DTensor, layout: Layout) -> None:
    placement = Replicate() if layout.dim is None else Shard(layout.dim)
    if tied.placements != (placement,):
        raise PlanError(
            Problem(
                "broken-tie",
                f"{target.facts.fqn}.{key} is tied, and its rules split it as {tied.placements[0]} and {placement}",
                fix="split the same dim: RowwiseParallel for the embedding, ColwiseParallel for the head",
            )
        )


def require_kind(style: Any, facts: ModuleFacts, kinds: tuple[str, ...]) -> None:
    """Raises: ModelError `wrong-module-for-style`."""
    if facts.kind not in kinds:
        raise ModelError(
            Problem(
                "wrong-module-for-style",
                f"{type(style).__name__} needs a {' or '.join(kinds)}; {facts.fqn!r} is a {facts.class_name}",
                fix="name the module that has the weight",
            )
        )


# -- boundary --------------------------------------------------------------------------------------------------------


Layouts = Placement | tuple[Placement | None, ...] | None


class SequenceParallel(ModuleStyle):
    """Run a norm (or dropout) on sequence shards. Gradients of its replicated parameters are summed over ranks.

    Args:
        sequence_dim: the dim that the input is sharded along (default: 1, of [batch, sequence, hidden]).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style` where a module inside has parameters.
    Cost: backward all-reduces the gradients of the parameters, once for each backward pass.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Check that `module`, which `facts` describe, holds its parameters itself.

        Raises: ModelError `wrong-module-for-style` where a module inside has parameters.
        """
        inside = [name for name, _ in module.named_parameters() if "." in name]
        if inside:
            what = (
                f"{facts.fqn!r} has a module inside with parameters ({inside[0]}), whose gradients would not be summed"
            )
            raise ModelError(Problem("wrong-module-for-style", what, fix="name the module that has the parameters"))

    def install(self, target: Target) -> None:
        """Apply the style to `target`, a module on a mesh. Its forward runs on sequence shards, and its parameters are
        DTensors."""
        layouts = {key: replicated(shape, target.group.size) for key, shape in target.facts.shapes.items()}
        planned = planned_of(target, layouts, partial_keys=tuple(layouts))
        shard = self.sequence_sharding[0]
        planned.enter = partial(
            local_input, mesh=target.mesh, group=target.group, source=shard, desired=shard, partial_grad=False
        )
        if not self.use_local_output:
            planned.leave = partial(as_dtensor, mesh=target.mesh, placement=shard)
        gather_normalized(target.module, planned, shard.dim, target.mesh, target.group, self.use_local_output)
        install(target.module, planned)


class PrepareModuleInput(ModuleStyle):
    """Convert inputs of a module, by position and by keyword, between layouts.

    Args:
        input_layouts, desired_input_layouts: the layouts before and after, one for each positional input; None leaves
            an input unchanged.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by keyword.
        use_local_output: pass plain local tensors to the module rather than DTensors.

    Raises: PlanError `layout-count`; ModelError `layout-count` from the forward.
    Cost: the collectives of each conversion, in forward and backward.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ):
        super().__init__()
        self.input_layouts = _tuple(input_layouts)
        self.desired_input_layouts = _tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        same_kwargs = self.input_kwarg_layouts.keys() == self.desired_input_kwarg_layouts.keys()
        if len(self.input_layouts) != len(self.desired_input_layouts) or not same_kwargs:
            raise PlanError(
                Problem(
                    "layout-count",
                    "input layouts and desired input layouts are of different inputs",
                    "PrepareModuleInput",
                )
            )

    def install(self, target: Target) -> None:
        """Apply the style to `target`, a module on a mesh. A hook before its forward converts the inputs."""
        conversion = partial(convert, mesh=target.mesh, group=target.group, local=self.use_local_output)

        def pre(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if self.input_layouts and len(args) > len(self.input_layouts):
                raise too_many_inputs(target.facts.fqn, len(args), len(self.input_layouts))
            if len(args) < len(self.input_layouts) and not self.input_kwarg_layouts:
                fqn = target.facts.fqn
                what = f"{fqn} got {len(args)} positional inputs, and input_layouts has {len(self.input_layouts)}"
                raise ModelError(Problem("layout-count", what, fix="use input_kwarg_layouts for keyword inputs"))
            pairs = zip(self.input_layouts, self.desired_input_layouts, strict=True)
            converted = [
                conversion(arg, source=source, desired=desired)
                for arg, (source, desired) in zip(args, pairs, strict=False)
            ]
            for name, source in self.input_kwarg_layouts.items():
                if name in kwargs:
                    desired = self.desired_input_kwarg_layouts[name]
                    kwargs[name] = conversion(kwargs[name], source=source, desired=desired)
            return (*converted, *args[len(converted) :]), kwargs

        target.module.register_forward_pre_hook(pre, with_kwargs=True)


class PrepareModuleOutput(ModuleStyle):
    """Convert outputs of a module between layouts.

    Args:
        output_layouts, desired_output_layouts: the layouts before and after, one for each output; None leaves an output
            unchanged.
        use_local_output: return plain local tensors rather than DTensors.

    Raises: PlanError `layout-count`; ModelError `layout-count` from the forward.
    Cost: the collectives of each conversion, in forward and backward.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True):
        super().__init__()
        self.output_layouts = _tuple(output_layouts)
        self.desired_output_layouts = _tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            raise PlanError(
                Problem(
                    "layout-count", "output layouts and desired output layouts differ in number", "PrepareModuleOutput"
                )
            )

    def install(self, target: Target) -> None:
        """Apply the style to `target`, a module on a mesh. A hook after its forward converts the outputs."""
        conversion = partial(convert, mesh=target.mesh, group=target.group, local=self.use_local_output)
        pairs = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))

        def post(_: nn.Module, args: tuple, out: Any) -> Any:
            outs = out if isinstance(out, tuple) else (out,)
            if len(outs) != len(pairs):
                what = f"{target.facts.fqn} returned {len(outs)} outputs, and output_layouts has {len(pairs)}"
                raise ModelError(Problem("layout-count", what))
            converted = tuple(
                conversion(tensor, source=source, desired=desired)
                for tensor, (source, desired) in zip(outs, pairs, strict=True)
            )
            return converted if isinstance(out, tuple) else converted[0]

        target.module.register_forward_hook(post)


class PrepareModuleInputOutput(ModuleStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one style.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: those of
            `PrepareModuleInput`.
        use_local_input: pass plain local tensors to the module rather than DTensors.
        output_layouts, desired_output_layouts, use_local_output: those of `PrepareModuleOutput`.

    Raises: PlanError `layout-count`; ModelError `layout-count` from the forward.
    Cost: the collectives of each conversion, in forward and backward.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def install(self, target: Target) -> None:
        """Apply the style to `target`, a module on a mesh. Hooks convert the inputs before its forward, and the outputs
        after it."""
        self.prepare_module_input.install(target)
        self.prepare_module_output.install(target)


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return () if layouts is None else (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
