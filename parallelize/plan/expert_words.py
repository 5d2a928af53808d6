"""The words of `transformers` for the weights of experts, which depend on how they are stored.

    [experts, out, in]: `colwise` splits out, `rowwise` splits in; `packed_` splits each half by itself

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

USUAL = {"has_gate": True, "is_concatenated": True}
"""Flags of experts [experts, out, in] with the gate's rows before those of the up projection, without biases."""


def words_of_weights(layouts: Sequence[Mapping[str, bool]]) -> tuple[dict[str, str], str]:
    """({key of a weight: word}, the reason why there are none) for experts with these flags.

    Args:
        layouts: flags of the experts of each model that the words are for (`ModuleFacts.flags`); {} where there are none.
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
