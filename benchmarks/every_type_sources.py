"""Configs of model types whose default config no model of `transformers` is built from: with the fields that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelize.models.model_source import ModelSource, read_model

_ATTENTION = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}


def _conv_layers() -> dict[str, Any]:
    return {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}


def _with_rotary() -> dict[str, Any]:
    return {"rope_parameters": {**_ATTENTION, "sliding_attention": _ATTENTION["full_attention"]}}


def _resnet() -> dict[str, Any]:
    """The backbone of a detector, which is else one of `timm`."""
    from transformers import ResNetConfig

    stages = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    backbone = ResNetConfig(**stages, out_features=["stage2", "stage3", "stage4"])  # type: ignore[arg-type]
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone, "num_queries": 7}


FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "lfm2_moe": _conv_layers,
    "cohere_compass_text": _with_rotary,
    "xmod": lambda: {"default_language": "en_XX"},
    "reformer": lambda: {"axial_pos_embds": False, "num_hidden_layers": 2, "attn_layers": ["local", "local"]},
    "detr": _resnet,
    "conditional_detr": _resnet,
    "dab-detr": _resnet,
    "deformable_detr": _resnet,
    "table-transformer": _resnet,
}
"""By model type, the fields that are set."""


def source_of_type(model_type: str) -> ModelSource:
    """The source of a type, as `parallelize plans derive TYPE` reads it, or with the fields that its default config lacks.

    Raises: as `read_model`.
    """
    from transformers import CONFIG_MAPPING

    source = read_model(model_type)
    if model_type == "dbrx":  # whose attention reads a field that its config has no more
        source.config.attn_config.rope_theta, source.config.attn_config.clip_qkv = 1e4, 8.0
    if model_type not in FIELDS:
        return source
    return source.with_config(CONFIG_MAPPING[model_type](**FIELDS[model_type]()))
