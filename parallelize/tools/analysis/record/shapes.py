"""What each module is called with and what it returns, unsharded and planned: shapes alone, on meta tensors.

A plan that matches a model's names can still change what its forward computes. Shards that do not fit together make the
planned forward fail. A module that sees only a part of the data is visible in the shapes of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelize.axes.tensor.local_inputs import full_value
from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits
from parallelize.base.errors import MeshError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.meshes import mesh_spec
from parallelize.state.records import record_of
from parallelize.tools.analysis.record.attention_model import forwards_on_meta
from parallelize.tools.analysis.record.trace_data import LOSS
from parallelize.tools.analysis.record.tracing import MeshAxes, Scopes, Tracer

T = torch.Tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class CallShapes:
    """A module's first call.

    Attributes:
        inputs, outputs: shapes of tensors.
        input_ids: the identity of each input tensor.
        marked: for each output, whether it declares that it is a shard (logits over the vocabulary).
        finished: how many of the modules' first calls had returned when this one returned; None if it did not return. A
            module's calls finish after those of the modules inside it.
    """

    inputs: tuple[Shape, ...]
    input_ids: tuple[int, ...]
    outputs: tuple[Shape, ...] = ()
    marked: tuple[bool, ...] = ()
    finished: int | None = None


@dataclass
class ForwardShapes:
    """One forward: calls by module name in the order of entry, and the error that ended it with the module that raised
    it."""

    calls: dict[str, CallShapes] = field(default_factory=dict)
    error: Exception | None = None
    failed_module: str = ""

    def innermost_first(self) -> list[tuple[str, CallShapes]]:
        """Calls that returned, in the order in which they did: modules before the modules that call them."""
        returned = [(call.finished, name, call) for name, call in self.calls.items() if call.finished is not None]
        return [(name, call) for _, name, call in sorted(returned, key=lambda item: item[0])]


def forward_shapes(model: nn.Module, inputs: dict[str, Any], spec: MeshSpec | None = None) -> ForwardShapes:
    """Run a model on meta (planned or not) and record the calls of its modules."""
    record = record_of(model)
    spec = spec or (mesh_spec(record.tp) if record is not None else MeshSpec(dp=1))
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    shapes = ForwardShapes()
    stack: list[str] = []
    alive: list[T] = []  # all inputs, so that no id is reused
    num_finished = 0

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        name = names.get(id(module))
        stack.append(name if name is not None else (stack[-1] if stack else ""))
        if name is not None and name not in shapes.calls:
            tensors = _tensors((args, kwargs))
            alive.extend(tensors)
            shapes.calls[name] = CallShapes(_shapes(tensors), tuple(map(id, tensors)))

    def leave(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        nonlocal num_finished
        name = stack.pop()
        call = shapes.calls.get(name)
        if names.get(id(module)) == name and call is not None and not call.outputs:
            tensors = _tensors(output)
            marked = tuple(isinstance(x, ShardedLogits) for x in tensors)
            shapes.calls[name] = replace(call, outputs=_shapes(tensors), marked=marked, finished=num_finished)
            num_finished += 1

    with _hooks(model, enter, leave), forwards_on_meta(model), Tracer(Scopes(model), lambda _: LOSS, MeshAxes(spec, 0)):
        try:
            model(**{key: value for key, value in inputs.items() if key != "targets"})
        # a stock forward may raise anything on shards: lint reports the error, with its module
        except Exception as error:
            shapes.error, shapes.failed_module = error, stack[-1] if stack else ""
    return shapes


@contextmanager
def _hooks(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[T]:
    """In full, also those that answer a local width to the code of the module that they are passed in."""
    return [full_value(leaf) for leaf in private.tree_leaves(value) if isinstance(leaf, T)]


def _shapes(tensors: list[T]) -> tuple[Shape, ...]:
    return tuple(tuple(x.shape) for x in tensors)


# -- fake world ------------------------------------------------------------------------------------------------------
# A mesh of any size in one process: PyTorch's fake process group, whose collectives do nothing.


@contextmanager
def fake_mesh(spec: MeshSpec, rank: int = 0) -> Iterator[DeviceMesh]:
    """The mesh as `rank` sees it, within the block. It is on the CPU, and nothing is sent.

    Raises: MeshError `process-group-taken` where the process has a process group already.
    """
    if dist.is_initialized():
        fix = "call it before init_process_group, or in a separate process"
        raise MeshError(
            Problem("process-group-taken", "explaining a mesh needs a process without process groups", fix=fix)
        )
    dist.init_process_group("fake", rank=rank, world_size=spec.world_size, store=private_groups.fake_store())
    try:
        yield init_device_mesh("cpu", spec.sizes, mesh_dim_names=spec.names)
    finally:
        dist.destroy_process_group()
