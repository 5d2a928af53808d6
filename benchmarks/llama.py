"""A small Llama-like model in plain PyTorch, its plan, PyTorch's dict for it, and the same model written by hand for tp.

The hand-written one is what a Megatron-style code base would hold: plain tensors, one autograd Function a collective, the
input gradient of q, k, v (and of gate, up) reduced once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from parallelize.plan.load import parse_plan
from parallelize.plan.schema import Plan


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.head_dim = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.ffn = Attention(hidden, heads), FeedForward(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """[batch, length] ids -> [batch, length, vocab] logits."""

    def __init__(self, hidden: int, layers: int = 4, heads: int = 8, vocab: int = 512):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan(heads: int = 8) -> Plan:
    """This toolkit's plan for `Llama`."""
    return parse_plan(
        f"""
schema_version: 1
sizes: {{heads: {heads}}}
sequence_parallel: {{layers: layers, leave: norm}}
tensor_parallel:
  embed: embedding
  layers.*:
    attention_norm: sequence
    attention: gather
    attention.w{{q,k,v}}: colwise(heads)
    attention.wo: rowwise(heads)
    ffn_norm: sequence
    ffn: gather
    ffn.{{gate,up}}: colwise
    ffn.down: rowwise
  norm: sequence
  head: colwise(output=full)
"""
    )


def stock_styles(sequence_parallel: bool = False) -> dict[str, Any]:
    """PyTorch's dict for `Llama`, tensor parallel only or with sequence parallelism."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    linear = {
        **{f"layers.*.attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
        **{f"layers.*.ffn.{w}": ColwiseParallel() for w in ("gate", "up")},
    }
    if not sequence_parallel:
        return {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            **linear,
            "layers.*.attention.wo": RowwiseParallel(),
            "layers.*.ffn.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(**gather),
        **linear,
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.ffn": PrepareModuleInput(**gather),
        "layers.*.ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


# -- the same by hand -------------------------------------------------------------------------------------------------


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad, None


class _GatherFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        parts = x.new_empty((size, *x.shape))
        dist.all_gather_into_tensor(parts.view(-1, *x.shape[1:]), x.contiguous(), group=group)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, -1)[rank].contiguous(), None


def _shard(linear: nn.Linear, dim: int, group: Any) -> nn.Parameter:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return nn.Parameter(linear.weight.detach().chunk(size, dim)[rank].clone())


class HandAttention(nn.Module):
    def __init__(self, stock: Attention, group: Any):
        super().__init__()
        self.head_dim, self.group = stock.head_dim, group
        self.wq, self.wk, self.wv = (_shard(w, 0, group) for w in (stock.wq, stock.wk, stock.wv))
        self.wo = _shard(stock.wo, 1, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        x = _CopyToTP.apply(x, self.group)
        q, k, v = (
            F.linear(x, w).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _ReduceFromTP.apply(F.linear(out.transpose(1, 2).reshape(batch, length, -1), self.wo), self.group)


class HandFeedForward(nn.Module):
    def __init__(self, stock: FeedForward, group: Any):
        super().__init__()
        self.group = group
        self.gate, self.up = _shard(stock.gate, 0, group), _shard(stock.up, 0, group)
        self.down = _shard(stock.down, 1, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _CopyToTP.apply(x, self.group)
        return _ReduceFromTP.apply(
            F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down), self.group
        )


class HandEmbedding(nn.Module):
    def __init__(self, stock: nn.Embedding, group: Any):
        super().__init__()
        self.group, rows = group, stock.num_embeddings // dist.get_world_size(group)
        self.start = rows * dist.get_rank(group)
        self.weight = nn.Parameter(stock.weight.detach()[self.start : self.start + rows].clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        outside = (ids < self.start) | (ids >= self.start + self.weight.shape[0])
        out = F.embedding((ids - self.start).masked_fill_(outside, 0), self.weight)
        return _ReduceFromTP.apply(out.masked_fill(outside.unsqueeze(-1), 0.0), self.group)


class HandHead(nn.Module):
    def __init__(self, stock: nn.Linear, group: Any):
        super().__init__()
        self.group, self.weight = group, _shard(stock, 0, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _GatherFromTP.apply(F.linear(_CopyToTP.apply(x, self.group), self.weight), self.group)


def by_hand(model: Llama, group: Any) -> Llama:
    """`model` with its sharded parts written by hand."""
    model.embed = HandEmbedding(model.embed, group)
    for layer in model.layers:
        layer.attention, layer.ffn = HandAttention(layer.attention, group), HandFeedForward(layer.ffn, group)
    model.head = HandHead(model.head, group)
    return model
