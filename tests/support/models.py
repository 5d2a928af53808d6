"""Tiny stock models of every shipped family, with asymmetric sizes and perturbed 1-D parameters."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

COMMON = dict(vocab_size=67, hidden_size=48, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GQA = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=6, intermediate_size=72, max_position_embeddings=64)
UNGROUPED = dict(num_attention_heads=8, intermediate_size=72, max_position_embeddings=64)

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**GQA, "attention_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GQA, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**GQA}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GQA}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GQA, "sliding_window": 5, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GQA, "sliding_window": 5, "query_pre_attn_scalar": 12}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**{k: v for k, v in GQA.items() if k != "head_dim"}}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**{k: v for k, v in GQA.items() if k != "head_dim"}}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**UNGROUPED, "n_inner": 72, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**UNGROUPED, "attention_bias": True}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**UNGROUPED, "ffn_dim": 72, "dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 48},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**UNGROUPED, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2},
    ),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> nn.Module:
    """A stock model in training mode, without dropout."""
    import transformers

    config_name, class_name, sizes = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**COMMON, **sizes, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(config).train()
    perturb(model)
    model.to(dtype)
    if dtype == torch.float64:
        keep_float64(model)
    return model


def perturb(model: nn.Module) -> None:
    """Change norms and biases from ones and zeros, which would hide missing terms and permutations."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(1.5)


def keep_float64(model: nn.Module) -> None:
    """RMSNorms of `transformers` round to float32 inside: compute them in float64, on both sides."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            gemma = type(module).__name__.startswith("Gemma")
            module.forward = MethodType(_gemma_norm if gemma else _rms_norm, module)


def _eps(module: Any) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _eps(self)))


def _gemma_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (1.0 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _eps(self)))


def tiny_batch(
    vocab_size: int = 67, batch: int = 2, length: int = 9, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) [batch, length] with some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab_size, (batch, length), generator=generator)
    ids[0, 1] = ids[-1, -1] = 0  # the padding id, whose row gets no gradient
    labels = torch.randint(0, vocab_size, (batch, length), generator=generator)
    labels[0, :2] = -100
    return ids, labels
