"""Small models of texts with images or sounds, and batches whose texts have several of them, or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support import device
from tests.support.models import COMMON, DECODER, LLAVA, QWEN_2_5_VL, QWEN_VL, TOWER, perturb

IMAGE, TEXTS, LENGTH = 66, 4, 40
COUNTS = (1, 0, 2, 1)
"""Images of each text."""
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 4, 4))

_TEXT = {**DECODER, "head_dim": 6, "tie_word_embeddings": False}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}}
_PLACES = {"image_token_id": IMAGE, "tie_word_embeddings": False}
_DEEP = dict(depth=3, hidden_size=64, out_hidden_size=48, num_heads=8, patch_size=4, intermediate_size=72)
_DEEP |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
_PIXTRAL = {"model_type": "pixtral", **TOWER, "head_dim": 6, "image_size": 16}
_INTERN = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}
_WHISPER = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=8, intermediate_size=96, num_mel_bins=10)
_GEMMA_4 = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
_GEMMA_4 |= {"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 4, "global_head_dim": 8}
_GEMMA_4 |= {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
_GEMMA_4_TOWER = {**TOWER, "num_key_value_heads": 8, "head_dim": 8, "pooling_kernel_size": 2}
_GEMMA_4_TOWER |= {"position_embedding_size": 32}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {**LLAVA, "text_config": {"model_type": "llama", **_TEXT}},
    ),
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", {**QWEN_VL, "text_config": {**_TEXT, **_MROPE}}),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {**QWEN_2_5_VL, "text_config": {**_TEXT, **_MROPE}},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {**QWEN_VL, "text_config": {**_TEXT, **_MROPE}, "vision_config": _DEEP},
    ),
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {**_PLACES, "text_config": {**_TEXT, "sliding_window": 9}, "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    ),
    "internvl": (
        "InternVLConfig",
        "InternVLForConditionalGeneration",
        {**_PLACES, "text_config": {"model_type": "qwen2", **_TEXT}, "vision_config": _INTERN},
    ),
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {
            **_PLACES,
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
            "vision_config": _PIXTRAL,
        },
    ),
    "smolvlm": (
        "SmolVLMConfig",
        "SmolVLMForConditionalGeneration",
        {**_PLACES, "text_config": {"model_type": "llama", **_TEXT}, "vision_config": TOWER, "scale_factor": 2},
    ),
    "gemma4": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {**_PLACES, "audio_config": None, "text_config": {**_TEXT, **_GEMMA_4}, "vision_config": _GEMMA_4_TOWER},
    ),
    "voxtral": (
        "VoxtralConfig",
        "VoxtralForConditionalGeneration",
        {"audio_token_id": IMAGE, "text_config": {"model_type": "llama", **_TEXT}}
        | {
            "audio_config": {**_WHISPER, "max_source_positions": 16, "intermediate_size": 96 * 2},
            "tie_word_embeddings": False,
        },
    ),
}


def build(family: str, layers: int = 3) -> nn.Module:
    """A model in float64, in training mode, without dropout. layers: of its text."""
    import transformers

    from parallelize.plan.models.miniature.rates import without_dropout

    config_name, class_name, fields = FAMILIES[family]
    fields = {**fields, "text_config": {**fields["text_config"], "num_hidden_layers": layers}}
    config = getattr(transformers, config_name)(**{**COMMON, **fields})
    without_dropout(config)
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config).train()
    perturb(model)
    return device.placed(model.double())


def batch(family: str, texts: int = TEXTS) -> dict[str, Any]:
    """Inputs of the first texts, whose images are in order: text 1 has none, and text 2 has two."""
    counts = COUNTS[:texts]
    tokens = _tokens(family)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (texts, LENGTH), generator=generator)
    image = 0
    for text, count in enumerate(counts):
        start = 3
        for _ in range(count):
            ids[text, start : start + tokens[image]] = IMAGE
            start, image = start + tokens[image] + 2, image + 1
    inputs = {"input_ids": ids, **_features(family, counts, generator)}
    if family.startswith(("qwen", "gemma4")):
        inputs["mm_token_type_ids"] = ids.eq(IMAGE).long()
    if family == "gemma3":
        inputs["token_type_ids"] = ids.eq(IMAGE).long()
    return device.placed(inputs)


def texts_alone(family: str, texts: int = 2) -> dict[str, Any]:
    """Inputs of texts without images."""
    ids = torch.randint(3, 60, (texts, LENGTH), generator=torch.Generator().manual_seed(2))
    kinds = {name: torch.zeros_like(ids) for name in ("mm_token_type_ids",) if family.startswith("qwen")}
    return device.placed({"input_ids": ids, **kinds})


def _tokens(family: str) -> list[int]:
    """Of each image."""
    if family.startswith("qwen"):
        return [height * width // 4 for _, height, width in GRIDS]
    if family == "mistral3":
        return [4, 2, 2, 4]
    return [{"llava": 16, "voxtral": 4}.get(family, 4)] * len(GRIDS)


def _features(family: str, counts: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    number = sum(counts)
    if not number:
        return {}
    if family.startswith("qwen"):
        grids = torch.tensor(GRIDS[:number])
        return {"pixel_values": draw(int(grids.prod(-1).sum()), 3 * 2 * 16), "image_grid_thw": grids}
    if family == "voxtral":
        return {"input_features": draw(number, 10, 32)}
    if family == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).flatten(0, 1)
        return {"pixel_values": draw(number, 16, 48), "image_position_ids": places.expand(number, -1, -1)}
    if family == "smolvlm":
        pixels = torch.zeros(len(counts), max(counts), 3, 16, 16, dtype=torch.float64)
        for text, count in enumerate(counts):  # images of zeros are left out
            pixels[text, :count] = draw(count, 3, 16, 16)
        return {"pixel_values": pixels}
    pixels = draw(number, 3, 16, 16)
    if family == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16], [8, 16], [16, 8], [16, 16]])[:number]}
    return {"pixel_values": pixels}
