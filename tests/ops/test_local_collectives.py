"""The public collectives, on threads as ranks: results and gradients of the unsharded computation, also of uneven
dims."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from parallelize import axis_group, build_mesh, collectives
from parallelize.base.errors import MeshError, ModelError, ShapeError
from parallelize.tools.verification.threads import run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 4])
SIZES = pytest.mark.parametrize("size", [8, 7, 3])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def part(x: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    """As torch.chunk splits, with empty parts at the end."""
    chunks = x.chunk(ranks, dim)
    return chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def groups(ranks: int):
    """The two kinds of groups."""
    mesh = build_mesh("cpu", dp=1, tp=ranks)
    return mesh["tp"], axis_group(mesh, "tp")


@RANKS
@SIZES
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_each_function_and_its_gradient(ranks, size, dim):
    """Of f(x) = sum over ranks of <w_rank, result of the rank>, against the same without ranks."""
    shape = [5, 6, 4]
    shape[dim] = size
    x, weights = draw(*shape), [draw(*shape, seed=10 + rank) for rank in range(ranks)]
    summands = [draw(*shape, seed=20 + rank) for rank in range(ranks)]
    total = sum(weights)

    def body(rank: int) -> None:
        for group in groups(ranks):
            own_part = part(x, rank, ranks, dim)

            copied = leaf(x)
            collectives.copy(copied, group).mul(weights[rank]).sum().backward()
            assert torch.allclose(copied.grad, total)

            summand = leaf(summands[rank])
            result = collectives.reduce(summand, group)
            result.mul(weights[0]).sum().backward()
            assert torch.allclose(result, sum(summands)) and torch.equal(summand.grad, weights[0])

            summand = leaf(summands[rank])
            result = collectives.sum_both(summand, group)
            result.mul(weights[rank]).sum().backward()
            assert torch.allclose(result, sum(summands)) and torch.allclose(summand.grad, total)

            for gradient, expected, full in (("partial", total, size), ("replicate", weights[0], None)):
                local = leaf(own_part)
                result = collectives.gather(local, group, dim, gradient=gradient, full=full)
                result.mul(weights[rank if gradient == "partial" else 0]).sum().backward()
                assert torch.equal(result, x) and torch.allclose(local.grad, part(expected, rank, ranks, dim))

            summand = leaf(summands[rank])
            result = collectives.reduce_scatter(summand, group, dim)
            result.mul(part(weights[0], rank, ranks, dim)).sum().backward()
            assert torch.allclose(result, part(sum(summands), rank, ranks, dim)) and torch.equal(
                summand.grad, weights[0]
            )

            replicated = leaf(x)
            result = collectives.split(replicated, group, dim)
            result.mul(part(weights[0], rank, ranks, dim)).sum().backward()
            assert torch.equal(result, own_part) and torch.equal(replicated.grad, weights[0])

    run_ranks(ranks, body)


@RANKS
@pytest.mark.parametrize("tokens", [8, 7, 3])
@pytest.mark.parametrize("heads", [8, 6, 3])
def test_all_to_all_shards_heads_instead_of_tokens_and_back(ranks, tokens, heads):
    x, weight = draw(2, tokens, heads, 5), draw(2, tokens, heads, 5, seed=1)

    def body(rank: int) -> None:
        for group in groups(ranks):
            local = leaf(part(x, rank, ranks, 1))
            result = collectives.all_to_all(local, group, full=tokens)
            assert torch.equal(result, part(x, rank, ranks, 2))
            result.mul(part(weight, rank, ranks, 2)).sum().backward()
            assert torch.equal(local.grad, part(weight, rank, ranks, 1))
            back = collectives.all_to_all(result.detach(), group, 1, 2, full=heads)
            assert torch.equal(back, local)
            assert torch.equal(collectives.all_to_all(local, group), result), "ranks tell each other their parts"

    run_ranks(ranks, body)


@RANKS
def test_two_linear_layers_are_those_of_one_rank(ranks):
    """Column and row parallel, and the same with a sharded sequence."""
    x, up, down = draw(2, 6, 8), draw(12, 8, seed=1), draw(8, 12, seed=2)
    reference = [leaf(value) for value in (x, up, down)]
    expected = (reference[0] @ reference[1].T).relu() @ reference[2].T
    expected.pow(2).sum().backward()

    def body(rank: int) -> None:
        tp = build_mesh("cpu", tp=ranks)
        for sequence in (False, True):
            inputs = leaf(part(x, rank, ranks, 1) if sequence else x)
            own_up, own_down = leaf(part(up, rank, ranks, 0)), leaf(part(down, rank, ranks, 1))
            if sequence:
                hidden = collectives.gather(inputs, tp, 1, gradient="partial", full=6) @ own_up.T
                out = collectives.reduce_scatter(hidden.relu() @ own_down.T, tp, 1)
            else:
                out = collectives.reduce((collectives.copy(inputs, tp) @ own_up.T).relu() @ own_down.T, tp)
            out.pow(2).sum().backward()
            assert torch.allclose(
                inputs.grad, part(reference[0].grad, rank, ranks, 1) if sequence else reference[0].grad
            )
            assert torch.allclose(own_up.grad, part(reference[1].grad, rank, ranks, 0))
            assert torch.allclose(own_down.grad, part(reference[2].grad, rank, ranks, 1))

    run_ranks(ranks, body)


def test_a_group_of_one_rank_changes_nothing():
    def body(rank: int) -> None:
        tp, x = build_mesh("cpu", tp=1), draw(2, 4, 6)
        for result in (
            collectives.copy(x, tp),
            collectives.reduce(x, tp),
            collectives.gather(x, tp, gradient="partial"),
            collectives.split(x, tp),
            collectives.reduce_scatter(x, tp),
            collectives.all_to_all(x, tp),
        ):
            assert torch.equal(result, x)

    run_ranks(1, body)


def test_what_is_no_local_shard_is_refused_before_anything_is_sent():
    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=2)
        tp, x = mesh["tp"], draw(2, 4, 6)
        for slug, error, call in (
            ("several-axes", MeshError, lambda: collectives.copy(x, mesh)),
            ("not-local", ModelError, lambda: collectives.reduce(DTensor.from_local(x, tp, [Replicate()]), tp)),
            ("no-such-dim", ShapeError, lambda: collectives.split(x, tp, 3)),
            ("no-such-dim", ShapeError, lambda: collectives.all_to_all(draw(2, 2), tp)),
            ("not-a-shard", ShapeError, lambda: collectives.gather(x, tp, 1, gradient="partial", full=10)),
            ("same-dim", ShapeError, lambda: collectives.all_to_all(x, tp, 1, -2)),
        ):
            with pytest.raises(error) as caught:
                call()
            assert caught.value.slugs == (slug,), caught.value

    run_ranks(4, body)


@pytest.mark.parametrize("parts", [[3, 1], [2, 3], [0, 2]])
def test_parts_that_are_not_those_of_a_chunk_are_refused_on_every_rank(parts):
    def body(rank: int) -> None:
        tp, x = build_mesh("cpu", tp=2)["tp"], draw(4, parts[rank], 6)
        for call in (
            lambda: collectives.gather(x, tp, 1, gradient="partial"),
            lambda: collectives.all_to_all(x, tp, 2, 1),
        ):
            with pytest.raises(
                ShapeError, match=f"the ranks have .*{parts[0]}, {parts[1]}.* elements of dim 1"
            ) as caught:
                call()
            assert caught.value.slugs == ("not-a-shard",)
        assert torch.equal(collectives.reduce(torch.ones(2), tp), torch.full((2,), 2.0)), "both ranks go on"

    run_ranks(2, body)


def test_on_meta_nothing_is_asked():
    def body(rank: int) -> None:
        x = torch.empty(4, 3, device="meta")
        assert collectives.gather(x, build_mesh("cpu", tp=2)["tp"], gradient="partial").shape == (4, 6)

    run_ranks(2, body)
