"""Styles of adapters: what the style of a linear, embedding or norm means for the parameters that PEFT adds to it.

LoRA adds B(A(x)) to a linear's output. Beside a column linear each rank computes the rows of B for its own outputs, and
so has a part of the gradient of A; beside a row linear it multiplies its own inputs with its columns of A, so that
B(A(x)) is a summand of the same sum as the linear's own output, and has a part of the gradient of B. (IA)^3 scales
inputs or outputs, and DoRA the magnitude of each output, likewise. A boundary conversion of the layer is done once,
around it and its adapters (`adapters/adapted_layers.py`).

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parallelize.plan.styles.contract import Contract, Traits, Use
from parallelize.plan.styles.style import ModuleFacts, Style, StyleContext, StyleText, register_style


@dataclass(frozen=True)
class AdapterStyles:
    """The styles of what is inside an adapted layer.

    Attributes:
        base: of the layer itself.
        modules: of the modules of adapters, by the attribute that contains them, such as `lora_A`.
        parameters: of the parameters of adapters that no module of their own has, likewise, such as `ia3_l`.
    """

    base: StyleText
    modules: Mapping[str, StyleText] = field(default_factory=dict)
    parameters: Mapping[str, StyleText] = field(default_factory=dict)


def adapter_styles(style: StyleText, *, scales_input: bool = False, num_experts: int = 0) -> AdapterStyles | None:
    """The styles of a layer whose rule is `style`, and of its adapters; None where no adapter of it would be right.

    Args:
        scales_input: (IA)^3 scales the input of this layer rather than its output.
        num_experts: of a layer of stacked experts.
    """
    if adapts_parameters(style):
        return _expert_adapters(style, num_experts)
    make = _BY_WORD.get(style.word)
    return None if make is None else make(style, scales_input)


def _options(style: StyleText, *names: str) -> dict[str, str]:
    return {name: style.options[name] for name in names if name in style.options}


def _column_adapters(style: StyleText, scales_input: bool) -> AdapterStyles:
    by_output = _options(style, "unit", "chunks")
    modules = {
        "lora_A": StyleText("partial_adapter"),
        "lora_B": StyleText("column_adapter", by_output),
        "lora_magnitude_vector": StyleText("column_adapter", by_output),
    }
    scale = StyleText("replicate", {"gradient": "partial"}) if scales_input else StyleText("shard", by_output)
    return AdapterStyles(style, modules, {"ia3_l": scale})


def _row_adapters(style: StyleText, scales_input: bool) -> AdapterStyles:
    by_input = _options(style, "unit")
    modules = {
        "lora_A": StyleText("row_adapter", by_input),
        "lora_B": StyleText("partial_adapter"),
        "lora_magnitude_vector": StyleText("partial_adapter"),
    }
    partial = StyleText("replicate", {"gradient": "partial"})
    return AdapterStyles(
        style, modules, {"ia3_l": StyleText("shard", {"dim": "1", **by_input}) if scales_input else partial}
    )


def _replicated_adapters(style: StyleText, scales_input: bool) -> AdapterStyles:
    bare = ("ia3_l", "lora_embedding_A", "lora_embedding_B") if style.traits.for_parameters else ()
    modules = dict.fromkeys(("lora_A", "lora_B", "lora_magnitude_vector"), style)
    return AdapterStyles(style, modules, dict.fromkeys(bare, style))


def _expert_adapters(style: StyleText, num_experts: int) -> AdapterStyles:
    """A [experts x r, in] has the rows of one expert after another, B [out, r x experts] all experts' columns for each
    of r."""
    count = str(num_experts)
    modules = {
        "lora_A": StyleText("expert_adapter", {"dim": "0", "experts": count}),
        "lora_B": StyleText("expert_adapter", {"dim": "1", "experts": count}),
    }
    return AdapterStyles(style, modules)


def _embedding_adapters(style: StyleText, scales_input: bool) -> AdapterStyles:
    """Its output is full on every rank, and so are the adapters."""
    full = StyleText("replicate")
    return AdapterStyles(style, parameters={"lora_embedding_A": full, "lora_embedding_B": full})


def adapts_parameters(style: StyleText) -> bool:
    """Whether a module with this rule has a parameter for each of its experts, which PEFT may adapt
    (`target_parameters`)."""
    return style.word == "experts"


def adapts_one_parameter(style: StyleText) -> bool:
    """Whether PEFT may adapt the one matrix of a module with this rule, which is full on each rank, such as that of a
    router."""
    return style.word in ("sequence", "replicate")


_BY_WORD: dict[str, Callable[[StyleText, bool], AdapterStyles]] = {
    "colwise": _column_adapters,
    "rowwise": _row_adapters,
    "sequence": _replicated_adapters,
    "replicate": _replicated_adapters,
    "embedding": _embedding_adapters,
    "embedding_colwise": _embedding_adapters,
}


def _adapted(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """The module that calls the layer and its adapters."""
    return Contract("adapted", compute="adapted")


def _use(style: StyleText, dim: int) -> Use:
    """Of a dim that is divided as the layer's, whose packed chunks may have units of several widths."""
    return Use(dim, style.unit, style.chunks, widths=style.widths if any(style.widths) else ())


def _column_adapter(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    return Contract("column_adapter", uses=dict.fromkeys(module.shapes, _use(style, 0)))


def _row_adapter(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    return Contract("row_adapter", uses={"weight": _use(style, 1)})


def _expert_adapter(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """Of the experts of the rank where they are whole; else full on every rank, which uses those of the parts that it
    stores."""
    if not context.divides_adapters:
        return _partial_adapter(style, module, context)
    dim, experts = int(style.options["dim"]), int(style.options["experts"])
    chunks = experts if dim == 0 else module.shapes["weight"][1] // experts
    return Contract("expert_adapter", uses={"weight": Use(dim, chunks=chunks, by_expert=True, expert_dim=dim)})


def _partial_adapter(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    """Replicated. A bias of it is a summand of a sum over ranks, which the first rank alone adds."""
    compute = "bias of first rank" if "bias" in module.shapes else "stock"
    return Contract("partial_adapter", uses=dict.fromkeys(module.shapes, Use(partial=True)), compute=compute)


for _style in (
    Style("adapted", _adapted, traits=Traits(keeps_layout=True, wraps=True), in_plans=False),
    Style(
        "column_adapter",
        _column_adapter,
        {"unit": None, "chunks": None},
        "unit",
        Traits(keeps_layout=True),
        in_plans=False,
    ),
    Style("row_adapter", _row_adapter, {"unit": None}, "unit", Traits(keeps_layout=True), in_plans=False),
    Style(
        "expert_adapter",
        _expert_adapter,
        {"dim": None, "experts": None},
        "dim",
        Traits(keeps_layout=True),
        in_plans=False,
    ),
    Style("partial_adapter", _partial_adapter, traits=Traits(keeps_layout=True), in_plans=False),
):
    register_style(_style)
