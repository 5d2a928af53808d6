"""`replay_routes`: the choices of routers, recorded in another forward or by an inference engine, made again.

Each rank takes those of its own tokens and layers from the routes of the full batch: of its data rank, `cp` shard,
sequence shard, pipeline stage and microbatch. What the routers do with them is in `router_choice.py`.

Source: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, arXiv:2510.11370.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.tensor.experts.router_choice import (
    ForwardRoutes,
    RouteReplay,
    install_router,
    recomputed_elsewhere,
    router_of,
    wrong_k,
)
from parallelize.axes.tensor.experts.routing_load import choices_of, experts_of
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.handshake import agree_on, digest
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.replay_cache import in_recompute
from parallelize.plan.model_facts import describe
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.forward_rows import BatchPart, ForwardRows, batch_part, call_arguments, forward_rows
from parallelize.state.records import applied, mark_applied, mesh_of, pipeline_cut
from parallelize.state.step_results import as_instance

T = torch.Tensor


@contextmanager
def replay_routes(model: AnyModel, routes: T | RecordedRoutes, *, local: bool = False) -> Iterator[None]:
    """Within the block the routers of a mixture choose what `routes` say; the weights of these choices are their own.

    Weights are computed from the scores of the running forward, as the stock router would have, had it chosen so;
    gradients flow into the router. Recomputed units replay the choices of their forward, also after the block.

    Each step within the block is one of the batch that the routes are of. In a loop of one's own, the forwards of each
    rank take the routes of its part of the batch in order, and begin again after the last: data ranks then have equal
    parts.

    Args:
        model: as for `record_routes`; its routers choose by `torch.topk`, or by the `sparsemixer` of Phi 3.5.
        routes: [tokens, layers, k] or [sequences, length, layers, k], integers, of the global batch, the same on every
            rank; or what `record_routes` yielded. Layers are those with experts, or all decoder layers (of which those
            without experts are not read), as inference engines return them. -1 for all k of a token and layer: its
            router chooses.
        local: `routes` are those of this data rank's batch alone.

    Returns: a context manager.
    Raises: on every rank, before anything is changed, ModelError `no-experts`, `unknown-router`, `foreign-recompute`,
        `already-replaying`; ShapeError `wrong-routes` (shape, dtype, layers, k), `impossible-routes` (experts that do
        not exist, or chosen twice by one token); HandshakeError where ranks have different routes. In the first forward
        `wrong-routes` for another number of tokens, ModelError `routes-with-cache`. At the end of the block
        `wrong-routes` after a part of the tokens.
    Cost: handshakes when the block begins, and of a loop of one's own in its first forward; a top-k of each router
        still runs.
    """
    model = module_of(model)
    if isinstance(routes, RecordedRoutes):
        routes = routes.gather(local)
    mesh = mesh_of(model)
    with _agreed(mesh) as agreed:
        by_layer = _checked(model, routes)
        agreed["routes"] = "of each data rank" if local else str(digest(by_layer).tolist())
    layers, replay = list(layers_with_experts(model)), _replay_of(model)
    for name, _, count in experts_of(model):
        install_router(*router_of(model, name), layers.index(name), count, replay)
    batch = _ReplayedBatch(model, by_layer, replay, local)
    handles = [model.register_forward_pre_hook(batch.begin, with_kwargs=True)]
    handles.append(model.register_forward_hook(batch.end, always_call=True))
    replay.active = True
    try:
        yield
    finally:
        replay.active, replay.forward = False, None
        for handle in handles:
            handle.remove()
    batch.check_end()


def _agreed(mesh: MeshView | None) -> AbstractContextManager[dict[str, str]]:
    """What is raised inside is raised on every rank of the mesh."""
    return agree_on(mesh) if mesh is not None else nullcontext({})


def _replay_of(model: nn.Module) -> RouteReplay:
    replay = as_instance(applied(model).route_replay, RouteReplay)
    if replay is None:
        replay = RouteReplay()
        mark_applied(model, route_replay=replay)
    return replay


class _ReplayedBatch:
    """The routes of a batch, and which forward has which of them.

    Args:
        routes: [tokens, layers, k].
        local: they are those of this data rank.
    """

    def __init__(self, model: nn.Module, routes: T, replay: RouteReplay, local: bool):
        self.routes, self.replay, self.local = routes, replay, local
        self.mesh = mesh_of(model)
        self.rank, self.ranks = self.mesh.sample_place if self.mesh is not None and not local else (0, 1)
        self._part: BatchPart | None = None
        self._place = (0, 0)  # of the running step: first sequence, and number of sequences, of the routes
        self.next, self.begun = 0, False  # of a loop of one's own: tokens so far in this data rank's part

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward of the model starts."""
        part = batch_part(module)
        # in a step each stage has a first forward of its own, and an error of one rank is raised on all
        with _agreed(self.mesh if part is None and not self.begun else None):
            rows = rows_of_call(module, args, kwargs)
            count = rows.batch * rows.length
            first = self._next(count) if part is None else self._first_of(part, rows.length)
        self.begun = True
        device = next(module.parameters()).device
        self.replay.forward = ForwardRoutes(rows, self.routes[first : first + count].to(device))

    def end(self, *_: Any) -> None:
        self.replay.forward = None

    def _first_of(self, part: BatchPart, length: int) -> int:
        """The first token of a forward of a step."""
        if part is not self._part:  # once a step, because it may be a collective
            self._part, self._place = part, (0, part.size) if self.local else part.place()
        first, sequences = self._place
        if part.tokens is not None:  # of other data ranks it is not known how many tokens they have
            if not self.local or part.tokens[1] != len(self.routes):
                raise self._wrong_tokens(f"rows of different lengths, {part.tokens[1]} tokens on this data rank")
            return part.tokens[0]
        if sequences * length != len(self.routes):
            raise self._wrong_tokens(f"a batch of {sequences} sequences of {length} tokens")
        return (first + part.first) * length

    def _next(self, count: int) -> int:
        """The first token of a forward of `count` tokens that no step calls."""
        tokens, rest = divmod(len(self.routes), self.ranks)
        if rest or self.next + count > tokens:
            raise self._wrong_tokens(
                f"a forward of {count} tokens after {self.next} on each of {self.ranks} data ranks"
            )
        first = self.rank * tokens + self.next
        self.next = (self.next + count) % tokens
        return first

    def check_end(self) -> None:
        """Raises: ShapeError `wrong-routes`, where forwards had a part of the tokens."""
        if self.next:
            raise self._wrong_tokens(f"forwards of {self.next} tokens on each of {self.ranks} data ranks")

    def _wrong_tokens(self, what: str) -> ShapeError:
        fix = "the routes of all tokens of the global batch, with their padding; local=True for those of each data rank"
        return ShapeError(Problem("wrong-routes", f"routes of {len(self.routes)} tokens for {what}", fix=fix))


# -- checks -----------------------------------------------------------------------------------------------------------


def _checked(model: nn.Module, routes: Any) -> T:
    """The routes [tokens, layers with experts, k], int32."""
    replay = as_instance(applied(model).route_replay, RouteReplay)
    if replay is not None and replay.active:
        what = f"the routers of {type(model).__name__} replay routes already"
        raise ModelError(Problem("already-replaying", what, fix="one block of replay_routes at a time"))
    for name, inner in model.named_modules():
        if inner.__dict__.get("gradient_checkpointing") is True:
            raise recomputed_elsewhere(name or type(model).__name__)
    experts, layers = experts_of(model), layers_with_experts(model)
    by_layer = _by_layer(model, list(layers), torch.as_tensor(routes))
    for name, _, _ in experts:
        fqn, router = router_of(model, name)
        if (k := getattr(router, "top_k", by_layer.shape[2])) != by_layer.shape[2]:
            raise wrong_k(fqn, k, by_layer.shape[2])
    # those of other stages too, so that all ranks raise the error
    for layer, (name, count) in enumerate(layers.items()):
        _refuse_impossible(by_layer[:, layer], name, count)
    return by_layer


def _by_layer(model: Any, layers: list[str], routes: T) -> T:
    """Routes [tokens, layers with experts, k] of [(sequences, length) or tokens, all or these layers, k]."""
    fix = "integers [tokens, layers, k] or [sequences, length, layers, k]"
    if routes.ndim not in (3, 4) or not routes.numel():
        raise ShapeError(Problem("wrong-routes", f"routes have the shape {list(routes.shape)}", fix=fix))
    if routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool:
        raise ShapeError(Problem("wrong-routes", f"routes are {routes.dtype}", fix=fix))
    routes = routes.detach().flatten(0, routes.ndim - 3).to(torch.int32)
    if routes.shape[1] == len(layers):
        return routes.contiguous()
    config = getattr(model, "config", None)
    depth = getattr(config.get_text_config() if config is not None else None, "num_hidden_layers", len(layers))
    if routes.shape[1] != depth:
        what = f"routes of {routes.shape[1]} layers, and {len(layers)} of the {depth} layers of the model have experts"
        raise ShapeError(Problem("wrong-routes", what, fix=f"routes [tokens, {len(layers)} or {depth}, k]"))
    numbers = [int(number[1]) for name in layers if (number := re.search(r"\.(\d+)\.", name))]
    return routes[:, numbers].contiguous()


def _refuse_impossible(routes: T, name: str, count: int) -> None:
    """Raises: ShapeError `impossible-routes` for routes [tokens, k] that no router of `count` experts chooses."""
    absent, ordered = routes < 0, routes.sort(-1).values
    problems = {
        f"experts outside of [0, {count})": ((routes < -1) | (routes >= count)).any(-1),
        "some choices and some -1": absent.any(-1) & ~absent.all(-1),
        "an expert twice": ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1),
    }
    rows = []
    for what, wrong in problems.items():
        if count := int(wrong.sum()):
            token = int(wrong.int().argmax())
            rows.append((what, f"{count} tokens, such as {token}: {routes[token].tolist()}"))
    if rows:
        fix = "-1 for all choices of a token without a record; engines with fused routers may return zeros"
        raise ShapeError(
            Problem("impossible-routes", f"routes of {name} that no router chooses", rows=tuple(rows), fix=fix)
        )


# -- recorded routes -------------------------------------------------------------------------------------------------
# Routes of a mixture: the experts that its routers chose for each token and layer, in the order of the unsharded
# batch. [tokens, layers, k] int32; -1 for a token that no router has seen Tokens are those of the batch [sequences,
# length], flattened, one data rank after the other. Layers are those with experts, in the order of the model. Neither
# depends on the mesh, so that routes of one mesh can be replayed on any other.


class RecordedRoutes:
    """What the routers of a model chose in all forwards within `record_routes`. Nothing is sent before it is asked for.

    Args:
        model: the mixture.

    Attributes:
        layers: the names of the modules of experts of the full model, in order.
        tokens: the number of tokens of this data rank so far.
    """

    def __init__(self, model: nn.Module):
        self.model, self.layers, self.tokens = model, list(layers_with_experts(model)), 0
        self._parts: list[tuple[int, T, T]] = []  # (layer, indices of tokens of this data rank, choices)
        self._rows: ForwardRows | None = None
        self._part: BatchPart | None = None
        self._batch = self._first = 0  # first tokens of the running step's batch, and of the running forward

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward of the model starts."""
        self._rows = rows = rows_of_call(module, args, kwargs)
        part = batch_part(module)
        # a step calls several forwards, each of its stages with all microbatches
        if part is None or part is not self._part:
            self._batch, self._part = self.tokens, part
            tokens = (rows.batch if part is None else part.size) * rows.length
            self.tokens += tokens if part is None or part.tokens is None else part.tokens[1]
        first = 0 if part is None else part.first * rows.length if part.tokens is None else part.tokens[0]
        self._first = self._batch + first

    def _add(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A module of experts is called."""
        if in_recompute() or private.backward_id() != -1:
            return
        assert self._rows is not None, "the model is called, not a part of it"
        choices = choices_of(module, args, kwargs).detach()
        indices = self._rows.indices(len(choices), choices.device)
        sequence_indices = torch.where(indices < 0, -1, indices + self._first)
        self._parts.append((layer, sequence_indices, choices.to(torch.int32, copy=True)))

    def gather(self, local: bool = False) -> T:
        """The routes of all data ranks, on every rank.

        Args:
            local: only those of this data rank.

        Returns: [tokens, layers, k], int32; k is 0 if no router has chosen.
        Raises: ModelError `uneven-choices`: layers choose different numbers of experts.
        Cost: two all-reduces over the mesh, of a few numbers and of the routes.
        """
        mesh = mesh_of(self.model)
        rank, ranks = mesh.sample_place if mesh is not None else (0, 1)
        numbers = {choices.shape[1] for _, _, choices in self._parts}
        if len(numbers) > 1:
            what = f"layers choose {sorted(numbers)} experts for a token, and routes have one number"
            raise ModelError(Problem("uneven-choices", what, fix="a model whose layers choose equally many"))
        device = next(self.model.parameters()).device
        sizes = torch.zeros(ranks + 1, dtype=torch.int64, device=device)  # tokens of each data rank, and k
        sizes[rank], sizes[-1] = self.tokens, max(numbers, default=0)
        self._largest(sizes)
        *tokens, k = sizes.tolist()
        first = sum(tokens[:rank])
        # a row more than there are tokens, for rows that only pad a shard
        routes = torch.full((sum(tokens) + 1, len(self.layers), k), -1, dtype=torch.int32, device=device)
        for layer, seen, choices in self._parts:
            routes[torch.where(seen < 0, -1, seen + first), layer] = choices
        routes = routes[:-1].contiguous()
        self._largest(routes)
        return routes[first : first + tokens[rank]] if local else routes

    def _largest(self, values: T) -> None:
        """The largest of all ranks, in place: of what one rank has, where the others have zeros or -1."""
        mesh = mesh_of(self.model)
        if mesh is not None and mesh.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.world.pg)


@contextmanager
def record_routes(model: AnyModel) -> Iterator[RecordedRoutes]:
    """Record which experts the routers of a mixture choose within the block, for `replay_routes`.

    Args:
        model: a mixture, before or after `parallelize_module` or `parallelize_model`; for the latter the model itself,
            not what it returns. It is called with full batches, not with a key/value cache.

    Returns: a context manager; it yields a `RecordedRoutes`, whose `gather()` are the routes.
    Raises: ModelError `no-experts`; during a forward `routes-with-cache`, ShapeError `unknown-rows`.
    Cost: a copy of [tokens, k] choices for each layer and forward; no message.
    """
    model = module_of(model)
    routes = RecordedRoutes(model)
    handles = [model.register_forward_pre_hook(routes._begin, with_kwargs=True)]
    for name, module, _ in experts_of(model):
        add = partial(routes._add, routes.layers.index(name))
        handles.append(module.register_forward_pre_hook(add, with_kwargs=True))
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


def layers_with_experts(model: nn.Module) -> dict[str, int]:
    """Name to number of experts of each module of experts, in order, of the stages of all pipeline ranks."""
    cut = pipeline_cut(model)
    facts = describe(model) if cut is None else cut.facts
    return {fqn: module.num_experts for fqn, module in facts.modules.items() if module.kind == "experts"}


def rows_of_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> ForwardRows:
    """The tokens of a forward that begins. Raises: ModelError `routes-with-cache`."""
    arguments = call_arguments(module, args, kwargs)
    cache = arguments.get("past_key_values")
    if cache is not None and int(cache.get_seq_length()):
        what = (
            "a forward with a filled key/value cache has a part of each sequence, and routes are those of full "
            "sequences"
        )
        raise ModelError(
            Problem("routes-with-cache", what, fix="one forward of the full sequences, with use_cache=False")
        )
    return forward_rows(module, arguments)
