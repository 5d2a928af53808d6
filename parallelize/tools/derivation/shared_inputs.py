"""Blocks that convert their input once for the modules inside of them: those whose code reads the shards of their children.

A state-space mixer reads the weight of its convolution, and leaves modules with all features between its input and its column linears,
such as the first of two linears of low rank. Each rank has a part of their gradient, because the input is converted before them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from parallelize.axes.tensor.watch.child_reads import reads_of_children
from parallelize.plan.dims.record import HiddenCall, Record

_DRAWS = re.compile(r"dropout|bernoulli|rand|noise|jitter")
FULL_GRADIENT = "replicate(gradient=full)"
PARTIAL_GRADIENT = "replicate(gradient=partial)"
_IN_TRAINING = re.compile(r"self\.training")


def blocks_that_read_shards(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str], calls: Mapping[str, HiddenCall]
) -> dict[str, str]:
    """`scan` for modules whose forward reads sharded parameters of their children, which then computes with local shards.

    The style runs a mixer as in evaluation, so that one whose own code draws random numbers in training has none.
    """
    blocks: dict[str, str] = {}
    for name, module in modules.items():
        if name in styles or name not in calls or not any(_is_sharded(style) for style in _read(name, module, styles)):
            continue
        classes = [cls for cls in type(module).__mro__ if not cls.__module__.startswith(("torch.", "builtins"))]
        source = "".join(map(inspect.getsource, classes))
        if not (_IN_TRAINING.search(source) and _DRAWS.search(source)):
            blocks[name] = with_argument("scan", calls[name])
    return blocks


def _read(name: str, module: nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """The styles of the children whose parameters a module's forward reads."""
    cls: Any = type(module)
    for read in reads_of_children(cls):
        if not isinstance(getattr(module, read.child, None), nn.Module):
            continue
        yield styles.get(f"{name}.{read.child}", styles.get(f"{name}.{read.child}.{read.parameter}", ""))


def _is_sharded(style: str) -> bool:
    return style != "" and not style.startswith(("replicate", "sequence"))


def with_argument(word: str, call: HiddenCall) -> str:
    """The style of a block with the argument that it converts, where that is not its first."""
    position, key = call.argument
    return f"{word}({key})" if position != 0 and key else word


def partial_inside(
    record: Record, block: str, modules: Mapping[str, nn.Module], styles: Mapping[str, str]
) -> dict[str, str]:
    """`replicate(gradient=partial)` for what is full on each rank in a block, and is read before its last row linear."""
    inside = [use for use in record.uses if f"{use.module}.".startswith(f"{block}.")]
    rows = [index for index, use in enumerate(inside) if styles.get(use.module, "").startswith("rowwise")]
    names = {name for use in inside[: rows[-1] if rows else 0] for name in use.weights}
    partial: dict[str, str] = {}
    for name in sorted(names):
        module = name.rpartition(".")[0]
        if styles.get(module, FULL_GRADIENT) != FULL_GRADIENT or name in styles or not module.startswith(f"{block}"):
            continue
        if modules[module].get_parameter(name.rpartition(".")[2]).requires_grad:
            partial[name if module == block else module] = PARTIAL_GRADIENT
    return partial
