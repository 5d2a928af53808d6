"""The load-balancing loss of a stock mixture, over all ranks that have different tokens or layers.

A model of `transformers` computes it where its config or its caller asks for router logits: with F the number of tokens
that chose each expert and P the sum of each expert's probabilities, both over all layers and n rows,

    loss = experts * sum_i (F_i / n) (P_i / n)

The mean of this over ranks is another function, whose gradient differs several times over. Counts have no gradient, and
the loss is linear in P. So each rank sums F and n over all ranks, and keeps its own P: the gradients of the ranks then
add up to that of the unsharded model. Stages of a pipeline send their sums along with their activations, and the last
one computes the loss; the gradient of P comes back with that of the activations. In a step of several microbatches,
each has a loss of its own, over the data ranks, and the step adds their mean.

Source: Fedus et al., Switch Transformers, arXiv:2101.03961, equations 4 to 6, as `transformers` computes them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import MeshView
from parallelize.ops import collectives as ops
from parallelize.ops.replay_cache import in_recompute
from parallelize.plan.models.wrapped_models import stock_model
from parallelize.state.forward_rows import ForwardRows, call_arguments, forward_rows
from parallelize.state.records import applied, mark_applied
from parallelize.state.step_results import as_instance

T = torch.Tensor
FUNCTION = "load_balancing_loss_func"
"""What `transformers` calls it in each file of a model that has it."""
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Of the function whose formula is known."""

_REQUEST = "output_router_logits"
_current = threading.local()


def share_router_loss(module: nn.Module, mesh: MeshView | None = None) -> None:
    """Let the load-balancing loss of a stock model, in calls that build a graph, count the tokens and layers of all
    ranks.

    Call it again when other axes were applied. A model without such a loss is left as it is.

    Args:
        mesh: its data axes are summed over. None: those of an earlier call.
    """
    module = stock_model(module)
    modeling = _modeling_file(module)
    if modeling is None or _REQUEST not in inspect.signature(type(module).forward).parameters:
        return
    patches.replace(modeling, FUNCTION, _OverRanks)
    calls = router_calls(module)
    if calls is None:
        calls = RouterCalls()
        module.register_forward_pre_hook(calls.enter, with_kwargs=True)
        module.register_forward_hook(calls.leave, always_call=True)
        mark_applied(module, router_loss=calls)
    if applied(module).cut is not None and not calls.staged:
        calls.staged = True
        for router, index in recorded_routers(module):
            router.register_forward_hook(partial(_add_logits, calls, index))
    if mesh is not None:
        calls.data = mesh.data_group


def _modeling_file(module: nn.Module) -> ModuleType | None:
    """The file of the model's class that has the function; None for other models. `fully_shard` subclasses the
    class."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next((file for file in files if hasattr(file, FUNCTION)), None)


def refuse_router_loss(module: nn.Module) -> None:
    """Refuse a model whose config asks for a load-balancing loss of another formula, on a mesh that divides tokens or
    layers.

    Raises: ModelError `router-loss`.
    """
    if asks_for_router_loss(module):
        _check_formula(module)


def _check_formula(module: nn.Module) -> None:
    function = getattr(_modeling_file(module), FUNCTION)
    parameters = list(inspect.signature(function.stock if isinstance(function, _OverRanks) else function).parameters)
    if parameters != PARAMETERS:
        what = f"{FUNCTION}({', '.join(parameters)}) of {type(module).__name__} is not known as a sum over ranks"
        fix = "output_router_logits=False, without that loss"
        raise ModelError(Problem("router-loss", what, fix=fix))


class _OverRanks:
    """The function of a modeling file: over all ranks in the forward of a planned model, else as it was."""

    def __init__(self, stock: Callable[..., Any]):
        self.stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: _RouterForward | None = getattr(_current, "forward", None)
        if forward is None:
            return self.stock(*args, **kwargs)
        call = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        return forward.loss(call["gate_logits"], call["num_experts"], call["top_k"])


class RouterCalls:
    """Before and after each forward of a model: which tokens its router logits are of.

    Attributes:
        data: the ranks with other samples or tokens, of which gradients are summed.
        staged: whether the model is a stage of a pipeline, whose routers are read one by one.
        carried: the sums of earlier stages before a forward, and with those of this stage after it.
    """

    def __init__(self) -> None:
        self.data, self.staged = Group.alone(), False
        self.carried: RouterSums | None = None

    def __deepcopy__(self, memo: dict) -> RouterCalls:
        """Gradients of a copy are not summed over data ranks, and it is no stage."""
        return memo.setdefault(id(self), RouterCalls())

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = call_arguments(module, args, kwargs)
        if not _is_requested(module, arguments):
            return
        if self.staged or self.data.size > 1:
            _check_formula(module)
        mask, rows = arguments.get("attention_mask"), forward_rows(module, arguments)
        if mask is not None and mask.shape != (rows.batch, rows.length):
            return  # with a cache, in which the function of `transformers` has its own opinion
        context, top_k = applied(module).context, _choices_of(module) if self.staged else None
        sequences = Group.alone() if context is None else context.group
        _current.forward = _RouterForward(rows, mask, self.data, sequences, top_k, self.carried)
        self.carried = None

    def leave(self, *_: Any) -> None:
        forward, _current.forward = getattr(_current, "forward", None), None
        if self.staged and forward is not None:
            forward.add_logits()
            self.carried = forward.sums


def router_calls(module: nn.Module) -> RouterCalls | None:
    """What reads the routers of a model, or None."""
    return as_instance(applied(module).router_loss, RouterCalls)


def receive_router_sums(module: nn.Module, content: tuple | None) -> None:
    """Before the forward of a pipeline stage: what `router_sums_to_send` returned on the previous one."""
    calls = router_calls(module)
    if calls is not None:
        calls.carried = None if content is None else RouterSums(*content)


def router_sums_to_send(module: nn.Module) -> tuple | None:
    """After the forward of a pipeline stage: the sums of all stages so far, for the next one. None: the loss is not
    asked for."""
    calls = router_calls(module)
    if calls is None or calls.carried is None:
        return None
    (counts, probabilities, rows, divided), calls.carried = calls.carried.parts(), None
    # a stage without routers sends what it received: a view, because the gradient of the received tensor itself is sent
    # back
    return counts, probabilities.view_as(probabilities), rows, divided


def _add_logits(calls: RouterCalls, index: int, router: nn.Module, args: Any, output: Any) -> None:
    forward: _RouterForward | None = getattr(_current, "forward", None)
    if forward is not None and not in_recompute():
        forward.logits.append(output[index] if isinstance(output, tuple) else output)


def asks_for_router_loss(module: nn.Module) -> bool:
    """Whether the config of a model asks for its load-balancing loss."""
    return _modeling_file(module) is not None and _is_requested(module, {})


def _is_requested(module: Any, arguments: dict[str, Any]) -> bool:
    requested = arguments.get(_REQUEST)
    return bool(getattr(module.config, _REQUEST, False) if requested is None else requested)


def _choices_of(module: Any) -> int:
    """The number of experts of a token, as the forwards of `transformers` pass it to the loss."""
    value = getattr(module, "num_experts_per_tok", None)
    return value if value is not None else module.config.get_text_config().num_experts_per_tok


def router_loss_of(module: nn.Module, output: Any) -> T | float:
    """What a stock model adds to its loss: its load-balancing loss, with the coefficient of its config. 0 without
    one."""
    loss = getattr(output, "aux_loss", None)
    coefficient = getattr(module, "router_aux_loss_coef", getattr(module, "aux_loss_coef", 0.0))
    return 0.0 if loss is None else coefficient * loss


class _RouterForward:
    """The sums of one forward.

    Args:
        rows: the tokens of this rank.
        mask: [batch, length], 0 for padding; or None.
        data: the ranks with other samples or tokens. sequences: those of them with other tokens of the same samples, of
            `cp`.
        top_k: the number of choices of a token on a pipeline stage, whose routers are read by hooks; None without
            stages.
        sums: those of earlier pipeline stages.
    """

    def __init__(
        self,
        rows: ForwardRows,
        mask: T | None,
        data: Group,
        sequences: Group,
        top_k: int | None,
        sums: RouterSums | None,
    ):
        self.rows, self.mask, self.data, self.sequences, self.top_k, self.sums = (
            rows,
            mask,
            data,
            sequences,
            top_k,
            sums,
        )
        self.logits: list[T] = []

    def add_logits(self) -> None:
        """Add what the hooks have read: not in the hooks, which run inside of units that are recomputed."""
        assert self.top_k is not None
        while self.logits:
            self._add(self.logits.pop(0), self.top_k)

    def _add(self, logits: T, top_k: int) -> None:
        divided, sequence = self.rows.is_divided(len(logits)), self.rows.sequence
        weights = self._weights(len(logits), divided, logits.device)
        # of attention that each rank runs in full, beside routers of shards: a part of each row
        if sequence.size > 1 and not divided:
            logits, divided = ops.copy(logits, sequence), True
            weights = (logits.new_ones(len(logits)) if weights is None else weights) / sequence.size
        self.sums = sums_of(logits, top_k, weights, divided) + self.sums

    def _weights(self, count: int, divided: bool, device: torch.device) -> T | None:
        """[count]: 0 for rows of padding, else 1. None: no row is."""
        if self.mask is None and not divided:
            return None
        indices = self.rows.indices(count, device)
        if self.mask is None:
            return (indices >= 0).float()
        return torch.where(indices < 0, 0.0, self.mask.reshape(-1).to(device).float()[indices])

    def loss(self, layers: tuple[T, ...] | None, num_experts: int, top_k: int) -> T | int:
        """This rank's part of the loss; the same on all ranks of the sequence-parallel region. 0 without routers."""
        if self.top_k is not None:
            self.add_logits()
        else:
            for logits in layers or ():
                self._add(logits, top_k)
        if self.sums is None:
            return 0
        # asked here: before its first unit, a pipeline stage runs without gradients
        data = self.data if torch.is_grad_enabled() else self.sequences  # without a graph: of this data rank's samples
        counts, probabilities, rows, divided = self.sums.parts()
        shared = torch.cat([counts, rows.reshape(1)])
        for group in (data, self.rows.sequence) if divided else (data,):
            if group.size > 1:
                group.all_reduce(shared)
        counts, rows = shared[:-1], shared[-1]
        loss = num_experts * torch.sum(counts / rows * (probabilities / rows))
        return ops.reduce(loss, self.rows.sequence) if divided else loss


# -- aux loss partials -----------------------------------------------------------------------------------------------
# What the load-balancing loss reads of the routers' logits: sums over layers and rows, which ranks and pipeline
# stages add up.


RECORDED = "_can_record_outputs"
"""Attribute by which classes of `transformers` say which output of which module is recorded under a name."""


@dataclass(frozen=True)
class RouterSums:
    """Sums over layers and rows, in float32.

    Attributes:
        counts: [experts], the number of choices of each.
        probabilities: [experts], with a graph.
        rows: the number of rows, each counted once a layer.
        divided: whether ranks of the sequence-parallel region have other rows.
    """

    counts: T
    probabilities: T
    rows: T
    divided: bool

    def parts(self) -> tuple[T, T, T, bool]:
        """The attributes in order, for the constructor of another rank."""
        return self.counts, self.probabilities, self.rows, self.divided

    def __add__(self, other: RouterSums | None) -> RouterSums:
        if other is None:
            return self
        probabilities = self.probabilities + other.probabilities
        return RouterSums(
            self.counts + other.counts, probabilities, self.rows + other.rows, self.divided or other.divided
        )


def sums_of(logits: T, top_k: int, weights: T | None, divided: bool) -> RouterSums:
    """The sums of one layer.

    Args:
        logits: [rows, experts].
        top_k: the number of choices of a row.
        weights: [rows], 0 for padding; None: 1.
    """
    weights = torch.ones(len(logits), device=logits.device).float() if weights is None else weights
    routing = logits.softmax(-1)
    with torch.no_grad():
        choices = routing.topk(top_k, -1).indices
        counts = weights.new_zeros(logits.shape[-1])
        counts.scatter_add_(0, choices.reshape(-1), weights.repeat_interleave(top_k))
    return RouterSums(counts, (routing.float() * weights[:, None]).sum(0), weights.sum(), divided)


def recorded_routers(root: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) of each router whose logits `transformers` records."""
    specs: list[Any] = []
    for inner in root.modules():
        recorded = getattr(type(inner), RECORDED, None)
        spec = recorded.get("router_logits", []) if isinstance(recorded, dict) else []
        specs.extend(spec if isinstance(spec, list) else [spec])
    for name, inner in root.named_modules():
        for spec in specs:
            target, layer = getattr(spec, "target_class", None), getattr(spec, "layer_name", None)
            if target is not None and isinstance(inner, target) and (layer is None or f".{layer}." in f".{name}."):
                yield inner, spec.index
                break
