"""Mixtures whose routers choose evenly, for benchmarks: the same work on every rank, whatever the weights of the routers are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.model_facts import describe
from parallelize.state.records import pipeline_cut

T = torch.Tensor


@contextmanager
def balanced_routing(model: nn.Module) -> Iterator[None]:
    """Within the block, each expert of a mixture gets as many tokens as any other: choices of routers are replaced.

    Token t of a call chooses experts t, t + E/k, t + 2E/k, ... modulo E, with the weights that its router gave to the choices that
    are replaced. What the model computes means nothing then; its cost is that of a balanced mixture, and is what `explain` assumes.

    Args:
        model: a mixture, before or after `parallelize_module`.

    Returns: a context manager.
    Raises: ModelError `no-experts`.
    """
    handles = [
        module.register_forward_pre_hook(partial(_replace_choices, count), with_kwargs=True)
        for _, module, count in experts_of(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """(name, module, number of its experts on all ranks) of each module of experts; a pipeline stage may have none.

    Raises: ModelError `no-experts`.
    """
    facts = describe(model)
    names = [fqn for fqn, module in facts.modules.items() if module.kind == "experts"]
    if not names and pipeline_cut(model) is None:
        what = f"{type(model).__name__} has no experts that are called with tokens, choices and their weights"
        raise ModelError(
            Problem("no-experts", what, fix="a mixture of `transformers`, or experts with `is_transposed`")
        )
    return [(fqn, facts.objects[fqn], facts.modules[fqn].num_experts) for fqn in names]


def choices_of(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> T:
    """The choices [tokens, k] of a call of experts."""
    return args[1] if len(args) > 1 else kwargs[_name_of_choices(module)]


def _name_of_choices(module: nn.Module) -> str:
    return list(inspect.signature(type(module).forward).parameters)[2]  # the instance's own may be the planned one


def _replace_choices(count: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    choices = choices_of(module, args, kwargs)
    tokens, k = choices.shape
    first, steps = torch.arange(tokens, device=choices.device), torch.arange(k, device=choices.device)
    replaced = ((first[:, None] + steps * max(1, count // k)) % count).to(choices.dtype)
    if len(args) > 1:
        return (args[0], replaced, *args[2:]), kwargs
    return args, {**kwargs, _name_of_choices(module): replaced}
