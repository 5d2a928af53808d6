"""`generate` of `transformers` on a planned model.

Most of it works unchanged: a rank's cache stores the keys and values of its local heads, because it takes its sizes
from the layers, and with one token at a time sequence parallelism is off. Two things change while it runs: a head that
keeps its logits sharded gathers them, and every rank uses the generator state of the group's first rank. Over `cp` each
rank also stores a part of the cache's tokens, and gets the last token's logits: see `axes/context/cached_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits, gathered
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.comm.same_host import through_shared_memory
from parallelize.plan.styles.contract import Conversion
from parallelize.state.records import ModuleState, applied, inside_adapters, mark_applied, pipeline_cut, record_of


def install_generation(module: nn.Module) -> None:
    """Wrap the `generate` of a planned model as described above. A model without one is not changed."""
    if callable(getattr(type(module), "generate", None)) and "generate" not in module.__dict__:
        module.__dict__["generate"] = MethodType(_generate, module)
        # it counts all heads; without it the first keys set the shape
        if hasattr(module, "_get_static_cache_init_shape"):
            module.__dict__["_get_static_cache_init_shape"] = _unknown_shape
        if hasattr(module, "_prepare_cache_for_generation"):
            module.__dict__["_prepare_cache_for_generation"] = MethodType(_prepare_cache, module)


def _unknown_shape() -> None:
    return None


def _prepare_cache(self: Any, config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`_prepare_cache_for_generation`; over `cp` each rank stores its tokens of the cache, so that no mask of all
    tokens is made."""
    out = type(self)._prepare_cache_for_generation(self, config, model_kwargs, *args, **kwargs)
    context, cache = applied(self).context, model_kwargs.get("past_key_values")
    if context is not None and cache is not None:
        context.shard_cache(cache)
    return out


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_split(self)
    with full_logits(self), fast_generation(self), ExitStack() as stack:
        device = _device_of(self)
        for group in generating_groups(self):
            stack.enter_context(same_generator_states(group, device))
        return type(self).generate(self, *args, **kwargs)


@contextmanager
def fast_generation(module: nn.Module) -> Iterator[None]:
    """A context in which ranks generate together: sums through shared memory, and over `cp` the last logits on every
    rank."""
    context = applied(module).context
    with ExitStack() as stack:
        for group in generating_groups(module):
            stack.enter_context(through_shared_memory(group, _device_of(module).type))
        if context is not None:
            stack.enter_context(context.in_generation())
        yield


def generating_groups(module: nn.Module) -> list[Group]:
    """The groups whose ranks generate the same tokens: of `cp`, then of `tp`, so that the first rank's state reaches
    all."""
    record, context = record_of(module), applied(module).context
    return [part.group for part in (context, record) if part is not None]


def _device_of(module: nn.Module) -> torch.device:
    record, context = record_of(module), applied(module).context
    part = context if record is None else record
    return torch.device("cpu" if part is None else part.mesh.device_type)


def refuse_split(module: nn.Module) -> None:
    """Refuse models whose ranks cannot generate together.

    Raises: ModelError `cut-model` if other ranks have some of the pipeline stages; `generate-over-ep` if ranks with
        other sequences have some of the experts, so that a rank whose sequences have ended would leave them waiting.
    """
    root = inside_adapters(module)
    cut = pipeline_cut(root)
    if cut is not None and len(cut.local_stages) < len(cut.stage_ranks):
        what = f"this rank has {len(cut.local_stages)} of the {len(cut.stage_ranks)} stages of {type(module).__name__}"
        fix = "save a checkpoint, and generate on a mesh without pp: any mesh can load it"
        raise ModelError(Problem("cut-model", what, fix=fix))
    record = record_of(root)
    if record is not None and record.folded is not None:
        what = (
            f"the experts of {type(module).__name__} are divided over {record.resolved.options.expert_ranks} ranks, of "
            "which some have other sequences"
        )
        fix = "save a checkpoint, and generate on a mesh where ep x etp is at most tp: any mesh can load it"
        raise ModelError(Problem("generate-over-ep", what, fix=fix))


@contextmanager
def full_logits(module: nn.Module) -> Iterator[None]:
    """A context in which heads that keep their logits sharded gather them (one all-gather per forward), also in
    compiled graphs."""
    record = record_of(module)
    rows = record.resolved.modules.values() if record is not None else ()
    with ExitStack() as changes:
        for row in rows:
            if row.contract.defers_logits:
                for head in _with_copies(module, row.fqn):
                    changes.callback(head.register_forward_hook(_gather).remove)
                    changes.callback(mark_applied, head, gathers_logits=applied(head).gathers_logits)
                    mark_applied(head, gathers_logits=True)
            elif row.contract.leave is Conversion.VOCABULARY:
                for head in _with_copies(module, row.fqn):
                    changes.enter_context(_output_gathered(applied(head).planned))
        yield


def _with_copies(module: nn.Module, name: str) -> list[nn.Module]:
    """The head of this name. Where PEFT has put a wrapper in its place after the plan: the head inside of it, and each
    copy that is trained (`modules_to_save`)."""
    return [inner for inner in module.get_submodule(name).modules() if _keeps_logits(applied(inner))]


def _keeps_logits(state: ModuleState) -> bool:
    marks = getattr(state.planned, "leave", None)
    return state.defers_logits or (isinstance(marks, partial) and "vocabulary" in marks.keywords)


@contextmanager
def _output_gathered(planned: Any) -> Iterator[None]:
    """A context in which a head's forward gathers its logits instead of marking them, which no graph can contain."""
    before = planned.leave
    planned.leave = partial(gathered, vocabulary=before.keywords["vocabulary"])
    try:
        yield
    finally:
        planned.leave = before


def _gather(module: nn.Module, args: Any, out: Any) -> Any:
    return out.full_tensor() if isinstance(out, ShardedLogits) else out


@contextmanager
def same_generator_states(group: Group, device: torch.device) -> Iterator[None]:
    """A context in which torch's generators on every rank have the state of those on the group's first rank.

    On exit, the generators of a rank that started with another state are set back to that state. The other ranks
    continue with the advanced state.

    Cost: one broadcast of the generators' states, 5 KB on a CPU.
    """
    if group.size == 1:
        yield
        return
    local = _states(device)
    first = local.to(device, copy=True)
    group.broadcast(first, 0)
    first = first.cpu()
    _set_states(first, device)
    try:
        yield
    finally:
        if not torch.equal(first, local):
            _set_states(local, device)


def _states(device: torch.device) -> torch.Tensor:
    """The states of torch's CPU generator and of the device's generator, as bytes."""
    of_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state()]
    return torch.cat([torch.get_rng_state(), *of_device])


def _set_states(states: torch.Tensor, device: torch.device) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(states[:size].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[size:].clone())
