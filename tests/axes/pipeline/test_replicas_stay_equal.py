"""Ranks that store the same parameters go on to store the same values, or the first comparison after it says which do
not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize import build_mesh, parallelize_model
from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.replicas import BUCKETS, apart, sketches, tolerance_of
from parallelize.base.errors import HandshakeError
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

T = torch.Tensor
Write = Callable[[int, Any], None]


def run(axes: dict[str, int], write: Write | None, steps: int = 2, before: int = 1, **options: Any) -> list[list[str]]:
    """The text of each step's error on every rank, or no text. write(rank, model): runs after `before` steps."""
    base = tiny_model("llama", options.pop("weights", torch.float64), tie_word_embeddings=options.pop("tied", False))
    if "pp" in axes:
        options["num_microbatches"] = 2
    options = {"compare_every": 1, **options}

    def body(rank: int) -> list[str]:
        mesh = build_mesh("cpu", **axes)
        parallel = parallelize_model(copy.deepcopy(base), mesh, **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01)
        data = [mesh.get_local_rank(axis) for axis in ("dp_replicate", "dp", "dp_shard") if axis in axes]
        ids, labels = tiny_batch(seed=sum(data), length=8)
        texts = []
        for step in range(steps):
            if step == before and write is not None:
                with torch.no_grad():
                    write(rank, parallel.module)
            try:
                parallel.step(input_ids=ids, targets=labels)
                texts.append("")
            except HandshakeError as error:
                assert all(p.grad is None for p in parallel.module.parameters())
                texts.append(str(error))
            optimizer.step()
            optimizer.zero_grad()
        return texts

    return run_ranks(math.prod(axes.values()), body)


def written(part: str, ranks: tuple[int, ...], factor: float = 1.5) -> Write:
    """Elements of the local tensors of parameters with this part in their names, changed on these ranks alone."""

    def write(rank: int, module: Any) -> None:
        for name, parameter in module.named_parameters():
            if part in name and rank in ranks:
                to_local(parameter).data.view(-1)[:3] *= factor

    return write


def last_texts(results: list[list[str]]) -> set[str]:
    """The error of the last step, which is the same on every rank and alone."""
    assert all(not any(texts[:-1]) for texts in results)
    return {texts[-1] for texts in results}


COPIES = [
    ({"dp": 2}, {"zero": 0}),
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 2}, {"zero": 2, "dtype": "bfloat16", "weights": torch.float32}),
    ({"cp": 2}, {}),
    ({"dp_replicate": 2, "dp_shard": 2}, {"zero": 3}),
    ({"dp": 2, "tp": 2}, {"zero": 1}),
    ({"pp": 2, "dp": 2}, {"zero": 0}),
]


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(("axes", "options"), COPIES, ids=str)
def test_a_copy_of_one_data_rank_is_named_in_the_next_step(axes, options):
    size = math.prod(axes.values())
    part = "layers.1.mlp.up_proj"  # on the last stage, and on every rank of tp another shard
    (text,) = last_texts(run(axes, written(part, (size - 1,)), **options))
    assert "replicas-differ" in text and "1 parameters" in text and "compare_every" in text
    other = size - 3 if set(axes) == {"dp_replicate", "dp_shard"} or set(axes) == {"dp", "tp"} else size - 2
    assert f"model.{part}.weight  ranks {size - 1} differ from rank {other}" in text


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_replica_over_tp_is_named_in_the_next_step(axes, sequence_parallel):
    size = math.prod(axes.values())
    changed = (1, 3) if "dp" in axes else (size - 1,)  # on both data ranks, whose copies are then equal
    write = written("layers.1.input_layernorm", changed)
    (text,) = last_texts(run(axes, write, sequence_parallel=sequence_parallel))
    assert "replicas-differ" in text
    assert all(f"layers.1.input_layernorm.weight  ranks {rank} differ from rank {rank - 1}" in text for rank in changed)


def test_replicas_over_tp_may_differ_by_rounding_and_copies_of_data_ranks_may_not():
    write = written("layers.1.input_layernorm", (1,), 1 + 1e-12)
    assert last_texts(run({"tp": 2}, write)) == {""}
    assert "replicas-differ" in last_texts(run({"dp": 2}, write)).pop()


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_nan_on_one_rank_is_named(axes):
    write = written("layers.1.input_layernorm", (1,), math.nan)
    assert "replicas-differ" in last_texts(run(axes, write)).pop()


def test_the_first_call_and_every_nth_compare():
    write = written("up_proj", (1,))
    assert "replicas-differ" in last_texts(run({"dp": 2}, write, steps=1, before=0, compare_every=100)).pop()
    assert "replicas-differ" in last_texts(run({"dp": 2}, write, steps=4, compare_every=3)).pop()
    assert last_texts(run({"dp": 2}, write, steps=3, compare_every=3)) == {""}


@pytest.mark.parametrize("options", [{"compare_every": 0}, {"check_replicated": False}], ids=str)
def test_the_comparison_can_be_turned_off(options):
    assert last_texts(run({"dp": 2}, written("up_proj", (1,)), before=0, steps=1, **options)) == {""}


RIGHT = [
    *COPIES,
    ({"tp": 2}, {}),
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"pp": 2}, {"tied": True}),
    ({"pp": 2, "dp": 2}, {"tied": True, "zero": 1}),
    ({"pp": 2, "dp": 2}, {"tied": True, "zero": 2, "dtype": "bfloat16"}),
    ({"pp": 2, "dp": 2}, {"tied": True, "zero": 3}),
    ({"pp": 2, "tp": 2}, {"tied": True}),
]


@pytest.mark.variants(every=6)
@pytest.mark.parametrize(("axes", "options"), RIGHT, ids=str)
def test_training_is_compared_without_alarm(axes, options, monkeypatch):
    """No facts are gathered either, which is what happens where a message is not 0."""

    def alarm(*_: Any, **__: Any) -> None:
        raise AssertionError("facts are gathered")

    monkeypatch.setattr(dist, "all_gather_object", alarm)
    assert last_texts(run(axes, None, steps=4, **{"weights": torch.float32, **options})) == {""}


def test_a_sketch_estimates_the_distance_of_tensors():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(300_000, generator=generator, dtype=torch.float64)
    noise = torch.randn(300_000, generator=generator, dtype=torch.float64) * 1e-3
    swapped = base.clone()
    swapped[:64], swapped[1 << 17 :][:64] = base[1 << 17 :][:64], base[:64]  # to the same positions of another block
    by_rank = torch.stack([sketches({"w": value}) for value in (base, base + noise, swapped, base)])
    distance = torch.linalg.vector_norm((by_rank[1] - by_rank[0])[0, :BUCKETS])
    assert 0.5 < distance / torch.linalg.vector_norm(noise) < 2.0
    assert apart(by_rank, {"w": base}).flatten().tolist() == [False, True, True, False]
    near = torch.stack([sketches({"w": value}) for value in (base, base * (1 + 1e-10))])
    assert not apart(near, {"w": base}).any()


def test_the_tolerance_follows_the_dtype():
    assert tolerance_of(torch.float64) == pytest.approx(1.5e-8, rel=0.01)
    assert tolerance_of(torch.float32) == pytest.approx(3.5e-4, rel=0.02)
    assert tolerance_of(torch.bfloat16) == pytest.approx(0.088, rel=0.01)
    assert tolerance_of(torch.int64) == 0.0
