"""Lowers a dict of style objects into a plan: rules with contracts, wherever a style means the same.

A plan has what a dict lacks: overlap, fused loss, `explain`, `verify`, checkpoints by plan. What cannot be lowered is applied as
it is (`Plan.kept`), and parameters that no style names stay plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement

from parallelize.plan.choose import plan_of, plan_or_none
from parallelize.plan.model_facts import ModelFacts, describe
from parallelize.plan.options import Options
from parallelize.plan.schema import KeptStyle, Plan, Rule
from parallelize.styles import pytorch  # noqa: F401, so that its words are known
from parallelize.styles.style import StyleText
from parallelize.tensor.placements import dim_of
from parallelize.tensor.torch_styles.boundary import PrepareModuleInput, SequenceParallel
from parallelize.tensor.torch_styles.dicts import is_styles, match_styles, spelled
from parallelize.tensor.torch_styles.input_reads import readers_of_input, readers_of_output
from parallelize.tensor.torch_styles.linear import ColwiseParallel, RowwiseParallel


def plan_of_styles(module: nn.Module, plan: Any) -> Plan:
    """`plan_of`, also for PyTorch's style objects: one, or a dict of name patterns to them.

    The plan's sections for other axes than `tp` are those of the model's own plan, where it has one.

    Raises: as `match_styles`, and as `plan_of`.
    """
    return _Lowering(module, match_styles(module, plan)).run() if is_styles(plan) else plan_of(module, plan)


def passes_dtensors(plan: Plan) -> str:
    """Why DTensors pass between modules, where collectives then cannot overlap with matmuls; empty where they do not."""
    reasons = [f"{item.fqn}: {item.reason}" for item in plan.kept]
    norms = (rule for rule in plan.rules if rule.style.traits.by_token and "output_type" in rule.style.options)
    return "; ".join([*reasons, *(f"code may read the DTensor that {rule.pattern} returns" for rule in norms)])


class _Lowering:
    """Makes one rule for each module whose styles can be lowered."""

    def __init__(self, module: nn.Module, matched: Sequence[tuple[str, nn.Module, Any]]):
        self.module, self.matched = module, matched
        self.facts: ModelFacts = describe(module)
        self.styles: dict[int, list[Any]] = {}
        for _, target, style in matched:
            self.styles.setdefault(id(target), []).append(style)
        self.gathered: set[int] = set()  # linears whose block gathers their input

    def run(self) -> Plan:
        rules: list[Rule] = []
        kept: list[KeptStyle] = []
        blocks = [match for match in self.matched if isinstance(match[2], PrepareModuleInput)]
        others = [match for match in self.matched if not isinstance(match[2], PrepareModuleInput)]
        for fqn, target, style in [*blocks, *others]:  # what a block gathers decides how its linears begin
            text = self._style(fqn, target, style)
            if isinstance(text, str):
                kept.append(KeptStyle(fqn, style, spelled(style), text))
            else:
                rules.append(Rule(self.facts.aliases[fqn], text, "style"))
        order = {id(style): index for index, (_, _, style) in enumerate(self.matched)}
        kept.sort(key=lambda item: order[id(item.style)])
        own = plan_or_none(self.module, None) or Plan("", ())
        tp: dict[str, Any] = {"rules": tuple(rules), "sizes": {}, "region": None, "local": (), "kept": tuple(kept)}
        return replace(own, name="styles", options=Options(), source="", unclaimed="leave", **tp)

    def _style(self, fqn: str, target: nn.Module, style: Any) -> StyleText | str:
        """The style of the rule; or, as text, why there is none."""
        if len(self.styles[id(target)]) > 1:
            return "the module has several styles"
        if isinstance(style, ColwiseParallel):
            return self._colwise(fqn, target, style)
        if isinstance(style, RowwiseParallel):
            return self._rowwise(fqn, style)
        if isinstance(style, SequenceParallel):
            return self._sequence(fqn, style)
        if isinstance(style, PrepareModuleInput):
            return self._gather(fqn, target, style)
        return f"a {type(style).__name__} has no equivalent"

    def _colwise(self, fqn: str, target: nn.Module, style: ColwiseParallel) -> StyleText | str:
        source, output = _text(style.input_layouts[0]), _text(style.output_layouts[0])
        is_embedding = self._kind(fqn) == "embedding"
        if source != "replicate" and (is_embedding or not source.startswith("dim")):
            return f"its input is {style.input_layouts[0]}"
        if output not in ("replicate", "features"):
            return f"its output is {style.output_layouts[0]}"
        options = {"input": "gathered" if id(target) in self.gathered else source, "output": output}
        if style.use_local_output and output == "replicate" and self._is_head(fqn):
            options["head"] = "yes"
        return StyleText("ColwiseParallel", _with_type(options, style))

    def _rowwise(self, fqn: str, style: RowwiseParallel) -> StyleText | str:
        source, output = _text(style.input_layouts[0]), _text(style.output_layouts[0])
        needed = ("replicate",) if self._kind(fqn) == "embedding" else ("replicate", "features")
        if source not in needed:
            return f"its input is {style.input_layouts[0]}"
        if output != "replicate" and not output.startswith("dim"):
            return f"its output is {style.output_layouts[0]}"
        return StyleText("RowwiseParallel", _with_type({"input": source, "output": output}, style))

    def _sequence(self, fqn: str, style: SequenceParallel) -> StyleText | str:
        dim = _text(style.sequence_sharding[0])
        if not dim.startswith("dim"):
            return f"its input is {style.sequence_sharding[0]}"
        reads = not style.use_local_output and not self._is_read_by_styles(fqn)
        return StyleText("SequenceParallel", {"dim": dim} | ({"output_type": "dtensor"} if reads else {}))

    def _gather(self, fqn: str, target: nn.Module, style: PrepareModuleInput) -> StyleText | str:
        """One gather of the first input, where only column linears of this dict read it."""
        sources = [_text(layout) for layout in style.input_layouts[:1]]
        desired = [_text(layout) for layout in style.desired_input_layouts[:1]]
        others = (*style.input_layouts[1:], *style.input_kwarg_layouts.values())
        if desired != ["replicate"] or not sources[0].startswith("dim") or any(layout is not None for layout in others):
            return "it does more than gather its first input"
        readers = readers_of_input(target.__class__) if "forward" not in target.__dict__ else None
        linears = [getattr(target, name, None) for name in readers or ()]
        if not linears or not all(self._reads_replicated(linear) for linear in linears):
            return "code of the forward may read the gathered DTensor"
        self.gathered |= {id(linear) for linear in linears}
        return StyleText("PrepareModuleInput", {"input": sources[0]})

    def _reads_replicated(self, module: Any) -> bool:
        """Whether a module is a column linear of the dict whose input is full."""
        styles = self.styles.get(id(module), [])
        return (
            len(styles) == 1
            and isinstance(styles[0], ColwiseParallel)
            and isinstance(module, nn.Linear)
            and _text(styles[0].input_layouts[0]) == "replicate"
        )

    def _is_read_by_styles(self, fqn: str) -> bool:
        """Whether only modules whose styles convert their input read the output of a norm."""
        parent_name, _, child = fqn.rpartition(".")
        parent = self.module.get_submodule(parent_name)
        readers = readers_of_output(parent.__class__, child) if "forward" not in parent.__dict__ else None
        modules = [getattr(parent, name, None) for name in readers or ()]
        converting = (ColwiseParallel, PrepareModuleInput)
        return bool(modules) and all(
            any(isinstance(style, converting) for style in self.styles.get(id(module), ())) for module in modules
        )

    def _kind(self, fqn: str) -> str:
        return self.facts.modules[self.facts.aliases[fqn]].kind

    def _is_head(self, fqn: str) -> bool:
        """Whether a linear makes logits: it has a row for each of the vocabulary, outside of layers."""
        rows = {facts.shapes["weight"][0] for facts in self.facts.modules.values() if facts.kind == "embedding"}
        in_layers = any(part.isdigit() for part in fqn.split("."))
        return not in_layers and self.facts.modules[self.facts.aliases[fqn]].shapes["weight"][0] in rows


def _with_type(options: dict[str, str], style: Any) -> dict[str, str]:
    return options if style.use_local_output else {**options, "output_type": "dtensor"}


def _text(layout: Placement | None) -> str:
    """A layout as rules write it; "other" for what they cannot."""
    if layout is None:
        return "other"
    if layout.is_replicate():
        return "replicate"
    if not layout.is_shard() or dim_of(layout) < -1:
        return "other"
    return "features" if dim_of(layout) == -1 else f"dim{dim_of(layout)}"
