"""What each rank does in the tests of the order of samples."""

from __future__ import annotations

from typing import Any

import torch

from tests.training.trainers.trainer_jobs import run_trainer

HELD_OUT = 58  # the number of the first sample of the evaluation


def samples(count: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples of different lengths, each of which begins with its own number."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for index in range(first, first + count):
        ids = torch.randint(3, 67, (5 + (7 * index) % 9,), generator=generator)
        ids[0] = index
        data.append({"input_ids": ids, "labels": ids})
    return data


def drawn(
    rank: int, folder: str, axes: dict[str, int] | None, options: dict[str, Any], count: int, **settings: Any
) -> dict[str, Any]:
    """A run on a mesh, or of the stock Trainer on one process. Returns what it has logged, and the samples of each
    batch."""
    batches: list[list[int]] = []  # of training

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if rows[0]["input_ids"][0] < HELD_OUT:
            batches.append([int(row["input_ids"][0]) for row in rows])
        ids = torch.zeros(len(rows), 16, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for place, row in enumerate(rows):
            ids[place, : len(row["input_ids"])] = row["input_ids"]
            labels[place, : len(row["labels"])] = row["labels"]
        return {"input_ids": ids, "labels": labels}

    extras = {"train_dataset": samples(count), "eval_dataset": samples(8, HELD_OUT), "data_collator": collate}
    outcome = run_trainer(rank, folder, axes, options, extras=extras, **settings)
    return outcome | {"batches": batches}
