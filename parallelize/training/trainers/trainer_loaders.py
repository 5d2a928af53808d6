"""The loaders of a `ParallelTrainer`: every data rank gets its part of global batches that do not depend on the mesh."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch.utils.data import DataLoader

from parallelize.base.mesh import SAMPLE_AXES
from parallelize.state.stored_slices import data_rank
from parallelize.training.trainers.rank_batches import EvaluationBatches, EvaluationLoader, MicroBatches
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
            _seed_worker, num_workers=args.dataloader_num_workers, rank=data_rank_of(self.parallel.mesh)[0]
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
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * data_rank_of(self.parallel.mesh)[1]

    def _evaluation_loader(self, dataset: Any, description: str) -> DataLoader:
        refuse_iterated(dataset, description.lower())
        batches = EvaluationBatches(
            len(dataset), self.args.per_device_eval_batch_size, data_rank_of(self.parallel.mesh)
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


def data_rank_of(mesh: Any) -> tuple[int, int]:
    """(index, number) of this data rank: ranks that get other samples."""
    return data_rank(mesh, SAMPLE_AXES)


def _is_hub_dataset(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset`, whose columns can be removed at once."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")


def _seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """As the stock Trainer seeds its workers: here the ranks of one data rank seed them alike."""
    from transformers.trainer_utils import seed_worker

    seed_worker(worker_id, num_workers=num_workers, rank=rank)
