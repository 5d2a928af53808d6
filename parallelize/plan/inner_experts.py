"""Experts whose weights are in modules inside of the one that computes with them, instead of stacked in it. Known by
shape, not by class.

| kind | called with | weights |
|---|---|---|
| `experts` | tokens, choices, their weights | `mlp.{w1,v1,w2}` [experts x inner, hidden], one expert after another (DBRX) |
| `expert block` | hidden states; it contains the router | `{input,output}_linear.weight` [experts, out, in], gate before up (JetMoe) |

Torch-free.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


# -- expert words ----------------------------------------------------------------------------------------------------
# The words of `transformers` for the weights of experts, which depend on how they are stored. [experts, out, in]:
# `colwise` splits out, `rowwise` splits in; `packed_` splits each half by itself Torch-free.


USUAL = {"has_gate": True, "is_concatenated": True}
"""Flags of experts [experts, out, in] with the gate's rows before those of the up projection, without biases."""


def words_of_weights(layouts: Sequence[Mapping[str, bool]]) -> tuple[dict[str, str], str]:
    """({key of a weight: word}, the reason why there are none) for experts with these flags.

    Args:
        layouts: flags of the experts of each model that the words are for (`ModuleFacts.flags`); {} where there are
            none.
    """
    if not layouts:
        return {}, "how their weights are stored is not known without a model type that `transformers` builds"
    if any(dict(flags) != dict(layouts[0]) for flags in layouts):
        return {}, "the model types of the plan store their weights differently"
    flags = layouts[0]
    if not flags:
        return {}, "no word is for experts whose weights are in modules inside, or that get every token"
    for name, what in (("has_bias", "biases of experts"), ("has_post_expert_norm", "a norm of each expert")):
        if flags.get(name):
            return {}, f"no word is for {what}"
    out, inputs = ("rowwise", "colwise") if flags.get("is_transposed") else ("colwise", "rowwise")
    first = "gate_up_proj" if flags.get("has_gate") else "up_proj"
    is_packed = flags.get("has_gate") and flags.get("is_concatenated")
    return {first: f"packed_{out}" if is_packed else out, "down_proj": inputs}, ""
