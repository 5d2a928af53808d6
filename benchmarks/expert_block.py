"""One block of experts by hand, in plain functions, and the timing of blocks that `benchmarks.experts` compares.

The hand-written block does what Megatron-LM's dispatcher and that of `transformers` do: a row for each choice of a
token is sent to the rank of its expert, a grouped matmul computes them, and a row for each choice returns, which the
sender weights and adds up.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.timing import interleaved, medians_ms, ratio
from parallelize import build_mesh, parallelize_module

T = torch.Tensor
HOST_TOKENS = 16
"""Tokens of a block whose cost is that of the host."""


class _ExchangeRows(torch.autograd.Function):
    """[sum(sent), width] rows by destination -> [sum(received), width] by source; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: T, sent: list[int], received: list[int]) -> T:
        ctx.sizes = sent, received
        return _exchanged(x, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: T):
        sent, received = ctx.sizes
        return _exchanged(grad.contiguous(), received, sent), None, None


def _exchanged(x: T, sent: list[int], received: list[int]) -> T:
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x, received, sent)
    return out


class HandWrittenBlock(nn.Module):
    """The block of a Qwen3-MoE on this rank: its router, and the experts of this rank. [batch, length, hidden] -> the
    same.

    Args:
        stock: the block with all experts.
    """

    def __init__(self, stock: Any):
        super().__init__()
        self.ranks = dist.get_world_size()
        self.top_k, self.is_normed = stock.gate.top_k, stock.gate.norm_topk_prob
        self.router = nn.Parameter(stock.gate.weight.detach().clone())
        local = slice(*(len(self.router) // self.ranks * (dist.get_rank() + n) for n in (0, 1)))
        self.gate_up = nn.Parameter(stock.experts.gate_up_proj.detach()[local].clone())
        self.down = nn.Parameter(stock.experts.down_proj.detach()[local].clone())

    def forward(self, x: T) -> T:
        tokens = x.view(-1, x.shape[-1])
        weights, choices = F.linear(tokens, self.router).softmax(-1, dtype=torch.float).topk(self.top_k)
        if self.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        order = choices.flatten().argsort(stable=True)  # choices by expert, so by rank
        counts = choices.flatten().bincount(minlength=len(self.router)).view(self.ranks, -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        source = order // self.top_k
        rows = _ExchangeRows.apply(tokens[source], sent, received)
        results = _ExchangeRows.apply(self._computed(rows, arriving), received, sent)
        weighted = results * weights.flatten()[order, None].to(results.dtype)
        return torch.zeros_like(tokens).index_add(0, source, weighted).view_as(x)

    def _computed(self, rows: T, counts: T) -> T:
        """The results of rows by source, and by expert within it. counts: [ranks, experts of this rank]."""
        experts = torch.arange(counts.shape[1]).repeat(self.ranks).repeat_interleave(counts.flatten())
        by_expert = experts.argsort(stable=True)
        stops = counts.sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[by_expert], self.gate_up.transpose(1, 2), offs=stops).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=stops)
        return torch.empty_like(out).index_copy(0, by_expert, out)


def step_of(block: nn.Module, x: T, grad: T) -> Callable[[], list[T]]:
    """Forward and backward of a block: the output, and the gradients of its input, its router and this rank's
    experts."""

    def run() -> list[T]:
        x.grad = None
        for parameter in block.parameters():
            parameter.grad = None
        out = block(x)
        out.backward(grad)
        return [out.detach(), x.grad, *(p.grad for p in block.parameters())]

    return run


def block_of(model: Any, ep: int) -> nn.Module:
    """The first block of a model on a mesh of data ranks. Its gradients are not reduced."""
    mesh = build_mesh("cpu", dp=dist.get_world_size(), tp=1)
    return parallelize_module(model, mesh, ep=ep, own_reduction=True).model.layers[0].mlp


def measure_blocks(stock: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    """Times of a block by hand and by us, and of one at ep 1 against the stock block with few tokens, which is the
    host's cost."""
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(1 + dist.get_rank())
    shapes = {"full": (options.batch, options.length), "host": (1, HOST_TOKENS)}
    inputs = {
        name: [torch.randn(*shape, options.hidden, generator=generator) for _ in range(2)]
        for name, shape in shapes.items()
    }
    model = stock()
    blocks = {
        "block by hand": (HandWrittenBlock(model.model.layers[0].mlp), "full"),
        "block by us": (block_of(stock(), ranks), "full"),
        "stock block, few tokens": (copy.deepcopy(model.model.layers[0].mlp), "host"),
        "block at ep 1, few tokens": (block_of(stock(), 1), "host"),
    }
    steps = {
        name: step_of(block, inputs[kind][0].clone().requires_grad_(), inputs[kind][1])
        for name, (block, kind) in blocks.items()
    }
    same = [("block by hand", "block by us"), ("stock block, few tokens", "block at ep 1, few tokens")]
    for one, other in same:
        _compare_results(steps[one](), steps[other](), (one, other))
    times = interleaved(steps, options.rounds, inner=4, before=dist.barrier)
    result: dict[str, Any] = {"block ms": medians_ms(times)}
    result["block by us/by hand"] = ratio(times, "block by us", "block by hand")
    result["block at ep 1/stock"] = ratio(times, "block at ep 1, few tokens", "stock block, few tokens")
    return result


def _compare_results(expected: list[T], actual: list[T], names: tuple[str, str]) -> None:
    """Output and gradients of two blocks; those of parameters by size, because the blocks order them differently."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in actual]
    pairs = [*zip(expected[:2], local[:2], strict=True)]
    pairs += [(x, next(y for y in local[2:] if y.shape == x.shape)) for x in expected[2:]]
    for x, y in pairs:
        error = float((x - y).abs().max() / x.abs().max())
        assert error < 1e-4, (names, tuple(x.shape), error)
