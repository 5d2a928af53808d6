"""What a stage's forward reads of the parameters of modules on other stages, outside of their calls.

Some forwards ask for the device or dtype of the embedding's weight on every stage. They get NaN of its shape, which takes the
memory of one element. A forward that reads values computes NaN, which is an error of the step. Outside of the forward of a stage the
parameters are None, as initializers and state dicts expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from parallelize.applied.records import Cut
from parallelize.plan.learned_prompts import prompt_encoders


class AbsentParameters:
    """Those of the modules themselves that are units of other stages; not of modules inside of them, but for learned prompts.

    Args:
        module: the root, after `cut_pipeline`.
        cut: its record.
    """

    def __init__(self, module: nn.Module, cut: Cut):
        self.parameters: list[tuple[nn.Module, str, tuple[int, ...], torch.dtype]] = []
        facts = cut.facts
        embeddings = (f"{name}.embedding" for name in prompt_encoders(facts))  # PEFT asks for its device
        for unit in (*cut.stages.units, *embeddings):
            if unit not in facts.aliases or cut.present(unit):
                continue
            for key, shape in facts.modules[facts.aliases[unit]].shapes.items():
                dtype = getattr(torch, facts.parameters[facts.owners[f"{unit}.{key}"]].dtype)
                if dtype.is_floating_point:
                    self.parameters.append((module.get_submodule(unit), key, shape, dtype))

    @contextmanager
    def shown(self, device: torch.device) -> Iterator[None]:
        """Within it, attributes of the modules are these tensors, on `device`."""
        for owner, key, shape, dtype in self.parameters:
            owner.__dict__[key] = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        try:
            yield
        finally:
            for owner, key, _, _ in self.parameters:
                owner.__dict__.pop(key, None)
