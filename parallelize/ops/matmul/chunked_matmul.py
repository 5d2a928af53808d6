"""Matmuls in chunks, overlapped with the messages that bring their inputs or send their results.

    all_gather_matmul       local rows -> rows of all ranks, each multiplied by every right factor as they arrive
    matmul_reduce_scatter   partial sums; the rows of each peer are sent as soon as they are computed, local rows are summed
    matmul_all_reduce       the same, and each rank sends its sums to all others: an all-reduce in chunks

All of them follow three rules. Matmuls are split by rows only, and contributions are summed in rank order, so the
result does not depend on the number of chunks (bit for bit if the matmul kernel's result for a row does not depend on
the other rows). Everything is allocated before the first message, in which the ranks compare a line (see
`op_handshake`): if a rank fails before it, the rank's next op reports the failure, and no rank waits. After it, the
messages of an op are always completed: if a matmul fails, the peers receive NaN and this rank raises at the end, so
that no message of this op can be matched with one of the next op.

`steps=0` is the version without overlap: one message per peer, one matmul.

Source: Wang et al., ASPLOS 2023 (decomposed collectives overlapped with the einsum that depends on them). The order,
    the direct
sends and the all-reduce in chunks are not from that paper.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange, Step
from parallelize.comm.turns import yield_turn
from parallelize.ops.matmul.op_handshake import OpAgreement
from parallelize.ops.matmul.row_chunks import RowBox, RowChunks, RowGather, as_rows, flat, row_chunks_of, take

T = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)
Pair = tuple[T, T]
"""[.., rows, .., K] and [K, N]"""
Thunk = Callable[[], None]

LAG = 2  # chunks whose messages are in flight before the first of them is waited for


class _FailureGuard:
    """Runs the computations of an op. After a failure it writes NaN instead, so that no peer waits for this rank."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def run(self, work: Thunk, *outs: T) -> None:
        if self.error is None:
            try:
                work()
                return
            except BaseException as error:  # `check` raises it when the op's messages are complete
                self.error = error
        for out in outs:
            out.fill_(float("nan"))

    def run_all(self, works: Iterable[Thunk]) -> None:
        for work in works:
            self.run(work)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def matmul(left: T, right: T, bias: T | None, out: T) -> None:
    """out[..., N] = left[..., K] @ right[K, N] (+ bias), in place if `out` is contiguous."""
    features = right.shape[1]
    if not out.numel():
        return
    vectors = left.reshape(out.numel() // features, right.shape[0])
    if vectors.dtype != right.dtype:
        vectors = vectors.to(right.dtype)
    target = out.view(-1, features) if out.is_contiguous() else out.new_empty((len(vectors), features))
    if bias is None:
        torch.mm(vectors, right, out=target)
    else:
        torch.addmm(bias, vectors, right, out=target)
    if not out.is_contiguous():
        out.copy_(target.view(out.shape))


@dataclass(frozen=True)
class MatmulSum:
    """`base + sum of left @ right`, all of one shape [.., rows, .., N].

    Args:
        pairs: (left [.., rows, .., K], right [K, N]).
        base: [.., rows, .., N] or None.
    """

    pairs: Sequence[Pair]
    base: T | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.base is not None:
            return tuple(self.base.shape)
        left, right = self.pairs[0]
        return (*left.shape[:-1], right.shape[1])

    def empty(self, shape: tuple[int, ...]) -> T:
        like = self.pairs[0][1] if self.pairs else self.base
        assert like is not None
        return like.new_empty(shape)

    def by_rows(self, dim: int) -> Callable[[RowBox, T], None]:
        """A function that computes a box of the sum, seen as [outer, rows, inner], into a tensor of the box's shape."""
        lefts = [(as_rows(left, dim), right) for left, right in self.pairs]
        base = None if self.base is None else as_rows(self.base, dim)

        def compute(box: RowBox, out: T) -> None:
            rest = lefts
            if base is not None:
                out.copy_(take(base, box))
            else:
                left, right = lefts[0]
                matmul(take(left, box), right, None, out)
                rest = lefts[1:]
            for left, right in rest if out.numel() else ():
                vectors = take(left, box).reshape(out.numel() // right.shape[1], right.shape[0])
                if out.is_contiguous():
                    out.view(-1, right.shape[1]).addmm_(vectors, right)
                else:
                    out.add_(torch.mm(vectors, right).view(out.shape))

        return compute


# -- gather ---------------------------------------------------------------------------------------------------------


def all_gather_matmul(
    x: T,
    rights: Sequence[T],
    biases: Sequence[T | None],
    dim: int,
    full: int,
    group: Group,
    *,
    steps: int,
    on_arrival: Callable[[int, T, RowBox, int], None] | None = None,
    line: str = "",
    keep: bool = True,
) -> tuple[list[T], T]:
    """Multiply the rows of all ranks by each right factor.

    Args:
        x: local rows [.., s, .., K]; `torch.chunk` splits the `full` rows along `dim`.
        rights: [K, N] each, with a bias [N] or None.
        steps: chunks per shard; 0 for one exchange followed by one matmul.
        on_arrival: called with (rank, all rows gathered so far, box, number of chunks still to come from that rank) for
            each box that has arrived, local rows first; not if `steps` is 0.
        line: what the ranks must agree on.
        keep: whether the gathered rows are used afterwards; if not, local rows may be missing among them.

    Returns: results [.., full, .., N], and the gathered rows [.., full, .., K].
    """
    shape = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    outs = [x.new_empty((*shape[:-1], right.shape[1]), dtype=right.dtype) for right in rights]
    views, guard = [as_rows(out, dim) for out in outs], _FailureGuard()

    def multiply(rows: T, box: RowBox) -> None:
        for view, right, bias in zip(views, rights, biases, strict=True):
            matmul(rows, right, bias, take(view, box))

    with RowGather(x, dim, full, group, steps, line=line, keep=keep or not steps) as gather:
        for rank, box, remaining in gather.arrivals():
            if steps:
                rows = gather.local if rank == group.rank else take(gather.rows, box)
                guard.run(partial(multiply, rows, box))
                if on_arrival is not None:
                    guard.run(partial(on_arrival, rank, gather.gathered, box, remaining))
    if not steps:
        multiply(gather.rows, (0, gather.layout.outer, 0, full))
    guard.check()
    return outs, gather.gathered


# -- scatter and reduce ---------------------------------------------------------------------------------------------


class _Contributions:
    """What this rank contributes to a sum over ranks, with the buffers to send it and to receive that of the peers.

    Args:
        like: [outer, rows, inner], a tensor of the same dtype, device and `inner`.
    """

    def __init__(self, total: MatmulSum, dim: int, group: Group, layout: RowChunks, like: T):
        self.layout, self.rank, self.guard = layout, group.rank, _FailureGuard()
        self.compute, self.peers = total.by_rows(dim), layout.peers(group.rank)
        self.incoming = self._buffers(like, group.rank)
        self.outgoing = self._buffers(like)
        self.posted: list[Step] = []

    def _buffers(self, like: T, owner: int | None = None) -> list[dict[int, T]]:
        """A buffer for each peer in each step, of the shape of that peer's chunk, or of the owner's chunk."""
        buffers: list[dict[int, T]] = []
        for step in range(self.layout.steps):
            buffers.append({})
            for rank in self.peers:
                a, b, lo, hi = self.layout.chunks(rank if owner is None else owner)[step]
                buffers[step][rank] = like.new_empty((b - a, hi - lo, like.shape[2]))
        return buffers

    def compute_box(self, box: RowBox, out: T) -> None:
        self.guard.run(partial(self.compute, box, out), out)

    def compute_full(self, full: T) -> None:
        """Without overlap: compute everything into `full`, and copy the rows of the peers to the outgoing buffers."""
        self.compute_box((0, self.layout.outer, 0, self.layout.rows), full)
        for rank, buffer in self.outgoing[0].items():
            buffer.copy_(take(full, self.layout.chunks(rank)[0]))

    def compute_step(self, step: int) -> None:
        """Compute this step's chunks of the peers into the outgoing buffers."""
        for rank, buffer in self.outgoing[step].items():
            self.compute_box(self.layout.chunks(rank)[step], buffer)

    def post(self, exchange: Exchange, step: int) -> None:
        self.posted.append(exchange.post(self.outgoing[step], self.incoming[step]))

    def reduce(self, step: int, chunk: T) -> None:
        """Wait for what the peers contribute to this rank's chunk, and add it in rank order."""
        self.posted[step].wait()
        self.guard.run(partial(sum_in_order, chunk, self.incoming[step], self.rank), chunk)


def matmul_reduce_scatter(
    total: MatmulSum, dim: int, group: Group, steps: int, meanwhile: Iterable[Thunk] = (), line: str = ""
) -> T:
    """Sum `total` over ranks; each rank gets its own rows of the sum.

    Args:
        total: [.., S, .., N] on each rank.
        steps: chunks per shard; 0 for one matmul followed by one exchange.
        meanwhile: what to compute while messages are in flight.
        line: what the ranks must agree on.

    Returns: local rows [.., s, .., N]; `torch.chunk` splits S.
    """
    shape, rank = total.shape, group.rank
    layout = row_chunks_of(shape, dim, group.size, max(1, steps))
    out = total.empty((*shape[:dim], layout.length(rank), *shape[dim + 1 :]))
    local, local_box = as_rows(out, dim), (0, layout.outer, *layout.interval(rank))
    parts = _Contributions(total, dim, group, layout, local)
    full = local if steps else local.new_empty((layout.outer, layout.rows, local.shape[2]))
    rendezvous = OpAgreement(group, out.device, line)
    if not steps:
        parts.compute_full(full)
        local.copy_(take(full, local_box))
    with Exchange(group) as exchange:
        for step in range(layout.steps):
            if steps:
                parts.compute_step(step)
            rendezvous.check()
            parts.post(exchange, step)
        if steps:
            parts.compute_box(local_box, local)
            parts.guard.run_all(meanwhile)
        yield_turn()
        for step, box in enumerate(layout.local_chunks(rank)):
            parts.reduce(step, take(local, box))
    if not steps:
        parts.guard.run_all(meanwhile)
    parts.guard.check()
    return out


def matmul_all_reduce(total: MatmulSum, group: Group, steps: int, meanwhile: Sequence[Thunk] = (), line: str = "") -> T:
    """Sum `total` over ranks; every rank gets the full sum.

    Each chunk of rows is summed by one rank, which sends it to all others. As in a ring, a rank sends 2 (P-1)/P of the
    result.

    Args:
        total: [.., N]; all leading dims are rows here.

    Returns: [.., N].
    """
    table = MatmulSum([(flat(left), right) for left, right in total.pairs])
    out, rank = table.empty(total.shape), group.rank  # returned itself, no view of it: a model may add to it in place
    layout = row_chunks_of(table.shape, 0, group.size, max(1, steps))
    rows = flat(out).unsqueeze(0)
    parts = _Contributions(table, 0, group, layout, rows)
    local_chunks = [take(rows, box) for box in layout.chunks(rank)]
    summed: list[Step] = []
    rendezvous = OpAgreement(group, out.device, line)
    if not steps:
        parts.compute_full(rows)

    def reduce_and_send(step: int) -> None:
        chunk = local_chunks[step]
        parts.reduce(step, chunk)
        receive = {peer: take(rows, layout.chunks(peer)[step]) for peer in parts.peers}
        summed.append(exchange.post(dict.fromkeys(parts.peers, chunk), receive, stream=1))

    with Exchange(group) as exchange:
        for step in range(layout.steps):
            if steps:
                parts.compute_step(step)
            rendezvous.check()
            parts.post(exchange, step)
            if steps:
                parts.compute_box(layout.chunks(rank)[step], local_chunks[step])
            if step >= LAG:
                reduce_and_send(step - LAG)
        yield_turn()
        rest = range(len(summed), layout.steps)
        batches = _split_evenly(meanwhile if steps else (), len(rest) + 1)
        for step in rest:
            parts.guard.run_all(next(batches))
            reduce_and_send(step)
        parts.guard.run_all(next(batches))
    if not steps:
        parts.guard.run_all(meanwhile)
    parts.guard.check()
    return out


def _split_evenly(works: Sequence[Thunk], number: int) -> Iterator[Sequence[Thunk]]:
    """`works` split into `number` consecutive parts of nearly equal length."""
    for n in range(number):
        yield works[len(works) * n // number : len(works) * (n + 1) // number]


def sum_in_order(local: T, from_ranks: dict[int, T], rank: int) -> None:
    """local = the sum of all ranks' contributions in rank order; in fp32 for three or more in half precision."""
    size = len(from_ranks) + 1
    if not local.numel() or size == 1:
        return
    if local.dtype in _HALF and size > 2:
        total = (local if rank == 0 else from_ranks[0]).float()
        for other in range(1, size):
            total += local if other == rank else from_ranks[other]
        local.copy_(total)
    else:  # the sum of lower ranks, then local, then higher ranks; a sum of two does not depend on the order
        for other in range(1, rank):
            from_ranks[0].add_(from_ranks[other])
        if rank:
            local.add_(from_ranks[0])
        for other in range(rank + 1, size):
            local.add_(from_ranks[other])
