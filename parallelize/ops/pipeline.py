"""Products of matrices pipelined with the messages that feed them or carry them away.

    gather_products    own rows -> rows of all ranks, each times every right factor, as they arrive
    scatter_products   partial products, the rows of each peer sent off as soon as they are there, own rows summed
    reduce_products    the same with the sums sent on to everybody: an all-reduce in pieces

Three rules hold in all of them. Products are cut by rows only, and contributions are summed in rank order, so the result
does not depend on the number of pieces (bit for bit where the matmul kernel computes a row alike in any batch of rows).
Everything is allocated before the ranks agree on a line (see `agreement`), and that is the first message: a rank that fails
before it is named by its next op, rather than waited for. And after it the messages of an op are always completed: where a
product fails, its peers are sent NaN and this rank raises when all is through, so that the next op meets no message of this
one.

`steps=0` is the version without overlap: one message a peer, one product.

Source: Wang et al., ASPLOS 2023 (decomposed collectives beside the einsum that depends on them); order, direct sends and
the piecewise all-reduce are this file's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parallelize.groups import Group
from parallelize.ops.agreement import Meeting
from parallelize.ops.exchange import Exchange, Step
from parallelize.ops.shards import Box, Shards, as_rows, flat, shards_of, take

T = torch.Tensor
Pair = tuple[T, T]  # [.., rows, .., K] and [K, N]
Thunk = Callable[[], None]

LAG = 2  # pieces whose messages are under way before the first of them is waited for
_WINDOW = 2  # landing buffers in flight where pieces cannot be received in place
_HALF = (torch.float16, torch.bfloat16)


class _Guard:
    """Runs the computations of an op; after a failure, writes NaN instead, so that peers are never left waiting."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def run(self, work: Thunk, *outs: T) -> None:
        if self.error is None:
            try:
                work()
                return
            except BaseException as error:  # raised again by `check`, when the op's messages are through
                self.error = error
        for out in outs:
            out.fill_(float("nan"))

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def product(left: T, right: T, bias: T | None, out: T) -> None:
    """out[..., N] = left[..., K] @ right[K, N] (+ bias), in place where `out` is contiguous."""
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
class Sum:
    """`base + sum left @ right`, of one shape [.., rows, .., N].

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
        return (self.pairs[0][1] if self.pairs else self.base).new_empty(shape)  # type: ignore[union-attr]

    def by_rows(self, dim: int) -> Callable[[Box, T], None]:
        """What writes a box of the sum, seen as [outer, rows, inner], into a tensor of the box's shape."""
        lefts = [(as_rows(left, dim), right) for left, right in self.pairs]
        base = None if self.base is None else as_rows(self.base, dim)

        def compute(box: Box, out: T) -> None:
            rest = lefts
            if base is not None:
                out.copy_(take(base, box))
            else:
                left, right = lefts[0]
                product(take(left, box), right, None, out)
                rest = lefts[1:]
            for left, right in rest if out.numel() else ():
                part = take(left, box).reshape(out.numel() // right.shape[1], right.shape[0])
                if out.is_contiguous():
                    out.view(-1, right.shape[1]).addmm_(part, right)
                else:
                    out.add_(torch.mm(part, right).view(out.shape))

        return compute


# -- gather ---------------------------------------------------------------------------------------------------------


def gather_products(
    x: T,
    rights: Sequence[T],
    biases: Sequence[T | None],
    dim: int,
    full: int,
    group: Group,
    steps: int,
    also: Callable[[int, T, Box, int], None] | None = None,
    line: str = "",
    keep: bool = True,
) -> tuple[list[T], T]:
    """All ranks' rows times each right factor.

    Args:
        x: own rows [.., s, .., K], as `torch.chunk` cuts `full` rows along `dim`.
        rights: [K, N] each, with a bias [N] or None.
        steps: pieces a shard; 0 for one exchange and then one product.
        also: called with (rank, all rows gathered so far, box, pieces of that rank still to come) for each box of rows
            that has come, own rows first; not without overlap.
        line: what the ranks must agree on.
        keep: the gathered rows are wanted; else own rows may be missing among them.

    Returns: products [.., full, .., N], and the gathered rows [.., full, .., K].
    """
    shape = (*x.shape[:dim], full, *x.shape[dim + 1 :])
    outs = [x.new_empty((*shape[:-1], right.shape[1]), dtype=right.dtype) for right in rights]
    views, guard = [as_rows(out, dim) for out in outs], _Guard()

    def multiply(rows: T, box: Box) -> None:
        for view, right, bias in zip(views, rights, biases, strict=True):
            product(rows, right, bias, take(view, box))

    with Gather(x, dim, full, group, steps, line, keep=keep or not steps) as gather:
        for rank, box, left in gather.arrivals():
            if steps:
                rows = gather.own if rank == group.rank else take(gather.rows, box)
                guard.run(partial(multiply, rows, box))
                if also is not None:
                    guard.run(partial(also, rank, gather.gathered, box, left))
    if not steps:
        multiply(gather.rows, (0, gather.shards.outer, 0, full))
    guard.check()
    return outs, gather.gathered


def gather_rows(x: T, dim: int, full: int, group: Group) -> T:
    """[.., s, ..] -> [.., full, ..], sent directly: each rank's rows once to each peer."""
    with Gather(x, dim, full, group, 0) as gather:
        gather.finish()
    return gather.gathered


class Gather:
    """An all-gather of rows under way; leaving the block waits for what is left of it.

    Args:
        x, dim, full, group: as for `gather_products`.
        steps: pieces a shard (0 is one).
        line: what the ranks must agree on before the first message.
        stream: of messages, apart from those of another exchange that goes on at the same time.
        keep: own rows are put in their place too; else they are only yielded, as `own`.
    """

    def __init__(
        self, x: T, dim: int, full: int, group: Group, steps: int, line: str = "", stream: int = 0, keep: bool = True
    ):
        self.group, self.line, self.stream, self.keep = group, line, stream, keep
        self.gathered = x.new_empty((*x.shape[:dim], full, *x.shape[dim + 1 :]))
        self.rows, self.own = as_rows(self.gathered, dim), as_rows(x.contiguous(), dim)
        self.shards = shards = shards_of(tuple(self.gathered.shape), dim, group.size, max(1, steps))
        self.peers = shards.peers(group.rank)
        self.in_place = shards.outer == shards.blocks or shards.rows == 0
        self.sent = [take(self.own, box).contiguous() for box in shards.own_pieces(group.rank)]
        self.landing = [
            {rank: self._landing(rank, step) for rank in self.peers}
            for step in range(shards.steps if self.in_place else min(_WINDOW, shards.steps))
        ]
        self.posted: list[Step] = []
        self.link = Exchange(group)

    def __enter__(self) -> Gather:
        start, stop = self.shards.interval(self.group.rank)
        self.mine = (0, self.shards.outer, start, stop)
        Meeting(self.group, self.gathered.device, self.line).check()
        try:
            for _ in self.landing:
                self._post()
            if self.keep:
                take(self.rows, self.mine).copy_(self.own)
        except BaseException as error:
            self.link.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            while len(self.posted) < self.shards.steps:  # after a failure: peers wait for the rest
                self.posted[len(self.posted) - len(self.landing)].wait()
                self._post()
        finally:
            self.link.__exit__(*error)

    def arrivals(self) -> Iterator[tuple[int, Box, int]]:
        """(rank, box, pieces of that rank still to come): own rows at once, others as they come."""
        yield self.group.rank, self.mine, 0
        for step in range(self.shards.steps):
            self.posted[step].wait()
            for rank in self.peers:
                box = self.shards.pieces(rank)[step]
                if not self.in_place:
                    take(self.rows, box).copy_(self._landed(rank, step))
                yield rank, box, self.shards.steps - 1 - step
            if len(self.posted) < self.shards.steps:
                self._post()

    def finish(self) -> None:
        """Wait for all of it."""
        for _ in self.arrivals():
            pass

    def _post(self) -> None:
        step = len(self.posted)
        where = {rank: self._landed(rank, step) for rank in self.peers}
        self.posted.append(self.link.post(dict.fromkeys(self.peers, self.sent[step]), where, self.stream))

    def _landing(self, rank: int, step: int) -> T:
        """Where a piece is received: in its place, or in a buffer that takes the largest of that rank."""
        pieces = self.shards.pieces(rank)
        if self.in_place:
            return take(self.rows, pieces[step])
        most = max(b - a for a, b, _, _ in pieces)
        return self.rows.new_empty((most, pieces[step][3] - pieces[step][2], self.rows.shape[2]))

    def _landed(self, rank: int, step: int) -> T:
        a, b, _, _ = self.shards.pieces(rank)[step]
        return self.landing[step % len(self.landing)][rank][: b - a]


# -- scatter and reduce ---------------------------------------------------------------------------------------------


def scatter_products(
    total: Sum, dim: int, group: Group, steps: int, meanwhile: Iterable[Thunk] = (), line: str = ""
) -> T:
    """Own rows of the sum over ranks of `total`.

    Args:
        total: [.., S, .., N] on each rank.
        steps: pieces a shard; 0 for one product and then one exchange.
        meanwhile: what to compute while messages are under way.
        line: what the ranks must agree on.

    Returns: [.., s, .., N], s as `torch.chunk` cuts S.
    """
    shape, me, guard = total.shape, group.rank, _Guard()
    shards = shards_of(shape, dim, group.size, max(1, steps))
    out = total.empty((*shape[:dim], shards.length(me), *shape[dim + 1 :]))
    own, compute = as_rows(out, dim), total.by_rows(dim)
    mine, peers = (0, shards.outer, *shards.interval(me)), shards.peers(me)
    incoming, whole = _boxes_like(shards, peers, own, me), own
    outgoing = _boxes_like(shards, peers, own)
    if not steps:
        whole = own.new_empty((shards.outer, shards.rows, own.shape[2]))
    meeting = Meeting(group, out.device, line)
    if not steps:
        guard.run(partial(compute, (0, shards.outer, 0, shards.rows), whole), whole)
        for rank, buffer in outgoing[0].items():
            buffer.copy_(take(whole, shards.pieces(rank)[0]))
        own.copy_(take(whole, mine))
    with Exchange(group) as link:
        posted = []
        for step, buffers in enumerate(outgoing):
            for rank, buffer in buffers.items() if steps else ():
                box = shards.pieces(rank)[step]
                guard.run(partial(compute, box, buffer), buffer)
            meeting.check()
            posted.append(link.post(buffers, incoming[step]))
        if steps:
            guard.run(partial(compute, mine, own), own)
            _run_all(guard, meanwhile)
        for step, message in enumerate(posted):
            message.wait()
            piece = take(own, shards.own_pieces(me)[step])
            guard.run(partial(sum_in_order, piece, incoming[step], me), piece)
    if not steps:
        _run_all(guard, meanwhile)
    guard.check()
    return out


def reduce_products(total: Sum, group: Group, steps: int, meanwhile: Sequence[Thunk] = (), line: str = "") -> T:
    """The sum over ranks of `total`, whole on every rank.

    Each piece of rows is summed by one rank and sent on by it: twice (P-1)/P of the result are sent, as by a ring.

    Args:
        total: [.., N]; all leading dims are rows here.

    Returns: [.., N].
    """
    table = Sum([(flat(left), right) for left, right in total.pairs])
    out, me, guard = table.empty(table.shape), group.rank, _Guard()
    shards = shards_of(table.shape, 0, group.size, max(1, steps))
    rows, compute = out.unsqueeze(0), table.by_rows(0)
    own, peers, summed = shards.pieces(me), shards.peers(me), []
    incoming = _boxes_like(shards, peers, rows, me)
    outgoing = _boxes_like(shards, peers, rows)
    meeting = Meeting(group, out.device, line)
    if not steps:
        guard.run(partial(compute, (0, 1, 0, shards.rows), rows), rows)
        for rank, buffer in outgoing[0].items():
            buffer.copy_(take(rows, shards.pieces(rank)[0]))

    def pass_on(step: int) -> None:
        posted[step].wait()
        piece = take(rows, own[step])
        guard.run(partial(sum_in_order, piece, incoming[step], me), piece)
        receive = {rank: take(rows, shards.pieces(rank)[step]) for rank in peers}
        summed.append(link.post(dict.fromkeys(peers, piece), receive, stream=1))

    with Exchange(group) as link:
        posted: list[Step] = []
        for step, buffers in enumerate(outgoing):
            for rank, buffer in buffers.items() if steps else ():
                guard.run(partial(compute, shards.pieces(rank)[step], buffer), buffer)
            meeting.check()
            posted.append(link.post(buffers, incoming[step]))
            if steps:
                piece = take(rows, own[step])
                guard.run(partial(compute, own[step], piece), piece)
            if step >= LAG:
                pass_on(step - LAG)
        rest = range(len(summed), shards.steps)
        shares = _shares(meanwhile if steps else (), len(rest) + 1)
        for step in rest:
            _run_all(guard, next(shares))
            pass_on(step)
        _run_all(guard, next(shares))
    if not steps:
        _run_all(guard, meanwhile)
    guard.check()
    return out.view(total.shape)


def _boxes_like(shards: Shards, peers: Iterable[int], like: T, owner: int | None = None) -> list[dict[int, T]]:
    """A buffer for each peer in each step: of that peer's pieces, or of the owner's."""
    buffers: list[dict[int, T]] = []
    for step in range(shards.steps):
        buffers.append({})
        for rank in peers:
            a, b, lo, hi = shards.pieces(rank if owner is None else owner)[step]
            buffers[step][rank] = like.new_empty((b - a, hi - lo, like.shape[2]))
    return buffers


def _run_all(guard: _Guard, works: Iterable[Thunk]) -> None:
    for work in works:
        guard.run(work)


def _shares(works: Sequence[Thunk], number: int) -> Iterator[Sequence[Thunk]]:
    """`works` in so many consecutive parts, as equal as can be."""
    for n in range(number):
        yield works[len(works) * n // number : len(works) * (n + 1) // number]


def sum_in_order(own: T, others: dict[int, T], me: int) -> None:
    """own = the sum of all ranks' contributions, added in rank order (in fp32 where three or more halves meet)."""
    size = len(others) + 1
    if not own.numel() or size == 1:
        return
    if own.dtype in _HALF and size > 2:
        total = (own if me == 0 else others[0]).float()
        for rank in range(1, size):
            total += own if rank == me else others[rank]
        own.copy_(total)
    else:  # the sum of the ranks before, then own, then those behind; a sum of two is the same either way round
        for rank in range(1, me):
            others[0].add_(others[rank])
        if me:
            own.add_(others[0])
        for rank in range(me + 1, size):
            own.add_(others[rank])
