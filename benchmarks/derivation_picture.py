"""Draws the picture of docs/derive.md: the linears of one layer, with their dims in colors: each color is one axis of
the computation.

python -m benchmarks.derivation_picture
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from parallelize import derive_plan
from parallelize.base.pictures.svg import box, legend, line, picture, standalone, text_at
from parallelize.plan.dims.factor_analysis import FactorAnalysis, output_dim
from parallelize.plan.dims.factors import Factor, size_of
from parallelize.plan.dims.trace import record_forward
from parallelize.plan.models.example_inputs import inputs_of
from parallelize.plan.models.model_source import source_of
from parallelize.plan.pattern import is_default, matches
from parallelize.plan.schema import Plan

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "derived_layer.svg"
MODEL_TYPE, LAYER, TP = "phi3", "model.layers.0.", 2
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
TITLE = "A layer of Phi 3: which dims are one axis, and what is divided over tp=2"
_NAME, _INPUT, _OUTPUT, _STYLE, _WIDTH = 14.0, 164.0, 394.0, 620.0, 900.0
_BAR, _HEIGHT, _ROW, _TOP = 190.0, 22.0, 58.0, 72.0

Colors = Mapping[Factor, str]


def draw() -> str:
    """The picture, as a standalone SVG."""
    derived = derive_plan(MODEL_TYPE, verified=False)
    model = derived.model
    analysis = FactorAnalysis(record_forward(model, inputs_of(source_of(MODEL_TYPE), model)), model)
    candidates = [c for c in analysis.choose().candidates if any(name.startswith(LAYER) for name in c.linears)]
    colors = {candidate.factor: f"c{2 * index}" for index, candidate in enumerate(candidates)}
    body = [text_at(_NAME, 24, TITLE, style="title", size=15)]
    heads = ((_INPUT, "input"), (_OUTPUT, "output"), (_STYLE, "style in the plan"))
    body += [text_at(x, 54, head, style="quiet") for x, head in heads]
    for number, name in enumerate(LINEARS):
        body += _draw_linear(analysis, LAYER + name, _style(derived.plan, LAYER + name), colors, _TOP + number * _ROW)
    hidden = analysis.parts_of(analysis.record.parameters[f"{LAYER}{LINEARS[0]}.weight"][1])[0][0]
    entries = [(color, f"one axis of {factor.size}: rank 0 dark, rank 1 pale") for factor, color in colors.items()]
    entries.append(("c6 pale3", f"full on each rank: {analysis.blocked[hidden].reason}"))
    keys, bottom = legend(entries, _NAME, _WIDTH, _TOP + len(LINEARS) * _ROW + 6)
    return standalone(picture(TITLE, _WIDTH, bottom + 8, [*body, *keys]))


def _style(plan: Plan, name: str) -> str:
    return next(str(rule.style) for rule in plan.rules if matches(rule.pattern, name) and not is_default(rule.pattern))


def _draw_linear(analysis: FactorAnalysis, name: str, style: str, colors: Colors, top: float) -> Iterator[str]:
    weight = analysis.record.parameters[f"{name}.weight"]
    out = output_dim(analysis.linears[name])
    yield text_at(_NAME, top + 15, name.removeprefix(LAYER), style="title", size=13)
    yield from _bar(analysis.parts_of(weight[1 - out]), colors, _INPUT, top)
    yield line((_INPUT + _BAR + 10, top + _HEIGHT / 2), (_OUTPUT - 10, top + _HEIGHT / 2), "edge")
    yield from _bar(analysis.parts_of(weight[out]), colors, _OUTPUT, top)
    yield text_at(_STYLE, top + 15, style, size=12)


def _bar(parts: tuple[tuple[Factor, ...], ...], colors: Colors, left: float, top: float) -> Iterator[str]:
    """The parts of a dim beside each other: the factors of each below it, the shard of each rank in a shade."""
    total = sum(map(size_of, parts))
    for part in parts:
        width = _BAR * size_of(part) / total
        color = next((colors[factor] for factor in part if factor in colors), None)
        for rank in range(TP if color else 1):
            shade = f"{color} {'pale2' if rank else ''}".rstrip() if color else "c6 pale3"
            yield box(left + rank * width / TP, top, width / (TP if color else 1), _HEIGHT, shade)
        yield box(left, top, width, _HEIGHT, "outline")
        factors = " x ".join(str(factor.size) for factor in part)
        yield text_at(left + width / 2, top + _HEIGHT + 13, factors, "middle", "quiet", 10)
        left += width


if __name__ == "__main__":
    IMAGE.write_text(draw())
    print(IMAGE)
