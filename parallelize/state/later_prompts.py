"""Prompts that PEFT puts around a model whose gradients are summed over data ranks: nothing sums theirs.

PEFT is not imported: what is not imported when data axes are applied is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import DATA_AXES
from parallelize.base.patches import active as patches
from parallelize.comm.meshes import mesh_spec
from parallelize.state.records import applied


def refuse_later_prompts() -> None:
    """Let PEFT, where it is imported, refuse prompts that train beside such a model."""
    model: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if model is not None:
        patches.replace(model, "get_prompt", _checked)


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.get_prompt`, which every forward calls. Raises: ModelError `added-parameter`."""

    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        _check(peft_model)
        return stock(peft_model, *args, **kwargs)

    return get_prompt


def _check(peft_model: Any) -> None:
    data = applied(peft_model.get_base_model()).data
    if data is None or applied(peft_model).data is not None or not torch.is_grad_enabled():
        return
    encoder = peft_model.prompt_encoder[peft_model.active_adapter]
    trains = any(parameter.requires_grad for parameter in encoder.parameters())
    if trains and mesh_spec(data.mesh).ranks(*DATA_AXES) > 1:
        what = "prompts were added after data axes were applied, whose gradients nothing sums over data ranks"
        fix = "get_peft_model(model, config) first, then parallelize_model or shard_data"
        raise ModelError(Problem("added-parameter", what, fix=fix))
