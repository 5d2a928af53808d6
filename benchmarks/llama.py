"""A small Llama-like model in plain PyTorch, its plan, PyTorch's dict for it, and the same model written by hand.

Its blocks are nested (an attention module and a feed-forward module) or flat (all linears directly in the block). The
hand-written model is as in Megatron-LM: plain tensors, one autograd Function for each collective, one all-reduce for
the input gradients of q, k and v (and of gate and up), and under sequence parallelism one gather for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as stock

from parallelize.plan.plan_file import parse_plan
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


class FlatBlock(nn.Module):
    """`Block` without modules inside, so that no module has the input that q, k and v share."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.head_dim = hidden // heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = self.wq(h), self.wk(h), self.wv(h)
        batch, length, _ = q.shape
        q, k, v = (w.view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """[batch, length] ids -> [batch, length, vocab] logits."""

    def __init__(self, hidden: int, layers: int = 4, heads: int = 8, vocab: int = 512, flat: bool = False):
        super().__init__()
        block = FlatBlock if flat else Block
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan(heads: int = 8, flat: bool = False) -> Plan:
    """This toolkit's plan for `Llama`."""
    blocks = """
    attention: gather
    attention.w{q,k,v}: colwise(heads)
    attention.wo: rowwise(heads)
    ffn: gather
    ffn.{gate,up}: colwise
    ffn.down: rowwise"""
    linears = """
    w{q,k,v}: colwise(heads)
    wo: rowwise(heads)
    "{gate,up}": colwise
    down: rowwise"""
    return parse_plan(
        f"""
schema_version: 1
sizes: {{heads: {heads}}}
sequence_parallel: {{layers: layers, leave: norm}}
tensor_parallel:
  embed: embedding
  layers.*:
    attention_norm: sequence
    ffn_norm: sequence{linears if flat else blocks}
  norm: sequence
  head: colwise(output=full)
"""
    )


def stock_styles(sequence_parallel: bool = False, flat: bool = False, styles: Any = None) -> dict[str, Any]:
    """PyTorch's dict for `Llama`, tensor parallel only or with sequence parallelism.

    Args:
        styles: the module that the style classes come from; None: PyTorch's.
    """
    styles = styles or stock
    attention, ffn = ("layers.*", "layers.*") if flat else ("layers.*.attention", "layers.*.ffn")
    shard = Shard(1) if sequence_parallel else None
    column = styles.ColwiseParallel(input_layouts=shard if flat else None)
    columns = [*(f"{attention}.{w}" for w in ("wq", "wk", "wv")), *(f"{ffn}.{w}" for w in ("gate", "up"))]
    linear = {
        "embed": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=shard),
        **dict.fromkeys(columns, column),
        f"{attention}.wo": styles.RowwiseParallel(output_layouts=shard),
        f"{ffn}.down": styles.RowwiseParallel(output_layouts=shard),
        "head": styles.ColwiseParallel(input_layouts=shard, output_layouts=Replicate()),
    }
    if not sequence_parallel:
        return linear
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    blocks = {} if flat else {name: styles.PrepareModuleInput(**gather) for name in (attention, ffn)}
    norms = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")
    return {**linear, **blocks, **dict.fromkeys(norms, styles.SequenceParallel())}


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


class _GatherSequence(torch.autograd.Function):
    """[batch, length / size, hidden] shards -> [batch, length, hidden]; the gradient of each rank is one term of a
    sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return _scatter_sequence(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    """Partial [batch, length, hidden] -> the shard [batch, length / size, hidden] of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return _gather_sequence(grad, ctx.group), None


def _gather_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    size = dist.get_world_size(group)
    parts = x.new_empty((size, *x.shape))
    dist.all_gather_into_tensor(parts.view(-1, *x.shape[1:]), x.contiguous(), group=group)
    return parts.transpose(0, 1).reshape(x.shape[0], size * x.shape[1], *x.shape[2:])


def _scatter_sequence(x: torch.Tensor, group: Any) -> torch.Tensor:
    size = dist.get_world_size(group)
    shards = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    out = shards.new_empty(shards.shape[1:])
    dist.reduce_scatter_tensor(out, shards.view(-1, *shards.shape[2:]), group=group)
    return out


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


class _HandBlock(nn.Module):
    """How the hand-written blocks enter and leave their linears."""

    def __init__(self, group: Any, sequence_parallel: bool):
        super().__init__()
        self.group = group
        self.enter = _GatherSequence.apply if sequence_parallel else _CopyToTP.apply
        self.leave = _ScatterSequence.apply if sequence_parallel else _ReduceFromTP.apply


class HandAttention(_HandBlock):
    def __init__(self, stock: Any, group: Any, sequence_parallel: bool):
        super().__init__(group, sequence_parallel)
        self.head_dim = stock.head_dim
        self.wq, self.wk, self.wv = (_shard(w, 0, group) for w in (stock.wq, stock.wk, stock.wv))
        self.wo = _shard(stock.wo, 1, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x, self.group)
        batch, length, _ = x.shape
        q, k, v = (
            F.linear(x, w).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(F.linear(out.transpose(1, 2).reshape(batch, length, -1), self.wo), self.group)


class HandFeedForward(_HandBlock):
    def __init__(self, stock: Any, group: Any, sequence_parallel: bool):
        super().__init__(group, sequence_parallel)
        self.gate, self.up = _shard(stock.gate, 0, group), _shard(stock.up, 0, group)
        self.down = _shard(stock.down, 1, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x, self.group)
        return self.leave(F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down), self.group)


class HandFlatBlock(_HandBlock):
    def __init__(self, stock: Any, group: Any, sequence_parallel: bool):
        super().__init__(group, sequence_parallel)
        self.attention_norm, self.ffn_norm, self.head_dim = stock.attention_norm, stock.ffn_norm, stock.head_dim
        self.wq, self.wk, self.wv = (_shard(w, 0, group) for w in (stock.wq, stock.wk, stock.wv))
        self.gate, self.up = _shard(stock.gate, 0, group), _shard(stock.up, 0, group)
        self.wo, self.down = _shard(stock.wo, 1, group), _shard(stock.down, 1, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(self.attention_norm(x), self.group)
        q, k, v = F.linear(h, self.wq), F.linear(h, self.wk), F.linear(h, self.wv)
        batch, length, _ = q.shape
        q, k, v = (w.view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(F.linear(out.transpose(1, 2).reshape(batch, length, -1), self.wo), self.group)
        h = self.enter(self.ffn_norm(x), self.group)
        return x + self.leave(F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down), self.group)


class HandEmbedding(nn.Module):
    def __init__(self, stock: nn.Embedding, group: Any, sequence_parallel: bool):
        super().__init__()
        self.group, rows = group, stock.num_embeddings // dist.get_world_size(group)
        self.start = rows * dist.get_rank(group)
        self.weight = nn.Parameter(stock.weight.detach()[self.start : self.start + rows].clone())
        self.leave = _ScatterSequence.apply if sequence_parallel else _ReduceFromTP.apply

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        outside = (ids < self.start) | (ids >= self.start + self.weight.shape[0])
        out = F.embedding((ids - self.start).masked_fill_(outside, 0), self.weight)
        return self.leave(out.masked_fill(outside.unsqueeze(-1), 0.0), self.group)


class HandHead(nn.Module):
    def __init__(self, stock: nn.Linear, group: Any, sequence_parallel: bool):
        super().__init__()
        self.group, self.weight = group, _shard(stock, 0, group)
        self.enter = _GatherSequence.apply if sequence_parallel else _CopyToTP.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _GatherFromTP.apply(F.linear(self.enter(x, self.group), self.weight), self.group)


def by_hand(model: Llama, group: Any, sequence_parallel: bool = False) -> Llama:
    """`model` with its sharded parts written by hand.

    Under sequence parallelism call `sum_norms` after backward: each rank has the gradients of norms for its own tokens.
    """
    model.embed = HandEmbedding(model.embed, group, sequence_parallel)
    for index, layer in enumerate(model.layers):
        if isinstance(layer, FlatBlock):
            model.layers[index] = HandFlatBlock(layer, group, sequence_parallel)
        else:
            layer.attention = HandAttention(layer.attention, group, sequence_parallel)
            layer.ffn = HandFeedForward(layer.ffn, group, sequence_parallel)
    model.head = HandHead(model.head, group, sequence_parallel)
    return model


def sum_norms(model: nn.Module, group: Any) -> None:
    """Sum the gradients of norms over `group`, in one message."""
    grads: list[Any] = [module.weight.grad for module in model.modules() if isinstance(module, nn.RMSNorm)]
    flat = torch.cat(grads)
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part)
