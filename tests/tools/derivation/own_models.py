"""Models that no plan is for, each in the style of code that many people have: small, and with sizes that differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

T = torch.Tensor
VOCABULARY, LENGTH = 53, 11


class _Decoder(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, blocks: list[nn.Module], width: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: T) -> T:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _PreNorm(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, width: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), attn
        self.norm2, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: T) -> T:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: T) -> T:
        return self.down(F.gelu(self.up(x)))


# -- language models ---------------------------------------------------------------------------------------------------


class SplitAttention(nn.Module):
    """q, k and v in one weight, one after another: split by an attribute, viewed by heads, with a causal mask in a
    buffer."""

    def __init__(self, width: int, n_head: int):
        super().__init__()
        self.n_head, self.n_embd = n_head, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(32, 32).tril()[None, None], persistent=False)

    def forward(self, x: T) -> T:
        batch, length, _ = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = scores.softmax(dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, self.n_embd))


class TinyGpt(nn.Module):
    """Learned positions, blocks in a ModuleDict, a tied head: the small GPT of many tutorials."""

    def __init__(self, width: int = 32, n_head: int = 4, n_layer: int = 2):
        super().__init__()
        blocks = [_PreNorm(SplitAttention(width, n_head), Mlp(width, 4 * width), width) for _ in range(n_layer)]
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, width),
                wpe=nn.Embedding(32, width),
                h=nn.ModuleList(blocks),
                ln_f=nn.LayerNorm(width),
            )
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: T) -> T:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class Rms(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: T) -> T:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ComplexRotaryAttention(nn.Module):
    """Grouped key/value heads, which are repeated by an expand, and rotary factors as complex numbers."""

    def __init__(self, width: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, width // n_heads
        self.n_rep = n_heads // n_kv_heads
        self.wq = nn.Linear(width, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(width, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, width, bias=False)

    def forward(self, x: T, factors: T) -> T:
        batch, length, _ = x.shape
        q = self.turned(self.wq(x).view(batch, length, self.n_heads, self.head_dim), factors)
        k = self.turned(self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim), factors)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim)
        k, v = self.repeated(k), self.repeated(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))

    def repeated(self, x: T) -> T:
        batch, length, heads, width = x.shape
        return x[:, :, :, None, :].expand(batch, length, heads, self.n_rep, width).reshape(batch, length, -1, width)

    @staticmethod
    def turned(x: T, factors: T) -> T:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * factors[None, :, None, :]).flatten(3).type_as(x)


class Gated(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: T) -> T:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ComplexRotaryBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention, self.feed_forward = ComplexRotaryAttention(width, 12, 4), Gated(width, 2 * width + 8)
        self.attention_norm, self.ffn_norm = Rms(width), Rms(width)

    def forward(self, x: T, factors: T) -> T:
        x = x + self.attention(self.attention_norm(x), factors)
        return x + self.feed_forward(self.ffn_norm(x))


class ComplexRotary(nn.Module):
    """A Llama whose rotary factors are one table of complex numbers."""

    def __init__(self, width: int = 72, n_layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([ComplexRotaryBlock(width) for _ in range(n_layers)])
        self.norm, self.output = Rms(width), nn.Linear(width, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(32.0), 1e4 ** -torch.linspace(0, 1, width // 12 // 2))
        self.register_buffer("factors", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, ids: T) -> T:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.factors[: ids.shape[1]])
        return self.output(self.norm(x))


class GroupedQkv(nn.Module):
    """One weight of [groups, queries of a group + key + value, width]: every group is together."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.attn = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.proj = nn.Linear(width, width)

    def forward(self, x: T) -> T:
        batch, length, _ = x.shape
        queries = self.heads // self.groups
        qkv = self.attn(x).view(batch, length, self.groups, queries + 2, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((queries, 1, 1), dim=2)
        k = k.expand(batch, self.groups, queries, length, self.size)
        v = v.expand(batch, self.groups, queries, length, self.size)
        q, k, v = (t.reshape(batch, -1, length, self.size) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


def grouped_qkv() -> nn.Module:
    width = 48
    return _Decoder([_PreNorm(GroupedQkv(width, 12, 4), Mlp(width, 104), width) for _ in range(2)], width)


class LearnedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([0.3]))
        self.register_buffer("least", torch.tensor(0.5))

    def forward(self, x: T) -> T:
        return F.gelu(x) * (self.least + F.softplus(self.alpha))


class ActivatedMlp(Mlp):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.act = LearnedActivation()

    def forward(self, x: T) -> T:
        return self.down(self.act(self.up(x)))


def learned_activation() -> nn.Module:
    width = 32
    return _Decoder([_PreNorm(SplitAttention(width, 4), ActivatedMlp(width, 72), width) for _ in range(2)], width)


class StateMixer(nn.Module):
    """Heads that carry a state along the sequence, with B and C for each group of two: a packed projection, whose
    second part is convolved by the weight of a child and split again, a gate of low rank, and a number for each
    head."""

    def __init__(self, width: int, groups: int, size: int = 6, state: int = 5):
        super().__init__()
        self.heads, self.groups, self.inner, self.state = 2 * groups, groups, 2 * groups * size, state
        self.packed = self.inner + 2 * groups * state
        self.in_proj = nn.Linear(width, self.packed + self.heads, bias=False)
        self.conv = nn.Conv1d(self.packed, self.packed, 3, padding=2, groups=self.packed)
        self.decay = nn.Parameter(torch.rand(self.heads))
        self.gate_a, self.gate_b = nn.Linear(width, 4), nn.Linear(4, self.inner)
        self.norm, self.out_proj = Rms(size), nn.Linear(self.inner, width)

    def forward(self, hidden: T) -> T:
        batch, length, _ = hidden.shape
        packed, time = self.in_proj(hidden).split([self.packed, self.heads], dim=-1)
        packed = packed.transpose(1, 2)
        packed = F.conv1d(packed, self.conv.weight, self.conv.bias, padding=2, groups=packed.shape[1])[..., :length]
        width = self.groups * self.state
        x, b, c = F.silu(packed).transpose(1, 2).split([self.inner, width, width], dim=-1)
        x = x.view(batch, length, self.heads, -1) * F.softplus(time)[..., None]
        b, c = (t.view(batch, length, self.groups, -1).repeat_interleave(2, dim=2) for t in (b, c))
        steps = torch.arange(length)
        ages = (steps[:, None] - steps).clamp(min=0)[:, :, None] * F.softplus(self.decay)
        seen = torch.einsum("blhn,bshn->blsh", c, b) * torch.exp(-ages) * torch.ones(length, length).tril()[..., None]
        y = self.norm(torch.einsum("blsh,bshp->blhp", seen, x)).reshape(batch, length, -1)
        return self.out_proj(y * F.silu(self.gate_b(self.gate_a(hidden))))


def state_mixers() -> nn.Module:
    width = 28
    return _Decoder([_PreNorm(StateMixer(width, 4), Mlp(width, 72), width) for _ in range(2)], width)


class LstmModel(nn.Module):
    def __init__(self, width: int = 24):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: T) -> T:
        return self.head(self.lstm(self.embed(ids))[0])


# -- images ------------------------------------------------------------------------------------------------------------


class PatchAttention(nn.Module):
    """q, k and v from one view of [3, heads, width]."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: T) -> T:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


class Vision(nn.Module):
    """Patches by a convolution, a class token, learned positions, a head on the class token."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 13, width))
        self.blocks = nn.ModuleList([_PreNorm(PatchAttention(width, 4), Mlp(width, 72), width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: T) -> T:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class CosineAttention(PatchAttention):
    """Queries and keys of norm 1, as of Swin v2: the norm is expanded over the width of a head."""

    def forward(self, x: T) -> T:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class CosineVision(nn.Module):
    def __init__(self, width: int = 24):
        super().__init__()
        self.enter = nn.Linear(9, width)
        self.blocks = nn.ModuleList([_PreNorm(CosineAttention(width, 4), Mlp(width, 56), width) for _ in range(2)])

    def forward(self, patches: T) -> T:
        x = self.enter(patches)
        for block in self.blocks:
            x = block(x)
        return x


class ModulatedBlock(nn.Module):
    """Norms without weights whose shifts, scales and gates come from a condition."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn, self.mlp = PatchAttention(width, 4), Mlp(width, 72)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: T, condition: T) -> T:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Diffusion(nn.Module):
    """A diffusion transformer: noisy tokens, and a time that modulates each block."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.enter, self.time = nn.Linear(6, width), Mlp(width, 56)
        self.blocks = nn.ModuleList([ModulatedBlock(width) for _ in range(2)])
        self.leave = nn.Linear(width, 6)

    def forward(self, x: T, time: T) -> T:
        frequencies = torch.exp(-torch.arange(16.0) / 3)
        angles = time[:, None] * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.leave(x)


class ConvolutionalAttention(nn.Module):
    """Attention of a U-Net over the pixels of a feature map, between convolutions."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (channels // heads) ** -0.5
        self.norm = nn.GroupNorm(4, channels)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: T) -> T:
        batch, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            linear(tokens).view(batch, height * width, self.heads, -1).permute(0, 2, 1, 3)
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(self.scale).softmax(-1)
        y = torch.einsum("bhqk,bhkd->bhqd", weights, v).permute(0, 2, 1, 3).reshape(batch, height * width, -1)
        return x + self.to_out(y).transpose(1, 2).reshape(batch, channels, height, width)


class UNet(nn.Module):
    def __init__(self, channels: int = 24):
        super().__init__()
        self.down = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.middle = ConvolutionalAttention(channels, 4)
        self.up = nn.ConvTranspose2d(channels, 3, 2, stride=2)

    def forward(self, image: T) -> T:
        return self.up(F.silu(self.middle(F.silu(self.down(image)))))


class Mixer(nn.Module):
    """MLPs over the patches in turn with MLPs over the channels."""

    def __init__(self, patches: int = 14, width: int = 20):
        super().__init__()
        self.enter = nn.Linear(9, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(4)])
        self.tokens = nn.ModuleList([Mlp(patches, 26) for _ in range(2)])
        self.channels = nn.ModuleList([Mlp(width, 36) for _ in range(2)])
        self.head = nn.Linear(width, 7)

    def forward(self, patches: T) -> T:
        x = self.enter(patches)
        for index, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * index + 1](x))
        return self.head(x.mean(1))


# -- PyTorch's own -----------------------------------------------------------------------------------------------------


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True), 2)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 40, dropout=0.0, batch_first=True), 2)


# -- inputs ------------------------------------------------------------------------------------------------------------


def ids() -> dict[str, T]:
    return {"ids": torch.randint(VOCABULARY, (2, LENGTH))}


def image() -> dict[str, T]:
    return {"image": torch.randn(2, 3, 12, 16)}


def noisy_tokens() -> dict[str, T]:
    return {"x": torch.randn(2, 9, 6), "time": torch.rand(2)}


def patches() -> dict[str, T]:
    return {"patches": torch.randn(2, 14, 9)}


def tokens() -> dict[str, T]:
    return {"src": torch.randn(2, 7, 24)}


def tokens_and_memory() -> dict[str, T]:
    return {"tgt": torch.randn(2, 7, 24), "memory": torch.randn(2, 5, 24)}
