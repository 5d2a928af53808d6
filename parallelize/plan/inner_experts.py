"""Experts whose weights are in modules inside of the one that computes with them, instead of stacked in it. Known by shape, not by class.

| kind | called with | weights |
|---|---|---|
| `experts` | tokens, choices, their weights | `mlp.{w1,v1,w2}` [experts x inner, hidden], one expert after another (DBRX) |
| `expert block` | hidden states; it contains the router | `{input,output}_linear.weight` [experts, out, in], gate before up (JetMoe) |

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROWS = ("w1", "v1", "w2")
"""Parameters of a GLU of experts whose rows follow each other."""
LINEARS = ("input_linear", "output_linear")
"""Modules with a linear for each expert."""


@dataclass(frozen=True)
class InnerExperts:
    """Experts whose weights are in modules inside.

    Attributes:
        kind: "experts" or "expert block"; see the table above.
        num_experts: of the full model.
        shapes: full shapes of their weights, by name from the module that computes with them.
    """

    kind: str
    num_experts: int
    shapes: dict[str, tuple[int, ...]]


def inner_experts(module: Any) -> InnerExperts | None:
    """What a module has of them; None for any other module."""
    return _rows(module) or _linears(module)


def _rows(module: Any) -> InnerExperts | None:
    children = module._modules
    count, width, glu = getattr(module, "num_experts", 0), getattr(module, "ffn_hidden_size", 0), children.get("mlp")
    if glu is None or len(children) > 1 or not isinstance(count, int) or set(glu._parameters) != set(ROWS):
        return None
    if None in glu._parameters.values():  # of another pipeline stage
        return None
    shapes = {f"mlp.{key}": tuple(glu._parameters[key].shape) for key in ROWS}
    fits = all(len(shape) == 2 and shape[0] == count * width for shape in shapes.values())
    return InnerExperts("experts", count, shapes) if fits else None


def _linears(module: Any) -> InnerExperts | None:
    children = [module._modules.get(name) for name in (*LINEARS, "router")]
    if None in children or not hasattr(module, "activation") or set(module._parameters) - {"bias"}:
        return None
    weights = [child._parameters.get("weight") for child in children[:2]]
    if any(weight is None or weight.ndim != 3 for weight in weights) or not hasattr(children[2], "top_k"):
        return None
    first, second = (tuple(weight.shape) for weight in weights)
    if first[0] != second[0] or first[1] != 2 * second[2] or first[2] != second[1]:
        return None
    return InnerExperts("expert block", first[0], {"input_linear.weight": first, "output_linear.weight": second})
