"""Tiny stock models of every shipped family, with asymmetric sizes and perturbed 1-D parameters."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.verification.precision import InFloat64

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
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**LOCAL_SIX, "shared_intermediate_size": 40, "layer_types": ["mamba", "attention"]}
        | {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 5, "mamba_n_groups": 2, "mamba_chunk_size": 4},
    ),
}
"""Families with experts. `moe_intermediate_size` is the width of one expert, where dense layers have another one."""

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
    return model


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


ROUND_INSIDE = ("router", "gate", "rmsnormgated", "gateddeltanet", "mambamixer", "mamba2mixer", "mambalayer")
ROUND_INSIDE += ("deepseekv2attention", "llama4textattention", "nemotronhforcausallm")
CENTERED_NORMS = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5")  # whose weight is added to one


def keep_float64(model: nn.Module) -> None:
    """RMSNorms, routers, linear attention, the rotary embedding of DeepSeek V2 and the logits of Nemotron-H in `transformers` round to
    float32 inside: compute them in float64, on both sides."""
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
