"""Private names of torch for tensors, DTensors, autograd and modules; the files beside this one have all others.

Each entry says what it is for, and in which version it first appeared.
An absent name disables the feature that needs it, never the import of the package.
Tested with torch 2.13; written for 2.11 to 2.15.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.utils.data
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as _current_dispatch_modes,
)

from parallelize.base.patches import active as patches

StridedShard: Any = _StridedShard
"""The placement of shards with a stride, which PyTorch's `redistribute` calls for its own conversions (since 2.3)."""

local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor of a DTensor, without the autograd Function of `to_local()` (25 us): an attribute since 2.0."""


def plain_local(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor is returned itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


active_ddp: Callable[[Any], Any] = attrgetter("_active_ddp_module")
"""The instance of DistributedDataParallel (the argument) that runs its module's forward, or None (since 1.13)."""


def leave_ddp(cls: Any) -> None:
    """End the forward that `active_ddp` tells of: `replicate` does not, where that forward raises."""
    cls._active_ddp_module = None


spec_of: Callable[[Any], Any] = attrgetter("_spec")
"""Mesh, placements and metadata of the full tensor of a DTensor."""

tree_leaves: Callable[[Any], list[Any]] = pytree.tree_leaves
tree_map: Callable[[Callable, Any], Any] = pytree.tree_map
"""For nested arguments of an op: `torch.utils._pytree`, used by torch's own subclasses since 1.8."""


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that are active in this thread, in 40 ns (since 1.13)."""

DispatchMode: Any = TorchDispatchMode
functions_of_subclasses: Any = torch._C._EnableTorchFunction  # contexts with and without `__torch_function__` (2.0)
no_functions_of_subclasses: Any = torch._C.DisableTorchFunctionSubclass
"""A mode that intercepts every op of its thread below autograd: a private module, used by torch's own tools since
1.12."""


def counts_collectives() -> bool:
    """Whether PyTorch's `CommDebugMode` counts the collectives of this thread (public since 2.5; the stack of modes,
    1.12)."""
    if not num_dispatch_modes():
        return False
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")  # importing it takes 0.7 s; who counts has done so
    return debug is not None and any(isinstance(mode, debug.CommDebugMode) for mode in _current_dispatch_modes())


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave collectives inside out of what `CommDebugMode` counts."""
    with _disable_current_modes() if counts_collectives() else nullcontext():
        yield


def shard_dim(placement: Any) -> int | None:
    """The tensor dim that a placement shards. `fully_shard` over tp makes `_StridedShard`, which is no `Shard` in
    2.13."""
    return getattr(placement, "dim", None)


wrap: Callable[..., DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)
"""wrap(local, spec): a DTensor around `local` with a known spec, without `from_local`'s checks and its autograd
Function.

`__init__` does nothing but costs 1.1 us, because it is wrapped for Dynamo; `__new__` makes the complete tensor.
"""


def parameter_of(made: Any, requires_grad: bool) -> nn.Parameter:
    """A DTensor or tensor that nothing else refers to yet, as a parameter: the same object, if it is a DTensor.

    `nn.Parameter` would detach a DTensor, an operation of which each thread derives the placements anew: milliseconds
    for each shape. Its flag says what a parameter is (1.12).
    """
    if not isinstance(made, DTensor):
        return nn.Parameter(made, requires_grad=requires_grad)
    made.requires_grad_(requires_grad)
    made._is_param = True
    return made  # type: ignore[return-value]


def at_least(major: int, minor: int, version: str = torch.__version__) -> bool:
    """Whether this is a version of torch or a later one, for what differs without a name to look for."""
    return tuple(map(int, version.split(".")[:2])) >= (major, minor)


def asks_subclasses_of_dtensors() -> bool:
    """Whether operations on tensors of a subclass of DTensor reach its `__torch_dispatch__` (2.12)."""
    return at_least(2, 12)


def starts_at(node: Any) -> bool:
    """Whether a backward can start at a node of the graph; at those of Python's Functions since 2.13."""
    return at_least(2, 13) or not isinstance(node, torch.autograd.function.BackwardCFunction)


def with_dtype(spec: Any, local: torch.Tensor) -> Any:
    """The spec for a tensor of the same layout and another dtype (mixed precision)."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == local.dtype:
        return spec
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype))


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the running backward pass (DDP and FSDP use the same hook)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """A number for the running backward pass; -1 outside of one."""
    return torch._C._current_graph_task_id()


def current_mesh() -> DeviceMesh | None:
    """The mesh of a surrounding `with mesh:` block."""
    try:
        from torch.distributed.device_mesh import _mesh_resources

        return _mesh_resources.get_current_mesh()
    except (ImportError, AttributeError, RuntimeError):
        return None


def is_distributed(module: Any) -> bool:
    """Whether PyTorch's `distribute_module` was applied to this module, as by most of its styles."""
    return "_distribute_module_applied" in module.__dict__


plain_functions = torch._C.DisableTorchFunctionSubclass
"""A context in which a tensor subclass is treated as a plain tensor."""


def root_of(mesh: Any) -> Any:
    """The mesh that a submesh was sliced from (since 2.8; before, the submesh itself)."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


dtensor_handlers: dict[Any, Callable] = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
"""What runs an op of DTensors instead of the dispatcher, called with (op, args, kwargs): its own dictionary since
2.2."""


def loss_parallel_is_on() -> bool:
    """Whether PyTorch's `loss_parallel()` has its handlers installed."""
    return torch.ops.aten._log_softmax.default in dtensor_handlers


def leave_loss_parallel() -> None:
    """Remove those handlers, as the stock context does when it ends without an exception."""
    from torch.distributed.tensor.parallel.loss import _disable_custom_loss_ops

    _disable_custom_loss_ops()


def saved_tensor_hooks() -> Any:
    """The innermost hooks on tensors saved for backward, as recompute and offloading set them (since 2.1); or None."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def schedule_orders(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[tuple[int, str, int]]] | None:
    """Each rank's order of (stage, "F" | "B" | "I" | "W", microbatch) in PyTorch's own schedule class `name`.

    Idle entries (None) are dropped; overlapped pairs follow one another. Returns None if this torch has no such
    schedule.
    """
    try:
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(name)
    except (ImportError, ValueError):
        return None
    per_rank: Any = get_schedule_ops(name, ranks, microbatches, stages_per_rank)
    flat = [[part for op in order if op for part in getattr(op, "sub_actions", None) or (op,)] for order in per_rank]
    return [[(op.stage_index, op.computation_type.value, op.microbatch_index) for op in order] for order in flat]


def tree_flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """(leaves, structure) of nested containers; those of which `is_leaf` is true stay closed. The structure can be
    pickled."""
    return pytree.tree_flatten(value, is_leaf)


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def storage_address(tensor: torch.Tensor) -> int:
    """The same number for all views of a storage, as long as it exists. Meta tensors have it too, and no data pointer.
    Inside of `vmap`, where a tensor has no storage, 0."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0


def record_ops(record: Callable[[Any, tuple, dict, Callable[[], Any]], Any]) -> Any:
    """A context in which `record(op, args, kwargs, run)` is called instead of every dispatched op (since 1.13)."""

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            return record(func, args, kwargs, lambda: func(*args, **kwargs))

    return Recording()


def written_tensors(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensors that a dispatched op writes to, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def on_meta() -> Any:
    """`torch.device("meta")` as a context that code inside does not notice.

    An empty `torch.tensor([])`, which libraries use to find the default device, stays on that device. The functions of
    `nn.init` that skip meta tensors since 2.13 (`orthogonal_`, `sparse_`, `dirac_`) run.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    constructors, is_meta_getter = _device_constructors(), torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            if func == is_meta_getter and sys._getframe(1).f_code.co_filename == torch.nn.init.__file__:
                return False
            empty = func is torch.tensor and len(args) == 1 and isinstance(args[0], list) and not args[0]
            if func in constructors and kwargs.get("device") is None and not empty:
                kwargs = {**kwargs, "device": "meta"}
            return func(*args, **kwargs)

    return OnMeta()


_PATCHED = threading.RLock()


@contextmanager
def autocast_of_meta() -> Iterator[None]:
    """Let `torch.autocast(x.device.type)` accept "meta", which PyTorch refuses: nothing is cast, as without values
    (2.0)."""
    with _PATCHED:
        autocast: Any = torch.amp.autocast_mode.autocast
        stock = autocast.__init__

        def patched(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            stock(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

        with patches.within(autocast, "__init__", patched):
            yield


@contextmanager
def truncated_normals(draw: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let this thread's `nn.init.trunc_normal_` call `draw(tensor, mean, std, low, high)`.

    Since 2.13 it redraws until all values are inside the bounds. It skips meta tensors, which have no values.
    """
    from torch.nn import init

    owner = threading.get_ident()
    with _PATCHED:
        stock = init._no_grad_trunc_normal_

        def patched(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
            if threading.get_ident() == owner and generator is None:
                return draw(tensor, mean, std, a, b)
            return stock(tensor, mean, std, a, b, generator)

        with patches.within(init, "_no_grad_trunc_normal_", patched):
            yield


def masked_scale(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """x * keep * scale in one kernel: the backward of PyTorch's dropout, which computes its forward too (since
    1.11)."""
    return torch.ops.aten.native_dropout_backward(x, keep, scale)


plain_calls = getattr(torch._C, "DisableTorchFunction", torch._C.DisableTorchFunctionSubclass)
"""A context in which neither function modes nor tensor subclasses intercept a call (since 2.0)."""


def split_above(placement: Any, parts: int) -> Any:
    """The placement on an outer axis that shards dim 0 of the shards that `placement` makes for `parts` ranks (as
    fully_shard, 2.4)."""
    if shard_dim(placement) != 0:
        return Shard(0)
    return _StridedShard(0, split_factor=parts)


def spec(mesh: DeviceMesh, placements: tuple[Any, ...], like: torch.Tensor) -> Any:
    """The spec of a DTensor that does not exist; `like` is a meta tensor of the full shape."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype))


def replicated_spec(mesh: DeviceMesh, full: torch.Tensor) -> Any:
    """The spec of a tensor that every rank of a mesh stores."""
    return spec(mesh, (Replicate(),) * mesh.ndim, full)


def register_foreach_class(cls: type) -> None:
    """Let optimizers and clipping choose their multi-tensor kernels for a subclass of DTensor, as for DTensor (since
    2.1)."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        supported: Any = getattr(module, "_foreach_supported_types", None)
        if supported is not None and cls not in supported:
            supported.append(cls)


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor."""
    dtensor._local_tensor = local


def _fsdp_parameters(unit: Any) -> Iterator[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from group.fsdp_params if group is not None else ()


def convert_sharded(unit: Any, conversion_of: Callable[[Any, str], Callable[[Any], Any] | None]) -> None:
    """Convert the sharded parameters of a `fully_shard` module in place, and each gradient that it will make (2.4).

    conversion_of: (module, parameter name) -> what converts a DTensor in place and returns it, or None.
    """
    for param in _fsdp_parameters(unit):
        info = param._module_info
        convert = conversion_of(info.module, info.param_name)
        if convert is not None and "to_sharded_dtensor" not in vars(param):
            convert(param.sharded_param)
            make = param.to_sharded_dtensor
            param.to_sharded_dtensor = lambda tensor, make=make, convert=convert: convert(make(tensor))


def sequence_number() -> int:
    """The number that the next autograd node of this thread gets (since 1.12)."""
    return torch._C._autograd._get_sequence_nr()


def is_from_local(tensor: torch.Tensor) -> bool:
    """Whether a DTensor was made by `DTensor.from_local`, whose backward redistributes its gradient (named so since
    2.0)."""
    return type(tensor.grad_fn).__name__ == "_FromTorchTensorBackward"


def running_node() -> Any | None:
    """The autograd node whose backward is running; None outside of one (since 2.1)."""
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the running backward will execute an autograd node, so that the gradient for it is needed (since
    1.13)."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is captured for `torch.autograd.grad`
        return True


def wrap_in_torch(what: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace, once and while planned models live, the "norm" that `nn.utils.clip_grad_norm_` takes (2.6),
    `get_total_norm`, the "total norm" (2.6), how the "lists of optimizers", of "averages" and of "clipping" are divided
    by device and dtype (2.0), the "unscaling" of `GradScaler` (1.6), "backward" or "grad" of `torch.autograd` (0.2),
    what registers "forward hooks" of modules (0.2), the insertion into a "list of modules" (1.0) or a "sequence of
    modules" (2.0), or the constructor of "data parallel" wrappers (1.0)."""
    owner, name = _attribute(what)
    patches.replace(owner, name, wrapper)


@cache
def _attribute(what: str) -> tuple[Any, str]:
    from torch.optim import optimizer, swa_utils

    return {
        "data parallel": (torch.nn.parallel.DistributedDataParallel, "__init__"),
        "backward": (torch.autograd, "backward"),
        "grad": (torch.autograd, "grad"),
        "forward hooks": (torch.nn.Module, "register_forward_hook"),
        "list of modules": (torch.nn.ModuleList, "insert"),
        "sequence of modules": (torch.nn.Sequential, "insert"),
        "lists of averages": (swa_utils, "_group_tensors_by_device_and_dtype"),
        "lists of clipping": (torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype"),
        "lists of optimizers": (optimizer, "_group_tensors_by_device_and_dtype"),
        "norm": (torch.nn.utils.clip_grad, "_get_total_norm"),
        "total norm": (torch.nn.utils, "get_total_norm"),
        "unscaling": (torch.amp.GradScaler, "_unscale_grads_"),
    }[what]


def clipped_parameters() -> list[Any]:
    """Called by what replaces the "norm" (see `wrap_in_torch`), which gets gradients alone: the parameters that
    `nn.utils.clip_grad_norm_` was given (a variable of its frame, since 2.6)."""
    parameters = sys._getframe(2).f_locals.get("parameters")
    return list(parameters) if isinstance(parameters, list) else []


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """A block that runs as if it were not in a data loader's worker: `get_worker_info()` is None (1.2)."""
    worker: Any = torch.utils.data._utils.worker
    info = worker._worker_info
    if info is None:
        yield
        return
    _WORKER.append(True)
    try:
        with patches.within(worker, "_worker_info", None):
            yield
    finally:
        _WORKER.clear()


_WORKER: list[bool] = []
"""Whether a worker's information is hidden: of the process, whose threads read the samples too."""


def in_data_worker() -> bool:
    """Whether this process is a data loader's worker, also while its information is hidden."""
    return bool(_WORKER) or torch.utils.data.get_worker_info() is not None


record_memory_history: Callable[..., None] = getattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
dump_memory_snapshot: Callable[[str], None] = getattr(torch.cuda.memory, "_dump_snapshot", lambda _: None)
"""A file of what the allocator of GPUs has, for pytorch.org/memory_viz; the other one lets it note where (since
2.1)."""
