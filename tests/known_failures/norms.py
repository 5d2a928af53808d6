"""Gradient norms that count a parameter too often or too rarely, and clipping that follows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from tests.known_failures.failure import Place, right
from tests.known_failures.places import LATENT, MIXTURE, ON_EP, ON_PP, ON_REGION, ON_TP, ON_ZERO3, QWEN3, TP
from tests.matrix.habits import full
from tests.matrix.sides import Side


def _clips(side: Side) -> None:
    """PyTorch's call, as in most loops, to a norm that the gradients exceed; then an update and once more."""
    side.place()
    for number in range(2):
        side.step(number)
        side.record("norm", full(nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)))
        side.record_gradients()
        side.update()


@right(
    "NVIDIA-NeMo/RL#3788",
    "2026-08",
    "the squares of norms, biases and routers, which every rank of tensor parallelism has, are summed over its ranks: "
    "the norm is too large, and clipping is stronger than was asked for",
    "PyTorch's clipping of a Qwen3 with its norms of queries and keys, over tp in a sequence-parallel region",
    at=replace(ON_REGION, kind=QWEN3),
)
def norm_of_what_every_rank_has(side: Side) -> None:
    _clips(side)


@right(
    "ROCm/TransformerEngine#715",
    "2026-08",
    "linears that are left whole are marked as sharded: the norm of a DeepSeek over tp 8 is up to 1.52 times too large",
    "PyTorch's clipping of a DeepSeek V3, whose low-rank projections are on every rank of tp",
    at=Place(TP, kind=LATENT),
)
def norm_of_linears_that_are_left_whole(side: Side) -> None:
    _clips(side)


@right(
    "mindspore-ai/hyper-parallel#526",
    "2026-09",
    "under sharded data parallelism parameters that are not sharded count once for each rank: a norm of 48 for 28",
    "PyTorch's clipping under ZeRO 3, with one-dimensional parameters that two ranks do not divide evenly",
    at=replace(ON_ZERO3, overrides={"hidden_size": 40, "head_dim": 6, "intermediate_size": 71}),
)
def norm_over_sharded_data_ranks(side: Side) -> None:
    _clips(side)


@right(
    "NVIDIA-NeMo/Automodel#3816",
    "2026-09",
    "each group of experts clips by the norm of its own experts, ten times apart in the reproduction, so that weights "
    "which the groups share drift",
    "PyTorch's clipping of a mixture whose experts are on different data ranks",
    at=ON_EP,
)
def norm_over_groups_of_experts(side: Side) -> None:
    _clips(side)


@right(
    "NVIDIA/Megatron-LM#5916",
    "2026-07",
    "with experts on the ranks of tensor parallelism parts of the norm are left out",
    "PyTorch's clipping of a mixture whose experts are divided over the ranks of tp",
    at=Place(TP, {"ep": 2}, MIXTURE),
)
def norm_of_experts_over_tp(side: Side) -> None:
    _clips(side)


@right(
    "huggingface/transformers#46113",
    "2026-05",
    "clipping gives gradients to a function that reads the `.grad` of parameters: the norm is right, nothing is scaled",
    "the norm and the scaling called apart, as in that code, over tp; the gradients afterwards are compared",
    at=ON_TP,
)
def clipping_that_never_clips(side: Side) -> None:
    side.place()
    side.step(0)
    parameters = [p for p in side.model.parameters() if p.grad is not None]
    norm = full(nn.utils.get_total_norm([p.grad for p in parameters]))
    side.record("norm", norm)
    nn.utils.clip_grads_with_norm_(parameters, 0.05, norm)
    side.record("norm afterwards", full(nn.utils.get_total_norm([p.grad for p in parameters])))


@right(
    "NVIDIA-NeMo/RL#3711",
    "2026-08",
    "a sharded weight that carries no mark counts on the first rank of tensor parallelism alone: the norm is too small",
    "PyTorch's clipping over the vocabulary's shards of embedding and head",
    at=Place(TP, {"loss_parallel": True}, overrides={"vocab_size": 67}),
)
def norm_of_a_sharded_head(side: Side) -> None:
    _clips(side)


@right(
    "NVIDIA-NeMo/RL#3788",
    "2026-08",
    "squares of what every rank has are summed over ranks, in a loop that makes the norm itself",
    "the root of the sum of the squares of `p.grad.norm()`, over tp",
    at=ON_TP,
)
def norm_by_hand(side: Side) -> None:
    side.place()
    side.step(0)
    squares: Any = sum(p.grad.norm() ** 2 for p in side.model.parameters() if p.grad is not None)
    side.record("norm", full(squares.sqrt()))


@right(
    "pytorch/torchtitan#2972",
    "2026-04",
    "the pipeline's loss is a sum that is divided for the log alone, so that gradients are as many times too large as "
    "there are tokens",
    "a pipeline of two stages, with clipping, beside one process",
    at=ON_PP,
)
def gradients_of_a_pipeline(side: Side) -> None:
    _clips(side)
