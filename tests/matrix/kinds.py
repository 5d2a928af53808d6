"""Kinds of models, small and in float64, with batches of eight rows and the loss that training alone takes.

Sizes are asymmetric in `llama`. In `llama_equal` they coincide: rows = layers = heads = width of a head, and what tells
dims apart by their sizes is lost; `llama_published` has the ratios of Llama 3: four heads to one of keys and
values, 3.5 times the width in the MLP.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import load_plan, next_tokens
from tests.support.models import COMMON, SHIPPED, keep_float64, perturb, tiny_model

T = torch.Tensor
ROWS, LENGTH, VOCAB = 8, 12, 67
IGNORED = -100


@dataclass(frozen=True)
class Kind:
    """A model and what it is trained on.

    Attributes:
        build: makes the model; keywords are config fields that differ.
        batch: number of the batch -> (inputs, targets), of eight rows.
        plan: for `parallelize_model`; None: by the model.
        refused: slugs by which axes are refused for this kind whatever the feature, each with the reason.
        deep: config fields with which it has four layers.
        traits: what features ask: `causal`, `text`, `stock` (of transformers), `experts`, `recurrent`, `vision`.
    """

    build: Callable[..., nn.Module]
    batch: Callable[[int], tuple[dict[str, T], T]]
    plan: Any = None
    traits: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    deep: dict[str, int] = field(default_factory=lambda: {"num_hidden_layers": 4})

    def labels(self, number: int) -> T:
        """What the stock model takes as `labels`: token ids, which causal models shift, or classes."""
        inputs, targets = self.batch(number)
        if "causal" not in self.traits:
            return targets
        labels = inputs["input_ids"].clone()
        labels[:, : LENGTH // 3] = IGNORED
        return labels


def logits_of(output: Any) -> Any:
    return output.logits if hasattr(output, "logits") else output


def summed_loss(output: Any, targets: T) -> T:
    """The sum of the cross entropy over all targets, unsharded; logits of a learned prompt come before those of
    tokens."""
    logits = logits_of(output)
    if targets.ndim > 1:
        logits = logits[:, -targets.shape[1] :]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def _ids(number: int, rows: int = ROWS, length: int = LENGTH) -> T:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(100 + number))


def _text(number: int) -> tuple[dict[str, T], T]:
    """Ids and the next tokens; the first third is ignored, and more of the first rows, so that data ranks differ."""
    ids = _ids(number)
    targets = next_tokens(ids)
    targets[:, : LENGTH // 3] = IGNORED
    targets[:3, : LENGTH // 2] = IGNORED
    return {"input_ids": ids}, targets


def _pair(number: int) -> tuple[dict[str, T], T]:
    """For an encoder and a decoder, with sequences of different lengths."""
    targets = _ids(number + 50)
    decoder = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
    targets = targets.clone()
    targets[:3, : LENGTH // 2] = IGNORED
    return {"input_ids": _ids(number, length=LENGTH + 4), "decoder_input_ids": decoder}, targets


def _images(number: int) -> tuple[dict[str, T], T]:
    generator = torch.Generator().manual_seed(200 + number)
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels}, torch.randint(0, 6, (ROWS,), generator=generator)


def _family(name: str, **fixed: Any) -> Callable[..., nn.Module]:
    return lambda **overrides: tiny_model(name, torch.float64, **{**fixed, **overrides})


def _shipped(name: str, **fixed: Any) -> Callable[..., nn.Module]:
    def build(**overrides: Any) -> nn.Module:
        import transformers

        config_name, class_name, sizes = SHIPPED[name]
        config = getattr(transformers, config_name)(**{**COMMON, **sizes, **fixed, **overrides})
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(config).train().double()
        perturb(model)
        keep_float64(model)
        return model

    return build


class _Attention(nn.Module):
    """As many people write it: the width comes from the input, for views of heads and for a scale."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: T) -> T:
        rows, length, width = x.shape
        query, key, value = (
            linear(x).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(rows, length, width)) * (4 * width**-0.5)


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: T) -> T:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = _Attention(width, heads), _MLP(width, hidden)

    def forward(self, x: T) -> T:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class OwnModel(nn.Module):
    """A small decoder that is not from any library."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, hidden: int = 56):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(_Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: T, positions: T | None = None) -> T:
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


OWN_PLAN = """
schema_version: 1
sizes: {heads: 4}
sequence_parallel: {layers: blocks, leave: norm}
tensor_parallel:
  embed: embedding
  position: replicate
  blocks.*:
    norm_1: sequence
    attention: gather
    attention.{query,key,value}: colwise(heads)
    attention.out: rowwise(heads)
    norm_2: sequence
    mlp: gather
    mlp.{up,gate}: colwise
    mlp.down: rowwise
  norm: sequence
  head: colwise(output=vocabulary)
local:
  blocks.*.attention: {heads: heads}
local_inputs:
  blocks.*.attention: {x: "width(heads, elsewhere=full)"}
positions: positions
packing: none
attention: {blocks.*.attention: causal}
pipeline: {layers: blocks}
"""


def _own(**overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    model = OwnModel(**overrides).train().double()
    perturb(model)
    return model


STOCK_TEXT = frozenset({"causal", "stock", "text"})

KINDS: dict[str, Kind] = {
    "llama": Kind(_family("llama"), _text, traits=STOCK_TEXT),
    "llama_equal": Kind(
        _family(
            "llama",
            hidden_size=32,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            intermediate_size=64,
            attention_bias=False,
        ),
        _text,
        traits=STOCK_TEXT | {"sizes"},
        deep={},
    ),
    "llama_published": Kind(
        _family(
            "llama",
            hidden_size=128,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=448,
            attention_bias=False,
        ),
        _text,
        traits=STOCK_TEXT | {"sizes"},
    ),
    "gpt2": Kind(_family("gpt2"), _text, traits=STOCK_TEXT),
    "t5": Kind(
        _shipped("t5"),
        _pair,
        traits=frozenset({"stock", "encoder-decoder"}),
        deep={"num_hidden_layers": 4, "num_decoder_layers": 4},
        refused={"no-attention": "a decoder that attends to the encoder's tokens has two sequences"},
    ),
    "mixture": Kind(_family("qwen3_moe", mlp_only_layers=[]), _text, traits=STOCK_TEXT | {"experts"}),
    "hybrid": Kind(_shipped("bamba", mamba_chunk_size=16), _text, traits=STOCK_TEXT | {"recurrent"}),
    "vit": Kind(
        _shipped("vit", num_hidden_layers=2, num_labels=6),
        _images,
        traits=frozenset({"stock", "vision"}),
        refused={
            "no-attention": "images are no sequences that cp could split",
            "no-vocabulary-output": "a classifier has no vocabulary whose logits could stay sharded",
        },
    ),
    "own": Kind(_own, _text, traits=frozenset({"causal", "text", "own"}), plan="own", deep={"layers": 4}),
}


def plan_of(kind: Kind, folder: str) -> Any:
    """The plan to pass: a model of one's own brings a file, which no rank sees half written."""
    if kind.plan != "own":
        return kind.plan
    path = Path(folder) / "own.yaml"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(OWN_PLAN)
        os.replace(file.name, path)
    return load_plan(str(path))
