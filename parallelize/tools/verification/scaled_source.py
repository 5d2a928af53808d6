"""The small version of a model that is read from a config: of those that its class can run, the one with the most of
its structure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, islice
from math import gcd, lcm
from typing import Any

import torch

from parallelize.plan.models.image_inputs import PATCHES, side_of
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.models.proportional_config import divided, without_dropout
from parallelize.plan.models.tiny_copy import in_dtype
from parallelize.tools.verification.precision import computing_in
from parallelize.tools.verification.scale import scaled
from parallelize.tools.verification.scale_parts import part_names, scaled_parts

_MOST_PARAMETERS = 50_000_000
_ROWS, _LENGTH = 2, 12


def scaled_source(source: ModelSource, tp: int, stages: int = 1, **sizes: Any) -> ModelSource:
    """The source with a small config, without dropout. For the arguments see `scaled`.

    A config of several parts, of stages, or of scans, is scaled in the ways that there are: of the models that run, the
    first of those that read the most is taken. Where none runs, it is what `scaled` makes of its fields, of which the
    class says what is wrong.
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
    """How many tensors a model is given in a step. Raises: what building it or its forward raises; ValueError where it
    is large."""
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


# -- scale stages ----------------------------------------------------------------------------------------------------
# A config of stages with a number of layers each, and heads or a width by stage, scaled down: models of images. What
# stays: the number of stages, the heads of each, whether `tp` divides the width of a stage, and how the widths grow
# where one width says those of all stages.


_MOST_LAYERS = 2  # of a stage: in models with windows, every second layer shifts them
_HEAD_WIDTH = 6
_WINDOW = 3  # patches along each side
_HEADS, _WIDTHS = "num_heads", "hidden_sizes"


def has_stages(config: Any) -> bool:
    """Whether a config lists the layers of each stage."""
    return isinstance(vars(config).get("depths"), (list, tuple))


def scaled_stages(config: Any, tp: int) -> Any:
    """A config of stages with small sizes, for `tp` ranks."""
    small, fields = copy.deepcopy(config), vars(config)
    small.depths = type(config.depths)(min(depth, _MOST_LAYERS) for depth in config.depths)
    if isinstance(heads := fields.get(_HEADS), (list, tuple)) and type(fields.get("embed_dim")) is int:
        _scale_first_width(small, config, heads[0])
    if isinstance(widths := fields.get(_WIDTHS), (list, tuple)):
        setattr(small, _WIDTHS, type(widths)(_small_widths(widths, tp)))
    _scale_images(small, fields.get("patch_size"), fields.get("image_size"), fields.get("window_size"))
    return small


def _scale_images(small: Any, patch: Any, image: Any, window: Any) -> None:
    """Images of a few patches, or of one window in the last stage, whose sides are half as long after each."""
    if type(patch) is not int or type(image) is not int:
        return
    side = side_of(patch, PATCHES)
    if type(window) is int:
        small.window_size = min(window, _WINDOW)
        side = patch * small.window_size * 2 ** (len(small.depths) - 1)
    small.image_size = min(image, side)


def _scale_first_width(small: Any, real: Any, heads: int) -> None:
    """Narrow heads, from whose width in the first stage all widths follow."""
    small.embed_dim = heads * min(_HEAD_WIDTH, real.embed_dim // heads)
    if type(vars(real).get("hidden_size")) is int:  # of the last stage
        small.hidden_size = real.hidden_size * small.embed_dim // real.embed_dim


def _small_widths(widths: Any, tp: int) -> list[int]:
    """As many different widths: what they have in common with `tp`, times a number of their own that has nothing in
    common with it."""
    factors = islice((factor for factor in count(3, 2) if gcd(factor, tp) == 1), len(widths))
    return [gcd(width, tp) * factor for width, factor in zip(widths, factors, strict=True)]


# -- scale scans -----------------------------------------------------------------------------------------------------
# A config of scans (Mamba 2) or linear attention scaled down, whose heads and their widths have names of their own.


_SCANS = (("num_heads", "head_dim"), ("mamba_num_heads", "mamba_head_dim"))
_GROUPS = "n_groups"
_WIDTH = 6  # of a head
_STATE = 20  # channels of a state, at most
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_LINEAR_WIDTHS = {"linear_key_head_dim": 16, "linear_value_head_dim": 20}
_STATES = ("state_size", "ssm_state_size")


def has_scans(config: Any) -> bool:
    """Whether a config says the heads, groups and states of scans in the fields that are known here."""
    fields = vars(config)
    if all(type(fields.get(name)) is int for name in (*_LINEAR_HEADS, *_LINEAR_WIDTHS)):
        return True
    return _names(fields) is not None and type(fields.get(_GROUPS)) is int and any(name in fields for name in _STATES)


def scaled_scans(config: Any, tp: int, *args: Any, **sizes: Any) -> Any:
    """A config of scans with few narrow heads. For the arguments see `scaled`, which does the rest.

    Groups stay, and `tp` divides the heads where it divides the real ones. Where heads and their width make up a
    multiple of the hidden size, and no attention has it, the hidden size follows.
    """
    small, real = scaled(config, tp, *args, **sizes), vars(config)
    if _LINEAR_HEADS[0] in real:
        _scale_linear(small, real, tp)
        return small
    heads, width = _names(real) or ("", "")
    if real[heads] % tp or real[heads] % real[_GROUPS]:
        return small  # the real model cannot be sharded; this one must fail in the same way
    few = min(real[heads], 2 * lcm(real[_GROUPS], tp))
    setattr(small, heads, few)
    setattr(small, width, min(real[width], _WIDTH))
    for name in _STATES:
        if type(value := real.get(name)) is int:
            setattr(small, name, min(value, _STATE))
    expand = real.get("expand")
    if type(expand) is int and expand * config.hidden_size == real[heads] * real[width] and heads == "num_heads":
        small.hidden_size = few * vars(small)[width] // expand
    return small


def _scale_linear(small: Any, real: dict[str, Any], tp: int) -> None:
    """Fewer and narrower heads of linear attention, in the ratio of values to keys that they have."""
    keys, values = (real[name] for name in _LINEAR_HEADS)
    if keys % tp == 0 and values % keys == 0:
        few = min(keys, 2 * tp)
        for name, count in zip(_LINEAR_HEADS, (few, few * values // keys), strict=True):
            setattr(small, name, count)
    for name, most in _LINEAR_WIDTHS.items():
        setattr(small, name, min(real[name], most))


def _names(fields: dict[str, Any]) -> tuple[str, str] | None:
    return next((names for names in _SCANS if all(type(fields.get(name)) is int for name in names)), None)
