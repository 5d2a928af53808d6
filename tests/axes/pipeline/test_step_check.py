"""Ranks that diverge are named in the step in which they do, before anything is computed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from parallelize.axes.pipeline.step_check import _content
from parallelize.base.errors import HandshakeError, ShapeError
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

MESHES = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 2}]


def run(axes: dict[str, int], change: Callable[[int, Any, dict], Any], **options: Any) -> list[str]:
    """A right step, a changed one and another right one on every rank. Returns the texts of the changed one's
    errors."""
    base = tiny_model("llama", torch.float64)
    size = math.prod(axes.values())
    if "pp" in axes:
        options["num_microbatches"] = 2

    def body(rank: int) -> str:
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(copy.deepcopy(base), mesh, **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
        data = mesh.get_local_rank("dp") if "dp" in axes else 0

        def call(change: Callable[[int, Any, dict], Any] | None) -> None:
            ids, labels = tiny_batch(seed=data, length=8)
            batch: dict[str, Any] = {"input_ids": ids, "targets": labels}
            step = (change and change(rank, (parallel, optimizer), batch)) or parallel.step
            step(**batch)
            optimizer.step()
            optimizer.zero_grad()

        call(None)
        try:
            call(change)
        except (HandshakeError, ShapeError) as error:
            assert all(p.grad is None for p in parallel.module.parameters())
            return str(error)
        return ""

    return run_ranks(size, body)


def on_last(act: Callable[[Any, dict], Any], size: int) -> Callable[[int, Any, dict], Any]:
    """The change of the last rank."""
    return lambda rank, parts, batch: act(parts, batch) if rank == size - 1 else None


def changed(name: str) -> Callable[[Any, dict], None]:
    def change(_: Any, batch: dict) -> None:
        batch[name] = batch[name].clone()
        batch[name][0, 0] += 1

    return change


def shorter(_: Any, batch: dict) -> None:
    batch["input_ids"], batch["targets"] = batch["input_ids"][:, :4], batch["targets"][:, :4]


def evaluation(parts: Any, _: dict) -> Any:
    parts[0].module.eval()


def other_rate(parts: Any, _: dict) -> None:
    parts[1].param_groups[0]["lr"] = 1e-2


def another_epsilon(parts: Any, _: dict) -> None:
    parts[1].param_groups[0]["eps"] = 1e-5


def evaluates(parts: Any, _: dict) -> Any:
    return parts[0].evaluate


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("axes", [mesh for mesh in MESHES if mesh != {"dp": 2}], ids=str)
@pytest.mark.parametrize(
    ("change", "row"),
    [(changed("input_ids"), "input_ids"), (changed("targets"), "targets"), (shorter, "input_ids")],
    ids=["inputs", "targets", "lengths"],
)
def test_ranks_of_one_data_rank_with_other_batches_are_named(axes, change, row):
    size = 2 * len(axes)
    texts = run(axes, on_last(change, size))
    assert len(set(texts)) == 1 and "ranks-diverged" in texts[0]
    assert row in texts[0] and f"ranks {size - 1}: " in texts[0]


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("change", "row"),
    [
        (evaluation, "training=False"),
        (evaluates, "evaluate"),
        (other_rate, "group 0, lr  ranks"),
        (another_epsilon, "group 0, eps  ranks"),
    ],
    ids=["mode", "call", "rate", "epsilon"],
)
def test_ranks_with_other_settings_are_named(axes, change, row):
    size = 2 * len(axes)
    texts = run(axes, on_last(change, size))
    assert len(set(texts)) == 1 and "ranks-diverged" in texts[0] and row in texts[0]


def test_a_step_that_one_rank_skips_is_named_in_the_next():
    base = tiny_model("llama", torch.float64)

    def body(rank: int) -> str:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=0)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=1e-3)
        ids, labels = tiny_batch(seed=rank)
        parallel.step(input_ids=ids, targets=labels)
        if rank == 0:
            optimizer.step()
        with pytest.raises(HandshakeError) as error:
            parallel.step(input_ids=ids, targets=labels)
        return str(error.value)

    texts = run_ranks(2, body)
    assert len(set(texts)) == 1 and "SGD, steps" in texts[0] and "ranks 0: 1; ranks 1: 0" in texts[0]


def test_data_ranks_may_have_other_batches_and_lengths():
    def lengths(rank: int, parts: Any, batch: dict) -> None:
        if rank >= 2:
            shorter(parts, batch)

    assert run({"dp": 2, "tp": 2}, lengths) == [""] * 4


def test_stages_may_have_other_parameter_groups():
    def rates(rank: int, parts: Any, batch: dict) -> None:
        parts[1].param_groups[0]["lr"] = 1e-3 * (rank + 1)

    assert run({"pp": 2}, rates) == ["", ""]


def test_an_error_of_one_rank_reaches_the_others():
    def indivisible(_: Any, batch: dict) -> None:
        batch["input_ids"], batch["targets"] = batch["input_ids"][:1], batch["targets"][:1]

    texts = run({"dp": 2}, on_last(indivisible, 2), num_microbatches=2)
    assert "ranks-diverged" in texts[0] and "indivisible-batch" in texts[0]
    assert "indivisible-batch" in texts[1] and "ranks-diverged" not in texts[1]


def test_the_check_can_be_turned_off():
    assert run({"dp": 2}, on_last(other_rate, 2), check_replicated=False) == ["", ""]


def test_ids_that_differ_little_have_other_digests():
    """Sums of ids times odd factors are equal for the first two: 5 + 3 x 7 is 8 + 3 x 6."""
    ids = [[5, 7], [8, 6], [7, 5], [5, 8], [6, 7], [0, 0]]
    assert len({int(_content(torch.tensor(pair))) for pair in ids}) == len(ids)
