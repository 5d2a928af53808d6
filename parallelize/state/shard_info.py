"""Where each parameter of a model is stored: the ranks of its stage, and the slices that each of them has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.layout import Layout, SlicePair, chunked, replicated
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.model_facts import ParameterFacts, named_once
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.layout_tensor.layout_dtensor import layout_of
from parallelize.state.layout_tensor.layout_shard import layout_axis
from parallelize.state.records import Cut, applied, mesh_of, not_parallelized, pipeline_cut, record_of
from parallelize.state.sharding import rows_by_name
from parallelize.state.stage_values import planned_root


@dataclass(frozen=True)
class ShardInfo:
    """How one parameter is sharded: the global ranks, the full shape, and the slices that each rank stores.

    `ranks[i]` stores `layout.slices(i)`. Checkpoints write the same pairs.

    Attributes:
        fqn: the name of the parameter. A tied parameter has one `ShardInfo` for each of its names.
        ranks: the global ranks of the tp group of the stage that has the parameter, in the order of the group.
        layout: which slices of the full tensor each rank of the group stores.
        names: all names of the parameter in the full model; several if it is tied.
    """

    fqn: str
    ranks: tuple[int, ...]
    layout: Layout
    names: tuple[str, ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full parameter."""
        return self.layout.shape

    def slices(self, rank: int) -> tuple[SlicePair, ...]:
        """The (local, full) pairs of slices that the global rank `rank` stores."""
        return self.layout.slices(self.ranks.index(rank))

    def multiplicity(self, pair: SlicePair) -> int:
        """The number of ranks that store the elements of `pair`, which is one of `slices(rank)`."""
        return sum(any(pair.full == other.full for other in self.slices(rank)) for rank in self.ranks)


def shard_info(module: AnyModel) -> dict[str, ShardInfo]:
    """Parameter name -> how it is stored over `tp` (experts over `ep`), for every parameter of the full model.

    Of what those axes do not shard: over the data axis of ZeRO 3, else in full. ZeRO 3 shards the slices of the others
    over its axis once more.

    Args:
        module: a model that `parallelize_module` or `parallelize_model` returned.

    Returns: a `ShardInfo` by parameter name. A tied parameter is listed under each of its names, with the ranks that
        store it there.
    Raises: ModelError `not-parallelized`.
    Cost: no communication.
    """
    module = module_of(module)
    prefix, root = planned_root(module)
    if mesh_of(root) is None and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise not_parallelized(module)
    start = f"{prefix}." if prefix else ""
    infos = _Ranks(root).infos()
    if start:
        names_of = lambda info: tuple(f"{start}{name}" for name in info.names)  # noqa: E731
        infos = (replace(info, fqn=f"{start}{info.fqn}", names=names_of(info)) for info in infos)
    return {info.fqn: info for info in infos}


class _Ranks:
    """What each rank stores of a model, as far as this one can tell from its own part and the plan."""

    def __init__(self, root: nn.Module):
        self.root, self.cut, self.record = root, pipeline_cut(root), record_of(root)
        self.rows = rows_by_name(self.record) if self.record is not None else {}

    def infos(self) -> Iterator[ShardInfo]:
        """Of every name of every parameter, in the order of the unsharded model."""
        own = {name: (names, parameter) for names, parameter in named_once(self.root) for name in names}
        if self.cut is not None:
            for fact in self.cut.facts.parameters.values():
                for name in fact.names:
                    layout, ranks = self._own(*own.pop(name)) if name in own else self._elsewhere(self.cut, name, fact)
                    yield ShardInfo(name, ranks, layout, fact.names)
        for name, (names, parameter) in own.items():
            layout, ranks = self._own(names, parameter)
            yield ShardInfo(name, ranks, layout, names)

    def _own(self, names: tuple[str, ...], parameter: Any) -> _Where:
        row = self.rows.get(names[0])
        if row is not None and self.record is not None:
            return row.layout, self.record.group_for(row).ranks
        return _info_by_placements(parameter) if isinstance(parameter, DTensor) else self._full(tuple(parameter.shape))

    def _full(self, shape: tuple[int, ...]) -> _Where:
        """A parameter that no DTensor stores."""
        ranks = self.record.group.ranks if self.record is not None else (_rank(),)
        return replicated(shape, len(ranks)), ranks

    def _elsewhere(self, cut: Cut, name: str, fact: ParameterFacts) -> _Where:
        """A parameter of another stage: its ranks have the coordinates of these, but for that of `pp`."""
        row, data = cut.resolved.parameters.get(fact.fqn), applied(self.root).data
        if row is not None and not row.plain and self.record is not None:
            layout, ranks = row.layout, self.record.group_for(row).ranks
        elif data is not None and data.zero == 3:
            ranks = data.mesh.group(data.mesh.spec.shard_axis).ranks
            layout = chunked(fact.shape, 0, len(ranks))
        else:
            layout, ranks = self._full(fact.shape)
        pp_rank = cut.stage_ranks[cut.resolved.stage_of(name)]
        return layout, tuple(_rank_on_stage(cut.mesh, rank, pp_rank) for rank in ranks)


_Where = tuple[Layout, tuple[int, ...]]
"""A layout and its global ranks."""


def _info_by_placements(parameter: Any) -> _Where:
    """A DTensor of no plan: of style objects, or sharded over data axes alone, whose innermost one counts."""
    mesh = parameter.device_mesh
    sharding = [number for number, item in enumerate(parameter.placements) if private.shard_dim(item) is not None]
    number = layout_axis(mesh)
    if number is None:
        number = max(sharding, default=mesh.ndim - 1)
    group, shape = Group(mesh.get_group(number)), tuple(parameter.shape)
    dim = private.shard_dim(parameter.placements[number])
    layout = layout_of(parameter) or (replicated(shape, group.size) if dim is None else chunked(shape, dim, group.size))
    return layout, group.ranks


def _rank_on_stage(mesh: MeshView, rank: int, pp_rank: int) -> int:
    """The global rank with the coordinates of another one, on a stage."""
    coordinates = mesh.spec.coordinates(mesh.ranks.index(rank)) | {"pp": pp_rank}
    return mesh.ranks[mesh.spec.rank(**coordinates)]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
