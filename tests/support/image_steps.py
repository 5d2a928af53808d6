"""One step of a small model of texts with images on a mesh, compared with the unsharded model."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import build_mesh, next_tokens, parallelize_model
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.schema import Plan
from parallelize.tools.verification.precision import InFloat64
from tests.axes.pipeline.pipeline_jobs import full_value
from tests.support import images
from tests.support.parity import worst
from tests.support.threads import run_ranks

SHIPPED = ("llava", "qwen2_vl", "qwen2_5_vl")
_GATHERED = ("gemma3", "gemma4")
"""Families whose images' tokens attend to each other, by masks of all tokens."""


def plan_of(family: str) -> Plan | None:
    """None: a shipped one. Else one that shards sequences alone."""
    if family in SHIPPED:
        return None
    part = "text_model" if family == "smolvlm" else "language_model"
    kind = "gathered" if family in _GATHERED else "causal"
    rules = 'schema_version: 1\ntensor_parallel: {"**": replicate}\n'
    return parse_plan(f"{rules}attention: {{model.{part}.layers.*.self_attn: {kind}}}\n", family)


def error_of_step(
    family: str,
    axes: dict[str, int],
    *,
    batches: list[dict[str, Any]] | None = None,
    labels: bool = False,
    **options: Any,
) -> float:
    """The largest relative error of the loss or any gradient. batches: of each data rank."""
    batches = batches or [images.batch(family)] * axes.get("dp", 1)
    model, plan = images.build(family), plan_of(family)
    loss, expected = _unsharded(copy.deepcopy(model), batches)

    def body(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(local := copy.deepcopy(model), mesh, plan, **options)
        batch = batches[mesh.get_local_rank("dp") if "dp" in axes else 0]
        ids = batch["input_ids"]
        with InFloat64():
            for _ in range(2):  # the second step begins with gradients of None
                local.zero_grad(set_to_none=True)
                value = parallel.step(**batch, **({"labels": ids} if labels else {"targets": next_tokens(ids)}))
        grads = {name: full_value(local, name, p.grad) for name, p in local.named_parameters() if p.grad is not None}
        return float(value), grads

    results = run_ranks(prod(axes.values()), body)
    actual = {name: grad for _, grads in results for name, grad in grads.items()}
    unused = actual.keys() - expected.keys()
    assert not any(actual[name].any() for name in unused), unused
    error, _ = worst({name: actual[name] for name in expected}, expected)
    return max(error, *(abs(value - loss) / abs(loss) for value, _ in results))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _unsharded(model: nn.Module, batches: list[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    with InFloat64():
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            targets = next_tokens(batch["input_ids"])
            total = total + _loss(model(**batch, use_cache=False).logits, targets)
        loss = total / sum(int((next_tokens(batch["input_ids"]) >= 0).sum()) for batch in batches)
        loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
