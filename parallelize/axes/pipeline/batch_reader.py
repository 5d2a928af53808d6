"""What a step is given, and what it computes with: the microbatches of this data rank, and the count that divides the loss.

Ranks compare what they were given before anything runs. The global count is known then too, so that the loss of each
microbatch is divided by it at once, and gradients are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallelize.axes.batch.input_batch import BatchForm, InputBatch
from parallelize.axes.context.forward_state import context_of
from parallelize.axes.context.local_sequences import local_targets
from parallelize.axes.pipeline.microbatch_inputs import MicrobatchInputs, broadcast_nested, split_batch
from parallelize.axes.pipeline.step_check import StepCheck
from parallelize.axes.pipeline.step_targets import (
    beside_prompts,
    refuse_unshifted,
    token_loss,
    token_targets,
    with_decoder_ids,
)
from parallelize.axes.vocabulary.loss.losses import valid_tokens
from parallelize.axes.zero.router_loss import router_loss_of
from parallelize.base.errors import HandshakeError, ModelError, ParallelizeError, Problem
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.cross_entropy import mean_over

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
        self._may_be_unshifted = loss is None and refuse_ids  # until targets of a step were compared with its ids
        self.context = context_of(module)
        self.check = check

    def read(
        self, call: str, settings: dict[str, str], args: tuple, kwargs: dict, targets: Any = None, labels: Any = None
    ) -> tuple[list[MicrobatchInputs], T]:
        """The inputs of this data rank, and the global count, which divides the loss.

        On `cp` targets are sharded here; the model shards its inputs itself. An error of this rank is raised when the other
        ranks know of it.

        Args:
            settings: what must be the same on all ranks, besides the inputs.
        """
        if self.share_inputs:
            args, kwargs, targets, labels = broadcast_nested((args, kwargs, targets, labels), *self.stages)
        if labels is not None and not self.reads_tokens:
            kwargs, labels = {**kwargs, "labels": labels}, None
        batch = self.form.step_batch(args, kwargs, targets if labels is None else labels)
        microbatches: list[MicrobatchInputs] = []
        error: ParallelizeError | None = None
        try:
            if call == "step":
                _refuse_without_gradients()
                self.check()
            if call != "forward":
                batch = self._with_decoder_ids(batch, labels)
                targets = self._local_targets(batch, targets, labels)
            microbatches = split_batch(replace(batch, targets=targets), self.num_microbatches)
        except ParallelizeError as refused:
            error = refused
        total = self._agreed_total(targets, batch, {**settings, "call": call}, microbatches, error)
        if call != "forward":
            self._may_be_unshifted = False
        return microbatches, total

    def _agreed_total(
        self,
        targets: Any,
        batch: InputBatch,
        settings: dict[str, str],
        microbatches: list[MicrobatchInputs],
        error: ParallelizeError | None,
    ) -> T:
        """The global count. Raises: `error`, which every rank learns of; HandshakeError where ranks differ."""
        count = self.count(targets) if error is None and targets is not None else 1
        settings["error"] = ", ".join(error.slugs) if error is not None else "none"
        try:
            sequences = microbatches[0].batch_size if microbatches else 0
            total = self.comparison.total(count, batch.compared(), settings, sequences)
        except HandshakeError as difference:
            raise error or difference from None
        if error is not None:
            raise error
        return total

    def loss_of(self, total: T, forward_only: bool) -> Callable[[Any, Any], T]:
        """The part of a microbatch in the loss of a step, by the model's output and the microbatch's targets."""

        def loss(output: Any, targets: Any) -> T:
            more = router_loss_of(self.module, output) if self.reads_tokens and not forward_only else 0.0
            return mean_over(self.loss(output, targets), total) + more / self.num_microbatches

        return loss

    def _with_decoder_ids(self, batch: InputBatch, labels: Any) -> InputBatch:
        more = with_decoder_ids(self.module, batch.inputs, labels) if self.reads_tokens and labels is not None else {}
        return replace(batch, kwargs={**batch.kwargs, **more}) if more else batch

    def _local_targets(self, batch: InputBatch, targets: Any, labels: Any) -> Any:
        """What the loss reads on this rank."""
        if self.reads_tokens:
            targets = token_targets(self.module, targets, labels, batch.mask)
            if self._may_be_unshifted:
                refuse_unshifted(self.module, batch.inputs, targets)
            targets = beside_prompts(self.module, batch.inputs, targets)
        if self.context is None or targets is None:
            return targets
        return local_targets(self.context, batch.length, targets)


def _refuse_without_gradients() -> None:
    if not torch.is_grad_enabled():
        what = "step computes gradients, which torch.no_grad() or torch.inference_mode() turns off"
        raise ModelError(Problem("gradients-off", what, fix="call step outside it; for a loss alone, call evaluate"))
