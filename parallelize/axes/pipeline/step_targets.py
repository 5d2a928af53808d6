"""Targets of the default loss: the position of a target is that of the logits it is compared with.

Stock causal models take `labels` instead, which are the token ids, and shift them inside; other stock models do not shift theirs.
All are sequences of token ids, so that one in place of the other trains another task without an error. A step therefore takes
both, by their own names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallelize.axes.context.inputs import IGNORED, next_tokens
from parallelize.axes.vocabulary.loss.losses import cross_entropy
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.label_loss import label_loss
from parallelize.plan.models.tiny_copy import own_class
from parallelize.plan.models.wrapped_models import forward_signature, num_prompt_logits, stock_model

T = torch.Tensor


def token_targets(module: nn.Module, targets: Any, labels: Any, attention_mask: Any = None) -> Any:
    """The targets of the default loss, from what a step was given.

    Args:
        module: the model, whose class decides what labels mean: see `label_loss`.
        targets: token ids [batch, sequence] at the positions of the logits, or class probabilities; None with labels.
        labels: token ids, or classes, as the stock model takes them; None with targets.
        attention_mask: of the step's inputs; some classes ignore the labels of padding.

    Raises: ModelError `no-targets`, `labels-and-targets`, `unclear-labels`.
    """
    if targets is not None and labels is not None:
        what = "the step was given both targets and labels"
        fix = "targets= at the positions of the logits, or labels=, which are shifted as the stock model does"
        raise ModelError(Problem("labels-and-targets", what, fix=fix))
    if targets is not None:
        return targets
    if labels is None:
        what = (
            "the loss of tokens needs targets, and the step was given none; positional arguments are the model's inputs"
        )
        fix = "pass them by name: step(ids, targets=next_tokens(ids)) or step(ids, labels=ids); or a `loss` without targets"
        raise ModelError(Problem("no-targets", what, fix=fix))
    return _of_labels(module, labels, attention_mask)


def _of_labels(module: nn.Module, labels: Any, attention_mask: Any) -> Any:
    kind = label_loss(module, labels)
    if not kind.of_logits:
        form = list(labels.shape) if isinstance(labels, T) else type(labels).__name__
        what = f"labels {form} of a {type(stock_model(module)).__name__} are no classes of its logits: {kind.unknown}"
        raise ModelError(Problem("unclear-labels", what, fix="targets= and a `loss` that reads them"))
    targets = kind.targets(labels, attention_mask)
    if targets.ndim != 2:
        return targets
    targets = _with_prompts(module, targets)  # the last prompt predicts the first token
    return next_tokens(targets) if kind.shift else targets


def with_decoder_ids(module: nn.Module, named: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    """The input of the decoder that a stock model of two makes from its labels, where the step was given none; else nothing.

    Args:
        named: the inputs of the step, by name.

    Raises: ModelError `no-decoder-ids`.
    """
    stock: Any = stock_model(module)
    has_decoder_inputs = any(named.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    is_of_two = getattr(getattr(stock, "config", None), "is_encoder_decoder", False)
    if (
        labels is None
        or has_decoder_inputs
        or not is_of_two
        or "decoder_input_ids" not in forward_signature(stock).parameters
    ):
        return {}
    if hasattr(stock, "prepare_decoder_input_ids_from_labels"):
        return {"decoder_input_ids": stock.prepare_decoder_input_ids_from_labels(labels=labels)}
    shift = getattr(sys.modules[own_class(stock).__module__], "shift_tokens_right", None)
    if shift is None:
        what = f"{type(stock).__name__} does not say what its decoder reads for these labels"
        raise ModelError(Problem("no-decoder-ids", what, fix="pass decoder_input_ids too: the labels, shifted right"))
    config = stock.config
    return {"decoder_input_ids": shift(labels, config.pad_token_id, config.decoder_start_token_id)}


def beside_prompts(module: nn.Module, inputs: Any, targets: Any) -> Any:
    """The targets of a model whose learned prompts stand before the tokens, and have none: as PEFT extends labels.

    Args:
        inputs: of the step. targets: token ids [batch, sequence] for the tokens of an input alone; others are as they should be.
    """
    return targets if _ids_like(targets, inputs) is None else _with_prompts(module, targets)


def _with_prompts(module: nn.Module, targets: T) -> T:
    """Targets, or labels, with none for the learned prompts before the tokens."""
    count = num_prompt_logits(module)
    return torch.cat([targets.new_full((targets.shape[0], count), IGNORED), targets], dim=1) if count else targets


def refuse_unshifted(module: nn.Module, inputs: Mapping[str, Any], targets: Any) -> None:
    """Refuse targets that are the token ids themselves, in a model that predicts the next token.

    Targets that are the next ids, as far as the ids tell, are always accepted.

    Raises: ModelError `unshifted-targets`.
    Cost: three comparisons of token ids; on an accelerator it waits for them.
    """
    ids = _ids_like(targets, dict(inputs))
    if ids is None:
        return
    target, token, following = targets[:, :-1], ids[:, :-1], ids[:, 1:]
    ignored = target == IGNORED
    repeats, predicts = ((target == other) | ignored for other in (token, following))
    if bool(repeats.all()) and not bool(predicts.all()) and label_loss(module, targets).shift:
        what = f"each of the {int((~ignored).sum())} targets is the token at its own position, not the next one"
        fix = "targets=next_tokens(ids), or labels=ids; a task that copies its input: a `loss` of your own"
        raise ModelError(Problem("unshifted-targets", what, fix=fix))


def _ids_like(targets: Any, inputs: Any) -> T | None:
    """The first input of integers that has the shape of the targets."""
    if not isinstance(targets, T) or targets.ndim != 2 or targets.is_floating_point():
        return None
    for leaf in private.tree_leaves(inputs):
        if isinstance(leaf, T) and leaf.shape == targets.shape and leaf.dtype == targets.dtype:
            return leaf.to(targets.device)
    return None


def token_loss(output: Any, targets: T) -> T:
    """The default loss of a step: the sum over tokens, of logits or of an output that has them."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return cross_entropy(logits, targets, reduction="sum")
