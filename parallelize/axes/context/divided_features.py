"""The features of images, videos and sounds over `cp`: each rank computes those of its share, and has all of them then.

    this rank's images -> the model's own tower and projector -> all-gather of the features
    backward: reduce-scatter of their gradients, so that the tower sees each image once

Intercepted is the method with which a model of `transformers` returns features. Where there are fewer images than
ranks, where a tower draws random numbers, or where images or features have another form, each rank computes all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.axes.batch.media_rows import MEDIA, Medium, starts_of_images
from parallelize.axes.context.forward_state import Context
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.state.randomness.dropout.install import modules_that_drop
from parallelize.state.records import applied, mark_applied
from parallelize.state.step_results import as_instance

T = torch.Tensor
_FEATURES, _OF_LAYERS = "pooler_output", "deepstack_features"


def install_division(model: nn.Module, part: nn.Module, context: Context) -> None:
    """Divide what a model computes features from. model: the one that calls `part`, the text model, and the towers."""
    inside = {id(inner) for inner in part.modules()}
    draws = any(id(inner) not in inside for inner in modules_that_drop(model).values())
    mark_applied(model, features=_Division(context, draws))
    for medium in MEDIA:
        stock = getattr(type(model), medium.method, None)
        if stock is not None:
            model.__dict__[medium.method] = MethodType(_divided(stock, medium), model)


class _Division:
    """How a model's features are divided. draws: whether a tower drops in training."""

    def __init__(self, context: Context, draws: bool):
        self.context, self.draws = context, draws


def _divided(stock: Callable[..., Any], medium: Medium) -> Callable[..., Any]:
    names = list(inspect.signature(stock).parameters)[1:]

    @functools.wraps(stock)
    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        division = as_instance(applied(self).features, _Division)
        assert division is not None
        context = division.context
        if not context.is_running or (division.draws and self.training):
            return stock(self, *args, **kwargs)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        rows = {name: value for name in medium.inputs if isinstance(value := named.get(name), T)}
        share = _share_of(medium, rows, context.group)
        if not share:
            return stock(self, *args, **kwargs)
        named |= share
        out = stock(self, *(named[name] for name in names[: len(args)]), **{name: named[name] for name in kwargs})
        local = getattr(out, _FEATURES, None)
        if not isinstance(local, (T, list, tuple)):
            return stock(self, *args, **kwargs)
        return _with_all_features(out, context.group)

    return features


def _share_of(medium: Medium, rows: Mapping[str, T], group: Group) -> dict[str, T]:
    """This rank's rows of each input; nothing where there are fewer images than ranks, or texts have rows of images, of
    which some are empty."""
    is_known = medium.features in rows and rows[medium.features].ndim < 5
    starts = starts_of_images(medium, rows) if is_known else {}
    images = len(next(iter(starts.values()))) - 1 if starts else 0
    if images < group.size:
        return {}
    start, stop = even_interval(images, group.size, group.rank)
    return {name: rows[name].narrow(0, first[start], first[stop] - first[start]) for name, first in starts.items()}


def _with_all_features(out: Any, group: Group) -> Any:
    """The output of a method, with the features of all images, and nothing else that has a dim of images."""
    of_layers = getattr(out, _OF_LAYERS, None)
    features = _gathered(getattr(out, _FEATURES), group)
    layers = None if of_layers is None else [_gathered(layer, group) for layer in of_layers]
    for name in list(out.keys()):
        out[name] = None
    setattr(out, _FEATURES, features)
    if layers is not None:
        setattr(out, _OF_LAYERS, layers)
    return out


def _gathered(features: Any, group: Group) -> Any:
    """Those of all ranks: a tensor [rows of images, ..], or one for each image."""
    images: Sequence[T] = [features] if isinstance(features, T) else features
    sizes = _sizes_of_all([len(image) for image in images], images[0].device, group)
    rows = gather_rows(torch.cat(tuple(images)), [sum(of_rank) for of_rank in sizes], group)
    if isinstance(features, T):
        return rows
    return type(features)(rows.split([size for of_rank in sizes for size in of_rank]))


def _sizes_of_all(sizes: list[int], device: torch.device, group: Group) -> list[list[int]]:
    """The sizes of each rank's images. On an accelerator the host waits for them."""
    counts = group.all_gather(torch.tensor([len(sizes)], device=device)).flatten().tolist()
    padded = torch.tensor([*sizes, *[0] * (max(counts) - len(sizes))], device=device)
    of_all = group.all_gather(padded).view(group.size, -1).tolist()
    return [of_rank[:count] for of_rank, count in zip(of_all, counts, strict=True)]


def gather_rows(x: T, sizes: Sequence[int], group: Group) -> T:
    """The rows of all ranks, of which each has another number. x: [rows, ..]; sizes: of each rank.

    Cost: one all-gather of the longest rank's rows; backward a reduce-scatter of as many.
    """
    padded = max(sizes)
    gathered = ops.gather(ops.pad_to(x, 0, padded), group, 0, padded * group.size, "partial")
    if min(sizes) == padded:
        return gathered
    return torch.cat([gathered.narrow(0, rank * padded, size) for rank, size in enumerate(sizes)])
