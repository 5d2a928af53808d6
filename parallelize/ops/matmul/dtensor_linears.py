"""`F.linear` on DTensors through the collective matmuls, under a context manager.

PyTorch's own styles call three things one after another: they redistribute a linear's input, call `F.linear`, and
redistribute its output. Under `overlapped_linears()` the collective of the first or the last becomes a part of the
linear:

    x                               weight     then               runs
    Shard(dim), or gathered so      Shard(0)                      all_gather_linear
    Replicate, of a plain tensor    Shard(0)                      column_linear
    Shard(-1)                       Shard(1)   to Shard(dim)      linear_reduce_scatter
    Shard(-1)                       Shard(1)   to Replicate       linear_all_reduce

on the mesh axis that shards the weight. Every other linear runs as PyTorch's, and is counted with the reason.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from parallelize.base.errors import ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.matmul.collective_matmul import column_linear, linear_all_reduce, linear_reduce_scatter
from parallelize.ops.matmul.overlapped_linear import OverlappedLinear, algorithm_of, autocast_cast

# -- deferred dtensor ------------------------------------------------------------------------------------------------
# A DTensor that is not computed yet: what it is to be is known, and its first reader decides how it is computed.
# `F.linear` and `redistribute` are two calls, and a collective overlaps with a matmul only where one op runs both. So
# the first of the two returns one of these, and the second computes it. Any other reader gets what PyTorch would have
# computed.


_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.register_hook,
    ),
}


class DeferredDTensor(DTensor):
    """A DTensor with its shape, dtype, mesh and placements, which `value` computes.

    Functions of torch read `value`. What takes tensors without asking them (`autograd.Function.apply`) would find no
    graph behind it: a gradient that arrives here is an error.
    """

    compute: Callable[[], Any]
    redistributed: Callable[[Any], Any]
    computed: DTensor | None
    reads: list[tuple[T, int]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        args, kwargs = private.tree_map(value_of, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @property
    def value(self) -> Any:
        """The DTensor, computed once. Reading it in a block without gradients does not lose its graph."""
        if self.computed is None:
            self._check_unwritten()
            with torch.set_grad_enabled(self.requires_grad or torch.is_grad_enabled()):
                self.computed = value_of(self.compute())
        return self.computed

    @property
    def _local_tensor(self) -> T:
        return private.local_of(self.value)

    @_local_tensor.setter
    def _local_tensor(self, _: T) -> None:
        """PyTorch's constructor sets the tensor that it was given, which has no values."""

    def to_local(self, *, grad_placements: Any = None) -> T:
        """As that of the computed DTensor."""
        return self.value.to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> T:
        """As that of the computed DTensor."""
        return self.value.full_tensor(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False, **dtypes: Any
    ) -> DTensor:
        """As that of the computed DTensor; by one op, together with what computes it, where there is one."""
        plain = device_mesh in (None, self.device_mesh) and placements is not None and not any(dtypes.values())
        if self.computed is None and plain:
            self._check_unwritten()
            out = self.redistributed(tuple(placements))
            if out is not None:
                return out
        return self.value.redistribute(device_mesh, placements, async_op=async_op, **dtypes)

    def _check_unwritten(self) -> None:
        """Raises: ModelError `deferred-dtensor` where this would be computed from other values than when it was
        made."""
        if any(_version(tensor) != version for tensor, version in self.reads):
            what = "a tensor that a linear or a gather reads was written to before its result was read"
            fix = "read the result first, or write to a copy; or do both outside of overlapped_linears()"
            raise ModelError(Problem("deferred-dtensor", what, fix=fix))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredDTensor({list(self.shape)}, {self.device_mesh}, {self.placements})"


D = TypeVar("D", bound=DeferredDTensor)


def deferred_dtensor(
    cls: type[D],
    compute: Callable[[], T],
    redistributed: Callable[[Any], T | None],
    mesh: Any,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    reads: tuple[Any, ...],
    like: T,
) -> D:
    """A DTensor of the class `cls` that is not computed yet.

    Args:
        compute: computes it as PyTorch does.
        redistributed: computes it with these placements by one op; None where no op does.
        shape: of the full tensor.
        reads: the DTensors that it is computed from. like: a plain tensor of its dtype and device.
    """
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in reads)
    spec = private.spec(mesh, placements, torch.empty(shape, dtype=like.dtype, device="meta"))
    deferred: Any = cls.__new__(cls, like.new_empty(1).expand(shape), spec, requires_grad=trains)
    deferred.compute, deferred.redistributed, deferred.computed = compute, redistributed, None
    deferred.reads = [(tensor, _version(tensor)) for tensor in (*reads, *map(private.local_of, reads))]
    if trains:
        deferred.register_hook(_refuse_gradient)
    return deferred


def value_of(value: Any) -> Any:
    """The DTensor that a deferred one is to be; anything else is returned itself."""
    return value.value if isinstance(value, DeferredDTensor) else value


def _version(tensor: T) -> int:
    """How often a tensor was written to, by itself or by a view; inference tensors do not know."""
    return 0 if tensor.is_inference() else tensor._version


def _refuse_gradient(_: T) -> None:
    what = "an autograd.Function read a DTensor that was not computed yet, and would lose its gradient"
    fix = (
        "call this module outside of overlapped_linears(): full backward hooks and autograd.Functions on DTensors read "
        "so"
    )
    raise ModelError(Problem("deferred-dtensor", what, fix=fix))


# -- dtensor linears -------------------------------------------------------------------------------------------------


T = torch.Tensor
Placements = tuple[Placement, ...]


class OverlappedLinears(TorchFunctionMode):
    """What `overlapped_linears` returns: a context manager that counts the linears on DTensors inside it.

    Args:
        overlap, chunks: of every op.

    Attributes:
        ops: calls by the name of the collective matmul that ran them.
        stock: calls that PyTorch ran, by the reason.
    """

    def __init__(self, overlap: str, chunks: int | None):
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.stock: Counter[str] = Counter()
        self._runs_stock = False
        self._options: dict[str, Any] = {"overlap": overlap, "chunks": chunks}

    def __enter__(self) -> OverlappedLinears:
        defer_gathers(1)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        defer_gathers(-1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or self._runs_stock or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        return self._linear(*args, **kwargs)

    def __str__(self) -> str:
        rows = [f"{number} by {op}" for op, number in sorted(self.ops.items())]
        rows += [f"{number} by PyTorch: {reason}" for reason, number in sorted(self.stock.items())]
        return "\n".join(rows) or "no linear was called on DTensors"

    # -- one linear ----------------------------------------------------------------------------------------------------

    def _linear(self, input: T, weight: T, bias: T | None = None) -> T:
        if not isinstance(input, DTensor) and not isinstance(weight, DTensor):
            return F.linear(input, weight, bias)
        reason = _unlike_a_shard(input, weight, bias)
        if not reason:
            axis = next(n for n, placement in enumerate(weight.placements) if placement.is_shard())  # type: ignore[attr-defined]
            run = self._column if weight.placements[axis] == Shard(0) else self._row  # type: ignore[attr-defined]
            out = run(input, weight, bias, axis)
            if isinstance(out, torch.Tensor):
                return out
            reason = out
        return self._run_stock(reason, input, weight, bias)

    def _run_stock(self, reason: str, input: T, weight: T, bias: T | None) -> T:
        self.stock[reason] += 1
        self._runs_stock = True
        try:
            return F.linear(value_of(input), weight, bias)
        finally:
            self._runs_stock = False

    def _column(self, x: Any, weight: Any, bias: Any, axis: int) -> T | str:
        """The output; or, as text, why no op computes it."""
        is_gathered = isinstance(x, Gathered) and x.computed is None and x.axis == axis
        shard = value_of(x.shard_to_gather() if is_gathered else x)
        placement = shard.placements[axis]
        if placement.is_shard():
            dim = placement.dim % x.ndim
            if dim == x.ndim - 1 or not _shards_rows(shard, axis, dim):
                return f"x is {shard.placements}"
            call = OverlappedLinear("all_gather_linear", shard, [weight], bias, None, **self._options)
            (out,), gathered = call.gather(dim, None, True, None)
            if is_gathered:
                x.computed = gathered
            self.ops["all_gather_linear"] += 1
            return out
        if not placement.is_replicate() or not _shards_rows(shard, axis, None):
            return f"x is {shard.placements}"
        if not (torch.is_grad_enabled() and shard.requires_grad):
            return "nothing is sent: x is full, and has no gradient"
        if not private.is_from_local(shard):
            # it may have several readers, whose gradients are summed before they are sent
            return "x is full, and what made it reduces its gradient"
        self.ops["column_linear"] += 1
        columns: Any = column_linear(shard, weight, bias, **self._options)
        return columns

    def _row(self, x: Any, weight: Any, bias: Any, axis: int) -> T | str:
        x = value_of(x)
        if x.placements[axis] not in (Shard(x.ndim - 1), Shard(-1)) or not _shards_rows(x, axis, None):
            return f"x is {x.placements}"
        placements = tuple(Partial() if n == axis else old for n, old in enumerate(x.placements))
        stock = partial(self._run_stock, "its sum was read before it was reduced", x, weight, bias)
        reads = (x, weight) if bias is None else (x, weight, bias)
        reduced = partial(self._reduced, x, weight, bias, placements, axis)
        like = autocast_cast(private.local_of(weight).new_empty(0))
        shape = (*x.shape[:-1], weight.shape[0])
        return deferred_dtensor(DeferredDTensor, stock, reduced, x.device_mesh, placements, shape, reads, like)

    def _reduced(self, x: Any, weight: Any, bias: Any, before: Placements, axis: int, after: Placements) -> T | None:
        """The output of a row linear with other placements; None where no op reduces it to them."""
        if len(after) != len(before) or any(
            n != axis and a != b for n, (a, b) in enumerate(zip(after, before, strict=True))
        ):
            return None
        target = after[axis]
        if target.is_replicate():
            self.ops["linear_all_reduce"] += 1
            return linear_all_reduce(x, weight, bias, **self._options)
        dim = target.dim % x.ndim if type(target) is Shard else x.ndim - 1
        if dim == x.ndim - 1 or not _shards_rows(x, axis, dim):
            return None
        self.ops["linear_reduce_scatter"] += 1
        return linear_reduce_scatter(x, weight, bias, dim=dim, **self._options)


def overlapped_linears(overlap: str = "auto", chunks: int | None = None) -> OverlappedLinears:
    """A context manager under which `F.linear` on DTensors runs through the collective matmuls.

        with overlapped_linears() as linears:
            loss = model(x).sum()      # a model parallelized by PyTorch's own styles, for instance
            loss.backward()
        print(linears)                 # how many linears each op ran, and why PyTorch ran the others

    Results and gradients are those of `F.linear`, in the same placements; only the gradient of the bias of a
    `linear_reduce_scatter` is summed at once, which PyTorch leaves Partial. An input that is gathered (`redistribute`
    from Shard(dim) to Replicate) is gathered by the first linear that reads it; the others read what that one gathered.
    The output of a row linear is computed when it is reduced. In between, both are DTensors that are computed when
    something else reads them, as by PyTorch.

    Args:
        overlap: "auto", "off", "chunked" or "symm_mem", as in the ops.
        chunks: chunks per shard for "chunked". Default: 4.

    Returns: an `OverlappedLinears`: `ops` and `stock` count the linears; `str()` shows both.
    Raises: ShapeError `bad-overlap`. Inside: as the ops, and ModelError `deferred-dtensor` where a tensor is written to
        before what reads it is computed; in backward, where an autograd.Function, or a full backward hook of a module,
        has read a DTensor that was not computed yet.
    Cost: that of the ops: as many collectives as PyTorch's styles, and one all-reduce for each such bias. A replicated
        input of a plain tensor (`DTensor.from_local`) that k linears read is all-reduced k times in backward.

    It holds for the thread that enters it. Where a forward is computed again in backward (`torch.utils.checkpoint`),
    enter it inside that forward: PyTorch leaves such modes while it runs a function of its own, and so backward. For
    the same reason linears inside such functions (`F.multi_head_attention_forward`) stay as they are, uncounted. So do
    all linears under `torch.compile`.
    """
    algorithm_of(overlap, chunks)
    return OverlappedLinears(overlap, chunks)


def _unlike_a_shard(x: Any, weight: Any, bias: Any) -> str:
    """Why this can be no collective matmul, whatever the placements of x; empty if it can."""
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        return "some arguments are no DTensors"
    if any(tensor.device_mesh != x.device_mesh for tensor in tensors):
        return "the meshes of x and weight differ"
    axes = [n for n, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if (
        len(axes) != 1
        or weight.placements[axes[0]] not in (Shard(0), Shard(1))
        or weight.device_mesh.size(axes[0]) == 1
    ):
        return f"the weight is {weight.placements}"
    if x.ndim < 2 or weight.ndim != 2:
        return "x has one dim"
    expected = Shard(0) if weight.placements[axes[0]] == Shard(0) else Replicate()
    if bias is not None and any(
        placement != (expected if n == axes[0] else Replicate()) for n, placement in enumerate(bias.placements)
    ):
        return f"the bias is {bias.placements}"
    same = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    return "" if same else "the dtypes of x and weight differ"


def _shards_rows(x: DTensor, axis: int, dim: int | None) -> bool:
    """Whether the other axes shard rows of x, or nothing, and not along `dim`."""
    for n, placement in enumerate(x.placements):
        other = type(placement) is Shard and placement.dim % x.ndim not in (x.ndim - 1, dim)
        if n != axis and not placement.is_replicate() and not other:
            return False
    return True


# -- deferred gather -------------------------------------------------------------------------------------------------
# Gathers of DTensors that wait for their first reader, in a thread where `overlapped_linears()` is entered.


_LOCAL = threading.local()


class Gathered(DeferredDTensor):
    """A DTensor that is gathered along one axis when it is read: by the first column linear, or as PyTorch does.

    Attributes:
        shard: what is gathered. axis: of the mesh.
    """

    shard: DTensor
    axis: int

    def shard_to_gather(self) -> DTensor:
        """The shard, as it was when this was made. Raises: ModelError `deferred-dtensor`."""
        self._check_unwritten()
        return self.shard


def defer_gathers(change: int) -> None:
    """Enter (1) or leave (-1) a block in whose thread `DTensor.redistribute` returns a `Gathered` for a gather of
    rows."""
    patches.replace(DTensor, "redistribute", _redistributing)
    _LOCAL.depth = getattr(_LOCAL, "depth", 0) + change


def _redistributing(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @wraps(stock)
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        run = partial(stock, self, device_mesh, placements, **options)
        if not getattr(_LOCAL, "depth", 0) or placements is None or torch.compiler.is_compiling() or _is_gradient():
            return run()
        same_mesh = device_mesh is None or device_mesh == self.device_mesh
        dtypes = any(value for name, value in options.items() if name != "async_op")
        axis = _gathered_axis(self, tuple(placements)) if same_mesh and not dtypes else None
        return run() if axis is None else _gathered(self, axis, tuple(placements), run)

    return redistribute


def _is_gradient() -> bool:
    """Whether a backward formula runs now. Forwards that are computed again in backward have gradients enabled."""
    return private.backward_id() != -1 and not torch.is_grad_enabled()


def _gathered(shard: DTensor, axis: int, placements: tuple[Placement, ...], run: Callable[[], DTensor]) -> Gathered:
    mesh, shape, like = shard.device_mesh, tuple(shard.shape), private.local_of(shard)
    out = deferred_dtensor(Gathered, run, lambda _: None, mesh, placements, shape, (shard,), like)
    out.shard, out.axis = shard, axis
    return out


def _gathered_axis(x: DTensor, placements: tuple[Placement, ...]) -> int | None:
    """The only axis along which a redistribution changes anything, if it gathers rows there."""
    changed = [n for n, (old, new) in enumerate(zip(x.placements, placements, strict=True)) if old != new]
    if len(changed) != 1 or not placements[changed[0]].is_replicate():
        return None
    old = x.placements[changed[0]]
    rows = type(old) is Shard and old.dim % x.ndim < x.ndim - 1
    return changed[0] if rows and x.device_mesh.size(changed[0]) > 1 else None
