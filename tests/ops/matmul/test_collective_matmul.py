"""The collective matmuls equal the unsharded linear: plain and DTensor, sync and chunked, any dim, uneven and empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from parallelize import (
    DeferredGradients,
    MeshError,
    all_gather_linear,
    build_mesh,
    column_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from parallelize.base.errors import ModelError, ShapeError
from parallelize.comm.groups import Group
from parallelize.comm.link_profile import LinkProfile
from parallelize.ops import all_to_all
from parallelize.ops.attention import ring_attention
from parallelize.ops.experts import transfers as exchange_rows
from parallelize.ops.library import KERNELS
from parallelize.ops.matmul import chunked_matmul, matmul_ops
from tests.support.linears import OPS, ReferenceLinear
from tests.support.threads import run_ranks

SHAPES = [((7,), 0), ((8,), 0), ((2, 7), 1), ((5, 3), 0), ((9, 5), 1), ((2, 3, 4), 1), ((3, 2), 1)]


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_equal_the_unsharded_linear(op, ranks):
    """Uneven rows (7 over 2, 3, 4), empty shards (5 over 4 leaves none), large outer size (9: received through
    buffers)."""

    def body(rank: int) -> None:
        for shape, dim in SHAPES:
            for options in option_sets(op):
                linear = ReferenceLinear(
                    op, shape, dim, weights=2 if op in ("all_gather_linear", "column_linear") else 1
                )
                linear.check(*linear.run(**options))

    run_ranks(ranks, body)


def option_sets(op: str) -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = [{"overlap": "off"}, *({"overlap": "chunked", "chunks": n} for n in (1, 3, 4))]
    return sets + ([{**options, "save": "shard"} for options in sets] if op == "all_gather_linear" else [])


@pytest.mark.parametrize("op", OPS)
def test_parts_that_need_no_gradient(op):
    """Frozen weights, an input without a gradient, no bias, outputs that the loss does not use."""

    def body(rank: int) -> None:
        for overlap in ("off", "chunked"):
            for frozen in range(3):
                linear = ReferenceLinear(op, (6, 4), 0)
                leaves = linear.leaves()
                leaves[frozen].requires_grad_(False)
                (out,) = linear.call(leaves, overlap=overlap)
                out.backward(linear.local_output(linear.grads[0]))
                for n, leaf in enumerate(leaves[:2]):
                    expected = (linear.local_input, linear.local_weight)[n](linear.expected_grads[n])
                    assert (leaf.grad is None) == (n == frozen)
                    assert leaf.grad is None or (leaf.grad - expected).abs().max() < 1e-12

    run_ranks(2, body)


@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("op", OPS)
def test_a_model_may_add_to_a_result_in_place(op, overlap):
    """As Llama 4 adds its experts to the shared one: the result is no view, of which autograd refuses this."""

    def body(rank: int) -> None:
        for shape in ((6, 4), (2, 3, 4)):
            linear = ReferenceLinear(op, shape, 0)
            leaves = linear.leaves()
            (out,) = linear.call(leaves, overlap=overlap)
            out.add_(1.0).backward(linear.local_output(linear.grads[0]))
            expected = linear.local_input(linear.expected_grads[0]), linear.local_weight(linear.expected_grads[1])
            for leaf, gradient in zip(leaves, expected, strict=False):
                assert (leaf.grad - gradient).abs().max() < 1e-12

    run_ranks(2, body)


def test_unused_outputs():
    def body(rank: int) -> None:
        for op in ("all_gather_linear", "column_linear"):
            linear = ReferenceLinear(op, (6, 4), 0, weights=2)
            leaves = linear.leaves()
            first, _ = linear.call(leaves, overlap="chunked")
            first.backward(linear.local_output(linear.grads[0]))
            assert leaves[2].grad is None and leaves[4].grad is None
            alone = ReferenceLinear(op, (6, 4), 0, weights=2)
            x, weight = alone.x.clone().requires_grad_(), alone.weights[0].clone().requires_grad_()
            F.linear(x, weight).backward(alone.grads[0])
            assert (leaves[0].grad - linear.local_input(x.grad)).abs().max() < 1e-12
            assert (leaves[1].grad - linear.local_weight(weight.grad)).abs().max() < 1e-12

    run_ranks(3, body)


HIDES = LinkProfile(latency_us=0.0, bytes_per_s=1e6, flops=1e6, step_us=0.0, hidden={"chunked": 1.0})
SLOW_STEPS = LinkProfile(latency_us=0.0, bytes_per_s=1e12, flops=1e9, step_us=1e6, hidden={"chunked": 0.0})


@pytest.mark.parametrize(("profile", "is_chunked"), [(HIDES, True), (SLOW_STEPS, False), (None, False)])
@pytest.mark.parametrize("op", OPS)
def test_an_op_that_is_told_auto_chooses_by_its_own_sizes(monkeypatch, op, profile, is_chunked):
    """Compiled graphs say no more, since they serve calls of any size."""
    chosen = []
    steps_of = matmul_ops.steps_of
    monkeypatch.setattr(matmul_ops, "steps_of", lambda algorithm: chosen.append(algorithm) or steps_of(algorithm))

    def body(rank: int) -> None:
        linear = ReferenceLinear(op, (8, 4), 0, weights=1)
        group = Group(dist.group.WORLD)
        if profile is not None:
            group.profiles["cpu", linear.x.dtype] = profile
        x, weight, *_ = (leaf.detach() for leaf in linear.leaves())
        ops, name = torch.ops.parallelize, group.key
        if op == "all_gather_linear":
            ops.all_gather_linear(x, [weight], [], 0, x.shape[0] * 2, name, "auto", False)
        elif op == "column_linear":
            grad = x.new_ones(*x.shape[:-1], len(weight))
            ops.column_linear_backward([grad], x, [weight], [True], name, "auto")
        else:
            getattr(ops, op)(x, weight, *([0] if op == "linear_reduce_scatter" else []), name, "auto")

    run_ranks(2, body)
    assert len(chosen) == 2 and all(algorithm.startswith("chunked") == is_chunked for algorithm in chosen), chosen


def test_a_group_of_one_is_f_linear():
    """Nothing is sent, not even to agree on a line: there is no process group."""

    def body(rank: int) -> None:
        group = Group(dist.group.WORLD)
        group.pg = None  # type: ignore[assignment]
        random = torch.Generator().manual_seed(0)
        x, weight, bias = (torch.randn(shape, generator=random) for shape in ((4, 6), (3, 6), (3,)))
        for function in (all_gather_linear, linear_reduce_scatter, linear_all_reduce, column_linear):
            assert torch.equal(function(x, weight, bias, group=group, overlap="chunked"), F.linear(x, weight, bias))

    run_ranks(1, body)


# -- the example of the documentation ----------------------------------------------------------------------------------


def test_four_ranks_as_documented():
    """X_i is [B/4, M] and W_i is [M, N/4]: each rank multiplies every X_j by its own W_i and puts the rows together."""
    batch, features, columns = 8, 6, 12

    def body(rank: int) -> None:
        random = torch.Generator().manual_seed(0)
        x = torch.randn(batch, features, generator=random).chunk(4)
        w = torch.randn(features, columns, generator=random).chunk(4, dim=1)
        group = Group(dist.group.WORLD)
        with group.recording() as sent:
            out = all_gather_linear(x[rank], w[rank].t(), group=group, overlap="chunked", chunks=2)
        assert out.shape == (batch, columns // 4)
        torch.testing.assert_close(out, torch.cat([x_j @ w[rank] for x_j in x]))
        # only rows are sent: X_i to three peers, in two chunks; no weight is sent
        assert sent == [("exchange", 3 * x[rank].numel() * 4 // 2)] * 2

    run_ranks(4, body)


# -- DTensors ----------------------------------------------------------------------------------------------------------


def dtensor_example() -> tuple[list, Any, Any]:
    """Full tensors with their gradients, the unsharded output, and its gradient."""
    random = torch.Generator().manual_seed(0)
    shapes = ((4, 7, 6), (10, 6), (10,))
    leaves = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    upstream = torch.randn(4, 7, 10, generator=random, dtype=torch.float64)
    expected = F.linear(*leaves)
    expected.backward(upstream)
    return leaves, expected.detach(), upstream


def run_on_dtensors(mesh: Any, overlap: str, leaves: list, expected: Any, upstream: Any) -> None:
    """Every op on a mesh whose last axis is tp; rows are also sharded over an axis before it."""
    before = mesh.ndim - 1

    def check(function: Any, x: Any, weight: Any, bias: Any) -> None:
        placements = ([Shard(0)] * before + [x], [Replicate()] * before + [weight], [Replicate()] * before + [bias])
        sharded = [
            distribute_tensor(leaf.detach().clone(), mesh, placement, src_data_rank=None).requires_grad_()
            for leaf, placement in zip(leaves, placements, strict=True)
        ]
        out = function(*sharded)
        assert out.shape == expected.shape
        (out * distribute_tensor(upstream, mesh, out.placements, src_data_rank=None)).sum().backward()
        assert not any(
            isinstance(placement, Partial) for leaf in sharded for placement in leaf.grad.placements[before:]
        )
        pairs = [(out, expected), *((shard.grad, leaf.grad) for shard, leaf in zip(sharded, leaves, strict=True))]
        for actual, reference in pairs:
            full = actual.full_tensor()
            full = full.reconcile() if hasattr(full, "reconcile") else full
            assert (full - reference).abs().max() < 1e-12

    for save in ("gathered", "shard"):
        check(
            lambda x, w, b, save=save: all_gather_linear(x, w, b, dim=1, overlap=overlap, save=save),
            *(Shard(1), Shard(0), Shard(0)),
        )
    check(lambda x, w, b: linear_reduce_scatter(x, w, b, dim=1, overlap=overlap), Shard(2), Shard(1), Replicate())
    check(lambda x, w, b: linear_all_reduce(x, w, b, overlap=overlap), Shard(2), Shard(1), Replicate())
    check(lambda x, w, b: column_linear(x, w, b, overlap=overlap), Replicate(), Shard(0), Shard(0))


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_on_dtensors_they_mean_f_linear(axes, overlap):
    tensors = dtensor_example()

    def body(rank: int) -> None:
        run_on_dtensors(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), overlap, *tensors)

    size = torch.Size(axes.values()).numel()
    run_ranks(size, body)


def test_wrong_placements_are_named():
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
        weight = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        with pytest.raises(ShapeError, match=r"(?s)wrong-placement.*redistribute to Shard\(dim=0\)"):
            all_gather_linear(x, weight)
        with pytest.raises(ShapeError, match="must all be DTensors"):
            all_gather_linear(torch.ones(4, 6), weight)

    run_ranks(2, body)


# -- simulation --------------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_under_local_tensor_mode(axes, overlap):
    """All ranks in one process on a fake group: right numbers."""
    local = pytest.importorskip("torch.distributed._local_tensor")
    tensors = dtensor_example()  # inside the mode every rank would draw its own
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        with local.LocalTensorMode(4):
            run_on_dtensors(
                init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)), overlap, *tensors
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("op", OPS)
def test_simulation_sends_what_ranks_send(op, overlap):
    """Messages of rank 0, forward and backward: real ranks, a fake group, and LocalTensorMode."""
    local = pytest.importorskip("torch.distributed._local_tensor")

    def recorded(_: int) -> list:
        linear = ReferenceLinear(op, (2, 7), 1)
        with linear.group.recording() as sent:
            linear.run(overlap=overlap)
        return sent

    real = run_ranks(3, recorded)[0]
    assert real
    dist.init_process_group("fake", rank=0, world_size=3)
    try:
        assert recorded(0) == real
        linear = ReferenceLinear(op, (2, 7), 1)
        with local.LocalTensorMode(3), linear.group.recording() as sent:
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
            x, w, b = {
                "all_gather_linear": (Shard(1), Shard(0), Shard(0)),
                "column_linear": (Replicate(), Shard(0), Shard(0)),
            }.get(op, (Shard(2), Shard(1), Replicate()))
            leaves = [
                distribute_tensor(t.clone(), mesh, [placement], src_data_rank=None).requires_grad_()
                for t, placement in zip((linear.x, linear.weights[0], linear.biases[0]), (x, w, b), strict=True)
            ]
            rows = {"dim": 1} if op in ("all_gather_linear", "linear_reduce_scatter") else {}
            function = {f.__name__: f for f in (all_gather_linear, column_linear, linear_all_reduce)}
            function["linear_reduce_scatter"] = linear_reduce_scatter
            out = function[op](*leaves, overlap=overlap, **rows)
            out.backward(distribute_tensor(linear.grads[0], mesh, out.placements, src_data_rank=None))
        assert sent == real
    finally:
        dist.destroy_process_group()


def test_every_op_has_a_simulation_rule():
    matmuls = {name for op in OPS for name in ((op,) if op == "linear_all_reduce" else (op, f"{op}_backward"))}
    attention = {"ring_attention", "ring_attention_backward", "ulysses_exchange", "ulysses_fold"}
    assert all_to_all and ring_attention and exchange_rows  # imported, so that their ops are defined
    assert set(KERNELS) == matmuls | attention | {"exchange_rows"}


# -- deferred weight gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["gathered", "shard"])
@pytest.mark.parametrize("op", OPS)
def test_weight_gradients_can_be_deferred(op, save):
    """Input gradients at once; equal weight gradients when they are computed, added to `.grad`."""

    def body(rank: int) -> None:
        options = {"save": save} if op == "all_gather_linear" else {}
        linear = ReferenceLinear(op, (6, 4), 0)
        leaves, deferred = linear.leaves(), DeferredGradients()
        for times in (1, 2):
            (out,) = linear.call(leaves, overlap="chunked", deferred=deferred, **options)
            with deferred.deferring():
                out.backward(linear.local_output(linear.grads[0]))
            assert len(deferred) == 1 and (times == 2 or leaves[1].grad is None)
            assert (leaves[0].grad - times * linear.local_input(linear.expected_grads[0])).abs().max() < 1e-12
            deferred.compute()
            assert len(deferred) == 0
            assert (leaves[1].grad - times * linear.local_weight(linear.expected_grads[1])).abs().max() < 1e-12
        (out,) = linear.call(leaves, overlap="chunked", deferred=deferred, **options)
        out.backward(linear.local_output(linear.grads[0]))  # outside `deferring` nothing is deferred
        assert len(deferred) == 0

    run_ranks(2, body)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("rows", r"rank 0 +all_gather_linear torch\.float64 \[8 over dim 0, 6\].*rank 1 .*\[10 over dim 0, 6\]"),
        ("dtype", r"rank 0 .*float64.*rank 1 .*float32"),
        ("overlap", r"rank 0 .*chunked/4.*rank 1 .*sync"),
        ("op", r"rank 0 +all_gather_linear.*rank 1 +linear_all_reduce"),
    ],
)
def test_ranks_that_disagree_are_named(differs, words):
    def body(rank: int) -> None:
        odd = rank == 1
        rows, dtype = (
            (5 if odd and differs == "rows" else 4),
            (torch.float32 if odd and differs == "dtype" else torch.float64),
        )
        overlap = "off" if odd and differs == "overlap" else "chunked"
        x, weight, group = torch.ones(rows, 6, dtype=dtype), torch.ones(4, 6, dtype=dtype), dist.group.WORLD
        call = linear_all_reduce if odd and differs == "op" else all_gather_linear
        with pytest.raises(ShapeError, match=rf"(?s)ranks-disagree.*{words}"):
            call(x, weight, group=group, overlap=overlap)
        x = torch.ones(4, 6)
        torch.testing.assert_close(all_gather_linear(x, x, group=group, overlap="chunked"), torch.full((8, 4), 6.0))

    run_ranks(2, body)


def test_one_rank_with_bad_arguments_tells_the_others():
    def body(rank: int) -> None:
        weight = torch.ones(4, 5 if rank else 6)
        words = "cannot multiply rows" if rank else r"(?s)ranks-disagree.*rank 1 +error wrong-shape"
        with pytest.raises(ShapeError, match=words):
            all_gather_linear(torch.ones(4, 6), weight, group=dist.group.WORLD, overlap="chunked")

    run_ranks(2, body)


def test_bad_arguments():
    def body(rank: int) -> None:
        x, group = torch.ones(4, 6), dist.group.WORLD
        for words, call in {
            "wrong-shape.*any dim but the last": lambda: all_gather_linear(x, x, dim=-1, group=group),
            "wrong-shape.*its shard of 9": lambda: all_gather_linear(x, x, group=group, full=9),
            "wrong-dtype": lambda: linear_all_reduce(x, x.double(), group=group),
            "no-group": lambda: all_gather_linear(x, x),
            "bad-overlap": lambda: all_gather_linear(x, x, group=group, overlap="fast"),
            "chunks at least 1": lambda: all_gather_linear(x, x, group=group, overlap="chunked", chunks=0),
        }.items():
            with pytest.raises(ShapeError, match=f"(?s){words}"):
                call()

    run_ranks(2, body)


def test_a_second_derivative_is_refused():
    def body(rank: int) -> None:
        linear = ReferenceLinear("all_gather_linear", (4,), 0)
        leaves = linear.leaves()
        (out,) = linear.call(leaves, overlap="chunked")
        with pytest.raises(ModelError, match="double-backward"):
            torch.autograd.grad(out.sum(), leaves[0], create_graph=True)

    run_ranks(2, body)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_failing_matmul_leaves_the_next_call_correct(op, at, everywhere, monkeypatch):
    """A matmul fails on one rank or on all: that rank raises, its peers get NaN or correct values, and the next step
    works."""
    real, counts = chunked_matmul.matmul, {}

    def body(rank: int) -> None:
        linear = ReferenceLinear(op, (8, 3), 0)
        leaves = linear.leaves()
        counts[rank] = 0
        failing = everywhere or rank == 1

        def broken(*args: Any) -> None:
            counts[dist.get_rank()] += 1
            if counts[dist.get_rank()] > at and (everywhere or dist.get_rank() == 1):
                raise MemoryError("no memory left")
            real(*args)

        if op == "column_linear":  # its matmuls are in backward
            (out,) = linear.call(leaves, overlap="chunked")
        dist.barrier()
        monkeypatch.setattr(chunked_matmul, "matmul", broken)
        try:
            if op == "column_linear":
                out.backward(linear.local_output(linear.grads[0]))
            else:
                linear.call(leaves, overlap="chunked")
            assert not failing
        except MemoryError:
            assert failing
        dist.barrier()
        monkeypatch.setattr(chunked_matmul, "matmul", real)
        dist.barrier()
        linear.check(*linear.run(overlap="chunked"))

    run_ranks(2, body)


@pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter, linear_all_reduce, column_linear])
def test_a_group_is_named_as_for_other_collectives(op):
    """By a mesh of one axis; a mesh of several names none."""

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=1, tp=2)
        x, weight = torch.arange(12.0).view(4, 3) + rank, torch.ones(5, 3)
        assert torch.equal(op(x, weight, group=mesh["tp"]), op(x, weight, group=mesh.get_group("tp")))
        with pytest.raises(MeshError, match="several-axes"):
            op(x, weight, group=mesh)

    run_ranks(2, body)
