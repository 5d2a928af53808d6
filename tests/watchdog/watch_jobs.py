"""What ranks of a pool run under a watch that finds nothing wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from parallelize import build_mesh, parallelize_module, watch
from parallelize.base.errors import HandshakeError
from tests.support.models import tiny_batch, tiny_model


def trains_as_without(rank: int, folder: str) -> list[Any]:
    """Batches of many lengths, with a watch and without: the same losses; afterwards everything is as it was."""
    before = stock()
    losses = [losses_of(folder if watched else None) for watched in (True, False)]
    return [losses, before == stock(), sys.excepthook is sys.__excepthook__ or "uncaught" in sys.excepthook.__module__]


def losses_of(folder: str | None) -> list[float]:
    mesh = build_mesh("cpu", tp=2)
    model = parallelize_module(tiny_model("llama"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_watch = watch(mesh, timeout_s=30, folder=folder) if folder else None
    losses = []
    for length in (16, 24, 16, 8, 24):
        ids, labels = tiny_batch(length=length)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    if open_watch is not None:
        open_watch.close()
    return losses


def stock() -> dict[str, Any]:
    methods = {name: value for name, value in vars(dist.ProcessGroup).items() if callable(value)}
    return {"wait": vars(dist.Work)["wait"], **{name: id(value) for name, value in methods.items()}}


def calls_and_places(rank: int, folder: str) -> dict[str, Any]:
    """What the watch knows of a forward, a backward and a call of the script: texts of calls by the order of calls."""
    from parallelize.watchdog.rank_state import rank_state
    from parallelize.watchdog.verdict import call_text

    mesh = build_mesh("cpu", tp=2)
    model = parallelize_module(tiny_model("llama"), mesh)
    ids, labels = tiny_batch()
    with watch(mesh, timeout_s=30, folder=Path(folder)) as opened:
        model(input_ids=ids, labels=labels).loss.backward()
        dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
        state = rank_state(opened.watched.log, opened.thread.standing, rank, 2)
    (group,) = state["groups"].values()
    return {"axis": group["axis"], "total": state["total"], "recent": [call_text(call) for call in group["recent"]]}


def differs_in_dtype(rank: int, folder: str) -> str:
    """Two ranks give tensors of other dtypes to one collective."""
    with watch(timeout_s=30, folder=Path(folder)):
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.float32 if rank else torch.float64))
        except HandshakeError as error:
            return f"{error.slugs[0]} {error}"
    return ""


def takes_the_maximum(rank: int, folder: str) -> list[str]:
    """One rank sums, the other takes the maximum: refused, also where an earlier step has called both alike."""
    tensor, texts = torch.ones(3), []
    with watch(timeout_s=30, folder=Path(folder)):
        for step in range(3):
            operation = dist.ReduceOp.MAX if step == 2 and rank else dist.ReduceOp.SUM
            try:
                dist.all_reduce(tensor, op=operation)
            except HandshakeError as error:
                texts.append(f"{error.slugs[0]} {error}")
    return texts


def redistributes_alone(rank: int, folder: str) -> str:
    """One rank gathers a DTensor, which PyTorch does from C++, and the other calls a collective of its own."""
    mesh = build_mesh("cpu", tp=2)
    shard = DTensor.from_local(torch.ones(3), mesh["tp"], [Shard(0)], run_check=False)
    with watch(mesh, timeout_s=30, folder=Path(folder)):
        try:
            if rank:
                shard.full_tensor()
            else:
                dist.all_reduce(torch.ones(5), group=mesh.get_group("tp"))
        except HandshakeError as error:
            return f"{error.slugs[0]} {error}"
    return ""


def waits_at_the_gate(rank: int, folder: str) -> list[float]:
    """How long the first rank stands in a comparison for which the other one comes late, by its watch, and how long it
    was."""
    mesh = build_mesh("cpu", tp=2)
    with watch(mesh, timeout_s=30, folder=Path(folder)) as opened:
        if rank:
            time.sleep(1.5)
            dist.all_reduce(torch.ones(5))
            return []
        stood, get_all = [], opened.watched.channel.get_all

        def slow(keys: list[str]) -> Any:
            opened.thread.standing.sample()
            stood.append(opened.thread.standing.stands_s)
            time.sleep(0.01)
            return get_all(keys)

        opened.watched.channel.get_all = slow  # type: ignore[method-assign]
        began = time.monotonic()
        dist.all_reduce(torch.ones(5))
        return [max(stood), time.monotonic() - began]


def is_known_at_once(rank: int, folder: str) -> bool:
    """Whether a rank that opens a watch can be told from one that never did, before the watch's thread has had a
    turn."""
    with watch(timeout_s=300, folder=Path(folder) / "reports") as opened:
        assert opened.watched is not None
        return bool(opened.watched.channel.get(f"hb/{rank}"))
