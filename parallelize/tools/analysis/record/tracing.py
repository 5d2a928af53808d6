"""Runs one microbatch of a planned model on tensors without values, and records what it does.

A dispatch mode sees every op. It follows storages from allocation to release, answers collectives at once and records
them with the mesh axis of their group, and computes the work of ops from shapes. The code that runs is the training
code.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from parallelize.base.mesh import MeshSpec
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.attention import flex_model
from parallelize.ops.library import KERNELS, NAMESPACE
from parallelize.plan.dims.meta_calls import called
from parallelize.tools.analysis.record.trace_data import LOSS, OUTSIDE, Kernel, Message

T = torch.Tensor

# dispatcher op -> (name of the collective, index of the argument whose bytes count, what it returns)
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, "tensors"),
    "broadcast_": ("broadcast", 0, "tensors"),
    "_allgather_base_": ("all_gather", 0, "tensor"),
    "_reduce_scatter_base_": ("reduce_scatter", 1, "tensor"),
    "alltoall_base_": ("all_to_all", 1, "work"),
    "send": ("send", 0, "work"),
    "recv_": ("recv", 0, "work"),
}


@dataclass
class Event:
    """One moment: a storage is allocated (bytes > 0) or freed (bytes < 0), a message, or an op."""

    unit: str
    storage: int = 0
    bytes: int = 0
    message: Message | None = None
    kernel: Kernel | None = None
    at_end: bool = False  # the storage is freed when the action has ended


class MeshAxes:
    """Finds the mesh axis of a group of ranks. ep: the ranks over which experts are folded, where they are more than
    tp's."""

    def __init__(self, spec: MeshSpec, rank: int, ep: tuple[int, ...] = ()):
        self.spec, self.rank = spec, rank
        self._known: dict[tuple[int, ...], str] = {}
        names = [name for name, size in spec.axes if size > 1]
        for axis in names:
            self._known.setdefault(spec.group_of(rank, axis), axis)
        for first in range(len(names)):
            for stop in range(len(names), first + 1, -1):
                self._known.setdefault(spec.group_of(rank, *names[first:stop]), "*".join(names[first:stop]))
        if len(names) > 1:
            self._known[tuple(range(spec.world_size))] = "world"
        if ep:
            self._known[ep] = "ep"

    def name(self, ranks: Sequence[int]) -> str:
        """A subgroup of an axis (the ranks that store one key/value head) counts as that axis."""
        ranks = tuple(ranks)
        if ranks in self._known:
            return self._known[ranks]
        containing = [axis for known, axis in self._known.items() if set(ranks) <= set(known)]
        return containing[0] if containing else "world"


class Tracer(private.DispatchMode):
    """Records events of the current action.

    Args:
        unit_of: module name -> unit, or None. axes: see `MeshAxes`.
    """

    def __init__(self, scopes: Scopes, unit_of: Callable[[str], str | None], axes: MeshAxes):
        super().__init__()
        self.scopes, self.unit_of, self.axes = scopes, unit_of, axes
        self.events: list[Event] = []
        self._serials: dict[int, int] = {}  # address of a live storage -> its serial number, 0 for ignored ones
        self._last_serial = 0
        self._allocators: dict[int, str] = {}  # serial number -> the unit that allocated the storage
        self._last_all = 0  # address of the storage of the last `all(...)`
        self._units: dict[str | None, str] = {None: LOSS}
        self._last_unit = OUTSIDE
        self._phase = "forward"

    def begin(self, phase: str) -> list[Event]:
        """Start another action. Returns its list of events, which fills as it runs."""
        self.events, self._phase = [], phase
        return self.events

    def serial_of(self, x: T) -> int | None:
        """The serial number of a tensor's storage."""
        return self._serials.get(private.storage_address(x))

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and func.__name__.split(".")[0] in COLLECTIVES:
            return self._collective(func, args)
        if func.namespace == NAMESPACE and func._opname in KERNELS:
            return self._library_op(func, args)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._scalar(args[0])
        output = called(func, args, kwargs, partial(func, *args, **kwargs))
        if func.overloadpacket is torch.ops.aten.all:
            self._last_all = private.storage_address(output)
        unit = self._unit()
        for leaf in private.tree_leaves(output):
            if isinstance(leaf, T):
                self._track(leaf, unit)
        kernel = kernel_of(func, args, kwargs, output)
        if kernel is not None:
            self.events.append(Event(unit, kernel=kernel))
        return output

    def _scalar(self, x: T) -> bool | float | int:
        """The answer to a forward that reads a value: zero, but True for `all(...)` (no position is masked, no sequence
        is packed)."""
        if private.storage_address(x) == self._last_all:
            return True
        if x.dtype == torch.bool:
            return False
        return 0.0 if x.dtype.is_floating_point else 0

    def _collective(self, func: Any, args: tuple) -> Any:
        op, counted, returned = COLLECTIVES[func.__name__.split(".")[0]]
        ranks = private_groups.ranks_of_op(args)
        size = sum(x.numel() * x.element_size() for x in private.tree_leaves(args[counted]) if isinstance(x, T))
        unit, module = self._unit(), self.scopes.current
        received = _received_bytes(args, ranks.index(self.axes.rank)) if op == "all_to_all" else 0
        message = Message(op, self.axes.name(ranks), len(ranks), size, module or "", self._phase, received)
        self.events.append(Event(unit, message=message))
        work = private_groups.finished_work()
        return work if returned == "work" else (args[0], work)

    def _library_op(self, func: Any, args: tuple) -> Any:
        """An op of this package with a collective inside: its kernel runs under this mode, and its messages are
        recorded."""
        name = func._schema.name.partition("::")[2]
        group = KERNELS[name].group(args)
        with group.recording() as sent, self:
            output = KERNELS[name].run(args, group)
        unit, module, axis = self._unit(), self.scopes.current or "", self.axes.name(group.ranks)
        for _, size in sent:
            message = Message("send", axis, 2, size, module, self._phase)
            self.events.append(Event(unit, message=message))
        return output

    def _unit(self) -> str:
        """The running unit. Between units, in backward, it is the previous one."""
        module = self.scopes.current
        if module is None and self._phase == "backward":
            return self._last_unit if private.running_node() is not None or self._last_unit != OUTSIDE else LOSS
        if module not in self._units:
            self._units[module] = self.unit_of(module) or OUTSIDE if module is not None else LOSS
        unit = self._units[module]
        if unit == OUTSIDE and self._phase == "backward":
            return self._last_unit
        self._last_unit = unit
        return unit

    # -- storages -------------------------------------------------------------------------------------------------

    def _track(self, x: T, unit: str) -> None:
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._serials or not size:
            return
        self._last_serial += 1
        self._serials[address] = serial = self._last_serial
        self._allocators[serial] = unit
        self.events.append(Event(unit, serial, size))
        # the registry of finalizers must not keep the tracer, which has the model and with it the storages that it
        # waits for
        weakref.finalize(storage, _freed, weakref.ref(self), address, serial, size)

    def _freed(self, address: int, serial: int, size: int) -> None:
        if self._serials.get(address) == serial:
            del self._serials[address]
            # what is freed when nothing runs anymore (outputs, the loss) is freed on the stage that allocated it
            idle = self._phase == "backward" and self.scopes.current is None and private.running_node() is None
            allocator = self._allocators.pop(serial, OUTSIDE)
            at_end = idle and allocator != OUTSIDE
            self.events.append(Event(allocator if at_end else self._unit(), serial, -size, at_end=at_end))

    def ignore(self, tensors: Sequence[T]) -> None:
        """Do not count the storages of these tensors: parameters and inputs, which exist before the step."""
        for x in tensors:
            self._serials.setdefault(private.storage_address(x), 0)


def _received_bytes(args: tuple, rank: int) -> int:
    """What an all-to-all brings from other ranks. args: of the op; rank: in its group."""
    out, sizes = args[0], args[3]
    size = out.numel() * out.element_size()
    if not sizes:
        ranks = len(private_groups.ranks_of_op(args))
        return size * (ranks - 1) // ranks
    return size * (sum(sizes) - sizes[rank]) // sum(sizes) if sum(sizes) else 0


def _freed(tracer: weakref.ref[Tracer], address: int, serial: int, size: int) -> None:
    recording = tracer()
    if recording is not None:
        recording._freed(address, serial, size)


# -- op work ---------------------------------------------------------------------------------------------------------
# Floating-point operations and bytes of one op, computed from its shapes. A matmul counts 2 m n k. Attention counts
# its two matmuls (five in backward); causal attention counts half, because fused kernels skip the masked half. All
# other ops count the bytes that they must read and write. `flex_attention` counts the blocks of its mask.


aten: Any = torch.ops.aten


def kernel_of(func: Any, args: tuple, kwargs: dict, output: Any) -> Kernel | None:
    """The work of an op; None for a view of its input."""
    inputs = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, T)]
    outputs = [leaf for leaf in private.tree_leaves(output) if isinstance(leaf, T)]
    flops_of = _FLOPS.get(func)
    if flops_of is None and not func._schema.is_mutable and _is_view(inputs, outputs):
        return None
    size = float(sum(map(_bytes, inputs)) + sum(map(_bytes, outputs)))
    attention = _ATTENTION.get(func, "")
    width = int(args[0].shape[-1]) if attention else 0
    return Kernel(flops_of(args, kwargs) if flops_of else 0.0, size, flops_of is not None, attention, width)


def _is_view(inputs: Iterable[T], outputs: list[T]) -> bool:
    storages = {private.storage_address(x) for x in inputs}
    return all(private.storage_address(x) in storages for x in outputs)


def _bytes(x: T) -> int:
    return x.numel() * x.element_size()


def _matmul_flops(a: T, b: T) -> float:
    return 2.0 * prod(a.shape) * b.shape[-1]


def _attention_forward(args: tuple, kwargs: dict) -> float:
    """args: query, key, value, dropout_p, is_causal."""
    causal = (len(args) > 4 and bool(args[4])) or bool(kwargs.get("is_causal"))
    return _attention_flops(args[0], args[1], 2, causal)


def _attention_backward(args: tuple, kwargs: dict) -> float:
    """args: grad, query, key, value, output, logsumexp, dropout_p, is_causal."""
    causal = (len(args) > 7 and bool(args[7])) or bool(kwargs.get("is_causal"))
    return _attention_flops(args[1], args[2], 5, causal)


def _attention_flops(query: T, key: T, num_matmuls: int, causal: bool) -> float:
    *batch, length, width = query.shape
    flops = 2.0 * prod(batch) * length * key.shape[-2] * width
    return num_matmuls * flops * (0.5 if causal else 1.0)


_FLOPS: dict[Any, Callable[[tuple, dict], float]] = {
    aten.mm.default: lambda args, _: _matmul_flops(args[0], args[1]),
    aten.bmm.default: lambda args, _: _matmul_flops(args[0], args[1]),
    aten.addmm.default: lambda args, _: _matmul_flops(args[1], args[2]),
    aten.baddbmm.default: lambda args, _: _matmul_flops(args[1], args[2]),
    aten._grouped_mm.default: lambda args, _: _matmul_flops(args[0], args[1]),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    flex_model.ops.block_attention.default: lambda args, _: (
        args[3] * _attention_flops(args[0], args[1], 2, causal=False)
    ),
    flex_model.ops.block_attention_backward.default: (
        lambda args, _: args[6] * _attention_flops(args[1], args[2], 5, causal=False)
    ),
}
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: "forward",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "backward",
    flex_model.ops.block_attention.default: "forward",
    flex_model.ops.block_attention_backward.default: "backward",
}


# -- scopes ----------------------------------------------------------------------------------------------------------
# Which module is running, in forward and in backward. In forward, a stack of modules answers this. In backward, the
# sequence number of the running autograd node is compared with the sequence numbers at which forward entered and left
# modules. No hooks are put on nodes.


class Scopes:
    """Follows the modules of one model while `watching`."""

    def __init__(self, root: nn.Module):
        self.names = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self.root = root
        self._stack: list[str] = []
        self._numbers: list[int] = []  # sequence numbers of autograd nodes, ascending
        self._modules: list[str | None] = []  # for each of them, the module that ran from there on
        self.parameters = {id(p): name for name, p in root.named_parameters()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self.names.get(id(module), self._stack[-1] if self._stack else ""))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(private.sequence_number())
        self._modules.append(self._stack[-1] if self._stack else None)

    @property
    def current(self) -> str | None:
        """The name of the running module; "" is the root, None means that no module runs."""
        if self._stack:  # also during recompute in backward
            return self._stack[-1]
        node = private.running_node()
        return None if node is None else self._module_of(node)

    def _module_of(self, node: Any) -> str | None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            name = self.parameters.get(id(variable))
            return name.rpartition(".")[0] if name is not None else None
        index = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[index] if index >= 0 else None
