"""What real processes send and hold in a step, counted apart from the package's own recorder."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import build_mesh, parallelize_model
from parallelize.analysis.memory import memory_of
from parallelize.analysis.setting import Setting
from parallelize.analysis.subject import Subject
from parallelize.groups import Group, mesh_spec
from parallelize.mesh import SAMPLE_AXES, MeshSpec
from parallelize.model_source import ModelSource
from parallelize.ops import exchange, library
from parallelize.zero.apply import data_of
from parallelize.zero.buckets import local
from tests.support.models import tiny_batch, tiny_model

OPS = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}


class Counting(TorchDispatchMode):
    """Counts (op, axis, ranks, bytes) of what this rank gives to its process groups."""

    def __init__(self, spec: Any):
        super().__init__()
        self.spec, self.found = spec, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d" and not func.__name__.startswith("alltoall_base_"):
            op, counted = OPS[func.__name__.split(".")[0]]
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))
            size = sum(x.numel() * x.element_size() for x in pytree.tree_leaves(args[counted]))
            point = op in ("send", "recv")
            self.found[op, self._axis(ranks), 2 if point else len(ranks), size] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Counting:
        """Ops with collectives inside hide them from modes: what those send is counted where it is sent."""
        post, trade = exchange._post, dist.all_to_all_single

        def posting(group: Any, send: Any, receive: Any, tag: int) -> Any:
            size = sum(x.numel() * x.element_size() for x in send.values())
            self.found["send", self._axis(list(group.ranks)), 2, size] += 1
            return post(group, send, receive, tag)

        def trading(out: Any, x: Any, *sizes: Any, group: Any, **rest: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            self.found["all_to_all", self._axis(ranks), len(ranks), x.numel() * x.element_size()] += 1
            return trade(out, x, *sizes, group=group, **rest)

        self._patches = [
            mock.patch.object(exchange, "_post", posting),
            mock.patch.object(dist, "all_to_all_single", trading),
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for patch in self._patches:
            patch.stop()
        super().__exit__(*error)

    def _axis(self, ranks: list[int]) -> str:
        here = [self.spec.coordinates(rank) for rank in ranks]
        moving = [axis for axis in self.spec.names if len({one[axis] for one in here}) > 1]
        return "world" if len(moving) > 1 and len(ranks) == self.spec.world_size else "*".join(moving)


@dataclass
class Trained:
    """A model on this process's mesh that has done one step, in which stages told each other what will travel."""

    parallel: Any
    optimizer: Any
    spec: MeshSpec
    inputs: dict[str, Any]

    def coordinate(self, axis: str) -> int:
        return self.spec.coordinates(dist.get_rank()).get(axis, 0)


def trained(
    family: str, sizes: dict[str, int], batch: int, length: int, options: dict[str, Any], model: dict[str, Any]
) -> Trained:
    mesh = build_mesh("cpu", **sizes)
    parallel = parallelize_model(tiny_model(family, **model), mesh, **options)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    here = mesh_spec(mesh).coordinates(dist.get_rank())
    seed = 1 + sum(here.get(axis, 0) * 7**n for n, axis in enumerate(SAMPLE_AXES))
    ids, labels = tiny_batch(batch=batch, length=length, seed=seed)
    inputs = {"input_ids": ids, "targets": labels, **({} if family == "bert" else {"use_cache": False})}
    parallel.step(**inputs)
    optimizer.step()
    optimizer.zero_grad()
    return Trained(parallel, optimizer, mesh_spec(mesh), inputs)


def sent(rank: int, *given: Any) -> Any:
    """(pp rank, tp rank, what was sent in a step and the optimiser's). given: as `trained`."""
    one = trained(*given)
    with Counting(one.spec) as counting:
        one.parallel.step(**one.inputs)
        one.optimizer.step()
    return one.coordinate("pp"), one.coordinate("tp") + one.coordinate("cp"), dict(counting.found)


def source_of(family: str, model: dict[str, Any]) -> ModelSource:
    """The tiny model of the tests, as a source."""
    return ModelSource(family, lambda _: tiny_model(family, **model))


def foretold(
    family: str, sizes: dict[str, int], batch: int, length: int, options: dict[str, Any], model: dict[str, Any]
) -> dict[int, dict[tuple, int]]:
    """The same by the package, for each rank of the pipeline."""
    setting = Setting(MeshSpec(**sizes), batch=batch, sequence=length, transport="gloo", **options)
    subject = Subject(source_of(family, model))
    found = {}
    for pp_rank in range(setting.size("pp")):
        counts: Counter[tuple] = Counter()
        for message, times in subject.rank_step(setting, setting.pipeline(), pp_rank).messages:
            counts[message.op, message.axis, message.ranks, message.bytes] += times
        found[pp_rank] = dict(counts)
    return found


class Holding(TorchDispatchMode):
    """Follows every storage that ops make, from its making to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self._serials: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == library.NAMESPACE:  # an op that hides what it makes on the way
            name = func._schema.name.partition("::")[2]
            group = Group.by_key(library.group_key(name, args))
            with self:
                return library.KERNELS[name](*library.with_group(name, args, group))
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._hold(leaf.untyped_storage())
        return out

    def __enter__(self) -> Holding:
        stock = self._stock = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:  # `fully_shard` lets go of storages by this
            out = stock(storage, size)
            self._resized(storage)
            return out

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._stock
        super().__exit__(*error)

    def _hold(self, storage: Any) -> None:
        if storage._cdata not in self._serials and storage.nbytes():
            serial = len(self.events) + 1
            self._serials[storage._cdata] = serial
            self._sizes[serial] = storage.nbytes()
            self.events.append((serial, storage.nbytes()))
            weakref.finalize(storage, self._let_go, storage._cdata, serial)

    def _resized(self, storage: Any) -> None:
        serial = self._serials.get(storage._cdata)
        if serial is None:
            self._hold(storage)
        else:
            self.events.append((serial, storage.nbytes() - self._sizes.get(serial, 0)))
            self._sizes[serial] = storage.nbytes()

    def _let_go(self, key: int, serial: int) -> None:
        self._serials.pop(key, None)
        self.events.append((serial, -self._sizes.pop(serial)))

    def known(self, tensors: Any) -> None:
        for x in tensors:
            self._serials[x.untyped_storage()._cdata] = 0

    def serial_of(self, x: torch.Tensor) -> int | None:
        return self._serials.get(x.untyped_storage()._cdata)

    def peak(self, without: set[int]) -> int:
        now = most = 0
        for serial, size in self.events:
            now += 0 if serial in without else size
            most = max(most, now)
        return most


def held(rank: int, *given: Any) -> Any:
    """(pp rank, tp rank, dp rank, bytes): parameters, gradients, optimiser state, the peak of activations, buffers."""
    one = trained(*given)
    parallel, optimizer = one.parallel, one.optimizer
    params = [local(p) for p in parallel.module.parameters()]
    data = data_of(parallel.module)
    flat = [bucket.flat for bucket in getattr(data and data.engine, "buckets", ()) if hasattr(bucket, "flat")]
    tries = []
    for _ in range(3):  # what Python's collector has not come to yet makes some higher
        optimizer.zero_grad()
        with Holding() as holding:
            holding.known([*params, *parallel.module.buffers(), one.inputs["input_ids"], one.inputs["targets"], *flat])
            parallel.step(**one.inputs)
        gradients = [local(p.grad) for p in parallel.module.parameters() if p.grad is not None]
        tries.append(holding.peak({serial for grad in gradients if (serial := holding.serial_of(grad))}))
    grads = [local(p.grad) for p in parallel.module.parameters() if p.grad is not None]
    state = [
        local(x) for kept in optimizer.state.values() for x in kept.values() if isinstance(x, torch.Tensor) and x.ndim
    ]
    masters = [local(s.stepped) for s in (data.shards if data is not None else ()) if s.has_master]
    found = {
        "parameters": _distinct(params),
        "gradients": _distinct([*grads, *flat]),
        "optimizer": _distinct([*state, *masters]),
        "activations": min(tries),
        "buffers": _distinct(list(spare._free)) if (spare := getattr(data and data.engine, "_spare", None)) else 0,
    }
    return one.coordinate("pp"), one.coordinate("tp"), one.coordinate("dp"), found


def _distinct(tensors: list[torch.Tensor]) -> int:
    """Bytes of storages, each once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def foretold_memory(
    family: str, sizes: dict[str, int], batch: int, length: int, options: dict[str, Any], model: dict[str, Any]
) -> dict[int, dict[str, int]]:
    """The same by the package, for each rank of the pipeline."""
    options = dict(options)
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    setting = Setting(MeshSpec(**sizes), batch=batch, sequence=length, transport="gloo", **options)
    subject = Subject(source_of(family, model))
    found = {}
    for pp_rank in range(setting.size("pp")):
        memory = memory_of(subject.rank_step(setting, setting.pipeline(), pp_rank))
        found[pp_rank] = {
            key: getattr(memory, key) for key in ("parameters", "gradients", "optimizer", "activations", "buffers")
        }
    return found
