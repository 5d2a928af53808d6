"""The all-to-all of Ulysses: any dims, uneven rows, fewer key heads than ranks, its true adjoint, DTensors, fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallelize import ShapeError, build_mesh
from parallelize.groups import Group
from parallelize.layout import even_interval
from parallelize.ops.ulysses import HeadCut, exchange, exchange_shards
from tests.support.threads import run_ranks


def sizes_of(full, size):
    return [stop - start for start, stop in (even_interval(full, size, rank) for rank in range(size))]


@pytest.mark.parametrize(("split", "concat"), [(1, 2), (2, 1), (0, 3), (3, 0), (-1, 1)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_its_cut_of_all_rows(size, split, concat):
    torch.manual_seed(0)
    whole = torch.randn(5, 7, 6, 3, dtype=torch.float64)
    cuts = [even_interval(whole.shape[split], size, rank) for rank in range(size)]
    sizes = sizes_of(whole.shape[concat], size)
    grad = torch.randn_like(whole)

    def body(rank):
        group = Group(build_mesh("cpu", cp=size).get_group())
        start = sum(sizes[:rank])
        own = whole.narrow(concat, start, sizes[rank]).clone().requires_grad_()
        out = exchange(own, group, split, cuts, concat, sizes)
        begin, end = cuts[rank]
        assert torch.equal(out, whole.narrow(split, begin, end - begin))
        out.backward(grad.narrow(split, begin, end - begin))
        assert torch.equal(own.grad, grad.narrow(concat, start, sizes[rank]))

    run_ranks(size, body)


def test_cuts_that_overlap_are_summed_where_they_meet():
    """Two key heads for three ranks: head 0 goes to ranks 0 and 1, head 1 to ranks 1 and 2."""
    cut = HeadCut.of(6, 2, 3)
    assert cut.queries == ((0, 2), (2, 4), (4, 6))
    assert cut.keys == ((0, 1), (0, 2), (1, 2))
    rows = [2, 2, 1]
    whole = torch.randn(1, 2, 5, 3, dtype=torch.float64)

    def body(rank):
        group = Group(build_mesh("cpu", cp=3).get_group())
        own = whole.narrow(2, sum(rows[:rank]), rows[rank]).clone().requires_grad_()
        out = exchange(own, group, 1, cut.keys, 2, rows)
        out.backward(torch.full_like(out, float(rank + 1)))
        start, stop = cut.keys[rank]
        assert torch.equal(out, whole[:, start:stop])
        return own.grad

    grad = torch.cat(run_ranks(3, body), 2)
    assert (grad[:, 0] == 3).all()  # of ranks 0 and 1: 1 + 2
    assert (grad[:, 1] == 5).all()  # of ranks 1 and 2: 2 + 3


@pytest.mark.parametrize(
    ("heads", "kv", "size"), [(8, 8, 4), (8, 2, 4), (6, 3, 4), (5, 5, 4), (3, 1, 4), (12, 4, 8), (9, 3, 2)]
)
def test_queries_find_their_key_heads(heads, kv, size):
    cut = HeadCut.of(heads, kv, size)
    assert [head for start, stop in cut.queries for head in range(start, stop)] == list(range(heads))
    for (start, stop), (first, last) in zip(cut.queries, cut.keys, strict=True):
        needed = {head * kv // heads for head in range(start, stop)}
        assert needed == set(range(first, last))


def test_the_adjoint_is_the_transpose():
    """<y, A x> = <A^T y, x> over all ranks, for cuts with gaps, overlaps and nothing."""
    cuts, rows = [(0, 3), (2, 4), (1, 1)], [2, 0, 3]
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, n, dtype=torch.float64) for n in rows]
    outputs = [torch.randn(2, b - a, 5, dtype=torch.float64) for a, b in cuts]

    def body(rank):
        group = Group(build_mesh("cpu", cp=3).get_group())
        x = inputs[rank].clone().requires_grad_()
        y = exchange(x, group, 1, cuts, 2, rows)
        y.backward(outputs[rank])
        return (y.detach() * outputs[rank]).sum(), (x.grad * inputs[rank]).sum()

    forth, back = (sum(values) for values in zip(*run_ranks(3, body), strict=True))
    assert torch.allclose(forth, back, rtol=1e-12)


@pytest.mark.parametrize(("full", "size"), [(7, 2), (9, 4), (8, 4)])
def test_on_dtensors_only_the_layout_changes(full, size):
    whole = torch.randn(2, full, 6, 3, dtype=torch.float64)

    def body(rank):
        mesh = build_mesh("cpu", cp=size)
        x = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        y = exchange_shards(x, 2)
        assert y.placements == (Shard(2),)
        assert y.shape == whole.shape
        assert torch.equal(y.full_tensor(), whole)
        (y * distribute_tensor(whole, mesh, [Shard(2)])).sum().backward()
        assert isinstance(x.grad, DTensor)
        assert x.grad.placements == (Shard(1),)
        assert torch.equal(x.grad.full_tensor(), whole)
        with torch.no_grad():
            again = torch.ops.parallelize.ulysses_exchange(x, 2, [], 1, [], "")
        assert again.placements == (Shard(2),)
        with pytest.raises(ShapeError, match="wrong-placement"):
            exchange_shards(y, 2)

    run_ranks(size, body)


def test_fake_tensors_have_the_shapes_of_real_ones():
    cut, rows = HeadCut.of(6, 2, 3), [2, 2, 1]

    def body(rank):
        group = Group(build_mesh("cpu", cp=3).get_group())
        x = torch.randn(1, 2, rows[rank], 3)
        flat = [edge for one in cut.keys for edge in one]
        real = torch.ops.parallelize.ulysses_exchange(x, 1, flat, 2, rows, group.key)
        back = torch.ops.parallelize.ulysses_fold(real, 1, flat, 2, rows, 2, group.key)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            fake = torch.ops.parallelize.ulysses_exchange(mode.from_tensor(x), 1, flat, 2, rows, group.key)
            fake_back = torch.ops.parallelize.ulysses_fold(fake, 1, flat, 2, rows, 2, group.key)
        assert fake.shape == real.shape
        assert fake_back.shape == back.shape == x.shape

    run_ranks(3, body)


def test_wrong_cuts_are_refused():
    def body(rank):
        group = Group(build_mesh("cpu", cp=2).get_group())
        x = torch.randn(1, 4, 3, 2)
        for cuts, sizes, split in [([(0, 5), (0, 4)], [3, 3], 1), ([(0, 4)], [3, 3], 1), ([(0, 2), (2, 4)], [2, 4], 1)]:
            with pytest.raises(ShapeError, match="wrong-cuts"):
                exchange(x, group, split, cuts, 2, sizes)
        with pytest.raises(ShapeError, match="wrong-cuts"):
            exchange(x, group, 2, [(0, 2), (2, 3)], 2, [3, 3])

    run_ranks(2, body)
