"""Where activations may be sequence shards: the layers that a model calls one after another on hidden states.

What is found here is a proposal. Whether an operation inside needs all tokens is settled by the proof, which runs the
sequence-parallel modes of the plan with lengths that the ranks do not divide.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelize.axes.tensor.watch.child_reads import reads_of_children
from parallelize.plan.dims.factor_analysis import is_convolution
from parallelize.plan.dims.record import HiddenCall, Record


@dataclass(frozen=True)
class ProposedRegion:
    """A sequence-parallel region, with the styles that it needs.

    Attributes:
        layers: the name of the list. leave: the module after which activations are full again.
        styles: of the blocks that gather their input, of the modules that work on each token, and of the column linears
            whose input has another length: what an encoder returned, which is full.
    """

    layers: str
    leave: str
    styles: Mapping[str, str]

    @property
    def section(self) -> dict[str, str]:
        return {"layers": self.layers, **({"leave": self.leave} if self.leave else {})}


def find_regions(record: Record, model: nn.Module, styles: Mapping[str, str]) -> list[ProposedRegion]:
    """The regions of a draft, in the order of the forward: one, or those of an encoder and a decoder, or of towers.

    styles: by name, of what is sharded.
    """
    calls = {call.module: call for call in record.calls}
    modules = dict(model.named_modules())
    names = [
        name
        for name, module in _chains(modules, calls)
        if not any(f"{name}.{index}" in styles for index in range(len(module)))  # a linear converts its own input
    ]
    order = {name: index for index, name in enumerate(calls)}
    outer = sorted(_outermost(names), key=lambda name: order[f"{name}.0"])
    return [_proposed(name, record, modules, calls, styles) for name in outer]


def layer_lists(record: Record, model: nn.Module) -> list[str]:
    """The names of the lists of layers: the outermost ones, each of whose modules goes on from the one before it, and
    of whose insides nothing is called from outside: ZeRO gathers the parameters of a layer for its own forward."""
    calls = {call.module: call for call in record.calls}
    lists = _outermost([name for name, _ in _chains(dict(model.named_modules()), calls)])
    return [name for name in lists if not _is_reached_from_outside(name, record)]


def _is_reached_from_outside(layers: str, record: Record) -> bool:
    """Whether a forward calls a module inside of a layer and not the layer, as the embedding of times that all layers
    of DiT have."""
    depth = layers.count(".") + 2
    inside = [(name.split("."), caller) for name, caller in record.callers if name.startswith(f"{layers}.")]
    return any(
        len(parts) > depth and not f"{caller}.".startswith(".".join([*parts[:depth], ""])) for parts, caller in inside
    )


def _chains(modules: Mapping[str, nn.Module], calls: Mapping[str, HiddenCall]) -> list[tuple[str, nn.ModuleList]]:
    lists = [(name, module) for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    return [(name, module) for name, module in lists if _is_chain(name, module, calls)]


def _outermost(lists: list[str]) -> list[str]:
    """The lists that are not inside of another one: a layer of T5 is a list of its parts, which are a chain as well."""
    return [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]


def _proposed(
    layers: str,
    record: Record,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, HiddenCall],
    styles: Mapping[str, str],
) -> ProposedRegion:
    leave = _final_norm(layers, modules, calls)
    own = {name: style for name, style in styles.items() if name.startswith(layers + ".")}
    flat = {name for name in own if isinstance(modules.get(name), nn.Linear) and name not in calls}
    length = calls[f"{layers}.0"].shape[1]
    full = {
        name
        for name in own
        if name in calls and calls[name].shape[1] != length and not is_convolution(modules.get(name))
    }
    blocks = _gathering_blocks(layers, {name: style for name, style in own.items() if name not in flat | full}, calls)
    inside = {name for name in modules if name.startswith(layers + ".")} | ({leave} if leave else set())
    by_token = {
        name: "sequence"
        for name in inside
        if next(modules[name].parameters(recurse=False), None) is not None
        and name not in styles
        and not any(name == block or name.startswith(block + ".") for block in blocks)
    }
    other = {name: _style_of_tokens(styles[name]) for name in flat}
    for block in blocks:
        other |= partial_inside(record, block, modules, styles)
    other |= {name: _add_option(styles[name], "input=full") for name in full if styles[name].startswith("colwise")}
    return ProposedRegion(layers, leave, {**blocks, **by_token, **other})


def _is_chain(name: str, module: nn.ModuleList, calls: Mapping[str, HiddenCall]) -> bool:
    """Whether each of the modules is called on the shape that the one before it returned."""
    chain = [calls.get(f"{name}.{index}") for index in range(len(module))]
    if len(chain) < 2 or any(call is None or call.out != call.shape for call in chain):
        return False
    return len({call.shape for call in chain if call is not None}) == 1


def _final_norm(layers: str, modules: Mapping[str, nn.Module], calls: Mapping[str, HiddenCall]) -> str:
    """The module with parameters that is called on the last layer's result, if it keeps the shape: the final norm."""
    last = calls[f"{layers}.{len(modules[layers]) - 1}"]  # type: ignore[arg-type]
    for name, call in calls.items():
        follows = call.source == last.result and call.out == call.shape and not name.startswith(layers + ".")
        parameters = list(modules[name].parameters())
        if follows and parameters and all(parameter.ndim == 1 for parameter in parameters):
            return name
    return ""


def _style_of_tokens(style: str) -> str:
    """The style of a linear that is called on [tokens, width]."""
    return _add_option(style, f"{'input' if style.startswith('colwise') else 'output'}=tokens")


def _add_option(style: str, option: str) -> str:
    """The style with one more option."""
    word, _, options = style.partition("(")
    return f"{word}({options.rstrip(')')}{', ' if options else ''}{option})"


def _gathering_blocks(layers: str, styles: Mapping[str, str], calls: Mapping[str, HiddenCall]) -> dict[str, str]:
    """`gather` for the modules in a layer that contain column linears and are called on hidden states."""
    blocks = {name: style for name, style in styles.items() if style.startswith(("scan", "gather"))}
    for name, style in styles.items():
        if not style.startswith("colwise"):
            continue
        parent = name.rpartition(".")[0]
        while parent not in calls and parent.count(".") > layers.count(".") + 1:
            parent = parent.rpartition(".")[0]
        if parent.count(".") <= layers.count(".") + 1:  # a column linear of the layer itself gathers its own input
            continue
        blocks.setdefault(parent, with_argument("gather", calls[parent]))
    return {name: style for name, style in blocks.items() if not any(name.startswith(f"{outer}.") for outer in blocks)}


# -- shared inputs ---------------------------------------------------------------------------------------------------
# Blocks that convert their input once for the modules inside of them: those whose code reads the shards of their
# children. A state-space mixer reads the weight of its convolution, and leaves modules with all features between its
# input and its column linears, such as the first of two linears of low rank. Each rank has a part of their gradient,
# because the input is converted before them.


_DRAWS = re.compile(r"dropout|bernoulli|rand|noise|jitter")
FULL_GRADIENT = "replicate(gradient=full)"
PARTIAL_GRADIENT = "replicate(gradient=partial)"
_IN_TRAINING = re.compile(r"self\.training")


def blocks_that_read_shards(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str], calls: Mapping[str, HiddenCall]
) -> dict[str, str]:
    """`scan` for modules whose forward reads sharded parameters of their children, which then computes with local
    shards.

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
    """`replicate(gradient=partial)` for what is full on each rank in a block, and is read before its last row
    linear."""
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
