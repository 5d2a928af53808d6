"""The all-to-all of Ulysses: any dims, uneven rows, fewer key heads than ranks, the adjoint, DTensors, fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallelize import ShapeError, build_mesh
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops.all_to_all import HeadSplit, exchange, exchange_shards
from tests.support.threads import run_ranks


def sizes_of(full, size):
    return [stop - start for start, stop in (even_interval(full, size, rank) for rank in range(size))]


@pytest.mark.parametrize(("split", "concat"), [(1, 2), (2, 1), (0, 3), (3, 0), (-1, 1)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_its_slice_of_all_rows(size, split, concat):
    torch.manual_seed(0)
    full_tensor = torch.randn(5, 7, 6, 3, dtype=torch.float64)
    cuts = [even_interval(full_tensor.shape[split], size, rank) for rank in range(size)]
    sizes = sizes_of(full_tensor.shape[concat], size)
    grad = torch.randn_like(full_tensor)

    def body(rank):
        group = Group(build_mesh("cpu", cp=size).get_group())
        start = sum(sizes[:rank])
        local = full_tensor.narrow(concat, start, sizes[rank]).clone().requires_grad_()
        out = exchange(local, group, split, cuts, concat, sizes)
        begin, end = cuts[rank]
        assert torch.equal(out, full_tensor.narrow(split, begin, end - begin))
        out.backward(grad.narrow(split, begin, end - begin))
        assert torch.equal(local.grad, grad.narrow(concat, start, sizes[rank]))

    run_ranks(size, body)


def test_gradients_of_overlapping_slices_are_summed():
    """Two key heads for three ranks: head 0 goes to ranks 0 and 1, head 1 to ranks 1 and 2."""
    heads = HeadSplit.of(6, 2, 3)
    assert heads.queries == ((0, 2), (2, 4), (4, 6))
    assert heads.keys == ((0, 1), (0, 2), (1, 2))
    rows = [2, 2, 1]
    full_tensor = torch.randn(1, 2, 5, 3, dtype=torch.float64)

    def body(rank):
        group = Group(build_mesh("cpu", cp=3).get_group())
        local = full_tensor.narrow(2, sum(rows[:rank]), rows[rank]).clone().requires_grad_()
        out = exchange(local, group, 1, heads.keys, 2, rows)
        out.backward(torch.full_like(out, float(rank + 1)))
        start, stop = heads.keys[rank]
        assert torch.equal(out, full_tensor[:, start:stop])
        return local.grad

    grad = torch.cat(run_ranks(3, body), 2)
    assert (grad[:, 0] == 3).all()  # of ranks 0 and 1: 1 + 2
    assert (grad[:, 1] == 5).all()  # of ranks 1 and 2: 2 + 3


@pytest.mark.parametrize(
    ("heads", "kv", "size"), [(8, 8, 4), (8, 2, 4), (6, 3, 4), (5, 5, 4), (3, 1, 4), (12, 4, 8), (9, 3, 2)]
)
def test_queries_find_their_key_heads(heads, kv, size):
    split = HeadSplit.of(heads, kv, size)
    assert [head for start, stop in split.queries for head in range(start, stop)] == list(range(heads))
    for (start, stop), (first, last) in zip(split.queries, split.keys, strict=True):
        needed = {head * kv // heads for head in range(start, stop)}
        assert needed == set(range(first, last))


def test_the_adjoint_is_the_transpose():
    """<y, A x> = <A^T y, x> over all ranks, for slices with gaps, slices that overlap, and an empty one."""
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
    full_tensor = torch.randn(2, full, 6, 3, dtype=torch.float64)

    def body(rank):
        mesh = build_mesh("cpu", cp=size)
        x = distribute_tensor(full_tensor, mesh, [Shard(1)]).requires_grad_()
        y = exchange_shards(x, 2)
        assert y.placements == (Shard(2),)
        assert y.shape == full_tensor.shape
        assert torch.equal(y.full_tensor(), full_tensor)
        (y * distribute_tensor(full_tensor, mesh, [Shard(2)])).sum().backward()
        assert isinstance(x.grad, DTensor)
        assert x.grad.placements == (Shard(1),)
        assert torch.equal(x.grad.full_tensor(), full_tensor)
        with torch.no_grad():
            again = torch.ops.parallelize.ulysses_exchange(x, 2, [], 1, [], "")
        assert again.placements == (Shard(2),)
        with pytest.raises(ShapeError, match="wrong-placement"):
            exchange_shards(y, 2)

    run_ranks(size, body)


def test_fake_tensors_have_the_shapes_of_real_ones():
    heads, rows = HeadSplit.of(6, 2, 3), [2, 2, 1]

    def body(rank):
        group = Group(build_mesh("cpu", cp=3).get_group())
        x = torch.randn(1, 2, rows[rank], 3)
        flat = [edge for interval in heads.keys for edge in interval]
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


def test_the_documented_path():
    from parallelize.ops import ulysses

    assert ulysses.exchange is exchange and ulysses.exchange_shards is exchange_shards
