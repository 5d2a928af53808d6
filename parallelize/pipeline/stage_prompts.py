"""Prefix tuning over pipeline stages: of frozen prefixes PEFT reads the table, which the first stage alone has.

There PEFT is made to call the module instead, which returns the rows of its table. Calls of units are intercepted: what this one
returns is sent to the later stages.

PEFT is not imported: what is not imported when a model is cut is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parallelize.applied.later_prompts import replace_once
from parallelize.applied.records import cut_of
from parallelize.plan.learned_prompts import PREFIX_ENCODER


def serve_prompts() -> None:
    """Let PEFT, where it is imported, call the module of frozen prefixes in a model that is cut into stages."""
    model: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if model is not None:
        replace_once(model, "get_prompt", _by_call)


def _by_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        with _called(peft_model):
            return stock(peft_model, *args, **kwargs)

    return get_prompt


@contextmanager
def _called(peft_model: Any) -> Iterator[None]:
    config, encoder = peft_model.active_peft_config, peft_model.prompt_encoder[peft_model.active_adapter]
    is_read = config.inference_mode and type(encoder).__name__ == PREFIX_ENCODER
    if cut_of(peft_model) is None or not is_read:
        yield
        return
    before = encoder.prefix_projection
    config.inference_mode, encoder.prefix_projection = False, hasattr(encoder, "transform")
    try:
        yield
    finally:
        config.inference_mode, encoder.prefix_projection = True, before
