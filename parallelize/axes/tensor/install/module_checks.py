"""Problems that can only be seen on the modules that a plan names, before anything is changed: what they compute, and
their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from parallelize.axes.tensor.experts.expert_parallel import check_scaled_experts
from parallelize.axes.tensor.experts.expert_tensor_parallel import check_experts
from parallelize.axes.tensor.experts.shared_expert_overlap import wrong_beside
from parallelize.axes.tensor.layers.attention_layers import check_multihead, check_ulysses
from parallelize.axes.tensor.layers.embedding import check_embedding
from parallelize.axes.tensor.layers.norms import (
    check_channel_norm,
    check_gated_norm,
    check_rms_norm,
    divided_statistics,
)
from parallelize.axes.tensor.placements import wrong_float8_widths
from parallelize.axes.tensor.planned_forward import argument_of
from parallelize.axes.tensor.watch.child_reads import foreign_readers
from parallelize.axes.vocabulary.loss.losses import wrong_heads
from parallelize.base.errors import ParallelizeError, Problem
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.styles.contract import Conversion

_COMPUTE_CHECKS = {
    "embedding": check_embedding,
    "rms_norm": check_rms_norm,
    "channel_norm": check_channel_norm,
    "gated_norm": check_gated_norm,
    "ulysses": check_ulysses,
    "multihead": check_multihead,
    "experts": check_experts,
    "whole experts": check_experts,
    "scaled experts": check_scaled_experts,
}


def problems_of_modules(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Problems of the modules and parameters that a plan changes. resolved, model: of the part that is on this rank."""
    yield from wrong_heads(resolved, model)
    yield from wrong_beside(resolved, model)
    yield from divided_statistics(resolved, model)
    yield from wrong_float8_widths(resolved, model)
    for fqn, row in resolved.modules.items():
        module = model.objects[fqn]
        try:
            if (check := _COMPUTE_CHECKS.get(row.contract.compute)) is not None:
                check(module, fqn)
            if row.contract.enter is not Conversion.NONE:
                argument_of(module, row.contract.argument)
        except ParallelizeError as error:
            for p in error.problems:
                yield Problem(p.slug, f"{fqn}: {p.what}", p.where or row.rule.where, p.rows, p.fix)
    for fqn, parameter_row in resolved.parameters.items():
        if not parameter_row.plain:
            yield from _wrong_with_parameter(fqn, model.root.get_parameter(fqn))
    if resolved.plan.on_unclaimed != "leave":
        yield from foreign_readers(resolved, model)


def _wrong_with_parameter(name: str, parameter: Any) -> Iterator[Problem]:
    if isinstance(parameter, DTensor):
        yield Problem("already-parallelized", f"parameter {name} is a DTensor", fix="apply one plan, once, to all")
    if parameter.grad is not None:
        yield Problem("gradient-present", f"parameter {name} has a gradient", fix="call zero_grad() first")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        fix = "register it after parallelize_module: it then gets the DTensor gradient"
        yield Problem("hook-on-parameter", f"parameter {name} has a hook, which would be lost", fix=fix)
