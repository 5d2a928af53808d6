"""Small models of `diffusers`, one a family, each with inputs of its forward.

Widths, heads and lengths differ, so that no two dims are alike by chance. `diffusers` is imported by the function that
builds a model, because its import takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with random weights, of which none is 0 or 1: adaptive norms would hide their block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return _seeded(
        lambda: FluxTransformer2DModel(
            in_channels=12,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=10,
            num_attention_heads=4,
            joint_attention_dim=18,
            pooled_projection_dim=14,
            axes_dims_rope=(2, 4, 4),
            guidance_embeds=True,
        )
    )


def flux_inputs() -> Inputs:
    """Of 2 samples: 12 tokens of an image of 3 x 4, and 5 of text."""
    return {
        "hidden_states": _drawn(2, 12, 12),
        "encoder_hidden_states": _drawn(2, 5, 18),
        "pooled_projections": _drawn(2, 14),
        "timestep": torch.tensor([0.25, 0.75]),
        "guidance": torch.tensor([3.5, 2.5]),
        "img_ids": torch.stack([torch.zeros(12), torch.arange(12.0) // 4, torch.arange(12.0) % 4], 1),
        "txt_ids": torch.zeros(5, 3),
    }


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return _seeded(
        lambda: SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=3,
            out_channels=3,
            num_layers=3,
            attention_head_dim=10,
            num_attention_heads=4,
            joint_attention_dim=18,
            caption_projection_dim=40,
            pooled_projection_dim=14,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
    )


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": _drawn(2, 3, 8, 6),
        "encoder_hidden_states": _drawn(2, 5, 18),
        "pooled_projections": _drawn(2, 14),
        "timestep": torch.tensor([250, 750]),
    }


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return _seeded(
        lambda: WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=12,
            in_channels=3,
            out_channels=3,
            text_dim=18,
            freq_dim=16,
            ffn_dim=56,
            num_layers=2,
            rope_max_seq_len=32,
        )
    )


def wan_inputs() -> Inputs:
    return {
        "hidden_states": _drawn(2, 3, 3, 8, 4),
        "timestep": torch.tensor([250, 750]),
        "encoder_hidden_states": _drawn(2, 5, 18),
    }


def pixart() -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return _seeded(
        lambda: PixArtTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=10,
            in_channels=3,
            out_channels=6,
            num_layers=2,
            cross_attention_dim=40,
            caption_channels=18,
            sample_size=8,
            patch_size=2,
            norm_num_groups=1,
            use_additional_conditions=False,
        )
    )


def pixart_inputs() -> Inputs:
    return {
        "hidden_states": _drawn(2, 3, 8, 8),
        "encoder_hidden_states": _drawn(2, 5, 18),
        "timestep": torch.tensor([250, 750]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    }


def cogvideox() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return _seeded(
        lambda: CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=12,
            in_channels=3,
            out_channels=3,
            time_embed_dim=20,
            text_embed_dim=18,
            num_layers=2,
            sample_width=8,
            sample_height=6,
            sample_frames=9,
            patch_size=2,
            max_text_seq_length=5,
        )
    )


def cogvideox_inputs() -> Inputs:
    return {
        "hidden_states": _drawn(2, 3, 3, 6, 8),
        "encoder_hidden_states": _drawn(2, 5, 18),
        "timestep": torch.tensor([250, 750]),
    }


def hunyuan_video() -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return _seeded(
        lambda: HunyuanVideoTransformer3DModel(
            in_channels=3,
            out_channels=3,
            num_attention_heads=4,
            attention_head_dim=10,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size=2,
            patch_size_t=1,
            text_embed_dim=18,
            pooled_projection_dim=14,
            rope_axes_dim=(2, 4, 4),
        )
    )


def hunyuan_video_inputs() -> Inputs:
    return {
        "hidden_states": _drawn(2, 3, 3, 6, 8),
        "timestep": torch.tensor([250, 750]),
        "encoder_hidden_states": _drawn(2, 5, 18),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "pooled_projections": _drawn(2, 14),
        "guidance": torch.tensor([3500.0, 2500.0]),
    }


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return _seeded(
        lambda: DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=10,
            in_channels=3,
            out_channels=6,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            norm_num_groups=1,
            num_embeds_ada_norm=22,
        )
    )


def dit_inputs() -> Inputs:
    return {
        "hidden_states": _drawn(2, 3, 8, 8),
        "timestep": torch.tensor([250, 750]),
        "class_labels": torch.tensor([3, 7]),
    }


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return _seeded(
        lambda: UNet2DConditionModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(24, 40),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=18,
            attention_head_dim=4,
        )
    )


def unet_inputs() -> Inputs:
    return {
        "sample": _drawn(2, 3, 8, 8),
        "timestep": torch.tensor([250, 750]),
        "encoder_hidden_states": _drawn(2, 5, 18),
    }


def _drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "flux": (flux, flux_inputs),
    "sd3": (sd3, sd3_inputs),
    "wan": (wan, wan_inputs),
    "pixart": (pixart, pixart_inputs),
    "cogvideox": (cogvideox, cogvideox_inputs),
    "hunyuan_video": (hunyuan_video, hunyuan_video_inputs),
    "dit": (dit, dit_inputs),
    "unet": (unet, unet_inputs),
}
"""How a model is built, and the inputs of its forward, by its name."""
