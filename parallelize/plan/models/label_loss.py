"""What a model computes from `labels`: the one place that decides it.

`transformers` has classes that shift labels and classes that do not, means and sums divided by a count, and names that
do not tell which. So a tiny model of the class is run, and its loss compared with what it may be.
"""

from __future__ import annotations

import logging
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallelize.plan.models.label_loss_probe import IGNORED, Form, LabelLoss, probed, probed_function
from parallelize.plan.models.tiny_copy import own_class
from parallelize.plan.models.wrapped_models import stock_model

T = torch.Tensor
_OF_LOSS = re.compile(r"loss|label|coef|ignore|token|router|problem")
"""Names of numbers in a config that may change a loss. Others are sizes; words and switches count whatever their
names."""

_known: dict[tuple, LabelLoss] = {}
_of_models: weakref.WeakKeyDictionary[nn.Module, dict[tuple, LabelLoss]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@torch.compiler.disable
def label_loss(module: nn.Module, labels: Any) -> LabelLoss:
    """What a model computes from labels like these, the same on every rank.

    Args:
        module: a model, sharded or not, also inside of wrappers (`stock_model`). Its class and config are read, and
            none of its weights.
        labels: as the model takes them. Their number of dims and their dtype count.

    Returns: `unknown` says why nothing was found. Then it is what the model's `loss_function` computes; without one,
        labels [batch, sequence] are ids, and shifted.
    Cost: a tenth of a second for the first model of a class whose config says the same of the loss, on the CPU. No
        generator of random numbers is changed.
    """
    if not isinstance(labels, T):
        return LabelLoss(unknown=f"labels are no tensor, but {type(labels).__name__}")
    module = stock_model(module)
    cls, config = own_class(module), getattr(module, "config", None)
    form = Form(labels.ndim, labels.is_floating_point())
    own = vars(module).get("_loss_function")
    known = _known if own is None else _of_models.setdefault(module, {})
    key = (cls, form, tuple(_words(config)))
    with _lock:
        if key not in known:
            known[key] = _in_new_thread(cls, config, form, module, own)
        return known[key]


def _words(config: Any) -> Iterator[tuple[str, Any]]:
    """What a config says of the loss, of its parts too."""
    for name, value in sorted(vars(config).items()) if hasattr(config, "__dict__") else ():
        if name.startswith("_"):
            continue
        if isinstance(value, (bool, str, type(None))) or (isinstance(value, (int, float)) and _OF_LOSS.search(name)):
            yield name, value
        elif isinstance(value, dict):
            yield name, len(value)
        elif hasattr(value, "model_type"):
            yield name, tuple(_words(value))


def _in_new_thread(*facts: Any) -> LabelLoss:
    """The loss as a thread of its own finds it, which has no autocast, no default device, and none of the modes of this
    one."""
    results: list[LabelLoss] = []
    thread = threading.Thread(target=lambda: results.append(_probe_loss(*facts)))
    with _without_words_of(thread):
        thread.start()
        thread.join()
    return results[0]


@contextmanager
def _without_words_of(thread: threading.Thread) -> Iterator[None]:
    """Nothing that the thread warns of is shown: it is about a model that nobody asked for."""
    handlers = [handler for name in ("", "transformers") for handler in logging.getLogger(name).handlers]

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread.ident

    for handler in handlers:
        handler.addFilter(is_of_others)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_others)


@torch.no_grad()
def _probe_loss(cls: type[nn.Module], config: Any, form: Form, module: Any, own: Any) -> LabelLoss:
    probe: LabelLoss | str = "it has no config"
    if hasattr(config, "to_dict"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)  # not of the accelerators: no work of theirs is waited for
            probe = probed(cls, config, form, own)
    if isinstance(probe, LabelLoss):
        return probe
    if (function := getattr(module, "loss_function", None)) is not None:
        return replace(probed_function(function, config, form), unknown=probe)
    return LabelLoss("", 1, of_logits=form == Form(2, False), ignored=(IGNORED,), unknown=probe)
