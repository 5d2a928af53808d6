"""Copies of a tied parameter on several stages are updated alike, or the next step says how they are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallelize import Checkpointer, build_mesh, parallelize_model
from parallelize.errors import HandshakeError, ParallelizeError
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks


def run(change: Callable[[Any], Any], axes: dict[str, int], zero: int = 0) -> list[str]:
    """The error of each rank's second step after a change, or no text. change: (the model) to parameter groups."""
    base = tiny_model("llama", torch.float64, tie_word_embeddings=True)

    def body(rank: int) -> str:
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(copy.deepcopy(base), mesh, num_microbatches=2, zero=zero)
        groups = change(parallel.module)
        optimizer = parallel.optimizer(torch.optim.AdamW, groups, lr=0.01)
        ids, labels = tiny_batch(seed=mesh.get_local_rank("dp") if "dp" in axes else 0)
        try:
            for _ in range(2):
                parallel.step(input_ids=ids, targets=labels)
                optimizer.step()
                optimizer.zero_grad()
        except HandshakeError as error:
            return str(error)
        parallel.check_ties()
        return ""

    return run_ranks(2 * axes.get("dp", 1), body)


def no_decay_by_name(*names: str) -> Callable[[Any], Any]:
    def groups(module: Any) -> list[dict]:
        free = {name: p for name, p in module.named_parameters() if any(part in name for part in names)}
        others = [p for name, p in module.named_parameters() if name not in free]
        groups = [{"params": others, "weight_decay": 0.5}, {"params": list(free.values()), "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    return groups


def frozen(*names: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name, parameter in module.named_parameters():
            if any(part in name for part in names):
                parameter.requires_grad_(False)

    return change


MESHES = [({"pp": 2}, 0), ({"pp": 2, "dp": 2}, 2)]


@pytest.mark.parametrize(("axes", "zero"), MESHES, ids=str)
def test_groups_by_the_name_of_one_copy_are_named(axes, zero):
    texts = run(no_decay_by_name("embed_tokens"), axes, zero)
    assert len(set(texts)) == 1 and "ranks-diverged" in texts[0]
    assert (
        "tie model.embed_tokens.weight, AdamW, weight_decay  ranks 0: 0.0; ranks " in texts[0] and ": 0.5" in texts[0]
    )


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_one_frozen_copy_is_named_and_does_not_wait(name):
    texts = run(frozen(name), {"pp": 2})
    assert len(set(texts)) == 1 and "ranks-diverged" in texts[0]
    assert "tie model.embed_tokens.weight, requires_grad" in texts[0]


@pytest.mark.parametrize(
    ("change", "axes", "zero"),
    [(frozen, *MESHES[0]), *((no_decay_by_name, *mesh) for mesh in MESHES)],
    ids=["frozen", "decay", "decay-zero"],
)
def test_copies_with_the_same_settings_are_accepted(change, axes, zero):
    assert set(run(change("embed_tokens", "lm_head"), axes, zero)) == {""}


def test_copies_that_differ_are_not_saved(tmp_path):
    base = tiny_model("llama", torch.float64, tie_word_embeddings=True)

    def body(rank: int) -> str:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", pp=2), num_microbatches=2)
        checkpointer = Checkpointer(tmp_path, parallel)
        checkpointer.save(1)
        with torch.no_grad():
            for name, parameter in parallel.module.named_parameters():
                if "embed_tokens" in name:
                    parameter[5:8] = 0.123
        with pytest.raises(ParallelizeError) as error:
            checkpointer.save(2)
        return str(error.value)

    assert all("ties-differ" in text for text in run_ranks(2, body))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("2")]
