"""Full values of tensors by name, of all pipeline stages: unsharded on the ranks that store them, then sent to the
other stages.

One tensor is in memory at a time. Ranks learn from one message over `pp` which stage has what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import chunked, replicated
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.state.layout_tensor.layout_dtensor import layout_of, wrap_like
from parallelize.state.layout_tensor.layout_shard import layout_group, unshard
from parallelize.state.records import Cut, applied, mark_of, pipeline_cut


class _Source(NamedTuple):
    """Where a value is: the pp rank, its number among those of that rank, shape and dtype; of what is no tensor the
    value itself."""

    rank: int
    number: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    value: Any = None


class StageValues:
    """What the ranks of a model's mesh store under some names. To build and to iterate are collectives over the mesh.

    Args:
        module: a model on any mesh or none, or a module around one, such as `AveragedModel`.
        local: name in `module` -> what this rank stores: tensors, DTensors, or other values.
        wanted: whether this rank gets the values. asked: the one name that all ranks ask for; empty: all of `local`.

    Attributes:
        names: of all stages, in the order of the unsharded model.

    Raises: ModelError `part-of-stages`, `other-parameter`.
    """

    def __init__(self, module: nn.Module, local: Mapping[str, Any], *, wanted: bool = True, asked: str = ""):
        prefix, root = planned_root(module)
        _refuse_part(module, root)
        self._local, self._wanted, self._prefix = local, wanted, f"{prefix}." if prefix else ""
        cut = pipeline_cut(root)
        self._cut = cut if cut is not None and cut.group.size > 1 else None
        self._sources: dict[str, _Source] = {}
        self._is_sent = False
        self.names = list(local)
        if self._cut is not None:
            self._learn(self._cut, asked)

    def _learn(self, cut: Cut, asked: str) -> None:
        """What the other stages have."""
        rows: list[Any] = [None] * cut.group.size
        present = (item for item in self._local.items() if cut.present(item[0].removeprefix(self._prefix)))
        described = [(name, *_described(value)) for name, value in present]
        dist.all_gather_object(rows, (self._wanted, asked, described), group=cut.group.pg)
        _refuse_others([name for _, name, _ in rows])
        self._is_sent = any(wanted for wanted, *_ in rows)
        for rank, (*_, row) in enumerate(rows):
            for number, (name, *about) in enumerate(row):
                self._sources.setdefault(name, _Source(rank, number, *about))
        order = {name: number for number, name in enumerate(cut.facts.module_fqns)}
        self.names = sorted(self._sources, key=lambda name: self._position(name, order))

    def _position(self, name: str, order: Mapping[str, int]) -> tuple[int, int, int]:
        source, owner = self._sources[name], name.removeprefix(self._prefix).rpartition(".")[0]
        number = order.get(owner, len(order)) if name.startswith(self._prefix) else -1
        return number, source.rank, source.number

    def __iter__(self) -> Iterator[tuple[list[str], Any]]:
        """(the names of one tensor, its full value), each once. The value is None on ranks that do not want it."""
        names_by_tensor: dict[Any, list[str]] = {}
        for name in self.names:
            names_by_tensor.setdefault(self._identity(name), []).append(name)
        for names in names_by_tensor.values():
            yield names, self._value(names[0])

    def _identity(self, name: str) -> Any:
        """What names of one tensor have in common."""
        if self._cut is None:
            return id(self._local[name])
        facts, inner = self._cut.facts, name.removeprefix(self._prefix)
        owner, _, key = inner.rpartition(".")
        return facts.parameter_fqns.get(inner) or f"{facts.module_fqns.get(owner, owner)}.{key}"

    def _value(self, name: str) -> Any:
        if self._cut is None:
            value = unsharded(self._local[name])
            return value if self._wanted else None
        source, group = self._sources[name], self._cut.group
        value = unsharded(self._local[name]) if source.rank == group.rank else source.value
        if source.shape is not None and self._is_sent:
            value = _sent(value, source, group)
        return value if self._wanted else None


def _refuse_others(asked: list[str]) -> None:
    """Refuse ranks of a pipeline that ask for different parameters: all ranks take part in sending each one."""
    if len(set(asked)) > 1:
        rows = tuple((f"pp rank {rank}", name) for rank, name in enumerate(asked))
        what = "the stages of a pipeline ask for different parameters, and each call is of the full model"
        fix = (
            "the same names on every rank, `for name in shard_info(model)`; or full_state_dict(model), "
            "full_gradients(model)"
        )
        raise ModelError(Problem("other-parameter", what, rows=rows, fix=fix))


@torch.no_grad()
def unsharded(value: Any) -> Any:
    """The full tensor of a DTensor, in the original order and memory of its own. Any other value itself.

    A collective over the axes that shard it, on the ranks that store it.
    """
    if not isinstance(value, DTensor):
        return value
    stored: Any = value.detach()
    full, local = _full(stored), private.local_of(stored)
    is_local = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if is_local else full


def _full(stored: Any) -> torch.Tensor:
    """Where tp and data axes shard one dim, over one axis after the other: PyTorch's own gather of such uneven shards
    is not told to pad them."""
    strided = (isinstance(placement, private.StridedShard) for placement in stored.placements)
    if layout_of(stored) is not None or not any(strided):
        return stored.full_tensor()
    group, dim = layout_group(stored.device_mesh), private.shard_dim(stored.placements[-1])
    shape = tuple(stored.shape)
    return unshard(stored, replicated(shape, group.size) if dim is None else chunked(shape, dim, group.size), group)


def stored_like(parameter: Any, value: Any) -> Any:
    """A gradient or optimizer state, as a DTensor of its parameter's layout: what made it may have given it a plain
    one."""
    if not isinstance(value, DTensor) or layout_of(parameter) is None or layout_of(value) is not None:
        return value
    return wrap_like(parameter, private.local_of(value), private.spec_of(value))


def planned_root(module: nn.Module) -> tuple[str, nn.Module]:
    """(fqn, module) of the model in a module that was put on a mesh; the module itself, if there is none."""
    for name, inner in module.named_modules():
        record = applied(inner)
        if not (record.plan is record.cut is record.data is None):
            return name, inner
    return "", module


def _refuse_part(module: nn.Module, root: nn.Module) -> None:
    """Raises: ModelError `part-of-stages`: which rank has what is a record of the model, not of the modules inside."""
    if pipeline_cut(root) is not None:
        return
    is_cut = any(mark_of(parameter).stage is not None for parameter in module.parameters())
    if is_cut or any(applied(inner).absent for inner in module.modules()):
        what = (
            f"this {type(module).__name__} is a part of a model that was cut into pipeline stages, and may be on some "
            "of them only"
        )
        raise ModelError(Problem("part-of-stages", what, fix="pass the model itself, and take the names that you need"))


def _described(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return None, None, value


def _sent(value: Any, source: _Source, group: Group) -> torch.Tensor:
    """The value of one stage on all of them. It travels as bytes, because not every backend sends every dtype."""
    if source.rank == group.rank:
        full = value.detach().to(group.device).contiguous()
    else:
        assert source.shape is not None
        full = torch.empty(source.shape, dtype=source.dtype, device=group.device)
    if full.numel():
        group.broadcast(full.reshape(-1).view(torch.uint8), source.rank)
    return full
