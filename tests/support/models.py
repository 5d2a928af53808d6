"""Tiny stock models of every shipped family, with asymmetric sizes and perturbed 1-D parameters."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.tools.verification.precision import InFloat64
from tests.support import device

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

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=96)
SIX = {**GQA, **EXPERTS, "num_experts": 6}
LOCAL_SIX = {**GQA, **EXPERTS, "num_local_experts": 6}
ROUTED_SIX = {**GQA, **EXPERTS, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1}
ROUTED_SIX |= {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
LATENT = dict(q_lora_rank=20, kv_lora_rank=16, qk_rope_head_dim=6, qk_nope_head_dim=8, v_head_dim=10)
LATENT |= {"num_key_value_heads": 8, "head_dim": 6}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3}

MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LOCAL_SIX}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**SIX, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SIX, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**{k: v for k, v in SIX.items() if k != "head_dim"}}),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**LOCAL_SIX}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {**{k: v for k, v in LOCAL_SIX.items() if k != "head_dim"}}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**ROUTED_SIX}),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", {**ROUTED_SIX}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {**GQA, **EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", {**LOCAL_SIX}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**LOCAL_SIX, "shared_intermediate_size": 40},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {**SIX, "moe_topk": 2}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**LOCAL_SIX, "sliding_window": 5}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**ROUTED_SIX, **LATENT}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**ROUTED_SIX, **LATENT}),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**ROUTED_SIX, **LATENT, "index_n_heads": 4, "index_head_dim": 12, "index_topk": 5},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**ROUTED_SIX, **LATENT}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**SIX, **LINEAR, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**SIX, **LINEAR, "shared_expert_intermediate_size": 40},
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**SIX, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {"expert_layer_offset": 0, "mamba_d_state": 5, "mamba_dt_rank": 7},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**SIX, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {**LOCAL_SIX, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **ROUTED_SIX,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "moe_shared_expert_intermediate_size": 40,
        }
        | {
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 5,
            "n_groups": 2,
            "chunk_size": 4,
            "moe_latent_size": 20,
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **LOCAL_SIX,
            "intermediate_size": 32,
            "intermediate_size_mlp": 72,
            "num_hidden_layers": 3,
            "moe_layers": [0, 2],
        }
        | {"num_experts_per_tok": 1, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 5, "floor_scale": 2},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**SIX, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "enable_moe_block": True}
        | {"top_k_experts": 2, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 4, "global_head_dim": 10}
        | {"attention_k_eq_v": True, "num_key_value_heads": 8, "num_kv_shared_layers": 0},
    ),
    "dbrx": (
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            "d_model": 48,
            "n_heads": 8,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 0.3, "rope_theta": 10000.0},
        }
        | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2}},
    ),
    "jetmoe": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {"num_key_value_heads": 4, "kv_channels": 6, "intermediate_size": 32, "max_position_embeddings": 64}
        | {"num_local_experts": 6, "initializer_range": 0.1},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**LOCAL_SIX, "shared_intermediate_size": 40, "layer_types": ["mamba", "attention"]}
        | {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_n_groups": 2, "mamba_chunk_size": 4},
    ),
}
"""Families with experts. `moe_intermediate_size` is the width of one expert, where dense layers have another one."""

SMALL_GQA = {k: v for k, v in GQA.items() if k != "head_dim"}
ENCODER = {**UNGROUPED, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
T5 = dict(d_model=48, d_kv=6, d_ff=72, num_layers=2, num_decoder_layers=2, num_heads=8, dropout_rate=0.0)
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0}
BART = dict(d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8, decoder_attention_heads=4)
BART |= {"encoder_ffn_dim": 72, "decoder_ffn_dim": 80, "dropout": 0.0, "max_position_embeddings": 64}
IMAGE = dict(image_size=16, patch_size=4, num_attention_heads=8, intermediate_size=72, hidden_size=48)
SWIN = dict(image_size=48, patch_size=2, embed_dim=24, depths=[1, 2, 3, 1], num_heads=[4, 8, 8, 16], window_size=3)
CONVNEXT = dict(image_size=32, patch_size=2, num_hidden_layers=3, hidden_sizes=[12, 20, 28], depths=[1, 2, 1])
TOWER = {**IMAGE, "num_hidden_layers": 2}
TEXT = dict(vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
TEXT |= {"max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
TOWERS = {"text_config": TEXT, "vision_config": TOWER, "projection_dim": 20}

DECODER = dict(vocab_size=67, hidden_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
DECODER |= {
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAVA = {"text_config": {"model_type": "llama", **DECODER}, "image_token_id": 66, "image_token_index": 66}
LLAVA |= {"vision_config": {"model_type": "clip_vision_model", **TOWER}, "image_seq_length": 16}
QWEN_VL = {
    "text_config": {
        **DECODER,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4},
    }
}
QWEN_VL |= {
    "vision_config": dict(depth=2, embed_dim=64, hidden_size=48, num_heads=8, patch_size=4) | {"mlp_ratio": 2},
    "image_token_id": 66,
    "video_token_id": 65,
    "vision_start_token_id": 64,
    "vision_end_token_id": 63,
}
QWEN_2_5_VL = {
    **QWEN_VL,
    "vision_config": dict(depth=2, hidden_size=64, out_hidden_size=48, num_heads=8, patch_size=4)
    | {"intermediate_size": 72, "fullatt_block_indexes": [1], "window_size": 16},
}
GEMMA_3N = {
    **GQA,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.7],
}
GEMMA_3N |= {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
}
GEMMA_3N |= dict(
    sliding_window=5, hidden_size_per_layer_input=7, vocab_size_per_layer_input=61, laurel_rank=8, altup_coef_clip=0.1
)
GEMMA_3N |= {"pad_token_id": None}  # whose row of zeros has no gradient: the root of its mean square
CODEGEN = {"n_head": 16, "hidden_size": 64, "n_layer": 2, "n_positions": 64, "rotary_dim": 4, "n_inner": 72}
BIGCODE = {"n_head": 8, "n_layer": 2, "n_positions": 64, "n_inner": 72}
MAMBA = {"state_size": 5, "time_step_rank": 7, "conv_kernel": 3, "expand": 2}
MAMBA2 = dict(num_heads=12, head_dim=8, expand=2, state_size=5, n_groups=2, conv_kernel=3, chunk_size=4)
FALCON = dict(num_attention_heads=8, ffn_hidden_size=72, hidden_dropout=0.0, attention_dropout=0.0)

SHIPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**GQA}),
    "gemma-one-kv-head": ("GemmaConfig", "GemmaForCausalLM", {**GQA, "num_key_value_heads": 1}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**SMALL_GQA, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    ),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {**GQA}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**SMALL_GQA, "no_rope_layers": [1, 0]}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {**GQA}),
    "jais2": ("Jais2Config", "Jais2ForCausalLM", {**GQA}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**GQA}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**SMALL_GQA, "sliding_window": 5}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**SMALL_GQA}),
    "cohere-norms": ("CohereConfig", "CohereForCausalLM", {**SMALL_GQA, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {**SMALL_GQA, "sliding_window": 5}),
    "glm": ("GlmConfig", "GlmForCausalLM", {**GQA, "head_dim": 8}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**GQA, "head_dim": 8}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {**SMALL_GQA, "clip_qkv": 0.5}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {**SMALL_GQA, "sliding_window": 5}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**SMALL_GQA, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLmConfig", "StableLmForCausalLM", {**SMALL_GQA, "use_parallel_residual": True}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**SMALL_GQA, "hidden_size": 64}),
    "phi-norms": ("PhiConfig", "PhiForCausalLM", {**SMALL_GQA, "hidden_size": 64, "qk_layernorm": True}),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {**SMALL_GQA}),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", {**UNGROUPED, "hidden_size": 64}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {"n_head": 8, "n_inner": 72, "rotary_dim": 4, "n_positions": 64}),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {"num_heads": 8, "intermediate_size": 72, "window_size": 5, "attention_types": [[["global", "local"], 1]]}
        | {"max_position_embeddings": 64, "num_layers": 2},
    ),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", GEMMA_3N),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**SMALL_GQA, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_head": 8, "n_layer": 2}),
    "bloom-residual": (
        "BloomConfig",
        "BloomForCausalLM",
        {"n_head": 12, "n_layer": 2, "apply_residual_connection_post_layernorm": True},
    ),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 48, "n_heads": 8, "n_layers": 2, "max_seq_len": 24}),
    "mpt-twelve-heads": (
        "MptConfig",
        "MptForCausalLM",
        {"d_model": 48, "n_heads": 12, "n_layers": 2, "max_seq_len": 24},
    ),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", CODEGEN),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", BIGCODE),
    "gpt_bigcode-heads": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**BIGCODE, "multi_query": False}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**FALCON, "multi_query": True}),
    "falcon-grouped": (
        "FalconConfig",
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
    ),
    "falcon-one-norm": (
        "FalconConfig",
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {**FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    ),
    "falcon-alibi-eager": (
        "FalconConfig",
        "FalconForCausalLM",
        {**FALCON, "multi_query": True, "alibi": True, "attn_implementation": "eager"},
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", MAMBA),
    "mamba-biased": ("MambaConfig", "MambaForCausalLM", {**MAMBA, "use_bias": True, "use_conv_bias": False}),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", MAMBA),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA2),
    "mamba2-one-group": ("Mamba2Config", "Mamba2ForCausalLM", {**MAMBA2, "n_groups": 1, "use_bias": True}),
    "mamba2-many-groups": ("Mamba2Config", "Mamba2ForCausalLM", {**MAMBA2, "n_groups": 4}),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**SMALL_GQA, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 5}
        | {"mamba_n_groups": 2, "mamba_chunk_size": 4, "mamba_d_conv": 3, "attn_layer_indices": [1]},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {**SMALL_GQA, "num_key_value_heads": 1, "num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 5},
    ),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"context_length": 32, "intermediate_size": 72}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", ENCODER),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForSequenceClassification", ENCODER),
    "camembert": ("CamembertConfig", "CamembertForMaskedLM", ENCODER),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**ENCODER, "embedding_size": 40}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 48, "n_heads": 8, "hidden_dim": 72, "n_layers": 2},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {**UNGROUPED, "local_attention": 6}),
    "deberta-v2": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    ),
    "deberta-v2-shared": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
        | {"position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", T5),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", BART),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", BART),
    "marian": ("MarianConfig", "MarianMTModel", {**BART, "decoder_vocab_size": 67}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 9, "max_target_positions": 24},
    ),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", LLAVA),
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", QWEN_VL),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", QWEN_2_5_VL),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 2}),
    "dinov2-gated": ("Dinov2Config", "Dinov2Model", {**IMAGE, "mlp_ratio": 2, "use_swiglu_ffn": True}),
    "dinov2_with_registers": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", {**IMAGE, "mlp_ratio": 2}),
    "swin": ("SwinConfig", "SwinForImageClassification", SWIN),
    "swin-masked-two-stages": (
        "SwinConfig",
        "SwinForMaskedImageModeling",
        {**SWIN, "depths": [2, 3], "num_heads": [4, 8], "window_size": 2, "use_absolute_embeddings": True},
    ),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", CONVNEXT),
    "clip": ("CLIPConfig", "CLIPModel", TOWERS),
    "siglip": (
        "SiglipConfig",
        "SiglipModel",
        {**TOWERS, "text_config": {**TEXT, "hidden_size": 48, "projection_size": 48}},
    ),
}
"""Further families with a shipped plan, and variants of them, each proven by one test
(tests/tp_plans/test_shipped_plans.py)."""

FAMILIES |= {name: MIXTURES[name] for name in ("mixtral", "deepseek_v3", "gpt_oss")}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> nn.Module:
    """A stock model in training mode, without dropout."""
    import transformers

    config_name, class_name, sizes = (MIXTURES | FAMILIES)[family]
    config = getattr(transformers, config_name)(**{**COMMON, **sizes, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(config).train()
    if family in MIXTURES:
        choose_unevenly(model)
        if dtype == torch.float64:  # the default, `grouped_mm`, has no float64
            model.set_experts_implementation("eager")
    perturb(model)
    model.to(dtype)
    if dtype == torch.float64:
        keep_float64(model)
    return device.placed(model)


def shipped_source(family: str) -> Any:
    """The source of a tiny model of `SHIPPED`, with the class that is named there."""
    import transformers

    from parallelize.plan.models.miniature.rates import without_dropout
    from parallelize.plan.models.model_source import ModelSource
    from parallelize.plan.models.transformers_models import maker_of

    config_name, class_name, sizes = SHIPPED[family]
    config = getattr(transformers, config_name)(**{**COMMON, **sizes})
    config.architectures = [class_name]
    without_dropout(config)
    return ModelSource(family, maker_of(config, family), config)


def perturb(model: nn.Module) -> None:
    """Change norms and biases from ones and zeros, which would hide missing terms and permutations."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(1.5)


def choose_unevenly(model: nn.Module) -> None:
    """Routers that begin as zeros, and corrections of their choices: values that make experts differ."""
    generator = torch.Generator().manual_seed(3)
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.ndim and not tensor.is_meta and not tensor.any():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


ROUND_INSIDE = (
    "router",
    "gate",
    "rmsnormgated",
    "gateddeltanet",
    "mambamixer",
    "mamba2mixer",
    "bambamixer",
    "mambalayer",
)
ROUND_INSIDE += ("jetmoetopkgating", "deepseekv2attention", "llama4textattention", "nemotronhforcausallm")
CENTERED_NORMS = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5")  # whose weight is added to one


def keep_float64(model: nn.Module) -> None:
    """RMSNorms, routers, linear attention, the rotary embedding of DeepSeek V2 and the logits of Nemotron-H in
    `transformers` round to float32 inside: compute them in float64, on both sides."""
    for module in model.modules():
        name = type(module).__name__
        if name.lower().endswith(ROUND_INSIDE):
            module.forward = MethodType(_in_float64, module)
        if name.endswith("RMSNorm"):
            module.forward = MethodType(_centered_norm if name.startswith(CENTERED_NORMS) else _rms_norm, module)


def _in_float64(self: Any, *args: Any, **kwargs: Any) -> Any:
    with InFloat64():
        return type(self).forward(self, *args, **kwargs)


def _eps(module: Any) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _eps(self))
    return normed if getattr(self, "weight", None) is None else self.weight * normed


def _centered_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
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
