"""Published models whose sizes are known by name: `llama-3-8b`."""

from __future__ import annotations

from typing import Any

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": (
        "mixtral",
        dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32768,
        ),
    ),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        dict(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            max_position_embeddings=40960,
        ),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        dict(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            max_position_embeddings=4096,
        ),
    ),
    "llama-3-8b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        ),
    ),
    "llama-3-70b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=8192,
        ),
    ),
    "llama-3.1-405b": (
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=131072,
        ),
    ),
}
"""Sizes of published models. [The Llama 3 Herd of Models, arXiv:2407.21783, table 3; Mixtral, arXiv:2401.04088; Qwen3,
arXiv:2505.09388; DeepSeek-V3, arXiv:2412.19437; their config.json]"""
