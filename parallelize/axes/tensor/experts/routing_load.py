"""How evenly the tokens of mixtures are spread: over experts, and over the ranks that have them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES
from parallelize.ops.replay_cache import in_recompute
from parallelize.plan.expert_order import Orders, on_ranks, order_of
from parallelize.plan.model_facts import describe
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.forward_rows import ForwardRows, call_arguments, forward_rows
from parallelize.state.records import mesh_of, pipeline_cut, record_of

T = torch.Tensor


class RoutingLoad:
    """Numbers of tokens that each expert got, of all forwards within `routing_load`. Nothing is sent before they are
    asked for.

    Args:
        model: the mixture.
        ep: the number of ranks over which its experts are divided.
        orders: in which order, where it is not the model's.

    Attributes:
        local: name of each module of experts -> [experts], counts of this rank's tokens.
    """

    def __init__(self, model: nn.Module, ep: int, orders: Orders | None = None):
        self.model, self.ep, self.orders = model, ep, orders
        self.local: dict[str, T] = {}
        self._rows: ForwardRows | None = None

    def add(self, name: str, count: int, choices: T, weights: T | None = None) -> None:
        """Count the choices of one call.

        Args:
            name: of the module of experts.
            count: the number of its experts.
            choices: [tokens, k].
            weights: [tokens], int64: how often each counts. None: once.
        """
        if in_recompute():
            return
        chosen = choices.flatten().clamp(0, count - 1).long()
        each = torch.ones_like(chosen) if weights is None else weights.repeat_interleave(choices.shape[1])
        counts = each.new_zeros(count).scatter_add_(0, chosen, each)
        self.local[name] = self.local[name] + counts if name in self.local else counts

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A pre-hook of the root: which rows of its routers only pad the shards of the sequence-parallel region."""
        arguments, self._rows = call_arguments(module, args, kwargs), None
        if {"input_ids", "inputs_embeds"} & {key for key, value in arguments.items() if value is not None}:
            self._rows = forward_rows(module, arguments)

    def _tokens(self, count: int, device: torch.device) -> T | None:
        """[count]: 0 for rows that only pad a shard, else 1. None: no row does."""
        if self._rows is None or not self._rows.is_divided(count):
            return None
        return (self._rows.indices(count, device) >= 0).to(torch.int64)

    def counts(self) -> dict[str, T]:
        """Name of each module of experts on this pipeline stage -> [experts], over all ranks with other tokens. A
        collective.

        Where ranks of `tp` have the same tokens, these count once for each of them.
        """
        mesh = mesh_of(self.model)
        group = mesh.group(*mesh.spec.only(*DATA_AXES, "tp").names).pg if mesh is not None else None
        summed = {name: counts.clone() for name, counts in self.local.items()}
        if group is not None and summed:
            joined = torch.cat(list(summed.values()))
            dist.all_reduce(joined, group=group)
            summed = dict(zip(summed, joined.split([len(counts) for counts in summed.values()]), strict=True))
        return summed

    def imbalance(self) -> dict[str, float]:
        """The largest over the mean number of tokens, of the worst layer: "expert" by expert, "rank" by rank of `ep`.

        1.0 is balanced; a step takes as long as the rank with the most tokens. The layer is the worst of all pipeline
        stages. A collective over all ranks, and a wait of the host.
        """
        worst = {"expert": 1.0, "rank": 1.0}
        for name, counts in self.counts().items():
            order = order_of(self.orders, name) or tuple(range(len(counts)))
            shares = [counts[list(experts)].sum() for experts in on_ranks(order, self.ep)]
            for key, values in (("expert", counts), ("rank", torch.stack(shares))):
                values = values.double()
                worst[key] = max(worst[key], float(values.max() / values.mean().clamp(min=1e-9)))
        return dict(zip(worst, largest_over_stages(self.model, list(worst.values())), strict=True))


def largest_over_stages(model: nn.Module, values: list[float]) -> list[float]:
    """Each value of the pipeline stage where it is largest. A collective over the stages of a model, if it has
    several."""
    mesh = mesh_of(model)
    if mesh is None or mesh.spec.ranks("pp") == 1:
        return values
    largest = torch.tensor(values, device=mesh.device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.group("pp").pg)
    return largest.tolist()


def routing_load_of(model: nn.Module) -> RoutingLoad:
    """Counts of a mixture, none so far."""
    record = record_of(model)
    if record is None:
        return RoutingLoad(model, 1)
    return RoutingLoad(model, record.resolved.options.ep, record.resolved.options.expert_placement)


@contextmanager
def routing_load(model: AnyModel) -> Iterator[RoutingLoad]:
    """Count the choices of a mixture's routers within the block.

    Args:
        model: a mixture, before or after `parallelize_module`.

    Returns: a context manager; it yields a `RoutingLoad`.
    Raises: ModelError `no-experts`.
    Cost: a sum over [tokens, k] choices for each layer and forward; no message, and no wait of the host.
    """
    model = module_of(model)
    experts, load = experts_of(model), routing_load_of(model)
    handles = [
        module.register_forward_pre_hook(partial(_count, load, name, count), with_kwargs=True)
        for name, module, count in experts
    ]
    handles.append(model.register_forward_pre_hook(load._enter, with_kwargs=True))
    try:
        yield load
    finally:
        for handle in handles:
            handle.remove()


def _count(load: RoutingLoad, name: str, count: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    choices = choices_of(module, args, kwargs)
    load.add(name, count, choices, load._tokens(len(choices), choices.device))


# -- expert load -----------------------------------------------------------------------------------------------------
# How evenly a training step spreads tokens over experts and their ranks, as numbers to log.


EXPERT, RANK = "expert_imbalance", "expert_rank_imbalance"
"""Tags: the largest over the mean number of tokens of an expert, and of a rank of `ep`, in the worst layer of the
model."""


class ExpertLoad:
    """Counts of each step of a training loop, if the model is a mixture whose choices can be counted on some stage.

        load = ExpertLoad(model)
        with load.counting():
            loss = parallel.step(ids, labels=labels)
        logger.log({"loss": loss, **load.scalars()}, step)

    Building it is a collective over the pipeline stages.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._load: RoutingLoad | None = None
        (self.is_counted,) = largest_over_stages(model, [float(_has_counted_experts(model))])

    def counting(self) -> AbstractContextManager[Any]:
        """Around the forwards of one step. It costs a sum over the choices of each layer, and no message."""
        if not self.is_counted:
            return nullcontext()
        return _Counting(self)

    def scalars(self) -> dict[str, float]:
        """Of the last step that was counted; {} for models without such experts. A collective, and a wait of the
        host."""
        if self._load is None:
            return {}
        imbalance = self._load.imbalance()
        return {EXPERT: imbalance["expert"], RANK: imbalance["rank"]}


class _Counting(AbstractContextManager[None]):
    def __init__(self, load: ExpertLoad):
        self.load, self.counting = load, routing_load(load.model)

    def __enter__(self) -> None:
        self.load._load = self.counting.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.counting.__exit__(*error)


def _has_counted_experts(model: nn.Module) -> bool:
    try:
        return bool(experts_of(model))
    except ModelError:  # a dense model, or one whose experts get every token
        return False


# -- balanced routing ------------------------------------------------------------------------------------------------
# Mixtures whose routers choose evenly, for benchmarks: the same work on every rank, whatever the weights of the
# routers are.


@contextmanager
def balanced_routing(model: AnyModel) -> Iterator[None]:
    """Within the block, each expert of a mixture gets as many tokens as any other: choices of routers are replaced.

    Token t of a call chooses experts t, t + E/k, t + 2E/k, ... modulo E, with the weights that its router gave to the
    choices that are replaced. What the model computes means nothing then; its cost is that of a balanced mixture, and
    is what `explain` assumes.

    Args:
        model: a mixture, before or after `parallelize_module`.

    Returns: a context manager.
    Raises: ModelError `no-experts`.
    """
    model = module_of(model)
    handles = [
        module.register_forward_pre_hook(partial(_replace_choices, count), with_kwargs=True)
        for _, module, count in experts_of(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """(name, module, number of its experts on all ranks) of each module of experts; a pipeline stage may have none.

    Raises: ModelError `no-experts`.
    """
    facts = describe(model)
    names = [fqn for fqn, module in facts.modules.items() if module.kind == "experts"]
    if not names and pipeline_cut(model) is None:
        what = f"{type(model).__name__} has no experts that are called with tokens, choices and their weights"
        raise ModelError(
            Problem("no-experts", what, fix="a mixture of `transformers`, or experts with `is_transposed`")
        )
    return [(fqn, facts.objects[fqn], facts.modules[fqn].num_experts) for fqn in names]


def choices_of(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> T:
    """The choices [tokens, k] of a call of experts."""
    return args[1] if len(args) > 1 else kwargs[_name_of_choices(module)]


def _name_of_choices(module: nn.Module) -> str:
    return list(inspect.signature(type(module).forward).parameters)[2]  # the instance's own may be the planned one


def _replace_choices(count: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    choices = choices_of(module, args, kwargs)
    tokens, k = choices.shape
    first, steps = torch.arange(tokens, device=choices.device), torch.arange(k, device=choices.device)
    replaced = ((first[:, None] + steps * max(1, count // k)) % count).to(choices.dtype)
    if len(args) > 1:
        return (args[0], replaced, *args[2:]), kwargs
    return args, {**kwargs, _name_of_choices(module): replaced}
