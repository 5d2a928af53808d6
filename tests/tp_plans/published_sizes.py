"""Sizes of published models, by name, for each family with a shipped plan.

Sources: the `config.json` of each model on the Hugging Face Hub. Only what decides the shapes of parameters is here.
"""

from __future__ import annotations

from typing import Any

Published = dict[str, tuple[str, dict[str, Any]]]


def _decoder(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return sizes | {"intermediate_size": inner, "vocab_size": vocabulary} | more


def _ungrouped(layers: int, hidden: int, heads: int, inner: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = _decoder(layers, hidden, heads, heads, inner, vocabulary, **more)
    del sizes["num_key_value_heads"]
    return sizes


def _gpt2(layers: int, hidden: int, heads: int, vocabulary: int = 50257, **more: Any) -> dict[str, Any]:
    return dict(n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary) | more


def _t5(layers: int, hidden: int, heads: int, width: int, inner: int, vocabulary: int = 32128) -> dict[str, Any]:
    sizes = dict(num_layers=layers, num_decoder_layers=layers, d_model=hidden, num_heads=heads, d_kv=width, d_ff=inner)
    return sizes | {"vocab_size": vocabulary}


def _bart(layers: int, hidden: int, heads: int, inner: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"d_model": hidden, "vocab_size": vocabulary}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": inner}
    return sizes | more


def _experts(count: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    return dict(num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=width) | more


def _local(count: int, chosen: int, **more: Any) -> dict[str, Any]:
    return dict(num_local_experts=count, num_experts_per_tok=chosen) | more


def _routed(count: int, shared: int, chosen: int, width: int, dense: int, **more: Any) -> dict[str, Any]:
    sizes = dict(
        n_routed_experts=count, n_shared_experts=shared, num_experts_per_tok=chosen, moe_intermediate_size=width
    )
    return sizes | {"first_k_dense_replace": dense} | more


def _falcon(layers: int, hidden: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocabulary) | more


_LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_GROUPED = {"new_decoder_architecture": True, "multi_query": True}
_LINEAR = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)

DENSE: Published = {
    "llama-2-7b": ("llama", _decoder(32, 4096, 32, 32, 11008, 32000)),
    "llama-2-13b": ("llama", _decoder(40, 5120, 40, 40, 13824, 32000)),
    "llama-2-70b": ("llama", _decoder(80, 8192, 64, 8, 28672, 32000)),
    "llama-3-8b": ("llama", _decoder(32, 4096, 32, 8, 14336, 128256)),
    "llama-3.1-70b": ("llama", _decoder(80, 8192, 64, 8, 28672, 128256)),
    "llama-3.1-405b": ("llama", _decoder(126, 16384, 128, 8, 53248, 128256)),
    "llama-3.2-1b": ("llama", _decoder(16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True)),
    "llama-3.2-3b": ("llama", _decoder(28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True)),
    "tinyllama-1.1b": ("llama", _decoder(22, 2048, 32, 4, 5632, 32000)),
    "smollm2-135m": ("llama", _decoder(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True)),
    "mistral-7b": ("mistral", _decoder(32, 4096, 32, 8, 14336, 32000)),
    "mistral-nemo-12b": ("mistral", _decoder(40, 5120, 32, 8, 14336, 131072, head_dim=128)),
    "mistral-small-24b": ("mistral", _decoder(40, 5120, 32, 8, 32768, 131072, head_dim=128)),
    "qwen2-0.5b": ("qwen2", _decoder(24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True)),
    "qwen2-7b": ("qwen2", _decoder(28, 3584, 28, 4, 18944, 152064)),
    "qwen2-72b": ("qwen2", _decoder(80, 8192, 64, 8, 29568, 152064)),
    "qwen2.5-1.5b": ("qwen2", _decoder(28, 1536, 12, 2, 8960, 151936, tie_word_embeddings=True)),
    "qwen2.5-32b": ("qwen2", _decoder(64, 5120, 40, 8, 27648, 152064)),
    "qwen3-0.6b": ("qwen3", _decoder(28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True)),
    "qwen3-8b": ("qwen3", _decoder(36, 4096, 32, 8, 12288, 151936, head_dim=128)),
    "qwen3-32b": ("qwen3", _decoder(64, 5120, 64, 8, 25600, 151936, head_dim=128)),
    "gemma-2b": ("gemma", _decoder(18, 2048, 8, 1, 16384, 256000, head_dim=256)),
    "gemma-7b": ("gemma", _decoder(28, 3072, 16, 16, 24576, 256000, head_dim=256)),
    "gemma-2-2b": ("gemma2", _decoder(26, 2304, 8, 4, 9216, 256000, head_dim=256)),
    "gemma-2-9b": ("gemma2", _decoder(42, 3584, 16, 8, 14336, 256000, head_dim=256)),
    "gemma-2-27b": ("gemma2", _decoder(46, 4608, 32, 16, 36864, 256000, head_dim=128)),
    "gemma-3-1b": ("gemma3_text", _decoder(26, 1152, 4, 1, 6912, 262144, head_dim=256)),
    "gemma-3-12b": ("gemma3_text", _decoder(48, 3840, 16, 8, 15360, 262208, head_dim=256)),
    "gemma-3-27b": ("gemma3_text", _decoder(62, 5376, 32, 16, 21504, 262208, head_dim=128)),
    "phi-2": ("phi", _decoder(32, 2560, 32, 32, 10240, 51200)),
    "phi-3-mini": ("phi3", _decoder(32, 3072, 32, 32, 8192, 32064)),
    "phi-3-medium": ("phi3", _decoder(40, 5120, 40, 10, 17920, 32064)),
    "phi-4": ("phi3", _decoder(40, 5120, 40, 10, 17920, 100352)),
    "gpt2": ("gpt2", _gpt2(12, 768, 12)),
    "gpt2-medium": ("gpt2", _gpt2(24, 1024, 16)),
    "gpt2-large": ("gpt2", _gpt2(36, 1280, 20)),
    "gpt2-xl": ("gpt2", _gpt2(48, 1600, 25)),
    "falcon-7b": ("falcon", _falcon(32, 4544, 71, 65024)),
    "falcon-40b": ("falcon", _falcon(60, 8192, 128, 65024, num_kv_heads=8, **_GROUPED)),
    "falcon-180b": ("falcon", _falcon(80, 14848, 232, 65024, num_kv_heads=8, **_GROUPED)),
    "glm-4-9b": ("glm", _decoder(40, 4096, 32, 2, 13696, 151552, head_dim=128)),
    "glm-4-32b": ("glm4", _decoder(61, 6144, 48, 2, 23040, 151552, head_dim=128)),
    "olmo-7b": ("olmo", _decoder(32, 4096, 32, 32, 11008, 50304)),
    "olmo-2-13b": ("olmo2", _decoder(40, 5120, 40, 40, 13824, 100352)),
    "olmo-2-32b": ("olmo2", _decoder(64, 5120, 40, 8, 27648, 100352)),
    "olmo-3-7b": ("olmo3", _decoder(32, 4096, 32, 32, 11008, 100278)),
    "granite-3-2b": ("granite", _decoder(40, 2048, 32, 8, 8192, 49155, tie_word_embeddings=True)),
    "granite-3-8b": ("granite", _decoder(40, 4096, 32, 8, 12800, 49155, tie_word_embeddings=True)),
    "starcoder2-3b": ("starcoder2", _decoder(30, 3072, 24, 2, 12288, 49152)),
    "starcoder2-15b": ("starcoder2", _decoder(40, 6144, 48, 4, 24576, 49152)),
    "starcoder-15b": ("gpt_bigcode", _gpt2(40, 6144, 48, 49152, n_inner=24576, multi_query=True)),
    "command-r": ("cohere", _decoder(40, 8192, 64, 64, 22528, 256000)),
    "command-r-plus": ("cohere", _decoder(64, 12288, 96, 8, 33792, 256000, use_qk_norm=True)),
    "command-r7b": ("cohere2", _decoder(32, 4096, 32, 8, 14336, 256000)),
    "opt-125m": (
        "opt",
        dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, ffn_dim=3072, vocab_size=50272),
    ),
    "opt-66b": (
        "opt",
        dict(num_hidden_layers=64, hidden_size=9216, num_attention_heads=72, ffn_dim=36864, vocab_size=50272),
    ),
    "bloom-560m": ("bloom", dict(n_layer=24, hidden_size=1024, n_head=16, vocab_size=250880)),
    "bloom-176b": ("bloom", dict(n_layer=70, hidden_size=14336, n_head=112, vocab_size=250880)),
    "gpt-neox-20b": ("gpt_neox", _ungrouped(44, 6144, 64, 24576, 50432)),
    "pythia-12b": ("gpt_neox", _ungrouped(36, 5120, 40, 20480, 50688)),
    "gpt-j-6b": ("gptj", _gpt2(28, 4096, 16, 50400, rotary_dim=64)),
    "gpt-neo-2.7b": (
        "gpt_neo",
        dict(hidden_size=2560, num_layers=32, num_heads=20, attention_types=[[["global", "local"], 16]]),
    ),
    "mpt-7b": ("mpt", dict(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432)),
    "mpt-30b": ("mpt", dict(d_model=7168, n_heads=64, n_layers=48, vocab_size=50432)),
    "mamba-2.8b": ("mamba", dict(hidden_size=2560, num_hidden_layers=64, state_size=16, vocab_size=50280)),
    "mamba2-2.7b": (
        "mamba2",
        dict(hidden_size=2560, num_hidden_layers=64, num_heads=80, head_dim=64, n_groups=1, vocab_size=50288),
    ),
    "codestral-mamba-7b": (
        "mamba2",
        dict(hidden_size=4096, num_hidden_layers=64, num_heads=128, head_dim=64, n_groups=8, vocab_size=32768),
    ),
    "bamba-9b": (
        "bamba",
        _decoder(
            32, 4096, 32, 8, 14336, 128256, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1
        )
        | {"attn_layer_indices": [9, 18, 27]},
    ),
    "stablelm-3b": ("stablelm", _decoder(32, 2560, 32, 32, 6912, 50304)),
    "stablelm-2-12b": ("stablelm", _decoder(40, 5120, 32, 8, 13824, 100352, qk_layernorm=False)),
    "smollm3-3b": ("smollm3", _decoder(36, 2048, 16, 4, 11008, 128256)),
    "minitron-4b": ("nemotron", _decoder(32, 3072, 24, 8, 9216, 256000, head_dim=128)),
}
"""Decoders without experts."""

MIXTURES: Published = {
    "mixtral-8x7b": ("mixtral", _decoder(32, 4096, 32, 8, 14336, 32000, **_local(8, 2))),
    "mixtral-8x22b": ("mixtral", _decoder(56, 6144, 48, 8, 16384, 32768, **_local(8, 2))),
    "gpt-oss-20b": ("gpt_oss", _decoder(24, 2880, 64, 8, 2880, 201088, head_dim=64, **_local(32, 4))),
    "gpt-oss-120b": ("gpt_oss", _decoder(36, 2880, 64, 8, 2880, 201088, head_dim=64, **_local(128, 4))),
    "qwen3-30b-a3b": ("qwen3_moe", _decoder(48, 2048, 32, 4, 6144, 151936, head_dim=128, **_experts(128, 8, 768))),
    "qwen3-235b-a22b": ("qwen3_moe", _decoder(94, 4096, 64, 4, 12288, 151936, head_dim=128, **_experts(128, 8, 1536))),
    "qwen1.5-moe-a2.7b": (
        "qwen2_moe",
        _decoder(24, 2048, 16, 16, 5632, 151936, **_experts(60, 4, 1408, shared_expert_intermediate_size=5632)),
    ),
    "qwen2-57b-a14b": (
        "qwen2_moe",
        _decoder(28, 3584, 28, 4, 18944, 151936, **_experts(64, 8, 2560, shared_expert_intermediate_size=20480)),
    ),
    "qwen3-next-80b-a3b": (
        "qwen3_next",
        _decoder(48, 2048, 16, 2, 5120, 151936, head_dim=256, **_LINEAR)
        | _experts(512, 10, 512, shared_expert_intermediate_size=512),
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        _decoder(27, 2048, 16, 16, 10944, 102400, q_lora_rank=None, **_LATENT, **_routed(64, 2, 6, 1408, 1)),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        _decoder(61, 7168, 128, 128, 18432, 129280, q_lora_rank=1536, **_LATENT, **_routed(256, 1, 8, 2048, 3)),
    ),
    "glm-4.5-air": (
        "glm4_moe",
        _decoder(46, 4096, 96, 8, 10944, 151552, head_dim=128, **_routed(128, 1, 8, 1408, 1)),
    ),
    "olmoe-1b-7b": ("olmoe", _decoder(16, 2048, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8)),
    "phi-3.5-moe": ("phimoe", _decoder(32, 4096, 32, 8, 6400, 32064, **_local(16, 2))),
    "granite-3-1b-a400m": ("granitemoe", _decoder(24, 1024, 16, 8, 512, 49155, **_local(32, 8))),
    "jamba-v0.1": ("jamba", _decoder(32, 4096, 32, 8, 14336, 65536, num_experts=16, num_experts_per_tok=2)),
    "llama-4-scout": (
        "llama4_text",
        _decoder(48, 5120, 40, 8, 8192, 202048, head_dim=128, intermediate_size_mlp=16384, **_local(16, 1)),
    ),
    "llama-4-maverick": (
        "llama4_text",
        _decoder(48, 5120, 40, 8, 8192, 202048, head_dim=128, intermediate_size_mlp=16384, **_local(128, 1))
        | {"interleave_moe_layer_step": 2},
    ),
    "minimax-m2": ("minimax_m2", _decoder(62, 3072, 48, 8, 1536, 200064, head_dim=128, **_local(256, 8))),
}
"""Decoders with experts."""

OTHERS: Published = {
    "t5-small": ("t5", _t5(6, 512, 8, 64, 2048)),
    "t5-base": ("t5", _t5(12, 768, 12, 64, 3072)),
    "t5-3b": ("t5", _t5(24, 1024, 32, 128, 16384)),
    "t5-11b": ("t5", _t5(24, 1024, 128, 128, 65536)),
    "mt5-xxl": ("mt5", _t5(24, 4096, 64, 64, 10240, 250112)),
    "bert-base": ("bert", _ungrouped(12, 768, 12, 3072, 30522)),
    "bert-large": ("bert", _ungrouped(24, 1024, 16, 4096, 30522)),
    "roberta-large": ("roberta", _ungrouped(24, 1024, 16, 4096, 50265)),
    "modernbert-large": ("modernbert", _ungrouped(28, 1024, 16, 2624, 50368)),
    "bart-large": ("bart", _bart(12, 1024, 16, 4096, 50265)),
    "opus-mt-en-de": ("marian", _bart(6, 512, 8, 2048, 58101, pad_token_id=58100, decoder_start_token_id=58100)),
    "whisper-tiny": ("whisper", _bart(4, 384, 6, 1536, 51865)),
    "whisper-small": ("whisper", _bart(12, 768, 12, 3072, 51865)),
    "whisper-large-v3": ("whisper", _bart(32, 1280, 20, 5120, 51866, num_mel_bins=128)),
    "vit-base": ("vit", dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)),
    "vit-huge": ("vit", dict(hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120)),
    "swin-tiny": ("swin", dict(embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24])),
    "swin-base": ("swin", dict(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])),
}
"""Encoders, pairs of encoder and decoder, and models of images and sound."""

PUBLISHED: Published = {**DENSE, **MIXTURES, **OTHERS}
