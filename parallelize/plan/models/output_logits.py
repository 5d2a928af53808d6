"""Which part of what a model returns is its logits: the loss of tokens reads these alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem

T = torch.Tensor


def logits_of(output: Any) -> T:
    """The logits in a model's output: a tensor, what it calls `logits`, or the first of several values, as in
    `(logits, loss)` and `(logits, cache)`.

    Raises: ModelError `no-logits`.
    """
    logits = output
    if isinstance(output, Mapping):  # also those of `transformers`
        logits = output.get("logits")
    elif not isinstance(output, T):
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, (tuple, list)) and output:
            logits = output[0]
    if isinstance(logits, T) and logits.is_floating_point() and logits.ndim:
        return logits
    what = f"the loss of tokens reads logits, and the model returns {_form(output)}"
    fix = (
        "have the forward return logits [batch, sequence, vocabulary], alone, first, or as `.logits`; or a `loss` of "
        "your own, which reads its output"
    )
    raise ModelError(Problem("no-logits", what, fix=fix))


def _form(output: Any) -> str:
    if isinstance(output, T):
        return f"a tensor {list(output.shape)} of {output.dtype}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of ({', '.join(map(_form, output))})"
    return f"a {type(output).__name__}"
