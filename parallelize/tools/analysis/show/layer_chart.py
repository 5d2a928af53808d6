"""Pictures of one layer over `tp`: what each rank has of the inputs, the weights and the outputs of its modules, and
what is sent.

Each color is a rank. An activation is tokens (down) by features (across); a weight is drawn as it is stored, dim 0
down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelize.base.pictures.svg import box, legend, line, picture, shortened, standalone, text_at
from parallelize.base.terminal.numbers import shape
from parallelize.plan.resolved import ModuleRow, ParameterRow, ResolvedPlan
from parallelize.plan.styles.contract import Conversion

_ROW, _TILE, _TILE_HEIGHT, _TOP = 84.0, 78.0, 46.0, 64.0
_NAME, _INPUT, _WEIGHT, _OUTPUT, _WIDTH = 14.0, 300.0, 500.0, 700.0, 800.0

FULL, TOKENS, FEATURES, SUMMANDS = "full on each rank", "tokens sharded", "features sharded", "summands on each rank"
_AFTER = {
    Conversion.COPY: FULL,
    Conversion.REDUCE: FULL,
    Conversion.SUM_BOTH: FULL,
    Conversion.GATHER_SEQUENCE: FULL,
    Conversion.SCATTER_SEQUENCE: TOKENS,
    Conversion.ENTER_REGION: TOKENS,
    Conversion.LEAVE_REGION: FULL,
    Conversion.GATHER_LAST: FULL,
    Conversion.SPLIT_LAST: FEATURES,
    Conversion.SPLIT_TOKENS: TOKENS,
    Conversion.GATHER_TOKENS: FULL,
    Conversion.VOCABULARY: FEATURES,
}


@dataclass(frozen=True)
class LayerStep:
    """One module of a layer.

    Attributes:
        reads, writes: how its input and its output are laid out, each outside of the module.
        weight: its matrix; None for a module without one.
    """

    row: ModuleRow
    reads: str
    writes: str
    weight: ParameterRow | None


def layer_steps(resolved: ResolvedPlan, layer: str) -> Iterator[LayerStep]:
    """The modules of a layer that a rule names, in the order of the model."""
    between = TOKENS if resolved.regions else FULL  # of what blocks hand to each other
    for fqn, row in resolved.modules.items():
        if not fqn.startswith(layer + "."):
            continue
        traits, contract = row.contract.traits, row.contract
        is_inside = contract.enter is Conversion.NONE and not traits.by_token and not contract.sends_tokens
        reads = FEATURES if traits.sums_output else FULL if is_inside else between
        result = (
            SUMMANDS if traits.sums_output else FEATURES if traits.splits_output else _AFTER.get(contract.enter, reads)
        )
        weights = [p for p in resolved.parameters.values() if p.fqn.rpartition(".")[0] == fqn and len(p.fact.shape) > 1]
        yield LayerStep(row, reads, _AFTER.get(contract.leave, result), weights[0] if weights else None)


def draw_layer(resolved: ResolvedPlan, layer: str, title: str) -> str:
    """A standalone SVG of one layer.

    Args:
        resolved: a plan over `tp`.
        layer: fqn of the layer.
    """
    steps = list(layer_steps(resolved, layer))
    ranks = resolved.tp_size
    body = [text_at(_NAME, 24, title, style="title", size=15)]
    heads = ((_INPUT, "input"), (_WEIGHT, "weight"), (_OUTPUT, "output"))
    body += [text_at(x + _TILE / 2, 50, head, "middle", "quiet") for x, head in heads]
    for number, step in enumerate(steps):
        body += _draw_step(step, ranks, _TOP + number * _ROW, len(layer) + 1)
    entries = [(f"c{rank % 8}", f"rank {rank}") for rank in range(ranks)] + [("c6 pale3", FULL)]
    body.append(text_at(_WIDTH - 14, 24, "sent in forward, (in backward)", "end", "quiet", 11))
    keys, bottom = legend(entries, _NAME, _WIDTH, _TOP + len(steps) * _ROW + 4)
    return standalone(picture(title, _WIDTH, bottom + 8, [*body, *keys]))


_LINE, _CODE_END, _PART, _LINES_WIDTH = 46.0, 220.0, 56.0, 800.0


def draw_lines(resolved: ResolvedPlan, layer: str, block: str, title: str) -> str:
    """A standalone SVG of the lines of a plan for one block of a layer: what each does to the weight on each rank, and
    what is sent.

    Args:
        resolved: a plan over `tp`.
        layer, block: fqn of the layer, and where the names of the block's modules begin in it, such as `mlp`.
    """
    steps = [step for step in layer_steps(resolved, layer) if block in step.row.fqn[len(layer) + 1 :]]
    ranks = range(resolved.tp_size)
    weights = _CODE_END + 26
    after = weights + (_PART + 14) * len(ranks) + 20
    body = [text_at(_NAME, 24, title, style="title", size=15)]
    heads = [(_NAME, "a line of the plan"), (after, "the weight"), (after + 175, "sent, forward / backward")]
    body += [text_at(x, 52, head, style="quiet") for x, head in heads]
    body += [text_at(weights + (_PART + 14) * n + _PART / 2, 52, f"rank {n}", "middle", "quiet") for n in ranks]
    for number, step in enumerate(steps):
        top = _TOP + number * _LINE
        middle, weight = top + 20, step.weight
        code = f"{step.row.fqn[len(layer) + 1 :]}: {step.row.contract.style}"
        body.append(text_at(_NAME, middle, shortened(code, _CODE_END), style="title", size=13))
        if weight is not None:
            body += _parts(weight, weights, top, len(ranks))
            said = f"{shape(weight.layout.local_shape(0))} of {shape(weight.fact.shape)}"
            body.append(text_at(after, middle, said, style="quiet"))
        if sent := _sent(step.row):
            body.append(text_at(after + 175, middle, sent, style="warn"))
    return standalone(picture(title, _LINES_WIDTH, _TOP + len(steps) * _LINE + 4, body))


def _parts(weight: ParameterRow, left: float, top: float, ranks: int) -> list[str]:
    """For each rank the outline of a weight, with the part that it stores in its color."""
    body, dim, height = [], weight.layout.dim, _LINE - 14
    for rank in range(ranks):
        x = left + (_PART + 14) * rank
        if dim is None:
            body.append(box(x, top, _PART, height, "c6 pale3"))
        elif dim == 0:
            body.append(box(x, top + rank * height / ranks, _PART, height / ranks, f"c{rank % 8}"))
        else:
            body.append(box(x + rank * _PART / ranks, top, _PART / ranks, height, f"c{rank % 8}"))
        body.append(box(x, top, _PART, height, "outline"))
    return body


def _sent(row: ModuleRow) -> str:
    """What a module's boundary sends: `input: all-gather / reduce-scatter`."""
    sides = (("input", row.contract.enter), ("output", row.contract.leave))
    named = ((side, c.forward or "-", c.backward or "-") for side, c in sides if c.forward or c.backward)
    return "; ".join(f"{side}: {there} / {back}".replace("_", "-") for side, there, back in named)


def _draw_step(step: LayerStep, ranks: int, top: float, prefix: int) -> list[str]:
    contract, middle = step.row.contract, top + _TILE_HEIGHT / 2
    body = [text_at(_NAME, middle - 2, shortened(step.row.fqn[prefix:], 210), style="title", size=13)]
    body.append(text_at(_NAME, middle + 14, contract.style, style="quiet", size=11))
    body += _activation(step.reads, _INPUT, top, ranks)
    body += _arrow(_INPUT + _TILE, _WEIGHT if step.weight is not None else _OUTPUT, middle, contract.enter)
    if step.weight is not None:
        body += _bands(step.weight.layout.dim, _WEIGHT, top, ranks)
        body.append(
            text_at(_WEIGHT + _TILE / 2, top + _TILE_HEIGHT + 13, shape(step.weight.fact.shape), "middle", "quiet", 10)
        )
        body += _arrow(_WEIGHT + _TILE, _OUTPUT, middle, contract.leave)
    return [*body, *_activation(step.writes, _OUTPUT, top, ranks)]


def _activation(kind: str, left: float, top: float, ranks: int) -> list[str]:
    dim = {TOKENS: 0, FEATURES: 1}.get(kind)
    return [
        *_bands(dim, left, top, ranks),
        text_at(left + _TILE / 2, top + _TILE_HEIGHT + 13, kind, "middle", "quiet", 10),
    ]


def _bands(dim: int | None, left: float, top: float, ranks: int) -> list[str]:
    """A matrix whose dim is divided over the ranks; in one color if each has all of it."""
    body = [] if dim is not None else [box(left, top, _TILE, _TILE_HEIGHT, "c6 pale3")]
    for rank in range(ranks if dim is not None else 0):
        fill = f"c{rank % 8}"
        if dim == 0:
            body.append(box(left, top + rank * _TILE_HEIGHT / ranks, _TILE, _TILE_HEIGHT / ranks, fill))
        else:
            body.append(box(left + rank * _TILE / ranks, top, _TILE / ranks, _TILE_HEIGHT, fill))
    return [*body, box(left, top, _TILE, _TILE_HEIGHT, "outline")]


def _arrow(start: float, stop: float, y: float, conversion: Conversion) -> list[str]:
    """From one tile to the next, with what is sent in forward above it, and in backward below."""
    middle = (start + stop) / 2
    body = [line((start + 6, y), (stop - 8, y), "edge"), line((stop - 13, y - 4), (stop - 8, y), "edge")]
    body.append(line((stop - 13, y + 4), (stop - 8, y), "edge"))
    if conversion.forward:
        body.append(text_at(middle, y - 7, conversion.forward.replace("_", "-"), "middle", "warn", 11))
    if conversion.backward:
        body.append(text_at(middle, y + 17, f"({conversion.backward.replace('_', '-')})", "middle", "quiet", 11))
    return body
