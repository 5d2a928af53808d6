"""Prefix tuning over `tp`: of the keys and values that PEFT puts before those of each layer, a rank takes those of its
heads.

PEFT computes the prefixes of all layers and heads on every rank, from parameters that are full there. Each rank's
attention sees some heads, so that its gradient of the prefixes is a part; the parts are summed over `tp` in one message
for all layers, before the parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Chunk, Interval, packed
from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops import collectives as ops
from parallelize.plan.adapters import (
    PREFIX_ENCODER,
    layer_name,
)
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.wrapped_models import num_prompt_logits
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.records import (
    PlanRecord,
    applied,
    pipeline_cut,
    record_of,
    resolution_of,
)

Heads = dict[int, tuple[Interval, ...]]
"""Number of a layer -> for each rank of `tp`, the key/value heads of its attention there."""
_agreed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_found: weakref.WeakKeyDictionary[nn.Module, dict[int, Heads]] = weakref.WeakKeyDictionary()


def unserved_prefixes(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Problems for prefix tuning over `tp` of a model whose heads the plan does not split, or that has an encoder
    too."""
    encoders = [name for name, facts in model.modules.items() if facts.class_name == PREFIX_ENCODER]
    for name in encoders if resolved.mesh.ranks("tp") > 1 else ():
        config = model.root.peft_config[name.rpartition(".")[2]]
        if config.num_transformer_submodules != 1:
            yield _problem(f"{name} makes keys and values of an encoder and a decoder")
        elif reason := _missing(
            heads_of_layers(resolved, model.objects, config.num_attention_heads), config.num_layers
        ):
            yield _problem(f"{name} makes keys and values of all {config.num_attention_heads} heads, and {reason}")


def heads_of_layers(resolved: ResolvedPlan, objects: Mapping[str, Any], num_heads: int) -> Heads:
    """Which key/value heads of each layer a rank has, for the layers whose plan divides `num_heads` of them.

    Args:
        objects: the modules of the planned model, by name.
        num_heads: of keys and values, of the unsharded model.
    """
    by_parent: dict[str, list[Chunk]] = {}
    for row in resolved.parameters.values():
        if row.layout.dim is not None:
            attention = layer_name(row.fqn.rpartition(".")[0]).rpartition(".")[0]
            by_parent.setdefault(attention, []).extend(row.layout.chunks)
    heads: Heads = {}
    for name, module in objects.items():
        index = vars(module).get("layer_idx")
        chunk = next((chunk for chunk in by_parent.get(name, ()) if chunk.units == num_heads), None)
        if isinstance(index, int) and chunk is not None:
            unit = Chunk(num_heads, num_heads, chunk.replicable)
            owned = packed((num_heads,), 0, resolved.tp_size, [unit]).owned
            heads[index] = tuple(intervals[0] for intervals in owned)
    return heads


@contextmanager
def readable_prompts(peft_model: Any) -> Iterator[None]:
    """Within the block, PEFT reads the prompts of the active adapter as plain tensors, the same on all ranks of `tp`.

    Gradients of keys and values are summed where they are made, on the first pipeline stage.
    """
    encoder = peft_model.prompt_encoder[peft_model.active_adapter]
    summing = _sum_gradients(encoder, _planned(peft_model)) if num_prompt_logits(peft_model) == 0 else None
    if (base := _planned_base(peft_model)) is not None:
        _take_from_first_rank(encoder, base)
    table = encoder.embedding
    shown = _shown_table(table.weight, peft_model.active_peft_config.inference_mode)
    if shown is not None:
        table.__dict__["weight"] = shown
    try:
        yield
    finally:
        if shown is not None:
            table.__dict__.pop("weight", None)
        if summing is not None:
            summing.remove()


def _shown_table(weight: Any, is_read: bool) -> torch.Tensor | None:
    """What PEFT sees of a table of prompts; None: the parameter itself. Under ZeRO 3, a call of the table gathers it,
    and PEFT reads frozen ones without a call."""
    if not isinstance(weight, DTensor):
        return None
    if all(placement.is_replicate() for placement in weight.placements):
        return private.local_of(weight)
    return weight.full_tensor() if is_read else None


def _planned(peft_model: Any) -> nn.Module | None:
    """The model that was planned: PEFT's, or its base model."""
    return next((m for m in (peft_model, peft_model.get_base_model()) if record_of(m) is not None), None)


def _sum_gradients(encoder: nn.Module, planned: nn.Module | None) -> Any:
    """A hook that sums the gradients of the encoder's results over ranks; None on one rank."""
    record = record_of(planned) if planned is not None else None
    if record is None or record.group.size == 1:
        return None
    group = record.group
    return encoder.register_forward_hook(lambda module, args, output: ops.copy_to_read(output, group))


def _planned_base(peft_model: Any) -> nn.Module | None:
    """The base model, where the plan was given to it, and not to PEFT's model around it."""
    base = peft_model.get_base_model()
    return base if record_of(peft_model) is None and record_of(base) is not None else None


def _take_from_first_rank(encoder: nn.Module, base: nn.Module) -> None:
    """Once: ranks that are not seeded alike have made other prompts."""
    record = record_of(base)
    if encoder in _agreed or record is None or record.group.size == 1:
        return
    for parameter in encoder.parameters():
        record.group.broadcast(parameter.data, 0)
    _agreed.add(encoder)


def local_prefixes(peft_model: Any, prompt: Any) -> Any:
    """What `PeftModel.get_prompt` returns, with the heads of this rank: other prompts than keys and values are as they
    are.

    Args:
        peft_model: that was planned, or whose base model was. prompt: a cache with keys and values [batch, heads,
            tokens, width] of each layer.

    Raises: ModelError `unplanned-adapter`.
    """
    planned = _planned(peft_model)
    record = record_of(planned) if planned is not None else None
    if planned is None or record is None or record.group.size == 1 or isinstance(prompt, torch.Tensor):
        return prompt
    layers = list(getattr(prompt, "layers", ()))
    num_heads = layers[0].keys.shape[1] if layers else 0
    heads = _remembered(planned, record, num_heads)
    if reason := _missing(heads, len(layers)) if layers else f"they are a {type(prompt).__name__}":
        raise ModelError(_problem(f"prefix tuning makes keys and values of all {num_heads} heads, and {reason}"))
    for number, layer in enumerate(layers):
        start, stop = heads[number][record.group.rank]
        layer.keys, layer.values = layer.keys[:, start:stop], layer.values[:, start:stop]
    return prompt


def _remembered(planned: nn.Module, record: PlanRecord, num_heads: int) -> Heads:
    by_count = _found.setdefault(planned, {})
    if num_heads not in by_count:
        # of all pipeline stages: PEFT makes prefixes of all layers
        resolved = resolution_of(planned) or record.resolved
        by_count[num_heads] = heads_of_layers(resolved, dict(planned.named_modules()), num_heads)
    return by_count[num_heads]


def _missing(heads: Heads, num_layers: int) -> str:
    """Why not every layer's heads are known; empty where they are."""
    unknown = [number for number in range(num_layers) if number not in heads]
    return (
        f"the plan says of {len(unknown)} layers, the first number {unknown[0]}, not which of them a rank has"
        if unknown
        else ""
    )


def _problem(what: str) -> Problem:
    return Problem("unplanned-adapter", what, fix="prompt tuning or LoRA; or a mesh without tp")


def serve_local_prefixes() -> None:
    """Let PEFT, where it is imported, give a planned model the keys and values of this rank's heads."""
    prompts: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if prompts is not None:
        patches.replace(prompts, "get_prompt", _prompt_of_local_heads)


def _prompt_of_local_heads(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.get_prompt` of a planned model, whose keys and values of prefix tuning are those of the heads of this
    rank."""

    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        with readable_prompts(peft_model):
            prompt = stock(peft_model, *args, **kwargs)
        return local_prefixes(peft_model, prompt)

    return get_prompt


# -- stage prompts ---------------------------------------------------------------------------------------------------
# Prefix tuning over pipeline stages: of frozen prefixes PEFT reads the table, which the first stage alone has. There
# PEFT is made to call the module instead, which returns the rows of its table. Calls of units are intercepted: what
# this one returns is sent to the later stages. Prompts after the cut would be outside of what stages run, and are
# refused. What is not loaded when a model is cut stays unpatched.


def serve_stage_prompts() -> None:
    """Let PEFT, where it is imported, call the module of frozen prefixes in a model that is cut into stages."""
    model: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if model is not None:
        patches.replace(model, "get_prompt", _prompt_in_call)
        patches.replace(model, "_setup_prompt_encoder", _refuse_prompts_around_stages)


def _refuse_prompts_around_stages(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel._setup_prompt_encoder`. Raises: ModelError `added-parameter` of prompts around a model that is cut:
    steps would not run them."""

    def setup(peft_model: Any, adapter_name: str) -> Any:
        if pipeline_cut(peft_model) is None and pipeline_cut(peft_model.base_model) is not None:
            what = "prompts were added around a model that is cut into stages, whose steps would run without them"
            fix = "get_peft_model(model, config) first, then parallelize_model(model, mesh)"
            raise ModelError(Problem("added-parameter", what, fix=fix))
        return stock(peft_model, adapter_name)

    return setup


def _prompt_in_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        with _called(peft_model):
            return stock(peft_model, *args, **kwargs)

    return get_prompt


@contextmanager
def _called(peft_model: Any) -> Iterator[None]:
    config, encoder = peft_model.active_peft_config, peft_model.prompt_encoder[peft_model.active_adapter]
    is_read = config.inference_mode and type(encoder).__name__ == PREFIX_ENCODER
    if pipeline_cut(peft_model) is None or not is_read:
        yield
        return
    before = encoder.prefix_projection
    config.inference_mode, encoder.prefix_projection = False, hasattr(encoder, "transform")
    try:
        yield
    finally:
        config.inference_mode, encoder.prefix_projection = True, before


# -- later prompts ---------------------------------------------------------------------------------------------------
# Prompts that PEFT puts around a model whose gradients are summed over data ranks: nothing sums theirs. PEFT is not
# loaded: what is not loaded when data axes are applied stays unpatched.


def refuse_later_prompts() -> None:
    """Let PEFT, where it is imported, refuse prompts that train beside such a model."""
    model: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if model is not None:
        patches.replace(model, "get_prompt", _checked)


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.get_prompt`, which every forward calls. Raises: ModelError `added-parameter`."""

    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        _check(peft_model)
        return stock(peft_model, *args, **kwargs)

    return get_prompt


def _check(peft_model: Any) -> None:
    data = applied(peft_model.get_base_model()).data
    if data is None or applied(peft_model).data is not None or not torch.is_grad_enabled():
        return
    encoder = peft_model.prompt_encoder[peft_model.active_adapter]
    trains = any(parameter.requires_grad for parameter in encoder.parameters())
    if trains and data.mesh.spec.data_axes:
        what = "prompts were added after data axes were applied, whose gradients nothing sums over data ranks"
        fix = "get_peft_model(model, config) first, then parallelize_model or shard_data"
        raise ModelError(Problem("added-parameter", what, fix=fix))
