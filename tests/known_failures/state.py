"""Optimizers, averages and files: what a step, a save or a resume does to the state of shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from parallelize import Muon, check_loader
from tests.known_failures.failure import refused, right
from tests.known_failures.places import ON_DP, ON_PP, ON_TP, ON_ZERO1, ON_ZERO3
from tests.matrix.feature import feature_of
from tests.matrix.features.found_by_faults import _steps_with_overflow as steps_with_overflow
from tests.matrix.features.habits_of_gradients import averages_in_a_dict
from tests.matrix.features.losses import fused_loss_and_evaluation
from tests.matrix.sides import Side

STABLE = {"eps": 1e-2}


@right(
    "KempnerInstitute/KempnerForge#115",
    "2026-05",
    "momenta are not there yet when an optimizer is resumed, and start from zero",
    "AdamW over tp, saved, and resumed by a new model and a new optimizer",
    at=ON_TP,
)
def resume_adamw(side: Side) -> None:
    feature_of("resume_adamw").run(side)


@right(
    "huggingface/transformers#48569",
    "2026-09",
    "the optimizer of a model over tensor parallelism comes back with a wrong state, and nothing says so",
    "AdamW under ZeRO 1, saved, and resumed on another mesh",
    at=ON_ZERO1,
)
def resume_adamw_elsewhere(side: Side) -> None:
    feature_of("resume_adamw_elsewhere").run(side)


@refused(
    "huggingface/transformers#48569",
    "2026-09",
    "the optimizer of a model over tensor parallelism comes back with a wrong state, and nothing says so",
    "the first rank's `optimizer.state_dict()` of AdamW, loaded on both ranks of tp",
    at=replace(ON_TP, overrides={"vocab_size": 68}),
    by="`load_state_dict`",
    slug="state-of-other-rank",
)
def state_of_the_first_rank(side: Side) -> None:
    side.place()
    optimizer = side.optimizer(torch.optim.AdamW, **STABLE)
    side.step(0)
    side.update()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[0])


@right(
    "NVIDIA/Megatron-LM#5976",
    "2026-07",
    "state that is made by a step of zeros counts it, so that the first update is 1.34 times too small",
    "the first two updates of AdamW under ZeRO 3",
    at=ON_ZERO3,
)
def first_update(side: Side) -> None:
    side.place()
    side.optimizer(torch.optim.AdamW, **STABLE)
    side.train()
    side.update()


@right(
    "deepspeedai/DeepSpeed#8437",
    "2026-09",
    "Muon orthogonalizes the shard of each rank: its update is 39% from that of the full matrix",
    "PyTorch's Muon of the matrices of a model over tp",
    at=replace(ON_TP, bound=2e-2),
)
def muon_of_shards(side: Side) -> None:
    side.place()
    side.optimizer(
        torch.optim.Muon, [p for name, p in side.model.named_parameters() if ".mlp.up_proj" in name], lr=0.02
    )
    side.step(0)
    side.update()


@right(
    "deepspeedai/DeepSpeed#8437",
    "2026-09",
    "Muon orthogonalizes the shard of each rank",
    "`parallelize.Muon` over tp, beside one rank",
    at=replace(ON_TP, one_rank=True, bound=2e-2),
)
def muon_of_full_matrices(side: Side) -> None:
    side.place()
    side.optimizer(Muon, lr=0.02, adamw_lr=1e-3)
    side.step(0)
    side.update()


right(
    "NCAR/miles-credit#414",
    "2026-06",
    "a moving average under sharded data parallelism covers one rank's shards",
    "averages of all parameters in a dict, which are swapped in for an evaluation, under ZeRO 3",
    at=ON_ZERO3,
)(averages_in_a_dict)

right(
    "NVIDIA/Megatron-LM#6336",
    "2026-08",
    "forwards go on with the weights of before the optimizer's step",
    "evaluations between steps, whose head stays gathered under ZeRO 3",
    at=ON_ZERO3,
)(fused_loss_and_evaluation)


@refused(
    "verl-project/verl#7834",
    "2026-09",
    "weights that are assigned by name to an embedding and a head that share one untie them",
    "`load_state_dict(assign=True)` of a tied model over two data ranks",
    at=replace(ON_DP, overrides={"tie_word_embeddings": True}),
    by="the next step",
    slug="parameter-replaced",
)
def ties_that_are_assigned(side: Side) -> None:
    side.place()
    values = {name: value.clone() for name, value in side.model.state_dict().items()}
    side.model.load_state_dict(values, assign=True)
    side.step(0)


@right(
    "NVIDIA/Megatron-LM#656",
    "2024-01",
    "an embedding and a head that are one become two in a pipeline",
    "a tied model in two stages",
    at=replace(ON_PP, overrides={"tie_word_embeddings": True}),
)
def ties_over_stages(side: Side) -> None:
    side.place()
    side.train()
    side.clip(0.1)
    side.update()
    side.step(2)


@right(
    "ecmwf/WeatherGenerator#2718",
    "2026-08",
    "the first rank's loss decides for all whether a step is skipped, so that a bad one elsewhere is stepped on",
    "an infinite gradient on one of two data ranks, and PyTorch's scaler, under ZeRO 1",
    at=ON_ZERO1,
)
def overflow_of_one_rank(side: Side) -> None:
    side.place()
    steps_with_overflow(side, side.optimizer(torch.optim.SGD, momentum=0.9), unscales=True)


@right(
    "NVIDIA-NeMo/Megatron-Bridge#5591",
    "2026-08",
    "parts of a model scale their losses apart after an overflow in one of them",
    "the same in the first of two stages",
    at=ON_PP,
)
def overflow_of_one_stage(side: Side) -> None:
    side.place()
    steps_with_overflow(side, side.optimizer(torch.optim.SGD, momentum=0.9), unscales=True)


@refused(
    "pytorch/pytorch#149205",
    "2025-03",
    "an optimizer has parameters that are replaced afterwards, and steps what nobody reads",
    "an optimizer that is built before the model is put over tp",
    at=replace(ON_TP, processes=True),
    by="`parallelize_model`",
    slug="early-optimizer",
)
def optimizer_of_earlier_parameters(side: Side) -> None:
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
    side.place()
    optimizer.step()


@refused(
    "huggingface/accelerate#3092",
    "2024-09",
    "ranks that share one sample get different ones from a loader that counts all processes",
    "PyTorch's `DistributedSampler` with all processes, over tp",
    at=ON_TP,
    by="`check_loader`",
    slug="loader-over-world",
)
def loader_that_counts_processes(side: Side) -> None:
    side.place()
    sampler: Any = DistributedSampler(range(16), num_replicas=2, rank=side.mesh.get_local_rank("tp"))
    check_loader(DataLoader(range(16), sampler=sampler), side.mesh)
