"""What ranks run: steps of LoRA on a quantized base. As real processes they return errors."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import (
    build_mesh,
    full_gradients,
    full_state_dict,
    load_pretrained,
    parallelize_model,
    parallelize_module,
)
from tests.state.quantization.quantized_models import SIZES, quantized, reference_of, with_lora
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.training.test_adapters_on_meshes import IDS, LABELS, STEPS, unsharded


def steps_of(model: nn.Module, axes: dict[str, int], options: dict[str, Any]) -> torch.Tensor:
    """Losses and clipped norms of AdamW steps on this rank's rows; call it on every rank."""
    mesh = build_mesh("cpu", **axes)
    parallel = parallelize_model(model, mesh, dropout_seed=3, **options)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(stepped) == sum(p.requires_grad for p in parallel.module.parameters())  # no state of codes
    rows = len(IDS) // axes.get("dp", 1)
    first = rows * (mesh.get_local_rank("dp") if "dp" in axes else 0)
    values = []
    for _ in range(STEPS):
        part = slice(first, first + rows)
        loss = parallel.step(input_ids=IDS[part], targets=LABELS[part], use_cache=False)
        values += [loss.detach().double(), torch.as_tensor(parallel.clip_grad_norm_(0.5)).double()]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(values)


def error_of_steps(rank: int, axes: dict[str, int], options: dict[str, Any]) -> float:
    """The same of a base that each process has read from one folder."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if rank == 0:
        tiny_model("llama", torch.float64, **SIZES["llama"]).save_pretrained(folder[0])
    dist.barrier()
    model = quantized("llama", seed=5)
    load_pretrained(model, folder[0], mesh=build_mesh("cpu", **axes))
    adapted = with_lora(model)
    expected, _ = unsharded(reference_of(adapted), False)
    return float((steps_of(adapted, axes, options) - expected).abs().max())


def error_of_logits(rank: int) -> float:
    """Codes of the first rank count, are broadcast and gathered again."""
    model = quantized("llama", seed=rank)
    first = quantized("llama", seed=0)
    planned = parallelize_module(model, build_mesh("cpu", tp=2), check_replicated=False)
    full = full_state_dict(planned, every_rank=True)
    assert all(torch.equal(full[name], value.cpu()) for name, value in first.state_dict().items())
    return float((planned(input_ids=IDS).logits - first(input_ids=IDS).logits).abs().max())


def error_of_a_compiled_layer(rank: int, adapted: bool) -> float:
    """Largest difference between a model with one layer compiled whole, and without: logits and gradients."""
    model = quantized("llama")
    model = with_lora(model) if adapted else model
    planned = parallelize_module(model, build_mesh("cpu", tp=2), sequence_parallel=True)
    layers = (planned.base_model.model if adapted else planned).model.layers

    def run() -> dict[str, torch.Tensor]:
        planned.zero_grad()
        logits = planned(input_ids=IDS[:, :8]).logits
        logits.square().mean().backward()
        return {"logits": logits.detach(), **full_gradients(planned)}

    expected = run()
    torch._dynamo.reset()
    layers[1].compile(fullgraph=True, backend="aot_eager")
    run()
    actual = run()
    torch._dynamo.reset()
    return worst(actual, expected)[0]
