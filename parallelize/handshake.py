"""Ranks that disagree find out before anything else is sent: one exchange of digests through the store.

The store needs no matching collectives, so a rank that is late, missing, or about to fail is named instead of waited for.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.errors import HandshakeError, ParallelizeError, Problem, short_list
from parallelize.groups import Group

TIMEOUT_S = 60.0
_DIGEST_BLOCK = 1 << 20
Facts = dict[str, str]


def handshake(mesh: DeviceMesh, facts: Facts, timeout_s: float = TIMEOUT_S) -> None:
    """Compare `facts` over all ranks of the mesh.

    The mesh's first rank reads what every rank has posted and posts the verdict; every other rank reads that one key.

    Raises: HandshakeError `ranks-disagree` naming keys and ranks, `ranks-missing` after `timeout_s`: on every rank.
    """
    ranks = mesh.mesh.flatten().tolist()
    store = private.default_store()
    if len(ranks) < 2 or store is None or dist.get_backend() == "fake":
        return
    me = dist.get_rank()
    base = f"parallelize/handshake/{'-'.join(map(str, ranks)) if len(ranks) < 64 else hash(tuple(ranks))}"
    turn = store.add(f"{base}/turn/{me}", 1)
    prefix = f"{base}/{turn}"
    store.set(f"{prefix}/facts/{me}", zlib.compress(json.dumps(facts).encode()))
    if me == ranks[0]:
        verdict, missing = _judge(store, prefix, ranks, time.monotonic() + timeout_s)
        for rank in missing:  # it did not take this turn: pass it over, so that the next one meets again
            store.add(f"{base}/turn/{rank}", max(0, turn - store.add(f"{base}/turn/{rank}", 0)))
        store.set(f"{prefix}/verdict", json.dumps([[p.slug, p.what, p.rows, p.fix] for p in verdict]))
    else:
        verdict = _await_verdict(store, prefix, ranks, timeout_s + 5.0)
    if verdict:
        raise HandshakeError(*verdict)


@contextmanager
def agree_on(mesh: DeviceMesh, timeout_s: float = TIMEOUT_S) -> Iterator[Facts]:
    """Check and decide inside, write down what must be the same on every rank; compared when the block ends.

    A mistake that a rank finds inside is raised there, and every other rank learns of it: nobody goes on alone.

    Raises: what the block raises; HandshakeError.
    """
    facts: Facts = {"torch": torch.__version__}
    failure = None
    try:
        yield facts
    except ParallelizeError as error:
        failure = error
    facts["error"] = ", ".join(failure.slugs) if failure else "none"
    try:
        handshake(mesh, compressed(facts), timeout_s)
    except ParallelizeError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def _judge(store: dist.Store, prefix: str, ranks: list[int], deadline: float) -> tuple[list[Problem], list[int]]:
    """What the first rank finds: (problems, ranks that posted nothing in time)."""
    facts, missing = {}, []
    for rank in ranks:
        left = max(0.05, deadline - time.monotonic())
        try:
            store.wait([f"{prefix}/facts/{rank}"], timedelta(seconds=left))
            facts[rank] = json.loads(zlib.decompress(store.get(f"{prefix}/facts/{rank}")))
        except (RuntimeError, dist.DistError):
            missing.append(rank)
    problems = [_missing(missing)] if missing else []
    return problems + _differences(facts), missing


def _await_verdict(store: dist.Store, prefix: str, ranks: list[int], timeout_s: float) -> list[Problem]:
    try:
        store.wait([f"{prefix}/verdict"], timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError):
        return [_missing([rank for rank in ranks if not store.check([f"{prefix}/facts/{rank}"])] or ranks[:1])]
    verdict = json.loads(store.get(f"{prefix}/verdict"))
    return [Problem(slug, what, rows=tuple(map(tuple, rows)), fix=fix) for slug, what, rows, fix in verdict]


def _missing(ranks: list[int]) -> Problem:
    return Problem(
        "ranks-missing",
        f"ranks {short_list([str(rank) for rank in ranks])} did not call parallelize_module in time",
        fix="call it on every rank of the mesh; look at those ranks' own errors",
    )


def _differences(facts: dict[int, Facts]) -> list[Problem]:
    """One problem naming every key on which ranks differ, and who says what."""
    rows = []
    if len({one.get("error") for one in facts.values()}) > 1:  # the other differences only follow from it
        facts = {rank: {"error": one.get("error", "none")} for rank, one in facts.items()}
    for key in sorted({key for one in facts.values() for key in one}):
        said: dict[str, list[str]] = {}
        for rank, one in facts.items():
            said.setdefault(one.get(key, "absent"), []).append(str(rank))
        if len(said) > 1:
            rows.append((key, "; ".join(f"ranks {short_list(who, 6)}: {what[:80]}" for what, who in said.items())))
    if not rows:
        return []
    more = [("and", f"{len(rows) - 20} more keys")] if len(rows) > 20 else []
    return [
        Problem(
            "ranks-disagree",
            f"ranks differ in {len(rows)} of the things that must be the same",
            rows=tuple(rows[:20] + more),
            fix="start every rank with the same plan, model and settings",
        )
    ]


def compressed(facts: Facts, most: int = 400) -> Facts:
    """Facts of a large model with the surplus folded into one digest, so that what is posted stays small."""
    if len(facts) <= most:
        return facts
    keys = sorted(facts)
    rest = "\n".join(f"{key}={facts[key]}" for key in keys[most:])
    return {key: facts[key] for key in keys[:most]} | {"(the rest)": hashlib.sha256(rest.encode()).hexdigest()[:16]}


def check_replicas(group: Group, tensors: Mapping[str, torch.Tensor], what: str, axis: str = "tp") -> None:
    """Compare tensors that must be equal on every rank of the group, by digest.

    Raises: HandshakeError `replicas-differ` naming tensors and ranks, on every rank.
    """
    names = [name for name, tensor in tensors.items() if not tensor.is_meta]
    if group.size == 1 or not names:
        return
    digests = torch.stack([digest(tensors[name]) for name in names])
    everyone = group.all_gather(digests)
    rows = []
    for place, name in enumerate(names):
        odd = [group.ranks[r] for r in range(group.size) if not torch.equal(everyone[r, place], everyone[0, place])]
        if odd:
            rows.append((name, f"ranks {short_list([str(rank) for rank in odd])} differ from rank {group.ranks[0]}"))
    if rows:
        raise HandshakeError(
            Problem(
                "replicas-differ",
                f"{len(rows)} {what} that must be equal over {axis} are not",
                rows=tuple(rows[:20]),
                fix=f"give the ranks of one {axis} group the same data and the same initial weights",
            )
        )


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """[4] int64 of a tensor's shape, dtype and content: a changed bit, or a changed order, changes it."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for number, block in enumerate(raw.split(_DIGEST_BLOCK)):  # in blocks, because each byte becomes an int64
        place = torch.arange(1, block.numel() + 1, device=raw.device) + number * _DIGEST_BLOCK
        mixed = (block.to(torch.int64) + 1) * (place * 2654435761 % 2147483647)
        sums += torch.stack([mixed.sum(), (mixed % 2147483629 * (place % 65521)).sum()])
    kind = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    return torch.cat([sums, torch.tensor([kind, tensor.numel()], device=raw.device)])


def watch_inputs(module: nn.Module, group: Group) -> None:
    """Compare every tensor input of each forward of `module` over the group."""

    def check(_: nn.Module, args: tuple, kwargs: dict) -> None:
        named = {f"input {i}": arg for i, arg in enumerate(args)} | kwargs
        check_replicas(group, {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}, "inputs")

    module.register_forward_pre_hook(check, with_kwargs=True)
