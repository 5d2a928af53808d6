"""Styles at module boundaries: norms on sequence shards, and conversions of inputs and outputs between layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from parallelize.axes.tensor.layers.feature_norm import gather_normalized
from parallelize.axes.tensor.placements import as_dtensor, convert, local_input
from parallelize.axes.tensor.planned_forward import install, too_many_inputs
from parallelize.axes.tensor.torch_styles.module_style import ModuleStyle, Target, planned_of
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.base.layout import replicated
from parallelize.plan.styles.style import ModuleFacts

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
        """Apply the style to `target`, a module on a mesh. Its forward runs on sequence shards, and its parameters are DTensors."""
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
        input_layouts, desired_input_layouts: the layouts before and after, one for each positional input; None leaves an
            input unchanged.
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
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: those of `PrepareModuleInput`.
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
        """Apply the style to `target`, a module on a mesh. Hooks convert the inputs before its forward, and the outputs after it."""
        self.prepare_module_input.install(target)
        self.prepare_module_output.install(target)


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return () if layouts is None else (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
