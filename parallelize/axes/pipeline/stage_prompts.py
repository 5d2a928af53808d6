"""Prefix tuning over pipeline stages: of frozen prefixes PEFT reads the table, which the first stage alone has.

There PEFT is made to call the module instead, which returns the rows of its table. Calls of units are intercepted: what this one
returns is sent to the later stages. Prompts after the cut would be outside of what stages run, and are refused.

PEFT is not imported: what is not imported when a model is cut is as its authors wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parallelize.base.errors import ModelError, Problem
from parallelize.plan.learned_prompts import PREFIX_ENCODER
from parallelize.state.later_prompts import replace_once
from parallelize.state.records import pipeline_cut


def serve_prompts() -> None:
    """Let PEFT, where it is imported, call the module of frozen prefixes in a model that is cut into stages."""
    model: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if model is not None:
        replace_once(model, "get_prompt", _by_call)
        replace_once(model, "_setup_prompt_encoder", _before_the_cut)


def _before_the_cut(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel._setup_prompt_encoder`. Raises: ModelError `added-parameter` of prompts around a model that is cut: steps would not run them."""

    def setup(peft_model: Any, adapter_name: str) -> Any:
        if pipeline_cut(peft_model) is None and pipeline_cut(peft_model.base_model) is not None:
            what = "prompts were added around a model that is cut into stages, whose steps would run without them"
            fix = "get_peft_model(model, config) first, then parallelize_model(model, mesh)"
            raise ModelError(Problem("added-parameter", what, fix=fix))
        return stock(peft_model, adapter_name)

    return setup


def _by_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_prompt(peft_model: Any, *args: Any, **kwargs: Any) -> Any:
        with _called(peft_model):
            return stock(peft_model, *args, **kwargs)

    return get_prompt


@contextmanager
def _called(peft_model: Any) -> Iterator[None]:
    config, encoder = peft_model.active_peft_config, peft_model.prompt_encoder[peft_model.active_adapter]
    is_read = config.inference_mode and type(encoder).__name__ == PREFIX_ENCODER
    if pipeline_cut(peft_model) is None or not is_read:
        yield
        return
    before = encoder.prefix_projection
    config.inference_mode, encoder.prefix_projection = False, hasattr(encoder, "transform")
    try:
        yield
    finally:
        config.inference_mode, encoder.prefix_projection = True, before
