"""The attention of a text model beside a tower, for the section `attention:` of a derived plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from parallelize.axes.context.gathered_modules import takes_registered_attention
from parallelize.plan.model_facts import describe
from parallelize.plan.text_part import text_part


def proposed_attention(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """Kinds of attention by the names of modules, to be proven in this order; nothing for a model without a tower.

    Attention runs over the ranks where it can. It is gathered where the model around the text model makes its masks, as
    of images whose tokens attend to each other.
    """
    part = text_part(describe(model))
    if not part:
        return
    named = model.get_submodule(part).named_modules(prefix=part)
    names = [name for name, module in named if takes_registered_attention(module)]
    for kind in ("causal", "gathered") if names else ():
        yield dict.fromkeys(names, kind)
