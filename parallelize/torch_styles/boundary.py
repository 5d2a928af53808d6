"""Styles at module borders: sequence-sharded norms, and inputs and outputs that change their layout."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from parallelize.errors import ModelError, PlanError, Problem
from parallelize.forwards import install
from parallelize.layout import replicated
from parallelize.torch_styles.conversions import as_dtensor, convert, enter
from parallelize.torch_styles.style import Style, Target, planned_of

Layouts = Placement | tuple[Placement | None, ...] | None


class SequenceParallel(Style):
    """Run a norm (or dropout) on sequence shards; its replicated parameters are owed a sum of gradients.

    Args:
        sequence_dim: the dim that the input is sharded on (default 1 of [batch, sequence, hidden]).
        use_local_output: return a plain local tensor rather than a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def install(self, target: Target) -> None:
        layouts = {key: replicated(shape, target.group.size) for key, shape in target.facts.shapes.items()}
        planned = planned_of(target, layouts, partial_keys=tuple(layouts))
        here = self.sequence_sharding[0]
        planned.enter = partial(enter, mesh=target.mesh, group=target.group, source=here, want=here, partial_grad=False)
        if not self.use_local_output:
            planned.leave = partial(as_dtensor, mesh=target.mesh, placement=here)
        install(target.module, planned)


class PrepareModuleInput(Style):
    """Convert inputs of a module, by position and by keyword, from the layouts they have to those it wants.

    Args:
        input_layouts, desired_input_layouts: one a positional input; None leaves it alone.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by keyword.
        use_local_output: hand plain local tensors to the module rather than DTensors.

    Raises: PlanError `layout-count`.
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
                    "input layouts and desired input layouts name different inputs",
                    "PrepareModuleInput",
                )
            )

    def install(self, target: Target) -> None:
        change = partial(convert, mesh=target.mesh, group=target.group, local=self.use_local_output)

        def pre(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if len(args) < len(self.input_layouts) and not self.input_kwarg_layouts:
                fqn = target.facts.fqn
                what = f"{fqn} got {len(args)} positional inputs, the plan lays out {len(self.input_layouts)}"
                raise ModelError(Problem("layout-count", what, fix="lay keyword inputs out by input_kwarg_layouts"))
            pairs = zip(self.input_layouts, self.desired_input_layouts, strict=True)
            new = [change(arg, have=have, want=want) for arg, (have, want) in zip(args, pairs, strict=False)]
            for name, have in self.input_kwarg_layouts.items():
                if name in kwargs:
                    kwargs[name] = change(kwargs[name], have=have, want=self.desired_input_kwarg_layouts[name])
            return (*new, *args[len(new) :]), kwargs

        target.module.register_forward_pre_hook(pre, with_kwargs=True)


class PrepareModuleOutput(Style):
    """Convert outputs of a module from the layouts they have to those wanted.

    Args:
        output_layouts, desired_output_layouts: one an output; None leaves it alone.
        use_local_output: return plain local tensors rather than DTensors.

    Raises: PlanError `layout-count`.
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
        change = partial(convert, mesh=target.mesh, group=target.group, local=self.use_local_output)
        pairs = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))

        def post(_: nn.Module, args: tuple, out: Any) -> Any:
            outs = out if isinstance(out, tuple) else (out,)
            if len(outs) != len(pairs):
                what = f"{target.facts.fqn} returned {len(outs)} outputs, the plan lays out {len(pairs)}"
                raise ModelError(Problem("layout-count", what))
            new = tuple(change(one, have=have, want=want) for one, (have, want) in zip(outs, pairs, strict=True))
            return new if isinstance(out, tuple) else new[0]

        target.module.register_forward_hook(post)


class PrepareModuleInputOutput(Style):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one."""

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
        self.prepare_module_input.install(target)
        self.prepare_module_output.install(target)


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return () if layouts is None else (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
