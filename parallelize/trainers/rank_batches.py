"""Which samples this rank gets in the loops of a trainer: global batches in training, every batch once in evaluation.

Both are functions of the data and the batch sizes. The ranks along tp and pp get the samples of their data rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Sampler

from parallelize.data.global_batches import GlobalBatches


class MicroBatches(Sampler[list[int]]):
    """This rank's part of each global batch, in batches of `batch_size` that a trainer accumulates. A batch sampler.

    An iteration is one epoch from its beginning: a trainer skips the batches that a resumed run has taken.

    Args:
        batches: the global batches.
        batch_size: samples of one forward. The part of a rank divides into these; the last batch of an epoch may be smaller.
    """

    def __init__(self, batches: GlobalBatches, batch_size: int):
        self.batches, self.batch_size = batches, batch_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.batches.epoch, self.batches.batches_done = self.epoch, 0
        for samples in self.batches:
            for start in range(0, len(samples), self.batch_size):
                yield samples[start : start + self.batch_size]

    def __len__(self) -> int:
        full, rest = divmod(self.batches.num_samples, self.batches.global_batch_size)
        per_batch = self._forwards(self.batches.global_batch_size)
        return full * per_batch + (0 if self.batches.drop_last else self._forwards(rest))

    def _forwards(self, samples: int) -> int:
        """The number of forwards of this rank for a global batch of this size."""
        return -(-(samples // self.batches.data_ranks) // self.batch_size)


class EvaluationBatches(Sampler[list[int]]):
    """Batch i of the data set, in its order, goes to data rank i modulo their number. A batch sampler.

    Each rank gets the same number of batches: where they do not divide, the last ones of some ranks are repetitions, of which
    `counts` says 0. So each batch is evaluated as one process would, on any mesh.

    Args:
        num_samples: the number of samples in the data set.
        batch_size: samples of one forward.
        data_rank: (index, number) of this data rank.
    """

    def __init__(self, num_samples: int, batch_size: int, data_rank: tuple[int, int]):
        starts = range(0, num_samples, batch_size)
        index, count = data_rank
        rounds = -(-len(starts) // count)
        positions = [round_number * count + index for round_number in range(rounds)]
        self._batches = [
            list(range(start, min(start + batch_size, num_samples)))
            for start in (starts[min(position, len(starts) - 1)] for position in positions)
        ]
        self.counts = [
            len(batch) if position < len(starts) else 0
            for batch, position in zip(self._batches, positions, strict=True)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class EvaluationLoader(DataLoader):
    """A DataLoader over `EvaluationBatches` that says how many samples of the current batch count.

    Attributes:
        samples: of the batch that was returned last; 0 for a repetition.
    """

    samples = 0

    def __init__(self, dataset: Any, batches: EvaluationBatches, **options: Any):
        super().__init__(dataset, batch_sampler=batches, **options)
        self.counts: Sequence[int] = batches.counts

    def __iter__(self) -> Any:
        for count, batch in zip(self.counts, super().__iter__(), strict=True):
            self.samples = count
            yield batch
