"""Copies of a tied parameter on several stages are updated alike, or the next step says how they are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallelize import Checkpointer, build_mesh, full_state_dict, parallelize_model
from parallelize.axes.pipeline import ties as ties_module
from parallelize.base.errors import HandshakeError, ParallelizeError
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


TIED = "model.embed_tokens.weight"
TAKES_FULL_TENSORS = [
    ({"pp": 2}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"pp": 2, "dp": 2}, {"zero": 1}),
    ({"pp": 2, "dp": 2}, {"zero": 2, "dtype": "bfloat16"}),
]
ON_MESHES = pytest.mark.parametrize(
    ("axes", "options"), [*TAKES_FULL_TENSORS, ({"pp": 2, "dp": 2}, {"zero": 3})], ids=str
)


def after_a_step(axes: dict[str, int], options: dict[str, Any], change: Callable[[int, Any], None]) -> list[str]:
    """A step; `change(rank, model)`; and another step, in which nothing but copies of ties is compared. Texts of its
    errors."""
    base = tiny_model("llama", tie_word_embeddings=True)

    def body(rank: int) -> str:
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(copy.deepcopy(base), mesh, num_microbatches=2, compare_every=100, **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01)
        ids, labels = tiny_batch(seed=mesh.get_local_rank("dp") if "dp" in axes else 0)
        parallel.step(input_ids=ids, targets=labels)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            change(rank, parallel.module)
        try:
            parallel.step(input_ids=ids, targets=labels)
        except HandshakeError as error:
            assert all(parameter.grad is None for parameter in parallel.module.parameters())
            return str(error)
        parallel.check_ties()
        return ""

    return run_ranks(2 * axes.get("dp", 1) * axes.get("tp", 1), body)


def doubled(*names: str) -> Callable[[int, Any], None]:
    def change(_: int, module: Any) -> None:
        for name, parameter in module.named_parameters():
            if any(part in name for part in names):
                parameter.mul_(2)

    return change


@pytest.mark.variants(every=3)
@ON_MESHES
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_edit_of_one_copy_is_named_in_the_next_step(axes, options, name):
    texts = after_a_step(axes, options, doubled(name))
    assert len(set(texts)) == 1 and "ties-differ: copies of 1 tied parameters" in texts[0]
    assert TIED in texts[0] and "the copies on ranks 0, " in texts[0] and "are not equal" in texts[0]


@pytest.mark.variants(every=1)
@ON_MESHES
def test_edits_of_all_copies_and_more_writes_of_equal_values_are_accepted(axes, options):
    assert set(after_a_step(axes, options, doubled("embed_tokens", "lm_head"))) == {""}

    def writes_again(_: int, module: Any) -> None:
        for name, parameter in module.named_parameters():
            if "lm_head" in name:
                parameter.mul_(1.0)

    assert set(after_a_step(axes, options, writes_again)) == {""}


@pytest.mark.variants(every=4)
@pytest.mark.parametrize(("axes", "options"), TAKES_FULL_TENSORS, ids=str)
@pytest.mark.parametrize("left_out", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head"), ()], ids=str)
def test_a_state_dict_without_all_names_of_a_tie_is_loaded_into_all_copies(axes, options, left_out):
    source = tiny_model("llama", seed=7, tie_word_embeddings=True).state_dict()
    values = {name: value for name, value in source.items() if not any(part in name for part in left_out)}
    base = tiny_model("llama", tie_word_embeddings=True)
    expected = source if len(left_out) < 2 else base.state_dict()

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", **axes), num_microbatches=2, **options)
        parallel.module.load_state_dict(values, strict=False)
        parallel.check_ties()
        full = full_state_dict(parallel.module, every_rank=True)
        copies = [value for name, value in full.items() if "lm_head" in name or "embed_tokens" in name]
        dtype = next(
            parallel.module.parameters()
        ).dtype  # what is loaded is rounded to; full weights are the float32 ones
        assert copies and all(torch.equal(value.to(dtype), expected[TIED].to(dtype)) for value in copies)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.0)
        optimizer.step()  # of float32 copies, which must have followed
        parallel.check_ties()
        after = full_state_dict(parallel.module, every_rank=True)
        assert all(torch.equal(after[name], full[name]) for name in full)

    run_ranks(2 * axes.get("dp", 1) * axes.get("tp", 1), body)


def test_the_value_that_is_loaded_last_wins_as_in_the_unsharded_model():
    base = tiny_model("llama", tie_word_embeddings=True)
    values = {name: value.clone() for name, value in base.state_dict().items()}
    values["lm_head.weight"] *= 2

    def body(rank: int) -> bool:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", pp=2), num_microbatches=2)
        parallel.module.load_state_dict({name: values[name] for name in parallel.module.state_dict()})
        parallel.check_ties()
        full = full_state_dict(parallel.module, every_rank=True)
        return all(
            torch.equal(full[name], values["lm_head.weight"]) for name in (TIED, "lm_head.weight") if name in full
        )

    reference = copy.deepcopy(base)
    reference.load_state_dict(values)
    assert torch.equal(reference.model.embed_tokens.weight, values["lm_head.weight"])
    assert all(run_ranks(2, body))


def test_a_load_on_one_stage_alone_names_the_others(monkeypatch):
    monkeypatch.setattr(ties_module, "LOAD_TIMEOUT_S", 0.5)
    base = tiny_model("llama", tie_word_embeddings=True)
    values = base.state_dict()

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", pp=2), num_microbatches=2)
        if rank == 0:
            with pytest.raises(HandshakeError) as error:
                parallel.module.load_state_dict(values, strict=False)
            assert error.value.slugs == ("ranks-missing",) and "ranks 1 did not call load_state_dict" in str(
                error.value
            )

    run_ranks(2, body)
