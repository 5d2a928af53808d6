"""The small version of a model that is read from a config: of those that its class runs, the one that keeps the most of its structure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from parallelize.plan.models.dropout_rates import without_dropout
from parallelize.plan.models.model_dtype import in_dtype
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.proportional_config import divided
from parallelize.tools.verification.precision import computing_in
from parallelize.tools.verification.scale import scaled
from parallelize.tools.verification.scale_parts import part_names, scaled_parts
from parallelize.tools.verification.scale_scans import has_scans, scaled_scans
from parallelize.tools.verification.scale_stages import has_stages, scaled_stages

_MOST_PARAMETERS = 50_000_000
_ROWS, _LENGTH = 2, 12


def scaled_source(source: ModelSource, tp: int, stages: int = 1, **sizes: Any) -> ModelSource:
    """The source with a small config, without dropout. For the arguments see `scaled`.

    A config of several parts, of stages, or of scans, is scaled in the ways that there are: of the models that run, the first of those that read the
    most is taken. Where none runs, it is what `scaled` makes of its fields, of which the class says what is wrong.
    """
    config, whole = source.config, partial(scaled, source.config, tp, stages, **sizes)
    if part_names(config):
        ways = [partial(scaled_parts, config, tp, stages, **sizes), partial(divided, config), whole]
    elif has_stages(config):
        ways = [partial(scaled_stages, config, tp), partial(divided, config), whole]
    elif has_scans(config):
        ways = [partial(scaled_scans, config, tp, stages, **sizes), whole]
    else:
        return _small(source, whole)
    best, most = None, 0
    for way in ways:
        with suppress(Exception):  # a class may refuse sizes, or fail with them, with any error
            small = _small(source, way)
            if (read := _num_read(small)) > most:
                best, most = small, read
    return best or _small(source, whole)


def _small(source: ModelSource, way: Callable[[], Any]) -> ModelSource:
    config = way()
    without_dropout(config)
    return source.with_config(config)


def _num_read(source: ModelSource) -> int:
    """How many tensors a model is given in a step. Raises: what building it or its forward raises; ValueError where it is large."""
    if sum(parameter.numel() for parameter in source.build("meta").parameters()) > _MOST_PARAMETERS:
        raise ValueError("it is not run here")
    model = in_dtype(source.build("cpu"), torch.float64)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), computing_in(torch.float64):
        inputs = source.inputs(model, _ROWS, _LENGTH)
        inputs.pop("targets", None)
        model(**{name: _wide(value) for name, value in inputs.items()})
    return sum(isinstance(value, torch.Tensor) for value in inputs.values())


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
