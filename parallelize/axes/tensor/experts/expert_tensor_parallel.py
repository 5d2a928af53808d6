"""Experts of a mixture over `tp`: the style `experts`, which splits each expert over its inner width, as a dense MLP
is.

The stock router chooses, and the stock forward of the experts computes, on this rank's part of every expert:

    tokens [N, hidden], choices [N, k], weights [N, k] -> a term of the output [N, hidden], summed over ranks

Tokens and weights are converted as the input of a column linear is, so that the router's gradient is complete. Under
sequence parallelism router and block see this rank's tokens alone; the experts gather the tokens of all ranks with
their choices, in the order of ranks, which no expert depends on.

Source: Shoeybi et al., arXiv:1909.08053, applied to each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.experts.expert_forms import ExpertForm, input_names
from parallelize.axes.tensor.planned_forward import Conversion, on_local_parameters
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Layout
from parallelize.comm.groups import Group
from parallelize.ops.experts.padded_grouped_matmul import AnyWidth, fits
from parallelize.plan.inner_experts import inner_experts
from parallelize.state.forward_steps import EXPERTS, add_step, has_inner

T = torch.Tensor
INPUTS = 3
"""Tokens, choices and their weights."""


def check_experts(module: nn.Module, fqn: str) -> None:
    """Raises: ModelError `wrong-experts-call` for experts that are not called with tokens, choices and weights."""
    names, inner = input_names(module), inner_experts(module)
    if len(names) != INPUTS and (inner is None or inner.kind == "experts"):
        what = (
            f"{fqn}.forward takes {', '.join(names) or 'no inputs'}: not tokens [N, hidden], choices [N, k] and "
            "weights [N, k]"
        )
        fix = "`replicate` for it, or a registered style with a forward of its own"
        raise ModelError(Problem("wrong-experts-call", what, fix=fix))


def split_experts(form: ExpertForm, group: Group, count: int) -> Callable:
    """A forward with the arguments and results of the stock one. Without a conversion of choices nothing is converted,
    as on one rank.

    Args:
        count: the number of experts.
    """
    # each rank's output is a term of a sum, so that the second bias is added by the first rank alone
    biases: dict[str, Conversion] = {} if group.rank == 0 else {"down_proj_bias": _times_zero}

    def forward(self: Any, *args: Any, **kwargs: Any) -> T:
        planned = self._applied.planned
        convert = planned.convert_choices
        tokens, choices, weights = form.inputs(self, args, kwargs)
        if convert is not None:
            tokens, choices, weights = planned.enter(tokens), convert(choices), convert(weights)
        out = form.compute(self, (tokens, choices, weights), count, biases)
        return form.result(self, out if convert is None else planned.leave(out), args, kwargs)

    return forward


def dense_experts(self: Any, inputs: T) -> T:
    """The forward, under sequence parallelism, of experts that get all tokens: [experts x tokens, hidden] in and out.

    The tokens of each expert are gathered and split by themselves, so that those of one expert stay together.
    """
    planned = self._applied.planned
    by_expert = inputs.view(len(self._parameters["down_proj"]), -1, inputs.shape[-1])
    gathered = planned.enter(by_expert.transpose(0, 1)).transpose(0, 1)
    out = on_local_parameters(self, planned, (gathered.flatten(0, 1),), {}).view_as(gathered)
    return planned.leave(out.transpose(0, 1).contiguous()).transpose(0, 1).reshape(inputs.shape)


def _times_zero(bias: T) -> T:
    """Zeros, with a gradient of zeros: every rank enters the sum of the gradients."""
    return bias * 0


# -- expert widths ---------------------------------------------------------------------------------------------------
# Experts of any width: where a rank's part of an expert is one that grouped matmuls refuse, they are padded by zeros.
# The width of an expert divided by ranks need not be a multiple of 16 bytes, though that of the unsharded model is.
# Experts whose widths are multiples of eight elements run as they are, in every dtype.


STACKED = 3
"""Dims of the weights of stacked experts: [experts, ., .]."""
_SMALLEST_ITEM = 2
"""Bytes of an element of the dtypes that grouped matmuls take, at least."""


def allow_any_width(module: nn.Module, layouts: Sequence[Layout]) -> None:
    """Let stacked experts run padded where a rank's part of their weights needs that in some dtype.

    Args:
        module: the experts.
        layouts: of their parameters.
    """
    if not has_inner(module, EXPERTS) and widths_that_need(layouts, _SMALLEST_ITEM):
        add_step(module, EXPERTS, _at_any_width)


def widths_that_need(layouts: Sequence[Layout], itemsize: int) -> list[int]:
    """Widths of a rank's part of stacked weights that grouped matmuls refuse, in elements of `itemsize` bytes, each
    once."""
    stacked = [layout for layout in layouts if len(layout.shape) == STACKED]
    widths = {width for layout in stacked for rank in range(layout.num_ranks) for width in layout.local_shape(rank)[1:]}
    return sorted(width for width in widths if not fits((width,), itemsize))


def _at_any_width(self: Any, *args: Any, **kwargs: Any) -> Any:
    weights = (getattr(self, key) for key in self._parameters)
    stacked = [weight for weight in weights if isinstance(weight, torch.Tensor) and weight.ndim == STACKED]
    if all(fits((*weight.shape[1:], *_steps(weight)), weight.element_size()) for weight in stacked):
        return type(self).forward(self, *args, **kwargs)
    with AnyWidth():
        return type(self).forward(self, *args, **kwargs)


def _steps(weight: torch.Tensor) -> list[int]:
    """The strides of a weight between its rows or columns."""
    return [step for step in weight.stride()[1:] if step != 1]
