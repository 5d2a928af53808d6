"""The small version of a model that is read from a config: of those that its class can run, the one with the most of
its structure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from parallelize.plan.models.miniature.attempts import small_versions
from parallelize.plan.models.miniature.roles import parts_of
from parallelize.plan.models.miniature.rules import Rules
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.tiny_copy import in_dtype
from parallelize.tools.verification.precision import computing_in

_MOST_PARAMETERS = 50_000_000
_ROWS, _LENGTH = 2, 12


def scaled_source(source: ModelSource, tp: int, stages: int = 1, **sizes: Any) -> ModelSource:
    """The source with a small config, without dropout: the first whose model runs, or, of a config of several parts,
    that reads more than a text. Where none runs, it is the first that the class builds, of which the forward says what
    is wrong; or else the first, of which the class says it.

    For the arguments see `Rules`.
    """
    versions = map(source.with_config, small_versions(source.config, Rules(tp, stages, **sizes)))
    enough = 2 if len(parts_of(source.config)) > 1 else 1
    best, most = next(versions), -2
    for small in (best, *versions):
        if (read := _num_read(small)) > most:
            best, most = small, read
        if most >= enough:
            break
    return best


def _num_read(source: ModelSource) -> int:
    """How many tensors a model is given in a step; 0 where it does not run, and -1 where it cannot be built."""
    try:  # a class may refuse sizes, or fail with them, with any error
        if sum(parameter.numel() for parameter in source.build("meta").parameters()) > _MOST_PARAMETERS:
            return 0
    except Exception:
        return -1
    with suppress(Exception):
        model = in_dtype(source.build("cpu"), torch.float64)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), computing_in(torch.float64):
            inputs = source.inputs(model, _ROWS, _LENGTH)
            inputs.pop("targets", None)
            model(**{name: _wide(value) for name, value in inputs.items()})
        return sum(isinstance(value, torch.Tensor) for value in inputs.values())
    return 0


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
