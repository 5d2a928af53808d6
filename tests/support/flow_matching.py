"""Flow matching with a small model of `diffusers`: the step that tests run on a mesh and on one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from parallelize import Checkpointer, build_mesh, derive_plan, full_gradients, parallelize_model
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.verification.precision import InFloat64, widen_recompute
from tests.support.diffusion_models import FAMILIES

T = torch.Tensor
ROWS, STEPS = 4, 2
WITHOUT_ROWS = ("img_ids", "txt_ids")
"""Inputs that all samples share."""

LISTS = {
    "flux": ["transformer_blocks", "single_transformer_blocks"],
    "hunyuan_video": ["transformer_blocks", "single_transformer_blocks"],
    "wan": ["blocks"],
    "unet": ["down_blocks.*.resnets", "up_blocks.*.resnets"],
}
BOTH_STREAMS = "carry: [hidden_states, encoder_hidden_states]"
STAGES = {  # in the place of what the derived plan says
    "sd3": f"layers: transformer.transformer_blocks, {BOTH_STREAMS}",
    "cogvideox": f"layers: transformer.transformer_blocks, {BOTH_STREAMS}",
}


class FlowMatching(nn.Module):
    """The velocity that a model predicts at a random time, and the true one. Noise and times are drawn in the forward,
    and what rounds to float32 inside of a model in float64 does not."""

    def __init__(self, transformer: nn.Module, main: str):
        super().__init__()
        self.transformer, self.main = transformer, main

    def forward(self, clean: T, **conditions: Any) -> tuple[T, T]:
        with InFloat64() if clean.dtype == torch.float64 else nullcontext():
            noise, times = torch.randn_like(clean), torch.rand(len(clean)).to(clean)
            noisy = torch.lerp(clean, noise, times.view(-1, *[1] * (clean.ndim - 1)))
            velocity = self.transformer(**{self.main: noisy}, timestep=times, **conditions)[0]
            return velocity[:, : clean.shape[1]], noise - clean


def squared_error(output: tuple[T, T], targets: T) -> T:
    velocity, wanted = output
    return (velocity - wanted).flatten(1).square().mean(1).sum()


def batch_of(name: str, number: int) -> dict[str, Any]:
    """The inputs of a step, of all rows, in float64."""
    generator = torch.Generator().manual_seed(number)
    batch: dict[str, Any] = {}
    for key, value in FAMILIES[name][1]().items():
        if key == "timestep":
            continue
        if isinstance(value, T):
            if key in WITHOUT_ROWS:
                value = value.double()
            elif value.is_floating_point():
                value = torch.rand(ROWS, *value.shape[1:], generator=generator, dtype=torch.float64)
            else:
                value = value.repeat(ROWS // len(value), *[1] * (value.ndim - 1))
        batch["clean" if key in ("hidden_states", "sample") else key] = value
    return batch


@cache
def flow_of(name: str) -> tuple[nn.Module, str]:
    """The model, which is to be copied, and its derived plan with units for ZeRO and recompute."""
    build, inputs = FAMILIES[name]
    model = FlowMatching(build(), "sample" if "sample" in inputs() else "hidden_states").double()
    example = {
        key: value.float() if isinstance(value, T) and value.is_floating_point() else value
        for key, value in batch_of(name, 0).items()
    }
    text = derive_plan(model, example).text
    units = [f"transformer.{layers}.*" for layers in LISTS.get(name, ["transformer_blocks"])]
    inner = ["transformer.transformer_blocks.*.norm1.emb"] if name == "dit" else []  # which the model calls by itself
    text += f"zero: {{units: {[*units, *inner]}}}\nrecompute: {{units: {units}}}\n"
    if name in STAGES:
        lines = [line for line in text.splitlines() if not line.startswith("pipeline:")]
        text = "\n".join([*lines, f"pipeline: {{{STAGES[name]}}}", ""])
    return model, text


def _rows_of(batch: dict[str, Any], index: int, ranks: int) -> dict[str, Any]:
    """The part of a data rank."""
    count = ROWS // ranks
    return {
        key: value[index * count :][:count] if isinstance(value, T) and key not in WITHOUT_ROWS else value
        for key, value in batch.items()
    }


def train(name: str, axes: dict[str, int], *, folder: str = "", steps: int = STEPS, **options: Any) -> tuple[Any, ...]:
    """Steps on the mesh of this rank, from the newest checkpoint in a folder where there is one.

    Returns: the losses, and the full gradients of the last of all steps.
    """
    model, text = flow_of(name)
    mesh = build_mesh("cpu", **axes)
    ranks = axes.get("dp", 1)
    index = mesh.get_local_rank("dp") if "dp" in axes else 0
    whole = {"guidance": False} if "guidance" in batch_of(name, 0) else ()
    parallel = parallelize_model(
        copy.deepcopy(model),
        mesh,
        parse_plan(text, "flow.yaml", name=name),
        loss=squared_error,
        count=len,
        dropout_seed=5,
        whole=whole,
        **options,
    )
    widen_recompute(parallel.module)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
    saved = Checkpointer(folder, parallel, optimizer=optimizer) if folder else None
    losses: list[float] = []
    for step in range(saved.resume() if saved else 0, steps):
        batch = _rows_of(batch_of(name, step), index, ranks)
        losses.append(float(parallel.step(**batch, targets=batch["clean"])))
        if step == STEPS - 1:
            break
        optimizer.step()
        optimizer.zero_grad()
        if saved:
            saved.save(step + 1)
    if saved:
        saved.close()
    return losses, full_gradients(parallel.module) if steps == STEPS else {}
