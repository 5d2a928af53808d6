"""Losses that are divided by the wrong count, or that count a token too often or not at all."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from parallelize import accumulate_gradients, cross_entropy, token_log_probs
from parallelize.tools.verification.precision import InFloat64
from tests.known_failures.failure import Place, refused, right
from tests.known_failures.places import DP, MIXTURE, ON_CP, ON_DP, ON_PP, ON_REGION, ON_TP, ON_ZERO2, ON_ZERO3
from tests.matrix.features.habits_of_hidden_states import contrast_over_all_ranks
from tests.matrix.features.losses import by_hand
from tests.matrix.features.steps import packed_positions
from tests.matrix.kinds import IGNORED, logits_of, summed_loss
from tests.matrix.sides import Side


@right(
    "pytorch/torchtitan#2206",
    "2026-01",
    "each rank and microbatch divides by its own number of valid tokens, so that a token counts by where it lies",
    "steps over data ranks and microbatches whose rows have unequal numbers of targets",
    at=ON_ZERO2,
)
def unequal_numbers_of_tokens(side: Side) -> None:
    side.place(num_microbatches=2)
    side.train()


@refused(
    "PrimeIntellect-ai/prime-rl#2562",
    "2026-05",
    "the loss of a rank is divided by the rank's own count before gradients meet",
    "`F.cross_entropy(logits, targets).backward()` of a model over two data ranks",
    at=ON_DP,
    by="`backward`",
    slug="mean-of-rank",
)
def mean_of_each_rank(side: Side) -> None:
    side.place()
    logits = logits_of(side.forward())
    F.cross_entropy(logits.flatten(0, -2), side.targets().flatten()).backward()


@refused(
    "vllm-project/speculators#942",
    "2026-08",
    "a masked mean of each rank, averaged over ranks, in the place of one over all of them",
    "the mean of `parallelize.cross_entropy` without a mesh, under ZeRO 3",
    at=ON_ZERO3,
    by="`backward`",
    slug="mean-of-rank",
)
def mean_without_a_mesh(side: Side) -> None:
    side.place()
    cross_entropy(logits_of(side.forward()), side.targets()).backward()


@refused(
    "ml-explore/mlx-lm#1413",
    "2026-06",
    "accumulation adds up the means of its batches, and divides by their number",
    "a `loss=` of `parallelize_model` that returns the mean over a microbatch",
    at=ON_PP,
    by="the first step",
    slug="loss-no-sum",
)
def mean_of_each_microbatch(side: Side) -> None:
    side.place(loss=lambda output, targets: F.cross_entropy(logits_of(output).flatten(0, -2), targets.flatten()))
    side.step(0)


@right(
    "radixark/miles#3231",
    "2026-09",
    "sums over tokens are averaged by the sharded data parallelism, and the count of tokens is dropped: gradients "
    "nine times too large in its test",
    "a loop under ZeRO 3 that divides a sum by the count of all ranks",
    at=ON_ZERO3,
)
def sums_under_zero_3(side: Side) -> None:
    side.place()
    by_hand(side, 0)
    side.update()
    by_hand(side, 1)


@right(
    "verl-project/verl-SpeCo#29",
    "2026-07",
    "a loss that was all-reduced before the backward gives each rank its own part of the gradient, which is then "
    "averaged: a learning rate divided by the number of ranks",
    "the loss of a step is the mean over all ranks on each of them; its gradients after an update are compared",
    at=ON_DP,
)
def loss_that_every_rank_has(side: Side) -> None:
    side.place()
    for number in range(3):
        side.step(number)
        side.update()


@right(
    "ByteDance-Seed/VeOmni#338",
    "2025-12",
    "with sequences over ranks the loss is divided by their number once more",
    "a loop whose sequences are over cp",
    at=ON_CP,
)
def loss_over_sequences(side: Side) -> None:
    side.place()
    by_hand(side, 0)
    side.step(1)


@right(
    "NVIDIA-BioNeMo/bionemo-recipes#1449",
    "2026-02",
    "labels are shifted after each rank has its part of the sequence, so that the token at the border is lost",
    "labels given to the stock model over cp, which are those of the whole sequence",
    at=ON_CP,
)
def labels_are_shifted_before_they_are_split(side: Side) -> None:
    side.place()
    with InFloat64():
        loss = side.forward(0, labels=side.kind.labels(0)).loss
        loss.backward()
    side.record("loss", side.summed(loss))


@right(
    "NVIDIA/Megatron-LM#7452",
    "2026-09",
    "label smoothing of a loss over the vocabulary's shards averages over a rank's own part of it",
    "label smoothing of sharded logits",
    at=replace(ON_TP, options={"loss_parallel": True}),
)
def smoothing_over_the_vocabulary(side: Side) -> None:
    side.place()
    by_hand(side, label_smoothing=0.1)


@right(
    "NVIDIA/Megatron-LM#7452",
    "2026-09",
    "logits that were gathered go into a loss that takes them for shards: too large by the logarithm of the ranks",
    "the loss of full logits over tp",
    at=ON_TP,
)
def gathered_logits(side: Side) -> None:
    side.place()
    by_hand(side, 0)


@right(
    "unslothai/unsloth#10616",
    "2026-09",
    "logits of padding rows of the vocabulary are part of the softmax",
    "67 tokens over two ranks, of which one stores 34 and the other 33",
    at=replace(ON_TP, options={"loss_parallel": True, "fuse_loss": True}),
)
def vocabulary_that_ranks_do_not_divide(side: Side) -> None:
    side.place()
    side.train()


@right(
    "NVIDIA-NeMo/Automodel#3359",
    "2026-08",
    "the balance loss of a mixture enters each accumulated batch in full",
    "the balance loss of a mixture over data ranks, beside one process",
    at=Place(DP, {"ep": 2}, MIXTURE, {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
)
def balance_loss(side: Side) -> None:
    side.place()
    with InFloat64():
        if side.alone:
            output = side.model(**side.inputs(), use_cache=False)
            loss = summed_loss(output, side.targets()) / side.count() + 0.5 * output.aux_loss
            loss.backward()
            side.record("loss", loss)
        else:
            side.step(0)


@right(
    "modelscope/ms-swift#10117",
    "2026-09",
    "a policy loss that is divided by the tokens of all accumulated batches is divided by their number too",
    "a policy gradient over two accumulated batches, divided by the targets of both",
    at=ON_ZERO2,
)
def policy_loss_that_accumulates(side: Side) -> None:
    side.place()
    count = side.count(0) + side.count(1)

    def backwards() -> None:
        for number in range(2):
            ids = side.targets(number)
            log_probs = _log_probs(side, number, ids)
            (-(ids % 5 * (ids != IGNORED) * log_probs).sum() / count).backward()

    if side.alone:
        backwards()
    else:
        with accumulate_gradients(side.model):
            backwards()


def _log_probs(side: Side, number: int, ids: torch.Tensor) -> torch.Tensor:
    logits = logits_of(side.forward(number))
    if not side.alone:
        return token_log_probs(logits, ids)
    chosen = logits.log_softmax(-1).gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(ids != IGNORED, chosen, 0)


right(
    "lightly-ai/lightly#1977",
    "2026-07",
    "a contrastive loss of gathered rows gives gradients that are divided by the number of ranks",
    "rows told from those of all ranks, gathered with a gradient that is summed over ranks",
    at=ON_DP,
)(contrast_over_all_ranks)


@right(
    "keras-team/keras-hub#2958",
    "2026-08",
    "perplexity is an average of averages, so that it depends on how an evaluation is cut into batches",
    "evaluations of two data ranks with unequal numbers of targets",
    at=ON_DP,
)
def perplexity(side: Side) -> None:
    side.place()
    for number in range(2):
        side.record("perplexity", side.evaluate(number).exp())


@right(
    "huggingface/transformers#46634",
    "2026-06",
    "beside an attention mask of ones packed documents are not looked for: they attend to each other",
    "a step with positions of packed documents and a mask of ones, beside one process without a mask",
    at=ON_REGION,
)
def packed_documents_beside_a_mask(side: Side) -> None:
    side.place()
    positions = side.local(packed_positions())
    masks = {} if side.alone else {"attention_mask": torch.ones_like(positions)}
    side.step(0, position_ids=positions, **masks)
