"""What real processes run: they return errors of quantized linears on shards."""

from __future__ import annotations

import torch

from parallelize import build_mesh, full_gradients, full_state_dict, parallelize_module
from tests.state.quantization.quantized_models import quantized, with_lora
from tests.support.models import tiny_batch
from tests.support.parity import worst

IDS = tiny_batch(67)[0]


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
