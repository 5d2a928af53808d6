"""The order in which the stock Trainer takes its samples, as a function of the epoch, whatever the mesh.

An old log of one process and a new one of a mesh agree step by step, because both take the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from parallelize.base.errors import ModelError, Problem

T = torch.Tensor


class StockOrder:
    """The samples of each epoch, in the order of the stock Trainer on one process.

    Args:
        sampling: "random", "sequential" or "group_by_length".
        num_samples: of the data set.
        seed: of the order. Each epoch of "random" has the permutation of a generator that is seeded with `seed` and the
            number of the epoch added. "group_by_length" draws from one generator on and on: it is the stock order as
            long as nothing else draws from torch's generator, such as dropout or an evaluation between two epochs.
        lengths, batch: for "group_by_length": of each sample, and the samples of an optimizer step.

    Cost: a permutation in memory, 8 bytes a sample.
    Source: `SeedableRandomSampler` of accelerate, `LengthGroupedSampler` of `transformers`.
    """

    def __init__(
        self, sampling: str, num_samples: int, *, seed: int = 0, lengths: Sequence[int] | None = None, batch: int = 1
    ):
        self.sampling, self.num_samples, self.seed = sampling, num_samples, seed
        self._lengths, self._batch = lengths, batch

    def epoch(self, number: int) -> T:
        """The samples of an epoch [num_samples], in their order."""
        if self.sampling == "sequential":
            return torch.arange(self.num_samples, device="cpu")
        if self.sampling == "random":
            generator = torch.Generator("cpu").manual_seed(self.seed + number)
            return torch.randperm(self.num_samples, generator=generator, device="cpu")
        return self._by_length(number)

    def _by_length(self, number: int) -> T:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        generator = torch.Generator("cpu").manual_seed(self.seed)
        for _ in range(number):
            _seed_of_workers(generator)
            torch.randperm(self.num_samples, generator=generator, device="cpu")
        _seed_of_workers(generator)
        return torch.tensor(get_length_grouped_indices(self._lengths, self._batch, generator=generator))


def _seed_of_workers(generator: torch.Generator) -> None:
    """What a DataLoader draws each time it is iterated, before its sampler draws."""
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)


def stock_order(trainer: Any, global_batch_size: int) -> StockOrder:
    """The order of the sampler that the stock Trainer makes of its arguments and data.

    Args:
        trainer: a stock Trainer. global_batch_size: samples of an optimizer step.

    Raises: ModelError `trainer-option` for a sampler of the user's own.
    """
    args, count = trainer.args, len(trainer.train_dataset)
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    drawn = torch.initial_seed()  # which the stock Trainer has set to args.seed
    if type(sampler) is SequentialSampler:
        return StockOrder("sequential", count)
    if type(sampler) is RandomSampler and sampler.num_samples == count and not sampler.replacement:
        return StockOrder("random", count, seed=drawn if args.data_seed is None else args.data_seed)
    if type(sampler).__name__ == "LengthGroupedSampler" and sampler.generator is None:
        return StockOrder("group_by_length", count, seed=drawn, lengths=sampler.lengths, batch=global_batch_size)
    what = f"the {type(sampler).__name__} of _get_train_sampler is not served by {type(trainer).__name__}"
    fix = "override get_train_dataloader, with batches of this data rank: GlobalBatches(..., mesh=self.mesh)"
    raise ModelError(Problem("trainer-option", what, fix=fix))
