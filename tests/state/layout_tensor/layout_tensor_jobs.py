"""What ranks run: packed weights and shared key/value heads, through PyTorch's interfaces."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallelize import build_mesh, cross_entropy, parallelize_module, shard_data
from parallelize.state.layout_tensor.layout_dtensor import LayoutDTensor
from tests.support.models import tiny_batch, tiny_model

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "two equal chunks": ("phi3", {}),
    "three equal chunks": ("gpt2", {}),
    "unequal chunks": ("phi3", {"num_key_value_heads": 2}),
    "shared heads": ("llama", {"num_key_value_heads": 1}),
    "shared heads in chunks": ("phi3", {"num_key_value_heads": 1}),
}


def model_of(kind: str, seed: int = 0, **more: Any) -> nn.Module:
    family, sizes = KINDS[kind]
    return tiny_model(family, torch.float64, seed=seed, **sizes, **more)


def error(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """max |a-b| over max |b|, floored at 1e-3 of `scale`."""
    assert actual.shape == expected.shape
    difference = (actual - expected).detach().abs().max()
    return float(difference / expected.detach().abs().max().clamp_min(max(1e-3 * scale, 1e-300)))


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_error(actual: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    scale = max(float(value.detach().abs().max()) for value in expected.values())
    return max(error(full(actual[name]), value, scale) for name, value in expected.items())


def backward(model: nn.Module, reference: nn.Module, data_ranks: int = 1) -> None:
    """One backward of each, of the same batch on every data rank."""
    ids, labels = tiny_batch()
    (cross_entropy(model(input_ids=ids).logits, labels) / data_ranks).backward()
    F.cross_entropy(reference(input_ids=ids).logits.flatten(0, 1), labels.flatten()).backward()


def parameters(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters())


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def moments(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


def compiled(rank: int, kind: str) -> tuple[float, bool]:
    """(largest error of a gradient after a compiled step, whether all gradients of such parameters are of their
    class)."""
    torch._dynamo.reset()  # guards on models of earlier jobs
    model, reference = (model_of(kind, num_hidden_layers=1) for _ in range(2))
    parallelize_module(model, build_mesh("cpu", tp=2))
    ids, labels = tiny_batch()
    cross_entropy(torch.compile(model, backend="aot_eager")(input_ids=ids).logits, labels).backward()
    F.cross_entropy(reference(input_ids=ids).logits.flatten(0, 1), labels.flatten()).backward()
    alike = all(type(p.grad) is type(p.data) for p in model.parameters() if isinstance(p.data, LayoutDTensor))
    return largest_error(gradients(model), gradients(reference)), alike


def sharded_further(rank: int, kind: str, how: str, folder: str) -> dict[str, float]:
    """Two AdamW steps under `fully_shard` on 2 x 2 ranks; saved by PyTorch, loaded over tp=4 and by one process."""
    model, reference = model_of(kind), model_of(kind)
    mesh = build_mesh("cpu", dp=2, tp=2)
    parallelize_module(model, mesh)
    if how == "shard_data":
        shard_data(model, mesh, zero=3)
    else:
        unit: Any = fully_shard(model, mesh=mesh["dp"])
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    optimizer, stock = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    errors = {}
    for _ in range(2):
        optimizer.zero_grad()
        stock.zero_grad()
        backward(model, reference, data_ranks=2)
        errors["gradients"] = largest_error(gradients(model), gradients(reference))
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        errors["norm"] = error(full(norms[0]), norms[1])
        optimizer.step()
        stock.step()
    errors["weights"] = largest_error(parameters(model), parameters(reference))
    errors["state_dict"] = largest_error(model.state_dict(), parameters(reference))
    errors["moments"] = largest_error(moments(model, optimizer), moments(reference, stock))
    saved = {
        "model": dcp_state.get_model_state_dict(model),
        "adam": dcp_state.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(saved, checkpoint_id=folder)
    errors |= _loaded_over_tp(kind, folder, reference, stock)
    alone = model_of(kind, seed=8)
    state = {"model": alone.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    alone.load_state_dict(state["model"])
    errors["one process"] = largest_error(parameters(alone), parameters(reference))
    return errors


def _loaded_over_tp(kind: str, folder: str, reference: nn.Module, stock: Any) -> dict[str, float]:
    model = model_of(kind, seed=7)
    parallelize_module(model, build_mesh("cpu", tp=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {
        "model": dcp_state.get_model_state_dict(model),
        "adam": dcp_state.get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_model_state_dict(model, state["model"])
    dcp_state.set_optimizer_state_dict(model, optimizer, state["adam"])
    return {
        "loaded weights": largest_error(parameters(model), parameters(reference)),
        "loaded moments": largest_error(moments(model, optimizer), moments(reference, stock)),
    }


def state_dict_of_one_rank(rank: int) -> bool:
    """`state_dict()` on one rank alone: no collective, so no other rank waits."""
    model = copy.deepcopy(model_of("two equal chunks"))
    parallelize_module(model, build_mesh("cpu", tp=2))
    return rank != 0 or len(model.state_dict()) > 0
