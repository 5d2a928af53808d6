"""Ranks that should have the same weights, buffers, samples or rates, and do not."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from tests.known_failures.failure import Place, refused, right
from tests.known_failures.places import (
    DP,
    GPT2,
    MIXTURE,
    ON_DP,
    ON_REGION,
    ON_TP,
    ON_ZERO1,
    ON_ZERO3,
    TP,
    lora,
    with_dropout,
)
from tests.matrix.features.losses import by_hand
from tests.matrix.sides import Side


def _is_second(side: Side) -> bool:
    return not side.alone and dist.get_rank() == 1


@refused(
    "NVIDIA-NeMo/Automodel#3822",
    "2026-09",
    "weights that every rank of tensor parallelism has drift, and a reload changes the model",
    "a norm's weights of one rank are moved after the first step, over tp",
    at=ON_TP,
    by="the next step that compares (`compare_every`)",
    slug="replicas-differ",
)
def norms_that_have_drifted(side: Side) -> None:
    side.place(compare_every=1)
    side.step(0)
    if _is_second(side):
        with torch.no_grad():
            side.model.model.norm.weight.mul_(1.001)
    side.step(1)


@refused(
    "NVIDIA-NeMo/Automodel#1291",
    "2026-02",
    "a layer that no plan divides is drawn from other random numbers on each rank: a loss of 11.75 becomes 1.45 over "
    "eight ranks",
    "a model whose weights were drawn from a seed of the rank, over two data ranks",
    at=ON_DP,
    by="`parallelize_model`",
    slug="replicas-differ",
)
def weights_from_other_seeds(side: Side) -> None:
    if _is_second(side):
        with torch.no_grad():
            side.model.model.embed_tokens.weight.normal_()
    side.place()


@right(
    "NVIDIA-NeMo/Automodel#1291",
    "2026-02",
    "a layer that no plan divides is drawn from other random numbers on each rank of tensor parallelism",
    "a model whose ranks of tp have other weights: each takes its part of the first rank's",
    at=ON_TP,
)
def weights_from_other_seeds_over_tp(side: Side) -> None:
    if _is_second(side):
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.mul_(1.5)
    side.place()
    side.step(0)


@refused(
    "oumi-ai/oumi#2647",
    "2026-09",
    "parameters agree and a rotary table does not: three of four ranks compute other probabilities",
    "a rotary table of one rank is scaled before the model is placed",
    at=ON_DP,
    by="`parallelize_model`",
    slug="replicas-differ",
)
def rotary_table_of_one_rank(side: Side) -> None:
    if _is_second(side):
        side.model.model.rotary_emb.inv_freq.mul_(1.5)
    side.place()


@refused(
    "hiyouga/LlamaFactory#10820",
    "2026-09",
    "buffers that no file has are left as they were allocated",
    "a rotary table of zeros on one rank of tp",
    at=ON_TP,
    by="`parallelize_model`",
    slug="replicas-differ",
)
def rotary_table_over_tp(side: Side) -> None:
    if _is_second(side):
        side.model.model.rotary_emb.inv_freq.zero_()
    side.place()


@refused(
    "karpathy/nanochat#857",
    "2026-09",
    "the rate follows how far a rank is in its own data, so that ranks step with different rates",
    "a rate that one of two data ranks sets otherwise, under ZeRO 1",
    at=ON_ZERO1,
    by="the next step",
    slug="ranks-diverged",
)
def rates_of_ranks(side: Side) -> None:
    side.place()
    optimizer = side.optimizer(torch.optim.SGD, momentum=0.9)
    side.step(0)
    optimizer.param_groups[0]["lr"] = 0.04 if _is_second(side) else 0.05
    side.update()
    side.step(1)


@refused(
    "NVIDIA-NeMo/Megatron-Bridge#2956",
    "2026-03",
    "ranks that compute parts of one sample draw other samples, and train on a mixture of both",
    "other ids on each rank of tp",
    at=ON_TP,
    by="the step",
    slug="ranks-diverged",
)
def samples_of_ranks_that_share_them(side: Side) -> None:
    side.place()
    ids = side.inputs()["input_ids"]
    side.step(0, input_ids=ids.flip(0) if _is_second(side) else ids)


@right(
    "huggingface/transformers#48205",
    "2026-09",
    "routers get the gradient of a rank's own experts alone",
    "a mixture whose experts are on different ranks; the routers' gradients are compared",
    at=Place(TP, {"ep": 2}, MIXTURE),
)
def routers_over_experts(side: Side) -> None:
    side.place()
    side.train()


@right(
    "huggingface/transformers#48687",
    "2026-09",
    "slots of experts that a rank does not have add to the router's gradient, while the loss is right",
    "such a mixture over data ranks, in a loop by hand",
    at=Place(DP, {"ep": 2}, MIXTURE),
)
def routers_over_data_ranks(side: Side) -> None:
    side.place()
    by_hand(side, 0)


@right(
    "pytorch/torchtitan#4332",
    "2026-08",
    "the bias of a row-parallel linear is divided before the sum over ranks, and so is its gradient",
    "a GPT-2, whose row linears have biases, over tp",
    at=Place(TP, kind=GPT2),
)
def biases_of_row_linears(side: Side) -> None:
    side.place()
    side.train()


@right(
    "NVIDIA/Megatron-LM#7186",
    "2026-09",
    "of accumulated batches the last one's gradient alone reaches the optimizer",
    "two accumulated steps under ZeRO 2, deferred and not",
    at=Place(DP, {"zero": 2}),
)
def accumulated_batches(side: Side) -> None:
    side.place(defer=True)
    for number in range(2):
        side.step(number)
    side.update()
    side.step(2)


@right(
    "allenai/OLMo-core#828",
    "2026-08",
    "a layer that is recomputed in backward draws other dropout masks than in forward",
    "dropout under recompute over two data ranks, beside one rank without recompute",
    at=with_dropout(Place(DP, {"recompute": "full"})),
)
def dropout_under_recompute(side: Side) -> None:
    side.place()
    side.train()


@right(
    "ecmwf/anemoi-core#595",
    "2025-10",
    "ranks with parts of one activation drop the same elements of each part",
    "dropout over tp in a sequence-parallel region, beside one rank",
    at=with_dropout(ON_REGION),
)
def masks_of_parts(side: Side) -> None:
    side.place()
    side.train()


@right(
    "tenstorrent/tt-metal#55947",
    "2026-09",
    "data ranks drop the same elements of different samples",
    "dropout over two data ranks, beside one rank with both of their samples",
    at=with_dropout(ON_DP),
)
def masks_of_samples(side: Side) -> None:
    side.place()
    side.train()


@refused(
    "pytorch/torchtitan#3106",
    "2026-04",
    "an initializer draws the same numbers into the shard of each rank",
    "`nn.init.normal_` of each parameter under ZeRO 3",
    at=ON_ZERO3,
    by="the initializer",
    slug="initializer-on-shards",
)
def initializers_of_shards(side: Side) -> None:
    side.place()
    for parameter in side.model.parameters():
        nn.init.normal_(parameter)


@right(
    "modelscope/mcore-bridge#173",
    "2026-08",
    "the factor of an adapter that every rank has is trained on the rank's own part of the sequence, and one of the "
    "copies is saved",
    "LoRA on all linears over tp in a sequence-parallel region",
    at=replace(ON_REGION, prepare=lora()),
)
def adapters_in_a_region(side: Side) -> None:
    side.place()
    side.train()


@right(
    "hao-ai-lab/FastVideo#1666",
    "2026-07",
    "adapters that are added after the data parallelism get no gradient of other ranks",
    "LoRA that is added to a model over two data ranks",
    at=ON_DP,
)
def adapters_after_the_data_axes(side: Side) -> None:
    from tests.matrix.sides import seeded

    side.place()
    with seeded(1):
        side.model = lora()(side.model)
    side.train()
