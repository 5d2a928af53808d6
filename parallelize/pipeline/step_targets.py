"""Targets of the default loss: the position of a target is that of the logits it is compared with.

Stock causal models take `labels` instead, which are the token ids, and shift them inside. Both are sequences of token ids, so
that one in place of the other trains another task without an error. A step therefore takes both, by their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallelize.context.inputs import IGNORED, next_tokens
from parallelize.errors import ModelError, Problem
from parallelize.models.wrapped_models import num_prompt_logits
from parallelize.torch_private import torch_tensors as private
from parallelize.vocabulary.loss.losses import cross_entropy

T = torch.Tensor

_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
"""Loss types of `transformers` whose labels have the positions of the logits."""
_SHIFTED = (None, "ForCausalLM")
"""Those of next tokens. None: what `transformers` has for a model that names no loss, and what models of others have."""


def token_targets(module: nn.Module, targets: Any, labels: Any) -> Any:
    """The targets of the default loss, from what a step was given.

    Args:
        module: the model, whose `loss_type` says whether its labels are shifted.
        targets: token ids [batch, sequence] at the positions of the logits, or class probabilities; None with labels.
        labels: token ids as the stock model takes them; None with targets.

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
    return _of_labels(module, labels)


def _of_labels(module: nn.Module, labels: Any) -> Any:
    kind = getattr(module, "loss_type", None)
    if kind in _UNSHIFTED:
        return labels
    if kind not in _SHIFTED or not isinstance(labels, T) or labels.ndim != 2:
        form = list(labels.shape) if isinstance(labels, T) else type(labels).__name__
        what = f"labels {form} of a {type(module).__name__} are no ids [batch, sequence] of a language model"
        raise ModelError(Problem("unclear-labels", what, fix="targets= and a `loss` that reads them"))
    return next_tokens(_with_prompts(module, labels))  # the last prompt predicts the first token


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
    if ids is None or getattr(module, "loss_type", None) not in _SHIFTED:
        return
    target, token, following = targets[:, :-1], ids[:, :-1], ids[:, 1:]
    ignored = target == IGNORED
    repeats, predicts = ((target == other) | ignored for other in (token, following))
    if bool(repeats.all()) and not bool(predicts.all()):
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
