"""A decoder by its sizes: what an outline needs to know of a model. Torch-free.

Most language models differ in a dozen numbers: widths, heads, whether the feed-forward part is gated, experts. From
these follow the parameters and all work of a layer, without a recording of the model's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple


class Weight(NamedTuple):
    """One matrix or vector. shape: unsharded. tp_dim: the dim that tp splits; None: every rank has all of it.

    is_expert: whether it is of one expert, of which a layer has `Decoder.experts`.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    is_expert: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a decoder.

    Attributes:
        ffn: width of the feed-forward part; of one expert in a mixture. gated: whether it has a gate beside it.
        head_width: of one head; 0: hidden over heads.
        experts, chosen: in a layer, and for a token; 0 of a dense model. shared_ffn: width of what all tokens pass.
        positions: learned ones; 0: rotary. biases: whether linears and norms have them. centered: LayerNorm, not
            RMSNorm. tied: the head's weight is the embedding's.
        dense_layers: the first layers of a mixture that have no experts, of width `dense_ffn`.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_width: int = 0
    gated: bool = True
    experts: int = 0
    chosen: int = 0
    shared_ffn: int = 0
    positions: int = 0
    biases: bool = False
    centered: bool = False
    tied: bool = False
    dense_layers: int = 0
    dense_ffn: int = 0

    @property
    def width(self) -> int:
        """Of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Of all queries of a token."""
        return self.heads * self.width

    @property
    def kv_width(self) -> int:
        """Of all keys, or all values, of a token."""
        return self.kv_heads * self.width

    @property
    def gates(self) -> int:
        """Matrices that the input of the feed-forward part meets."""
        return 2 if self.gated else 1

    def layer_weights(self) -> Iterator[Weight]:
        """Of one layer of those with experts, where there are any."""
        norms = 2 if self.centered else 1
        yield from (Weight(f"norm{n}", (norms * self.hidden,)) for n in (1, 2))
        yield Weight("qkv", (self.query_width + 2 * self.kv_width, self.hidden), 0)
        yield Weight("proj", (self.hidden, self.query_width), 1)
        if self.biases:
            yield Weight("qkv_bias", (self.query_width + 2 * self.kv_width,), 0)
            yield Weight("biases", (2 * self.hidden,))
        for width, is_expert in ((self.ffn, bool(self.experts)), (self.shared_ffn, False)):
            if not width:
                continue
            prefix = "expert_" if is_expert else "shared_" if width == self.shared_ffn and self.experts else ""
            yield Weight(f"{prefix}fc1", (self.gates * width, self.hidden), 0, is_expert)
            yield Weight(f"{prefix}fc2", (self.hidden, width), 1, is_expert)
            if self.biases:
                yield Weight(f"{prefix}fc1_bias", (self.gates * width,), 0, is_expert)
        if self.experts:
            yield Weight("router", (self.experts, self.hidden))

    def first_weights(self) -> Iterator[Weight]:
        """Before the layers."""
        yield Weight("embedding", (self.vocab, self.hidden), 0)
        if self.positions:
            yield Weight("positions", (self.positions, self.hidden))

    def last_weights(self) -> Iterator[Weight]:
        """After the layers. A tied head has a copy of the embedding on another stage only."""
        yield Weight("norm", ((2 if self.centered else 1) * self.hidden,))
        yield Weight("head", (self.vocab, self.hidden), 0)

    @property
    def parameters(self) -> int:
        """Elements of all weights, ties once."""
        layer = sum(weight.numel * (self.experts if weight.is_expert else 1) for weight in self.layer_weights())
        ends = sum(weight.numel for weight in (*self.first_weights(), *self.last_weights()))
        return layer * self.layers + ends - (self.vocab * self.hidden if self.tied else 0)

    def forward_flops(self, sequence: int) -> float:
        """Of one sequence's forward matmuls, causal attention at half of its scores."""
        linears = 0.0
        for weight in self.layer_weights():
            if len(weight.shape) == 2:
                linears += weight.numel * (self.chosen if weight.is_expert else 1)
        attention = 2.0 * sequence * sequence * self.query_width  # two matmuls, half of the scores
        ends = 2.0 * sequence * self.vocab * self.hidden
        return self.layers * (2.0 * sequence * linears + attention) + ends


def decoder_of(config: Any) -> Decoder | None:
    """The outline of a config of `transformers`; None where it is no decoder that an outline can stand for."""
    kind = getattr(config, "model_type", "")
    if kind in _GPT2_LIKE:
        return _of_gpt2(config)
    if kind not in _LLAMA_LIKE:
        return None
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    expert_ffn = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return Decoder(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=expert_ffn if experts else config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        vocab=config.vocab_size,
        head_width=getattr(config, "head_dim", None) or 0,
        experts=experts,
        chosen=getattr(config, "num_experts_per_tok", 0) if experts else 0,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmo2")
_GPT2_LIKE = ("gpt2",)


def _of_gpt2(config: Any) -> Decoder:
    return Decoder(
        layers=config.n_layer,
        hidden=config.n_embd,
        ffn=config.n_inner or 4 * config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        vocab=config.vocab_size,
        gated=False,
        positions=config.n_positions,
        biases=True,
        centered=True,
        tied=True,
    )
