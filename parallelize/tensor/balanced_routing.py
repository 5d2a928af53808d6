"""Mixtures whose routers choose evenly, for benchmarks: the same work on every rank, whatever the weights of the routers are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, Problem
from parallelize.plan.model_facts import describe

T = torch.Tensor


@contextmanager
def balanced_routing(model: nn.Module) -> Iterator[None]:
    """Within the block, each expert of a mixture gets as many tokens as any other: choices of routers are replaced.

    Token t of a call chooses experts t, t + E/k, t + 2E/k, ... modulo E, with the weights that its router gave to the choices that
    are replaced. What the model computes means nothing then; its cost is that of a balanced mixture, and is what `explain` assumes.

    Args:
        model: a mixture, before or after `parallelize_module`.

    Raises: ModelError `no-experts`.
    """
    counts = _experts_of(model)
    if not counts:
        what = f"{type(model).__name__} has no experts that are called with tokens, choices and their weights"
        raise ModelError(
            Problem("no-experts", what, fix="a mixture of `transformers`, or experts with `is_transposed`")
        )
    handles = [
        module.register_forward_pre_hook(partial(_replace_choices, count), with_kwargs=True) for module, count in counts
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _experts_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """(module, number of its experts on all ranks) of each module of experts."""
    facts = describe(model)
    experts = [(fqn, module) for fqn, module in facts.modules.items() if module.kind == "experts"]
    return [(facts.objects[fqn], next(iter(module.shapes.values()))[0]) for fqn, module in experts]


def _replace_choices(count: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    _, *names = inspect.signature(type(module).forward).parameters  # the instance's own may be the planned one
    given = dict(zip(names, args, strict=False)) | kwargs
    choices: T = given[names[1]]
    tokens, k = choices.shape
    even = torch.arange(tokens, device=choices.device)[:, None] + torch.arange(k, device=choices.device) * max(
        1, count // k
    )
    replaced = (even % count).to(choices.dtype)
    if names[1] in kwargs:
        return args, {**kwargs, names[1]: replaced}
    return (args[0], replaced, *args[2:]), kwargs
