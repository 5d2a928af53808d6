"""How experts are called, and what computes them, for the forwards of `expert_tensor_parallel.py` and
`expert_parallel.py`.

    inputs of the stock call -> tokens [N, hidden], choices [N, k], weights [N, k]
    a rank's experts on tokens, choices and weights -> [N, hidden]
    that, summed over the ranks -> the output of the stock call

Stacked experts do all of this themselves. Those whose weights are in modules inside are called here in the order of
experts, each of which gets its rows. No weight is indexed: its gradient would be as large as that of all experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.tensor.planned_forward import Conversion, installed, on_local_parameters
from parallelize.plan.inner_experts import LINEARS, ROWS, inner_experts
from parallelize.state.forward_steps import EXPERTS, add_step, own_forward, restored_forwards

T = torch.Tensor
Inputs = tuple[T, T, T]
"""Tokens [N, hidden], choices [N, k], weights [N, k]."""


class ExpertForm(Protocol):
    """See the head of the file. `self` of a forward is `module`."""

    def inputs(self, module: Any, args: tuple, kwargs: Mapping[str, Any]) -> Inputs:
        """Of a call of the stock forward."""

    def compute(self, module: Any, inputs: Inputs, count: int, biases: Mapping[str, Conversion]) -> T:
        """[N, hidden] of `count` experts, by which choices are numbered. biases: conversions of biases, by key."""

    def result(self, module: Any, out: T, args: tuple, kwargs: Mapping[str, Any]) -> T:
        """What the stock forward returns, of its output [N, hidden] and its inputs."""


def form_of(module: nn.Module) -> ExpertForm:
    """The form of a module of experts."""
    inner = inner_experts(module)
    if inner is None:
        return StackedExperts(module)
    return FlatExperts(module) if inner.kind == "experts" else ExpertBlock(module)


def input_names(module: nn.Module) -> list[str]:
    """The names of the inputs of the stock forward."""
    parameters = inspect.signature(own_forward(module)).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


class StackedExperts:
    """Weights [experts, ., .] in the module itself, which is called with tokens, choices and weights."""

    def __init__(self, module: nn.Module):
        self.names = input_names(module)

    def inputs(self, module: Any, args: tuple, kwargs: Mapping[str, Any]) -> Inputs:
        arguments = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        tokens, choices, weights = (arguments[name] for name in self.names)
        return tokens, choices, weights

    def compute(self, module: Any, inputs: Inputs, count: int, biases: Mapping[str, Conversion]) -> T:
        return on_local_parameters(module, module._applied.planned, inputs, {}, biases)

    def result(self, module: Any, out: T, args: tuple, kwargs: Mapping[str, Any]) -> T:
        return out


class FlatExperts(StackedExperts):
    """Weights [experts x inner, hidden] in the module `mlp`, which the stock forward calls with those of one expert."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        add_step(module.get_submodule("mlp"), EXPERTS, _rows_of_each)

    def inputs(self, module: Any, args: tuple, kwargs: Mapping[str, Any]) -> Inputs:
        tokens, choices, weights = super().inputs(module, args, kwargs)
        return tokens.reshape(-1, tokens.shape[-1]), choices, weights

    def compute(self, module: Any, inputs: Inputs, count: int, biases: Mapping[str, Conversion]) -> T:
        return by_expert(inputs, count, module.mlp)

    def result(self, module: Any, out: T, args: tuple, kwargs: Mapping[str, Any]) -> T:
        tokens = args[0] if args else kwargs[self.names[0]]
        return out.view(tokens.shape[0], -1, tokens.shape[-1])  # three dims also of flat tokens, as the stock forward


class ExpertBlock:
    """A block with the router and two modules of linears, called with hidden states [batch, sequence, hidden]."""

    def __init__(self, module: nn.Module):
        (self.name,) = input_names(module)
        for key in LINEARS:
            add_step(module.get_submodule(key), EXPERTS, _linear_of_each)

    def inputs(self, module: Any, args: tuple, kwargs: Mapping[str, Any]) -> Inputs:
        hidden = args[0] if args else kwargs[self.name]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        order, _, weights, sizes, _ = module.router(tokens)  # sorted by expert
        experts = torch.arange(len(sizes), device=tokens.device)
        sizes = torch.tensor(sizes, device=tokens.device)
        experts = experts.repeat_interleave(sizes, output_size=len(order))
        places = order.argsort()
        return tokens, experts[places].view(len(tokens), -1), weights[places].view(len(tokens), -1)

    def compute(self, module: Any, inputs: Inputs, count: int, biases: Mapping[str, Conversion]) -> T:
        def mlp(rows: T, sizes: list[int]) -> T:
            gate, up = module.input_linear(rows, sizes).chunk(2, dim=-1)
            return module.output_linear(module.activation(gate) * up, sizes)

        return by_expert(inputs, count, mlp)

    def result(self, module: Any, out: T, args: tuple, kwargs: Mapping[str, Any]) -> T:
        hidden = args[0] if args else kwargs[self.name]
        planned = installed(module)
        own = module._parameters
        bias = own.get("bias") if planned is None or planned.bias is None else planned.bias.local(own)
        out = out.view_as(hidden)
        return out if bias is None else out + bias


@contextmanager
def called_by_expert(module: nn.Module, count: int) -> Iterator[None]:
    """Within the block, a module of experts that are not planned, with weights in modules inside, runs them in their
    order."""
    with restored_forwards([module, *module.children()]):
        form = form_of(module)

        def forward(self: Any, *args: Any, **kwargs: Any) -> T:
            out = form.compute(self, form.inputs(self, args, kwargs), count, {})
            return form.result(self, out, args, kwargs)

        add_step(module, EXPERTS, forward)
        yield


def by_expert(inputs: Inputs, count: int, mlp: Callable[[T, list[int]], T]) -> T:
    """The sum over choices of weight x mlp(token). mlp: of rows sorted by expert, and their number for each expert."""
    tokens, choices, weights = inputs
    order = choices.flatten().argsort(stable=True)
    rows = order // choices.shape[1]
    out = mlp(tokens.index_select(0, rows), _sizes(choices, count)) * weights.flatten()[order, None]
    return torch.zeros_like(tokens, dtype=out.dtype).index_add(0, rows, out)


def _sizes(choices: T, count: int) -> list[int]:
    """The rows of each expert; on meta, which has no values, as many for each."""
    if choices.is_meta:
        return even_sizes(choices.numel(), count)
    return choices.flatten().bincount(minlength=count).tolist()


def even_sizes(total: int, count: int) -> list[int]:
    """`total` as a sum of `count` numbers that differ by at most one."""
    return [total // count + (n < total % count) for n in range(count)]


def _rows_of_each(self: Any, tokens: T, sizes: list[int]) -> T:
    stacked = (getattr(self, key) for key in ROWS)
    w1, v1, w2 = (weight.view(len(sizes), -1, weight.shape[-1]).unbind(0) for weight in stacked)
    glu = type(self).forward
    return torch.cat([glu(self, x, *expert) for x, *expert in zip(tokens.split(sizes), w1, v1, w2, strict=True)])


def _linear_of_each(self: Any, inputs: T, sizes: list[int]) -> T:
    weights = self.weight.unbind(0)
    return torch.cat([F.linear(x, weight) for x, weight in zip(inputs.split(sizes), weights, strict=True)])
