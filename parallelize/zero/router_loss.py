"""The load-balancing loss of a stock mixture, over all ranks that have different tokens.

A model of `transformers` computes it where its config or its caller asks for router logits: with F the number of tokens that chose
each expert and P the sum of each expert's probabilities, both over all layers and n rows,

    loss = experts * sum_i (F_i / n) (P_i / n)

The mean of this over ranks is another function, whose gradient differs several times over. Counts have no gradient, and the loss
is linear in P. So each rank sums F and n over all ranks, and keeps its own P: the gradients of the ranks then add up to that of the
unsharded model. In a step of several microbatches, each has a loss of its own, over the data ranks, and the step adds their mean.

Source: Fedus et al., Switch Transformers, arXiv:2101.03961, equations 4 to 6, as `transformers` computes them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.applied.records import applied, mark_applied, record_of
from parallelize.comm.groups import Group
from parallelize.errors import ModelError, Problem
from parallelize.ops import collectives as ops
from parallelize.zero.replicas import data_group

T = torch.Tensor
FUNCTION = "load_balancing_loss_func"
"""What `transformers` calls it in each file of a model that has it."""

_REQUEST = "output_router_logits"
_current = threading.local()


def share_router_loss(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Let the load-balancing loss of a stock model, in calls that build a graph, count the tokens of all ranks.

    Call it again when other axes were applied. A model without such a loss is left as it is.

    Args:
        mesh: its data axes are summed over. None: those of an earlier call.
    """
    modeling, signature = _modeling_file(module), inspect.signature(type(module).forward)
    if modeling is None or _REQUEST not in signature.parameters:
        return
    function = getattr(modeling, FUNCTION)
    if not isinstance(function, _OverRanks):
        setattr(modeling, FUNCTION, _OverRanks(function))
    calls = applied(module).router_loss
    if not isinstance(calls, _Calls):
        calls = _Calls(signature)
        module.register_forward_pre_hook(calls.enter, with_kwargs=True)
        module.register_forward_hook(calls.leave, always_call=True)
        mark_applied(module, router_loss=calls)
    if mesh is not None:
        calls.data = data_group(mesh)


def _modeling_file(module: nn.Module) -> ModuleType | None:
    """The file of the model's class that has the function; None for other models. `fully_shard` subclasses the class."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next((file for file in files if hasattr(file, FUNCTION)), None)


def refuse_router_loss(module: nn.Module, axes: Collection[str]) -> None:
    """Refuse a model whose config asks for the loss, on a mesh with these axes of more than one rank.

    Raises: ModelError `router-loss`.
    """
    for axis in ("cp", "pp"):
        if axis in axes and _modeling_file(module) is not None and _is_requested(module, {}):
            raise _refused(axis)


class _OverRanks:
    """The function of a modeling file: over all ranks in the forward of a planned model, else as it was."""

    def __init__(self, stock: Callable[..., Any]):
        self.stock = stock

    def __call__(self, gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: T | None = None) -> Any:
        tokens = getattr(_current, "tokens", None)
        if tokens is None or not isinstance(gate_logits, tuple):
            return self.stock(gate_logits, num_experts, top_k, attention_mask)
        return tokens.loss(gate_logits, num_experts, top_k, attention_mask)


class _Calls:
    """Before and after each forward of a model: which tokens its router logits are of.

    Attributes:
        data: the ranks with other samples, of which gradients are summed.
    """

    def __init__(self, signature: inspect.Signature):
        self.signature, self.data = signature, Group.alone()

    def __deepcopy__(self, memo: dict) -> _Calls:
        """Gradients of a copy are not summed over data ranks."""
        return memo.setdefault(id(self), _Calls(self.signature))

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = self.signature.bind_partial(None, *args, **kwargs).arguments
        if not _is_requested(module, arguments):
            return
        for axis, step in (("cp", applied(module).context), ("pp", applied(module).cut)):
            if step is not None:
                raise _refused(axis)
        record = record_of(module)
        region: Any = record.region if record is not None else None
        ids = arguments.get("input_ids")
        shape = (ids if ids is not None else arguments["inputs_embeds"]).shape[:2]
        summed = self.data if torch.is_grad_enabled() else Group.alone()
        _current.tokens = _RouterRows(shape[0], shape[1], summed, region.group if region is not None else Group.alone())

    def leave(self, *_: Any) -> None:
        _current.tokens = None


def _is_requested(module: Any, arguments: dict[str, Any]) -> bool:
    requested = arguments.get(_REQUEST)
    return bool(getattr(module.config, _REQUEST, False) if requested is None else requested)


def _refused(axis: str) -> ModelError:
    reason = {"cp": "sequences are sharded over cp", "pp": "each pipeline stage has those of its own layers"}[axis]
    what = f"the load-balancing loss needs the router logits of all tokens and layers, and {reason}"
    fix = f"a mesh without {axis}; or output_router_logits=False, without that loss"
    return ModelError(Problem("router-loss", what, fix=fix))


def router_loss_of(module: nn.Module, output: Any) -> T | float:
    """What a stock model adds to its loss: its load-balancing loss, with the coefficient of its config. 0 without one."""
    loss = getattr(output, "aux_loss", None)
    return 0.0 if loss is None else getattr(module, "router_aux_loss_coef", 0.0) * loss


@dataclass(frozen=True)
class _RouterRows:
    """Which tokens the router logits of a forward are of.

    Attributes:
        batch, length: of this rank's inputs.
        data: the ranks with other samples. sequence: the ranks with other tokens of the same sequences, in its order.
    """

    batch: int
    length: int
    data: Group
    sequence: Group

    def loss(self, layers: Sequence[T], num_experts: int, top_k: int, mask: T | None) -> T:
        """This data rank's part of the loss; the same on all ranks of `sequence`."""
        local = len(layers[0]) != self.batch * self.length
        rows = self._local_rows(mask, layers[0].device) if local else None if mask is None else mask.reshape(-1).float()
        counts, probabilities, total = _sums(layers, num_experts, top_k, rows)
        shared = torch.cat([counts, total.reshape(1)])
        for group in (self.data, self.sequence) if local else (self.data,):
            if group.size > 1:
                group.all_reduce(shared)
        counts, total = shared[:-1], shared[-1]
        loss = num_experts * torch.sum(counts / total * (probabilities / total))
        return ops.reduce(loss, self.sequence) if local else loss

    def _local_rows(self, mask: T | None, device: torch.device) -> T:
        """[rows]: the weight of each row of this rank's sequence shards; 0 for padding."""
        size = -(-self.length // self.sequence.size)
        full = torch.zeros(self.batch, size * self.sequence.size, device=device)
        full[:, : self.length] = 1.0 if mask is None else mask.to(full)
        return full[:, self.sequence.rank * size :][:, :size].reshape(-1).float()


def _sums(layers: Sequence[T], num_experts: int, top_k: int, rows: T | None) -> tuple[T, T, T]:
    """(choices of each expert, probabilities of each expert, number of rows), over all layers, in float32.

    rows: the weight of each row; None: 1.
    """
    weights = torch.ones(len(layers[0]), device=layers[0].device).float() if rows is None else rows
    counts = probabilities = weights.new_zeros(num_experts)
    for logits in layers:
        routing = logits.softmax(-1)
        with torch.no_grad():
            choices = routing.topk(top_k, -1).indices
            counts = counts.scatter_add(0, choices.reshape(-1), weights.repeat_interleave(choices.shape[-1]))
        probabilities = probabilities + (routing.float() * weights[:, None]).sum(0)
    return counts, probabilities, weights.sum() * len(layers)
