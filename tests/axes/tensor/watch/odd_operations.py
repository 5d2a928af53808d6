"""Operations for `OddModel`: over all tokens or one by one, over all features or those of a head, on parts of packed
features."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.axes.tensor.odd_models import WIDTH


def _shifted(m, x):
    return x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def _attention(m, x):
    return x + F.softmax(x @ x.transpose(-1, -2), -1) @ x


def _looped(m, x):
    state, outs = torch.zeros_like(x.transpose(0, 1)[0]), []
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
        outs.append(state)
    return torch.stack(outs, 1)


def _counted(m, x):
    positions = torch.ones(x.shape[0], x.shape[1], dtype=torch.long).cumsum(1) - 1
    return x + m.table[positions]


OVER_TOKENS = {
    "slice": lambda m, x: x + x[:, :1],
    "last token": lambda m, x: x + x[:, -1].unsqueeze(1),
    "token by tensor": lambda m, x: x + x[torch.arange(2), torch.tensor([1, 2])].unsqueeze(1),
    "token shift": _shifted,
    "roll": lambda m, x: x + torch.roll(x, 1, 1),
    "roll of all": lambda m, x: x + x.roll(1),
    "pad": lambda m, x: x + F.pad(x, (0, 0, 1, -1)),
    "cat": lambda m, x: torch.cat((x, x.flip(2)), dim=1)[:, ::2],
    "mean": lambda m, x: x - x.mean(1, keepdim=True),
    "mean of all": lambda m, x: x / x.abs().mean(),
    "mean over two dims": lambda m, x: x - x.mean((1, 2), keepdim=True),
    "sum by keyword": lambda m, x: x + torch.sum(x, dim=-2, keepdim=True),
    "max": lambda m, x: x - x.max(1, keepdim=True).values,
    "std": lambda m, x: x / x.std(dim=1, keepdim=True),
    "norm": lambda m, x: x / torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "normalize": lambda m, x: F.normalize(x),
    "softmax": lambda m, x: F.softmax(x, 1),
    "cumsum": lambda m, x: x.cumsum(1),
    "sort": lambda m, x: x.sort(1).values,
    "argmax": lambda m, x: x + x.argmax(1, keepdim=True),
    "top tokens": lambda m, x: x + x.topk(1, 1).values,
    "flip": lambda m, x: x + x.flip(1),
    "max pooling": lambda m, x: x + F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "mean pooling": lambda m, x: x + F.adaptive_avg_pool1d(x.transpose(1, 2), 1).transpose(1, 2),
    "convolution": lambda m, x: x + m.wide(x.transpose(1, 2)).transpose(1, 2),
    "batch norm": lambda m, x: m.rows(x.transpose(1, 2)).transpose(1, 2),
    "batch norm of flat rows": lambda m, x: m.rows(x.flatten(0, 1)).view_as(x),
    "mean of flat rows": lambda m, x: x - x.reshape(-1, WIDTH).mean(0),
    "flat rows by einops": lambda m, x: (x.flatten(0, 1) - x.flatten(0, 1).mean(0)).unflatten(0, (2, -1)),
    "arange": lambda m, x: x + m.table[torch.arange(x.shape[1])],
    "arange by size": lambda m, x: x + m.table[torch.arange(0, x.size(1))],
    "rows of a table": lambda m, x: x + m.table[: x.shape[1]],
    "rows of a table, shape unpacked": lambda m, x: x + m.table[None, : x.size()[-2], :],
    "counted": _counted,
    "attention by matmul": _attention,
    "attention": lambda m, x: x + F.scaled_dot_product_attention(x, x, x),
    "mixing by einsum": lambda m, x: x + torch.einsum("bsd,bse->bde", x, x).sum(1, keepdim=True),
    "loop": _looped,
    "chunks": lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "unbind": lambda m, x: torch.stack(x.unbind(1)[::-1], 1),
    "difference": lambda m, x: x + torch.diff(x, dim=1, prepend=x[:, :1]),
}


def _routed(m, x):
    rows = x.reshape(-1, WIDTH)
    chosen = (rows.sum(-1) > 0).nonzero().squeeze(-1)
    return torch.zeros_like(rows).index_add(0, chosen, 2 * rows[chosen]).view_as(x) + x


BY_TOKEN = {
    "softmax over features": lambda m, x: F.softmax(x, -1),
    "halves of features": lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "slice of features": lambda m, x: torch.cat((x[..., 2:], x[:, :, :2]), dim=2),
    "all tokens by slice": lambda m, x: x[:, : x.shape[1]],
    "view": lambda m, x: x.view(x.shape[0], x.shape[1], 2, -1).flip(2).flatten(2),
    "flat rows": lambda m, x: F.layer_norm(x.reshape(-1, WIDTH), (WIDTH,)).view_as(x),
    "convolution of one token": lambda m, x: m.narrow(x.transpose(1, 2)).transpose(1, 2),
    "mean over features": lambda m, x: x - x.mean(-1, keepdim=True),
    "mean over the batch": lambda m, x: x - x.mean(0),
    "transposed mean": lambda m, x: (x.transpose(0, 1) - x.transpose(0, 1).mean(2, keepdim=True)).transpose(0, 1),
    "top features": lambda m, x: x + x.topk(1, -1).values,
    "matmul": lambda m, x: x @ m.table[:WIDTH],
    "einsum": lambda m, x: x + torch.einsum("bsd,de->bse", x, m.table[:WIDTH]),
    "tokens routed by themselves": _routed,
    "in place": lambda m, x: x.clone().mul_(2).clamp_(-1, 1),
}

MIXED = {
    "normalize": lambda m, h: F.normalize(h, dim=-1),
    "softmax": lambda m, h: torch.softmax(h, h.ndim - 1),
    "largest": lambda m, h: h / h.abs().amax(dim=(-1,), keepdim=True),
    "top": lambda m, h: torch.where(h >= h.topk(4, dim=-1).values[..., -1:], h, 0.0),
    "mean": lambda m, h: h - h.mean(dim=2, keepdim=True),
    "mean of all": lambda m, h: h / h.abs().mean(),
    "layer norm": lambda m, h: F.layer_norm(h, (h.shape[-1],)),
    "rms norm": lambda m, h: F.rms_norm(h, (h.shape[-1],)),
    "roll": lambda m, h: h + h.roll(1, -1),
    "cumulative": lambda m, h: torch.cumsum(h, -1),
    "over heads": lambda m, h: F.softmax(h.view(2, 8, m.heads, -1), dim=2).flatten(2),
    "over heads first": lambda m, h: F.softmax(h.view(2, 8, m.heads, -1).transpose(1, 2), 1).transpose(1, 2).flatten(2),
    "flipped heads": lambda m, h: h.unflatten(-1, (m.heads, -1)).flip(-2).flatten(2),
}
BY_HEAD = {
    "head softmax": lambda m, h: F.softmax(h.view(2, 8, m.heads, -1), dim=-1).flatten(2),
    "head halves": lambda m, h: torch.cat(h.view(2, 8, m.heads, -1).chunk(2, -1)[::-1], -1).flatten(2),
    "head norm": lambda m, h: (
        F.normalize(h.unflatten(2, (m.heads, -1)).permute(0, 2, 1, 3), dim=3).transpose(1, 2).flatten(2)
    ),
    "over tokens": lambda m, h: h - h.mean(1, keepdim=True),
    "shifted": lambda m, h: h + F.pad(h, (0, 0, 1, -1)),
}


def _joined(q, k, v):
    return (q * torch.sigmoid(k) + v).flatten(2)


def _sizes(m, h):
    return [h.shape[-1] // 3] * 3


PARTS_FIRST = {
    "chunk": lambda m, h: _joined(*h.chunk(3, -1)),
    "split by width": lambda m, h: _joined(*h.split(h.shape[-1] // 3, dim=-1)),
    "split by sizes": lambda m, h: _joined(*torch.split(h, _sizes(m, h), dim=2)),
    "view": lambda m, h: _joined(*h.view(2, 8, 3, m.heads, -1).unbind(2)),
    "unflatten": lambda m, h: _joined(*(h.unflatten(-1, (3, m.heads, -1))[:, :, i] for i in range(3))),
    "as einops": lambda m, h: _joined(*h.reshape(2, 8, 3, m.heads, -1).permute(2, 0, 1, 3, 4)),
    "slices": lambda m, h: _joined(*(h[..., i * (h.shape[-1] // 3) : (i + 1) * (h.shape[-1] // 3)] for i in range(3))),
}
HEADS_FIRST = {
    "view": lambda m, h: _joined(*h.view(2, 8, m.heads, 3, -1).unbind(3)),
    "view and chunk": lambda m, h: _joined(*h.view(2, 8, m.heads, -1).chunk(3, -1)),
    "as einops": lambda m, h: _joined(*h.reshape(2, 8, m.heads, 3, -1).permute(3, 0, 1, 2, 4)),
}
