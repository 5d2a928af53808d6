"""A Llama-2-like module as in PyTorch's tutorials: attention takes (x, freqs_cis) and views by its own head counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, self.heads, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = q * freqs[None, :, None, :], k * freqs[None, :, None, :]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, inner), nn.Linear(inner, dim), nn.Linear(dim, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, inner: int):
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim, inner)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """[batch, length] ids -> logits."""

    def __init__(self, vocab: int = 30, dim: int = 24, heads: int = 4, inner: int = 40, layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim, heads, inner) for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.register_buffer("freqs", torch.linspace(0.5, 1.5, 32 * (dim // heads)).view(32, -1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(ids)
        freqs = self.freqs[: ids.shape[1]]
        for layer in self.layers.values():
            h = layer(h, freqs)
        return self.output(self.norm(h))


def tensor_parallel(styles) -> dict:
    """The tutorial's first plan; `styles` is the module that has the style classes."""
    from torch.distributed.tensor import Replicate

    col, row = styles.ColwiseParallel, styles.RowwiseParallel
    plan = {"tok_embeddings": row(input_layouts=Replicate()), "output": col(output_layouts=Replicate())}
    for w in ("wq", "wk", "wv"):
        plan[f"layers.*.attention.{w}"] = col()
    plan |= {"layers.*.attention.wo": row(), "layers.*.feed_forward.w1": col(), "layers.*.feed_forward.w2": row()}
    return plan | {"layers.*.feed_forward.w3": col()}


def sequence_parallel(styles, loss_parallel: bool) -> dict:
    """The tutorial's second plan, with loss parallelism or without."""
    from torch.distributed.tensor import Replicate, Shard

    col, row, gather = styles.ColwiseParallel, styles.RowwiseParallel, styles.PrepareModuleInput
    head = (
        {"output_layouts": Shard(-1), "use_local_output": False} if loss_parallel else {"output_layouts": Replicate()}
    )
    plan = {
        "tok_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": styles.SequenceParallel(),
        "output": col(input_layouts=Shard(1), **head),
        "layers.*.attention_norm": styles.SequenceParallel(),
        "layers.*.attention": gather(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "layers.*.ffn_norm": styles.SequenceParallel(),
        "layers.*.feed_forward": gather(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.attention.wo": row(output_layouts=Shard(1)),
        "layers.*.feed_forward.w1": col(),
        "layers.*.feed_forward.w2": row(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": col(),
    }
    return plan | {f"layers.*.attention.{w}": col() for w in ("wq", "wk", "wv")}


def make_heads_local(model: Transformer, tp: int) -> None:
    """What the tutorial tells its reader to do."""
    for layer in model.layers.values():
        layer.attention.heads //= tp
