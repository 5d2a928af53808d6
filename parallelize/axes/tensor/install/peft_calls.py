"""Prompts of PEFT in a planned model: it is told the keys and values of this rank's heads. What it reads of layers: `peft_reads`.

PEFT is not imported: what is not imported when a model is planned is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from parallelize.axes.tensor.install.peft_prompts import local_prefixes, readable_prompts
from parallelize.state.later_prompts import replace_once
from parallelize.state.peft_reads import guard_peft_reads


def prepare_peft() -> None:
    """Let PEFT, where it is imported, make adapters and prompts of planned layers in their full sizes."""
    guard_peft_reads()
    prompts: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if prompts is not None:
        replace_once(prompts, "get_prompt", _of_local_heads)


def _of_local_heads(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.get_prompt` of a planned model, whose keys and values of prefix tuning are those of the heads of this rank."""

    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        with readable_prompts(peft_model):
            prompt = stock(peft_model, *args, **kwargs)
        return local_prefixes(peft_model, prompt)

    return get_prompt
