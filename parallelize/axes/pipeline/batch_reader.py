"""What a step is given, and what it computes with: the microbatches of this data rank, and the count that divides the
loss.

Ranks compare what they were given before anything runs. The global count is known then too, so that the loss of each
microbatch is divided by it at once, and gradients are sums.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.batch.input_batch import TARGETS, BatchForm, InputBatch, is_array
from parallelize.axes.batch.row_lengths import ROW_LENGTHS, checked_lengths, cut_rows, refuse_targets_behind
from parallelize.axes.context.forward_state import context_of
from parallelize.axes.context.inputs import IGNORED, next_tokens
from parallelize.axes.context.local_sequences import local_targets
from parallelize.axes.pipeline.step_check import StepCheck
from parallelize.axes.pipeline.transport import Meta, Nested, unpickled
from parallelize.axes.vocabulary.loss.losses import cross_entropy, valid_tokens
from parallelize.axes.vocabulary.loss.sequences import counted_by_rank
from parallelize.axes.zero.router_loss import router_loss_of
from parallelize.base.errors import HandshakeError, ModelError, ParallelizeError, Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.cross_entropy import mean_over
from parallelize.plan.models.label_loss import label_loss
from parallelize.plan.models.output_logits import logits_of
from parallelize.plan.models.tiny_copy import own_class
from parallelize.plan.models.wrapped_models import forward_signature, num_prompt_logits, stock_model
from parallelize.state.guards.rank_means import is_mean

T = torch.Tensor


class BatchReader:
    """Cuts batches into microbatches.

    Args:
        module, num_microbatches, loss, count, whole, share_inputs: as of `Pipeline`.
        comparison: compares batches over ranks.
        stages: the group of the pipeline's stages, and the device of this rank.
        refuse_ids: whether the targets of the first step may not be the token ids themselves.
        check: called in each step; what it raises is raised on every rank.

    Attributes:
        context: the model's state over `cp`, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        comparison: StepCheck,
        *,
        num_microbatches: int,
        loss: Callable[[Any, Any], T] | None,
        count: Callable[[Any], T | int] | None,
        whole: Collection[str] | Mapping[str, bool],
        share_inputs: bool,
        stages: tuple[Group, torch.device],
        refuse_ids: bool,
        check: Callable[[], None],
    ):
        self.module, self.comparison, self.num_microbatches = module, comparison, num_microbatches
        self.stages, self.share_inputs, self.form = stages, share_inputs, BatchForm(module, whole)
        self.loss, self.count, self.reads_tokens = loss or token_loss, count or valid_tokens, loss is None
        self._counts_targets = count is None
        self._counted: T | int = 1  # by this rank, of the step that runs
        self._may_be_unshifted = loss is None and refuse_ids  # until targets of a step were compared with its ids
        self.context = context_of(module)
        self.check = check

    def read(
        self, call: str, settings: dict[str, str], args: tuple, kwargs: dict, targets: Any = None, labels: Any = None
    ) -> tuple[list[MicrobatchInputs], T]:
        """The inputs of this data rank, and the global count, which divides the loss.

        On `cp` targets are sharded here; the model shards its inputs itself. An error of this rank is raised when the
        other ranks know of it.

        Args:
            settings: what must be the same on all ranks, besides the inputs.
        """
        if self.share_inputs:
            args, kwargs, targets, labels = broadcast_nested((args, kwargs, targets, labels), *self.stages)
        if labels is not None and not self.reads_tokens:
            kwargs, labels = {**kwargs, "labels": labels}, None
        kwargs, lengths = self._row_lengths(kwargs)
        batch = self.form.step_batch(args, kwargs, targets if labels is None else labels)
        microbatches: list[MicrobatchInputs] = []
        error: ParallelizeError | None = None
        try:
            if call == "step":
                _refuse_without_gradients()
                self.check()
            if call != "forward":
                batch = self._with_decoder_ids(batch, labels)
                targets = self._targets(batch, targets, labels)
            microbatches, targets = self._split(replace(batch, targets=targets), lengths)
        except ParallelizeError as refused:
            error = refused
        compared = batch.compared() | ({} if lengths is None else {ROW_LENGTHS: lengths})
        total = self._agreed_total(targets, compared, {**settings, "call": call}, microbatches, error)
        if call != "forward":
            self._may_be_unshifted = False
        return microbatches, total

    def _row_lengths(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """(the arguments of the model, the lengths of rows; None where they are not said)."""
        if ROW_LENGTHS in self.form.names or ROW_LENGTHS not in kwargs:
            return kwargs, None
        return {name: value for name, value in kwargs.items() if name != ROW_LENGTHS}, kwargs[ROW_LENGTHS]

    def _split(self, batch: InputBatch, lengths: Any) -> tuple[list[MicrobatchInputs], Any]:
        """(microbatches with this rank's targets, these of all microbatches, which are counted)."""
        if lengths is None:
            needed = self.context is not None and batch.targets is not None
            targets = self._local_targets(batch.length, batch.targets) if needed else batch.targets
            return split_batch(replace(batch, targets=targets), self.num_microbatches), targets
        full = batch.length
        checked = checked_lengths(lengths, batch.size, full)
        refuse_targets_behind(batch.targets, checked, full, IGNORED)
        microbatches = split_batch(batch, self.num_microbatches, checked)
        if self.context is None or batch.targets is None:
            return microbatches, batch.targets
        local = [self._local_targets(part.length, part.targets) for part in microbatches]
        longest = max(targets.shape[1] for targets in local)
        padded = [F.pad(targets, (0, longest - targets.shape[1]), value=IGNORED) for targets in local]
        parts = zip(microbatches, local, strict=True)
        return [replace(part, targets=targets) for part, targets in parts], torch.cat(padded)

    def _agreed_total(
        self,
        targets: Any,
        batch: dict[str, Any],
        settings: dict[str, str],
        microbatches: list[MicrobatchInputs],
        error: ParallelizeError | None,
    ) -> T:
        """The global count. Raises: `error`, which every rank learns of; HandshakeError where ranks differ."""
        count: Any = 1
        if error is None and targets is not None:
            if self._counts_targets and not isinstance(targets, T):
                error = _no_count(targets)
            else:
                count = self._counted = self.count(targets)
        settings["error"] = ", ".join(error.slugs) if error is not None else "none"
        try:
            sequences = microbatches[0].batch_size if microbatches else 0
            total = self.comparison.total(count, batch, settings, sequences)
        except HandshakeError as difference:
            raise error or difference from None
        if error is not None:
            raise error
        return total

    def loss_of(self, total: T, forward_only: bool) -> Callable[[Any, Any], T]:
        """The part of a microbatch in the loss of a step, by the model's output and the microbatch's targets."""

        def loss(output: Any, targets: Any) -> T:
            with counted_by_rank():
                value = self.loss(output, targets)
            if targets is not None and is_mean(value) and self._divides_means():
                raise _no_sum(self._counts_targets)
            more = router_loss_of(self.module, output) if self.reads_tokens and not forward_only else 0.0
            return mean_over(value, total) + more / self.num_microbatches

        return loss

    def _divides_means(self) -> bool:
        """Whether a mean over each microbatch would be divided once more: it is right where each counts as one."""
        return self._counts_targets or bool(self._counted > self.num_microbatches)

    def _with_decoder_ids(self, batch: InputBatch, labels: Any) -> InputBatch:
        more = with_decoder_ids(self.module, batch.inputs, labels) if self.reads_tokens and labels is not None else {}
        return replace(batch, kwargs={**batch.kwargs, **more}) if more else batch

    def _targets(self, batch: InputBatch, targets: Any, labels: Any) -> Any:
        """What the loss reads, of all tokens."""
        if self.reads_tokens:
            targets = token_targets(self.module, targets, labels, batch.mask)
            if self._may_be_unshifted:
                refuse_unshifted(self.module, batch.inputs, targets)
            targets = beside_prompts(self.module, batch.inputs, targets)
        return targets

    def _local_targets(self, length: int, targets: Any) -> Any:
        """This rank's of the targets of sequences of that length, over `cp`."""
        assert self.context is not None
        return local_targets(self.context, length, targets)


def _no_sum(counts_targets: bool) -> ModelError:
    by = "the number of targets of the step" if counts_targets else "what `count` returns"
    what = f"`loss` returns a mean over a microbatch, which would be divided once more by {by}"
    fix = 'the sum over the microbatch (reduction="sum"); with `count`, if it is divided by something else than targets'
    return ModelError(Problem("loss-no-sum", what, fix=fix))


def _no_count(targets: Any) -> ModelError:
    what = f"the targets of a step are a {type(targets).__name__}, and no `count` says by what its loss is divided"
    fix = "parallelize_model(..., loss=, count=): count(targets) is the number of targets, or 1 for a mean"
    return ModelError(Problem("no-count", what, fix=fix))


def _refuse_without_gradients() -> None:
    if not torch.is_grad_enabled():
        what = "step computes gradients, which torch.no_grad() or torch.inference_mode() turns off"
        raise ModelError(Problem("gradients-off", what, fix="call step outside it; for a loss alone, call evaluate"))


# -- microbatch inputs -----------------------------------------------------------------------------------------------
# The inputs of a step, split into microbatches, on every stage.


@dataclass(frozen=True)
class MicrobatchInputs:
    """The call of the model for one microbatch.

    Attributes:
        args, kwargs: the arguments of the model.
        targets: the targets of the loss.
        batch_offset: index of its first sequence in this rank's batch.
        size: number of its sequences.
        batch_size: number of sequences in this rank's batch.
        media: of each kind of images and sounds, the tokens that stand for them, on which the shapes inside depend.
        length: tokens of its sequences, where those of other microbatches may have other lengths; else 0.
        first_token, num_tokens: the tokens of the microbatches before it, and of all of them; so too.
    """

    args: tuple
    kwargs: dict[str, Any]
    targets: Any
    batch_offset: int = 0
    size: int = 0
    batch_size: int = 0
    media: tuple[int, ...] = ()
    length: int = 0
    first_token: int = 0
    num_tokens: int = 0

    def signature(self, mode: object) -> tuple:
        """A key: microbatches with the same one give tensors of the same shapes on every stage."""
        leaves, structure = private.tree_flatten((self.args, self.kwargs))
        return (tuple(map(_form, leaves)), repr(structure), self.media, mode)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, T):
        return Meta.of(leaf)
    return (leaf.shape, str(leaf.dtype)) if is_array(leaf) else repr(leaf)


def split_batch(batch: InputBatch, count: int, lengths: Sequence[int] | None = None) -> list[MicrobatchInputs]:
    """Split a batch along its sequences into `count` equal microbatches.

    lengths: the tokens of each sequence; each microbatch is cut to its longest. None: they are not cut.

    Split are tensors and arrays [batch, ..], and lists that `whole` says to have an entry for each sequence; images go
    with their texts, of which some may have several, or none: then the argument is None. Passed to
    every microbatch unchanged is all else: tensors with another dim 0 (position ids [1, S], a mask [S, S]), inputs that
    `whole` names, other values.

    Raises: ShapeError `no-inputs`, `indivisible-batch`, `unclear-batch-dim`, `unclear-images`.
    """
    total = batch.size
    if total % count or not total:
        divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
        what = f"a batch of {total} sequences cannot be split into {count} microbatches"
        fix = (
            f"with this batch: {', '.join(divisors) or 'none'} microbatches; or a batch of a multiple of {count} "
            "sequences"
        )
        raise ShapeError(Problem("indivisible-batch", what, fix=fix))
    if count == 1 and lengths is None:
        media = batch.rows_of_media.tokens_between(0, total)
        return [MicrobatchInputs(batch.args, batch.kwargs, batch.targets, 0, total, total, media)]
    batch.rows.refuse_unclear()
    size = total // count
    if lengths is None:
        return [_part(batch, start, size) for start in range(0, total, size)]
    longest = [max(lengths[start : start + size]) for start in range(0, total, size)]
    firsts = [0, *accumulate(size * length for length in longest)]
    parts = [_part(batch, n * size, size, length) for n, length in enumerate(longest)]
    return [replace(part, first_token=first, num_tokens=firsts[-1]) for part, first in zip(parts, firsts, strict=False)]


def _part(batch: InputBatch, start: int, size: int, length: int = 0) -> MicrobatchInputs:
    """length: to which its sequences are cut; 0: they are not."""
    inputs = batch.rows.part(start, start + size)
    if length:
        inputs = cut_rows(inputs, batch.rows, batch.length, length)
    targets = inputs.pop(TARGETS)
    media = batch.rows_of_media.tokens_between(start, start + size)
    return MicrobatchInputs(*batch.call(inputs), targets, start, size, batch.size, media, length)


def broadcast_nested(value: Any, group: Group, device: torch.device, source: int = 0) -> Any:
    """The nested value of the group's rank `source`, on every rank. Two broadcasts, and one for each tensor."""
    if group.size == 1:
        return value
    form: Nested | None = None
    tensors: list[T] = []
    raw = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        form, tensors = Nested.of(value)
        raw = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
    size = torch.tensor([raw.numel()], device=device)
    group.broadcast(size, source)
    raw = raw.to(device) if group.rank == source else torch.empty(int(size), dtype=torch.uint8, device=device)
    group.broadcast(raw, source)
    if form is None:
        form = unpickled(raw)
        tensors = [meta.empty(device) for meta in form.metas]
    for index, tensor in enumerate(tensors):
        tensors[index] = tensor = tensor.to(device).contiguous()
        group.broadcast(tensor, source)
    received = iter(tensors)
    return form.fill(lambda _: next(received))


# -- step targets ----------------------------------------------------------------------------------------------------
# Targets of the default loss: the position of a target is that of the logits it is compared with. Stock causal models
# take `labels` instead, which are the token ids, and shift them inside; other stock models do not shift theirs. All
# are sequences of token ids, so that one in place of the other trains another task without an error. A step therefore
# takes both, by their own names.


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
        fix = (
            "pass them by name: step(ids, targets=next_tokens(ids)) or step(ids, labels=ids); or a `loss` without "
            "targets"
        )
        raise ModelError(Problem("no-targets", what, fix=fix))
    return _targets_of_labels(module, labels, attention_mask)


def _targets_of_labels(module: nn.Module, labels: Any, attention_mask: Any) -> Any:
    kind = label_loss(module, labels)
    if not kind.of_logits:
        form = list(labels.shape) if isinstance(labels, T) else type(labels).__name__
        what = f"labels {form} of a {type(stock_model(module)).__name__} are no classes of its logits: {kind.unknown}"
        raise ModelError(Problem("unclear-labels", what, fix="targets= and a `loss` that reads them"))
    targets = kind.targets(labels, attention_mask)
    if targets.ndim != 2:
        return targets
    targets = _add_prompt_targets(module, targets)  # the last prompt predicts the first token
    return next_tokens(targets) if kind.shift else targets


def with_decoder_ids(module: nn.Module, named: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    """The input of the decoder that a stock model of two makes from its labels, where the step was given none; else
    nothing.

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
    """The targets of a model whose learned prompts stand before the tokens: prompts have none, as in its labels.

    Args:
        inputs: of the step. targets: token ids [batch, sequence] for the tokens of an input alone; others are as they
            should be.
    """
    return targets if _ids_like(targets, inputs) is None else _add_prompt_targets(module, targets)


def _add_prompt_targets(module: nn.Module, targets: T) -> T:
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
    return cross_entropy(logits_of(output), targets, reduction="sum")
