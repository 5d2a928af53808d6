"""What real processes run for the overlapped linears: functions of (rank, ...) that return plain data or raise."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from parallelize import (
    all_gather_linear,
    build_mesh,
    calibrate,
    column_linear,
    full_gradients,
    linear_all_reduce,
    linear_reduce_scatter,
    overlap_counts,
    overlap_report,
    parallelize_module,
)
from parallelize.base.errors import ShapeError
from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange
from tests.support.linears import ReferenceLinear
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst

T = torch.Tensor


def equal_unsharded(rank: int, op: str, algorithms: list[dict[str, Any]]) -> None:
    for shape, dim in (((7,), 0), ((2, 7), 1), ((9, 5), 1), ((5, 3), 0)):
        for options in algorithms:
            reference = ReferenceLinear(
                op, shape, dim, weights=2 if op in ("all_gather_linear", "column_linear") else 1
            )
            reference.check(*reference.run(**options))


def bits(rank: int, op: str, dtype: torch.dtype, rows: int, features: int) -> dict[str, float]:
    """Of outputs and gradients in chunks against sync, and of a repeated run: largest relative differences (0:
    bit-equal)."""
    group = Group(dist.group.WORLD)
    random = torch.Generator().manual_seed(rank)
    by_columns = op in ("all_gather_linear", "column_linear")
    local_rows = rows // group.size if op == "all_gather_linear" else rows
    x = torch.randn(local_rows, features if by_columns else features // group.size, generator=random).to(dtype)
    weight = torch.randn(features // (group.size if by_columns else 1), x.shape[-1], generator=random).to(dtype)
    function = {
        "all_gather_linear": all_gather_linear,
        "column_linear": column_linear,
        "linear_reduce_scatter": linear_reduce_scatter,
        "linear_all_reduce": linear_all_reduce,
    }[op]
    if op == "column_linear":
        dist.broadcast(x, 0)

    def run(overlap: str) -> list[T]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = function(*leaves, group=group, overlap=overlap)
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().to(dtype).view(out.shape)
        out.backward(upstream)
        return [out.detach(), leaves[0].grad, leaves[1].grad]

    def by_rows(left: T, right: T) -> float:
        """1 where this machine's kernel computes a row alike in any batch of rows that the op makes."""
        size = group.size
        parts = [half for part in left.chunk(size) for half in (part, *part.chunk(4))]
        of_full = [half for part in (left @ right).chunk(size) for half in (part, *part.chunk(4))]
        return float(all(torch.equal(part @ right, expected) for part, expected in zip(parts, of_full, strict=True)))

    sync, chunked, again = run("off"), run("chunked"), run("chunked")
    full = torch.randn(rows, x.shape[-1], generator=random).to(dtype)
    upstream = torch.randn(rows, weight.shape[0], generator=random).to(dtype)
    errors = {"kernel out": by_rows(full, weight.t()), "kernel dx": by_rows(upstream, weight)}
    errors |= {"again": 1.0 - all(torch.equal(a, b) for a, b in zip(chunked, again, strict=True))}
    for name, a, b in zip(("out", "dx", "dw"), chunked, sync, strict=True):
        errors[name] = 0.0 if torch.equal(a, b) else worst({"": a}, {"": b})[0]
    return errors


def peak_memory(rank: int, op: str, chunks: int) -> dict[str, int]:
    """Bytes that an op's kernel holds at most, and those of what it gathers (or sums) and returns."""
    from parallelize.ops.matmul import chunked_matmul

    group, rows, features, outs = Group(dist.group.WORLD), 64, 96, 32
    allocations = _Allocations()
    real_empty = T.new_empty

    def noted(self: T, *args: Any, **kwargs: Any) -> T:
        return allocations.note(real_empty(self, *args, **kwargs))

    T.new_empty = noted  # type: ignore[method-assign]
    try:
        if op == "gather":
            x, right = torch.ones(rows // group.size, features), torch.ones(features, outs)
            chunked_matmul.all_gather_matmul(x, [right], [None], 0, rows, group, steps=chunks)
            needed = rows * features * 4 + rows * outs * 4
            chunk = rows // group.size // chunks * features * 4
        else:
            total = chunked_matmul.MatmulSum([(torch.ones(rows, features), torch.ones(features, outs))])
            chunked_matmul.matmul_reduce_scatter(total, 0, group, chunks)
            needed = rows * outs * 4 + rows // group.size * outs * 4
            chunk = rows // group.size // max(1, chunks) * outs * 4
    finally:
        T.new_empty = real_empty  # type: ignore[method-assign]
    return {"most": allocations.most, "wanted": needed, "chunk": chunk}


class _Allocations:
    """Bytes alive in buffers that were noted, and the most of them at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def note(self, x: T) -> T:
        storage = x.untyped_storage()
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, size)
        return x

    def _freed(self, size: int) -> None:
        self.now -= size


def disagree(rank: int, differs: str) -> tuple[str, float]:
    """The error of ranks that come with different arguments, and what the next call sums for each input.

    The arguments are new to both ranks: over NCCL those that all have used before are not compared again.
    """
    rows, dtype = (
        (6 if rank and differs == "rows" else 4),
        (torch.int32 if rank and differs == "dtype" else torch.float32),
    )
    width = {"rows": 6, "dtype": 5}[differs]
    x, weight, group = torch.ones(rows, width).to(dtype), torch.ones(4, width).to(dtype), dist.group.WORLD
    try:
        all_gather_linear(x, weight, group=group, overlap="chunked")
        message = "nothing"
    except ShapeError as error:
        message = str(error)
    x = torch.ones(4, width)
    return message, float(all_gather_linear(x, x, group=group, overlap="chunked").sum() / width)


def fails_in_the_middle(rank: int, op: str, everywhere: bool) -> str:
    """A matmul fails; then the same op must be right."""
    from parallelize.ops.matmul import chunked_matmul

    reference, real, counts = ReferenceLinear(op, (8, 3), 0), chunked_matmul.matmul, Counter()

    def broken(*args: Any) -> None:
        counts["matmuls"] += 1
        if counts["matmuls"] > 1 and (everywhere or rank == 1):
            raise MemoryError("no memory left")
        real(*args)

    leaves = reference.leaves()
    outs = reference.call(leaves, overlap="chunked") if op == "column_linear" else None
    chunked_matmul.matmul = broken
    try:
        if outs is not None:
            outs[0].backward(reference.local_output(reference.grads[0]))
        else:
            outs = reference.call(leaves, overlap="chunked")
        outcome = (
            "nan"
            if any(bool(out.isnan().any()) for out in [*outs, *(leaves[:1] if op != "column_linear" else [])])
            else "ok"
        )
    except MemoryError:
        outcome = "raised"
    finally:
        chunked_matmul.matmul = real
    reference.check(*reference.run(overlap="chunked"))
    return outcome


def fails_while_gathering_again(rank: int) -> str:
    """A matmul of backward fails on rank 1 while rows are gathered again by windows; then the same op must be right."""
    from parallelize.ops.matmul import chunked_matmul

    options: dict[str, Any] = {"overlap": "chunked", "chunks": 4, "save": "shard"}
    reference, real = ReferenceLinear("all_gather_linear", (37, 5), 1), chunked_matmul.matmul
    (out,) = reference.call(reference.leaves(), **options)

    def broken(*args: Any) -> None:
        raise MemoryError("no memory left")

    chunked_matmul.matmul = broken if rank == 1 else real
    try:
        out.backward(reference.local_output(reference.grads[0]))
        outcome = "through"
    except MemoryError:
        outcome = "raised"
    finally:
        chunked_matmul.matmul = real
    reference.check(*reference.run(**options))
    return outcome


def waits_for_silent_peer(rank: int) -> str:
    """A peer that never comes: an error within the group's timeout."""
    from datetime import timedelta

    pg = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=2))
    if rank == 1:
        dist.barrier()  # of the other group, when rank 0 has given up
        return "silent"
    try:
        all_gather_linear(torch.ones(4, 6), torch.ones(4, 6), group=pg, overlap="chunked")
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    return message


def compiled_ops(rank: int) -> dict[str, dict[str, int]]:
    """Ops of this package in the graphs of a compiled layer."""
    from torch._dynamo.backends.common import aot_autograd

    ops: dict[str, Counter] = {"forward": Counter(), "backward": Counter()}

    def counting(which: str) -> Any:
        def compile_graph(graph: Any, inputs: Any) -> Any:
            for node in graph.graph.nodes:
                if str(node.target).startswith("parallelize."):
                    ops[which][str(node.target).split(".")[1]] += 1
            return graph.forward

        return compile_graph

    model = tiny_model("llama", torch.float64)
    parallelize_module(model, build_mesh("cpu", tp=2), sequence_parallel=True, overlap="chunked")
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    model.model.layers[1].compile(fullgraph=True, backend=backend)
    ids, labels = tiny_batch(length=8)
    loss_of(model(input_ids=ids).logits, labels).backward()
    torch._dynamo.reset()
    return {which: dict(counts) for which, counts in ops.items()}


def compiled_calls(rank: int, on_dtensors: bool) -> float:
    """Every op under torch.compile(fullgraph): the largest difference from eager."""
    from torch.distributed.tensor import Shard, distribute_tensor

    group = Group(dist.group.WORLD)
    random = torch.Generator().manual_seed(rank)
    shapes = ((4, 6, 8), (5, 8), (5,), (3, 8), (6, 3))
    leaves = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]

    def on_ranks(x: T, w: T, b: T, w2: T, back: T) -> T:
        options: dict[str, Any] = {"group": group, "overlap": "chunked"}
        first, second = all_gather_linear(x, [w, w2], [b, None], dim=1, save="shard", **options)
        scattered = linear_reduce_scatter(second.tanh(), back, dim=1, **options)
        reduced = linear_all_reduce(second.tanh(), back, **options)
        (column,) = column_linear(x, [w], [b], **options)
        return first.square().sum() + scattered.square().sum() + reduced.sum() + column.square().sum()

    def on_mesh(x: T, w: T) -> T:
        return all_gather_linear(x, w, dim=1, overlap="chunked").square().sum()

    function: Any = on_ranks
    if on_dtensors:
        mesh = build_mesh("cpu", tp=group.size)
        leaves = [
            distribute_tensor(t.detach(), mesh, [Shard(dim)]).requires_grad_()
            for t, dim in ((leaves[0], 1), (leaves[3], 0))
        ]
        function = on_mesh

    def run(call: Any) -> list[T]:
        for leaf in leaves:
            leaf.grad = None
        loss = call(*leaves)
        loss.backward()
        return [_local(loss.detach()), *(_local(leaf.grad) for leaf in leaves)]

    torch._dynamo.reset()
    eager, graph = run(function), run(torch.compile(function, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    return max(float((a - b).abs().max()) for a, b in zip(eager, graph, strict=True))


def _local(x: Any) -> T:
    return x.to_local() if hasattr(x, "to_local") else x


def auto_on_a_mesh(rank: int) -> dict[str, Any]:
    """What `auto` measures and chooses on loopback, and the model's parity."""
    torch.manual_seed(0)
    mesh = build_mesh("cpu", tp=dist.get_world_size())
    profile = calibrate(mesh, torch.float64)
    model = tiny_model("llama", torch.float64)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh, sequence_parallel=True, overlap="auto")
    ids, labels = tiny_batch(length=9)
    loss_of(model(input_ids=ids).logits, labels).backward()
    loss_of(reference(input_ids=ids).logits, labels).backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return {
        "profile": profile.as_dict(),
        "again": calibrate(mesh, torch.float64) is profile,
        "error": worst(full_gradients(model), expected)[0],
        "report": overlap_report(model),
        "calls": overlap_counts(model),
    }


def nothing_stays(rank: int) -> list[int]:
    """Tensors alive after each of several planned steps."""
    model = tiny_model("llama", torch.float32)
    parallelize_module(model, build_mesh("cpu", tp=dist.get_world_size()), sequence_parallel=True, overlap="chunked")
    ids, labels = tiny_batch(length=9)
    alive = []
    for _ in range(4):
        model.zero_grad()
        loss_of(model(input_ids=ids).logits, labels).backward()
        gc.collect()
        alive.append(sum(1 for item in gc.get_objects() if type(item) is T))
    return alive


def link_is_busy_during_matmuls(rank: int) -> dict[str, float]:
    """Of a gather: the messages that are posted before its first matmul, and all of them."""
    from parallelize.ops.matmul import chunked_matmul

    group = Group(dist.group.WORLD)
    x, weight = torch.ones(512, 512), torch.ones(512, 512)
    order: list[str] = []
    real_matmul, real_wait = chunked_matmul.matmul, Exchange.post

    def noted(*args: Any) -> None:
        order.append("matmul")
        real_matmul(*args)

    def posted(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append("post")
        return real_wait(self, *args, **kwargs)

    chunked_matmul.matmul, Exchange.post = noted, posted  # type: ignore[method-assign]
    try:
        all_gather_linear(x, weight, group=group, overlap="chunked")
    finally:
        chunked_matmul.matmul, Exchange.post = real_matmul, real_wait  # type: ignore[method-assign]
    order = order[1:]  # the first message is the handshake
    return {"posts before matmuls": float(order.index("matmul")), "posts": float(order.count("post"))}
