"""The one file that touches private names of torch. Each entry says what it is for and since which version it is there.

An absent name disables the one feature that needs it, never the import of the package.
Checked against torch 2.13; written for 2.11 to 2.15.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
"""The shard itself, without the autograd Function of `to_local()` (25 us): an attribute since 2.0."""

spec_of: Callable[[Any], Any] = attrgetter("_spec")
"""Mesh, placements and global metadata of a DTensor."""

tree_leaves: Callable[[Any], list[Any]] = pytree.tree_leaves
tree_map: Callable[[Callable, Any], Any] = pytree.tree_map
"""Nested arguments of an op: `torch.utils._pytree`, used by torch's own subclasses since 1.8."""


DispatchMode: Any = TorchDispatchMode
"""A mode that sees every op of its thread below autograd: a private module, used by torch's own tools since 1.12."""


def shard_dim(placement: Any) -> int | None:
    """The tensor dim that a placement splits. `fully_shard` above tp gives `_StridedShard`, which is no `Shard` in 2.13."""
    return getattr(placement, "dim", None)


def wrap(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor around `local` with a known spec, without `from_local`'s checks and its autograd Function.

    `__init__` does nothing but costs 1.1 us, because it is wrapped for Dynamo; `__new__` makes the whole tensor.
    """
    return _new_dtensor(DTensor, local, spec, requires_grad=False)  # type: ignore[call-arg]


_new_dtensor = DTensor.__new__


def with_dtype(spec: Any, local: torch.Tensor) -> Any:
    """The spec for a tensor of the same layout and another dtype (mixed precision)."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == local.dtype:
        return spec
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype))


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is going on has ended (DDP and FSDP use the same hook)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def backward_id() -> int:
    """A number for the backward pass that is going on, -1 outside of one."""
    return torch._C._current_graph_task_id()


def current_mesh() -> DeviceMesh | None:
    """The mesh of a surrounding `with mesh:` block."""
    try:
        from torch.distributed.device_mesh import _mesh_resources

        return _mesh_resources.get_current_mesh()
    except (ImportError, AttributeError, RuntimeError):
        return None


def default_store() -> Any | None:
    """The store behind the default process group, for messages that must not depend on matching collectives."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
    except (ImportError, AttributeError, ValueError):
        return None


def known_groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank has made or belongs to: PyTorch's own registry."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def parallel_style_class() -> type:
    """PyTorch's base class of styles, so that ours are accepted there too."""
    from torch.distributed.tensor.parallel import ParallelStyle

    return ParallelStyle


plain_functions = torch._C.DisableTorchFunctionSubclass
"""A context in which a tensor subclass is treated as a plain tensor."""


def loss_parallel_is_on() -> bool:
    """Whether PyTorch's `loss_parallel()` has its handlers installed."""
    return torch.ops.aten._log_softmax.default in DTensor._op_dispatcher._custom_op_handlers


def leave_loss_parallel() -> None:
    """Remove those handlers, as the stock context does when it ends without an exception."""
    from torch.distributed.tensor.parallel.loss import _disable_custom_loss_ops

    _disable_custom_loss_ops()


def saved_tensor_hooks() -> Any:
    """The innermost hooks on tensors saved for backward, which recompute and offloading set (since 2.1); None without."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def symmetric_ops() -> Any:
    """The `symm_mem` ops, which exist once the module that defines them is imported (since 2.5)."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def enable_symmetric_memory(pg: dist.ProcessGroup) -> str:
    """Make symmetric memory usable on a group; why it is not, or an empty text."""
    try:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group, is_symm_mem_enabled_for_group
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    try:
        if not is_symm_mem_enabled_for_group(pg.group_name):
            enable_symm_mem_for_group(pg.group_name)
    except (RuntimeError, ValueError) as error:
        return f"the group does not support symmetric memory: {error}"
    return ""


try:  # simulation of all ranks in one process, private since 2.9
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
except ImportError:
    LocalTensor = LocalTensorMode = None  # type: ignore[assignment,misc]


def local_tensor(by_rank: dict[int, torch.Tensor]) -> Any:
    """A tensor that holds every rank's own."""
    return LocalTensor(by_rank)


def on_rank(value: Any, rank: int) -> Any:
    """One rank's part of a value; what is no such tensor is the same for all."""
    return value._local_tensors[rank] if LocalTensor is not None and isinstance(value, LocalTensor) else value


def simulated_groups(pg: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of this group and of those beside it on the mesh, which one call serves all under `LocalTensorMode`."""
    from torch.distributed._local_tensor._c10d import _prepare_collective_groups

    ranks, offsets = _prepare_collective_groups(pg)[:2]  # 2.13 adds a third
    return [[offset + rank for rank in ranks] for offset in offsets]


def schedule_orders(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[tuple[int, str, int]]] | None:
    """Each rank's order of (stage, "F" | "B" | "I" | "W", microbatch) in PyTorch's own schedule class `name`.

    Pads (None) are dropped and overlapped pairs written one after the other. None where this torch has no such schedule.
    """
    try:
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(name)
    except (ImportError, ValueError):
        return None
    per_rank = get_schedule_ops(name, ranks, microbatches, stages_per_rank)
    flat = [[part for op in order if op for part in getattr(op, "sub_actions", None) or (op,)] for order in per_rank]
    return [[(op.stage_index, op.computation_type.value, op.microbatch_index) for op in order] for order in flat]


def intercept_call(module: Any, call: Callable[..., Any]) -> None:
    """Let `call` stand before everything that calling `module` does, its hooks included (the slot of `Module.compile`, 2.0)."""
    module._compiled_call_impl = call


def call_module(module: Any, args: tuple, kwargs: dict) -> Any:
    """What calling a module does when nothing intercepts it: hooks and forward."""
    return module._call_impl(*args, **kwargs)


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """(leaves, structure) of nested containers; the structure can be pickled."""
    return pytree.tree_flatten(value)


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def storage_address(tensor: torch.Tensor) -> int:
    """The same number for all views of one storage, as long as it lives; meta tensors have no data pointer to ask."""
    return tensor.untyped_storage()._cdata


def record_ops(record: Callable[[Any, tuple, dict, Callable[[], Any]], Any]) -> Any:
    """A context in which `record(op, args, kwargs, run)` is called in the place of every dispatched op (since 1.13)."""

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            return record(func, args, kwargs, lambda: func(*args, **kwargs))

    return Recording()


def written_tensors(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensors that a dispatched op's schema says it writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def on_meta() -> Any:
    """`torch.device("meta")` as a context that does not show itself.

    An empty `torch.tensor([])`, by which libraries ask for the default device, stays where it was; and the functions of
    `nn.init` that do nothing on the meta device since 2.13 (`orthogonal_`, `sparse_`, `dirac_`) run there all the same.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    made, asks = _device_constructors(), torch.Tensor.is_meta.__get__

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            if func == asks and sys._getframe(1).f_code.co_filename == torch.nn.init.__file__:
                return False
            empty = func is torch.tensor and len(args) == 1 and isinstance(args[0], list) and not args[0]
            if func in made and kwargs.get("device") is None and not empty:
                kwargs = {**kwargs, "device": "meta"}
            return func(*args, **kwargs)

    return OnMeta()


_PATCHED = threading.RLock()


@contextmanager
def truncated_normals(draw: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let this thread's `nn.init.trunc_normal_` call `draw(tensor, mean, std, low, high)`.

    Since 2.13 it draws until nothing lies outside, which a meta tensor cannot tell, so there it does nothing at all.
    """
    from torch.nn import init

    owner = threading.get_ident()
    with _PATCHED:
        stock = init._no_grad_trunc_normal_

        def patched(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
            if threading.get_ident() == owner and generator is None:
                return draw(tensor, mean, std, a, b)
            return stock(tensor, mean, std, a, b, generator)

        init._no_grad_trunc_normal_ = patched
        try:
            yield
        finally:
            init._no_grad_trunc_normal_ = stock


def masked_scale(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """x * keep * scale in one kernel: the backward of PyTorch's own dropout, which is also its forward (since 1.11)."""
    return torch.ops.aten.native_dropout_backward(x, keep, scale)


plain_calls = getattr(torch._C, "DisableTorchFunction", torch._C.DisableTorchFunctionSubclass)
"""A context in which neither function modes nor tensor subclasses see a call (since 2.0)."""


def split_above(placement: Any, parts: int) -> Any:
    """The placement on an outer axis that splits dim 0 of what `placement` gives to `parts` ranks (fully_shard's, 2.4)."""
    if shard_dim(placement) != 0:
        return Shard(0)
    return _StridedShard(0, split_factor=parts)


def spec(mesh: DeviceMesh, placements: tuple[Any, ...], like: torch.Tensor) -> Any:
    """A DTensor's spec without a DTensor; `like` has the full shape, on meta."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype))


def set_local(shown: Any, value: torch.Tensor) -> None:
    """Let a DTensor parameter stand for other storage."""
    shown._local_tensor = value


def forget_unsharded_gradients(unit: Any) -> None:
    """Drop what a failed backward has left on a `fully_shard` module's gathered parameters (2.4; one group before 2.12)."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for param in group.fsdp_params if group is not None else ():
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def fake_store() -> Any:
    """The store of the fake process group, whose collectives do nothing (since 2.0)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def finished_work() -> Any:
    """What a collective that sends nothing returns: a work that is done, as dispatcher ops return it (since 2.4)."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def group_of_op(argument: Any) -> dist.ProcessGroup:
    """The process group among a dispatcher op's arguments (since 2.1)."""
    return dist.ProcessGroup.unbox(argument)


def sequence_number() -> int:
    """The number that the next autograd node of this thread gets (since 1.12)."""
    return torch._C._autograd._get_sequence_nr()


def running_node() -> Any | None:
    """The autograd node whose backward is going on, None outside of one (since 2.1)."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the backward that is going on will run an autograd node, so that what flows to it is of use (since 1.13)."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is captured for `torch.autograd.grad`
        return True


def ranks_of_op(args: tuple) -> tuple[int, ...]:
    """The global ranks of the process group among a dispatcher op's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(group_of_op(argument)))
            except (RuntimeError, TypeError, ValueError):  # the reduce op is a ScriptObject too
                continue
    raise RuntimeError("a collective without a process group")


def threaded_groups() -> Any:
    """PyTorch's process group whose ranks are threads of one process, which its own tests use (since 1.13).

    Absent, nothing runs as threads: `verify` then needs `backend="gloo"`.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11's threaded group lacks what destroying one reads
        threaded.ThreadLocalWorld.comms = property(lambda self: [])
    return threaded


@contextmanager
def threads_as_ranks(group_class: type) -> Iterator[None]:
    """Let every thread be a rank with process groups of its own, made of `group_class` (of `threaded_groups`)."""
    threaded = threaded_groups()
    stock = threaded.ProcessLocalGroup
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup = group_class
    try:
        yield
    finally:
        threaded.ProcessLocalGroup = stock
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
