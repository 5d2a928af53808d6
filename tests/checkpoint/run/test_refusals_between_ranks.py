"""Ranks that do not save or load the same thing are refused with the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from parallelize import Checkpointer, ParallelizeError, build_mesh, load_checkpoint
from parallelize.base.agreement import ranks_by_value
from parallelize.checkpoint.run import local_tensors
from tests.support.threads import run_ranks


def refused_on_two_ranks(work: Callable[[int], object]) -> list[ParallelizeError]:
    """Each rank's error."""

    def body(rank: int) -> ParallelizeError:
        with pytest.raises(ParallelizeError) as caught:
            work(rank)
        return caught.value

    return run_ranks(2, body)


def save(root: Path, model: nn.Module, step: int) -> None:
    with Checkpointer(root, model, mesh=build_mesh("cpu", dp=2)) as checkpoints:
        checkpoints.save(step)


def test_a_model_without_a_mesh_in_one_of_two_processes(tmp_path):
    for error in refused_on_two_ranks(lambda rank: Checkpointer(tmp_path, nn.Linear(4, 3))):
        assert error.slugs == ("partial-mesh",)
        assert "2 processes run, and the model's mesh has 1 of them" in str(error) and "mesh=" in str(error)


def test_ranks_that_save_two_steps_as_one(tmp_path):
    for error in refused_on_two_ranks(lambda rank: save(tmp_path, nn.Linear(4, 3), 10 + rank)):
        (problem,) = error.problems
        assert problem.slug == "steps-differ"
        assert problem.rows == (("rank 0", "save(10)"), ("rank 1", "save(11)"))
        assert problem.fix == "call save with the same step on every rank"
    assert not [path for path in tmp_path.iterdir() if "step" in path.name]


def test_ranks_whose_weights_have_other_dtypes(tmp_path, monkeypatch):
    monkeypatch.setattr(local_tensors, "SPLIT_BYTES", 8)  # so that both ranks write rows of this small weight

    def work(rank: int) -> None:
        save(tmp_path, nn.Linear(4, 6, bias=False, dtype=[torch.float32, torch.bfloat16][rank]), 1)

    for error in refused_on_two_ranks(work):
        (problem,) = error.problems
        assert problem.slug == "ranks-differ" and "model/weight" in problem.what
        assert problem.rows == (("rank 0", "F32 [6, 4]"), ("rank 1", "BF16 [6, 4]"))
        assert "on every rank" in problem.fix
    assert not [path for path in tmp_path.iterdir() if "step" in path.name]


def test_ranks_that_load_from_different_folders(tmp_path):
    for rank in range(2):
        with Checkpointer(tmp_path / str(rank), nn.Linear(4, 3)) as checkpoints:
            checkpoints.save(1)
    layers = [nn.Linear(4, 3), nn.Linear(4, 3)]
    before = [layer.weight.detach().clone() for layer in layers]

    def work(rank: int) -> None:
        load_checkpoint(tmp_path / str(rank), layers[rank], mesh=build_mesh("cpu", dp=2))

    for error in refused_on_two_ranks(work):
        (problem,) = error.problems
        assert problem.slug == "other-checkpoint" and "pass the same folder on every rank" in problem.fix
        assert [label for label, _ in problem.rows] == ["rank 0", "rank 1"]
        for rank, (_, text) in enumerate(problem.rows):
            assert text.startswith(f"{tmp_path / str(rank) / 'step-00000001'} (manifest ")
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, before, strict=True))


def test_a_problem_of_one_rank_names_that_rank(tmp_path):
    def work(rank: int) -> None:
        save(tmp_path, nn.Linear(4, 3, dtype=[torch.float32, torch.complex32][rank]), 1)

    own, other = sorted(refused_on_two_ranks(work), key=lambda error: len(error.problems[0].rows))
    assert own.slugs == other.slugs == ("unsavable-dtype",)
    assert own.problems[0].rows == () and other.problems[0].rows == (("on", "rank 1"),)


def test_rows_of_a_problem_join_ranks_with_the_same_value():
    rows = ranks_by_value([(0, "a"), (3, "b"), (2, "a"), (1, "a")])
    assert rows == (("ranks 0, 1, 2", "a"), ("rank 3", "b"))
