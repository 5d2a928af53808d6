"""The trace that `parallelize_module` makes by itself, where it takes seconds at most: on a copy of the model without
values.

Every rank traces, on the same shapes, so that all of them come to the same result.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.adapters import makes_prefixes
from parallelize.plan.dims.meta_calls import without_values
from parallelize.plan.dims.plan_check import PlanTrace, trace_plan
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.float8_linears import as_plain_linears
from parallelize.plan.models.model_source import source_of
from parallelize.plan.models.tiny_copy import meta_copy, without_hooks
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.records import pipeline_cut
from parallelize.tools.analysis.record.attention_model import forwards_on_meta

log = logging.getLogger("parallelize")

VARIABLE = "PARALLELIZE_TRACE"
"""An environment variable; `off` is `trace=False` where a call does not say otherwise."""
MAX_MODULES = 5_000
"""A model of more modules is not traced by default. A forward of 1,000 modules is recorded in about half a second."""
SECONDS = 5.0
"""Of processor time: a machine that stands still, or serves others, must not leave a check out."""

_traced_before: dict[tuple[Any, ...], str] = {}  # in this process, without a mistake; or why it could not be
_lock = threading.Lock()  # ranks may be threads, and operations of meta tensors are replaced meanwhile


def check_by_trace(
    module: nn.Module, resolved: ResolvedPlan, trace: bool | None, inputs: Mapping[str, Any] | None = None
) -> None:
    """Follow the dims of a plan through a forward of the stock model, once for each class, config and plan of this
    process.

    Args:
        module: before it is changed. resolved: its plan.
        inputs: of its forward; None: by the model.
        trace: None: where it is quick, and the inputs of the model are known; True: or it is an error; False: not at
            all.

    Raises: PlanError with the mistakes of the plan; with trace=True ModelError `untraceable-model`.
    """
    if trace is False or (trace is None and os.environ.get(VARIABLE) == "off"):
        return
    reason = _why_not(module, resolved, trace is None)
    if not reason:
        key = (type(module), repr(getattr(module, "config", "")), *sorted(resolved.structure().items()))
        with _lock:
            if key not in _traced_before or (trace and _traced_before[key]):
                _traced_before[key] = _traced(module, resolved, trace is None, inputs)
            reason = _traced_before[key]
    if reason and trace:
        fix = "trace=None, which leaves it out; `parallelize verify` compares the numbers"
        raise ModelError(Problem("untraceable-model", f"{type(module).__name__} is not traced: {reason}", fix=fix))
    if reason:
        log.debug("the plan of %s is not traced: %s", type(module).__name__, reason)


def _why_not(module: nn.Module, resolved: ResolvedPlan, is_quick: bool) -> str:
    """Why a plan is not traced; empty: it can be tried."""
    options, rows = resolved.options, resolved.parameters.values()
    if resolved.tp_size == 1 or not any(row.layout.dim is not None for row in rows):
        return "nothing is sharded over tp"
    if resolved.plan.unlowered_styles or any(row.contract.dtensors for row in resolved.modules.values()):
        return "DTensors pass between its modules"
    if any(row.fact.packs != 1 or row.fact.counts != 1 for row in rows):
        return "its weights are quantized"
    if makes_prefixes(resolved.facts):
        return "learned prompts make keys and values of all heads, and each rank takes its own"
    if options.expert_ranks > 1:
        return "its experts are divided over ep"
    if pipeline_cut(module) is not None or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "a part of it is missing, or was changed before"
    count = sum(1 for _ in module.modules())
    if is_quick and count > MAX_MODULES:
        return f"it has {count:,} modules, more than {MAX_MODULES:,}"
    return ""


def _traced(module: nn.Module, resolved: ResolvedPlan, is_quick: bool, inputs: Mapping[str, Any] | None) -> str:
    """Why the plan could not be traced; empty: it has no mistakes. Raises: PlanError with its mistakes."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the forward of the job will warn
            torch.manual_seed(0)  # every rank leaves out the same layers
            random.seed(0)
            result = trace_copy(module, resolved, SECONDS if is_quick else None, inputs)
    except Exception as error:  # a forward may do anything that tensors without values cannot
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finally:
        random.setstate(state)
    if result.problems:
        raise PlanError(*result.problems)
    return ""


def trace_copy(
    module: nn.Module, resolved: ResolvedPlan, seconds: float | None = None, inputs: Mapping[str, Any] | None = None
) -> PlanTrace:
    """Trace a copy of a module without values. seconds: of processor time, after which it is given up. inputs: of its
    forward; None: by the model.

    Raises: ModelError `unknown-inputs`; TimeoutError; what the forward raises.
    """
    end = None if seconds is None else time.thread_time() + seconds
    model = as_plain_linears(without_hooks(meta_copy(module))).train()
    if inputs is None:
        with torch.device("meta"):
            inputs = inputs_of(source_of(model), model)
    inputs = private.tree_map(without_values, dict(inputs))
    with forwards_on_meta(model):
        return trace_plan(model, inputs, resolved, end)
