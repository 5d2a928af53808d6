"""A decoder that calls `flex_attention`, and the same attention written with dense masks: the reference.

PyTorch's `flex_attention` has no gradients on CPUs, so that the reference is written by hand, without `torch.vmap`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from parallelize import build_mesh, full_gradients, parallelize_model
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.schema import Plan
from tests.support.parity import worst
from tests.support.threads import run_ranks

T = torch.Tensor
WIDTH, HEADS, KEY_HEADS, VOCAB, LENGTH, ROWS = 36, 12, 6, 41, 13, 4

PLAN = """
schema_version: 1
sizes: {heads: 12, kv_heads: 6}
sequence_parallel: {layers: layers, leave: norm}
tensor_parallel:
  embed: embedding
  layers.*:
    norm1: sequence
    attention: gather(x)
    attention.wq: colwise(heads)
    attention.{wk,wv}: colwise(kv_heads)
    attention.slopes?: replicate(gradient=partial)
    attention.sinks?: shard(0, unit=heads*1)
    attention.wo: rowwise(heads)
    norm2: sequence
    up: colwise
    down: rowwise
  norm: sequence
  head: colwise(output=vocabulary)
pipeline: {first: [embed], layers: layers, last: [norm, head]}
zero: {units: [layers.*]}
recompute: {units: [layers.*]}
attention: {layers.*.attention: causal}
positions: positions
"""


class FlexAttention(nn.Module):
    """Calls the function for another module, as that of torchtitan does."""

    function: Any = staticmethod(flex_attention)

    def forward(self, q: T, k: T, v: T, **options: Any) -> Any:
        return self.function(q, k, v, **options)


class Attention(nn.Module):
    """With learned slopes (ALiBi), sinks, or a soft cap."""

    def __init__(self, slopes: bool, sinks: bool, cap: float, wrapped: bool):
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // HEADS * KEY_HEADS, bias=False) for _ in range(2))
        self.slopes = nn.Parameter(torch.randn(HEADS) / 3) if slopes else None
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None
        self.cap = cap
        self.inner_attention = FlexAttention() if wrapped else None
        self.is_dense = False

    def forward(self, x: T, block_mask: Any) -> T:
        rows, length, _ = x.shape
        q, k, v = (p(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        slopes, cap = self.slopes, self.cap

        def changed(score: T, b: T, h: T, i: T, j: T) -> T:
            score = cap * torch.tanh(score / cap) if cap else score
            return score if slopes is None else score + slopes[h] * (j - i)

        score_mod = changed if cap or slopes is not None else None
        options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True}
        if self.sinks is not None:
            options["return_aux"] = AuxRequest(lse=True)
        attend = dense if self.is_dense else self.inner_attention or flex_attention
        out = attend(q, k, v, **options)
        if self.sinks is not None:
            out, aux = out
            out = out * (aux.lse - self.sinks.view(1, -1, 1)).sigmoid().unsqueeze(-1)
        return self.wo(out.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention(**options)
        self.norm2, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: T, block_mask: Any) -> T:
        x = x + self.attention(self.norm1(x), block_mask)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Is called with a block mask of all tokens, or with the documents of which it makes one."""

    def __init__(self, slopes: bool = True, sinks: bool = False, cap: float = 0.0, wrapped: bool = False):
        super().__init__()
        options: dict[str, Any] = {"slopes": slopes, "sinks": sinks, "cap": cap, "wrapped": wrapped}
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, input_ids: T, block_mask: Any = None, documents: T | None = None, positions: T | None = None
    ) -> T:
        if documents is not None:
            block_mask = mask_of(documents)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, block_mask)
        return self.head(self.norm(x))


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(**options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def causal_documents(documents: T) -> Callable[..., T]:
    def visible(b: T, h: T, i: T, j: T) -> T:
        return (i >= j) & (documents[b, i] == documents[b, j])

    return visible


def mask_of(documents: T, block_size: int = 4) -> Any:
    rows, length = documents.shape
    mask_mod = causal_documents(documents)
    return create_block_mask(mask_mod, rows, None, length, length, str(documents.device), BLOCK_SIZE=block_size)


def dense(
    q: T, k: T, v: T, score_mod: Any = None, block_mask: Any = None, enable_gqa: bool = True, return_aux: Any = None
) -> Any:
    """`flex_attention` with indices that broadcast over all scores."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    b, h, i, j = (
        torch.arange(size).view([-1 if place == dim else 1 for place in range(4)])
        for dim, size in enumerate(scores.shape)
    )
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(b, h, i, j), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return out if return_aux is None else (out, type("Aux", (), {"lse": scores.logsumexp(-1)}))


def batch() -> dict[str, T]:
    """Rows of documents of different lengths; targets of which some are ignored."""
    generator = torch.Generator().manual_seed(7)
    ids, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    targets[:, :3] = -100
    documents = torch.stack([torch.arange(LENGTH) // length for length in (5, 8, 3, LENGTH)])
    return {"input_ids": ids, "targets": targets, "documents": documents}


def alone(model: Decoder, make_mask: Callable[[T], Any] = mask_of) -> dict[str, T]:
    """Loss and gradients with dense attention, in one process."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.attention.is_dense = True
    data = batch()
    logits = model(data["input_ids"], make_mask(data["documents"]))
    loss = F.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_mesh(
    model: Decoder,
    sizes: dict[str, int],
    inside: bool = False,
    plan: str | Plan = PLAN,
    make_mask: Callable[[T], Any] = mask_of,
    **options: Any,
) -> dict[str, T]:
    """The same on a mesh; call it on every rank. inside: the forward makes the mask."""
    mesh = build_mesh("cpu", **sizes)
    parsed = parse_plan(plan) if isinstance(plan, str) else plan
    parallel = parallelize_model(copy.deepcopy(model), mesh, parsed, **options)
    data = batch()
    if sizes.get("dp", 1) > 1:
        data = {name: x.chunk(sizes["dp"])[mesh.get_local_rank("dp")] for name, x in data.items()}
    documents = data.pop("documents")
    masked = {"documents": documents} if inside else {"block_mask": make_mask(documents)}
    loss = parallel.step(**data, **masked)
    gradients = full_gradients(parallel.module) if options.get("zero", 0) < 2 else {}
    return {"loss": loss.detach()} | gradients


def worst_on(model: Decoder, sizes: dict[str, int], **options: Any) -> tuple[float, str]:
    """The largest relative error over all ranks, and where it is."""
    expected = alone(model, options.get("make_mask", mask_of))
    world = torch.tensor([*sizes.values()]).prod().item()
    results = run_ranks(int(world), lambda rank: on_mesh(model, sizes, **options))
    return max(worst(result, {name: expected[name] for name in result}) for result in results)
