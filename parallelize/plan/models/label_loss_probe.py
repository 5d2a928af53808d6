"""Runs a tiny model on labels, and compares its loss with what it may be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.plan.models.example_inputs import has_sounds, sounds_in_text
from parallelize.plan.models.image_inputs import has_images, images_in_text
from parallelize.plan.models.miniature.tiny_models import tiny_copies
from parallelize.plan.models.signature_inputs import inputs_by_signature, vocabulary_of

T = torch.Tensor
IGNORED = -100
_NEAR = 2e-5  # relative: losses are computed in float32
_ROWS, _LENGTH, _FEW = 2, 9, 4
_FIRST = 5  # ids below it are padding, beginning and end in most vocabularies
_FACTOR = 3  # the count that is passed is so many times that of the labels
_NAMED = ("pad_token_id", "ignore_index", "semantic_loss_ignore_index")
"""Fields of configs with a label that may be ignored."""


@dataclass(frozen=True)
class LabelLoss:
    """What a class computes from `labels`.

    Attributes:
        mean_over: "labels", those that are not ignored; "samples"; "none" for a sum; "" where it is not known.
        shift: how many positions a label stands after the logits that it is compared with.
        of_logits: whether it is the cross entropy of the logits and the labels.
        ignored: labels without a loss.
        masked: whether labels of tokens that `attention_mask` hides have no loss.
        divides: whether it is a sum, divided by `num_items_in_batch`, where that is passed.
        takes_shifted: whether `shift_labels` may be passed besides, which are not shifted any more.
        adds_router_loss: whether the load-balancing loss of a mixture is added.
        unknown: why nothing is known; "" otherwise.
    """

    mean_over: str = ""
    shift: int = 0
    of_logits: bool = False
    ignored: tuple[int, ...] = ()
    masked: bool = False
    divides: bool = False
    takes_shifted: bool = False
    adds_router_loss: bool = False
    unknown: str = ""

    def targets(self, labels: T, attention_mask: T | None = None) -> T:
        """The labels, -100 where they have no loss, each at its own position: nothing is shifted."""
        if self.masked and attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, IGNORED)
        for value in self.ignored:
            labels = labels if value == IGNORED else labels.masked_fill(labels == value, IGNORED)
        return labels


@dataclass(frozen=True)
class Form:
    """The form of labels: a class may compute one loss from ids and another one from numbers."""

    ndim: int
    floating: bool


class _UnlikeError(Exception):
    """What a loss is not."""


def probed(cls: type[nn.Module], config: Any, form: Form, loss_function: Any = None) -> LabelLoss | str:
    """What a class computes from labels of a form, seen on a tiny model of this config; or why none of its models runs
    here.

    Args:
        loss_function: that of the live model, where it has one of its own.
    """
    reason = "no tiny model of it can be built"
    for model in tiny_copies(cls, config):
        if loss_function is not None:
            model.loss_function = loss_function
        for inputs in _inputs_of(model):
            try:
                return _Probe(model, inputs).seen(form)
            except _UnlikeError as unlike:
                return LabelLoss(unknown=str(unlike))
            except Exception as error:  # of code of any model
                text = " ".join(str(error).split())[:100]
                reason = f"a tiny model of it does not run: {type(error).__name__}: {text}"
    return reason


def probed_function(loss_function: Any, config: Any, form: Form) -> LabelLoss:
    """What a `loss_function` of `transformers` computes, for a model whose class does not run here."""
    try:
        return _Probe(_OnlyLoss(loss_function, config), {}).seen(form)
    except Exception as error:
        return LabelLoss(unknown=f"its loss_function does not run: {type(error).__name__}")


class _OnlyLoss(nn.Module):
    """A model that has logits without computing them."""

    def __init__(self, loss_function: Any, config: Any):
        super().__init__()
        self.function, self.config = loss_function, config
        count = getattr(config, "num_labels", None) or 2
        self.logits = torch.randn(_ROWS, _LENGTH, count, generator=torch.Generator().manual_seed(1))

    def forward(self, labels: Any = None, **more: Any) -> Any:
        sizes = {"vocab_size": self.logits.shape[-1], "config": self.config}
        loss = None if labels is None else self.function(logits=self.logits, labels=labels, **sizes, **more)
        return SimpleNamespace(logits=self.logits, loss=loss)


def _inputs_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs to try: ids alone first."""
    parameters = inspect.signature(type(model).forward).parameters
    config: Any = model.config
    fixed = {"use_cache": False} if "use_cache" in parameters else {}
    if "input_ids" in parameters:
        has_two = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters
        decoder = {"decoder_input_ids": _ids(config, 3)} if has_two else {}
        yield {"input_ids": _ids(config, 2), **decoder, **fixed}
    with suppress(Exception):
        yield from islice(inputs_by_signature(model), _FEW)
    for applies, make in ((has_images, images_in_text), (has_sounds, sounds_in_text)):
        with suppress(Exception):
            if applies(model):
                yield make(model)


def _ids(config: Any, seed: int) -> T:
    """Ids of tokens that stand for nothing else, and an end: the last ones of a vocabulary stand for images and the
    like."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST, max(_FIRST + 3, vocabulary_of(config) // 2), (_ROWS, _LENGTH), generator=generator)
    end = getattr(config, "eos_token_id", None)
    if type(end) is int and end < vocabulary_of(config):
        ids[:, -1] = end
    return ids


class _Probe:
    """One tiny model with its inputs."""

    def __init__(self, model: Any, inputs: Mapping[str, Any]):
        self.model, self.inputs = model, dict(inputs)
        self.generator = torch.Generator().manual_seed(4)
        parameters = inspect.signature(type(model).forward).parameters
        self.takes_mask = "attention_mask" in parameters
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def seen(self, form: Form) -> LabelLoss:
        """Raises: _UnlikeError, and whatever the model raises."""
        logits = getattr(self._run(), "logits", None)
        if form.floating:
            return self._mean_over_samples(self._numbers(logits, form.ndim))
        if logits is not None and logits.ndim == 4 and form.ndim == 3:
            return self._mean_over_pixels(logits)
        unlike: Exception | None = None
        if logits is not None and logits.ndim == form.ndim + 1:
            try:
                return self._cross_entropy_of_classes(logits)
            except _UnlikeError as not_these:
                unlike = not_these
        try:
            return self._mean_over_samples(self._classes((_ROWS, _FEW)[: form.ndim], 2))
        except Exception as error:  # of labels that are fewer than logits
            raise unlike or error from error

    # -- runs -----------------------------------------------------------------------------------------------------

    def _run(self, **more: Any) -> Any:
        return self.model(**{**self.inputs, **more})

    def _loss_of_rows(self, rows: slice, labels: T) -> float:
        inputs = {k: v[rows] if isinstance(v, T) and len(v) == _ROWS else v for k, v in self.inputs.items()}
        loss = float(self.model(**inputs, labels=labels[rows]).loss)
        if not math.isfinite(loss):
            raise ArithmeticError("its loss is not finite")
        return loss

    def _classes(self, shape: tuple[int, ...], count: int) -> T:
        return torch.randint(_FIRST if count > 2 * _FIRST else 0, count, shape, generator=self.generator)

    def _numbers(self, logits: T | None, ndim: int) -> T:
        """Labels of 0 and 1, which regressions and independent classes take."""
        if logits is None or logits.ndim != 2 or ndim > 2:
            raise _UnlikeError("its loss of labels that are numbers is not known")
        return torch.rand(logits.shape[:ndim], generator=self.generator).round()

    # -- means over samples, or over pixels ---------------------------------------------------------------------------

    def _mean_over_samples(self, labels: T) -> LabelLoss:
        """A mean over samples, or a sum over them, whatever it is of each."""
        both, parts = (
            self._loss_of_rows(slice(None), labels),
            [self._loss_of_rows(slice(i, i + 1), labels) for i in range(_ROWS)],
        )
        for over, total in (("samples", both * _ROWS), ("none", both)):
            if _near(total, sum(parts)):
                return LabelLoss(over)
        raise _UnlikeError("its loss is no mean over labels or samples that is known")

    def _mean_over_pixels(self, logits: T) -> LabelLoss:
        """A mean over the labels of pixels, of logits that are scaled to their size."""
        for value in self._candidates(logits.shape[1]):
            labels = self._classes((_ROWS, *self.inputs["pixel_values"].shape[-2:]), logits.shape[1])
            labels[0, :3] = value
            with suppress(IndexError):
                parts = [
                    (self._loss_of_rows(slice(i, i + 1), labels), int((labels[i] != value).sum())) for i in range(_ROWS)
                ]
                total = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
                if _near(self._loss_of_rows(slice(None), labels), total):
                    return LabelLoss("labels", ignored=(value,))
        raise _UnlikeError("its loss is no mean over the labels of pixels")

    # -- cross entropy ------------------------------------------------------------------------------------------------

    def _cross_entropy_of_classes(self, logits: T) -> LabelLoss:
        """The cross entropy of logits [batch, .., classes] and labels [batch, ..]."""
        draw = partial(self._classes, tuple(logits.shape[:-1]), logits.shape[-1])
        label_loss = self._shifted(draw)
        for value in self._candidates(logits.shape[-1]):
            label_loss = self._with_ignored(label_loss, draw(), value)
        label_loss = self._with_mask(label_loss, draw())
        return self._with_shifted(self._with_count(label_loss, draw()), draw(), draw())

    def _shifted(self, draw: Callable[[], T]) -> LabelLoss:
        labels = draw()
        for shift in (0, 1) if labels.ndim == 2 else (0,):
            for adds in (False, True):
                kind = LabelLoss("labels", shift, of_logits=True, adds_router_loss=adds)
                if self._matches(kind, labels) and self._matches(kind, draw()):
                    return kind
        raise _UnlikeError("its loss is no cross entropy of its logits and the labels")

    def _candidates(self, classes: int) -> list[int]:
        """Labels that may be ignored."""
        named = (getattr(self.model.config, name, None) for name in _NAMED)
        return list(dict.fromkeys([IGNORED, *(value for value in named if type(value) is int), 255]))

    def _with_ignored(self, label_loss: LabelLoss, labels: T, value: int) -> LabelLoss:
        labels.view(_ROWS, -1)[0, -2:] = value
        ignoring = replace(label_loss, ignored=(*label_loss.ignored, value))
        with suppress(IndexError):  # no class has this index
            return ignoring if self._matches(ignoring, labels) else label_loss
        return label_loss

    def _with_mask(self, label_loss: LabelLoss, labels: T) -> LabelLoss:
        ids = self.inputs.get("input_ids")
        if not self.takes_mask or ids is None or labels.shape != ids.shape:
            return label_loss
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        fits = [
            kind
            for kind in (label_loss, replace(label_loss, masked=True))
            if self._matches(kind, labels, attention_mask=mask)
        ]
        if not fits:
            raise _UnlikeError("its loss of padded sequences is not known")
        return fits[0]

    def _with_count(self, label_loss: LabelLoss, labels: T) -> LabelLoss:
        count = torch.tensor(_FACTOR * labels[..., label_loss.shift :].numel())
        if not self.takes_more:
            return label_loss
        if self._matches(label_loss, labels, num_items_in_batch=count, factor=_FACTOR):
            return replace(label_loss, divides=True)
        if not self._matches(label_loss, labels, num_items_in_batch=count):
            raise _UnlikeError("its loss is no sum divided by num_items_in_batch")
        return label_loss

    def _with_shifted(self, label_loss: LabelLoss, labels: T, targets: T) -> LabelLoss:
        if not (label_loss.shift and self.takes_more):
            return label_loss
        output = self._run(labels=labels, shift_labels=targets)
        expected = _mean(output.logits, targets, replace(label_loss, shift=0)) + self._router_loss(label_loss, output)
        return replace(label_loss, takes_shifted=_near(float(output.loss), expected))

    def _matches(self, kind: LabelLoss, labels: T, factor: int = 1, **more: Any) -> bool:
        """Whether the loss of these labels is of this kind, divided by a factor."""
        output = self._run(labels=labels, **more)
        if not math.isfinite(float(output.loss)):
            raise ArithmeticError("its loss is not finite")
        expected = _mean(output.logits, kind.targets(labels, more.get("attention_mask")), kind) / factor
        return _near(float(output.loss), expected + self._router_loss(kind, output))

    def _router_loss(self, kind: LabelLoss, output: Any) -> float:
        if not kind.adds_router_loss or getattr(output, "aux_loss", None) is None:
            return 0.0
        coefficient = getattr(self.model, "router_aux_loss_coef", getattr(self.model, "aux_loss_coef", 0.0))
        return float(coefficient * output.aux_loss)


def _mean(logits: T, targets: T, kind: LabelLoss) -> float:
    """The mean cross entropy of targets that are not -100."""
    logits, targets = (
        logits[:, : logits.shape[1] - 1] if kind.shift else logits,
        targets[:, 1:] if kind.shift else targets,
    )
    return float(F.cross_entropy(logits.float().flatten(0, -2), targets.flatten()))


def _near(a: float, b: float) -> bool:
    return abs(a - b) < _NEAR * (1 + abs(b))
