"""The loaders of a `ParallelTrainer`: every data rank gets its part of global batches that do not depend on the
mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

from torch.utils.data import DataLoader, Sampler

from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.mesh_view import MeshView
from parallelize.training.data.global_batches import GlobalBatches
from parallelize.training.trainers.served_options import refuse_iterated


class TrainerLoaders:
    """The methods of the stock Trainer that make loaders, without accelerate's division over all processes."""

    parallel: Any
    args: Any
    train_dataset: Any
    eval_dataset: Any
    train_batches: MicroBatches | None = None

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this data rank. Raises: DataError `trainer-data`; ShapeError `indivisible-batch`, `no-batches`."""
        args: Any = self.args
        if self.train_dataset is None:
            return super().get_train_dataloader()  # type: ignore[misc]  # which says what is missing
        refuse_iterated(self.train_dataset, "training")
        self.train_batches = batches = MicroBatches(
            len(self.train_dataset),
            self.get_total_train_batch_size(args),
            args.gradient_accumulation_steps,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            mesh=self.parallel.mesh,
        )
        dataset, options = self._loading(self.train_dataset, "Training")
        seeded = partial(
            _seed_worker, num_workers=args.dataloader_num_workers, rank=self.parallel.pipeline.mesh.sample_place[0]
        )
        options |= dict(persistent_workers=args.dataloader_persistent_workers, worker_init_fn=seeded)
        loader: Any = DataLoader(dataset, batch_sampler=batches, **options)
        loader.set_epoch = batches.set_epoch  # the stock loop calls it
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Whole batches, divided over the data ranks. Raises: DataError `trainer-data`."""
        named = isinstance(eval_dataset, str)
        dataset = (
            self.eval_dataset[eval_dataset] if named else self.eval_dataset if eval_dataset is None else eval_dataset
        )
        if dataset is None:
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]  # which says what is missing
        return self._evaluation_loader(dataset, "Evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As `get_eval_dataloader`."""
        return self._evaluation_loader(test_dataset, "test")

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step, over all data ranks."""
        data_ranks = self.parallel.pipeline.mesh.sample_place[1]
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * data_ranks

    def _evaluation_loader(self, dataset: Any, description: str) -> DataLoader:
        refuse_iterated(dataset, description.lower())
        batches = EvaluationBatches(
            len(dataset), self.args.per_device_eval_batch_size, self.parallel.pipeline.mesh.sample_place
        )
        dataset, options = self._loading(dataset, description)
        return EvaluationLoader(dataset, batches, **options)

    def _loading(self, dataset: Any, description: str) -> tuple[Any, dict[str, Any]]:
        """The data set with the columns that the model reads, and how the stock Trainer loads it."""
        args, stock = self.args, cast(Any, self)
        collate = stock.data_collator
        if _is_hub_dataset(dataset):
            dataset = stock._remove_unused_columns(dataset, description=description)
        else:
            collate = stock._get_collator_with_removed_columns(collate, description=description)
        return dataset, dict(
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )


def _is_hub_dataset(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset`, whose columns can be removed at once."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")


def _seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """As the stock Trainer seeds its workers: here the ranks of one data rank seed them alike."""
    from transformers.trainer_utils import seed_worker

    seed_worker(worker_id, num_workers=num_workers, rank=rank)


# -- rank batches ----------------------------------------------------------------------------------------------------
# Which samples this rank gets in the loops of a trainer: global batches in training, every batch once in evaluation.
# Both are functions of the data and the batch sizes. The ranks along tp and pp get the samples of their data rank.


class MicroBatches(Sampler[list[int]]):
    """This rank's part of each batch that the data ranks run at once; `accumulated` of these are a global batch. A
    batch sampler.

    An iteration is one epoch from its beginning: a trainer skips the batches that a resumed run has taken.

    Args:
        num_samples: the number of samples in the data set.
        global_batch_size: samples of an optimizer step, over all data ranks.
        accumulated: forwards of each rank in an optimizer step.
        seed, shuffle, drop_last, mesh: as for `GlobalBatches`. `drop_last` drops the samples that are no full global
            batch.

    Raises: ShapeError `indivisible-batch`, `no-batches`.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        accumulated: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        mesh: Any,
    ):
        size = global_batch_size // accumulated
        rest, data_ranks = num_samples % size, MeshView.of(mesh).sample_place[1]
        if not drop_last and rest % data_ranks:
            what = f"the last {rest} samples of an epoch cannot be split over {data_ranks} data ranks"
            raise ShapeError(
                Problem("indivisible-batch", what, fix="dataloader_drop_last=True in the TrainingArguments")
            )
        self.batches = GlobalBatches(num_samples, size, seed=seed, shuffle=shuffle, drop_last=drop_last, mesh=mesh)
        self.global_batch_size, self.accumulated = global_batch_size, accumulated
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.batches.epoch, self.batches.batches_done = self.epoch, 0
        return islice(iter(self.batches), len(self))

    def __len__(self) -> int:
        if self.batches.drop_last:
            return self.batches.num_samples // self.global_batch_size * self.accumulated
        return self.batches.steps_per_epoch

    def order(self) -> dict[str, Any]:
        """What decides which samples each optimizer step gets, whatever the mesh."""
        saved = self.batches.state_dict()
        names = ("num_samples", "seed", "shuffle", "drop_last")
        return {"global_batch_size": self.global_batch_size} | {name: saved[name] for name in names}


class EvaluationBatches(Sampler[list[int]]):
    """Batch i of the data set, in its order, goes to data rank i modulo their number. A batch sampler.

    Each rank gets the same number of batches: where they do not divide, the last ones of some ranks are repetitions, of
    which `counts` says 0. So each batch is evaluated as one process would, on any mesh.

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
