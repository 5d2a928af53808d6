"""How the symmetric-memory kernels are called, with stand-ins of the same signature if there is no CUDA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from parallelize import all_gather_linear, build_mesh, load_plan, parallelize_model
from parallelize.base.errors import MeshError
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.comm.groups import Group
from parallelize.ops.matmul import chunked_matmul, symmetric_memory
from parallelize.ops.matmul.row_chunks import gather_rows
from parallelize.plan.styles.notation import parse_style
from tests.support.linears import OPS, ReferenceLinear
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

T = torch.Tensor


class StandIn:
    """`symm_mem` by plain collectives; `calls` lists the kernels that were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fused_all_gather_matmul(
        self, A: T, Bs: list[T], gather_dim: int, group_name: str, *, return_A: bool = True
    ) -> tuple[T, list[T]]:
        assert group_name == dist.group.WORLD.group_name and all(B.ndim == 2 for B in Bs)
        self.calls.append("gather")
        rows = gather_rows(A, gather_dim, A.shape[gather_dim] * dist.get_world_size(), Group(dist.group.WORLD))
        return rows, [rows @ B for B in Bs]

    def fused_matmul_reduce_scatter(self, A: T, B: T, reduce_op: str, scatter_dim: int, group_name: str) -> T:
        assert reduce_op == "sum" and group_name == dist.group.WORLD.group_name
        self.calls.append("scatter")
        return chunked_matmul.matmul_reduce_scatter(
            chunked_matmul.MatmulSum([(A, B)]), scatter_dim, Group(dist.group.WORLD), 0
        )


@pytest.fixture
def stand_in(monkeypatch):
    kernels = StandIn()
    monkeypatch.setattr(symmetric_memory, "unavailable", lambda group, device: "")
    monkeypatch.setattr(private_groups, "symmetric_ops", lambda: kernels)
    return kernels


def test_the_stand_in_has_the_real_signature():
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        schema = getattr(private_groups.symmetric_ops(), name).default._schema
        code = StandIn.__dict__[name].__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        assert [argument.name for argument in schema.arguments] == list(names)


@pytest.mark.parametrize("op", OPS)
def test_right_results_even_and_uneven(op, stand_in):
    def body(rank: int) -> None:
        for shape, dim in (((8,), 0), ((2, 8), 1), ((7,), 0)):
            linear = ReferenceLinear(op, shape, dim)
            linear.check(*linear.run(overlap="symm_mem"))

    run_ranks(2, body)
    used = {"gather", "scatter"} if op in ("all_gather_linear", "linear_reduce_scatter") else set()
    assert set(stand_in.calls) == used


def test_without_it_the_error_says_why():
    def body(rank: int) -> None:
        with pytest.raises(MeshError, match=r"(?s)no-symmetric-memory.*needs CUDA.*chunked"):
            all_gather_linear(torch.ones(4, 6), torch.ones(4, 6), group=dist.group.WORLD, overlap="symm_mem")

    run_ranks(2, body)


def test_no_rank_uses_it_where_one_cannot(monkeypatch):
    tried: list[int] = []

    def enable(pg: dist.ProcessGroup) -> str:
        tried.append(pg.rank())
        return "no peer access\nof this device" if pg.rank() == 1 else ""

    monkeypatch.setattr(private_groups, "enable_symmetric_memory", enable)

    def body(rank: int) -> list[str]:
        group = Group(dist.group.WORLD)
        return [symmetric_memory.unavailable(group, torch.device("cuda")) for _ in range(2)]

    first, second = run_ranks(2, body)
    assert first == ["rank 1 cannot map the others' memory"] * 2
    assert second == ["no peer access\nof this device"] * 2
    assert sorted(tried) == [0, 1]


def test_a_stage_that_asks_for_it_does_not_leave_the_others_waiting(monkeypatch):
    """One layer asks, so that one stage of two maps memory; every rank compares what came of it."""
    mapped: list[int] = []
    monkeypatch.setattr(symmetric_memory, "require_cuda", lambda device: None)
    monkeypatch.setattr(symmetric_memory, "require", lambda group, device: mapped.append(dist.get_rank()))
    llama = load_plan("llama")
    row = next(rule for rule in llama.rules if rule.pattern == "model.layers.*.mlp.down_proj")
    styles = ("rowwise(overlap=symm_mem)", "rowwise")
    rows = [
        replace(row, pattern=f"model.layers.{layer}.mlp.down_proj", style=parse_style(style))
        for layer, style in enumerate(styles)
    ]
    plan = replace(llama, rules=(*(rule for rule in llama.rules if rule is not row), *rows))
    models = [tiny_model("llama") for _ in range(4)]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", pp=2, tp=2)
        parallelize_model(models[rank], mesh, plan, num_microbatches=2)

    run_ranks(4, body)
    assert sorted(mapped) == [0, 1]
