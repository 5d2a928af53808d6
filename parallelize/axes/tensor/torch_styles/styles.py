"""PyTorch's style classes under the same names, which check more before anything is changed.

A style does what PyTorch's does: where a dict is not lowered, its `_apply` is called. Each class adds what PyTorch
reports late, or with no name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, distribute_tensor
from torch.distributed.tensor import parallel as stock

from parallelize.axes.tensor.layers.embedding import check_embedding
from parallelize.axes.tensor.planned_forward import too_many_inputs
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.plan.styles.style import ModuleFacts
from parallelize.state.records import applied

Layouts = Placement | tuple[Placement | None, ...] | None


class ColwiseParallel(stock.ColwiseParallel):
    """Split a linear's output features, or an embedding's columns.

    Weight [out, in] -> Shard(0), bias -> Shard(0), embedding weight -> Shard(1).

    Args:
        input_layouts: of the input before conversion (default: Replicate). A sharded input is gathered.
        output_layouts: of the output (default: Shard(-1)).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`.
    Cost: Replicate input and Shard(-1) output: none forward, one all-reduce of the input gradient backward. Sharded
        input: an all-gather forward, a reduce-scatter backward. Replicate output: an all-gather forward.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Check that `module`, which `facts` describe, is a linear or an embedding.

        Raises: ModelError `wrong-module-for-style`.
        """
        _require_matrix(self, facts)


class RowwiseParallel(stock.RowwiseParallel):
    """Split a linear's input features, or an embedding's rows; partial outputs are summed, the bias is added once.

    Weight [out, in] -> Shard(1), bias -> Replicate, embedding weight -> Shard(0).

    Args:
        input_layouts: of the input before conversion (default: Shard(-1), also for an embedding's ids, as in PyTorch).
        output_layouts: of the output (default: Replicate).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style`, `unsplittable-embedding`, `bias-on-shards`.
    Cost: Replicate output: one all-reduce forward, none backward. Shard output: a reduce-scatter forward, an all-gather
        backward.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Check that `module`, which `facts` describe, is a linear or an embedding that can be split by rows.

        Raises: ModelError `wrong-module-for-style`, `unsplittable-embedding`, `bias-on-shards`.
        """
        _require_matrix(self, facts)
        if facts.kind == "embedding":
            check_embedding(module, facts.fqn)
        out = self.output_layouts[0]
        if "bias" in facts.shapes and out.is_partial():
            what = f"{facts.fqn!r} has a bias, which cannot be added once to an output that is {out}"
            fix = "output_layouts=Replicate() or Shard(1), or bias=False"
            raise ModelError(Problem("bias-on-shards", what, fix=fix))


class SequenceParallel(stock.SequenceParallel):
    """Run a norm (or dropout) on sequence shards. Gradients of its replicated parameters are summed over ranks.

    Args:
        sequence_dim: the dim that the input is sharded along (default: 1, of [batch, sequence, hidden]).
        use_local_output: return a plain local tensor rather than a DTensor.

    Raises: ModelError `wrong-module-for-style` where a module inside has parameters.
    Cost: backward all-reduces the gradients of the parameters, once for each backward pass.
    """

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

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """PyTorch takes the values of each rank to be the same, and lets frozen ones train."""
        for key, parameter in module.named_parameters(recurse=False):
            new = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(new, requires_grad=parameter.requires_grad))


class PrepareModuleInput(stock.PrepareModuleInput):
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
        same_keywords = (input_kwarg_layouts or {}).keys() == (desired_input_kwarg_layouts or {}).keys()
        if _number(input_layouts) != _number(desired_input_layouts) or not same_keywords:
            what = "input layouts and desired input layouts are of different inputs"
            raise PlanError(Problem("layout-count", what, "PrepareModuleInput"))
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.input_layouts is not None:
            fewest = 0 if self.input_kwarg_layouts else len(self.input_layouts)
            module.register_forward_pre_hook(partial(_count_inputs, len(self.input_layouts), fewest))
        return super()._apply(module, device_mesh)

    def _prepare_input_fn(self, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        """PyTorch takes no fewer inputs than layouts, also where the others are passed by keyword."""
        absent = (None,) * (len(self.input_layouts or ()) - len(inputs))
        return super()._prepare_input_fn((*inputs, *absent), device_mesh)[: len(inputs)]

    def _prepare_input_arg(self, input: Any, *args: Any) -> Any:
        """PyTorch takes no `None`, such as a mask that is left out, where there is a layout."""
        return super()._prepare_input_arg(input, *args) if isinstance(input, torch.Tensor) else input


class PrepareModuleOutput(stock.PrepareModuleOutput):
    """Convert outputs of a module between layouts.

    Args:
        output_layouts, desired_output_layouts: the layouts before and after, one for each output; None leaves an output
            unchanged.
        use_local_output: return plain local tensors rather than DTensors.

    Raises: PlanError `layout-count`; ModelError `layout-count` from the forward.
    Cost: the collectives of each conversion, in forward and backward.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True):
        if _number(output_layouts) != _number(desired_output_layouts):
            what = "output layouts and desired output layouts differ in number"
            raise PlanError(Problem("layout-count", what, "PrepareModuleOutput"))
        super().__init__(
            output_layouts=() if output_layouts is None else output_layouts,
            desired_output_layouts=() if desired_output_layouts is None else desired_output_layouts,  # type: ignore[arg-type]
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_count_outputs, len(self.output_layouts)))
        return super()._apply(module, device_mesh)


class PrepareModuleInputOutput(stock.PrepareModuleInputOutput):
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


SHARDING = (ColwiseParallel, RowwiseParallel, SequenceParallel)
"""Styles that make DTensors of a module's parameters."""
CONVERTING = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
"""Styles that only convert inputs and outputs, by hooks."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FROM_PYTORCH: Mapping[Any, type] = {cls.__base__: cls for cls in (*SHARDING, *CONVERTING)}


def from_pytorch(style: Any, module: nn.Module) -> Any:
    """This package's style that means the same as one of PyTorch's own. Any other style, subclasses included, is
    returned.

    So is a style for a dropout: PyTorch's draws other masks on each shard, from the generator of DTensors.
    """
    ours = _FROM_PYTORCH.get(type(style))
    if ours is None or isinstance(module, _DROPOUTS):
        return style
    converted = copy.copy(style)
    converted.__class__ = ours
    for name, part in vars(style).items():
        if type(part) in _FROM_PYTORCH:  # of `PrepareModuleInputOutput`
            setattr(converted, name, from_pytorch(part, module))
    return converted


def _require_matrix(style: Any, facts: ModuleFacts) -> None:
    kinds = ("linear", "conv1d", "embedding")
    if facts.kind not in kinds:
        what = f"{type(style).__name__} needs a {' or '.join(kinds)}; {facts.fqn!r} is a {facts.class_name}"
        raise ModelError(Problem("wrong-module-for-style", what, fix="name the module that has the weight"))


def _number(layouts: Layouts) -> int:
    return 0 if layouts is None else 1 if isinstance(layouts, Placement) else len(layouts)


def _count_inputs(layouts: int, fewest: int, module: nn.Module, args: tuple) -> None:
    name = applied(module).name or type(module).__name__
    if len(args) > layouts:
        raise too_many_inputs(name, len(args), layouts)
    if len(args) < fewest:
        what = f"{name} got {len(args)} positional inputs, and input_layouts has {layouts}"
        raise ModelError(Problem("layout-count", what, fix="use input_kwarg_layouts for keyword inputs"))


def _count_outputs(layouts: int, module: nn.Module, _: tuple, output: Any) -> None:
    outputs = len(output) if isinstance(output, tuple) else 1
    if outputs != layouts:
        name = applied(module).name or type(module).__name__
        what = f"{name} returned {outputs} outputs, and output_layouts has {layouts}"
        raise ModelError(Problem("layout-count", what))
