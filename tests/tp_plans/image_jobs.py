"""What each rank does in the test of images in some of a batch's texts only: a tower that a data rank does not run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from parallelize import build_mesh, parallelize_module, shard_data
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.tools.verification.precision import InFloat64
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support import device
from tests.support.models import perturb, shipped_source
from tests.support.parity import worst


def _model(family: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A model in float64, and the inputs of two data ranks: texts with images, and a text alone."""
    torch.manual_seed(0)
    source = shipped_source(family)
    model = source.build("cpu").train()
    perturb(model)
    torch.manual_seed(1)
    inputs = {name: _double(value) for name, value in dict(inputs_of(source, model)).items()}
    text = {"input_ids": torch.randint(3, 30, (2, 7)), "use_cache": False}
    if "mm_token_type_ids" in inputs:
        text["mm_token_type_ids"] = torch.zeros(2, 7, dtype=torch.long)
    return device.placed((model.double(), [inputs, text]))


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _backward(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with InFloat64():
        logits = model(**inputs).logits
        weights = torch.arange(logits.numel(), dtype=torch.float64).mul_(0.7).sin_().view(logits.shape)
        loss = (logits * weights).sum()
        loss.backward()
    return loss.detach()


def one_rank_without_an_image(rank: int, family: str, zero: int, sequence_parallel: bool) -> float:
    """The largest relative error of any gradient on dp=2, tp=2, where the texts of one data rank have no image."""
    model, inputs = _model(family)
    unsharded = copy.deepcopy(model)
    for batch in inputs:
        _backward(unsharded, batch)
    expected = {name: p.grad for name, p in unsharded.named_parameters() if p.grad is not None}
    assert any("vision" in name or "visual" in name for name in expected)
    mesh = build_mesh("cpu", dp=2, tp=2)
    parallelize_module(model, mesh, sequence_parallel=sequence_parallel, own_reduction=True)
    shard_data(model, mesh, zero)
    for _ in range(2):  # the second step begins with gradients of None
        model.zero_grad(set_to_none=True)
        _backward(model, inputs[mesh.get_local_rank("dp")])
    actual = {name: full_value(model, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
    rest = {name: grad for name, grad in actual.items() if name not in expected}
    assert not any(grad.any() for grad in rest.values()), rest.keys()
    return worst({name: actual[name] for name in expected}, expected)[0]
