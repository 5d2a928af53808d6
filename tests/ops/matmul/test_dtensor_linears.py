"""`F.linear` on DTensors under `overlapped_linears()`: equal to PyTorch's, by the collective matmuls, and counted."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallelize import ModelError, ShapeError, overlapped_linears
from parallelize.comm.groups import Group
from tests.support.parity import worst
from tests.support.threads import run_ranks

WIDTH = 12


class Attention(nn.Module):
    """Three linears read one input; their outputs are multiplied row by row."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        return self.wo(torch.sigmoid(self.wq(x)) * self.wk(x) + self.wv(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.Linear(WIDTH, 20),
            nn.Linear(20, WIDTH),
        )

    def forward(self, x):
        h = x + self.attention(self.norm(x))
        return h + self.down(F.gelu(self.up(h)))


def sequence_styles() -> dict[str, Any]:
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scatter = RowwiseParallel(output_layouts=Shard(1))
    styles = {"norm": SequenceParallel(), "attention": gather, "attention.wo": scatter, "down": scatter}
    styles |= {f"attention.{name}": ColwiseParallel(use_local_output=False) for name in ("wq", "wk", "wv")}
    return styles | {"up": ColwiseParallel(input_layouts=Shard(1))}


def tensor_styles() -> dict[str, Any]:
    styles = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    return styles | {"attention.wo": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


OPS = {
    "sequence": {"all_gather_linear": 2, "linear_reduce_scatter": 2},
    "tensor": {"column_linear": 4, "linear_all_reduce": 2},
}
READ = "x is full, and what made it reduces its gradient"


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("styles", OPS)
def test_a_model_under_pytorchs_styles(styles, ranks, overlap):
    """Output, input gradient and all parameter gradients of two steps equal the unsharded model's."""
    torch.manual_seed(0)
    model = Block().double()
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    x, grad = torch.randn(3, 8, WIDTH).double().requires_grad_(), torch.randn(3, 8, WIDTH).double()
    for _ in range(2):
        expected = model(x)
        expected.backward(grad)
    gradients = {"input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        by_sequence = styles == "sequence"
        sharded = parallelize_module(copies[rank], mesh, sequence_styles() if by_sequence else tensor_styles())
        part = (lambda t: t.chunk(ranks, 1)[rank]) if by_sequence else lambda t: t
        local = part(x.detach()).clone().requires_grad_()
        for _ in range(2):
            with overlapped_linears(overlap, chunks=3 if overlap == "chunked" else None) as linears:
                out = sharded(local)
            assert type(out) in (torch.Tensor, DTensor)
            assert (out - part(expected)).abs().max() < 1e-12
            out.backward(part(grad))
        assert linears.ops == OPS[styles]
        assert linears.stock == ({READ: 2} if by_sequence else {})
        actual = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in sharded.named_parameters()
        }
        assert (local.grad - part(gradients["input"])).abs().max() < 1e-12
        assert (
            worst(actual, {name: gradients[name] for name in actual})[0] < 1e-12 and len(actual) == len(gradients) - 1
        )

    run_ranks(ranks, body)


COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


class FunctionalCollectives(TorchDispatchMode):
    """Counts the collectives of DTensors on the thread of one rank; `CommDebugMode` tracks the modules of all
    threads."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("_c10d_functional::")
        self.counts.update([name] if name in COLLECTIVES else [])
        return func(*args, **(kwargs or {}))


def test_as_many_collectives_as_pytorch_none_of_them_its_own():
    """Two gathers and two scatters, and the same number of the reverse in backward."""
    copies = [Block().double() for _ in range(2)]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, x = parallelize_module(copies[rank], mesh, sequence_styles()), torch.randn(3, 4, WIDTH).double()
        with FunctionalCollectives() as stock:
            model(x.requires_grad_()).sum().backward()
        assert stock.counts == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
        with (
            FunctionalCollectives() as functional,
            Group(mesh.get_group()).recording() as sent,
            overlapped_linears("off"),
        ):
            model(x).sum().backward()
        assert functional.counts == {"all_reduce": 2}  # gradients of the biases of the row linears
        assert [kind for kind, _ in sent] == ["exchange"] * 8
        with overlapped_linears("chunked", chunks=3), Group(mesh.get_group()).recording() as sent:
            model(x)
        assert len(sent) == 4 * 3  # that each of them is in chunks

    run_ranks(2, body)


# -- single linears ----------------------------------------------------------------------------------------------------

LAYOUTS = {  # of x and the weight, and to what the output is redistributed
    "all_gather_linear": (Shard(1), Shard(0), None),
    "linear_reduce_scatter": (Shard(2), Shard(1), Shard(1)),
    "linear_all_reduce": (Shard(2), Shard(1), Replicate()),
}


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("axes", [{"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("op", LAYOUTS)
def test_one_linear(op, axes, bias):
    """7 rows over 2 or 3 ranks; rows are sharded along dp too."""
    torch.manual_seed(0)
    full = [torch.randn(shape).double() for shape in ((4, 7, 6), (10, 6), (10,))][: 3 if bias else 2]
    leaves = [t.clone().requires_grad_() for t in full]
    grad = torch.randn(4, 7, 10).double()
    expected = F.linear(*leaves)
    expected.backward(grad)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        before, (x, weight, after) = mesh.ndim - 1, LAYOUTS[op]
        layouts = [
            [Shard(0)] * before + [x],
            *([[Replicate()] * before + [p] for p in (weight, Replicate() if after else Shard(0))]),
        ]
        shards = [
            distribute_tensor(t, mesh, p, src_data_rank=None).requires_grad_()
            for t, p in zip(full, layouts, strict=False)
        ]
        with overlapped_linears("chunked") as linears:
            out = F.linear(*shards)
            out = out if after is None else out.redistribute(placements=[Shard(0)] * before + [after])
        assert linears.ops == {op: 1} and not linears.stock and type(out) is DTensor
        assert (out.full_tensor() - expected).abs().max() < 1e-12
        out.backward(distribute_tensor(grad, mesh, out.placements, src_data_rank=None))
        for shard, leaf in zip(shards, leaves, strict=True):
            assert (shard.grad.full_tensor() - leaf.grad).abs().max() < 1e-12

    run_ranks(torch.Size(axes.values()).numel(), body)


def rank_of_a_row_linear() -> tuple[Any, Any, torch.Tensor]:
    """(x, weight) of a row linear on two ranks, and the output of the unsharded one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=random).double() for shape in ((3, 4, 6), (5, 6)))
    sharded = [
        distribute_tensor(t, mesh, [Shard(t.ndim - 1)], src_data_rank=None).requires_grad_() for t in (x, weight)
    ]
    return *sharded, F.linear(x, weight)


READERS = {
    "arithmetic": lambda out: (2.0 * out).full_tensor() / 2.0,
    "in place": lambda out: out.mul_(2.0).full_tensor() / 2.0,
    "full_tensor": lambda out: out.full_tensor(),
    "another placement": lambda out: out.redistribute(placements=[Shard(2)]).full_tensor(),
    "to_local": lambda out: DTensor.from_local(
        out.to_local(), out.device_mesh, out.placements, run_check=False
    ).full_tensor(),
    "twice": lambda out: (out * 1.0).full_tensor() / 2 + out.redistribute(placements=[Replicate()]).to_local() / 2,
    "without gradients": lambda out: (torch.no_grad()(lambda: out * 1.0)(), out.full_tensor())[1],
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_of_a_sum_that_is_not_reduced_get_pytorchs(reader):
    def body(rank: int) -> None:
        x, weight, expected = rank_of_a_row_linear()
        with overlapped_linears("off") as linears:
            out = F.linear(x, weight)
            assert isinstance(out, DTensor) and out.is_floating_point() and out.requires_grad
            assert (out.shape, out.dtype, out.device.type) == (expected.shape, torch.float64, "cpu")
            full = READERS[reader](out)
        assert sum(linears.ops.values()) + sum(linears.stock.values()) == 1
        assert (full - expected).abs().max() < 1e-12
        full.sum().backward()
        weights = weight.grad.full_tensor()
        assert (weights - x.detach().full_tensor().sum((0, 1))).abs().max() < 1e-12

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype):
    """As PyTorch's linear, which casts float32 and leaves float64."""

    def body(rank: int) -> None:
        x, weight, _ = (t.to(dtype) for t in rank_of_a_row_linear())
        with torch.autocast("cpu", torch.bfloat16):
            stock = F.linear(x, weight)
            with overlapped_linears("chunked") as linears:
                out = F.linear(x, weight)
                assert out.dtype == stock.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
                out = out.redistribute(placements=[Replicate()])
        assert linears.ops == {"linear_all_reduce": 1} and out.dtype == stock.dtype
        assert (out.to_local() - stock.full_tensor()).abs().max() < 0.1

    run_ranks(2, body)


def test_readers_of_a_gather_get_pytorchs():
    """Before a linear, and after it; and linears that cannot be one with it."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        full = torch.arange(24.0).double().reshape(4, 6)
        weight = distribute_tensor(torch.ones(4, 6).double(), mesh, [Shard(0)], src_data_rank=None)
        x = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        with overlapped_linears("off") as linears:
            gathered = x.redistribute(placements=[Replicate()])
            outs = F.linear(gathered, weight), F.linear(gathered, weight), gathered * 2.0
            again = x.redistribute(placements=[Replicate()])
            outs = *outs, again * 1.0, F.linear(again, weight)
            once = x.redistribute(placements=[Replicate()])
            outs = *outs, F.linear(once, weight), once * 3.0
        assert linears.ops == {"all_gather_linear": 2} and linears.stock == {READ: 2}
        sum(out.sum() for out in outs).full_tensor().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((4, 6), 4 * 4.0 + 2.0 + 1.0 + 3.0).double())
        assert type(x.redistribute(placements=[Replicate()])) is DTensor

    run_ranks(2, body)


def test_linears_that_pytorch_runs_are_counted_with_the_reason():
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, weight, bias = torch.ones(4, 6), torch.ones(8, 6), torch.ones(8)
        place = lambda t, p: distribute_tensor(t, mesh, [p], src_data_rank=None)  # noqa: E731
        calls = [
            (place(x, Replicate()), place(weight, Replicate()), None),
            (place(x, Replicate()), place(weight, Shard(0)), None),
            (place(x, Replicate()), place(weight, Shard(1)), None),
            (place(x[0], Replicate()), place(weight, Shard(0)), None),
            (place(x, Shard(0)), place(weight, Shard(0)), place(bias, Replicate())),
        ]
        with overlapped_linears() as linears:
            for call in calls:
                assert (F.linear(*call).full_tensor() == (6.0 if call[2] is None else 7.0)).all()
            F.linear(x, weight)  # no DTensors: not counted
        assert not linears.ops and sum(linears.stock.values()) == len(calls)
        text = str(linears)
        for words in (
            "weight is (Replicate",
            "nothing is sent",
            "x is (Replicate",
            "x has one dim",
            "bias is (Replicate",
        ):
            assert words in text, text

    run_ranks(2, body)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def test_an_autograd_function_that_reads_what_is_not_computed_is_refused():
    def body(rank: int) -> None:
        x, weight, _ = rank_of_a_row_linear()
        with overlapped_linears("off"):
            out = Twice.apply(F.linear(x, weight))
        with pytest.raises(ModelError, match="deferred-dtensor"):
            out.full_tensor().sum().backward()

    run_ranks(2, body)


def test_a_tensor_that_is_written_to_before_its_reader_is_computed():
    def body(rank: int) -> None:
        x, weight, _ = rank_of_a_row_linear()
        mesh = x.device_mesh
        with overlapped_linears("off"), torch.no_grad():
            x.requires_grad_(False)
            out = F.linear(x, weight)
            x.mul_(2.0)
            with pytest.raises(ModelError, match="deferred-dtensor"):
                out.redistribute(placements=[Replicate()])
            rows = distribute_tensor(torch.ones(4, 6).double(), mesh, [Shard(0)], src_data_rank=None)
            gathered = rows.redistribute(placements=[Replicate()])
            rows.to_local().zero_()
            column = distribute_tensor(torch.ones(8, 6).double(), mesh, [Shard(0)], src_data_rank=None)
            for reader in (lambda: gathered + 1.0, lambda: F.linear(gathered, column)):
                with pytest.raises(ModelError, match="deferred-dtensor"):
                    reader()

    run_ranks(2, body)


def test_a_forward_that_is_computed_again():
    """It enters the context itself, and sends again."""
    model = Block().double()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, linears = parallelize_module(copies[rank], mesh, sequence_styles()), overlapped_linears("chunked")
        x = torch.ones(2, 3, WIDTH).double().mul(rank + 1.5)

        def forward(x: torch.Tensor) -> torch.Tensor:
            with linears:
                return model(x)

        results = []
        for run in (model, lambda x: checkpoint(forward, x, use_reentrant=False)):
            model.zero_grad()
            run(x).sum().backward()
            results.append([p.grad.full_tensor() for p in model.parameters()])
        assert linears.ops == {op: 2 * number for op, number in OPS["sequence"].items()}
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(*results, strict=True))

    run_ranks(2, body)


def test_an_unknown_overlap_is_refused():
    with pytest.raises(ShapeError, match="bad-overlap"):
        overlapped_linears("fast")
