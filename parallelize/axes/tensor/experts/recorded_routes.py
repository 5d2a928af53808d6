"""Routes of a mixture: the experts that its routers chose for each token and layer, in the order of the unsharded batch.

    [tokens, layers, k]    int32; -1 for a token that no router has seen

Tokens are those of the batch [sequences, length], flattened, one data rank after the other. Layers are those with experts, in the
order of the model. Neither depends on the mesh, so that routes of one mesh can be replayed on any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.tensor.experts.balanced_routing import choices_of, experts_of
from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import SAMPLE_AXES
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import axis_group
from parallelize.comm.meshes import mesh_spec
from parallelize.ops.replay_cache import in_recompute
from parallelize.plan.model_facts import describe
from parallelize.state.forward_rows import BatchPart, ForwardRows, batch_part, call_arguments, forward_rows
from parallelize.state.records import mesh_of, pipeline_cut
from parallelize.state.stored_slices import data_rank

T = torch.Tensor


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
            self.tokens += (rows.batch if part is None else part.size) * rows.length
        self._first = self._batch + (0 if part is None else part.first) * rows.length

    def _add(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A module of experts is called."""
        if in_recompute() or private.backward_id() != -1:
            return
        assert self._rows is not None, "the model is called, not a part of it"
        choices = choices_of(module, args, kwargs).detach()
        indices = self._rows.indices(len(choices), choices.device)
        seen = torch.where(indices < 0, -1, indices + self._first)
        self._parts.append((layer, seen, choices.to(torch.int32, copy=True)))

    def gather(self, local: bool = False) -> T:
        """The routes of all data ranks, on every rank.

        Args:
            local: only those of this data rank.

        Returns: [tokens, layers, k], int32; k is 0 if no router has chosen.
        Raises: ModelError `uneven-choices`: layers choose different numbers of experts.
        Cost: two all-reduces over the mesh, of a few numbers and of the routes.
        """
        mesh = mesh_of(self.model)
        rank, ranks = data_rank(mesh, SAMPLE_AXES) if mesh is not None else (0, 1)
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
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=axis_group(mesh, *mesh_spec(mesh).names))


@contextmanager
def record_routes(model: nn.Module) -> Iterator[RecordedRoutes]:
    """Record which experts the routers of a mixture choose within the block, for `replay_routes`.

    Args:
        model: a mixture, before or after `parallelize_module` or `parallelize_model`; for the latter the model itself, not what
            it returns. It is called with full batches, not with a key/value cache.

    Returns: a context manager; it yields a `RecordedRoutes`, whose `gather()` are the routes.
    Raises: ModelError `no-experts`; during a forward `routes-with-cache`, ShapeError `unknown-rows`.
    Cost: a copy of [tokens, k] choices for each layer and forward; no message.
    """
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
        what = "a forward with a filled key/value cache has a part of each sequence, and routes are those of full sequences"
        raise ModelError(
            Problem("routes-with-cache", what, fix="one forward of the full sequences, with use_cache=False")
        )
    return forward_rows(module, arguments)
