"""Flow matching: a Flux that turns noise into latents of images, beside a frozen VAE and a frozen text encoder.

torchrun --standalone --nproc-per-node 2 examples/flow_matching.py

On GPUs: build_mesh("cuda", dp=4, tp=2), dtype=torch.bfloat16, and pretrained models in the place of these small ones.
"""

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import T5Config, T5EncoderModel, set_seed

from parallelize import GlobalBatches, build_mesh, derive_plan, destroy_groups, parallelize_model

COLORS, SIDE = 3, 4  # kinds of images; latents are 4 x 4
T = torch.Tensor


class Latents(nn.Module):
    """The encoder of a VAE: [batch, 3, 8, 8] pixels to [batch, tokens, channels], drawn from its distribution."""

    def __init__(self):
        super().__init__()
        self.vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            norm_num_groups=4,
        )

    def forward(self, pixels: T) -> T:
        return self.vae.encode(pixels).latent_dist.sample().flatten(2).mT


class FlowMatching(nn.Module):
    """The velocity from images to noise, predicted at a random time between them.

    Noise and times are drawn in the forward: those of a sample are the same on all ranks that compute it, and on every
    mesh those of one process.
    """

    def __init__(self):
        super().__init__()
        self.transformer = FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 6, 6),
        )
        index = torch.arange(SIDE * SIDE)
        self.register_buffer("places", torch.stack([index * 0, index // SIDE, index % SIDE], dim=1).float())

    def forward(self, latents: T, text: T) -> tuple[T, T]:
        noise, times = torch.randn_like(latents), torch.rand(len(latents)).to(latents)
        mixed = torch.lerp(latents, noise, times[:, None, None])
        velocity = self.transformer(
            mixed,
            encoder_hidden_states=text,
            pooled_projections=text.mean(1),
            timestep=times,
            img_ids=self.places,
            txt_ids=self.places.new_zeros(text.shape[1], 3),
        ).sample
        return velocity, noise - latents


def squared_error(output: tuple[T, T], targets: T) -> T:
    """The sum over samples; `count` says how many there are."""
    velocity, wanted = output
    return (velocity - wanted).square().mean((1, 2)).sum()


def sample(index: int) -> dict[str, T]:
    """An image with one bright color, and the three tokens of a text that names it."""
    color = index % COLORS
    pixels = torch.randn(3, 2 * SIDE, 2 * SIDE, generator=torch.Generator().manual_seed(index))
    pixels[color] += 2
    return {"pixels": pixels, "ids": torch.tensor([color, color + COLORS, 1])}


mesh = build_mesh("cpu", tp=2)
set_seed(0)  # the same weights on every rank
text_encoder = T5EncoderModel(T5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
encoder, model = Latents(), FlowMatching()
plan_of_encoder = derive_plan(encoder, {"pixels": torch.randn(2, 3, 2 * SIDE, 2 * SIDE)}).plan
plan = derive_plan(model, {"latents": torch.randn(2, SIDE * SIDE, 4), "text": torch.randn(2, 3, 32)}).plan
for frozen in (text_encoder, encoder):
    frozen.requires_grad_(False).eval()
text_encoder = parallelize_model(text_encoder, mesh).module  # its plan is shipped
encoder = parallelize_model(encoder, mesh, plan_of_encoder).module
parallel = parallelize_model(model, mesh, plan, loss=squared_error, count=len)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3)
average = AveragedModel(parallel.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

data = [sample(index) for index in range(960)]
batches = GlobalBatches(len(data), 32, mesh=mesh)
total = 0.0
for step, batch in enumerate(batches.track(DataLoader(data, batch_sampler=batches)), start=1):
    batch = {name: tensor.to(mesh.device_type) for name, tensor in batch.items()}
    with torch.no_grad():
        text = text_encoder(batch["ids"]).last_hidden_state
        latents = encoder(batch["pixels"])
    total += float(parallel.step(latents=latents, text=text, targets=latents))
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(parallel.module)
    if mesh.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}  loss {total / 10:.4f}")
        total = 0.0
destroy_groups()
