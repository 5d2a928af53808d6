"""The small model whose forward is recorded, and on which a plan is proven."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, ParallelizeError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.dims.trace import record_forward
from parallelize.plan.models.example_inputs import has_sounds, images_and_sounds_in_text, inputs_of, sounds_in_text
from parallelize.plan.models.image_inputs import has_images
from parallelize.plan.models.miniature.attempts import small_versions
from parallelize.plan.models.miniature.rates import disable_dropout
from parallelize.plan.models.miniature.rules import Rules
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.signature_inputs import inputs_by_signature

log = logging.getLogger("parallelize")

_FEW_PARAMETERS = 8_000_000
MAX_PARAMETERS = 200_000_000
"""A module of more parameters is not run on this machine: derive from a config, or from a function with smaller
sizes."""


class Reads(Enum):
    """What a text has in the place of some tokens, of models that read more than texts: small configs are tried for the
    most first."""

    ALL = "images and sound, or the one of them that the model reads"
    EITHER = "sound, of models that read both"
    TEXT = "nothing else, where no small config runs with more"


def small_model(source: ModelSource, tp: int) -> tuple[ModelSource, nn.Module]:
    """A small version of the model: of a config with other sizes, the first that the model accepts, with inputs that it
    accepts."""
    if source.config is None:
        return source, _built(source)
    reason: Exception | None = None
    versions = map(source.with_config, small_versions(source.config, Rules(tp, ratios_kept=False)))
    for reads, small in _tries(_few_parameters_first(versions)):
        try:
            on_meta = small.build("meta")
            check_elements(on_meta)
            if reads is Reads.EITHER and not _reads_both(on_meta):
                continue
            model = _built(small)
            check_subject(model)
            return _with_inputs(small, model, reads), model
        except Exception as error:  # a class may refuse the sizes with any error
            reason = reason or error
            log.debug("%s does not run with smaller sizes: %s", source.text, error)
    what = f"no small version of {source.text} runs: {type(reason).__name__}: {_first_line(reason)}"
    fix = (
        "a function that returns a small model: package.module:function; and --inputs where its forward takes other "
        "inputs"
    )
    raise ModelError(Problem("untraceable-model", what, fix=fix)) from reason


def _tries(versions: Iterator[ModelSource]) -> Iterator[tuple[Reads, ModelSource]]:
    """Each version with all that it may read; and each with less, where none runs so."""
    seen = []
    for small in versions:
        seen.append(small)
        yield Reads.ALL, small
    yield from product((Reads.EITHER, Reads.TEXT), seen)


def _few_parameters_first(versions: Iterator[ModelSource]) -> Iterator[ModelSource]:
    """The versions, last those that are not as small as they were to be, because they have widths of unknown names."""
    large = []
    for small in versions:
        if _is_large(small):
            large.append(small)
        else:
            yield small
    yield from large


def _is_large(source: ModelSource) -> bool:
    """Whether a config is not as small as it was to be, because it has widths of unknown names."""
    try:
        return sum(parameter.numel() for parameter in source.build("meta").parameters()) > _FEW_PARAMETERS
    except Exception:  # whatever the class raises is named where it is tried
        return True


def _with_inputs(source: ModelSource, model: nn.Module, reads: Reads) -> ModelSource:
    """The source with inputs that the forward takes. Raises: what the forward raised for the first that were tried.

    reads: texts by themselves, for which another small config may do, would leave a tower whole.
    """
    reason: Exception | None = None
    for make in _makers(source, model, reads):
        try:
            inputs = make()
            record_forward(model, inputs)
        except Exception as error:  # of code of any model
            reason = reason or error
            log.debug("%s does not run with these inputs: %s", source.text, error)
            continue
        if "inputs" in source.extras:
            return source
        return replace(source, extras={**source.extras, "inputs": partial(_copy_of, inputs)})
    assert reason is not None
    raise reason


def _makers(source: ModelSource, model: nn.Module, reads: Reads) -> Iterator[Callable[[], dict[str, Any]]]:
    """Functions that return inputs, those that reach the most of the model first."""
    if _reads_both(model) and reads is Reads.ALL:
        yield partial(images_and_sounds_in_text, model)
        return
    if has_sounds(model):
        yield partial(sounds_in_text, model)
    if has_sounds(model) and reads is not Reads.TEXT:
        return
    yield partial(inputs_of, source, model)
    if reads is Reads.TEXT or not has_images(model):
        for inputs in inputs_by_signature(model):
            yield partial(dict, inputs)


def _reads_both(model: nn.Module) -> bool:
    return has_sounds(model) and has_images(model)


def _copy_of(inputs: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """The same inputs, whatever the numbers of rows and tokens."""
    return dict(inputs)


def _built(source: ModelSource) -> nn.Module:
    """The model as it is trained, where PyTorch's modules have no fused forwards, but without dropout."""
    model = source.build("cpu").train()
    disable_dropout(model)
    return model


def check_elements(model: nn.Module) -> None:
    elements = sum(parameter.numel() for parameter in model.parameters())
    if elements > MAX_PARAMETERS:
        what = f"{type(model).__name__} has {elements:,} parameters, and its forward is run on this machine"
        fix = "give its config, or a function that returns the model with smaller sizes"
        raise ModelError(Problem("too-large-to-run", what, fix=fix))


def check_subject(model: nn.Module) -> None:
    """Whether a model's forward can be run here."""
    check_elements(model)
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu"}
    if devices:
        what = f"{type(model).__name__} is on the device {min(devices)}, and its forward is run on the CPU"
        fix = (
            "derive it from the model on the CPU, into a file that is the plan then: `parallelize plans derive "
            "package.module:function -o my.yaml`; or give its config"
        )
        raise ModelError(Problem("untraceable-model", what, fix=fix))


def in_dtype_of(model: nn.Module, inputs: Any) -> Any:
    """The inputs, with floating tensors in the dtype of the model's parameters, as it is run here."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return inputs if dtype is None else private.tree_map(cast, inputs)


def _first_line(error: Exception | None) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


@contextmanager
def explained(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Name what a model's forward raises, which may be anything."""
    try:
        yield
    except ParallelizeError:
        raise
    except Exception as error:
        what = f"the forward of {type(model).__name__} failed: {type(error).__name__}: {_first_line(error)}"
        fix = "give inputs: example_inputs=, or --inputs module:function, which returns keyword arguments"
        rows = (("inputs", _shapes(inputs)),)
        raise ModelError(Problem("untraceable-model", what, rows=rows, fix=fix)) from error


def _shapes(inputs: Mapping[str, Any] | tuple[Any, ...]) -> str:
    named = inputs.items() if isinstance(inputs, Mapping) else ((f"#{i}", value) for i, value in enumerate(inputs, 1))
    return ", ".join(f"{name} {list(v.shape) if isinstance(v, torch.Tensor) else v}" for name, v in named)
