"""The handshake: ranks compare facts through the store before anything else is sent.

The store needs no matching collectives, so a rank that is late, missing or about to fail is named, instead of a
deadlock.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from parallelize.base.agreement import Facts, text_digest
from parallelize.base.errors import HandshakeError, ParallelizeError, Problem, short_list
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private.torch_tensors import uncounted
from parallelize.comm.groups import Group
from parallelize.comm.meeting import Meeting
from parallelize.comm.mesh_view import MeshView
from parallelize.comm.uncaught_errors import publish_uncaught_errors

TIMEOUT_S = 60.0
_DIGEST_BLOCK = 1 << 17
"""Words of eight bytes that a digest multiplies at once."""


def handshake(mesh: MeshView, facts: Facts, timeout_s: float = TIMEOUT_S, call: str = "parallelize_module") -> None:
    """Compare `facts` over all ranks of the mesh. call: what all of them have called.

    The mesh's first rank compares a digest of each rank's facts, reads facts where digests differ, and posts a verdict;
    every other rank reads only the verdict.

    Raises: HandshakeError on every rank: `ranks-disagree` with keys and ranks, `rank-failed` as soon as a rank has
        ended with an error, or `ranks-missing` after `timeout_s`.
    """
    compare_facts(mesh.ranks, facts, timeout_s, call)


def compare_facts(
    ranks: list[int], facts: Facts, timeout_s: float = TIMEOUT_S, call: str = "parallelize_module"
) -> None:
    """`handshake` of these global ranks, the first of which is the judge. call: what all of them have called."""
    store = private_groups.default_store()
    if len(ranks) < 2 or store is None or dist.get_backend() == "fake":
        return
    publish_uncaught_errors()
    Meeting(store, tuple(ranks), dist.get_rank(), call).compare(facts, timeout_s)


@contextmanager
def agree_on(mesh: MeshView, timeout_s: float = TIMEOUT_S, call: str = "parallelize_module") -> Iterator[Facts]:
    """Collect facts that must be the same on every rank inside the block; they are compared when the block ends.

    An error of this package that is raised inside the block becomes a fact, so that every rank fails if one does.

    Raises: what the block raises; HandshakeError.
    """
    facts: Facts = {"torch": torch.__version__, "mesh": str(mesh.spec)}
    failure = None
    try:
        yield facts
    except ParallelizeError as error:
        failure = error
    facts["error"] = ", ".join(failure.slugs) if failure else "none"
    try:
        handshake(mesh, compressed(facts), timeout_s, call)
    except ParallelizeError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def silent_ranks(ranks: list[int], occasion: str, timeout_s: float) -> list[int]:
    """The ranks that do not come here within `timeout_s`: those of a failed collective that every other rank noticed.

    Args:
        occasion: distinguishes calls; the same on every rank.

    Returns: their numbers, in ascending order; none where the store is lost too.
    """
    store = private_groups.default_store()
    if store is None:
        return []
    silent, deadline = [], time.monotonic() + timeout_s
    key = f"parallelize/present/{occasion}"
    try:
        store.set(f"{key}/{dist.get_rank()}", "")
    except (RuntimeError, dist.DistError):
        return []
    for rank in ranks:
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
        except (RuntimeError, dist.DistError):
            silent.append(rank)
    return silent


def compressed(facts: Facts, most: int = 400) -> Facts:
    """At most `most` facts, with the others folded into one digest, so that the posted text of a large model stays
    small."""
    if len(facts) <= most:
        return facts
    keys = sorted(facts)
    rest = "\n".join(f"{key}={facts[key]}" for key in keys[most:])
    return {key: facts[key] for key in keys[:most]} | {"(the rest)": text_digest(rest).hex()}


def check_replicas(
    group: Group, tensors: Mapping[str, torch.Tensor], what: str, axis: str = "tp", fix: str = ""
) -> None:
    """Compare tensors that must be equal on every rank of the group, by digest.

    Args:
        group: the ranks that are compared.
        tensors: this rank's tensors by name, in an order that all ranks have. Those on meta have no values, and are
            left out.
        what: what the tensors are. axis: the axes of the group. fix: what to do about it. All three are for the
            message.

    Raises: HandshakeError `replicas-differ` with tensors and ranks, on every rank of the group.
    Cost: one all-gather of 40 bytes; only where something differs, another one of 32 bytes per tensor, to name it.
        PyTorch's `CommDebugMode` does not count them: they belong to no operation of the model.
    """
    with uncounted():
        _compare_replicas(group, tensors, what, axis, fix)


def _compare_replicas(group: Group, tensors: Mapping[str, torch.Tensor], what: str, axis: str, fix: str) -> None:
    present = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    if group.size == 1 or not present or "fake" in group.backends.values():
        return
    device = _device_for(group, next(iter(present.values())).device)
    digests = torch.stack([digest(tensor).to(device) for tensor in present.values()])
    count = torch.tensor([len(present)], device=device)
    all_digests = group.all_gather(torch.cat([count, digest(digests)]))
    if not _unequal(all_digests):
        return
    rows = [("their number", f"ranks {_ranks(group, _unequal(all_digests[:, :1]))} differ from rank {group.ranks[0]}")]
    if not _unequal(all_digests[:, :1]):
        gathered = group.all_gather(digests)
        different = {name: _unequal(gathered[:, n]) for n, name in enumerate(present)}
        rows = [
            (name, f"ranks {_ranks(group, ranks)} differ from rank {group.ranks[0]}")
            for name, ranks in different.items()
            if ranks
        ]
    raise HandshakeError(
        Problem(
            "replicas-differ",
            f"{len(rows)} {what} that must be equal over {axis} are not",
            rows=tuple(rows[:20]),
            fix=fix or f"give the ranks of one {axis} group the same data",
        )
    )


def over_ranks(group: Group, number: int, device: torch.device) -> list[int]:
    """Each rank's `number`, in the order of the group.

    device: that of the tensors which are sent next. Where nothing can be sent (meta tensors, a fake group, a compiler,
    a CUDA
        graph that is captured), the numbers are taken to be this rank's.
    Cost: one all-gather of 8 bytes, which the host waits for. PyTorch's `CommDebugMode` does not count it.
    """
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    silent = device.type == "meta" or "fake" in group.backends.values() or torch.compiler.is_compiling() or captured
    if group.size == 1 or silent:
        return [number] * group.size
    with uncounted():
        own = torch.tensor([number], device=_device_for(group, device))
        return group.all_gather(own).flatten().tolist()


def _unequal(by_rank: torch.Tensor) -> list[int]:
    """The indices of the ranks whose values [ranks, ...] are not those of the first."""
    return [rank for rank, values in enumerate(by_rank) if not torch.equal(values, by_rank[0])]


def _ranks(group: Group, indices: list[int]) -> str:
    return short_list([str(group.ranks[index]) for index in indices])


def _device_for(group: Group, device: torch.device) -> torch.device:
    """A device that the group can send from: the given one, if possible."""
    types = [kind for kind in group.backends if kind]
    return device if not types or device.type in types else torch.device(types[0])


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A digest [4] int64 of a tensor's shape, dtype and content. It depends on every bit and on the order of elements.

    Two sums of the content's 64-bit words, each times an odd number of its own: one of the products, which no change of
    a single word leaves as it is, and one of the products' mixed bits, in which changes of several words do not cancel.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        raw = F.pad(raw, (0, -raw.numel() % 8))
    all_words, sums = raw.view(torch.int64), torch.zeros(2, dtype=torch.int64, device=raw.device)
    odd = torch.arange(1, 2 * min(_DIGEST_BLOCK, all_words.numel()) + 1, 2, device=raw.device) * 0x1E3779B97F4A7C15
    for words in all_words.split(_DIGEST_BLOCK):  # in blocks, because the products need memory too
        products = words * odd[: words.numel()]
        sums = sums * 0x5851F42D4C957F2D + torch.stack([products.sum(), (products ^ (products >> 29)).sum()])
    kind = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    return torch.cat([sums, torch.tensor([kind, tensor.numel()], device=raw.device)])


# -- input check -----------------------------------------------------------------------------------------------------
# Compares the inputs of a planned model's forwards, and the targets of losses of sharded logits, over `tp`.


_FIX = (
    "give the ranks of one tp group the same batch: GlobalBatches(len(dataset), size, mesh=mesh) does, "
    "DistributedSampler and "
    "accelerate's prepare divide over all processes unless told otherwise (`check_loader(loader, mesh)` tells); "
    "check_replicated=False turns this check off"
)


class InputCheck:
    """A forward pre-hook that compares tensor inputs, by digest: the ranks of a tp group must have the same batch.

    Args:
        every: compare in the first forward in training, in the first in evaluation, and in every n-th of each after it.
            Targets are counted by themselves, with and without gradients. 1 compares all tensors; otherwise those of
            integers and booleans, such as ids and masks, because hidden states may be shards where a part of a model is
            called.

    Attributes:
        compared: whether the caller of the forward has compared the inputs, as a step does with its own message.

    Raises: HandshakeError `replicas-differ`, on every rank.
    Cost: of a forward that compares: one all-gather of 40 bytes over `tp`, which the host waits for. Not under
        `torch.compile`.
    """

    def __init__(self, group: Group, every: int):
        self.group, self.every = group, every
        self.compared = False
        self._calls: Counter[tuple[str, bool]] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> InputCheck:
        return memo.setdefault(id(self), InputCheck(self.group, self.every))

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.compare("inputs", {f"input {i}": arg for i, arg in enumerate(args)} | kwargs, module.training)

    def compare(self, what: str, named: dict[str, Any], training: bool) -> None:
        """Compare those of these values that are tensors, if it is their turn. Calls are counted by `what` and
        `training`."""
        if torch.compiler.is_compiling() or self.compared:
            return
        number = self._calls[what, training]
        self._calls[what, training] += 1
        if number % self.every == 0:
            tensors = {name: value for name, value in named.items() if self._is_compared(value)}
            check_replicas(self.group, tensors, what, fix=_FIX)

    def _is_compared(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (self.every == 1 or not value.is_floating_point())
