"""The loaders of a `ParallelTrainer`: every data rank gets its part of global batches that do not depend on the
mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from torch.utils.data import DataLoader, Sampler

from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.mesh_view import MeshView
from parallelize.training.trainers.served_options import refuse_iterated
from parallelize.training.trainers.stock_order import StockOrder, stock_order


class TrainerLoaders:
    """The methods of the stock Trainer that make loaders, without accelerate's division over all processes."""

    parallel: Any
    args: Any
    train_dataset: Any
    eval_dataset: Any
    train_batches: MicroBatches | None = None
    has_stages: bool
    accumulated: int

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this data rank, whose samples are those of the stock Trainer on one process.

        Raises: DataError `trainer-data`; ModelError `trainer-option`; ShapeError `indivisible-batch`, `no-batches`.
        """
        args: Any = self.args
        if self.train_dataset is None:
            return super().get_train_dataloader()  # type: ignore[misc]  # which says what is missing
        refuse_iterated(self.train_dataset, "training")
        self.train_batches = batches = self._train_batches()
        dataset, options = self._loading(self.train_dataset, "Training")
        seeded = partial(
            _seed_worker, num_workers=args.dataloader_num_workers, rank=self.parallel.pipeline.mesh.sample_place[0]
        )
        options |= dict(persistent_workers=args.dataloader_persistent_workers, worker_init_fn=seeded)
        loader: Any = DataLoader(dataset, batch_sampler=batches, **options)
        loader.set_epoch = batches.set_epoch  # the stock loop calls it
        return loader

    def _train_batches(self) -> MicroBatches:
        args, pipeline = self.args, self.parallel.pipeline
        size = self.get_total_train_batch_size(args)
        return MicroBatches(
            stock_order(self, size),
            size,
            args.gradient_accumulation_steps,
            at_once=size // self.accumulated,
            microbatches=pipeline.batches.num_microbatches if self.has_stages else 1,
            drop_last=args.dataloader_drop_last,
            mesh=self.parallel.mesh,
        )

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
        sampler = cast(Any, self)._get_eval_sampler(dataset)
        order = range(len(dataset)) if sampler is None else list(sampler)
        batches = EvaluationBatches(
            order, self.args.per_device_eval_batch_size, self.parallel.pipeline.mesh.sample_place
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
        order: of the samples of each epoch.
        global_batch_size: samples of an optimizer step, over all data ranks.
        accumulated: forwards of each rank in an optimizer step.
        at_once: samples of a forward of the stock Trainer on one process. Less than a global batch over `accumulated`
            where a pipeline runs the forwards of a step together.
        microbatches: into which each rank splits its part.
        drop_last: drop the samples that do not fill `at_once`, as the stock Trainer does.
        mesh: a DeviceMesh with any axes.

    Raises: ShapeError `indivisible-batch`, `no-batches`.
    """

    def __init__(
        self,
        order: StockOrder,
        global_batch_size: int,
        accumulated: int,
        *,
        at_once: int,
        microbatches: int = 1,
        drop_last: bool,
        mesh: Any,
    ):
        self._order, self.global_batch_size, self.size = order, global_batch_size, global_batch_size // accumulated
        self.num_samples = order.num_samples // at_once * at_once if drop_last else order.num_samples
        self.data_index, self.data_ranks = MeshView.of(mesh).sample_place
        self._check_sizes(microbatches, drop_last)
        self.epoch = 0

    def _check_sizes(self, microbatches: int, drop_last: bool) -> None:
        ranks = f"{self.data_ranks} data ranks"
        if self.size % self.data_ranks:
            what = f"a global batch of {self.size} samples cannot be split over {ranks}"
            raise ShapeError(Problem("indivisible-batch", what, fix=f"use a multiple of {self.data_ranks}"))
        if not self.num_samples:
            what = f"{self._order.num_samples} samples make no batch of {self.size}"
            raise ShapeError(Problem("no-batches", what, fix="a smaller batch, or dataloader_drop_last=False"))
        rest = self.num_samples % self.size
        if rest % (self.data_ranks * microbatches):
            parts = ranks if microbatches == 1 else f"{ranks} of {microbatches} microbatches each"
            what = f"the last {rest} samples of an epoch cannot be split over {parts}"
            fix = "dataloader_drop_last=True in the TrainingArguments"
            if drop_last:
                fix = "gradient_accumulation_steps=1: the pipeline splits a step into its microbatches"
            raise ShapeError(Problem("indivisible-batch", what, fix=fix))

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        samples = self._order.epoch(self.epoch)
        for start in range(0, self.num_samples, self.size):
            count = min(self.size, self.num_samples - start) // self.data_ranks
            first = start + self.data_index * count
            yield samples[first : first + count].tolist()

    def __len__(self) -> int:
        return -(-self.num_samples // self.size)

    def order(self) -> dict[str, Any]:
        """What decides which samples each optimizer step gets, whatever the mesh."""
        taken = {"num_samples": self._order.num_samples, "samples_of_an_epoch": self.num_samples}
        return {"global_batch_size": self.global_batch_size, **taken, "sampling": self._order.sampling} | (
            {} if self._order.sampling == "sequential" else {"seed": self._order.seed}
        )


class EvaluationBatches(Sampler[list[int]]):
    """Batch i of the data set, in the stock order, goes to data rank i modulo their number. A batch sampler.

    Each rank gets the same number of batches: where they do not divide, the last ones of some ranks are repetitions, of
    which `counts` says 0. So each batch is evaluated as one process would, on any mesh.

    Args:
        order: the samples, as one process would take them.
        batch_size: samples of one forward.
        data_rank: (index, number) of this data rank.
    """

    def __init__(self, order: Sequence[int], batch_size: int, data_rank: tuple[int, int]):
        starts = range(0, len(order), batch_size)
        index, count = data_rank
        rounds = -(-len(starts) // count)
        positions = [round_number * count + index for round_number in range(rounds)]
        self._batches = [
            list(order[start : start + batch_size])
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
