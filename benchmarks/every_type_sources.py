"""Configs of model types whose default config no model of `transformers` is built from: with the fields that it
lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelize.plan.models.model_source import ModelSource, read_model

_ATTENTION = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}


def _conv_layers() -> dict[str, Any]:
    return {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}


def _with_rotary() -> dict[str, Any]:
    return {"rope_parameters": {**_ATTENTION, "sliding_attention": _ATTENTION["full_attention"]}}


def _two_rotary_tables() -> dict[str, Any]:
    return {"text_config": _with_rotary()}


def _sparse_layers() -> dict[str, Any]:
    layers = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    # as wide as the tower that it reads
    encoder = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
    text = {**layers, "head_dim": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return {"text_config": text, "vision_config": {"encoder_config": encoder}}


def _codes_of_images() -> dict[str, Any]:
    """Tokens that stand for the codes of an image: one for each code, in so small a vocabulary too."""
    codes = {f"IMGIMG{chr(65 + index)}Z": 10 + index for index in range(10)}
    return {"vocabulary_map": {"<image>": 4, **codes}, "vq_config": {"num_embeddings": len(codes)}}


def _small_decoder() -> dict[str, Any]:
    """Key/value heads of which layers with sliding windows have twice as many, and few experts."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 24, "v_head_dim": 16}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
    kinds = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    sizes = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    return sizes | heads | experts | kinds


def _shared_attention() -> dict[str, Any]:
    """Layers of which every second has attention, whose weights they share."""
    sizes = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_mamba_heads": 2, "mamba_dt_rank": 8}
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    return sizes | heads | {"layers_block_type": kinds, "use_mamba_kernels": False}


def _few_experts() -> dict[str, Any]:
    return {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}}


def _resnet() -> dict[str, Any]:
    """The backbone of a detector, which is else one of `timm`."""
    from transformers import ResNetConfig

    stages = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    backbone = ResNetConfig(**stages, out_features=["stage2", "stage3", "stage4"])  # type: ignore[arg-type]
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone, "num_queries": 7}


def _projector_of_sound() -> dict[str, Any]:
    """A projector that reads what the encoder returns, which is as wide as its default."""
    return {"projector_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}}


FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "lfm2_moe": _conv_layers,
    # to which it changes in its forward where sequences are short
    "big_bird": lambda: {"attention_type": "original_full"},
    "bigbird_pegasus": lambda: {"attention_type": "original_full"},
    "cohere_compass_text": _with_rotary,
    "xmod": lambda: {"default_language": "en_XX"},
    "reformer": lambda: {"axial_pos_embds": False, "num_hidden_layers": 2, "attn_layers": ["local", "local"]},
    "cohere_compass": _two_rotary_tables,
    "deepseek_ocr2": _sparse_layers,
    "chameleon": _codes_of_images,
    "mimo_v2_flash": _small_decoder,
    "zamba": _shared_attention,
    "diffusion_gemma": _few_experts,
    "granite4_vision": lambda: {
        "deepstack_layer_map": [(-2, 0), (-1, 1)],
        "spatial_target_layers": [1, 2],
        "downsample_rate": "1/2",
    },
    "hunyuan_vl": lambda: {
        "text_config": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    },
    "hunyuan_vl_text": lambda: {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512},
    "blip-2": lambda: {"image_token_index": 50265},
    "instructblip": lambda: {"image_token_index": 50265},
    "instructblipvideo": lambda: {"video_token_index": 50265},
    "granite_speech": _projector_of_sound,
    "granite_speech_plus": _projector_of_sound,
    "regnet": lambda: {"groups_width": 16},  # of which each stage has a multiple of four
    "led": lambda: {"attention_window": 4},
    "longformer": lambda: {"attention_window": 4},
    "detr": _resnet,
    "conditional_detr": _resnet,
    "dab-detr": _resnet,
    "deformable_detr": _resnet,
    "table-transformer": _resnet,
}
"""By model type, the fields that are set."""


def source_of_type(model_type: str) -> ModelSource:
    """The source of a type, as `parallelize plans derive TYPE` reads it, or with the fields that its default config
    lacks.

    Raises: as `read_model`.
    """
    from transformers import CONFIG_MAPPING

    source = read_model(model_type)
    if model_type == "dbrx":  # whose attention reads a field that its config has no more
        source.config.attn_config.rope_theta, source.config.attn_config.clip_qkv = 1e4, 8.0
    if model_type not in FIELDS:
        return source
    return source.with_config(CONFIG_MAPPING[model_type](**FIELDS[model_type]()))
