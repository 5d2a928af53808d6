"""PyTorch's style objects as styles of a plan: the same layouts, by the conversions of contracts.

`axes/tensor/torch_styles/lowering.py` makes a rule of each object that means the same. The words are those of PyTorch,
so that `describe_plan` shows what was asked for. Layouts are written `replicate`, `features` (the last dim) or
`dim<n>`.

Torch-free.
"""

from __future__ import annotations

from parallelize.plan.styles.contract import Contract, Conversion, Traits, Use
from parallelize.plan.styles.style import ModuleFacts, Style, StyleContext, StyleText, register_style


def dim_of(layout: str) -> int:
    """The sharded dim of a layout's text."""
    return int(layout.removeprefix("dim"))


def _colwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    source, output = style.options["input"], style.options["output"]
    is_embedding = module.kind == "embedding"
    dim = 0 if module.kind == "linear" else 1
    enter = Conversion.COPY if source == "replicate" and not is_embedding else Conversion.NONE
    if source.startswith("dim"):
        enter = Conversion.GATHER_SEQUENCE
    deferred = context.fuse_loss and "head" in style.options
    leave = Conversion.GATHER_LAST if output == "replicate" else Conversion.NONE
    if "head" in style.options and (context.loss_parallel or deferred):
        leave = Conversion.VOCABULARY
    return Contract(
        style.word,
        enter,
        leave,
        sequence_dim=dim_of(source) if source.startswith("dim") else 1,
        uses={name: Use(0 if len(shape) == 1 else dim) for name, shape in module.shapes.items()},
        compute="deferred_head" if deferred else "lookup" if is_embedding else "stock",
        local_attributes={"nf": "weight"} if module.kind == "conv1d" else {},
        dtensors=_dtensors(style),
    )


def _rowwise(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    source, output = style.options["input"], style.options["output"]
    is_embedding = module.kind == "embedding"
    scatters = output.startswith("dim")
    dim = 1 if module.kind == "linear" else 0
    return Contract(
        style.word,
        Conversion.SPLIT_LAST if source == "replicate" and not is_embedding else Conversion.NONE,
        Conversion.SCATTER_SEQUENCE if scatters else Conversion.REDUCE,
        sequence_dim=dim_of(output) if scatters else 1,
        uses={name: Use(partial=scatters) if name == "bias" else Use(dim) for name in module.shapes},
        compute="embedding" if is_embedding else "rowwise",
        dtensors=_dtensors(style),
    )


def _sequence(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    dim = dim_of(style.options["dim"])
    uses = {name: Use(partial=True) for name in module.shapes}
    return Contract(style.word, sequence_dim=dim, uses=uses, dtensors=_dtensors(style))


def _gather(style: StyleText, module: ModuleFacts, context: StyleContext) -> Contract:
    dim, inputs = dim_of(style.options["input"]), int(style.options["inputs"])
    reader = style.options.get("for_code")
    enter = Conversion.GATHER_SEQUENCE if reader is None else Conversion.LEAVE_REGION
    dtensors = "in and inside" if reader == "dtensor" else "in"
    return Contract(style.word, enter, sequence_dim=dim, max_inputs=inputs, dtensors=dtensors)


def _dtensors(style: StyleText) -> str:
    return "in and out" if style.options.get("output_type") == "dtensor" else "in"


for _style in (
    Style(
        "ColwiseParallel",
        _colwise,
        {"input": None, "output": None, "output_type": ("dtensor",), "head": ("yes",)},
        traits=Traits(splits_output=True),
        in_plans=False,
    ),
    Style(
        "RowwiseParallel",
        _rowwise,
        {"input": None, "output": None, "output_type": ("dtensor",)},
        traits=Traits(sums_output=True),
        in_plans=False,
    ),
    Style(
        "SequenceParallel",
        _sequence,
        {"dim": None, "output_type": ("dtensor",)},
        traits=Traits(replicates=True, by_token=True),
        in_plans=False,
    ),
    Style(
        "PrepareModuleInput",
        _gather,
        {"input": None, "inputs": None, "for_code": ("dtensor", "tensor")},
        traits=Traits(shares_input=True, keeps_layout=True),
        in_plans=False,
    ),
):
    register_style(_style)
